"""What is known of a run while it goes on: events folded into one frozen value. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import JsonValue

from reflact import events
from reflact.records import Version
from reflact.types import Action


@dataclass(frozen=True)
class StageSeen:
    """A stage of the step under way; ``seconds`` is None until it is over, ``total`` without parts."""

    step: int
    name: events.Stage
    since: float
    done: int = 0
    total: int | None = None
    note: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class StepTaken:
    """A committed step: its decision, and the current score after it."""

    step: int
    action: Action
    score: float | None


@dataclass(frozen=True)
class Writing:
    """What a call has written so far; ``over`` once it is done, ``refused`` where that counts for nothing."""

    sample: str
    role: str
    purpose: str
    attempt: int
    draft: JsonValue = None
    over: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class Waiting:
    """An endpoint that is left alone until a moment, and the calls a second at which it goes on."""

    endpoint: str
    status: int | None
    until: float
    rate: float | None


@dataclass(frozen=True)
class Watched:
    """A run at one moment, as far as its events have told. Moments are seconds of one clock.

    Args:
        name: What the run is called.
        epochs: How many it is planned to have; None where that is not known.
        began: When watching it began.
        plan: Its plan.
        most_rollouts: The most that one decision may take.
        baseline: The initial skill's score.
        current: The current version.
        best: The best version.
        epoch: The epoch of the step under way, or of the last one.
        step: The step under way, or the last one; 0 before the first.
        step_since: When that step began; None where it began before it was watched.
        taken: The committed steps, in order.
        step_seconds: What each step took that was watched from its beginning to its commit.
        stages: The stages of the step under way, in the order in which they began.
        looks: What the gate asked for in the decision under way.
        budget: What was last told of consumption and limits.
        budget_at: When.
        failed_calls: How many model calls ended without a reply.
        waiting: Endpoints that have asked for less, each with the last that it said.
        writing: Calls that are being written, and the last one that was.
    """

    name: str = ""
    epochs: int | None = None
    began: float = 0.0
    plan: events.RunStarted | None = None
    most_rollouts: int | None = None
    baseline: float | None = None
    current: Version | None = None
    best: Version | None = None
    epoch: int = 0
    step: int = 0
    step_since: float | None = None
    taken: tuple[StepTaken, ...] = ()
    step_seconds: tuple[float, ...] = ()
    stages: tuple[StageSeen, ...] = ()
    looks: tuple[events.GateLooked, ...] = ()
    budget: events.BudgetMoved | None = None
    budget_at: float = 0.0
    failed_calls: int = 0
    waiting: tuple[Waiting, ...] = ()
    writing: tuple[Writing, ...] = ()

    @property
    def total(self) -> int | None:
        """The steps of the whole run; None where the plan is not known."""
        return None if self.plan is None or self.epochs is None else self.plan.steps_per_epoch * self.epochs

    @property
    def committed(self) -> int:
        """The last committed step; 0 before the first."""
        return self.taken[-1].step if self.taken else 0

    def seconds_left(self, now: float) -> float | None:
        """Return an estimate of the seconds to the end of the last step; None before one was watched.

        Each step that is left counts as the mean of those watched from beginning to commit; what the step
        under way has taken is deducted, up to that mean. The ends of epochs, the promotion and the final
        test are not in it, nor that later steps may ask more of the gate than earlier ones.
        """
        left = 0 if self.total is None else self.total - self.committed
        if left <= 0 or not self.step_seconds:
            return None
        mean = sum(self.step_seconds) / len(self.step_seconds)
        begun = 0.0 if self.step_since is None or self.step <= self.committed else now - self.step_since
        return mean * (left - 1) + max(mean - begun, 0.0)


def fold(watched: Watched, event: events.Event, at: float) -> Watched:
    """Return what is known after an event that came at a moment."""
    match event:
        case events.RunStarted():
            watched = replace(watched, plan=event)
        case events.Outlook():
            watched = replace(watched, most_rollouts=event.rollouts)
        case events.BaselineMeasured():
            watched = replace(_decided(watched), baseline=event.score)
        case events.StepStarted():
            watched = replace(_decided(watched), step=event.step, epoch=event.epoch, step_since=at)
        case events.StepCommitted():
            watched = _committed(watched, event, at)
        case events.EpochClosed() | events.Promoted():
            current = event.current if isinstance(event, events.EpochClosed) else watched.current
            watched = replace(_decided(watched), current=current, best=event.best)
        case events.SkillMade(version=version) if watched.current is None:
            watched = replace(watched, current=version, best=version)
        case events.GateLooked():
            same = [look for look in watched.looks if (look.step, look.part) == (event.step, event.part)]
            watched = replace(watched, looks=(*same, event))
        case events.StageStarted() | events.StageFinished() | events.Progress():
            watched = _staged(watched, event, at)
        case events.Drafted() | events.DraftReset() | events.ModelCalled():
            watched = _written(watched, event)
        case events.BudgetMoved():
            watched = replace(watched, budget=event, budget_at=at)
        case events.BackedOff():
            others = (w for w in watched.waiting if w.endpoint != event.endpoint)
            said = Waiting(event.endpoint, event.status, at + event.seconds, event.rate)
            watched = replace(watched, waiting=(*others, said))
    return watched


def recalled(watched: Watched, told: Iterable[events.Event]) -> Watched:
    """Return what is known after events of an earlier start; how long its steps took is not."""
    for event in told:
        watched = fold(watched, event, watched.began)
    return replace(watched, step_seconds=(), step_since=None)


def _decided(watched: Watched) -> Watched:
    """Forget what only the decision under way was about."""
    return replace(watched, stages=(), looks=(), writing=())


def _committed(watched: Watched, event: events.StepCommitted, at: float) -> Watched:
    begun = watched.step_since if watched.step == event.step else None
    seconds = () if begun is None else (at - begun,)
    earlier = (taken for taken in watched.taken if taken.step < event.step)
    return replace(
        _decided(watched),
        step=max(watched.step, event.step),
        epoch=event.epoch,
        step_since=None,
        taken=(*earlier, StepTaken(event.step, event.action, event.current.score)),
        step_seconds=watched.step_seconds + seconds,
        current=event.current,
        best=event.best,
    )


def _staged(
    watched: Watched, event: events.StageStarted | events.StageFinished | events.Progress, at: float
) -> Watched:
    place = (event.step, event.stage)
    known = next((stage for stage in watched.stages if (stage.step, stage.name) == place), None)
    stage = known or StageSeen(event.step, event.stage, since=at)
    match event:
        case events.StageStarted():
            stage = StageSeen(event.step, event.stage, since=at)
        case events.StageFinished():
            stage = replace(stage, seconds=event.seconds)
        case events.Progress():
            stage = replace(stage, done=event.done, total=event.total, note=event.note)
    if known is None:
        stages = (*(s for s in watched.stages if s.step == event.step), stage)
    else:
        stages = tuple(stage if s is known else s for s in watched.stages)
    return replace(watched, stages=stages, step=max(watched.step, event.step))


def _written(watched: Watched, event: events.Drafted | events.DraftReset | events.ModelCalled) -> Watched:
    known = next((w for w in watched.writing if w.sample == event.sample), None)
    if isinstance(event, events.ModelCalled):
        watched = replace(watched, failed_calls=watched.failed_calls + (event.outcome == "failed"))
        if known is None:
            return watched
        mine = replace(known, over=True)
    else:
        mine = Writing(event.sample, event.role, event.purpose, event.attempt)
        if isinstance(event, events.Drafted):
            mine = replace(mine, draft=event.draft)
        else:
            mine = replace(mine, draft=None if known is None else known.draft, refused=event.reason)
    if known is None:
        return replace(watched, writing=(*(w for w in watched.writing if not w.over), mine))
    writing = (mine if w is known else w for w in watched.writing)
    return replace(watched, writing=tuple(w for w in writing if w is mine or not (mine.over and w.over)))
