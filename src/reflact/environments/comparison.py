"""How graders read answers: texts, numbers and JSON in the forms that are compared."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any, NoReturn

import regex
from pydantic import JsonValue

from reflact.jsonutil import build_object

# Apostrophes, single quotes and hyphens as in ASCII; soft hyphens and variation selectors go.
_PLAIN = str.maketrans("\u2019\u02bc\u2018\u2010\u2011", "'''--", "\u00ad\ufe0f")

_INVISIBLE = "\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"

# White space, and invisible characters at the end of a text, such as the byte order mark.
BLANK = "".join(filter(str.isspace, map(chr, range(0x3001)))) + _INVISIBLE

# Unicode's forms of letters and digits that mean something else than the plain ones.
_TELLING_FORMS = frozenset({"<super>", "<sub>", "<fraction>", "<circle>", "<font>"})

_MARKS = ".,;:!?\u2026\u3002\u3001\u061f\u060c\u061b\u0964"
_QUOTES = dict(
    zip("\"'`*\u201c\u00ab\u201e\u201d\u300c", "\"'`*\u201d\u00bb\u201c\u201d\u300d", strict=True)
)
_OPENERS = _INVISIBLE + "([{\u00bf\u00a1_" + "".join(_QUOTES)
_CLOSERS = _INVISIBLE + ")]}_" + _MARKS + "".join(_QUOTES.values())
_NO_WORDS = frozenset({"", "a", "an", "the", "-", "\u2013", "\u2014"})

# Marks on one letter; after 30, a joiner goes between them, as in Unicode's stream-safe format,
# because the time for NFKC grows with the square of their number.
_LONG_MARKS = regex.compile(r"([\p{M}--\u034f]{30})(?=[\p{M}--\u034f])", regex.V1)


def normalize(text: str) -> str:
    """Return a text as the ``normalized`` grader compares it.

    Unicode NFKC and case folding; runs of white space become one space. Typographic apostrophes and
    hyphens become those of ASCII; soft hyphens and variation selectors go. Superscripts,
    subscripts, fractions, circled and mathematical letters stay what they are (``10²`` is not
    ``102``). White space, invisible characters, and pairs of quotes, asterisks or backticks go from
    both ends, and so does a pair of brackets around one word. ``. , ; : ! ?`` go from the end, but
    not the ``!`` of a factorial. A text of such signs alone stays as it is.
    """
    return _strip_edges(_fold_text(text))


def tokenize(text: str) -> tuple[str, ...]:
    """Return the words of a text, as the ``token_f1`` grader counts them.

    The text is folded as in ``normalize`` and split at white space. Quotes, brackets and
    punctuation at both ends of a word are left out, but not a leading full stop (``.5``). ``a``,
    ``an``, ``the``, dashes and words of nothing else are left out too, unless the text has no other
    words.
    """
    words = []
    skipped = []
    for whole in _fold_text(text).split():
        word = whole.lstrip(_OPENERS).rstrip(_CLOSERS)
        if word in _NO_WORDS:
            skipped.append(word or whole)
        else:
            words.append(word)
    has_text = any(char.isalnum() for word in words for char in word)
    return tuple(words) if has_text else (*words, *skipped)


def _fold_text(text: str) -> str:
    """Return a text composed and case-folded, each run of white space as one space."""
    plain = _compose(_LONG_MARKS.sub("\\1\u034f", text).translate(_PLAIN))
    folded = _compose(plain.casefold().translate(_PLAIN))
    return " ".join(folded.split()).strip(BLANK)


def _compose(text: str) -> str:
    """Return a text in NFKC, but superscripts and the like, whose form matters, stay."""
    if unicodedata.is_normalized("NFKC", text):
        return text
    return unicodedata.normalize("NFC", "".join(map(_decompose, text)))


def _decompose(char: str) -> str:
    form = unicodedata.decomposition(char).partition(" ")[0]
    return char if form in _TELLING_FORMS else unicodedata.normalize("NFKD", char)


def _strip_edges(text: str) -> str:
    start = 0
    end = len(text)
    while start < end:
        first = text[start]
        last = text[end - 1]
        if first in BLANK:
            start += 1
        elif last in BLANK or _is_mark(last, text[max(start, end - 3) : end - 1]):
            end -= 1
        elif end - start > 1 and (
            _QUOTES.get(first) == last
            or (first + last in {"()", "[]"} and text[start + 1 : end - 1].isalnum())
        ):
            start += 1
            end -= 1
        else:
            break
    return text[start:end] or text.strip(BLANK)


def _is_mark(char: str, before: str) -> bool:
    """Whether a sign at the end of a text is punctuation; ``n!`` is a factorial."""
    is_factorial = char == "!" and re.search(r"[\d)]$|(^|\W)\w$", before) is not None
    return char in _MARKS and not is_factorial


# Maximum length of a number, in characters.
MAX_NUMBER_CHARS = 10_000

# Maximum length of ``quote_json``, in characters.
SHOWN_CHARS = 300

_NUMBER = re.compile(
    r"(?P<sign>[+-])?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?P<exponent>e[+-]?[0-9]+)?\s*(?P<percent>%)?",
    re.IGNORECASE,
)


def parse_number(text: str) -> int | float | None:
    """Return a text as a number, a whole one exactly; None if it is anything else.

    White space and invisible characters at both ends are ignored. A number is decimal digits with,
    each optional: a sign (``+``, ``-`` or the minus sign U+2212), commas between groups of three
    digits before the decimal point, a decimal point, an exponent, and a per cent sign, which
    divides by 100 (``12.5%`` is 0.125). It is whole if it has neither of the last two, and only
    zeros after the point. Never a number: ``1,5``, ``1.234,5``, ``$5``, ``5 km``, ``1/2``,
    ``0x10``, NaN, infinity, what overflows, and a text of more than ``MAX_NUMBER_CHARS``.
    """
    bare = text.strip(BLANK)
    match = None if len(bare) > MAX_NUMBER_CHARS else _NUMBER.fullmatch(bare.replace("\u2212", "-"))
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    digits = match["digits"].replace(",", "")
    value = to_finite(float(f"{digits}{match['exponent'] or ''}"))
    whole, _, rest = digits.partition(".")
    if value is None:
        return None
    if match["percent"]:
        return sign * value / 100
    return sign * (value if match["exponent"] or rest.strip("0") else int(whole.lstrip("0") or 0))


def to_finite(value: float) -> float | None:
    """Return a number as a float; None if that is not finite."""
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) else None


def parse_strict_json(text: str) -> Any:
    """Return the value of a JSON text, without any tolerance; ValueError if it is none."""
    return json.loads(
        text,
        object_pairs_hook=build_object,
        parse_constant=_refuse_number,
        parse_float=_parse_finite,
    )


def _parse_finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a finite number")


def json_equal(one: JsonValue, other: JsonValue) -> bool:
    """Return whether two JSON values are equal; 1 equals 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            json_equal(value, other[name]) for name, value in one.items()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def quote_json(value: JsonValue) -> str:
    """Return a value as JSON for a message: cut to ``SHOWN_CHARS``, lone surrogates escaped."""
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{quote_json(value[:SHOWN_CHARS])[:SHOWN_CHARS]}… ({len(value)} characters)"
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}… ({len(text)} characters)"
