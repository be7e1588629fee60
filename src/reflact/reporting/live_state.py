"""The state of a run for the live view: each event updates one frozen value. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import JsonValue

from reflact import events
from reflact.records import SkillVersion


@dataclass(frozen=True)
class StageProgress:
    """A stage of the current step.

    Attributes:
        since: When it started.
        done: How many of its parts are done.
        total: How many parts it has; None if it has no parts.
        seconds: How long it took; None until it finishes.
    """

    step: int
    name: events.Stage
    started_at: float
    done: int = 0
    total: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class CallDraft:
    """The partial reply of a model call.

    Attributes:
        finished: Whether the call is over.
        refused: Why the last attempt was refused; None if it was not.
    """

    call_id: str
    role: str
    purpose: str
    attempt: int
    draft: JsonValue = None
    finished: bool = False
    refusal: str | None = None


@dataclass(frozen=True)
class LiveState:
    """A run at one moment, as known from its events. All times are seconds of one clock.

    Attributes:
        name: The name of the run's folder.
        epochs: The planned number of epochs; None if it is not known.
        began: When the view was opened.
        step: The current or the last step; 0 before the first.
        step_since: When this step started; None if the view did not see its start.
        results: The committed steps.
        step_seconds: How long each step took that the view saw from start to commit.
        stages: The stages of the current step, in the order of their starts.
        looks: The looks of the gate in the current decision.
        budget_at: When ``budget`` was reported.
        failed_calls: How many model calls ended without a reply.
        pauses: The last pause of each endpoint, and when it was reported.
        drafts: Calls that are being written, or the last one that was.
    """

    name: str = ""
    epochs: int | None = None
    opened_at: float = 0.0
    plan: events.RunStarted | None = None
    max_rollouts: int | None = None
    baseline: float | None = None
    current: SkillVersion | None = None
    best: SkillVersion | None = None
    epoch: int = 0
    step: int = 0
    step_started_at: float | None = None
    results: tuple[events.StepCommitted, ...] = ()
    step_seconds: tuple[float, ...] = ()
    stages: tuple[StageProgress, ...] = ()
    trials: tuple[events.TrialRequested, ...] = ()
    budget: events.BudgetUpdated | None = None
    budget_updated_at: float = 0.0
    failed_calls: int = 0
    pauses: tuple[tuple[float, events.RateLimited], ...] = ()
    drafts: tuple[CallDraft, ...] = ()

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None if the plan is not known."""
        return None if self.plan is None or self.epochs is None else self.plan.steps_per_epoch * self.epochs

    @property
    def last_committed_step(self) -> int:
        """The last committed step; 0 before the first."""
        return self.results[-1].step if self.results else 0

    def estimate_seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the last step is committed; None without a timed step.

        Each step that is left counts as the mean of the timed steps. The time of the current step is
        deducted, up to that mean. The estimate leaves out the ends of epochs, the promotion and the final
        test, and later steps may need more rollouts for the gate than earlier ones.
        """
        left = 0 if self.total_steps is None else self.total_steps - self.last_committed_step
        if left <= 0 or not self.step_seconds:
            return None
        mean = sum(self.step_seconds) / len(self.step_seconds)
        begun = (
            0.0
            if self.step_started_at is None or self.step <= self.last_committed_step
            else now - self.step_started_at
        )
        return mean * (left - 1) + max(mean - begun, 0.0)


def update_state(state: LiveState, event: events.Event, at: float) -> LiveState:
    """Return the state after an event that came at a moment."""
    match event:
        case events.RunStarted():
            state = replace(state, plan=event)
        case events.GatePowerEstimated():
            state = replace(state, max_rollouts=event.rollouts)
        case events.BaselineMeasured():
            state = replace(_clear_step(state), baseline=event.score)
        case events.StepStarted():
            state = replace(_clear_step(state), step=event.step, epoch=event.epoch, step_started_at=at)
        case events.StepCommitted():
            state = _add_result(state, event, at)
        case events.EpochCommitted() | events.PromotionJudged():
            current = event.current if isinstance(event, events.EpochCommitted) else state.current
            state = replace(_clear_step(state), current=current, best=event.best)
        case events.SkillVersionCreated(version=version) if state.current is None:
            state = replace(state, current=version, best=version)
        case events.TrialRequested():
            earlier = [
                trial for trial in state.trials if (trial.step, trial.part) == (event.step, event.part)
            ]
            state = replace(state, trials=(*earlier, event))
        case events.StageStarted() | events.StageFinished() | events.StageProgressed():
            state = _update_stage(state, event, at)
        case events.DraftUpdated() | events.DraftDiscarded() | events.ModelCallFinished():
            state = _update_draft(state, event)
        case events.BudgetUpdated():
            state = replace(state, budget=event, budget_updated_at=at)
        case events.RateLimited():
            others = (entry for entry in state.pauses if entry[1].endpoint != event.endpoint)
            state = replace(state, pauses=(*others, (at, event)))
    return state


def restore_state(state: LiveState, earlier: Iterable[events.Event]) -> LiveState:
    """Return the state after the events of earlier starts, without the times of their steps."""
    for event in earlier:
        state = update_state(state, event, state.opened_at)
    return replace(state, step_seconds=(), step_started_at=None)


def _clear_step(state: LiveState) -> LiveState:
    return replace(state, stages=(), trials=(), drafts=())


def _add_result(state: LiveState, event: events.StepCommitted, at: float) -> LiveState:
    begun = state.step_started_at if state.step == event.step else None
    earlier = (result for result in state.results if result.step < event.step)
    return replace(
        _clear_step(state),
        step=max(state.step, event.step),
        epoch=event.epoch,
        step_started_at=None,
        results=(*earlier, event),
        step_seconds=state.step_seconds + (() if begun is None else (at - begun,)),
        current=event.current,
        best=event.best,
    )


def _update_stage(
    state: LiveState, event: events.StageStarted | events.StageFinished | events.StageProgressed, at: float
) -> LiveState:
    stages = {stage.name: stage for stage in state.stages if stage.step == event.step}
    stage = stages.get(event.stage, StageProgress(event.step, event.stage, started_at=at))
    match event:
        case events.StageStarted():
            stage = StageProgress(event.step, event.stage, started_at=at)
        case events.StageFinished():
            stage = replace(stage, seconds=event.seconds)
        case events.StageProgressed():
            stage = replace(stage, done=event.done, total=event.total)
    stages[event.stage] = stage
    return replace(state, stages=tuple(stages.values()), step=max(state.step, event.step))


def _update_draft(
    state: LiveState, event: events.DraftUpdated | events.DraftDiscarded | events.ModelCallFinished
) -> LiveState:
    drafts = {draft.call_id: draft for draft in state.drafts}
    known = drafts.get(event.call_id)
    if isinstance(event, events.ModelCallFinished):
        state = replace(state, failed_calls=state.failed_calls + (event.outcome == "failed"))
        if known is None:
            return state
        drafts[event.call_id] = mine = replace(known, finished=True)
    else:
        mine = CallDraft(event.call_id, event.role, event.purpose, event.attempt)
        if isinstance(event, events.DraftUpdated):
            mine = replace(mine, draft=event.draft)
        else:
            mine = replace(mine, draft=known.draft if known else None, refusal=event.reason)
        drafts[event.call_id] = mine
    return replace(state, drafts=tuple(d for d in drafts.values() if d is mine or not d.finished))
