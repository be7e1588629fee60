"""Which mistakes the next round of contrast pairs asks for, how near to right, and when rounds end. Pure.

Everything follows from how the critic was measured before the first round and after each, so that a
curriculum that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Self

from pydantic import Field, model_validator

from reflact.calibration.metrics import Scored, measure_accuracy
from reflact.data import make_rng, shuffle
from reflact.intervals import wilson_interval
from reflact.memory import MISTAKES, Share
from reflact.roles import ConfigSection
from reflact.types import FrozenModel

LEAST_WIDTH = 0.5
"""Wrong scores may always lie this far apart, however late the round."""

EXPLORED = 0.5
"""The part of a round that goes to all kinds equally, whatever was measured."""


class KindShare(FrozenModel):
    """The part of a round that goes to one kind of mistake."""

    mistake: str
    share: Share


class Round(FrozenModel):
    """What one round asks for.

    Args:
        number: From 1.
        shares: The kinds of mistakes and their parts, which add up to 1.
        nearest: The least distance of a wrong phi after from the right one.
        farthest: The largest one.
    """

    number: int = Field(ge=1)
    shares: tuple[KindShare, ...] = Field(min_length=1)
    nearest: float = Field(gt=0, le=10)
    farthest: float = Field(gt=0, le=10)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if abs(sum(kind.share for kind in self.shares) - 1) > 1e-6:
            raise ValueError("the shares of a round must add up to 1")
        if len({kind.mistake for kind in self.shares}) != len(self.shares):
            raise ValueError("a kind of mistake stands twice among the shares")
        if self.nearest > self.farthest:
            raise ValueError(f"nearest ({self.nearest:g}) must not exceed farthest ({self.farthest:g})")
        return self


class KindMeasured(FrozenModel):
    """How many steps of pairs for one kind of mistake the critic scored rightly; it learned from them."""

    mistake: str
    right: int = Field(ge=0)
    steps: int = Field(ge=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.right > self.steps:
            raise ValueError(f"{self.right} of {self.steps} steps cannot be right")
        return self


class Measured(FrozenModel):
    """The critic's pairwise accuracy on held-out steps, and how it did by kind of mistake on learned ones."""

    accuracy: Share
    kinds: tuple[KindMeasured, ...] = ()


class CurriculumSettings(ConfigSection):
    """How many rounds of contrast pairs there are, and what they ask for."""

    mistakes: tuple[str, ...] = Field(MISTAKES, min_length=1, description="Kinds of mistakes to ask for.")
    margin: float = Field(1.0, gt=0, le=5, description="Least distance of a wrong phi from the right one.")
    rounds: int = Field(3, ge=1, description="Rounds at most.")
    patience: int = Field(1, ge=1, description="Rounds that may pass without a gain.")
    least_gain: float = Field(0.01, ge=0, le=1, description="Gain in held-out accuracy that counts as one.")


def next_round(history: Sequence[Measured], settings: CurriculumSettings) -> Round | None:
    """Return the next round, or None where there is none: all were made, or accuracy has stopped rising.

    Half of a round is dealt to all kinds equally. The other half goes by what is known of the critic's
    weakness: in proportion to the lower 95% bound of its error rate on each kind, so that a kind about which
    little is known attracts no more than its part. Where no kind is known to be weak, all are equal.
    The largest distance of a wrong score from the right one falls by half of what it exceeds the margin by,
    from round to round.

    Args:
        history: How the critic was measured before the first round and after each; may be empty before it.
        settings: The kinds and limits.
    """
    done = max(0, len(history) - 1)
    if done >= settings.rounds or plateau(history, settings):
        return None
    width = max(LEAST_WIDTH, (10 - settings.margin) * 0.5**done)
    return Round(
        number=done + 1,
        shares=_shares(settings.mistakes, history[-1] if history else None),
        nearest=settings.margin,
        farthest=min(10.0, settings.margin + width),
    )


def plateau(history: Sequence[Measured], settings: CurriculumSettings) -> bool:
    """Whether the last ``patience`` rounds gained less than ``least_gain`` over the best before them."""
    accuracies = [measured.accuracy for measured in history]
    before, lately = accuracies[: -settings.patience], accuracies[-settings.patience :]
    return bool(before) and max(lately) - max(before) < settings.least_gain


def measured(scored: Sequence[Scored]) -> Measured | None:
    """Return what a curriculum needs to know of a critic's scores; None where no states could be compared."""
    accuracy = measure_accuracy(scored)
    if accuracy is None:
        return None
    steps = Counter(mistake for step in scored for mistake in step.mistakes)
    right = Counter(mistake for step in scored if step.right for mistake in step.mistakes)
    kinds = tuple(KindMeasured(mistake=k, right=right[k], steps=steps[k]) for k in sorted(steps))
    return Measured(accuracy=accuracy, kinds=kinds)


def deal(plan: Round, *, trace_id: str, events: int, each: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """Return for each event of a trace which kinds of mistakes to make pairs of: ``each`` of them.

    Over the events of a trace the kinds have their shares, rounded up or down; over many traces they have
    them whole, since which way is drawn for each trace. A kind goes to an event twice only where it has
    more places than there are events. All of it follows from seed, round and trace.
    """
    label = f"contrast/deal/{plan.number}/{trace_id}"
    counts = apportion(
        shuffle(plan.shares, seed, f"{label}/kinds"), events * each, at=make_rng(seed, label).random()
    )
    row = [kind for kind, count in sorted(counts.items(), key=lambda k: (-k[1], k[0])) for _ in range(count)]
    hands: list[list[str]] = [[] for _ in range(events)]
    order = shuffle(range(events), seed, f"{label}/events")
    for place, kind in enumerate(row):
        hands[order[place % events]].append(kind)
    return tuple(tuple(hand) for hand in hands)


def apportion(shares: Sequence[KindShare], places: int, *, at: float) -> dict[str, int]:
    """Return how many of so many places each kind gets: its share, rounded up or down without bias.

    Systematic sampling (W. G. Madow, Annals of Mathematical Statistics 20 (1949), 333-354): the shares lie
    end to end, and a place goes to the kind in whose part its mark falls. Marks lie one place apart.

    Args:
        shares: The kinds and their parts.
        places: How many there are.
        at: Where the first mark lies, from 0 to below 1; drawn evenly, each kind gets its part on average.
    """
    total, end, first = sum(Fraction(kind.share) for kind in shares), Fraction(0), Fraction(at)
    counts = {}
    for kind in shares:
        start, end = end, end + Fraction(kind.share) / total * places
        counts[kind.mistake] = ceil(end - first) - ceil(start - first)
    return counts


def _shares(mistakes: Sequence[str], last: Measured | None) -> tuple[KindShare, ...]:
    known = {kind.mistake: kind for kind in last.kinds} if last is not None else {}
    weak = {m: _weakness(known[m]) if m in known else 0.0 for m in mistakes}
    total, equal = sum(weak.values()), 1 / len(mistakes)
    parts = {m: weak[m] / total if total > 0 else equal for m in mistakes}
    return tuple(KindShare(mistake=m, share=EXPLORED * equal + (1 - EXPLORED) * parts[m]) for m in mistakes)


def _weakness(kind: KindMeasured) -> float:
    return wilson_interval(kind.steps - kind.right, kind.steps)[0]


def history_of(held_out: Sequence[Scored | None], invited: Sequence[Scored | None]) -> list[Measured]:
    """Return what a curriculum may know: accuracy on held-out steps, kinds on those that are learned from.

    Which kinds the critic is weak on is never read off the held-out steps, whose tests have to stay blind
    to how their batches came about.
    """
    accuracy = measure_accuracy([one for one in held_out if one is not None])
    if accuracy is None:
        return []
    learned = measured([one for one in invited if one is not None])
    kinds: tuple[KindMeasured, ...] = () if learned is None else learned.kinds
    return [Measured(accuracy=accuracy, kinds=kinds)]
