"""Rules of stored pairs: cards, visibility, statuses, evidence, and the traces that may test them.

All functions are pure. The store and the calibration share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

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
    StoredPair,
    Transition,
)
from reflact.types import canonical_json, digest_json, digest_text, join_canonical_json

# --------------------------------------------------------------------------------- cards and scopes


def build_cards(pair: ContrastPair) -> tuple[MemoryCard, MemoryCard]:
    """Return a pair in words: its right evaluation, and its wrong one with the reason."""
    return (
        _build_card(pair, "critic_calibration", pair.right, pair.right.reasoning),
        _build_card(pair, "failure_pattern", pair.wrong, pair.reason),
    )


def _build_card(
    pair: ContrastPair, kind: CardKind, evaluation: Evaluation, strategy: str
) -> MemoryCard:
    quoted = "".join(f"\nEvidence: {quote}" for quote in evaluation.evidence)
    change = f"{evaluation.progress_before:g} -> {evaluation.progress_after:g}"
    content = f"{change}\nReasoning: {evaluation.reasoning}{quoted}"
    return MemoryCard(
        kind=kind, pair_id=pair.id, mistake=pair.mistake, content=content, strategy=strategy
    )


def is_visible_to(scope: Scope, asker: Scope) -> bool:
    """Whether an asker may see a pair: each field of its scope is empty or shares a value."""
    for name in ("roles", "tools", "task_categories"):
        required = getattr(scope, name)
        if required and set(required).isdisjoint(getattr(asker, name)):
            return False
    return scope.user in {None, asker.user}


# ----------------------------------------------------------------------------------------- statuses

# The statuses that may follow each status. A pair that is quarantined again may be tested.
NEXT_STATUSES: Final[Mapping[CardStatus, frozenset[CardStatus]]] = MappingProxyType(
    {
        "quarantined": frozenset({"quarantined", "promoted", "rejected", "archived"}),
        "promoted": frozenset({"quarantined", "archived"}),
        "rejected": frozenset({"archived"}),
        "archived": frozenset(),
    }
)

# The statuses of pairs that count against the bound of a store.
ACTIVE_STATUSES: Final[tuple[CardStatus, ...]] = ("quarantined", "promoted")


def check_status_change(stored: StoredPair, after: CardStatus) -> None:
    """Check that a pair may get a status; DataError otherwise."""
    before = stored.status
    if after not in NEXT_STATUSES[before]:
        possible = " or ".join(sorted(NEXT_STATUSES[before])) or "nothing else"
        raise DataError(
            f"pair {stored.pair.id}: a pair that is {before} cannot become {after}; it can become "
            f"{possible}"
        )


# -------------------------------------------------------------------------------------------- tests

# The one-sided error probability that all tests on one held-out trace share.
TOTAL_ALPHA = 0.025

# The least number of held-out traces of a test.
MIN_TRACES = 20

# A batch whose pairwise accuracy falls by more is not promoted, whatever its error.
MAX_ACCURACY_FALL = 0.02


def compute_alpha(n_earlier_tests: int) -> float:
    """Return the alpha of a test after some earlier ones; all together sum to ``TOTAL_ALPHA``."""
    return TOTAL_ALPHA * 6 / (math.pi * (n_earlier_tests + 1)) ** 2


def compute_utility(evidence: PromotionEvidence) -> float:
    """Return the utility of a batch in 0..1: 0.5, plus 0.05 for each point of error removed."""
    return min(1.0, max(0.0, 0.5 + evidence.effect / 20))


def find_inconsistency(test: BatchTest, evidence: PromotionEvidence) -> str | None:
    """Return why a test cannot give this evidence, or None if it can.

    Alpha follows from the earlier tests. Evidence that changes a status must be significant, in the
    right direction, and have no large fall of accuracy.
    """
    alpha = compute_alpha(test.n_earlier_tests)
    n_traces = evidence.n_traces
    n_held_out = len(test.content_fingerprints)
    is_promotion = test.kind == "promote"
    gain = evidence.effect if is_promotion else -evidence.effect
    change = evidence.accuracy_change or 0.0
    is_accurate = not is_promotion or change >= -MAX_ACCURACY_FALL
    changes_status = evidence.passed_test is is_promotion
    problem = None
    if evidence.pair_ids != test.pair_ids or evidence.n_earlier_tests != test.n_earlier_tests:
        problem = (
            f"the test has {len(test.pair_ids)} pairs and {test.n_earlier_tests} earlier tests on "
            "its traces"
        )
    elif n_traces > n_held_out:
        problem = f"it compares {n_traces} traces, and {n_held_out} were held out"
    elif n_traces < MIN_TRACES:
        problem = f"it compares {n_traces} traces, and a test needs at least {MIN_TRACES}"
    elif not math.isclose(evidence.alpha, alpha, rel_tol=1e-6):
        problem = f"its alpha is {evidence.alpha:.4g}, and must be {alpha:.4g}"
    # A sign-flip test of n traces has 2**n outcomes, of which the observed one is always counted.
    elif not 0.5**n_traces <= evidence.p_value <= 1:
        problem = f"{n_traces} traces cannot have a p-value of {evidence.p_value:.4g}"
    elif changes_status and not (evidence.p_value <= alpha and gain > 0 and is_accurate):
        problem = (
            f"no test with this outcome has a p-value of {evidence.p_value:.4g} at alpha "
            f"{alpha:.4g}, an effect of {evidence.effect:g} and a change of accuracy of {change:g}"
        )
    return problem


class TraceIdentity(NamedTuple):
    """Identifies a trace when tests are counted, also under another name or after it has grown.

    Args:
        id: The name of the trace.
        content_hashes: The hash up to each step, see ``extend_content_hash``; the last one is of
            all steps.
    """

    id: str
    content_hashes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the complete trace."""
        return compute_fingerprint(self.content_hashes[-1])

    @property
    def fingerprints(self) -> frozenset[str]:
        """The fingerprints of its name, and of its content up to each step; any of them matches."""
        return frozenset(map(compute_fingerprint, (self.id, *self.content_hashes)))


def count_tests(tests: Iterable[BatchTest], traces: Iterable[TraceIdentity]) -> int:
    """Return how many tests used any of these traces."""
    fingerprints = frozenset[str]().union(*(trace.fingerprints for trace in traces))
    return sum(not fingerprints.isdisjoint(test.fingerprints) for test in tests)


def compute_fingerprint(name: str) -> str:
    """Return the fingerprint of a trace's name or content hash in a test, 32 hexadecimal digits.

    Tests keep fingerprints after a trace is forgotten. The owner of a trace can see that it was
    held out.
    """
    return digest_json(name)[:32]


def hash_purpose(purpose: str) -> str:
    """Return the content hash of a trace without steps, 64 hexadecimal digits."""
    return digest_json([purpose])


def extend_content_hash(content_hash: str, transition: Transition) -> str:
    """Return the content hash of a trace with one more step: no name and no score is part of it."""
    return digest_text(f"[{canonical_json(content_hash)},{transition.canonical_json}]")


# ------------------------------------------------------------------------------------------ anchors


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
        trace_ids: set[str] = set()
        states: dict[str, frozenset[str]] = {}
        for pair in anchors:
            trace_ids.update(origin.trace_id for origin in pair.provenance.as_origins)
            state_hash = digest_json(pair.transition.after)
            states[pair.purpose] = states.get(pair.purpose, frozenset()) | {state_hash}
        return cls(frozenset(trace_ids), MappingProxyType(states))

    def excludes(self, purpose: str, transition: Transition, origin: Origin) -> bool:
        """Whether a step comes from an anchor's trace, or shows an anchor's state after."""
        if origin.trace_id in self.trace_ids:
            return True
        hashes = self.state_hashes.get(purpose)
        if not hashes:
            return False
        return not hashes.isdisjoint(map(digest_json, (transition.before, transition.after)))


# The most characters of a purpose in a message.
MAX_PURPOSE_CHARS = 80


def describe_other_trace(trace_id: str, purpose: str, other_purpose: str) -> str:
    """Return what is wrong if two traces have one id: somebody named two runs alike."""
    other = f"the purpose {other_purpose[:MAX_PURPOSE_CHARS]!r}"
    if purpose == other_purpose:
        other = "other steps"
    return (
        f"trace {trace_id} has the purpose {purpose[:MAX_PURPOSE_CHARS]!r}, and another trace of "
        f"this id has {other}; give each trace an id of its own, such as one that begins with the "
        "agent's name"
    )
