"""What a run reports of itself: consumption, scores and the summary."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from reflact.types import Frozen, Split, Version


class Usage(Frozen):
    """What calls consumed: tokens as the provider counted them; ``usd`` is None where no price is known."""

    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usd: float | None = None

    def __add__(self, other: Usage) -> Usage:
        usd = None if self.usd is None and other.usd is None else (self.usd or 0.0) + (other.usd or 0.0)
        return Usage(
            calls=self.calls + other.calls,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            usd=usd,
        )


class Spend(Frozen):
    """A run's usage for one role and purpose; ``unsettled`` counts calls that a crash cut off in flight."""

    role: str
    purpose: str
    usage: Usage
    unsettled: int = 0


class Scored(Frozen):
    """A score shown to people: mean, count and 95% interval of a skill on a split.

    The interval is Wilson's for scores of 0 and 1, a normal one otherwise (see ``reflact.gate.interval``).
    """

    name: str
    skill_hash: str
    split: Split
    n: int
    unmeasured: int = 0
    successes: float = 0.0
    hard: float | None = None
    soft: float | None = None
    low: float | None = None
    high: float | None = None


class EpochStats(Frozen):
    """Counts of one epoch's decisions and the gate scores at its end."""

    epoch: int
    steps: int
    accepts: int
    rejects: int
    skips: int
    current_score: float | None
    best_score: float | None


Status = Literal["completed", "budget", "cancelled", "failed"]


class RunSummary(Frozen):
    """The outcome of a run: what ``Trainer.train`` returns and ``summary.json`` holds."""

    run_id: str
    status: Status
    reason: str | None = None
    steps: int = 0
    accepts: int = 0
    rejects: int = 0
    skips: int = 0
    best: Version | None = None
    final: Version | None = None
    scores: tuple[Scored, ...] = ()
    epochs: tuple[EpochStats, ...] = ()
    spend: tuple[Spend, ...] = ()
    test_openings: int = 0
    seconds: float = 0.0
    config: JsonValue = None

    def score(self, name: str, split: Split) -> Scored | None:
        """Return the score of ``baseline``, ``placebo``, ``best`` or ``final`` on a split, or None."""
        return next((s for s in self.scores if s.name == name and s.split is split), None)
