"""Cards by themselves: what a pair's two cards say, which states follow which, who sees one, which is first.

Pure. The store and the calibration corridor share it, and with it what every test of a batch has to keep to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from pydantic import JsonValue

from reflact.errors import DataError
from reflact.jsonutil import iter_json_chunks
from reflact.memory.models import (
    CardKind,
    CardStatus,
    ContrastPair,
    Evaluation,
    MemoryCard,
    Origin,
    PromotionEvidence,
    Provenance,
    Scope,
    Transition,
)
from reflact.types import FrozenModel, canonical_json, digest_json, digest_text, join_canonical_json

NEXT_STATUSES: Final[Mapping[CardStatus, frozenset[CardStatus]]] = MappingProxyType(
    {
        "candidate": frozenset({"quarantined", "rejected"}),
        "quarantined": frozenset({"promoted", "rejected", "archived"}),
        "promoted": frozenset({"quarantined", "archived"}),
        "rejected": frozenset({"archived"}),
        "archived": frozenset(),
    }
)
"""Which states may follow a state."""

ACTIVE_STATUSES: Final[tuple[CardStatus, ...]] = ("candidate", "quarantined", "promoted")
"""The states of cards that count against a store's bound."""

PAIR_KINDS: Final[tuple[CardKind, CardKind]] = ("critic_calibration", "failure_pattern")
"""The kinds of a pair's two cards: the right evaluation, the wrong one."""

RELEVANCE, UTILITY, TRUST, RECENCY = 0.5, 0.3, 0.1, 0.1
"""What each part of a rank weighs."""

HALF_LIFE_DAYS = 30.0
"""After so many days without a change a card's recency is half of what it was."""

TOTAL_ALPHA = 0.025
"""One-sided error probability of all batches ever tested on one held-out trace."""

MIN_TRACES = 20
"""Fewer held-out traces decide nothing."""

MAX_ACCURACY_FALL = 0.02
"""Pairwise accuracy may fall by so much; further, and the batch is refused whatever the error says."""


class ScanFinding(FrozenModel):
    """What a scan found: the rule's name, and what becomes of the unit.

    A unit that is quarantined for a finding is held until somebody releases it.
    """

    rule: str
    verdict: Literal["quarantine", "reject"]


Scanner = Callable[[Iterable[str]], ScanFinding | None]
"""Looks at all texts of a unit and returns the gravest finding, or None."""


class RankedUnit(NamedTuple):
    """What a unit's rank follows from; ``relevance`` is 0 or more, in any unit of measure."""

    id: str
    relevance: float
    trust: float
    utility: float
    changed_at: datetime


def check_status_change(
    before: CardStatus, after: CardStatus, evidence: PromotionEvidence | None = None
) -> CardStatus:
    """Return the state that follows, where it may.

    Raises:
        DataError: It must not follow, or promotion lacks evidence that says so.
    """
    if after not in NEXT_STATUSES[before]:
        raise DataError(
            f"a card that is {before} cannot become {after}; it can become {_join_names(NEXT_STATUSES[before])}"
        )
    if after == "promoted" and (evidence is None or not evidence.passed_test):
        raise DataError("a card is promoted only on evidence of a test that it passed; test its batch")
    return after


def compute_alpha(n_earlier_tests: int) -> float:
    """Return the error probability of a test that ``before`` others preceded on the same traces."""
    return TOTAL_ALPHA * 6 / (math.pi * (n_earlier_tests + 1)) ** 2


def compute_utility(evidence: PromotionEvidence) -> float:
    """Return what a batch is worth, 0 to 1: 0.5, and 0.05 for each point of error that it took away."""
    return min(1.0, max(0.0, 0.5 + evidence.effect / 20))


def find_inconsistency(evidence: PromotionEvidence, kind: Literal["promote", "demote"]) -> str | None:
    """Return in words what evidence cannot be, whatever was measured; None where it may be what it says.

    Its level follows from the tests before it, its p-value from signs that are flipped in all ways; and what
    promotes or takes back must have shown that.
    """
    shown = evidence.passed_test if kind == "promote" else not evidence.passed_test
    gain = evidence.effect if kind == "promote" else -evidence.effect
    fall = 0.0 if evidence.accuracy_change is None else -evidence.accuracy_change
    sound = {
        f"it compares {evidence.n_traces} traces, and fewer than {MIN_TRACES} decide nothing": (
            evidence.n_traces >= MIN_TRACES
        ),
        f"{evidence.n_traces} traces cannot have {evidence.n_transitions} transitions": (
            evidence.n_transitions >= evidence.n_traces
        ),
        f"its level is {evidence.alpha:.4g}, and that after {evidence.n_earlier_tests} tests is "
        f"{compute_alpha(evidence.n_earlier_tests):.4g}": (
            math.isclose(evidence.alpha, compute_alpha(evidence.n_earlier_tests), rel_tol=1e-6)
        ),
        f"a p-value of {evidence.p_value:.4g} is none that {evidence.n_traces} traces can have": (
            0.5**evidence.n_traces <= evidence.p_value <= 1
        ),
        f"its p-value {evidence.p_value:.4g} is above its level {evidence.alpha:.4g}": (
            not shown or evidence.p_value <= evidence.alpha
        ),
        f"its effect is {evidence.effect:g}, which is no {'gain' if kind == 'promote' else 'harm'}": (
            not shown or gain > 0
        ),
        f"pairwise accuracy fell by {fall:g}": kind == "demote" or not shown or fall <= MAX_ACCURACY_FALL,
        f"it ended as {evidence.outcome}": (
            not shown or evidence.outcome in {"", "better" if kind == "promote" else "worse"}
        ),
    }
    return next((words for words, fits in sound.items() if not fits), None)


def is_visible_to(scope: Scope, asker: Scope) -> bool:
    """Whether whoever asks may see a card: each field of its scope is empty or names one of the asker's."""
    fields = (
        (scope.roles, asker.roles),
        (scope.tools, asker.tools),
        (scope.task_categories, asker.task_categories),
    )
    named = all(not ours or set(ours) & set(theirs) for ours, theirs in fields)
    return named and (scope.user is None or scope.user == asker.user)


def rank_units(units: Sequence[RankedUnit], now: datetime | None = None) -> list[str]:
    """Return ids, the best first; ties by id, so that equal input gives equal output.

    A rank is 0.5 relevance (as a share of the most relevant one's), 0.3 measured utility, 0.1 trust and
    0.1 recency, which halves every 30 days before ``now`` and does not count without it.
    """
    most = max((standing.relevance for standing in units), default=0.0)

    def rank(one: RankedUnit) -> float:
        relevance = one.relevance / most if most > 0 else 0.0
        days = 0.0 if now is None else max(0.0, (now - one.changed_at).total_seconds() / 86_400)
        recency = 0.0 if now is None else 0.5 ** (days / HALF_LIFE_DAYS)
        worth = RELEVANCE * relevance + UTILITY * one.utility + TRUST * one.trust + RECENCY * recency
        return round(worth, 9)

    return [one.id for one in sorted(units, key=lambda one: (-rank(one), one.id))]


def create_card(
    kind: CardKind,
    content: str,
    *,
    pattern: str = "",
    strategy: str = "",
    scope: Scope | None = None,
    trust: float = 0.5,
    provenance: Provenance | None = None,
    created_by: str = "",
) -> MemoryCard:
    """Return a card that stands alone, a candidate, with the id that follows from its content."""
    card = MemoryCard(
        id="",
        kind=kind,
        content=content,
        pattern=pattern,
        strategy=strategy,
        scope=Scope() if scope is None else scope,
        trust=trust,
        provenance=Provenance() if provenance is None else provenance,
        created_by=created_by,
    )
    return card.model_copy(update={"id": content_id(card)})


def content_id(card: MemoryCard) -> str:
    """Return the id that follows from what a card says and for whom, 64 hexadecimal digits."""
    names = {"kind", "content", "pattern", "strategy", "scope", "pair_id"}
    return digest_json(card.model_dump(mode="json", include=names))


def build_cards(pair: ContrastPair, *, created_by: str = "") -> tuple[MemoryCard, MemoryCard]:
    """Return a pair's cards: the right evaluation, and the wrong one with why; both with the transition.

    Their trust is the share of judges that found the right one, 0.5 without judges.
    """
    seen = "\n".join(
        (
            f"Purpose: {pair.purpose}",
            f"Before: {_format_state(pair.transition.before)}",
            f"Action: {pair.transition.action.name} {_format_state(pair.transition.action.arguments)}",
            f"After: {_format_state(pair.transition.after)}",
        )
    )
    right, wrong = PAIR_KINDS
    texts: tuple[tuple[CardKind, str, Evaluation, str], ...] = (
        (right, "Right evaluation", pair.right, pair.right.reasoning),
        (wrong, f"Wrong evaluation ({pair.mistake})", pair.wrong, pair.reason),
    )

    def card(kind: CardKind, title: str, evaluation: Evaluation, strategy: str) -> MemoryCard:
        bare = MemoryCard(
            id="",
            kind=kind,
            content=f"{seen}\n{title}: {_format_evaluation(evaluation)}",
            pattern=pair.mistake,
            strategy=strategy,
            scope=pair.scope,
            trust=0.5 if pair.agreement is None else pair.agreement,
            pair_id=pair.id,
            provenance=pair.provenance,
            created_by=created_by,
        )
        return bare.model_copy(update={"id": content_id(bare)})

    first, second = (card(*text) for text in texts)
    return first, second


def subject_hash(pair: ContrastPair) -> str:
    """Return the hash of what a pair speaks of: its purpose and transition."""
    return pair.hashes.subject


def compute_subject_hash(purpose: str, transition: Transition) -> str:
    """Return the hash of a transition under a purpose, by which anchors and pairs know each other."""
    texts = {"purpose": canonical_json(purpose), "transition": transition.canonical_json}
    return digest_text(join_canonical_json(texts))


class AnchorExclusions(NamedTuple):
    """What is never learned from: the traces that anchors were made of, and steps that show what they score.

    Args:
        traces: The traces: the steps before and after an anchor's say what it is worth.
        states: The anchors' states after, hashed, by purpose.
    """

    trace_ids: frozenset[str]
    state_hashes: Mapping[str, frozenset[str]]

    @classmethod
    def from_anchors(cls, anchors: Iterable[ContrastPair]) -> AnchorExclusions:
        """Return what anchors keep from being learned from."""
        kept = tuple(anchors)
        states: dict[str, set[str]] = {}
        for pair in kept:
            states.setdefault(pair.purpose, set()).add(digest_json(pair.transition.after))
        return cls(
            frozenset(origin.trace_id for pair in kept for origin in pair.provenance.as_origins),
            MappingProxyType({purpose: frozenset(after) for purpose, after in states.items()}),
        )

    def excludes(self, purpose: str, transition: Transition, origin: Origin) -> bool:
        """Whether a step teaches nothing: it is of an anchor's trace, or shows its state after."""
        if origin.trace_id in self.trace_ids:
            return True
        shown = self.state_hashes.get(purpose, frozenset())
        return bool(shown) and not shown.isdisjoint(map(digest_json, (transition.before, transition.after)))


class TraceIdentity(NamedTuple):
    """What a trace is to the count of tests: the same under any name, and still itself once it has grown.

    Args:
        id: Its name.
        contents: What it holds up to each of its steps, see ``next_content``; the last one is the whole.
    """

    id: str
    content_hashes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """What stands for it in a test."""
        return compute_fingerprint(self.content_hashes[-1])

    @property
    def fingerprints(self) -> frozenset[str]:
        """What it may be known by in a test: its name, and what it holds or held before it grew."""
        return frozenset(map(compute_fingerprint, (self.id, *self.content_hashes)))


def hash_purpose(purpose: str) -> str:
    """Return what stands for a trace without steps, 64 hexadecimal digits."""
    return digest_json([purpose])


def extend_content_hash(content_hash: str, transition: Transition) -> str:
    """Return what stands for a trace with a further step: a hash of its purpose and all transitions.

    Neither its name nor any score is part of it, so copies of one recording are equal.
    """
    return digest_text(f"[{canonical_json(content_hash)},{transition.canonical_json}]")


def compute_fingerprint(name: str) -> str:
    """Return what stands for a held-out trace in a test, 32 hexadecimal digits: a hash of what it holds.

    It outlasts the trace, since a test stays a test. Whoever has the recording can see that it was held out.
    """
    return digest_json(name)[:32]


def iter_texts(value: JsonValue) -> Iterator[str]:
    """Yield all texts in a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from iter_texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from iter_texts(item)


def _format_evaluation(evaluation: Evaluation) -> str:
    quoted = "".join(f"\nEvidence: {quote}" for quote in evaluation.evidence)
    return f"{evaluation.progress_before:g} -> {evaluation.progress_after:g}\nReasoning: {evaluation.reasoning}{quoted}"


def _format_state(value: JsonValue) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "".join(iter_json_chunks(value, write=_dump_json, signs=(", ", ": ")))


def _dump_json(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _join_names(names: Iterable[str]) -> str:
    return " or ".join(sorted(names)) or "nothing else"
