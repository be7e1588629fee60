"""Rules of stored pairs: cards, statuses, visibility, and the evidence that promotes them.

All functions are pure. The store and the calibration share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from pydantic import JsonValue

from reflact.errors import DataError
from reflact.memory.models import (
    BatchTest,
    CardKind,
    CardStatus,
    ContrastPair,
    Evaluation,
    MemoryCard,
    Origin,
    PromotionEvidence,
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
"""The statuses that may follow each status."""

ACTIVE_STATUSES: Final[tuple[CardStatus, ...]] = ("candidate", "quarantined", "promoted")
"""The statuses of pairs that count against the bound of a store."""

MAX_INDEXED_CHARS = 5_000
"""Characters of each text of a pair that are searched."""

PAIR_KINDS: Final[tuple[CardKind, CardKind]] = ("critic_calibration", "failure_pattern")
"""The kinds of a pair's cards: of the right evaluation, and of the wrong one."""

TOTAL_ALPHA = 0.025
"""The one-sided error probability that all tests on one held-out trace share."""

MIN_TRACES = 20
"""The least number of held-out traces of a test."""

MAX_PURPOSE_CHARS = 80
"""The most characters of a purpose in a message."""

MAX_ACCURACY_FALL = 0.02
"""A batch whose pairwise accuracy falls by more is not promoted, whatever its error."""


class ScanFinding(FrozenModel):
    """The result of a scan: the rule that matched, and its verdict.

    A pair that a finding quarantines needs review until somebody releases it.
    """

    rule: str
    verdict: Literal["quarantine", "reject"]


Scanner = Callable[[Iterable[str]], ScanFinding | None]
"""Scans all texts of a pair and returns the most severe finding, or None."""


def check_status_change(
    before: CardStatus, after: CardStatus, evidence: PromotionEvidence | None = None
) -> None:
    """Check that a status may follow another; DataError otherwise. A promotion needs evidence of a passed test."""
    if after not in NEXT_STATUSES[before]:
        raise DataError(
            f"a pair that is {before} cannot become {after}; it can become {_join_names(NEXT_STATUSES[before])}"
        )
    if after == "promoted" and (evidence is None or not evidence.passed_test):
        raise DataError("a promotion needs the evidence of a passed test; test the batch")


def compute_alpha(n_earlier_tests: int) -> float:
    """Return the alpha of a test after so many earlier tests on its traces; all sum to ``TOTAL_ALPHA``."""
    return TOTAL_ALPHA * 6 / (math.pi * (n_earlier_tests + 1)) ** 2


def compute_utility(evidence: PromotionEvidence) -> float:
    """Return the utility of a batch, from 0 to 1: 0.5, plus 0.05 for each point of error that it removed."""
    return min(1.0, max(0.0, 0.5 + evidence.effect / 20))


def find_inconsistency(evidence: PromotionEvidence, kind: Literal["promote", "demote"]) -> str | None:
    """Return why no test can give this evidence, or None if one can.

    Alpha follows from the earlier tests, and the p-value is that of a sign-flip test. Evidence that changes a
    status must be significant.
    """
    significant = evidence.passed_test if kind == "promote" else not evidence.passed_test
    gain = evidence.effect if kind == "promote" else -evidence.effect
    fall = 0.0 if evidence.accuracy_change is None else -evidence.accuracy_change
    checks = {
        f"it compares {evidence.n_traces} traces, and a test needs at least {MIN_TRACES}": (
            evidence.n_traces >= MIN_TRACES
        ),
        f"{evidence.n_traces} traces cannot have {evidence.n_transitions} transitions": (
            evidence.n_transitions >= evidence.n_traces
        ),
        f"its alpha is {evidence.alpha:.4g}, and after {evidence.n_earlier_tests} tests it must be "
        f"{compute_alpha(evidence.n_earlier_tests):.4g}": (
            math.isclose(evidence.alpha, compute_alpha(evidence.n_earlier_tests), rel_tol=1e-6)
        ),
        f"{evidence.n_traces} traces cannot have a p-value of {evidence.p_value:.4g}": (
            0.5**evidence.n_traces <= evidence.p_value <= 1
        ),
        f"its p-value {evidence.p_value:.4g} is above its alpha {evidence.alpha:.4g}": (
            not significant or evidence.p_value <= evidence.alpha
        ),
        f"its effect is {evidence.effect:g}, which is no {'gain' if kind == 'promote' else 'harm'}": (
            not significant or gain > 0
        ),
        f"pairwise accuracy fell by {fall:g}": kind == "demote"
        or not significant
        or fall <= MAX_ACCURACY_FALL,
        f"its outcome is {evidence.outcome}": (
            not significant or evidence.outcome in {"", "better" if kind == "promote" else "worse"}
        ),
    }
    return next((problem for problem, passes in checks.items() if not passes), None)


def is_visible_to(scope: Scope, asker: Scope) -> bool:
    """Whether an asker may see a pair: each field of its scope is empty or shares a value with the asker's."""
    named = ((getattr(scope, name), getattr(asker, name)) for name in ("roles", "tools", "task_categories"))
    shared = all(not ours or not set(ours).isdisjoint(theirs) for ours, theirs in named)
    return shared and scope.user in {None, asker.user}


def build_cards(pair: ContrastPair) -> tuple[MemoryCard, MemoryCard]:
    """Return a pair in words: its right evaluation, and its wrong one with the reason."""
    sides = (pair.right, pair.right.reasoning), (pair.wrong, pair.reason)
    right, wrong = (
        MemoryCard(
            kind=kind,
            pair_id=pair.id,
            mistake=pair.mistake,
            content=_format_evaluation(evaluation),
            strategy=strategy,
        )
        for kind, (evaluation, strategy) in zip(PAIR_KINDS, sides, strict=True)
    )
    return right, wrong


def build_search_text(pair: ContrastPair) -> str:
    """Return the words by which a pair is found: purpose, transition, evaluations, mistake and reason.

    The first ``MAX_INDEXED_CHARS`` of each text count.
    """
    step = pair.transition
    states = (step.before, step.action.arguments, step.after)
    texts = (
        *(pair.purpose, step.action.name, pair.mistake, pair.reason),
        *map(_format_evaluation, (pair.right, pair.wrong)),
        *(text for state in states for text in iter_texts(state)),
    )
    joined = "\n".join(text[:MAX_INDEXED_CHARS] for text in texts).replace("\0", " ")
    return joined.encode("utf-8", "replace").decode()


def compute_subject_hash(purpose: str, transition: Transition) -> str:
    """Return the hash of a purpose and a transition; anchors and pairs are matched by it."""
    texts = {"purpose": canonical_json(purpose), "transition": transition.canonical_json}
    return digest_text(join_canonical_json(texts))


class AnchorExclusions(NamedTuple):
    """The steps that calibration must not learn from because of its anchors.

    Args:
        trace_ids: The traces of anchors; their other steps show the anchors' progress.
        state_hashes: The hashes of the anchors' states after, by purpose.
    """

    trace_ids: frozenset[str]
    state_hashes: Mapping[str, frozenset[str]]

    @classmethod
    def from_anchors(cls, anchors: Iterable[ContrastPair]) -> AnchorExclusions:
        """Return the exclusions of anchors."""
        anchors = tuple(anchors)
        states: dict[str, set[str]] = {}
        for pair in anchors:
            states.setdefault(pair.purpose, set()).add(digest_json(pair.transition.after))
        return cls(
            frozenset(origin.trace_id for pair in anchors for origin in pair.provenance.as_origins),
            MappingProxyType({purpose: frozenset(after) for purpose, after in states.items()}),
        )

    def excludes(self, purpose: str, transition: Transition, origin: Origin) -> bool:
        """Whether a step is excluded: it comes from an anchor's trace, or shows an anchor's state after."""
        if origin.trace_id in self.trace_ids:
            return True
        hashes = self.state_hashes.get(purpose, frozenset())
        return bool(hashes) and not hashes.isdisjoint(map(digest_json, (transition.before, transition.after)))


class TraceIdentity(NamedTuple):
    """Identifies a trace when tests are counted, also under another name or after it has grown.

    Args:
        id: The name of the trace.
        content_hashes: The hash up to each step, see ``extend_content_hash``; the last one is of all steps.
    """

    id: str
    content_hashes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the complete trace."""
        return compute_fingerprint(self.content_hashes[-1])

    @property
    def fingerprints(self) -> frozenset[str]:
        """All fingerprints that match the trace in a test: of its name, and of its content up to each step."""
        return frozenset(map(compute_fingerprint, (self.id, *self.content_hashes)))


def count_tests(tests: Iterable[BatchTest], traces: Iterable[TraceIdentity]) -> int:
    """Return how many tests used any of these traces."""
    fingerprints = frozenset[str]().union(*(trace.fingerprints for trace in traces))
    return sum(not fingerprints.isdisjoint(test.fingerprints) for test in tests)


def describe_other_trace(trace_id: str, purpose: str, other_purpose: str) -> str:
    """Return what is wrong if two traces have one id: they are runs of two agents, or two runs of one."""
    other = (
        "other steps" if purpose == other_purpose else f"the purpose {other_purpose[:MAX_PURPOSE_CHARS]!r}"
    )
    return (
        f"trace {trace_id} has the purpose {purpose[:MAX_PURPOSE_CHARS]!r}, and another trace of this id has {other}; "
        "give each trace an id of its own, such as one that begins with the agent's name"
    )


def hash_purpose(purpose: str) -> str:
    """Return the content hash of a trace without steps, 64 hexadecimal digits."""
    return digest_json([purpose])


def extend_content_hash(content_hash: str, transition: Transition) -> str:
    """Return the content hash of a trace with one more step.

    It covers the purpose and all transitions, but no name and no score. So copies of a trace are equal.
    """
    return digest_text(f"[{canonical_json(content_hash)},{transition.canonical_json}]")


def compute_fingerprint(name: str) -> str:
    """Return the fingerprint of a trace's name or content hash in a test, 32 hexadecimal digits.

    Tests keep fingerprints after a trace is forgotten. The owner of a trace can see that it was held out.
    """
    return digest_json(name)[:32]


def iter_texts(value: JsonValue) -> Iterator[str]:
    """Yield all texts in a JSON value, and the names of its fields."""
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


def _join_names(names: Iterable[str]) -> str:
    return " or ".join(sorted(names)) or "nothing else"
