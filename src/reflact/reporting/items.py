"""Items of a run with the target's answers for a terminal: a table of many, or one in full."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from pydantic import JsonValue
from rich import box
from rich.table import Table
from rich.text import Text

from reflact.records import CodeFailure, ComparisonCategory, Usage
from reflact.reporting.lines import escape_controls, escape_line, format_count
from reflact.training.items import DocumentResult, ItemResult
from reflact.types import Split

CATEGORY_WORDS: dict[ComparisonCategory, str] = {
    "improved": "better",
    "regressed": "worse",
    "persistent_failure": "still wrong",
    "stable_success": "right under both",
}
TEXTS = ("input", "expected", "baseline", "best")
ID_CELLS, SCORE_CELLS, COST_CELLS, SEPARATOR_CELLS, INDENT_CELLS = 10, 12, 7, 8, 2
MIN_TEXT_CELLS, TEXT_LINES = 8, 2
"""The least width of a column of text, and the most lines of one of its cells."""


def choose_items(
    items: Sequence[ItemResult], *, wrong: bool = False, changed: bool = False
) -> tuple[ItemResult, ...]:
    """Return the items that the best document gets wrong, or whose score it changed, or both."""
    return tuple(
        item
        for item in items
        if not (wrong and not item.wrong) and not (changed and item.category not in {"improved", "regressed"})
    )


def build_item_table(items: Sequence[ItemResult], *, width: int) -> Table:
    """Return a table of items for a width in cells.

    Each item has a row if its texts fit into it, otherwise a row for each text, which loses its middle if it is long.
    """
    priced = any(_find_price(item) is not None for item in items)
    cells = max((width - ID_CELLS - SCORE_CELLS - COST_CELLS - SEPARATOR_CELLS) // len(TEXTS), MIN_TEXT_CELLS)
    rows = [(item, [escape_line(text) for text in _list_texts(item)]) for item in items]
    longest = max((len(text) for _, texts in rows for text in texts), default=0)
    if longest > TEXT_LINES * cells:
        return _build_stacked_table(rows, width=width, priced=priced)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("item", max_width=ID_CELLS, overflow="fold")
    for name in TEXTS:
        table.add_column(name, max_width=cells, overflow="fold")
    table.add_column("score", justify="right", max_width=SCORE_CELLS)
    table.add_column("cost" if priced else "tokens", justify="right", max_width=COST_CELLS)
    for item, texts in rows:
        shown = (Text(text) for text in (escape_line(item.item_id), *texts))
        table.add_row(*shown, format_scores(item), _format_cost(item, priced=priced))
    return table


def _build_stacked_table(
    rows: Sequence[tuple[ItemResult, Sequence[str]]], *, width: int, priced: bool
) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, max_width=max(map(len, TEXTS)) + INDENT_CELLS)
    cells = max(width - max(map(len, TEXTS)) - INDENT_CELLS - 2, MIN_TEXT_CELLS)
    table.add_column(overflow="fold")
    for item, texts in rows:
        cost = f"{_format_cost(item, priced=priced)}{'' if priced else ' tokens'}"
        word = "not measured under both" if item.category is None else CATEGORY_WORDS[item.category]
        heading = f"{escape_line(item.item_id)}  {format_scores(item)}, {word}, {cost}"
        table.add_row(Text("item"), Text(heading, style="bold"))
        for name, text in zip(TEXTS, texts, strict=True):
            table.add_row(Text(f"{' ' * INDENT_CELLS}{name}"), Text(shorten_middle(text, cells)))
    return table


def _list_texts(item: ItemResult) -> tuple[str, ...]:
    answers = (_format_answer(item.baseline), _format_answer(item.best))
    return (format_value(item.input), format_value(item.expected), *answers)


def list_item_lines(item: ItemResult) -> Iterator[str]:
    """Yield an item in full: input, expected answer, and each document's conversations, scores and costs."""
    kind = "" if item.task_type is None else f", {item.task_type}"
    words = "" if item.category is None else f": {CATEGORY_WORDS[item.category]}"
    yield escape_controls(f"{item.item_id} ({item.split.value}{kind}){words}")
    yield from _list_block("input", format_value(item.input))
    if item.expected is not None:
        yield from _list_block("expected", format_value(item.expected))
    for name, result in (("baseline", item.baseline), ("best", item.best)):
        usage = "" if result.usage is None else f", {_format_usage(result.usage)}"
        if not result.rollouts:
            yield from _list_block(name, f"not measured: {result.error or 'no stored rollout'}")
        for number, rollout in enumerate(result.rollouts, start=1):
            trial = f", trial {number}" if len(result.rollouts) > 1 else ""
            score = "-" if rollout.score is None else f"{rollout.score.hard:.3g}"
            if rollout.score is not None and rollout.score.soft != rollout.score.hard:
                score += f" (soft {rollout.score.soft:.3g})"
            heading = f"{name}{trial}, score {score}{usage if number == 1 else ''}"
            yield from _list_block(heading, rollout.answer)
            if len(rollout.turns) > 2:
                for turn in rollout.turns:
                    yield from _list_block(f"  {turn.role}", turn.content)


def list_failure_lines(failure: CodeFailure) -> Iterator[str]:
    """Yield an exception of the caller's own code with its traceback."""
    where = f"step {failure.step}" + ("" if failure.item_id is None else f", item {failure.item_id}")
    yield from _list_block(escape_line(f"exception in {where}"), failure.traceback)


def summarize_items(items: Sequence[ItemResult], split: Split) -> str:
    """Return how many items of a split are better, worse, still wrong, and right under both documents."""
    counts = Counter(item.category for item in items)
    words = [f"{counts[category]} {word}" for category, word in CATEGORY_WORDS.items()]
    words += [f"{counts[None]} not measured under both"] if counts[None] else []
    return f"{len(items)} {split.value} items: {', '.join(words)}"


def format_value(value: JsonValue) -> str:
    """Return a text as it is, nothing for None, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def format_scores(item: ItemResult) -> str:
    """Return the hard scores under both documents, such as ``0 -> 1``."""
    before, after = ("-" if r.hard is None else f"{r.hard:.2g}" for r in (item.baseline, item.best))
    return f"{before} -> {after}"


def shorten_middle(text: str, length: int) -> str:
    """Return a text of at most ``length`` characters; a longer one loses its middle, since its ends tell most."""
    if len(text) <= length:
        return text
    head = (length - 3) // 2
    return f"{text[:head]}...{text[head + 3 - length :]}"


def _list_block(heading: str, text: str) -> Iterator[str]:
    yield f"{heading}:"
    yield from (f"    {line}" for line in escape_controls(text).split("\n"))


def _format_answer(result: DocumentResult) -> str:
    return result.answer if result.answer is not None else f"({result.error or 'not measured'})"


def _find_price(item: ItemResult) -> float | None:
    usages = [result.usage for result in (item.baseline, item.best) if result.usage is not None]
    prices = [usage.usd for usage in usages if usage.usd is not None]
    return sum(prices) if prices else None


def _format_cost(item: ItemResult, *, priced: bool) -> str:
    if priced:
        price = _find_price(item)
        return "-" if price is None else f"${price:.4f}"
    usages = [result.usage for result in (item.baseline, item.best) if result.usage is not None]
    return format_count(sum(u.input_tokens + u.output_tokens for u in usages)) if usages else "-"


def _format_usage(usage: Usage) -> str:
    price = "" if usage.usd is None else f", ${usage.usd:.4f}"
    return f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out{price}"
