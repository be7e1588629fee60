"""The rule of the greater mean: one pass of the candidate against one pass of another skill.

It decides under ``gate.policy: strict``, and for targets whose repeats never disagreed. Coverage
and the veto of ``no_regression`` belong to all policies. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from pydantic import Field

from reflact.types import FrozenModel, Verdict

# Scores that differ by no more count as equal, because of rounding.
SCORE_TOLERANCE = 1e-9

# The most items that are repeated before a deterministic target's candidate is accepted.
MAX_REPEATED_ITEMS = 6

# Trials on each side before an item of a noisy target counts as lost.
VETO_TRIALS = 4

# The most items that the endpoint may refuse with the candidate alone, in percent.
MAX_REFUSED_PERCENT = 5


class ScorePair(FrozenModel):
    """The scores of one item on both sides, in the gate's metric; None is unmeasured.

    ``current`` is the other side: the current skill, or the best one. ``is_lost``: it solved the
    item, and the candidate did not. A refused side can never be measured.
    """

    item_id: str
    candidate: float | None = Field(ge=0, le=1)
    current: float | None = Field(ge=0, le=1)
    is_lost: bool = False
    candidate_refused: bool = False
    current_refused: bool = False

    @property
    def difference(self) -> float | None:
        """The candidate's score minus the other; None if a side is unmeasured."""
        if self.candidate is None or self.current is None:
            return None
        return self.candidate - self.current


class GateSettings(FrozenModel):
    """The inputs of a decision beside the scores; see ``GateConfig`` for the settings.

    ``item_ids`` are in the order in which they are run. ``is_open``: every candidate is accepted.
    ``confirms``: items that differ are repeated before an acceptance, because nobody declared the
    target as deterministic. The ranked gate alone uses ``worth`` and ``kept``, the versions that
    were ever current, the initial one first.
    """

    item_ids: tuple[str, ...] = Field(min_length=1)
    coverage: float = Field(default=0.9, gt=0, le=1)
    no_regression: int | None = Field(default=None, ge=0)
    is_open: bool = False
    confirms: bool = False
    kept: tuple[str, ...] = ()
    worth: float = Field(default=0.00005, ge=0)


def decide(
    settings: GateSettings, pairs: Sequence[ScorePair], *, other: str = "current"
) -> Verdict:
    """Accept a strictly greater mean of the pairs that are measured on both sides.

    ``other`` names the other skill. Pairs that are refused on both sides do not count.
    """
    counted = [p for p in pairs if not (p.candidate_refused and p.current_refused)]
    lack = check_coverage(
        settings.coverage,
        total=len(counted),
        measured=sum(pair.difference is not None for pair in counted),
        barred=sum(p.candidate_refused and p.current is not None for p in counted),
        other=other,
    )
    if lack is not None:
        return lack
    if settings.is_open:
        return Verdict(action="accept", reason="The gate is off: every candidate is accepted.")
    measured = [pair for pair in pairs if pair.difference is not None]
    new = math.fsum(pair.candidate or 0.0 for pair in measured) / len(measured)
    old = math.fsum(pair.current or 0.0 for pair in measured) / len(measured)
    is_greater = new - old > SCORE_TOLERANCE
    lost = sum(pair.is_lost for pair in pairs)
    if is_greater and settings.no_regression is not None and lost > settings.no_regression:
        return Verdict(action="reject", reason=explain_veto(lost, settings.no_regression))
    n = f"{len(pairs)}" if len(measured) == len(pairs) else f"{len(measured)} of {len(pairs)}"
    means = f"above the {other} skill's {old:.4g}, on {n} items."
    if is_greater:
        return Verdict(action="accept", reason=f"The candidate's {new:.4g} is {means}")
    return Verdict(action="reject", reason=f"The candidate's {new:.4g} is not {means}")


def choose_repeats(pairs: Sequence[ScorePair]) -> tuple[str, ...]:
    """Return the first items of a pass on which the sides differ, in the order of the pairs."""
    differing = [pair.item_id for pair in pairs if abs(pair.difference or 0.0) > SCORE_TOLERANCE]
    return tuple(differing[:MAX_REPEATED_ITEMS])


def has_disagreement(pairs: Sequence[ScorePair], repeats: Sequence[ScorePair]) -> bool:
    """Whether a repeat of an item differs from its first score on a side; missing scores do not."""
    first = {pair.item_id: pair for pair in pairs}
    scores = [(first[again.item_id].candidate, again.candidate) for again in repeats]
    scores += [(first[again.item_id].current, again.current) for again in repeats]
    return any(abs(a - b) > SCORE_TOLERANCE for a, b in scores if a is not None and b is not None)


def explain_veto(losses: int, allowed: int) -> str:
    """Return the reason of a rejection by ``no_regression``."""
    items = "1 item that was" if losses == 1 else f"{losses} items that were"
    return f"The candidate fails {items} solved before; `no_regression` allows {allowed}."


def count_required(coverage: float, total: int) -> int:
    """Return how many of ``total`` items must be measured: the share ``coverage``, at least one.

    The share counts as the decimal number that is written: 0.07 of 100 is 7, although the float is
    a little larger.
    """
    return max(1, math.ceil(Fraction(repr(coverage)) * total))


def check_coverage(
    coverage: float, *, total: int, measured: int, barred: int, other: str
) -> Verdict | None:
    """Return the decision if too few of ``total`` items are measured; else None.

    ``barred`` counts the items that the endpoint refuses with the candidate alone. No retry can
    mend them, so more than a few reject it.
    """
    is_barred = 100 * barred > MAX_REFUSED_PERCENT * total
    if not is_barred and measured >= count_required(coverage, total):
        return None
    reason = (
        f"Only {measured} of {total} items are measured with the candidate and the {other} skill; "
        f"the gate needs a share of {coverage:g}."
    )
    if not is_barred:
        return Verdict(action="unmeasured", reason=reason)
    refused = f"The endpoint refuses {barred} with the candidate alone."
    return Verdict(action="reject", reason=f"{reason} {refused}")
