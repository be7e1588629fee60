"""Views of a run while it goes on: JSON, a line for each event, or such lines above a
live display.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Self

import anyio
from pydantic import JsonValue
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.rule import Rule
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from reflact import events
from reflact.config.training import TrainerConfig
from reflact.errors import StoreError
from reflact.records import RunSummary, SkillVersion, Usage
from reflact.reporting import facts
from reflact.reporting.terminal import INDENT, print_summary, wrap_line
from reflact.store.artifacts import find_exports
from reflact.store.runs import open_store
from reflact.text import (
    MINUTE,
    escape_controls,
    format_duration,
    name_count,
)

SHOW_CURSOR = "\x1b[?25h"

PROGRESS_SECONDS = 30.0

# How long lines stay away before a line on the progress; the second number is for the first one in
# a stage.
FIRST_PROGRESS_SECONDS = 10.0

REASON_LABELS = {"version_returned": "return", "training_stopped": "stop", "step_retried": "retry"}

LABEL_WIDTH = 12

# Joiners and variation selectors: terminals disagree about the width of joined characters.
JOINERS = re.compile("[\u200c\u200d\ufe0e\ufe0f]")


# -------------------------------------------------------------------------------------------- lines


class EventLines:
    """Words events as lines. A step has one line, once it is committed.

    Repeated pauses of one endpoint have one line in each step.
    """

    def __init__(self) -> None:
        self._step: dict[str, object] = {}
        self._replies: list[bool] = []
        self._pauses: set[tuple[str, int | None]] = set()

    def format_event(self, event: events.Event) -> str | None:
        """Return the line of an event; None if the event has no line."""
        match event:
            case events.StepStarted():
                self._step = {}
                self._replies = []
                self._pauses.clear()
            case events.RolloutsFinished():
                self._step |= {"n_items": event.n, "n_failures": event.failures}
            case events.AnalystReported():
                self._replies.append(event.report.no_reply_reason is None)
            case events.EditsApplied():
                self._step["results"] = event.results
            case events.CandidateJudged():
                self._step["verdict"] = event.verdict
            case events.StepCommitted():
                committed = event.model_dump(include={"step", "epoch", "action"})
                versions = {"current": event.current, "best": event.best}
                known = {**self._step, **committed, **versions, "replies": tuple(self._replies)}
                return facts.StepFact.model_validate(known).line
            case events.RateLimited() if (event.endpoint, event.status) not in self._pauses:
                self._pauses.add((event.endpoint, event.status))
                return _describe_pause(event)
        return _describe_event(event)

    def format_resume(self, earlier: Iterable[events.Event]) -> str | None:
        """Return how far earlier starts of the run came; None if they committed nothing."""
        line = None
        for event in earlier:
            self.format_event(event)
            if isinstance(event, events.StepCommitted):
                line = (
                    f"run {event.run_id} resumes after {name_count(event.step, 'committed step')}"
                )
            elif isinstance(event, events.BaselineMeasured):
                line = f"run {event.run_id} resumes before its first committed step"
        return line


def _describe_pause(event: events.RateLimited) -> str:
    if event.status is None:
        return f"retry     {event.endpoint} cannot be reached; trying again"
    rate = "" if event.rate is None else f", then {event.rate:.3g} calls/s"
    wait = format_duration(event.seconds)
    return f"limit     {event.endpoint} answered {event.status}; waiting {wait}{rate}"


def _describe_event(event: events.Event) -> str | None:
    line: str | None = None
    match event:
        case events.RunStarted(n_train=train, n_val=val, n_test=test, steps_per_epoch=n):
            steps = name_count(n, "step")
            line = (
                f"run {event.run_id}: {train} train, {val} val, {test} test items; {steps} per "
                "epoch"
            )
        case events.GatePowerEstimated():
            rollouts = name_count(event.rollouts, "rollout")
            line = f"gate      {event.description} A decision takes at most {rollouts}."
        case events.NullAnswersGraded() if event.warning is not None:
            line = f"warning   {event.warning}"
        case events.BaselineMeasured():
            line = f"baseline  val {event.score:.3f} on {name_count(event.n, 'item')}"
            if event.trials > 1:
                line += f", rolled out {event.trials} times, since answers may differ"
        case events.FallbackUsed():
            line = f"fallback  {facts.shorten_fallback(event.fallback)}"
        case events.EpochCommitted():
            line = facts.describe_epoch(event)
        case events.VersionReturned() | events.TrainingStopped() | events.StepRetried():
            line = f"{REASON_LABELS[event.kind]:<{INDENT}}{event.reason}"
        case events.PromotionJudged():
            line = f"promotion {facts.ACTION_WORDS[event.verdict.action]}: {event.verdict.reason}"
        case events.TestSplitOpened():
            openings = name_count(event.count, "opening")
            line = f"test      the sealed test split is opened ({openings} in this run)"
        case events.WarningIssued():
            line = f"warning   {event.message}"
    return line


# -------------------------------------------------------------------------------- the state of a
# run


@dataclass(frozen=True)
class StageProgress:
    """A stage of the current step: when it began, the measurements in it, and the optimizer's
    calls.
    """

    step: int
    name: events.Stage
    started_at: float
    parts: tuple[events.StageProgressed, ...] = ()
    n_calls: int = 0
    is_over: bool = False

    @property
    def done(self) -> int:
        """The finished rollouts."""
        return sum(part.done for part in self.parts)

    @property
    def n_from_store(self) -> int:
        """The finished rollouts that were found in the store."""
        return sum(part.from_store for part in self.parts)

    @property
    def total(self) -> int | None:
        """The rollouts of the parts that have begun; None without parts."""
        return sum(part.total for part in self.parts) if self.parts else None


@dataclass(frozen=True)
class CallDraft:
    """The partial reply of a model call; ``refusal`` is the reason if the attempt was refused."""

    call: events.DraftUpdated | events.DraftDiscarded
    draft: JsonValue = None
    refusal: str | None = None


@dataclass(frozen=True)
class LiveState:
    """A run at one moment, as known from its events. All times are seconds of one clock.

    Attributes:
        step: The current or the last step; 0 before the first.
        last_step: The last committed step; 0 before the first.
        step_started_at: When this step started; None if the view did not see its start.
        step_seconds: How long each step took that the view saw from start to commit.
        stages: The stages of the current step, in the order of their starts.
        n_failed_calls: The model calls that ended without a valid reply.
        draft: The newest partial reply.
    """

    name: str = ""
    epochs: int | None = None
    opened_at: float = 0.0
    plan: events.RunStarted | None = None
    baseline: float | None = None
    current: SkillVersion | None = None
    best: SkillVersion | None = None
    epoch: int = 0
    step: int = 0
    step_started_at: float | None = None
    last_step: int = 0
    step_seconds: tuple[float, ...] = ()
    stages: tuple[StageProgress, ...] = ()
    budget: events.BudgetUpdated | None = None
    budget_updated_at: float = 0.0
    n_failed_calls: int = 0
    draft: CallDraft | None = None

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None if the plan is not known."""
        if self.plan is None or self.epochs is None:
            return None
        return self.plan.steps_per_epoch * self.epochs

    @property
    def spent(self) -> facts.SpendFact:
        """What the run used in all its starts."""
        return facts.SpendFact(usage=Usage() if self.budget is None else self.budget.usage)

    @property
    def active_stages(self) -> tuple[StageProgress, ...]:
        """The stages that have not finished, without those that wait for others."""
        open_stages = tuple(stage for stage in self.stages if not stage.is_over)
        busy = tuple(
            stage for stage in open_stages if stage.total is None or stage.done < stage.total
        )
        return busy or open_stages

    def estimate_seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the last step is committed; None without a timed step.

        Each step that is left counts as the mean of the timed steps, less the time of the current
        one.
        """
        left = 0 if self.total_steps is None else self.total_steps - self.last_step
        if left <= 0 or not self.step_seconds:
            return None
        mean = sum(self.step_seconds) / len(self.step_seconds)
        elapsed = 0.0
        if self.step_started_at is not None and self.step > self.last_step:
            elapsed = now - self.step_started_at
        return mean * (left - 1) + max(mean - elapsed, 0.0)


def update_state(state: LiveState, event: events.Event, at: float) -> LiveState:
    """Return the state after an event that came at a moment."""
    match event:
        case events.StageStarted() | events.StageFinished() | events.StageProgressed():
            state = _update_stage(state, event, at)
        case events.DraftUpdated():
            state = replace(state, draft=CallDraft(event, event.draft))
        case events.DraftDiscarded():
            draft = None if state.draft is None else state.draft.draft
            state = replace(state, draft=CallDraft(event, draft, event.reason))
        case events.ModelCallFinished():
            state = _count_call(state, event)
        case events.BudgetUpdated():
            state = replace(state, budget=event, budget_updated_at=at)
        case _:
            state = _update_step(state, event, at)
    return state


def restore_state(state: LiveState, earlier: Iterable[events.Event]) -> LiveState:
    """Return the state after the events of earlier starts, without the times of their steps."""
    for event in earlier:
        state = update_state(state, event, state.opened_at)
    return replace(state, step_seconds=(), step_started_at=None)


def _clear_step(state: LiveState) -> LiveState:
    return replace(state, stages=(), draft=None)


def _update_step(state: LiveState, event: events.Event, at: float) -> LiveState:
    """Return the state after an event about the plan, a step or an epoch."""
    match event:
        case events.RunStarted():
            state = replace(state, plan=event)
        case events.SkillVersionCreated() if state.current is None:
            state = replace(state, current=event.version, best=event.version)
        case events.BaselineMeasured():
            state = replace(_clear_step(state), baseline=event.score)
        case events.StepStarted():
            state = replace(
                _clear_step(state), step=event.step, epoch=event.epoch, step_started_at=at
            )
        case events.StepCommitted():
            state = _add_step(state, event, at)
        case events.EpochCommitted():
            state = replace(_clear_step(state), current=event.current, best=event.best)
        case events.PromotionJudged():
            state = replace(_clear_step(state), best=event.best)
    return state


def _add_step(state: LiveState, event: events.StepCommitted, at: float) -> LiveState:
    seconds = state.step_seconds
    if state.step == event.step and state.step_started_at is not None:
        seconds = (*seconds, at - state.step_started_at)
    return replace(
        _clear_step(state),
        step=max(state.step, event.step),
        epoch=event.epoch,
        step_started_at=None,
        last_step=event.step,
        step_seconds=seconds,
        current=event.current,
        best=event.best,
    )


def _update_stage(
    state: LiveState,
    event: events.StageStarted | events.StageFinished | events.StageProgressed,
    at: float,
) -> LiveState:
    stages = {stage.name: stage for stage in state.stages if stage.step == event.step}
    stage = stages.get(event.stage, StageProgress(event.step, event.stage, started_at=at))
    match event:
        case events.StageStarted():
            stage = StageProgress(event.step, event.stage, started_at=at)
        case events.StageProgressed():
            others = [part for part in stage.parts if part.note != event.note]
            stage = replace(stage, parts=(*others, event))
        case events.StageFinished():
            stage = replace(stage, is_over=True)
    stages[event.stage] = stage
    return replace(state, stages=tuple(stages.values()), step=max(state.step, event.step))


def _count_call(state: LiveState, event: events.ModelCallFinished) -> LiveState:
    if event.outcome == "failed":
        state = replace(state, n_failed_calls=state.n_failed_calls + 1)
    if event.role != "optimizer":
        return state
    stages = [
        stage if stage.is_over else replace(stage, n_calls=stage.n_calls + 1)
        for stage in state.stages
    ]
    return replace(state, stages=tuple(stages))


def name_stage(stage: StageProgress, state: LiveState) -> str:
    """Return the name of a stage in words; the first measurement of a run is its baseline."""
    if (stage.step, stage.name) == (0, "evaluate") and state.plan is not None:
        return "baseline"
    return stage.name.replace("_", " ")


def describe_progress(state: LiveState, now: float) -> str:
    """Return a run's progress in one line: active stages with their counts, spend, and the
    estimated rest.
    """
    parts = [_describe_position(state)] if state.step else []
    parts += [
        f"{name_stage(stage, state)} {_count_parts(stage, now)}" for stage in state.active_stages
    ]
    words = [", ".join(parts) or "starting"]
    if state.spent.usage.calls:
        words.append(state.spent.words)
    if state.n_failed_calls:
        words.append(f"{name_count(state.n_failed_calls, 'call')} failed")
    left = state.estimate_seconds_left(now)
    if left is not None:
        words.append(f"about {format_duration(left)} to the last step")
    return f"progress  {'; '.join(words)}"


def _describe_position(state: LiveState) -> str:
    if not state.step:
        return "starting" if state.plan is None else "before the first step"
    of = "" if state.total_steps is None else f" of {state.total_steps}"
    after = "after " if state.step <= state.last_step else ""
    return f"{after}step {state.step}{of}"


def _count_parts(stage: StageProgress, now: float) -> str:
    """Return a stage's counts, and its remaining time if it goes on as fast as so far.

    Rollouts that were found in the store are named, since they say nothing about the pace.
    """
    elapsed = max(now - stage.started_at, 0.0)
    if stage.total is None:
        calls = f" ({name_count(stage.n_calls, 'call')} done)" if stage.n_calls else ""
        return f"for {format_duration(elapsed)}{calls}"
    notes = [f"{stage.n_from_store:,} from the store"] if stage.n_from_store else []
    n_new = stage.done - stage.n_from_store
    if n_new > 0 and stage.done < stage.total:
        notes.append(f"about {format_duration(elapsed / n_new * (stage.total - stage.done))} left")
    counts = f"{stage.done} of {stage.total}{'' if stage.name == 'rollout' else ' rollouts'}"
    return f"{counts} ({', '.join(notes)})" if notes else counts


# -------------------------------------------------------------------------------------- the display


@dataclass(frozen=True)
class LiveDisplay:
    """Renders the state of a run at a moment, in at most five eighths of the console's height.

    The most important rows come first; what does not fit is cut at the bottom. The end of the
    newest partial reply fills the rest.
    """

    state: LiveState
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(1, min(options.size.height - 1, options.size.height * 5 // 8))
        options = options.update(width=max(options.max_width - 2, 1))
        grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
        grid.add_column(width=LABEL_WIDTH - 1, style="dim", no_wrap=True, overflow="crop")
        grid.add_column(ratio=1, no_wrap=True, overflow="crop")
        for label, content in _list_rows(self.state, self.now, options):
            grid.add_row(label, content)
        lines = console.render_lines(
            Group(_build_title(self.state, self.now, options), grid), options, pad=False
        )
        if self.state.draft is not None and height - len(lines) >= 2:
            text = render_draft(
                self.state.draft.draft, console, options, height=height - len(lines)
            )
            lines += console.render_lines(Group(*text), options, pad=False)
        yield SegmentLines(lines[:height], new_lines=True)


def _build_title(state: LiveState, now: float, options: ConsoleOptions) -> Rule:
    run_id = "" if state.plan is None else f" {state.plan.run_id}"
    times = f"  {_format_clock(now - state.opened_at)}"
    left = state.estimate_seconds_left(now)
    if left is not None:
        times += f", about {format_duration(left)} left"
    title = Text(_escape_line(state.name, options.encoding) + run_id, no_wrap=True)
    title.truncate(max(options.max_width - len(times) - 6, 0), overflow="crop")
    title.append(times)
    title.truncate(max(options.max_width - 6, 0), overflow="crop")
    return Rule(title, align="left", style="dim", characters="-" if options.ascii_only else "─")


def _list_rows(state: LiveState, now: float, options: ConsoleOptions) -> Iterator[tuple[str, Text]]:
    yield "run", Text(_describe_position(state))
    for stage in state.active_stages[-3:]:
        yield name_stage(stage, state), Text(_count_parts(stage, now))
    if state.baseline is not None:
        yield "val", _build_scores(state, state.baseline)
    if state.budget is not None:
        yield "spend", _build_spend(state, state.budget, now)
    if state.draft is not None:
        yield "draft", _describe_draft(state.draft, options.encoding)


def _build_scores(state: LiveState, baseline: float) -> Text:
    line = Text(f"baseline {facts.format_score(baseline)}")
    for name, version in (("current", state.current), ("best", state.best)):
        if version is not None and version.number:
            line.append(f"   {name} v{version.number} {facts.format_score(version.score)}")
    return line


def _build_spend(state: LiveState, budget: events.BudgetUpdated, now: float) -> Text:
    """Return what is spent, and the share of the limit that is closest."""
    line = Text(state.spent.details)
    if state.n_failed_calls:
        line.append(f"   {state.n_failed_calls} failed", "yellow")
    charged = budget.usage + budget.worst_case
    seconds = budget.seconds + max(now - state.budget_updated_at, 0.0)
    limits = (
        (charged.calls, budget.max_calls, "max_calls"),
        (charged.input_tokens + charged.output_tokens, budget.max_tokens, "max_tokens"),
        (charged.usd or 0.0, budget.max_usd, "max_usd"),
        (seconds, budget.max_seconds, "max_seconds"),
    )
    shares = [
        (used / limit if limit else 1.0, key) for used, limit, key in limits if limit is not None
    ]
    if shares:
        share, key = max(shares)
        line.append(f"   {int(100 * share)}% of {key}", "yellow" if share >= 0.9 else "dim")
    return line


def _describe_draft(draft: CallDraft, encoding: str) -> Text:
    call = draft.call
    words = f"{call.purpose.replace('_', ' ')} ({call.role})"
    if draft.refusal is not None:
        words += f", attempt {call.attempt} refused: {draft.refusal}"
    elif call.attempt > 1:
        words += f", attempt {call.attempt}"
    return Text(_escape_line(words, encoding), "yellow" if draft.refusal is not None else "")


def render_draft(
    draft: JsonValue, console: Console, options: ConsoleOptions, *, height: int
) -> list[Text]:
    """Return the end of a partial reply in at most ``height`` lines, without control characters."""
    width = options.max_width - 2
    if height < 1 or width < 8:
        return []
    text = "\n".join(_list_parts(draft))[-width * height :]
    lines = [line for line in _escape(text, options.encoding).splitlines() if line.strip()]
    wrapped = Text("\n".join(lines)).wrap(console, width)
    return [Text("  ") + line for line in list(wrapped)[-height:]]


def _list_parts(draft: JsonValue) -> Iterator[str]:
    """Yield the fields of a draft and the entries of its lists, in the order of writing."""
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


def _escape(text: str, encoding: str) -> str:
    """Return untrusted text that a terminal with an encoding can show, without joined
    characters.
    """
    separate = JOINERS.sub("", escape_controls(text)).replace("\t", "    ")
    return separate.encode(encoding, "backslashreplace").decode(encoding)


def _escape_line(text: str, encoding: str) -> str:
    return " ".join(_escape(text, encoding).split())


def _format_clock(seconds: float) -> str:
    """Return elapsed time in complete seconds, as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(max(int(seconds), 0), MINUTE)
    hours, minutes = divmod(minutes, MINUTE)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ---------------------------------------------------------------------------------------- the views


class RunView:
    """Shows a run for the length of a ``with`` block. This base class shows nothing.

    Meanwhile records of the logger ``reflact`` reach only handlers of the program, since the view
    shows warnings.
    """

    def __enter__(self) -> Self:
        self._handler = logging.NullHandler()
        logging.getLogger("reflact").addHandler(self._handler)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("reflact").removeHandler(self._handler)

    def restore(self, earlier: Iterable[events.Event]) -> None:
        """Take the durable events of earlier starts."""

    def show_event(self, event: events.Event) -> None:
        """Show an event."""

    def show_interrupt(self, text: str) -> bool:
        """Show the effect of a signal without locks or buffers; return whether this view can."""
        return False

    def build_cleanup(self) -> str:
        """Return the control sequences that clean the terminal if the process must exit inside the
        block.
        """
        return ""


class JsonView(RunView):
    """Writes each event as one line of JSON in ASCII, which every terminal, pipe and encoding can
    take.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def show_event(self, event: events.Event) -> None:
        """Write an event."""
        self._write(event.model_dump_json(ensure_ascii=True))


class LineView(RunView):
    """Prints a line for each event that matters, and lines on the progress while no such event
    comes.

    Args:
        console: Where to print.
        state: What is known in advance.
        clock: Returns seconds of a monotonic clock.
        times: Whether each line begins with the local time of its event.
        with_timer: Whether a thread prints the progress; if not, only events do, as while a person
            is asked.
        refreshes_per_second: How often the thread looks.
    """

    def __init__(
        self,
        console: Console,
        state: LiveState | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        times: bool = False,
        with_timer: bool = True,
        refreshes_per_second: float = 1.0,
    ) -> None:
        self._console = console
        self._clock = clock
        self._state = LiveState(opened_at=clock()) if state is None else state
        self._times = times
        self._event_lines = EventLines()
        self._printed_at = clock()
        self._reported_stage: tuple[int, str] | None = None
        self._finished = Event()
        self._seconds_per_refresh = 1 / refreshes_per_second
        self._thread: Thread | None = None
        if with_timer:
            self._thread = Thread(
                target=self._refresh_until_finished, name="reflact-view", daemon=True
            )

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._finished.set()
        if self._thread is not None:
            self._thread.join()

    def restore(self, earlier: Iterable[events.Event]) -> None:
        """Restore the state of the run, and print how far it came."""
        earlier = tuple(earlier)
        self._show(self._event_lines.format_resume(earlier), datetime.now(UTC))
        self._state = restore_state(self._state, earlier)

    def show_event(self, event: events.Event) -> None:
        """Update the state, and print the line of the event."""
        self._state = update_state(self._state, event, self._clock())
        self._show(self._event_lines.format_event(event), event.at)
        if self._thread is None:
            self.refresh()

    def refresh(self) -> None:
        """Print the progress if no line came for long."""
        now = self._clock()
        stage = None
        if self._state.stages:
            stage = (self._state.step, self._state.stages[-1].name)
        wait = PROGRESS_SECONDS if stage == self._reported_stage else FIRST_PROGRESS_SECONDS
        if now - self._printed_at >= wait:
            self._reported_stage = stage
            self._show(describe_progress(self._state, now), datetime.now(UTC))

    def _show(self, line: str | None, at: datetime) -> None:
        if line is not None:
            self._printed_at = self._clock()
            stamp = f"{at.astimezone():%Y-%m-%d %H:%M:%S} " if self._times else ""
            self._print(escape_controls(stamp + line))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _refresh_until_finished(self) -> None:
        with suppress(OSError):  # the terminal is gone, and the run continues
            while not self._finished.wait(self._seconds_per_refresh):
                self.refresh()


class LiveView(LineView):
    """Prints the same lines above a display of the current state.

    Events only change a value in memory, and a thread draws it. So a slow terminal never delays the
    run.

    Args:
        console: A terminal that can move its cursor.
        state: What is known in advance.
        clock: Returns seconds of a monotonic clock.
        times: Whether each line begins with the local time of its event.
        with_errors: Whether standard error is the same terminal; if so, its lines stay above the
            display.
        frames_per_second: How often the thread draws.
    """

    def __init__(
        self,
        console: Console,
        state: LiveState,
        *,
        clock: Callable[[], float],
        times: bool = False,
        with_errors: bool = False,
        frames_per_second: float = 4.0,
    ) -> None:
        super().__init__(
            console, state, clock=clock, times=times, refreshes_per_second=frames_per_second
        )
        self._with_errors = with_errors
        self._pending: deque[str] = deque()
        self._frame: list[list[Segment]] = []
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stderr=with_errors
        )

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        """Remove the display; the lines stay."""
        super().__exit__(*exception)
        with suppress(OSError):
            self._print_pending()
            self._live.stop()

    def show_interrupt(self, text: str) -> bool:
        """Show a line above the display if standard error is the same terminal."""
        if self._with_errors:
            self._show(text, datetime.now(UTC))
        return self._with_errors

    def build_cleanup(self) -> str:
        """Return the control sequences that remove the display and show the cursor."""
        if self._finished.is_set():
            return SHOW_CURSOR
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (len(self._frame) - 1) + SHOW_CURSOR

    def refresh(self) -> None:
        """Print pending lines, and draw the display if it changed. Only one thread may draw at a
        time.
        """
        frame = self._console.render_lines(LiveDisplay(self._state, self._clock()), pad=False)
        with self._console:
            self._print_pending()
            if frame != self._frame:
                self._frame = frame
                self._live.update(SegmentLines(frame, new_lines=True), refresh=True)

    def _print(self, line: str) -> None:
        self._pending.append(line)

    def _print_pending(self) -> None:
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if lines:
            self._console.print(*(wrap_line(line, self._console) for line in lines), sep="\n")


def choose_view(
    console: Console,
    *,
    name: str,
    epochs: int | None = None,
    times: bool = False,
    live: bool = True,
    asks: bool = False,
) -> RunView:
    """Return a live view, or lines if the console is no terminal that can move its cursor, as in a
    notebook.

    Args:
        console: Where to show the run.
        name: The name of the run's folder.
        epochs: The planned epochs; None if they are not known.
        times: Whether each line begins with a time.
        live: False: lines also at a terminal.
        asks: Whether a person is asked something meanwhile.
    """
    state = LiveState(name=name, epochs=epochs, opened_at=time.monotonic())
    if not (live and console.is_interactive and console.file.isatty()):
        return LineView(console, state, times=times, with_timer=not asks)
    is_shared = Console(stderr=True).file.isatty()
    return LiveView(console, state, clock=time.monotonic, times=times, with_errors=is_shared)


async def show_events(
    stream: AsyncIterable[events.Event], view: RunView, store: Path
) -> AsyncIterator[events.Event]:
    """Show the events of a run, those of its earlier starts first, and yield each event after it is
    shown.
    """
    has_begun = False
    async for event in stream:
        if not (has_begun or isinstance(event, events.RunStarted)):
            with suppress(StoreError):  # the run itself will say why its store cannot be read
                async with open_store(store) as opened:
                    view.restore(await opened.events(event.run_id))
        has_begun = True
        view.show_event(event)
        yield event


async def show_run(
    stream: AsyncIterable[events.Event], config: TrainerConfig, *, asks: bool = False
) -> RunSummary:
    """Show a run on standard output until its end, and print its closing lines; returns its
    summary.

    ``asks``: a person may be asked something meanwhile.
    """
    console = Console(force_jupyter=False)
    name = config.out_dir.name
    try:
        with choose_view(console, name=name, epochs=config.train.planned_epochs, asks=asks) as view:
            async for event in show_events(stream, view, config.store or config.out_dir / "run.db"):
                last = event
    except anyio.get_cancelled_exc_class():
        console.print("Interrupted. Run the program again to resume the run.")
        raise
    assert isinstance(last, events.RunFinished)
    print_summary(console, last.summary, find_exports(config.out_dir, last.run_id))
    return last.summary
