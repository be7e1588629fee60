"""How many tokens a text takes, and texts that are cut to a number of them with the cut marked. Pure.

There is no tokenizer here, since each model has its own; whoever has one passes it as a ``Count``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Count: TypeAlias = Callable[[str], int]
"""Returns how many tokens a text takes, at least 0; longer texts take no fewer."""

_DENSE = b" ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LETTERS_PER_TOKEN = 3


def estimate(text: str) -> int:
    """Return how many tokens a text takes at most, or nearly so.

    ASCII letters and spaces count three to a token; English has more than four. Digits, signs and line
    breaks count one each. Everything else counts one for each byte of its UTF-8, which is the most that
    any tokenizer with bytes to fall back on can take: three for a Chinese character, four for most emoji.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    others = len(encoded.translate(None, _DENSE))
    return others - (others - len(encoded)) // _LETTERS_PER_TOKEN


def cut(text: str, room: int, *, count: Count = estimate) -> str:
    """Return a text in at most ``room`` tokens: two thirds from its beginning, one from its end.

    Between them stands a mark with the number of characters that are missing. Where the room does not even
    hold the mark, the mark stands alone: what is missing is never left unsaid.
    """
    if count(text) <= room:
        return text
    least, most = 0, len(text) - 1
    while least < most:
        kept = (least + most + 1) // 2
        if count(_cut_to(text, kept)) <= room:
            least = kept
        else:
            most = kept - 1
    return _cut_to(text, least)


def _cut_to(text: str, kept: int) -> str:
    tail = kept // 3
    head, end = text[: kept - tail], text[len(text) - tail :]
    parts = (head, f"[... {len(text) - kept:,} characters cut ...]", end)
    return "\n".join(part for part in parts if part)
