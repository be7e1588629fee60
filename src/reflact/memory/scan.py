"""Scans texts for hidden instructions, secrets and personal data before they are stored; see docs/memory.md.

Repetitions in patterns are bounded, so that a scan takes time proportional to the text. A running pattern
blocks the event loop from any thread, so long texts are scanned in parts that overlap.
"""

from __future__ import annotations

import hashlib
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from reflact.memory.cards import ScanFinding, Scanner

# ------------------------------------------------------------------------------------------- folding

_LOOKALIKES = str.maketrans(
    "аеорсухіјѕԁһԛԝвкмнтгпзьαορνικτυεχηωѵɡɩıǀł",
    "aeopcyxijsdhqwbkmhtrn3baopviktuexnwvgiiil",
)
_LEET_LETTERS = str.maketrans("013457@$!|", "oieastasil")
_LEET_WORD = re.compile(r"(?<![\w@$!|])(?=[^\W\d_]*[013457@$!|])(?:[013457@$!|]*[a-z]){2}[a-z013457@$!|]*")
_MIXED = re.compile(r"[a-z][013457@$!|]|[013457@$!|][a-z]")
_SPACED_LETTERS = re.compile(r"(?<!\w)\w(?:[ .\-_*]\w){3,}(?!\w)")
_SEPARATOR = re.compile(r"[ .\-_*]")
_SPACES = re.compile(r"\s+")
_INVISIBLE_CATEGORIES = {"Cc", "Cf", "Mn", "Me", "Co", "Cs", "Cn"}
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
_TAG_LETTERS = {code: code - 0xE0000 for code in range(0xE0020, 0xE007F)}
"""Invisible copies of ASCII characters, which models read."""

PART_CHARS = 16_384
"""The largest number of characters that a pattern scans at once."""

OVERLAP_CHARS = 2_048
"""The least number of characters that two parts share; no rule matches more."""

_PART_EDGE = "xx"
"""Added where a text is cut, so that no word seems to start or end there."""

_LONG_GAP = re.compile(r"(\s{64})\s+")


def split_overlapping(text: str) -> Iterator[str]:
    """Yield overlapping parts of a text, cut after white space if there is any; a short text is one part.

    Long runs of white space are shortened, so that overlaps contain words.
    """
    if len(text) <= PART_CHARS:
        yield text
        return
    text = _LONG_GAP.sub(r"\1", text)
    start = 0
    while start + PART_CHARS < len(text):
        end = 1 + _find_gap(text, start + PART_CHARS - OVERLAP_CHARS, start + PART_CHARS)
        yield f"{_PART_EDGE if start else ''}{text[start:end]}{_PART_EDGE}"
        start = _find_gap(text, end - 2 * OVERLAP_CHARS, end - OVERLAP_CHARS)
    yield f"{_PART_EDGE if start else ''}{text[start:]}"


def _find_gap(text: str, start: int, end: int) -> int:
    """Return the index of the last white space in a range, or its last index without white space."""
    last = max(text.rfind(sign, start, end) for sign in " \n\t")
    return end - 1 if last < 0 else last


def _list_readings(plain: str) -> tuple[str, ...]:
    """Return the distinct readings of a text."""
    latin = plain.translate(_LOOKALIKES)
    joined = _SPACED_LETTERS.sub(lambda run: _SEPARATOR.sub("", run[0]), latin)
    mixed = _MIXED.search(joined) is not None
    leet = _LEET_WORD.sub(lambda word: word[0].translate(_LEET_LETTERS), joined) if mixed else joined
    return tuple(dict.fromkeys(_SPACES.sub(" ", view) for view in (plain, latin, joined, leet)))


def _normalize_text(text: str) -> str:
    if text.isascii():
        return _CONTROL.sub("", text.casefold())
    seen = "".join(
        text[at : at + PART_CHARS].translate(_TAG_LETTERS) for at in range(0, len(text), PART_CHARS)
    )
    decomposed = unicodedata.normalize("NFKD", seen).casefold()
    return "".join(
        c for c in decomposed if c.isspace() or unicodedata.category(c) not in _INVISIBLE_CATEGORIES
    )


# --------------------------------------------------------------------------------------------- rules


class ScanRule(NamedTuple):
    """The verdict of a match, and the patterns that are searched in every reading of a text."""

    name: str
    verdict: Literal["quarantine", "reject"]
    patterns: tuple[re.Pattern[str], ...]


def _compile_patterns(*sources: str) -> tuple[re.Pattern[str], ...]:
    decomposed = (unicodedata.normalize("NFKD", source) for source in sources)
    return tuple(
        re.compile("".join(c for c in source if unicodedata.category(c) != "Mn")) for source in decomposed
    )


_GAP = r"[\W_]{0,6}"
_IGNORE_VERBS = (
    r"(?:ignore|disregard|forget|overlook|bypass|override|set aside|put aside|pay no (?:attention|heed) to|"
    r"do not (?:follow|obey)|don[’']?t (?:follow|obey)|stop following|neglect)"
)
_EARLIER_WORDS = (
    r"(?:previous(?:ly)?|prior|earlier|preceding|above|former|original|initial|your|system|safety)"
)
_FILLER = rf"(?:(?:all|any|every|each|of|the|these|those|this|that|my|our|other|{_EARLIER_WORDS}){_GAP})"
_FILLERS = rf"{_FILLER}{{0,12}}"
_INSTRUCTION_NOUNS = (
    r"(?:instructions?|directions?|directives?|rules?|guidelines?|guidance|rubrics?|prompts?|orders?|"
    r"commands?)"
)
_BEST_SCORE = (
    r"(?:(?:maximum|highest|full|top|perfect|best)(?: possible)?[ -]"
    r"(?:scores?|marks?|points?|grades?|ratings?)|(?:a )?perfect (?:10|ten))"
)
_TOP_SCORE = rf"(?:{_BEST_SCORE}|(?:a |the )?(?:10|ten)\b(?: ?/ ?10| out of (?:10|ten))?)"
_SCORE_VERBS = r"(?:score|rate|grade|mark|give|award|assign|grant|evaluate)"
_REGARDLESS = r"(?:always|no matter|whatever|regardless|in (?:any|every) case|every time|without exception)"

RULES: tuple[ScanRule, ...] = (
    ScanRule(
        "overridden_instructions",
        "reject",
        _compile_patterns(
            rf"\b{_IGNORE_VERBS}{_GAP}{_FILLERS}{_EARLIER_WORDS}{_GAP}{_FILLERS}{_INSTRUCTION_NOUNS}",
            rf"\b{_IGNORE_VERBS}{_GAP}{_FILLERS}{_INSTRUCTION_NOUNS}{_GAP}"
            r"(?:above|before|earlier|you (?:were|have|had|got|received))",
            rf"\b{_IGNORE_VERBS}{_GAP}(?:all|everything|anything|whatever){_GAP}(?:of )?(?:the )?"
            r"(?:above|before|prior|previous|that came before|you (?:were|have|had|know|learned)|"
            r"said (?:above|before|so far))",
            r"\b(?:ignore[rz]?|oublie[rz]?|neglige[rz]?)\b.{0,30}\b"
            r"(?:consignes|regles|directives|"
            r"instructions (?:precedentes|anterieures|initiales|ci.dessus|donnees|recues))\b",
            r"\b(?:ignorier|vergiss|vergesst|vergessen sie|missachte)\w*\b.{0,40}\b"
            r"(?:anweisungen|instruktionen|regeln|vorgaben|befehle)\b",
            r"\b(?:ignor|olvid|descart|omit)(?:a|e|en|ad)\b.{0,40}\b"
            r"(?:instrucciones|reglas|indicaciones|ordenes)\b",
            r"\b(?:ignora|ignorate|dimentica|dimenticate)\b.{0,40}\b(?:istruzioni|regole|indicazioni)\b",
            r"\b(?:ignore|ignora|esqueca|desconsidere)\b.{0,40}\b(?:instrucoes|regras|ordens)\b",
            r"\b(?:negeer|vergeet)\b.{0,40}\b(?:instructies|opdrachten|regels|aanwijzingen)\b",
            r"\b(?:zignoruj|zapomnij)\b.{0,40}\b(?:instrukcj|polecen|zasad)",
            r"(?:игнорируй|забудь|не обращай внимания на).{0,40}(?:инструкци|указани|правил|команд)",
            r"(?:忽略|无视|無視|忘记|忘記|忽视|忽視).{0,12}(?:指令|指示|说明|說明|规则|規則|提示|要求)",
            r"(?:指示|命令|ルール|指令).{0,10}(?:無視|忘れ)",
            r"(?:지시|명령|규칙).{0,14}(?:무시|잊)",
            r"(?:تجاهل|انس).{0,30}(?:التعليمات|الأوامر|القواعد)",
            r"(?:talimat|kural)\w*.{0,20}(?:yok say|unut|gormezden gel)",
        ),
    ),
    ScanRule(
        "chat_markup",
        "reject",
        _compile_patterns(
            r"<\|(?:im_start|im_end|system|user|assistant|endoftext|eot_id|start_header_id)\|>",
            r"\[/?inst\]|<</?sys>>",
            r"#{2,} ?(?:system|new instructions?) ?:",
        ),
    ),
    ScanRule(
        "new_role",
        "reject",
        _compile_patterns(
            rf"\byou{_GAP}are{_GAP}now\b.{{0,40}}\b"
            r"(?:evaluator|critic|judge|assistant|ai|model|unrestricted|jailbr|lenient|"
            r"no longer bound|free (?:of|from))",
            r"\bnew (?:task|instructions?|orders?|rules?) (?:for|to) (?:the |you\b|all )?"
            r"(?:assistant|model|ai|critic|evaluator|judge|llm|you)?\b *(?=[:,.])",
            r"\b(?:reveal|print|repeat|show|output|disclose)\b.{0,20}\b(?:your |the |hidden )+"
            r"(?:system prompt|(?:hidden |system )?instructions? you)",
            r"\bfrom now on,? (?:you (?:will|must|are|shall)|treat|score|grade|rate|give|award|always)\b",
        ),
    ),
    ScanRule(
        "demanded_score",
        "quarantine",
        _compile_patterns(
            rf"\b{_SCORE_VERBS}{_GAP}(?:every|each|all|any|this|the|it|them)\b.{{0,40}}\b{_TOP_SCORE}(?=\W*(?:$|[.,;!]|and\b))",
            rf"\b{_REGARDLESS}\b.{{0,60}}\b{_BEST_SCORE}",
            rf"\b{_REGARDLESS}\b.{{0,20}}\b{_SCORE_VERBS}\b.{{0,30}}\b{_TOP_SCORE}(?=\W*(?:$|[.,;!]))",
            rf"(?:^|[.,;:!] |\b(?:and|please|then|just|so) ){_SCORE_VERBS} {_TOP_SCORE}",
            rf"\b{_TOP_SCORE}.{{0,40}}\b(?:no matter what|regardless|whatever (?:it|the|happens))",
            r"\bnever (?:go|score|give|rate|drop|mark|grade)\b.{0,20}\b"
            r"(?:below|under|less than|lower than)\b",
            r"\btoujours\b.{0,30}(?:note maximale|meilleure note|\b10\b|\bdix\b)",
            r"\bimmer\b.{0,30}(?:hochstpunktzahl|hochste punkt|volle punkt|bestnote|\b(?:10|zehn)\b)",
            r"\bsiempre\b.{0,30}(?:puntuacion maxima|nota maxima|\b(?:10|diez)\b)",
            r"(?:总是|一律|始终|總是|必须).{0,10}(?:满分|滿分|最高分|10 ?分)",
        ),
    ),
)

_SECRET_HINTS = (
    *("sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "akia", "aiza", "xox"),
    *("-----begin", "eyj", "password", "passwd", "key", "secret", "bearer"),
)
"""Every secret contains one of these in lower case. Most texts contain none, so no pattern is tried."""

_SECRETS = re.compile(
    r"\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bxox[abprs]-[\w-]{10,}"
    r"|-----BEGIN (?:[A-Z]+ )?PRIVATE KEY|\beyJ[\w-]{15,1000}\.eyJ[\w-]{15}"
    r"|(?i:\b(?:password|passwd|api[_ -]?key|secret|bearer)\b[\"']?(?: ?[:=] ?| )[\"']?(?=[^\s\"']{0,80}\d)"
    r"(?=[^\s\"']{0,80}[a-z])[^\s\"'(),;]{12,})"
)
_EMAIL = re.compile(r"[\w.+-]{1,64}@((?:[\w-]{1,63}\.)+[a-z]{2,24})\b", re.IGNORECASE)
_RESERVED_DOMAINS = re.compile(
    r"(?:^|\.)(?:example\.(?:com|org|net)|example|test|invalid|localhost|local)$", re.IGNORECASE
)
_PHONE_OR_ID_NUMBER = re.compile(
    r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])|(?<!\w)\+\d{1,3}[ ./-]\(?\d[\d ()./-]{6,}\d"
)
_CARD_DIGITS = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w.-])")
_ACCOUNT_NUMBER = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")


def scan_texts(texts: Iterable[str]) -> ScanFinding | None:
    """Return the most severe finding in a pair's texts, the first of equal ones, or None."""
    found: ScanFinding | None = None
    for text in dict.fromkeys(texts):
        for finding in _list_findings(text):
            if finding.verdict == "reject":
                return finding
            found = found or finding
    return found


class CachingScanner:
    """Scans each text once, since consecutive steps share texts.

    It remembers the hashes of up to ``size`` texts without findings. Findings of ``scan`` must not depend on
    combinations of texts.
    """

    def __init__(self, scan: Scanner = scan_texts, size: int = 32_768) -> None:
        self._scan = scan
        self._size = size
        self._clean_hashes: set[bytes] = set()

    def __call__(self, texts: Iterable[str]) -> ScanFinding | None:
        """Return the most severe finding in a pair's texts, the first of equal ones, or None."""
        hashed = {_hash_text(text): text for text in texts}
        found = self._scan([text for key, text in hashed.items() if key not in self._clean_hashes])
        if found is None:
            if len(self._clean_hashes) + len(hashed) > self._size:
                self._clean_hashes.clear()
            self._clean_hashes.update(hashed)
        return found


def _hash_text(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _list_findings(text: str) -> Iterator[ScanFinding]:
    readings = [view for part in split_overlapping(_normalize_text(text)) for view in _list_readings(part)]
    for rule in RULES:
        if any(_matches(pattern, view) for pattern in rule.patterns for view in readings):
            yield ScanFinding(rule=rule.name, verdict=rule.verdict)
    parts = [*split_overlapping(_remove_invisible(text))]
    if any(_has_secret(part) for part in parts):
        yield ScanFinding(rule="secret", verdict="reject")
    if any(map(_has_personal_data, parts)):
        yield ScanFinding(rule="personal_data", verdict="quarantine")


def _remove_invisible(text: str) -> str:
    """Return a text without invisible characters; letters keep their case and script."""
    if text.isascii():
        return text
    composed = unicodedata.normalize("NFKC", text)
    return "".join(c for c in composed if c.isspace() or unicodedata.category(c) != "Cf")


def _matches(pattern: re.Pattern[str], text: str) -> bool:
    """Whether a pattern matches; after a long text it lets other threads run."""
    found = pattern.search(text) is not None
    if len(text) > PART_CHARS // 2:
        time.sleep(0)
    return found


def _has_secret(text: str) -> bool:
    folded = text.casefold()
    return any(hint in folded for hint in _SECRET_HINTS) and _matches(_SECRETS, text)


def _has_personal_data(text: str) -> bool:
    mails = _EMAIL.finditer(text) if "@" in text else ()
    return (
        any(not _RESERVED_DOMAINS.search(mail[1]) for mail in mails)
        or _PHONE_OR_ID_NUMBER.search(text) is not None
        or any(_passes_card_checksum(re.sub(r"\D", "", run[0])) for run in _CARD_DIGITS.finditer(text))
        or any(_passes_account_checksum(run[0].replace(" ", "")) for run in _ACCOUNT_NUMBER.finditer(text))
    )


def _passes_card_checksum(digits: str) -> bool:
    """Whether a number has the check digit of payment cards (ISO/IEC 7812-1), and is not all zeros."""
    doubled = [int(d) * 2 for d in digits[-2::-2]]
    total = sum(map(int, digits[-1::-2])) + sum(d - 9 if d > 9 else d for d in doubled)
    return total > 0 and total % 10 == 0


def _passes_account_checksum(text: str) -> bool:
    """Whether a text has the check digits of an international account number (ISO 13616)."""
    moved = text[4:] + text[:4]
    return int("".join(str(int(c, 36)) for c in moved)) % 97 == 1
