"""Views of a run while it goes on. The screens are in tests/snapshots; `make snapshots` writes them anew."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from rich.cells import cell_len
from rich.console import Console

from emulator import Terminal
from reflact import events
from reflact.events import EVENT_ADAPTER, Event
from reflact.records import SkillVersion, Usage
from reflact.reporting.live import EventLines, LineView, LiveView, RunView, render_display, show_events
from reflact.reporting.progress import LiveFile, RunProgress, read_live_events
from reflact.types import Edit, EditResult, Fallback, GateAction, Verdict

Snapshot = Callable[[str, str], None]
RUN = "r1"
V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
V1 = SkillVersion(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)
USAGE = Usage(calls=128, input_tokens=45_210, output_tokens=3_100, usd=0.25)
EVIL = "\x1b[2J\x1b]0;title\x07[bold]x[/bold]\u202e"
PLAN = events.RunStarted(run_id=RUN, steps_per_epoch=14, n_train=56, n_val=40, n_test=80)
PLAN_LINE = "run r1: 56 train, 40 val, 80 test items; 14 steps per epoch"


def make(kind: str, **values: Any) -> Event:
    return EVENT_ADAPTER.validate_python({"run_id": RUN, "kind": kind, **values})


def start_step(step: int) -> Event:
    return make("step_started", step=step, epoch=1, item_ids=("a",))


def commit_step(step: int, action: GateAction = "reject") -> Event:
    return make("step_committed", step=step, epoch=1, action=action, current=V1, best=V1)


def progress(stage: str, done: int, total: int, *, step: int = 5) -> Event:
    return make("stage_progressed", step=step, stage=stage, done=done, total=total, from_store=0)


def draft(value: JsonValue) -> Event:
    return make("draft_updated", role="optimizer", purpose="merge", call_id="a", attempt=1, draft=value)


BEGINNING = (
    PLAN,
    make("gate_power_estimated", description="It measures.", trials=4, rollouts=320),
    make("baseline_measured", score=0.25, n=40, trials=2),
)
BETTER = Verdict(action="accept_new_best", reason="more", candidate_score=0.5, current_score=0.25)
PAUSE = make("rate_limited", endpoint="https://api.test/v1", status=429, seconds=12.0, rate=3.25)
BUDGET = make("budget_updated", usage=USAGE, seconds=90.0, max_usd=1.0)
DRAFT = draft({"edits": [{"op": "append", "content": f"rule {number}"} for number in range(40)]})
LIVE = (
    make("stage_started", step=5, stage="evaluate"),
    progress("evaluate", 6, 24),
    DRAFT,
    make("draft_discarded", role="optimizer", purpose="merge", call_id="a", attempt=1, reason="no JSON"),
)
EVERYTHING = (
    *BEGINNING,
    commit_step(1, "accept_new_best"),
    start_step(5),
    make("stage_finished", step=5, stage="rollout", seconds=12.0),
    make("stage_started", step=5, stage="evaluate"),
    progress("evaluate", 6, 24),
    BUDGET,
    PAUSE,
    DRAFT,
)


def test_events_have_lines(snapshot: Snapshot) -> None:
    applied = EditResult(edit=Edit(op="append", content="x"), status="applied")
    rejected = EditResult(edit=Edit(op="delete", target="y"), status="rejected", reason="not there")
    fallback = Fallback(
        label="merge/failure/1/0", reason='no: {"error": "too long"}', replacement="the draft"
    )
    repeated = Verdict(action="no_change", reason="The same.", repeats="in step 1")
    report = {"source_type": "failure", "index": 0, "item_ids": ("a",)}
    slow = {"action": "accepted", "verdict": BETTER}
    closed = {"slow_update": slow, "meta_skill": "x", "fallbacks": (fallback,), "current": V1, "best": V0}
    happened = (
        *BEGINNING,
        start_step(1),
        progress("rollout", 2, 2, step=1),
        make("rollouts_finished", step=1, n=2, failures=1, unmeasured=0),
        make("edits_applied", step=1, pool_size=2, budget=4, results=(applied, rejected)),
        make("candidate_judged", step=1, verdict=BETTER),
        commit_step(1, "accept_new_best"),
        start_step(2),
        PAUSE,
        PAUSE,
        make("analyst_reported", step=2, report=report),
        make("analyst_reported", step=2, report={**report, "no_reply_reason": "It failed."}),
        make("candidate_judged", step=2, verdict=repeated),
        commit_step(2, "no_change"),
        start_step(3),
        make("rate_limited", endpoint="https://api.test/v1", status=None, seconds=1.0),
        commit_step(3, "no_patches"),
        make("fallback_used", step=2, fallback=fallback),
        make("epoch_committed", step=2, epoch=1, **closed),
        make("version_returned", step=2, skill_hash="a" * 64, reason="v0 is better"),
        make("training_stopped", step=3, reason="no patience"),
        make("promotion_judged", step=3, verdict=BETTER, best=V1),
        make("test_split_opened", step=3, count=1),
        make("step_retried", step=3, reason="too few rollouts"),
        make("warning_issued", message="take care"),
    )
    event_lines = EventLines()
    lines = [line.rstrip() for event in happened if (line := event_lines.format_event(event)) is not None]
    snapshot("event_lines", "\n".join(lines) + "\n")


def follow(*happened: Event, name: str = "demo") -> RunProgress:
    run = RunProgress(name=name, epochs=2, opened_at=10.0)
    for event in happened:
        run.update(event, 100.0)
    return run


def build_console(width: int = 80, height: int = 24, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, height=height, color_system=None, _environ={})


def render(run: RunProgress, console: Console | None = None) -> list[str]:
    lines = render_display(run, console or build_console(), 105.0)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_the_display_shows_the_run(snapshot: Snapshot) -> None:
    call = {"role": "optimizer", "purpose": "merge", "call_id": "a", "attempt": 1}
    refused = make("draft_discarded", **call, reason=f"no {EVIL}\nanchor")
    screens = {
        "tiny": render(follow(*EVERYTHING), build_console(60, 8)),
        "usual": render(follow(*EVERYTHING)),
        "ascii": render(follow(*EVERYTHING, draft("Größe"), name="Grüße"), build_console(encoding="ascii")),
        "beginning": render(follow()),
        "baseline": render(follow(PLAN, progress("evaluate", 1, 2, step=0))),
        "refused": render(follow(*BEGINNING, start_step(5), DRAFT, refused)),
    }
    text = "\n".join("\n".join((f"# {name}", *rows, "")) for name, rows in screens.items())
    snapshot("live_display", text)


SCALARS = st.none() | st.booleans() | st.integers() | st.text()
DRAFTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=12
)


@given(
    st.lists(st.sampled_from(EVERYTHING), max_size=30),
    DRAFTS,
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from(["utf-8", "ascii", "latin-1", "cp437"]),
)
def test_the_display_fits_every_screen(
    happened: list[Event], value: JsonValue, width: int, height: int, encoding: str
) -> None:
    rows = render(follow(*happened, draft(value)), build_console(width, height, encoding))
    assert len(rows) <= max(1, height - 1)
    for row in rows:
        assert cell_len(row) <= width
        assert not any(ord(c) < 32 or ord(c) == 127 for c in row)
        row.encode(encoding)


class Screen(io.StringIO):
    """A file that is a terminal; ``written`` is set by each write, and ``writes`` has the texts."""

    encoding = "utf-8"

    def __init__(self, width: int = 80, height: int = 24) -> None:
        super().__init__()
        self.terminal = Terminal(width, height)
        self.writes: list[str] = []
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.writes += [text] if text else []
        self.terminal.write(text)
        self.written.set()
        return len(text)

    @property
    def lines(self) -> list[str]:
        return self.terminal.scrolled + self.terminal.screen


def build_view(screen: Screen, *, frames_per_second: float = 1e-6) -> LiveView:
    console = Console(file=screen, force_terminal=True, width=80, height=24, _environ={})
    run = RunProgress(name="demo", epochs=1)
    return LiveView(console, run, clock=lambda: 5.0, frames_per_second=frames_per_second)


def test_lines_stay_above_the_display() -> None:
    screen = Screen()
    with build_view(screen) as view:
        view.show_event(PLAN)
        for step in range(1, 31):
            view.show_event(commit_step(step))
            view.draw()
        steps = [line.split()[1] for line in screen.lines if line.startswith("step ")]
        assert steps == [str(step) for step in range(1, 31)]
        assert sum(line.startswith("demo r1 ") for line in screen.lines) == 1
        assert screen.lines[-1].startswith("run ")
        assert not screen.terminal.cursor_shown
        view.show_event(events.WarningIssued(run_id=RUN, message="the end"))
    assert screen.terminal.cursor_shown
    assert screen.lines[-1] == "warning   the end"
    assert not any("demo" in line for line in screen.lines)


def test_a_thread_draws_and_ends_with_the_block() -> None:
    screen = Screen()
    with build_view(screen, frames_per_second=100) as view:
        view.restore((PLAN, commit_step(1), commit_step(2)))
        view.show_event(events.WarningIssued(run_id=RUN, message="[b]take care[/b]\x1b[2J"))
        screen.written.clear()
        assert screen.written.wait(60)
    assert any("after step 2 of 14" in text for text in screen.writes)
    assert screen.lines == ["run r1 resumes after 2 committed steps", r"warning   [b]take care[/b]\x1b[2J"]
    assert "reflact-view" not in {thread.name for thread in threading.enumerate()}


def test_a_slow_or_lost_terminal_does_not_delay_the_run() -> None:
    """Events return at once while the thread hangs in a write, and if nothing can be written any more."""
    screen = Screen()
    stuck = threading.Event()
    release = threading.Event()

    def write(text: str) -> int:
        stuck.set()
        assert release.wait(60)
        raise OSError(5, "Input/output error")

    with build_view(screen, frames_per_second=100) as view:
        screen.write = write  # type: ignore[method-assign,assignment]
        assert stuck.wait(60)
        for step in range(1, 100):
            view.show_event(commit_step(step))
        release.set()


def test_a_page_of_another_process_knows_what_the_display_knows(tmp_path: Path) -> None:
    """Durable events of the store and the live ones of the file make the same rows; the end of a step clears it."""
    store = tmp_path / "run.db"
    happened = (*BEGINNING, commit_step(1, "accept_new_best"), start_step(5), BUDGET, *LIVE)
    file = LiveFile(store, RUN, clock=itertools.count(0, 2).__next__)
    shown = RunProgress(epochs=1)
    known = RunProgress(epochs=1)
    for event in happened:
        file.update(event)
        shown.update(event, event.at.timestamp())
    live = read_live_events(store, RUN)
    durable = [event for event in happened if event.durable]
    for event in (*durable, *live):
        known.update(event, event.at.timestamp())
    assert list(known.list_rows(0.0)) == list(shown.list_rows(0.0))
    assert known.draft == shown.draft
    assert len(live) == len(LIVE) + 1, "each subject once, and what is spent"
    file.update(commit_step(5))
    assert read_live_events(store, RUN) == [BUDGET]
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_frequent_events_are_written_once_a_second(tmp_path: Path) -> None:
    times = iter((0.0, 0.5, 0.9, 1.1, 1.2))
    file = LiveFile(tmp_path / "run.db", RUN, clock=lambda: next(times))
    written = []
    for done in range(1, 5):
        file.update(progress("evaluate", done, 24))
        (event,) = read_live_events(tmp_path / "run.db", RUN)
        assert isinstance(event, events.StageProgressed)
        written.append(event.done)
    assert written == [1, 1, 1, 4]
    file.update(make("stage_started", step=5, stage="rollout"))
    assert len(read_live_events(tmp_path / "run.db", RUN)) == 2


async def test_a_run_that_is_shown_has_its_live_file_until_it_ends(tmp_path: Path) -> None:
    store = tmp_path / "run.db"

    async def happen() -> AsyncIterator[Event]:
        for event in (PLAN, *LIVE):
            yield event

    seen = [read_live_events(store, RUN) async for _ in show_events(happen(), RunView(), store)]
    assert [len(seen[place]) for place in (0, 1, -1)] == [0, 1, len(LIVE)]
    assert read_live_events(store, RUN) == []


def test_a_file_gets_lines_and_the_progress_after_a_silence() -> None:
    text = io.StringIO()
    now = 0.0
    view = LineView(Console(file=text, width=30), clock=lambda: now, times=True)
    view.show_event(PLAN)
    for now in (5.0, 29.0, 31.0, 40.0):  # noqa: B007 - the clock reads it
        view.show_event(progress("rollout", 1, 2))
    view.show_event(events.WarningIssued(run_id=RUN, message="[b]x[/b]\x1b[2J"))
    first, silent, warning = text.getvalue().splitlines()
    assert first == f"{PLAN.at.astimezone():%Y-%m-%d %H:%M:%S} {PLAN_LINE}"
    assert silent.endswith("progress  step 5; rollout 1 of 2 (about 26 s left)")
    assert warning.endswith("warning   [b]x[/b]\\x1b[2J")
