"""Text for people: escaped, shortened, counted. Messages, terminals and pages all use these
functions.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue

# Line breaks, tabs, and the joiners of ordinary text.
ALLOWED_CONTROLS = "\n\t\u200c\u200d"
# Unicode categories of controls, formats, surrogates, and line and paragraph separators.
ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# The most characters of a reason in a line; the store has all of it.
MAX_REASON_CHARS = 160
# A longer word may be cut if a text loses its middle.
MAX_CUT_WORD = 20
# The most characters of a constant answer in a line.
MAX_CONSTANT_CHARS = 60
# Items that a line names.
SHOWN_ITEMS = 5
# In seconds.
MINUTE = 60
HOUR = 3600
DAY = 86400


def escape_controls(text: str) -> str:
    """Return a text with control and format characters as escapes, so that it cannot steer a
    terminal.

    Control characters move the cursor, change titles and fill the clipboard. Format characters hide
    letters and reverse the direction of text. A lone surrogate cannot be encoded at all.
    """
    text = text.replace("\r\n", "\n")
    if text.isprintable():
        return text
    return "".join(map(_escape_character, text))


def escape_line(text: str) -> str:
    """Escape as ``escape_controls`` does, and line breaks and tabs too: the result is one line."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape_character(character: str) -> str:
    if character in ALLOWED_CONTROLS or unicodedata.category(character) not in ESCAPED_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, length: int) -> str:
    """Return a text of at most ``length`` characters; a longer one loses its middle.

    The ends of a text tell most. It is cut between words if a space is near.
    """
    if len(text) <= length:
        return text
    near = min(length // 6, MAX_CUT_WORD)
    # Both ends have one character too many, which shows whether the cut is beside a space.
    head = text[: (length - 3) // 2 + 1]
    tail = text[(length - 3) // 2 + 2 - length :]
    head = head[: head.rfind(" ")] if " " in head[-near - 1 :] else head[:-1]
    tail = tail[tail.find(" ") + 1 :] if " " in tail[: near + 1] else tail[1:]
    return f"{head}...{tail}"


def shorten_reason(reason: str) -> str:
    """Return a reason for a line, with the message alone of an endpoint's JSON."""
    return shorten(replace_json(reason), MAX_REASON_CHARS)


def replace_json(text: str) -> str:
    """Return a text with the message alone of an endpoint's JSON, if it has one."""
    head, brace, tail = text.partition("{")
    with suppress(ValueError, RecursionError):
        body, end = json.JSONDecoder().raw_decode(brace + tail)
        error = body.get("error", body)
        message = error
        if isinstance(error, dict):
            message = error.get("message", error.get("detail"))
        if isinstance(message, list):  # FastAPI lists what is wrong with a request
            message = "; ".join(str(part["msg"]) for part in message if "msg" in part)
        if message and isinstance(message, str):
            return head + message + (brace + tail)[end:]
    return text


def name_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``1 trace``, ``1,200 traces``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def name_times(count: int) -> str:
    """Return how often something was measured: ``once``, ``twice``, ``3 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def list_items(item_ids: Iterable[str], noun: str = "item") -> str:
    """Return the number of items and the first of their names."""
    ids = tuple(dict.fromkeys(item_ids))
    more = f" and {len(ids) - SHOWN_ITEMS} more" if len(ids) > SHOWN_ITEMS else ""
    return f"{name_count(len(ids), noun)}: {', '.join(ids[:SHOWN_ITEMS])}{more}"


def describe_constant(text: str) -> str:
    """Return a constant answer in words, such as ``always answering "42"``."""
    if not text:
        return "always answering nothing"
    shown = shorten(" ".join(text.split()), MAX_CONSTANT_CHARS)
    return f'always answering "{shown}"'


def format_count(number: int) -> str:
    """Return a count with at most four digits: ``9,999``, ``45.2k``, ``1.23M``."""
    if number < 10_000:
        return f"{number:,}"
    for unit, name in ((1e3, "k"), (1e6, "M")):
        value = number / unit
        if value < 999.5:
            return f"{value:.3g}{name}"
    return f"{number / 1e9:.3g}G"


def format_duration(seconds: float) -> str:
    """Return a duration in one unit: ``0.4 s``, ``42 s``, ``4 min``, ``2.5 h``, ``3.0 days``."""
    for limit, unit, name in ((100, 1, "s"), (100 * MINUTE, MINUTE, "min"), (48 * HOUR, HOUR, "h")):
        if seconds < limit:
            digits = 1 if name == "h" or seconds < 1 else 0
            return f"{seconds / unit:.{digits}f} {name}"
    return f"{seconds / DAY:.1f} days"


def format_usd(usd: float) -> str:
    """Return an amount in cents; with more digits if it is smaller than a cent."""
    if usd >= 0.01 or not usd:
        return f"${usd:,.2f}"
    return f"${usd:.4f}" if usd >= 0.001 else f"${usd:.6f}"


def format_score(score: float | None) -> str:
    """Return a score with three digits, or a dash if there is none."""
    return "-" if score is None else f"{score:.3f}"


def format_change(before: float | None, after: float | None) -> str:
    """Return ``before -> after``, or only the first score if there is no second."""
    if after is None:
        return format_score(before)
    return f"{format_score(before)} -> {format_score(after)}"


def format_value(value: JsonValue) -> str:
    """Return a text as it is, nothing for None, and any other value as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def suggest_path(path: Path) -> str:
    """Return "; did you mean ...?" if a similar name stands where a path leads to nothing; else
    nothing.
    """
    with suppress(OSError):
        if path.exists():
            return ""
        missing = next(place for place in (path, *path.parents) if place.parent.is_dir())
        names = [place.name for place in missing.parent.iterdir()]
        for near in get_close_matches(missing.name, names, n=1):
            return f"; did you mean {missing.parent / near}?"
    return ""
