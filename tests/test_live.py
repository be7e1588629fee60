"""The live view at a terminal: what stands on it, and what is left of it."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console, ConsoleDimensions

from emulator import Terminal
from reflact import events
from reflact.events import EVENT, Event
from reflact.records import Version
from reflact.reporting.live import JsonView, LineView, LiveView, Painter, RunView
from reflact.reporting.live_state import LiveState, fold

RUN = "r1"
V0 = Version(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
PLAN = events.RunStarted(run_id=RUN, steps_per_epoch=14, n_train=56, n_val=40, n_test=80)


def committed(step: int) -> Event:
    """A step is committed."""
    return events.StepCommitted(run_id=RUN, step=step, epoch=1, action="no_change", current=V0, best=V0)


class Screen(io.StringIO):
    """A file that is a terminal; its text is what is written since it was last taken.

    Attributes:
        error: Raised at the next write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None
        self.written = threading.Event()

    def write(self, text: str) -> int:
        """Take text."""
        if self.error is not None:
            raise self.error
        self.written.set()
        return super().write(text)

    def taken(self) -> str:
        """Return what was written, and forget it."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


def at_terminal(width: int = 80, height: int = 24) -> tuple[Console, Screen, Terminal]:
    """Return a console, the file that it writes to, and the terminal that shows it."""
    screen = Screen()
    console = Console(file=screen, force_terminal=True, width=width, height=height, _environ={})
    return console, screen, Terminal(width, height)


def known(*happened: Event) -> LiveState:
    """Return what is known after events."""
    watched = LiveState(name="demo", epochs=1)
    for event in happened:
        watched = fold(watched, event, 0.0)
    return watched


# ------------------------------------------------------------------------------------------ painting


def test_lines_stay_above_a_region_that_is_drawn_in_its_place() -> None:
    """Many lines and frames later there is one region, below the lines, none of which is lost."""
    console, screen, terminal = at_terminal()
    painter = Painter(console)
    painter.begin()
    happened: list[Event] = [PLAN]
    for step in range(1, 31):
        happened.append(committed(step))
        painter.paint([f"step {step} is done"], known(*happened), float(step))
        terminal.write(screen.taken())
    hidden = terminal.cursor_shown
    lines = terminal.scrolled + terminal.screen
    assert [line for line in lines if line.endswith("is done")] == [f"step {n} is done" for n in range(1, 31)]
    assert sum(line.startswith("── demo r1") for line in lines) == 1
    assert lines[-1].startswith("decided")
    painter.end(["the end"])
    terminal.write(screen.taken())
    assert (hidden, terminal.cursor_shown) == (False, True)
    assert terminal.screen[-2:] == ["step 30 is done", "the end"]
    assert not any("demo" in line for line in terminal.scrolled + terminal.screen)


def test_a_terminal_can_be_left_from_outside() -> None:
    """Where the process is ended at once, a few sequences take the region away and show the cursor."""
    console, screen, terminal = at_terminal()
    painter = Painter(console)
    painter.begin()
    painter.paint(["a line"], known(PLAN, committed(1)), 1.0)
    terminal.write(screen.taken() + painter.leave())
    assert terminal.screen == ["a line"]
    assert terminal.cursor_shown


def test_a_frame_like_the_one_before_writes_nothing() -> None:
    """Where nothing has changed, nothing is drawn, so nothing flickers."""
    console, screen, _ = at_terminal()
    painter = Painter(console)
    painter.begin()
    painter.paint([], known(PLAN), 1.0)
    assert screen.taken()
    painter.paint([], known(PLAN), 1.4)
    assert screen.taken() == ""
    painter.end([])


def test_a_frame_is_one_write() -> None:
    """LineView and region go out together: no half of a frame can be seen."""
    console, screen, terminal = at_terminal()
    painter = Painter(console)
    painter.begin()
    painter.paint([], known(PLAN), 1.0)
    terminal.write(screen.taken())
    writes: list[str] = []
    screen.write = writes.append  # type: ignore[method-assign,assignment]
    painter.paint(["a line"], known(PLAN, committed(1)), 2.0)
    (frame,) = (write for write in writes if write)
    terminal.write(frame)
    assert terminal.screen[0] == "a line"
    assert terminal.screen[1].startswith("── demo r1")


@pytest.mark.parametrize(("width", "height"), [(50, 12), (160, 50), (80, 10), (200, 24)])
def test_a_change_of_size_leaves_one_region(width: int, height: int) -> None:
    """The screen is drawn anew with the latest lines, whatever the terminal made of the old one."""
    console, screen, terminal = at_terminal()
    painter = Painter(console)
    painter.begin()
    steps = [committed(step) for step in range(1, 9)]
    painter.paint(
        [f"step {n} is done, and this line is a rather long one" for n in range(9)], known(PLAN), 0.0
    )
    terminal.write(screen.taken())
    terminal.resize(width, height)
    console.size = ConsoleDimensions(width, height)
    painter.paint(["one more"], known(PLAN, *steps), 1.0)
    terminal.write(screen.taken())
    shown = terminal.screen
    assert len(shown) <= height
    assert sum(line.startswith("── demo") for line in shown) == 1
    assert "one more" in shown
    assert any(line.startswith("step 8 is done") for line in shown)
    painter.end([])
    terminal.write(screen.taken())
    assert terminal.screen[-1] == "one more"


def test_a_larger_screen_shows_lines_again_that_a_smaller_one_had_no_room_for() -> None:
    """All lines are kept for that, whatever the sizes on the way."""
    console, screen, terminal = at_terminal()
    painter = Painter(console)
    painter.begin()
    painter.paint([f"line {n}" for n in range(9)], known(PLAN), 0.0)
    for height in (8, 40):
        console.size = ConsoleDimensions(80, height)
        painter.paint([], known(PLAN), 1.0)
    painter.end([])
    terminal.resize(80, 40)
    terminal.write(screen.taken())
    assert terminal.screen == [f"line {n}" for n in range(9)]


def test_long_lines_are_broken_at_words() -> None:
    """What does not fit goes on below, indented."""
    console, screen, terminal = at_terminal(40, 24)
    painter = Painter(console)
    painter.begin()
    painter.paint(["warning   these are more words than the line has room for"], known(), 0.0)
    terminal.write(screen.taken())
    assert terminal.screen[:2] == ["warning   these are more words than the", " " * 10 + "line has room for"]
    painter.end([])


def test_no_colour_is_a_matter_of_the_environment() -> None:
    """With NO_COLOR the same rows come without a colour."""
    screen = Screen()
    console = Console(file=screen, force_terminal=True, width=80, height=24, _environ={"NO_COLOR": "1"})
    painter = Painter(console)
    painter.begin()
    painter.paint(["a line"], known(PLAN, committed(1)), 1.0)
    painter.end([])
    text = screen.taken()
    assert "demo" in text
    assert not any(f"\x1b[{code}m" in text for code in (31, 32, 33, 36))


# ------------------------------------------------------------------------------------------ the view


def test_the_view_draws_in_a_thread_and_tidies_up() -> None:
    """Events are drawn without anybody's help; after the block the lines stand and the thread is gone."""
    console, screen, terminal = at_terminal()
    with LiveView(console, LiveState(name="demo", epochs=1), clock=lambda: 5.0) as view:
        view.show(PLAN)
        view.show(events.Warned(run_id=RUN, message="[b]take care[/b]\x1b[2J"))
        screen.written.clear()
        assert screen.written.wait(20)
        view.say("one more line")
    terminal.write(screen.taken())
    assert terminal.cursor_shown
    assert terminal.screen == [
        "run r1: 56 train, 40 val, 80 test items; 14 steps an epoch",
        r"warning   [b]take care[/b]\x1b[2J",
        "one more line",
    ]
    assert "reflact-view" not in {thread.name for thread in threading.enumerate()}


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    """The run goes on where nobody looks any more."""
    console, screen, _ = at_terminal()
    with LiveView(console, LiveState(), clock=lambda: 5.0) as view:
        screen.error = OSError(5, "Input/output error")
        for step in range(1, 5):
            view.show(committed(step))


def test_what_an_earlier_start_told_is_shown_again() -> None:
    """Its steps are in the region, and one line says how far it came."""
    console, screen, terminal = at_terminal()
    with LiveView(console, LiveState(name="demo", epochs=1), clock=lambda: 5.0) as view:
        view.recall((PLAN, committed(1), committed(2)))
        screen.written.clear()
        assert screen.written.wait(20)
    written = screen.taken()
    assert "2 done" in written
    terminal.write(written)
    assert terminal.screen == ["run r1 goes on: 2 steps are committed"]


# ------------------------------------------------------------------------------------------ other views


def lines(*happened: Event, times: bool = False) -> str:
    """Return what is printed where there is no terminal."""
    text = io.StringIO()
    with LineView(Console(file=text, width=30), times=times) as view:
        for event in happened:
            view.show(event)
    return text.getvalue()


def test_without_a_terminal_there_are_lines_alone() -> None:
    """In a file each event that matters is one line, however long, without escape sequences."""
    progress = events.Progress(run_id=RUN, step=1, stage="rollout", done=1, total=2)
    printed = lines(PLAN, progress, committed(1), events.Warned(run_id=RUN, message="[b]x[/b]\x1b[2J"))
    assert printed.count("\n") == 3
    assert printed.startswith("run r1: 56 train, 40 val, 80 test items; 14 steps an epoch\n")
    assert printed.endswith("warning   [b]x[/b]\\x1b[2J\n")


def test_lines_begin_with_the_time_where_asked() -> None:
    """It is that of the event, where the reader is."""
    local = PLAN.at.astimezone()
    assert lines(PLAN, times=True).startswith(f"{local:%Y-%m-%d %H:%M:%S} run r1: ")


def test_a_back_off_is_told_once_a_step() -> None:
    """An endpoint that asks for less again and again has a line in each step, and one for another status."""
    first = events.BackedOff(
        run_id=RUN, step=1, endpoint="api.example.com", status=429, seconds=9.0, rate=2.5
    )
    other = first.model_copy(update={"status": 503, "rate": None})
    begun = events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",))
    assert lines(first, first, other, begun, first).splitlines() == [
        "limits    api.example.com answered 429: waits 9 s, then 2.5 calls/s",
        "limits    api.example.com answered 503: waits 9 s",
        "limits    api.example.com answered 429: waits 9 s, then 2.5 calls/s",
    ]


def test_an_endpoint_that_is_not_reached_is_told_once_a_step() -> None:
    """However many calls try again, and at the first of them, whose wait says nothing of the others."""
    gone = events.BackedOff(run_id=RUN, step=1, endpoint="api.example.com", status=None, seconds=0.2)
    later = gone.model_copy(update={"seconds": 4.0})
    assert lines(gone, later, gone) == "retries   api.example.com cannot be reached: tries again\n"


def test_json_is_one_event_a_line_in_ascii() -> None:
    """Each line is read back as the event, and no letter of it can steer a terminal."""
    written: list[str] = []
    event = events.Warned(run_id=RUN, message="Größe \u202e\x1b[2J")
    with JsonView(written.append) as view:
        view.show(event)
    (line,) = written
    assert line.isascii()
    assert line.isprintable()
    assert EVENT.validate_json(line) == event


def test_a_quiet_view_shows_nothing() -> None:
    """It takes everything."""
    with RunView() as view:
        view.recall((PLAN,))
        view.show(PLAN)
        view.say("x")
