"""The rule of the greater mean: one pass of the candidate against one pass of another skill.

It decides under ``gate.policy: strict``, and for targets whose repeats never disagreed. Coverage
and the veto of ``no_regression`` belong to all policies. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from pydantic import Field

from reflact.types import FrozenModel

# Scores that differ by no more count as equal, because of rounding.
SCORE_TOLERANCE = 1e-9

# The most items that are repeated before a deterministic target's candidate is accepted.
MAX_REPEATED_ITEMS = 6

# Trials on each side before an item of a noisy target counts as lost.
VETO_TRIALS = 4

# Maximum difference of the two sides' shares of unmeasured rollouts, in percentage points.
MAX_UNMEASURED_GAP = 5


class ScorePair(FrozenModel):
    """The scores of one item in one trial on both sides, in the gate's metric; None is unmeasured.

    ``current`` is the other side: the current skill, or the best one. Only ``no_regression`` uses
    ``candidate_solved`` and ``current_solved``. A refused side can never be measured.
    """

    item_id: str
    candidate: float | None = Field(ge=0, le=1)
    current: float | None = Field(ge=0, le=1)
    candidate_solved: bool | None = None
    current_solved: bool | None = None
    candidate_refused: bool = False
    current_refused: bool = False

    @property
    def difference(self) -> float | None:
        """The candidate's score minus the other; None if a side is unmeasured."""
        return (
            None
            if self.candidate is None or self.current is None
            else self.candidate - self.current
        )


class GateSettings(FrozenModel):
    """The inputs of a decision beside the scores; see ``GateConfig`` for the settings.

    ``item_ids`` are in the order in which they are run. ``confirms``: items that differ are
    repeated before an acceptance, because nobody declared the target as deterministic.
    """

    item_ids: tuple[str, ...] = Field(min_length=1)
    coverage: float = Field(default=0.9, gt=0, le=1)
    no_regression: int | None = Field(default=None, ge=0)
    confirms: bool = False


class Ruling(FrozenModel):
    """The decision and its reason, as one sentence."""

    action: Literal["accept", "reject", "unmeasured"]
    reason: str


def decide(settings: GateSettings, pairs: Sequence[ScorePair], *, other: str = "current") -> Ruling:
    """Return the decision on one pass: a strictly greater mean is accepted, unless too many items
    are lost.

    The means are those of the pairs that are measured on both sides. ``other`` names the other
    skill.
    """
    if (ruling := check_coverage(settings.coverage, pairs, other=other)) is not None:
        return ruling
    n = sum(pair.difference is not None for pair in pairs)
    if _sum_differences(pairs) / n <= SCORE_TOLERANCE:
        return Ruling(action="reject", reason=_explain_means(pairs, "is not", other))
    lost = find_lost_items(pairs)
    allowed = settings.no_regression
    if allowed is not None and len(lost) > allowed:
        return Ruling(action="reject", reason=explain_veto(len(lost), allowed))
    return Ruling(action="accept", reason=_explain_means(pairs, "is", other))


def choose_repeats(pairs: Sequence[ScorePair]) -> tuple[str, ...]:
    """Return the first items of a pass on which the two sides differ, in the order of the pairs."""
    differing = [pair.item_id for pair in pairs if abs(pair.difference or 0.0) > SCORE_TOLERANCE]
    return tuple(differing[:MAX_REPEATED_ITEMS])


def has_disagreement(pairs: Sequence[ScorePair], repeats: Sequence[ScorePair]) -> bool:
    """Return whether a repeat of an item differs from its first score on either side; missing
    scores do not.
    """
    first = {pair.item_id: pair for pair in pairs}
    scores = [(first[again.item_id].candidate, again.candidate) for again in repeats]
    scores += [(first[again.item_id].current, again.current) for again in repeats]
    return any(abs(a - b) > SCORE_TOLERANCE for a, b in scores if a is not None and b is not None)


def find_unconfirmed(pairs: Sequence[ScorePair], repeats: Sequence[ScorePair]) -> Ruling | None:
    """Return the decision if the gain rests on items whose repeats could not be measured; else
    None.
    """
    doubtful = {pair.item_id for pair in repeats if pair.difference is None}
    unproven = math.fsum(
        max(0.0, pair.difference or 0.0) for pair in pairs if pair.item_id in doubtful
    )
    n = sum(pair.difference is not None for pair in pairs)
    if (_sum_differences(pairs) - unproven) / n > SCORE_TOLERANCE:
        return None
    reason = (
        f"Of {len(repeats)} items that were repeated, {len(doubtful)} could not be measured again."
    )
    return Ruling(action="unmeasured", reason=reason)


def find_lost_items(pairs: Sequence[ScorePair]) -> tuple[str, ...]:
    """Return the items of one pass that the current skill solved and the candidate did not, as far
    as measured.
    """
    return tuple(
        pair.item_id
        for pair in pairs
        if pair.current_solved is True and pair.candidate_solved is False
    )


def explain_veto(losses: int, allowed: int) -> str:
    """Return the reason of a rejection by ``no_regression``."""
    items = "1 item that was" if losses == 1 else f"{losses} items that were"
    return f"The candidate fails {items} solved before; `no_regression` allows {allowed}."


def count_required(coverage: float, total: int) -> int:
    """Return how many of ``total`` items must be measured: at least one, and the share
    ``coverage``, 0..1.

    The share counts as the decimal number that is written: 0.07 of 100 is 7, although the float is
    a little larger.
    """
    return max(1, math.ceil(Fraction(repr(coverage)) * total))


def check_coverage(
    coverage: float, pairs: Sequence[ScorePair], *, other: str = "current"
) -> Ruling | None:
    """Return the decision if too few pairs are measured, or the sides' unmeasured shares differ;
    else None.

    Items that are refused with both skills do not count. If the endpoint refuses them with the
    candidate alone, no retry can mend it, so the candidate is rejected.
    """
    pairs = [pair for pair in pairs if not (pair.candidate_refused and pair.current_refused)]
    if _has_coverage(coverage, pairs):
        return None
    others = [pair for pair in pairs if pair.current is None or not pair.candidate_refused]
    is_candidate = len(others) < len(pairs) and (not others or _has_coverage(coverage, others))
    measured = sum(pair.difference is not None for pair in pairs)
    candidate, missing = _count_unmeasured(pairs)
    reason = (
        f"Only {measured} of {len(pairs)} comparisons are measured with both skills: {candidate} "
        f"rollouts of the candidate and {missing} of the {other} skill are missing. The gate needs "
        f"a share of {coverage:g}, and the skills' shares at most {MAX_UNMEASURED_GAP} points "
        "apart."
    )
    return Ruling(action="reject" if is_candidate else "unmeasured", reason=reason)


def _has_coverage(coverage: float, pairs: Sequence[ScorePair]) -> bool:
    measured = sum(pair.difference is not None for pair in pairs)
    candidate, other = _count_unmeasured(pairs)
    enough = measured >= count_required(coverage, len(pairs))
    return enough and 100 * abs(candidate - other) <= MAX_UNMEASURED_GAP * len(pairs)


def _count_unmeasured(pairs: Sequence[ScorePair]) -> tuple[int, int]:
    return sum(pair.candidate is None for pair in pairs), sum(
        pair.current is None for pair in pairs
    )


def _sum_differences(pairs: Sequence[ScorePair]) -> float:
    return math.fsum(pair.difference or 0.0 for pair in pairs)


def _explain_means(pairs: Sequence[ScorePair], relation: str, other: str) -> str:
    measured = [pair for pair in pairs if pair.difference is not None]
    new = math.fsum(pair.candidate or 0.0 for pair in measured) / len(measured)
    old = math.fsum(pair.current or 0.0 for pair in measured) / len(measured)
    part = f"{len(pairs)}" if len(measured) == len(pairs) else f"{len(measured)} of {len(pairs)}"
    return (
        f"The candidate's {new:.4g} {relation} above the {other} skill's {old:.4g}, on {part} "
        "items."
    )
