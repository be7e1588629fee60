"""The live display: the state of a run, updated by each event, and its rendering."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import JsonValue
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from reflact import events
from reflact.records import SkillScore, SkillVersion, Usage
from reflact.reporting.lines import (
    ACTION_WORDS,
    escape_controls,
    format_clock,
    format_count,
    format_duration,
    format_score,
    name_count,
)
from reflact.types import GateAction

LABEL_WIDTH = 12
RATE_SECONDS = 60.0
"""How long after a pause the display shows the new rate of an endpoint."""

DRAFT_HEIGHT = 8
"""Rows that each draft needs if several are shown."""

STEP_STAGES: tuple[events.Stage, ...] = ("rollout", "reflect", "aggregate", "select", "update", "evaluate")
DECISION_SIGNS: dict[GateAction, tuple[str, str]] = {
    "accept_new_best": ("+", "bold green"),
    "accept": ("=", "green"),
    "force_accept": ("!", "green"),
    "reject": ("x", "red"),
    "set_aside": ("?", "yellow"),
    "return": ("<", "yellow"),
    "unmeasured": ("?", "yellow"),
}
UNCHANGED_SIGN = (".", "dim", "unchanged")
EDIT_SIGNS = {"append": "+ ", "insert_after": "+ ", "replace": "~ ", "delete": "- "}
JOINERS = re.compile("[\u200c\u200d\ufe0e\ufe0f]")
"""Joiners and variation selectors: terminals disagree about the width of joined characters."""

AT_ONCE_SECONDS = 0.5
"""Rollouts that a stage finishes within so many seconds of its start were found in the store."""


@dataclass(frozen=True)
class StageProgress:
    """A stage of the current step; ``seconds`` is None until it finishes.

    ``parts`` has the progress of each measurement in it. ``calls`` counts the
    optimizer's calls that ended meanwhile. ``n_at_once`` rollouts were finished as soon as the stage began: they were
    found in the store. ``progressed_at`` is the time of the last finished rollout.
    """

    step: int
    name: events.Stage
    started_at: float
    parts: tuple[events.StageProgressed, ...] = ()
    calls: int = 0
    n_at_once: int = 0
    progressed_at: float | None = None
    seconds: float | None = None

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

    @property
    def is_done(self) -> bool:
        """Whether nothing of the stage is known to be left."""
        return self.total is not None and self.done >= self.total


@dataclass(frozen=True)
class CallDraft:
    """The partial reply of a model call; ``refusal`` is the reason if the last attempt was refused."""

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
        step: The current or the last step; 0 before the first.
        step_started_at: When this step started; None if the view did not see its start.
        step_seconds: How long each step took that the view saw from start to commit.
        stages: The stages of the current step, in the order of their starts.
        trials: The requests of the gate in the current decision.
        failed_calls: How many model calls ended without a valid reply; interrupted calls are not among them.
        spent_before: What the run had used when a measurement outside its training began; None in a training.
        pauses: The last pause of each endpoint, and when it was reported.
        drafts: Calls that are being written, or the last finished one.
    """

    name: str = ""
    epochs: int | None = None
    opened_at: float = 0.0
    plan: events.RunStarted | None = None
    max_rollouts: int | None = None
    baseline: float | None = None
    final_scores: tuple[SkillScore, ...] = ()
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
    spent_before: Usage | None = None
    failed_calls: int = 0
    pauses: tuple[tuple[float, events.RateLimited], ...] = ()
    drafts: tuple[CallDraft, ...] = ()

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None if the plan is not known."""
        return None if self.plan is None or self.epochs is None else self.plan.steps_per_epoch * self.epochs

    @property
    def spent(self) -> Usage:
        """What the run used in all its starts, or what the measurement used."""
        usage = Usage() if self.budget is None else self.budget.usage
        return usage if self.spent_before is None else usage - self.spent_before

    @property
    def last_committed_step(self) -> int:
        """The last committed step; 0 before the first."""
        return self.results[-1].step if self.results else 0

    @property
    def active_stages(self) -> tuple[StageProgress, ...]:
        """The stages that have not finished, without those that wait for others."""
        unfinished = tuple(stage for stage in self.stages if stage.seconds is None)
        return tuple(stage for stage in unfinished if not stage.is_done) or unfinished

    def estimate_seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the last step is committed; None without a timed step.

        Each step that is left counts as the mean of the timed steps, less the time of the current one.
        """
        left = 0 if self.total_steps is None else self.total_steps - self.last_committed_step
        if left <= 0 or not self.step_seconds:
            return None
        mean = sum(self.step_seconds) / len(self.step_seconds)
        is_running = self.step_started_at is not None and self.step > self.last_committed_step
        elapsed = now - (self.step_started_at or 0.0) if is_running else 0.0
        return mean * (left - 1) + max(mean - elapsed, 0.0)


def update_state(state: LiveState, event: events.Event, at: float) -> LiveState:
    """Return the state after an event that came at a moment."""
    match event:
        case events.RunStarted():
            state = replace(state, plan=event)
        case events.GatePowerEstimated():
            state = replace(state, max_rollouts=event.rollouts)
        case events.BaselineMeasured() | events.FinalScoreMeasured():
            state = _add_score(state, event)
        case events.StepStarted():
            state = replace(_clear_step(state), step=event.step, epoch=event.epoch, step_started_at=at)
            state = replace(state, final_scores=())
        case events.StepCommitted():
            state = _add_result(state, event, at)
        case events.EpochCommitted() | events.PromotionJudged():
            current = event.current if isinstance(event, events.EpochCommitted) else state.current
            state = replace(_clear_step(state), current=current, best=event.best)
        case events.SkillVersionCreated(version=version) if state.current is None:
            state = replace(state, current=version, best=version)
        case events.TrialRequested():
            same = (t for t in state.trials if (t.step, t.part) == (event.step, event.part))
            state = replace(state, trials=(*same, event))
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


def _add_score(state: LiveState, event: events.BaselineMeasured | events.FinalScoreMeasured) -> LiveState:
    if isinstance(event, events.BaselineMeasured):
        return replace(_clear_step(state), baseline=event.score)
    return replace(state, final_scores=(*state.final_scores, event.score))


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
    if isinstance(event, events.StageFinished):
        stage = replace(stage, seconds=event.seconds)
    elif isinstance(event, events.StageProgressed):
        others = (part for part in stage.parts if part.note != event.note)
        stage = replace(stage, parts=(*others, event), progressed_at=at)
        if at - stage.started_at <= AT_ONCE_SECONDS:
            stage = replace(stage, n_at_once=stage.done)
    else:
        stage = StageProgress(event.step, event.stage, started_at=at)
    stages[event.stage] = stage
    return replace(state, stages=tuple(stages.values()), step=max(state.step, event.step))


def _update_draft(
    state: LiveState, event: events.DraftUpdated | events.DraftDiscarded | events.ModelCallFinished
) -> LiveState:
    drafts = {draft.call_id: draft for draft in state.drafts}
    known = drafts.get(event.call_id)
    if isinstance(event, events.ModelCallFinished):
        state = _count_call(state, event)
        if known is None:
            return state
        drafts[event.call_id] = mine = replace(known, finished=True)
    else:
        if isinstance(event, events.DraftUpdated):
            draft, refusal = event.draft, None
        else:
            draft, refusal = known.draft if known else None, event.reason
        mine = CallDraft(event.call_id, event.role, event.purpose, event.attempt, draft, refusal=refusal)
        drafts[event.call_id] = mine
    return replace(state, drafts=tuple(d for d in drafts.values() if d is mine or not d.finished))


def _count_call(state: LiveState, event: events.ModelCallFinished) -> LiveState:
    failed = state.failed_calls + (event.outcome == "failed")
    if event.role != "optimizer":
        return replace(state, failed_calls=failed)
    stages = tuple(s if s.seconds is not None else replace(s, calls=s.calls + 1) for s in state.stages)
    return replace(state, failed_calls=failed, stages=stages)


def name_stage(stage: StageProgress, state: LiveState) -> str:
    """Return the name of a stage in words; the first measurement of a run is its baseline."""
    is_baseline = (stage.step, stage.name) == (0, "evaluate") and state.plan is not None
    return "baseline" if is_baseline else stage.name.replace("_", " ")


class DisplayRow(NamedTuple):
    """A row of the display. On a small screen, rows with the highest rank are left out first."""

    rank: int
    label: str
    content: RenderableType


@dataclass(frozen=True)
class LiveDisplay:
    """Renders the state of a run at a moment, in at most five eighths of the console's height.

    An encoding other than UTF-8 gets ASCII signs, and escapes for characters that it lacks.
    """

    state: LiveState
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = limit_height(options.size.height)
        options = options.update(width=max(options.max_width - 2, 1))
        rows = list(_list_rows(self.state, self.now, options))
        while len(rows) >= height and rows:
            rows.remove(max(rows, key=lambda row: row.rank))
        parts = [_build_title(self.state, self.now, options), _build_grid(rows, options)]
        parts += _list_drafts(self.state.drafts, height - len(rows) - 1, console, options)
        lines = console.render_lines(Group(*parts), options, pad=False)
        yield SegmentLines(lines[:height], new_lines=True)


def limit_height(height: int) -> int:
    """Return the most rows of the display on a screen: five eighths, and at least one line less than it."""
    return max(1, min(height - 1, height * 5 // 8))


def _build_title(state: LiveState, now: float, options: ConsoleOptions) -> Rule:
    title = Text(_escape_line(state.name, options.encoding), overflow="crop", no_wrap=True)
    if state.plan is not None:
        title.append(f" {state.plan.run_id}")
    times = f"  {format_clock(now - state.opened_at)}"
    if state.total_steps is not None and state.last_committed_step < state.total_steps:
        left = state.estimate_seconds_left(now)
        times += "" if left is None else f", about {format_duration(left)} left"
    title.truncate(max(options.max_width - len(times) - 6, 0), overflow="crop")
    title.append(times)
    title.truncate(max(options.max_width - 6, 0), overflow="crop")
    characters = "-" if options.ascii_only else "─"
    return Rule(title, align="left", style="dim", characters=characters)


def _build_grid(rows: Sequence[DisplayRow], options: ConsoleOptions) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=LABEL_WIDTH - 1, style="dim", no_wrap=True, overflow="crop")
    table.add_column(ratio=1, no_wrap=True, overflow="crop" if options.ascii_only else "ellipsis")
    for row in rows:
        table.add_row(row.label, row.content)
    return table if rows else Group()


def _build_line(*cells: RenderableType) -> Table:
    line = Table.grid(padding=(0, 2, 0, 0))
    for _ in cells:
        line.add_column(no_wrap=True, overflow="crop")
    line.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return line


def _build_bar(done: float, total: float, width: int = 20, style: str = "cyan") -> ProgressBar:
    return ProgressBar(total, done, width, style="dim", complete_style=style, finished_style=style)


def _list_rows(state: LiveState, now: float, options: ConsoleOptions) -> Iterator[DisplayRow]:
    width, total, plan = options.max_width - LABEL_WIDTH, state.total_steps, state.plan
    if plan is None and not state.stages:
        yield DisplayRow(1, "run", Text("starting", "dim"))
    elif plan is not None and total is not None:
        place = f"epoch {state.epoch} of {state.epochs}, step {state.step} of {total}"
        items = f"{plan.n_train} train, {plan.n_val} val, {plan.n_test} test items" if width > 110 else ""
        place = place if state.step else "before the first step"
        committed = f"{state.last_committed_step} committed"
        bar = _build_bar(state.last_committed_step, total, min(max(width - 44, 4), 20))
        yield DisplayRow(1, "run", _build_line(place, bar, committed, items))
    if state.baseline is not None:
        yield DisplayRow(2, "val", _build_scores(state, state.baseline))
    if state.final_scores:
        yield DisplayRow(3, "final", _build_final_scores(state.final_scores))
    if state.results:
        yield from _list_results(state.results[-max(width, 1) :], width, options)
    if state.budget is not None:
        yield from _list_spend(state, state.budget, now)
    if state.step and state.stages and {stage.name for stage in state.stages} <= set(STEP_STAGES):
        yield DisplayRow(6, "stages", _build_stages(state, ">" if options.ascii_only else "›"))
    for stage in state.active_stages[-3:]:
        yield DisplayRow(1, name_stage(stage, state), _build_progress(stage, width, now))
    if state.trials:
        last, rollouts = state.trials[-1], sum(each.n for each in state.trials)
        limit = "" if state.max_rollouts is None else f" of at most {state.max_rollouts}"
        part = "" if last.part == "step" else f"{last.part.replace('_', ' ')}, "
        repeat = ", again" if last.trial else ""
        request = Text(f"{part}{name_count(last.n, 'item')}{repeat}")
        yield DisplayRow(5, "gate", request.append(f"   {rollouts}{limit} rollouts", "dim"))
    yield from [row for at, pause in state.pauses for row in _list_pause(pause, now - at, options)][-2:]


def _build_final_scores(scores: Sequence[SkillScore]) -> Text:
    """Return the final scores on the split that was measured last."""
    split = scores[-1].split
    shown = [f"{score.name} {format_score(score.hard)}" for score in scores if score.split is split]
    return Text("   ".join([split.value, *shown]))


def _build_scores(state: LiveState, baseline: float) -> Text:
    line = Text(f"baseline {format_score(baseline)}")
    for name, version in (("current", state.current), ("best", state.best)):
        if version is not None and version.number:
            line.append(f"   {name} v{version.number} {format_score(version.score)}")
    if state.best is not None and state.best.number and state.best.score is not None:
        gain = state.best.score - baseline
        line.append(f" ({gain:+.3f})", "green" if gain > 0 else "dim")
    return line


def _list_results(
    results: Sequence[events.StepCommitted], width: int, options: ConsoleOptions
) -> Iterator[DisplayRow]:
    scores = [result.current.score for result in results]
    heights = draw_heights(scores, ascii_only=options.ascii_only)
    if heights.strip():
        yield DisplayRow(7, "val by step", Text(heights, "cyan"))
    signs = [
        (*DECISION_SIGNS[result.action], ACTION_WORDS[result.action])
        if result.action in DECISION_SIGNS
        else UNCHANGED_SIGN
        for result in results
    ]
    line = Text.assemble(*(sign[:2] for sign in signs))
    order = "+=!x?<."
    legend = ", ".join(
        f"{sign} {name}" for sign, _, name in sorted(set(signs), key=lambda s: (order.index(s[0]), s))
    )
    if len(line) + len(legend) + 3 <= width:
        line.append(f"   {legend}", "dim")
    yield DisplayRow(7, "decisions", line)


def draw_heights(scores: Sequence[float | None], *, ascii_only: bool) -> str:
    """Return a sign for each score, from the lowest to the highest score; a blank for a missing score."""
    signs = "0123456789" if ascii_only else "▁▂▃▄▅▆▇█"
    known = [score for score in scores if score is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span, top = (high - low) or 1.0, len(signs) - 1
    return "".join(" " if score is None else signs[round((score - low) / span * top)] for score in scores)


def _list_spend(state: LiveState, budget: events.BudgetUpdated, now: float) -> Iterator[DisplayRow]:
    usage, usd = state.spent, state.spent.usd
    read, written = format_count(usage.input_tokens), format_count(usage.output_tokens)
    line = Text(f"{format_count(usage.calls)} calls   {read} tokens in, {written} out")
    line.append("" if usd is None else f"   ${usd:.4f}")
    line.append(f"   {state.failed_calls} failed" if state.failed_calls else "", "yellow")
    yield DisplayRow(4, "spend", line)
    seconds = budget.seconds + max(now - state.budget_updated_at, 0.0)
    charged = budget.usage + budget.worst_case
    tokens = charged.input_tokens + charged.output_tokens
    limits = (
        (charged.calls, budget.max_calls, f"{format_count(budget.max_calls or 0)} calls"),
        (tokens, budget.max_tokens, f"{budget.max_tokens or 0:,} tokens"),
        (charged.usd or 0.0, budget.max_usd, f"${budget.max_usd or 0:.2f}"),
        (seconds, budget.max_seconds, format_clock(budget.max_seconds or 0)),
    )
    shares = [(used / limit if limit else 1.0, words) for used, limit, words in limits if limit is not None]
    if shares:
        share, words = max(shares)
        bar = _build_bar(share, 1.0, style="yellow" if share >= 0.9 else "cyan")
        yield DisplayRow(4, "budget", _build_line(bar, f"{int(100 * share)}% of {words}"))


def _build_stages(state: LiveState, arrow: str) -> Text:
    stages, line = {stage.name: stage for stage in state.stages}, Text()
    for name in STEP_STAGES:
        line.append(f" {arrow} " if line else "", "dim")
        seconds = stages[name].seconds if name in stages else None
        line.append(name, "dim" if name not in stages else "bold" if seconds is None else "green")
        line.append(f" {seconds:.0f}s" if seconds is not None and seconds >= 1 else "", "dim")
    return line


def _build_progress(stage: StageProgress, width: int, now: float) -> RenderableType:
    elapsed = format_clock(now - stage.started_at)
    if stage.total is None:
        calls = f", {name_count(stage.calls, 'call')}" if stage.calls else ""
        return Text(f"running for {elapsed}{calls}", "dim")
    bar = _build_bar(stage.done, stage.total, min(max(width - 34, 4), 60))
    return _build_line(bar, f"{f'{stage.done} of {stage.total}':<10}", Text(elapsed, "dim"))


def _list_pause(pause: events.RateLimited, elapsed: float, options: ConsoleOptions) -> Iterator[DisplayRow]:
    """Yield how long an endpoint waits, and for a minute after that its new rate."""
    left = pause.seconds - elapsed
    rate = "" if pause.rate is None else f"{pause.rate:.3g} calls/s"
    host = pause.endpoint.partition("://")[2].partition("/")[0] or pause.endpoint
    answer = "cannot be reached" if pause.status is None else f"answered {pause.status}"
    line = Text(f"{_escape_line(host, options.encoding)} {answer}: ")
    if left > 0:
        then = f", then {rate}" if rate else ""
        yield DisplayRow(3, "limits", line.append(f"waiting {format_duration(max(left, 1))}{then}", "yellow"))
    elif rate and left > -RATE_SECONDS:
        yield DisplayRow(3, "limits", line.append(f"continues at {rate}"))


def _list_drafts(
    drafts: Sequence[CallDraft], height: int, console: Console, options: ConsoleOptions
) -> Iterator[RenderableType]:
    """Yield the drafts of the oldest unfinished calls, or of the last finished call."""
    drafts = [draft for draft in drafts if not draft.finished] or drafts[:1]
    count = min(len(drafts), max(1, height // DRAFT_HEIGHT)) if height >= 2 else 0
    for place, draft in enumerate(drafts[:count]):
        more = len(drafts) - count if place == count - 1 else 0
        room = height // (count - place) - 1
        lines = render_draft(draft.draft, console, options, height=room)
        style = "dim" if draft.finished or draft.refusal is not None else ""
        height -= len(lines) + 1
        yield _build_grid([DisplayRow(0, "draft", _describe_draft(draft, more, options.encoding))], options)
        yield Group(*(Text("  ", style) + line for line in lines))


def _describe_draft(draft: CallDraft, more: int, encoding: str) -> Text:
    line = Text(_escape_line(f"{draft.purpose.replace('_', ' ')} ({draft.role})", encoding))
    if draft.refusal is not None:
        reason = _escape_line(draft.refusal, encoding)
        return line.append(f", attempt {draft.attempt} refused: {reason}", "yellow")
    line.append(f", attempt {draft.attempt}" if draft.attempt > 1 else "", "yellow")
    return line.append(", done" if draft.finished else f", and {more} more" if more else "", "dim")


def render_draft(draft: JsonValue, console: Console, options: ConsoleOptions, *, height: int) -> list[Text]:
    """Return the end of a partial reply in at most ``height`` lines, without control characters."""
    width = options.max_width - 2
    if height < 1 or width < 8:
        return []
    lines: list[Text] = []
    for part in reversed(list(_list_parts(draft))):
        end = part[-width * height :]
        text = "\n".join(filter(str.strip, _escape(end, options.encoding).splitlines()))
        lines[:0] = Text(text).wrap(console, width)
        if len(lines) > height or end != part:
            lines = lines[-height:]
            lines[0] = Text("...") + lines[0]
            lines[0].truncate(width, overflow="crop")
        if len(lines) >= height:
            break
    return lines


def _list_parts(draft: JsonValue) -> Iterator[str]:
    """Yield the fields of a draft and the entries of its lists, in the order of writing."""
    if not isinstance(draft, dict):
        yield str(draft or "")
        return
    for name, value in draft.items():
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, dict):
                yield "" if entry is None else f"{name}: {entry}"
            elif name == "edits":
                sides = [str(entry[side]) for side in ("target", "content") if entry.get(side)]
                yield EDIT_SIGNS.get(str(entry.get("op", "append")), "* ") + " => ".join(sides)
            else:
                words = (text for text in entry.values() if isinstance(text, str) and text)
                yield f"{name}: {', '.join(words)}"


def _escape(text: str, encoding: str) -> str:
    """Return untrusted text that a terminal with an encoding can show, without joined characters."""
    separate = JOINERS.sub("", escape_controls(text)).replace("\t", "    ")
    return separate.encode(encoding, "backslashreplace").decode(encoding)


def _escape_line(text: str, encoding: str) -> str:
    return " ".join(_escape(text, encoding).split())
