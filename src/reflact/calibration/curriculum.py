"""Which mistakes the next round of contrast pairs asks for, how near to right, and when rounds end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from reflact.calibration.metrics import ScoredStep, pairwise_accuracy
from reflact.config.models import ConfigSection, option
from reflact.data import make_rng, shuffle
from reflact.gate.intervals import wilson_interval
from reflact.memory.models import MISTAKE_KINDS, Share
from reflact.types import FrozenModel

MIN_BAND_WIDTH = 0.5
"""Wrong scores may always lie this far apart, however late the round."""

EXPLORED_SHARE = 0.5
"""The part of a round that goes to all kinds equally, whatever was measured."""

MAX_MEASURED_STEPS = 24
"""On so many steps of a round's pairs at most, the critic's weak kinds of mistakes are measured: the first by hash."""


class MistakeShare(FrozenModel):
    """The part of a round that goes to one kind of mistake."""

    mistake: str
    share: Share


class RoundPlan(FrozenModel):
    """What one round asks for: kinds of mistakes with parts that add up to 1, and the distance of wrong scores."""

    number: int = Field(ge=1)
    shares: tuple[MistakeShare, ...] = Field(min_length=1)
    nearest: float = Field(gt=0, le=10)
    farthest: float = Field(gt=0, le=10)

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if abs(sum(kind.share for kind in self.shares) - 1) > 1e-6:
            raise ValueError("the shares of a round must add up to 1")
        if len({kind.mistake for kind in self.shares}) != len(self.shares):
            raise ValueError("a kind of mistake stands twice among the shares")
        if self.nearest > self.farthest:
            raise ValueError(f"nearest ({self.nearest:g}) must not exceed farthest ({self.farthest:g})")
        return self


class MistakeAccuracy(FrozenModel):
    """How many steps of pairs for one kind of mistake the critic scored rightly; it learned from them."""

    mistake: str
    n_right: int = Field(ge=0)
    n_steps: int = Field(ge=1)


class CriticAccuracyByMistake(FrozenModel):
    """The critic's accuracy and error on held-out steps, and how it did by kind of mistake on learned ones.

    ``accuracy`` is pairwise, ``error`` the mean absolute error of progress; None if it is not known.
    """

    accuracy: Share
    error: float | None = Field(default=None, ge=0, le=10)
    by_mistake: tuple[MistakeAccuracy, ...] = ()


class CurriculumSettings(ConfigSection):
    """How many rounds of contrast pairs there are, and what they ask for."""

    mistakes: tuple[str, ...] = option(
        MISTAKE_KINDS, min_length=1, description="Kinds of mistakes in the rounds."
    )
    min_distance: float = option(
        1.0, gt=0, le=5, description="Least distance of a wrong score from the right one."
    )
    max_rounds: int = option(3, ge=1, description="Maximum number of rounds.")
    patience: int = option(1, ge=1, description="Number of rounds without a gain after which rounds end.")
    min_gain: float = option(
        0.01, ge=0, le=1, description="Least increase of held-out pairwise accuracy that counts as a gain."
    )
    min_error_drop: float = option(
        0.1, gt=0, le=10, description="Least decrease of the held-out error that counts as a gain."
    )


def plan_next_round(
    history: Sequence[CriticAccuracyByMistake], settings: CurriculumSettings
) -> RoundPlan | None:
    """Return the next round, or None if all were made or neither accuracy nor error still moves.

    Half of a round is dealt to all kinds equally. The other half goes by the lower 95% bound of the critic's error rate
    on each kind. The room for distances beyond the smallest one halves from round to round.

    Args:
        history: How the critic was measured before the first round and after each; may be empty before it.
        settings: The kinds and limits.
    """
    done = max(0, len(history) - 1)
    if done >= settings.max_rounds or has_plateaued(history, settings):
        return None
    width = max(MIN_BAND_WIDTH, (10 - settings.min_distance) * 0.5**done)
    return RoundPlan(
        number=done + 1,
        shares=_compute_shares(settings.mistakes, history[-1] if history else None),
        nearest=settings.min_distance,
        farthest=min(10.0, settings.min_distance + width),
    )


def has_plateaued(history: Sequence[CriticAccuracyByMistake], settings: CurriculumSettings) -> bool:
    """Whether the last ``patience`` rounds gained too little over the best before them, in accuracy and in error.

    Accuracy alone is not enough: a critic that inflates evenly orders all states rightly from the start.
    """
    before, lately = history[: -settings.patience], history[-settings.patience :]
    if not before:
        return False
    rise = max(m.accuracy for m in lately) - max(m.accuracy for m in before)
    errors = [[m.error for m in part if m.error is not None] for part in (before, lately)]
    drop = min(errors[0]) - min(errors[1]) if all(errors) else 0.0
    return rise < settings.min_gain and drop < settings.min_error_drop


def deal_mistakes(
    round_plan: RoundPlan, *, trace_id: str, n_events: int, per_event: int, seed: int
) -> tuple[tuple[str, ...], ...]:
    """Return for each event of a trace which kinds of mistakes to make pairs of: ``per_event`` of them.

    The kinds have their shares, rounded by chance. An event gets a kind twice only if it must.
    """
    label = f"contrast/deal/{round_plan.number}/{trace_id}"
    counts = apportion(
        shuffle(round_plan.shares, seed, f"{label}/kinds"),
        n_events * per_event,
        offset=make_rng(seed, label).random(),
    )
    row = [kind for kind, count in sorted(counts.items(), key=lambda k: (-k[1], k[0])) for _ in range(count)]
    hands: list[list[str]] = [[] for _ in range(n_events)]
    order = shuffle(range(n_events), seed, f"{label}/events")
    for index, kind in enumerate(row):
        hands[order[index % n_events]].append(kind)
    return tuple(tuple(hand) for hand in hands)


def apportion(shares: Sequence[MistakeShare], n_places: int, *, offset: float) -> dict[str, int]:
    """Return how many of so many places each kind gets: its share, rounded up or down without bias.

    Systematic sampling (W. G. Madow, Annals of Mathematical Statistics 20 (1949), 333-354): the shares lie end to end,
    and a place goes to the kind in whose part its mark falls. Marks lie one place apart. ``offset`` is the position of
    the first one, in [0, 1); if it is drawn uniformly, each kind gets its share on average.
    """
    total, end, first = sum(Fraction(kind.share) for kind in shares), Fraction(0), Fraction(offset)
    counts = {}
    for kind in shares:
        start, end = end, end + Fraction(kind.share) / total * n_places
        counts[kind.mistake] = ceil(end - first) - ceil(start - first)
    return counts


def _compute_shares(
    mistakes: Sequence[str], last_accuracy: CriticAccuracyByMistake | None
) -> tuple[MistakeShare, ...]:
    known = {kind.mistake: kind for kind in last_accuracy.by_mistake} if last_accuracy is not None else {}
    weak = dict.fromkeys(mistakes, 0.0)
    for m in known.keys() & weak.keys():
        weak[m] = wilson_interval(known[m].n_steps - known[m].n_right, known[m].n_steps)[0]
    total, equal = sum(weak.values()), 1 / len(mistakes)
    parts = {m: weak[m] / total if total > 0 else equal for m in mistakes}
    return tuple(
        MistakeShare(mistake=m, share=EXPLORED_SHARE * equal + (1 - EXPLORED_SHARE) * parts[m])
        for m in mistakes
    )


def build_history(
    held_out: Sequence[ScoredStep | None], learned: Sequence[ScoredStep | None]
) -> list[CriticAccuracyByMistake]:
    """Return what a curriculum may know: accuracy on held-out steps, kinds on those that are learned from.

    Held-out steps never say which kinds the critic is weak on: tests stay blind to how their batches were made.
    """
    measured = [step for step in held_out if step is not None]
    accuracy = pairwise_accuracy(measured)
    if accuracy is None:
        return []
    error = fmean(abs(step.error) for step in measured)
    known = [(mistake, step.is_right) for step in learned if step is not None for mistake in step.mistakes]
    n_steps, n_right = Counter(mistake for mistake, _ in known), Counter(m for m, right in known if right)
    kinds = (MistakeAccuracy(mistake=m, n_right=n_right[m], n_steps=n_steps[m]) for m in sorted(n_steps))
    return [CriticAccuracyByMistake(accuracy=accuracy, error=error, by_mistake=tuple(kinds))]
