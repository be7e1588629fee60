"""Scans texts for hidden instructions, secrets and personal data; see docs/calibration.md.

The patterns are in ``scan_rules.toml``. A scan takes time proportional to the text.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from importlib import resources
from typing import Literal, NamedTuple

from reflact.types import FrozenModel

# Texts whose findings are remembered, because the pairs of one step share their states.
CACHED_TEXTS = 64


class ScanFinding(FrozenModel):
    """The result of a scan: the rule that matched, and its verdict.

    A pair that a finding quarantines needs review until somebody releases it.
    """

    rule: str
    verdict: Literal["quarantine", "reject"]


# Scans all texts of a pair and returns the most severe finding, or None.
Scanner = Callable[[Iterable[str]], ScanFinding | None]


class RuleBook(NamedTuple):
    """The compiled rules; every secret has one of the hints, which are found fast."""

    instructions: tuple[tuple[ScanFinding, tuple[re.Pattern[str], ...]], ...]
    secrets: re.Pattern[str]
    secret_hints: tuple[str, ...]


@cache
def load_rules() -> RuleBook:
    """Return the rules of ``scan_rules.toml``."""
    text = resources.files("reflact.memory").joinpath("scan_rules.toml").read_text(encoding="utf-8")
    stored = tomllib.loads(text)
    fragments = stored["fragments"]
    instructions = tuple(
        (
            ScanFinding(rule=rule["name"], verdict=rule["verdict"]),
            tuple(_compile_pattern(source, fragments) for source in rule["patterns"]),
        )
        for rule in stored["rules"]
    )
    secrets = stored["secrets"]
    return RuleBook(
        instructions, re.compile("|".join(secrets["patterns"])), tuple(secrets["hints"])
    )


def _compile_pattern(source: str, fragments: dict[str, str]) -> re.Pattern[str]:
    """Compile a pattern with its ``{fragments}``; like readings of a text, it has no accents."""
    for name, fragment in fragments.items():
        source = source.replace(f"{{{name}}}", fragment)
    decomposed = unicodedata.normalize("NFKD", source)
    return re.compile("".join(c for c in decomposed if unicodedata.category(c) != "Mn"))


def scan_texts(texts: Iterable[str]) -> ScanFinding | None:
    """Return the most severe finding in a pair's texts, the first of equal ones, or None."""
    findings = [finding for text in dict.fromkeys(texts) for finding in _scan_text(text)]
    rejections = [finding for finding in findings if finding.verdict == "reject"]
    return next(iter(rejections + findings), None)


@lru_cache(maxsize=CACHED_TEXTS)
def _scan_text(text: str) -> tuple[ScanFinding, ...]:
    """Return all findings in a text."""
    book = load_rules()
    readings = _list_readings(_normalize_text(text))
    findings = [
        finding
        for finding, patterns in book.instructions
        if any(pattern.search(reading) for pattern in patterns for reading in readings)
    ]
    visible = _remove_invisible(text)
    folded = visible.casefold()
    if any(hint in folded for hint in book.secret_hints) and book.secrets.search(visible):
        findings.append(ScanFinding(rule="secret", verdict="reject"))
    if _has_personal_data(visible):
        findings.append(ScanFinding(rule="personal_data", verdict="quarantine"))
    return tuple(findings)


# ----------------------------------------------------------------------------------------- readings

_LOOKALIKES = str.maketrans(
    "аеорсухіјѕԁһԛԝвкмнтгпзьαορνικτυεχηωѵɡɩıǀł",
    "aeopcyxijsdhqwbkmhtrn3baopviktuexnwvgiiil",
)
_LEET_LETTERS = str.maketrans("013457@$!|", "oieastasil")
_LEET_WORD = re.compile(
    r"(?<![\w@$!|])(?=[^\W\d_]*[013457@$!|])(?:[013457@$!|]*[a-z]){2}[a-z013457@$!|]*"
)
_MIXED = re.compile(r"[a-z][013457@$!|]|[013457@$!|][a-z]")
_SPACED_LETTERS = re.compile(r"(?<!\w)\w(?:[ .\-_*]\w){3,}(?!\w)")
_SEPARATOR = re.compile(r"[ .\-_*]")
_SPACES = re.compile(r"\s+")
_INVISIBLE_CATEGORIES = {"Cc", "Cf", "Mn", "Me", "Co", "Cs", "Cn"}
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")

# Invisible copies of ASCII characters, which models read.
_TAG_LETTERS = {code: code - 0xE0000 for code in range(0xE0020, 0xE007F)}


def _list_readings(plain: str) -> tuple[str, ...]:
    """Return the readings of a normal text: as it is, in Latin letters, joined, without digits."""
    latin = plain.translate(_LOOKALIKES)
    joined = _SPACED_LETTERS.sub(lambda run: _SEPARATOR.sub("", run[0]), latin)
    leet = joined
    if _MIXED.search(joined) is not None:
        leet = _LEET_WORD.sub(lambda word: word[0].translate(_LEET_LETTERS), joined)
    return tuple(
        dict.fromkeys(_SPACES.sub(" ", reading) for reading in (plain, latin, joined, leet))
    )


def _normalize_text(text: str) -> str:
    """Return a text in lower case, without accents and invisible characters."""
    if text.isascii():
        return _CONTROL.sub("", text.casefold())
    decomposed = unicodedata.normalize("NFKD", text.translate(_TAG_LETTERS)).casefold()
    return "".join(
        c for c in decomposed if c.isspace() or unicodedata.category(c) not in _INVISIBLE_CATEGORIES
    )


def _remove_invisible(text: str) -> str:
    """Return a text without invisible characters; letters keep their case and script."""
    if text.isascii():
        return text
    composed = unicodedata.normalize("NFKC", text)
    return "".join(c for c in composed if c.isspace() or unicodedata.category(c) != "Cf")


# --------------------------------------------------------------------------- secrets, personal data

_EMAIL = re.compile(r"[\w.+-]{1,64}@((?:[\w-]{1,63}\.)+[a-z]{2,24})\b", re.IGNORECASE)
_RESERVED_DOMAINS = re.compile(
    r"(?:^|\.)(?:example\.(?:com|org|net)|example|test|invalid|localhost|local)$", re.IGNORECASE
)
_PHONE_OR_ID_NUMBER = re.compile(
    r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])|(?<!\w)\+\d{1,3}[ ./-]\(?\d[\d ()./-]{6,}\d"
)
_CARD_DIGITS = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w.-])")
_ACCOUNT_NUMBER = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")


def _has_personal_data(text: str) -> bool:
    mails = _EMAIL.finditer(text) if "@" in text else ()
    cards = _CARD_DIGITS.finditer(text)
    accounts = _ACCOUNT_NUMBER.finditer(text)
    return (
        any(not _RESERVED_DOMAINS.search(mail[1]) for mail in mails)
        or _PHONE_OR_ID_NUMBER.search(text) is not None
        or any(_passes_card_checksum(re.sub(r"\D", "", run[0])) for run in cards)
        or any(_passes_account_checksum(run[0].replace(" ", "")) for run in accounts)
    )


def _passes_card_checksum(digits: str) -> bool:
    """Whether a number has the check digit of payment cards (ISO/IEC 7812-1) and is not zero."""
    doubled = [int(d) * 2 for d in digits[-2::-2]]
    total = sum(map(int, digits[-1::-2])) + sum(d - 9 if d > 9 else d for d in doubled)
    return total > 0 and total % 10 == 0


def _passes_account_checksum(text: str) -> bool:
    """Whether a text has the check digits of an international account number (ISO 13616)."""
    moved = text[4:] + text[:4]
    return int("".join(str(int(c, 36)) for c in moved)) % 97 == 1
