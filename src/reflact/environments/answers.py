"""How answers are read: as text that may differ in form, as words, as a number, as JSON. Pure and total."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import JsonValue

SHOWN_CHARS = 300
"""How much of a value ``quoted`` shows."""


def normalize(text: str) -> str:
    r"""Return a text as the ``normalized`` grader compares it.

    In this order: Unicode NFKC, case folding, NFKC; runs of white space become one space; white space
    and punctuation (Unicode category P, and the backtick) are cut off at both ends. Kept there are
    ``% # @ & / \``, and a dash or a leading full stop that touches a letter or a digit, since
    they carry meaning (``-5``, ``.5``, ``5%``, ``C#``).
    """
    return _strip_edges(" ".join(_fold_case(text).split()))


def tokenize(text: str) -> tuple[str, ...]:
    """Return the words of a text, as the ``token_f1`` grader counts them.

    The text is split at white space and each word goes through ``normalized``; ``a``, ``an`` and ``the``
    are left out unless the text holds nothing else.
    """
    words = tuple(bare for word in _fold_case(text).split() if (bare := _strip_edges(word)))
    return tuple(word for word in words if word not in {"a", "an", "the"}) or words


def _fold_case(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _strip_edges(text: str) -> str:
    start, end = 0, len(text)
    while start < end and _is_edge(text[start], text[start + 1 : end][:1], keeps_point=True):
        start += 1
    while start < end and _is_edge(text[end - 1], text[start : end - 1][-1:], keeps_point=False):
        end -= 1
    return text[start:end]


def _is_edge(mark: str, neighbour: str, *, keeps_point: bool) -> bool:
    if mark == "`" or mark.isspace():
        return True
    category = unicodedata.category(mark)
    if not category.startswith("P") or mark in "%#@&/\\":
        return False
    carries = category == "Pd" or (keeps_point and mark == ".")
    return not (carries and neighbour.isalnum())


_NUMBER = re.compile(
    r"(?P<sign>[+-])?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?P<exponent>e[+-]?[0-9]+)?\s*(?P<percent>%)?",
    re.IGNORECASE,
)


def parse_number(text: str) -> float | None:
    """Return the number that a text is, or None where it is anything else.

    White space at both ends is ignored. A number is decimal digits with, each optional: a sign (``+``,
    ``-`` or the minus sign U+2212), commas between groups of three digits before the decimal point, a
    decimal point, an exponent, and a per cent sign, which divides by 100 (``12.5%`` is 0.125). Never a
    number: ``1,5``, ``1.234,5``, ``$5``, ``5 km``, ``1/2``, ``0x10``, NaN, infinity and what overflows.
    """
    found = _NUMBER.fullmatch(text.strip().replace("\u2212", "-"))
    if found is None:
        return None
    digits = found["digits"].replace(",", "")
    value = float(f"{found['sign'] or ''}{digits}{found['exponent'] or ''}")
    return to_finite(value / 100 if found["percent"] else value)


def to_finite(value: float) -> float | None:
    """Return a number as a float, None where that is not finite."""
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) else None


def parse_strict_json(text: str) -> Any:
    """Return the value of a JSON text, read to the letter.

    Raises:
        ValueError: It is not JSON, repeats a name, or holds NaN, infinity or a number out of range.
        RecursionError: It is nested too deeply.
    """
    return json.loads(
        text, object_pairs_hook=_build_object, parse_constant=_refuse_number, parse_float=_parse_finite
    )


def _build_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has a name twice")
    return made


def _parse_finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a finite number")


def json_equal(one: JsonValue, other: JsonValue) -> bool:
    """Return whether two JSON values are the same: 1 is 1.0, but never true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            json_equal(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def quote_json(value: JsonValue) -> str:
    """Return a value as JSON that can always be stored: cut to ``SHOWN_CHARS``, lone surrogates escaped."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"
