"""What a round of contrast pairs is made by, and what comes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from reflact.calibration.mistakes import Mistake
from reflact.memory import Construction, ContrastPair
from reflact.roles import Section
from reflact.types import Frozen

DropReason = Literal[
    "unverified",
    "disagreement",
    "not_applicable",
    "not_confirmed",
    "bad_reply",
    "too_long",
    "known",
    "duplicate",
    "judged_wrong",
    "decided_by_position",
]
"""Why a candidate became no pair.

``unverified``: there is neither gold nor a critic to agree with itself. ``disagreement``: its samples lie too
far apart, or one gave nothing that counts. ``not_applicable``: no construction makes this mistake of this
step within the round's distances. ``not_confirmed``: the samples for another purpose do not bear out that
the evaluation is wrong for it. ``bad_reply``: no reply was valid. ``too_long``: the prompt exceeds the
model's context. ``known``: the pair was there before. ``duplicate``: an earlier candidate of this round gave
the same pair, or speaks of an equal step. ``judged_wrong``: too few comparisons found the right side.
``decided_by_position``: in one order fewer than half found it.
"""


class Drop(Frozen):
    """Why a candidate became no pair.

    Args:
        reason: The kind of reason.
        words: The reason in words.
        step: The event's step in its trace.
        mistake: The kind of mistake that was wanted.
        construction: How the wrong side was to come about; None where it did not come to that.
    """

    reason: DropReason
    words: str
    step: int
    mistake: str
    construction: Construction | None = None


class Made(Frozen):
    """What became of a round's candidates over one trace, in the order of events, whatever finished first.

    Args:
        pairs: Kept pairs; no two have one id.
        drops: What the other candidates failed at.
        candidates: How many there were: ``len(pairs) + len(drops)``.
        skipped: Events that were not selected: they moved, but by less than ``min_delta``.
    """

    pairs: tuple[ContrastPair, ...] = ()
    drops: tuple[Drop, ...] = ()
    candidates: int = Field(default=0, ge=0)
    skipped: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.candidates != len(self.pairs) + len(self.drops):
            raise ValueError(
                f"{self.candidates} candidates, but {len(self.pairs)} pairs and {len(self.drops)} drops"
            )
        return self


class ContrastSettings(Section):
    """How contrast pairs are made."""

    min_delta: float = Field(0.5, ge=0, le=10, description="Least |delta phi| of the events to learn from.")
    include_no_change: bool = Field(True, description="Learn from events without any change as well.")
    per_event: int = Field(4, ge=1, description="Candidates for each event.")
    samples: int = Field(3, ge=2, description="Critic samples that have to agree where there is no gold.")
    max_spread: float = Field(1.0, ge=0, le=10, description="How far apart they may lie.")
    judges: int = Field(0, ge=0, description="Blind comparisons of each pair; 0: none, else at least 2.")
    judged: Literal["all", "unproven"] = Field(
        "all",
        description="Which pairs are compared: `all`, or those that are `unproven`, where a model wrote the "
        "mistake or the other purpose, or samples had to agree on what is right. What follows from gold and "
        "construction needs no judge to be right; it then has no difficulty either.",
    )
    agreement: float = Field(0.6, gt=0.5, le=1, description="Least share of them that finds the right side.")
    concurrency: int = Field(
        8,
        ge=1,
        description="Of one trace: steps that pairs are made of at a time, and questions in flight, each at "
        "most.",
    )
    state_tokens: int = Field(
        2000,
        ge=32,
        description="Room for each of: purpose, state before, action, state after, change; in tokens.",
    )
    near_misses: bool = Field(True, description="Let a model write another purpose where no trace has one.")
    mistakes: tuple[Mistake, ...] = Field((), description="Kinds of mistakes of one's own, described.")
    seed: int = Field(0, description="Seed of the balance of sides and of which event gets which kind.")

    @model_validator(mode="after")
    def _both_orders(self) -> Self:
        if self.judges == 1:
            raise ValueError("one comparison shows one order only; judges is 0 or at least 2")
        return self


DEFAULTS = ContrastSettings()

Report: TypeAlias = Callable[[ContrastPair | Drop], Awaitable[None]]
"""Is told of each pair and each drop as it comes about."""
