"""How far a run is, as known from its events, in rows that a terminal or a page can lay out."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from reflact import events
from reflact.records import SkillVersion, Usage
from reflact.reporting import facts
from reflact.text import format_duration, format_score, name_count

# Of stages that overlap, the newest are shown.
MAX_STAGES = 3

# After these events nothing of a step's stages and drafts is left to show.
STAGE_ENDS = (
    events.BaselineMeasured,
    events.StepStarted,
    events.StepCommitted,
    events.EpochCommitted,
    events.PromotionJudged,
)

# What a page in another process must know beside the durable events, which are in the store.
LIVE_EVENTS = (
    events.StageStarted,
    events.StageProgressed,
    events.StageFinished,
    events.DraftUpdated,
    events.DraftDiscarded,
    events.BudgetUpdated,
)

# Of these there are many, so they are written once in so many seconds.
FREQUENT_EVENTS = (events.StageProgressed, events.DraftUpdated, events.BudgetUpdated)
WRITE_SECONDS = 1.0

# The share of a limit from which on a row stands out.
NEAR_LIMIT = 0.9


@dataclass
class StageProgress:
    """A stage of the current step: its measurements by their notes, and the optimizer's calls."""

    started_at: float
    parts: dict[str, events.StageProgressed] = field(default_factory=dict)
    n_calls: int = 0
    is_over: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether it has not finished, and is not waiting for another stage."""
        parts = self.parts.values()
        is_measured = bool(parts) and all(part.done >= part.total for part in parts)
        return not self.is_over and not is_measured

    def describe(self, now: float) -> str:
        """Return its counts, and its remaining time if it goes on as fast as so far.

        Rollouts that were found in the store say nothing about the pace.
        """
        elapsed = max(now - self.started_at, 0.0)
        if not self.parts:
            calls = f" ({name_count(self.n_calls, 'call')} done)" if self.n_calls else ""
            return f"for {format_duration(elapsed)}{calls}"
        done = sum(part.done for part in self.parts.values())
        total = sum(part.total for part in self.parts.values())
        n_stored = sum(part.from_store for part in self.parts.values())
        notes = [f"{n_stored:,} from the store"] if n_stored else []
        if n_stored < done < total:
            seconds_left = elapsed / (done - n_stored) * (total - done)
            notes.append(f"about {format_duration(seconds_left)} left")
        counts = f"{done} of {total}"
        return f"{counts} ({', '.join(notes)})" if notes else counts


class ProgressRow(NamedTuple):
    """A row of the state of a run; ``is_alarm`` if it deserves attention."""

    label: str
    text: str
    is_alarm: bool = False


@dataclass
class RunProgress:
    """A run at one moment. All times are seconds of one clock.

    Attributes:
        step: The current or the last step; 0 before the first.
        last_step: The last committed step; 0 before the first.
        step_started_at: When this step started; None if its start was not seen.
        step_seconds: How long each step took that was seen from start to commit.
        stages: The stages of the current step, in the order of their starts.
        n_failed_calls: The model calls that ended without a valid reply.
        draft: The newest partial reply, and the event that it or its refusal came with.
    """

    name: str = ""
    epochs: int | None = None
    opened_at: float = 0.0
    plan: events.RunStarted | None = None
    baseline: float | None = None
    current: SkillVersion | None = None
    best: SkillVersion | None = None
    step: int = 0
    last_step: int = 0
    step_started_at: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    stages: dict[events.Stage, StageProgress] = field(default_factory=dict)
    budget: events.BudgetUpdated | None = None
    budget_updated_at: float = 0.0
    n_failed_calls: int = 0
    draft: JsonValue = None
    draft_event: events.DraftUpdated | events.DraftDiscarded | None = None

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None if the plan is not known."""
        if self.plan is None or self.epochs is None:
            return None
        return self.plan.steps_per_epoch * self.epochs

    def restore(self, earlier: Iterable[events.Event]) -> None:
        """Take the events of earlier starts, without the times of their steps."""
        for event in earlier:
            self.update(event, self.opened_at)
        self.step_seconds.clear()
        self.step_started_at = None

    def update(self, event: events.Event, at: float) -> None:
        """Take an event that came at a moment."""
        match event:
            case events.StageStarted() | events.StageProgressed() | events.StageFinished():
                self._update_stage(event, at)
            case events.ModelCallFinished():
                self._count_call(event)
            case events.DraftUpdated():
                self.draft = event.draft
                self.draft_event = event
            case events.DraftDiscarded():
                self.draft_event = event
            case events.BudgetUpdated():
                self.budget = event
                self.budget_updated_at = at
            case _:
                self._update_step(event, at)

    def _update_step(self, event: events.Event, at: float) -> None:
        match event:
            case events.RunStarted():
                self.plan = event
            case events.SkillVersionCreated() if self.current is None:
                self.current = event.version
            case events.BaselineMeasured():
                self.baseline = event.score
            case events.StepStarted():
                self.step = event.step
                self.step_started_at = at
            case events.StepCommitted():
                if self.step == event.step and self.step_started_at is not None:
                    self.step_seconds.append(at - self.step_started_at)
                self.step = max(self.step, event.step)
                self.last_step = event.step
                self.step_started_at = None
        if isinstance(event, events.StepCommitted | events.EpochCommitted):
            self.current = event.current
        if isinstance(event, events.StepCommitted | events.EpochCommitted | events.PromotionJudged):
            self.best = event.best
        if isinstance(event, STAGE_ENDS):
            self.stages.clear()
            self.draft = None
            self.draft_event = None

    def _update_stage(
        self,
        event: events.StageStarted | events.StageProgressed | events.StageFinished,
        at: float,
    ) -> None:
        if event.step > self.step:
            self.stages.clear()
            self.step = event.step
        stage = self.stages.setdefault(event.stage, StageProgress(at))
        match event:
            case events.StageStarted():
                self.stages[event.stage] = StageProgress(at)
            case events.StageProgressed():
                stage.parts[event.note] = event
            case events.StageFinished():
                stage.is_over = True

    def _count_call(self, event: events.ModelCallFinished) -> None:
        if event.outcome == "failed":
            self.n_failed_calls += 1
        if event.role == "optimizer":
            for stage in self.stages.values():
                stage.n_calls += not stage.is_over

    def estimate_seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the last step is committed; None without a timed step.

        Each step that is left counts as the mean of the timed steps, less the time of the current
        one.
        """
        left = (self.total_steps or 0) - self.last_step
        if left <= 0 or not self.step_seconds:
            return None
        mean = sum(self.step_seconds) / len(self.step_seconds)
        elapsed = 0.0
        if self.step_started_at is not None and self.step > self.last_step:
            elapsed = now - self.step_started_at
        return mean * (left - 1) + max(mean - elapsed, 0.0)

    def describe(self, now: float) -> str:
        """Return the progress in one line: position, stages, spend, and the estimated rest."""
        parts = [self._describe_position()]
        parts += [f"{row.label} {row.text}" for row in self._list_stages(now)]
        if self.budget is not None:
            parts.append(self._build_spend_row(self.budget, now).text)
        left = self.estimate_seconds_left(now)
        if left is not None:
            parts.append(f"about {format_duration(left)} to the last step")
        return f"progress  {'; '.join(parts)}"

    def list_rows(self, now: float) -> Iterator[ProgressRow]:
        """Yield the rows of the state, the most important first."""
        yield ProgressRow("run", self._describe_position())
        yield from self._list_stages(now)
        if self.baseline is not None:
            text = f"baseline {format_score(self.baseline)}"
            for name, version in (("current", self.current), ("best", self.best)):
                if version is not None and version.number:
                    text += f"   {name} v{version.number} {format_score(version.score)}"
            yield ProgressRow("val", text)
        if self.budget is not None:
            yield self._build_spend_row(self.budget, now)
        if self.draft_event is not None:
            yield _build_draft_row(self.draft_event)

    def _describe_position(self) -> str:
        if not self.step:
            return "starting" if self.plan is None else "before the first step"
        of = "" if self.total_steps is None else f" of {self.total_steps}"
        after = "after " if self.step <= self.last_step else ""
        return f"{after}step {self.step}{of}"

    def _list_stages(self, now: float) -> list[ProgressRow]:
        rows = []
        for name, stage in self.stages.items():
            if stage.is_busy:
                is_baseline = name == "evaluate" and not self.step and self.plan is not None
                label = "baseline" if is_baseline else name.replace("_", " ")
                rows.append(ProgressRow(label, stage.describe(now)))
        return rows[-MAX_STAGES:]

    def _build_spend_row(self, budget: events.BudgetUpdated, now: float) -> ProgressRow:
        """Return what is spent, and the share of the limit that is closest."""
        text = facts.SpendFact(usage=budget.usage).details
        if self.n_failed_calls:
            text += f", {self.n_failed_calls} failed"
        charged: Usage = budget.usage + budget.worst_case
        limits = (
            (charged.calls, budget.max_calls, "max_calls"),
            (charged.input_tokens + charged.output_tokens, budget.max_tokens, "max_tokens"),
            (charged.usd or 0.0, budget.max_usd, "max_usd"),
            (budget.seconds + now - self.budget_updated_at, budget.max_seconds, "max_seconds"),
        )
        shares = [(used / limit, key) for used, limit, key in limits if limit]
        if not shares:
            return ProgressRow("spend", text, bool(self.n_failed_calls))
        share, key = max(shares)
        is_alarm = share >= NEAR_LIMIT or bool(self.n_failed_calls)
        return ProgressRow("spend", f"{text}, {int(100 * share)}% of {key}", is_alarm)


def _build_draft_row(event: events.DraftUpdated | events.DraftDiscarded) -> ProgressRow:
    text = f"{event.purpose.replace('_', ' ')} ({event.role})"
    if isinstance(event, events.DraftDiscarded):
        text += f", attempt {event.attempt} refused: {event.reason}"
        return ProgressRow("draft", text, is_alarm=True)
    if event.attempt > 1:
        text += f", attempt {event.attempt}"
    return ProgressRow("draft", text)


def list_draft_parts(draft: JsonValue) -> Iterator[str]:
    """Yield the fields of a partial reply and the entries of its lists, in the order of writing."""
    if not isinstance(draft, dict):
        yield "" if draft is None else str(draft)
        return
    for name, value in draft.items():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict):
                words = [text for text in entry.values() if isinstance(text, str) and text]
                yield f"{name}: {', '.join(words)}"
            elif entry is not None:
                yield f"{name}: {entry}"


# ----------------------------------------------------------------------------------- the live file


class LiveFile:
    """Keeps the newest live events of a run in a file beside its store, for pages that follow it.

    Nothing depends on the file, so that a failure to write it is ignored.
    """

    def __init__(
        self, store: Path, run_id: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = find_live_file(store, run_id)
        self._clock = clock
        self._written_at = -WRITE_SECONDS
        self._events: dict[Hashable, events.Event] = {}

    def update(self, event: events.Event) -> None:
        """Take an event; at the end of a step nothing is left of it but what is spent."""
        if isinstance(event, STAGE_ENDS):
            for subject, each in list(self._events.items()):
                if not isinstance(each, events.BudgetUpdated):
                    del self._events[subject]
        elif isinstance(event, LIVE_EVENTS):
            self._events.pop(event.subject, None)  # the newest is the last
            self._events[event.subject] = event
        else:
            return
        now = self._clock()
        if isinstance(event, FREQUENT_EVENTS) and now - self._written_at < WRITE_SECONDS:
            return
        self._written_at = now
        lines = [each.model_dump_json() for each in self._events.values()]
        part = self._path.with_suffix(".part")
        with suppress(OSError):
            part.write_text("\n".join(lines), encoding="utf-8")
            part.replace(self._path)

    def remove(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def find_live_file(store: Path, run_id: str) -> Path:
    """Return where the live events of a run are."""
    return store.with_name(f"{store.name}-{run_id}.live")


def read_live_events(store: Path, run_id: str) -> list[events.Event]:
    """Return the live events of a run under way; none if no view of another process writes them."""
    with suppress(OSError, ValueError):
        lines = find_live_file(store, run_id).read_text(encoding="utf-8").splitlines()
        return [events.EVENT_ADAPTER.validate_json(line) for line in lines]
    return []
