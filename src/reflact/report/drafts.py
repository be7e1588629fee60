"""What a model has written so far, in a few lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import JsonValue
from rich.cells import cell_len, set_cell_size

from reflact.report.visible import visible

JOINERS = re.compile("[\u200c\u200d\ufe0e\ufe0f]")
"""What joins or varies signs: terminals disagree about the width of the outcome, so signs stand alone."""

SIGNS = {"append": "+", "insert_after": "+", "replace": "~", "delete": "-", "suggest": "*", "rewrite": "*"}


class Block(NamedTuple):
    """One part of a draft: a field, or an entry of a list."""

    title: str
    text: str


def draft_lines(draft: JsonValue, *, width: int, room: int, encoding: str) -> tuple[str, ...]:
    """Return a draft in at most ``room`` lines of at most ``width`` cells, safe to show at a terminal.

    Parts that are complete have a line each, the latest ones where there are too many. The last part, which
    is still growing, has what is left, at least half: its end where it is too long.
    """
    parts = list(blocks(draft))
    if not parts or room < 1 or width < 8:
        return ()
    *closed, growing = parts
    tail = _wrapped(growing, width, max(room - len(closed), (room + 1) // 2), encoding)
    free = room - len(tail)
    heads = [_line(block, width, encoding) for block in (closed[-free:] if free else [])]
    return (*heads, *tail)


def blocks(draft: JsonValue) -> Iterator[Block]:
    """Yield the parts of a draft in the order in which they were written."""
    if not isinstance(draft, dict):
        if draft:
            yield Block("", str(draft))
        return
    for name, value in draft.items():
        if isinstance(value, list):
            yield from (_entry(name, entry) for entry in value)
        elif value is not None:
            yield Block(f"{name}: ", str(value))


def _entry(name: str, entry: JsonValue) -> Block:
    if not isinstance(entry, dict):
        return Block(f"{name}: ", str(entry))
    fields = {key: value for key, value in entry.items() if isinstance(value, str) and value}
    if name != "edits":
        return Block(f"{name}: ", ", ".join(fields.values()))
    sign = SIGNS.get(fields.get("op", "append"), "*")
    sides = [fields[side] for side in ("target", "content") if side in fields]
    return Block(f"{sign} ", " => ".join(sides))


def shown(text: str, encoding: str) -> str:
    """Return a text of unknown origin so that a terminal of an encoding shows it, one cell after another."""
    alone = JOINERS.sub("", visible(text)).replace("\t", "    ")
    return alone.encode(encoding, "backslashreplace").decode(encoding)


def cut(text: str, width: int, mark: str) -> str:
    """Return a text of one line, cut to a width in cells, with a mark where something is missing."""
    if cell_len(text) <= width:
        return text
    mark = mark[: max(width, 0)]
    return set_cell_size(text, max(width - len(mark), 0)).rstrip() + mark


def _line(block: Block, width: int, encoding: str) -> str:
    first = shown(block.title + block.text[: 4 * width], encoding)
    return cut(" ".join(first.split()), width, "...")


def _wrapped(block: Block, width: int, room: int, encoding: str) -> list[str]:
    """Return the end of a block in lines, the first of them marked where something stands before it."""
    end = block.text[-width * room :]
    lines: list[str] = []
    for line in shown(block.title + end if end == block.text else end, encoding).splitlines():
        lines += _pieces(line.rstrip(), width) if line.strip() else []
    if end != block.text or len(lines) > room:
        lines = lines[-room:]
        lines[0] = cut("..." + lines[0], width, "")
    return lines


def _pieces(line: str, width: int) -> list[str]:
    pieces = []
    while cell_len(line) > width:
        taken = _as_wide(line, width)
        space = line.rfind(" ", 0, len(taken) + 1)
        taken = line[:space] if space > len(taken) // 2 else taken
        pieces.append(taken.rstrip())
        line = line[len(taken) :].lstrip()
    return [*pieces, line]


def _as_wide(line: str, width: int) -> str:
    """Return the longest beginning of a line that fits a width."""
    size = end = 0
    while end < len(line) and (size := size + cell_len(line[end])) <= width:
        end += 1
    return line[: max(end, 1)]
