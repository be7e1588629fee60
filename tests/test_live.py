"""Views of a run: what stands on a terminal, and what the live view leaves behind."""

from __future__ import annotations

import io
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from rich.console import Console, ConsoleDimensions

from emulator import Terminal
from reflact import events
from reflact.config.training import TrainerConfig
from reflact.events import EVENT_ADAPTER, Event
from reflact.records import SkillVersion, Usage
from reflact.reporting.live import JsonView, LineView, LiveView, show_run
from reflact.reporting.live_display import LiveState

RUN = "r1"
V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
PLAN = events.RunStarted(run_id=RUN, steps_per_epoch=14, n_train=56, n_val=40, n_test=80)
PLAN_LINE = "run r1: 56 train, 40 val, 80 test items; 14 steps per epoch"
STEP_LINE = "step 3    no change                                    v0"


def committed(step: int) -> Event:
    """Return the commit of a step."""
    return events.StepCommitted(run_id=RUN, step=step, epoch=1, action="no_change", current=V0, best=V0)


class Screen(io.StringIO):
    """A file that is a terminal; ``written`` is set by each write, and ``writes`` has the texts."""

    encoding = "utf-8"

    def __init__(self, width: int = 80, height: int = 24) -> None:
        super().__init__()
        self.terminal = Terminal(width, height)
        self.writes: list[str] = []
        self.written = threading.Event()

    def write(self, text: str) -> int:
        """Show text."""
        self.writes += [text] if text else []
        self.terminal.write(text)
        self.written.set()
        return len(text)

    @property
    def lines(self) -> list[str]:
        """All lines, with those that scrolled out at the top."""
        return self.terminal.scrolled + self.terminal.screen


def build_view(
    screen: Screen, *, frames_per_second: float = 1e-6, **environment: str
) -> tuple[LiveView, Console]:
    """Return a live view and its console. By default, only the test draws."""
    console = Console(
        file=screen,
        force_terminal=True,
        width=screen.terminal.width,
        height=screen.terminal.height,
        _environ=environment,
    )
    state = LiveState(name="demo", epochs=1)
    return LiveView(console, state, clock=lambda: 5.0, frames_per_second=frames_per_second), console


@contextmanager
def drawn(screen: Screen, *happened: Event, **environment: str) -> Iterator[tuple[LiveView, Console]]:
    """Give a live view that shows events."""
    view, console = build_view(screen, **environment)
    with view:
        for event in happened:
            view.show_event(event)
        view.refresh()
        yield view, console


def test_lines_stay_above_the_display() -> None:
    """After many lines and frames there is one display, below all lines; at the end it is removed."""
    screen = Screen()
    with drawn(screen, PLAN) as (view, _):
        for step in range(1, 31):
            view.show_event(committed(step))
            view.refresh()
        assert [line.split()[1] for line in screen.lines if line.startswith("step ")] == [
            str(step) for step in range(1, 31)
        ]
        assert sum(line.startswith("demo r1 ") for line in screen.lines) == 1
        assert screen.lines[-1].startswith("decisions")
        assert not screen.terminal.cursor_shown
        view.show_event(events.WarningIssued(run_id=RUN, message="the end"))
    assert screen.terminal.cursor_shown
    assert screen.lines[-1] == "warning   the end"
    assert not any("demo" in line for line in screen.lines)


def test_each_frame_is_one_write() -> None:
    """Lines and display are written together, and an unchanged frame is not written.

    If the process must exit at once, a few sequences remove the display and show the cursor.
    """
    screen = Screen()
    with drawn(screen, PLAN) as (view, _):
        screen.writes.clear()
        view.refresh()
        assert screen.writes == []
        view.show_event(committed(1))
        view.refresh()
        assert len(screen.writes) == 1
        assert [line.split()[0] for line in screen.lines[:3]] == ["run", "step", "demo"]
        screen.terminal.write(view.build_cleanup())
        assert [line.split()[0] for line in screen.lines] == ["run", "step"]
        assert screen.terminal.cursor_shown


@pytest.mark.parametrize(("width", "height"), [(50, 12), (160, 50), (80, 10), (200, 24)])
def test_a_change_of_size_leaves_one_display(width: int, height: int) -> None:
    """The view clears the screen and draws it again with the last lines, which all are kept for that."""
    screen = Screen()
    with drawn(screen, PLAN, *map(committed, range(1, 9))) as (view, console):
        for size in ((30, 8), (width, height)):
            screen.terminal.resize(*size)
            console.size = ConsoleDimensions(*size)
            view.refresh()
        shown = screen.terminal.screen
        assert len(shown) <= height
        assert sum(line.startswith("demo r1 ") for line in shown) == 1
        assert any(line.startswith("step 8 ") for line in shown)
        assert (shown[0] == PLAN_LINE) == (height == 50)
    assert screen.terminal.screen[-1].endswith("v0")


def test_no_color_removes_colours() -> None:
    """With NO_COLOR the same rows have no colours."""
    screen = Screen()
    with drawn(screen, PLAN, committed(1), NO_COLOR="1"):
        assert any(line.startswith("demo r1") for line in screen.lines)
    assert not any(f"\x1b[{code}m" in text for text in screen.writes for code in (31, 32, 33, 36))


def test_a_thread_draws_and_ends_with_the_block() -> None:
    """Events are drawn without help; after the block the lines stand and the thread is gone."""
    screen = Screen()
    view, _ = build_view(screen, frames_per_second=100)
    with view:
        view.restore((PLAN, committed(1), committed(2)))
        view.show_event(events.WarningIssued(run_id=RUN, message="[b]take care[/b]\x1b[2J"))
        screen.written.clear()
        assert screen.written.wait(60)
    assert any("2 committed" in text for text in screen.writes)
    assert screen.terminal.cursor_shown
    assert screen.lines == [
        "run r1 resumes after 2 committed steps",
        r"warning   [b]take care[/b]\x1b[2J",
    ]
    assert "reflact-view" not in {thread.name for thread in threading.enumerate()}


def test_a_slow_or_lost_terminal_does_not_delay_the_run() -> None:
    """Events return at once while the thread hangs in a write, and if nothing can be written any more."""
    screen = Screen()
    stuck, release = threading.Event(), threading.Event()

    def write(text: str) -> int:
        stuck.set()
        assert release.wait(60)
        raise OSError(5, "Input/output error")

    view, _ = build_view(screen, frames_per_second=100)
    with view:
        screen.write = write  # type: ignore[method-assign,assignment]
        assert stuck.wait(60)
        for step in range(1, 100):
            view.show_event(committed(step))
        release.set()


def test_lines_tell_the_progress_of_a_long_stage() -> None:
    """A stage has its first such line after 10 silent seconds and others after 30; events are no silence."""
    text, now = io.StringIO(), 0.0
    view = LineView(Console(file=text, width=30), clock=lambda: now, with_timer=False)
    first = events.StageStarted(run_id=RUN, step=1, stage="rollout")
    ended = events.StageFinished(run_id=RUN, step=1, stage="rollout", seconds=90.0)
    second = events.StageStarted(run_id=RUN, step=1, stage="aggregate")
    progress = events.StageProgressed(run_id=RUN, step=1, stage="rollout", done=1, total=4)
    warning = events.WarningIssued(run_id=RUN, message="x")
    happened = {0: PLAN, 5: first, 8: progress, 91: warning, 94: ended, 95: second}
    printed: list[tuple[float, str]] = []
    for at in range(140):
        now, n_before = float(at), len(text.getvalue().splitlines())
        if at in happened:
            view.show_event(happened[at])
        view.refresh()
        lines = text.getvalue().splitlines()[n_before:]
        printed += [(at, line.partition(" (")[0].partition(" for")[0]) for line in lines]
    rollout, aggregate = "progress  step 1, rollout 1 of 4", "progress  step 1, aggregate"
    assert printed == [
        (0, PLAN_LINE),
        (10, rollout),
        (40, rollout),
        (70, rollout),
        (91, "warning   x"),
        (101, aggregate),
        (131, aggregate),
    ]


@pytest.mark.parametrize(
    ("before", "shown"), [(None, "235 calls, 61k tokens"), (230, "5 calls, 1,000 tokens")]
)
def test_a_measurement_shows_its_own_calls(before: int | None, shown: str) -> None:
    """Calls that a run made before a measurement are left out of its progress; a training shows all of its own."""
    text, now = io.StringIO(), 0.0
    view = LineView(Console(file=text), clock=lambda: now, with_timer=False)
    if before is not None:
        view.leave_out(Usage(calls=before, input_tokens=60_000))
    usage = Usage(calls=235, input_tokens=61_000)
    view.show_event(events.BudgetUpdated(run_id=RUN, usage=usage, seconds=1.0))
    now = 30.0
    view.refresh()
    assert text.getvalue() == f"progress  starting; price unknown, {shown}\n"


def test_a_thread_tells_the_progress_and_ends_with_the_block() -> None:
    """Lines come without events, but not while a person is asked something."""
    screen = Screen()
    ticks = iter(range(0, 10**9, 10))
    console = Console(file=screen, force_terminal=True)
    with LineView(console, clock=lambda: next(ticks), refreshes_per_second=100):
        assert screen.written.wait(60)
    assert screen.lines[0] == "progress  starting"
    before = len(screen.lines)
    with LineView(console, clock=lambda: next(ticks), refreshes_per_second=100, with_timer=False):
        assert "reflact-view" not in {thread.name for thread in threading.enumerate()}
    assert len(screen.lines) == before


def print_events(*happened: Event, times: bool = False) -> str:
    """Return what is printed to a file."""
    text = io.StringIO()
    with LineView(Console(file=text, width=30), times=times) as view:
        for event in happened:
            view.show_event(event)
    return text.getvalue()


def test_a_file_gets_one_line_for_each_event() -> None:
    """Lines are as long as they are, without control sequences, and can begin with the local time."""
    progress = events.StageProgressed(run_id=RUN, step=1, stage="rollout", done=1, total=2)
    warning = events.WarningIssued(run_id=RUN, message="[b]x[/b]\x1b[2J")
    printed = print_events(PLAN, progress, committed(3), warning)
    assert printed.splitlines() == [PLAN_LINE, STEP_LINE, "warning   [b]x[/b]\\x1b[2J"]
    stamp = f"{PLAN.at.astimezone():%Y-%m-%d %H:%M:%S}"
    assert print_events(PLAN, times=True) == f"{stamp} {PLAN_LINE}\n"


def test_json_is_one_event_a_line_in_ascii() -> None:
    """Each line is read back as the event, and no letter of it can steer a terminal."""
    written: list[str] = []
    event = events.WarningIssued(run_id=RUN, message="Größe \u202e\x1b[2J")
    with JsonView(written.append) as view:
        view.show_event(event)
    (line,) = written
    assert line.isascii()
    assert line.isprintable()
    assert EVENT_ADAPTER.validate_json(line) == event


async def test_an_interrupted_program_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints a long traceback after Ctrl-C, so the line before it says that the run can be resumed."""

    async def happen() -> AsyncIterator[Event]:
        yield PLAN
        scope.cancel()
        await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        await show_run(happen(), TrainerConfig(out_dir=tmp_path))
    assert scope.cancelled_caught
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(PLAN_LINE)
    assert lines[-1] == "Interrupted. Run the program again to resume the run."
