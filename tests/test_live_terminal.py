"""The live view of real processes at a real pseudo-terminal, to the end and interrupted."""

from __future__ import annotations

import codecs
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from emulator import Terminal
from served import HANGS, MAIN, Endpoint, world
from toy_runs import build_learning_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals"),
]

Watch = Callable[[subprocess.Popen[bytes], Terminal], None]


def unwatched(process: subprocess.Popen[bytes], terminal: Terminal) -> None:
    """Let it run."""


def run_at(
    terminal: Terminal, *arguments: object, watch: Watch = unwatched, program: str = MAIN, **environment: str
) -> tuple[int, str]:
    """Run a command at a pseudo-terminal; return its exit code and what it wrote.

    ``watch`` is called after each write with the process and the terminal.
    """
    import fcntl
    import pty
    import termios

    hidden = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", terminal.height, terminal.width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**inherited, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environment},
        start_new_session=True,
    )
    os.close(theirs)
    terminal.keyboard = ours
    decoder, written = codecs.getincrementaldecoder("utf-8")(), ""
    while True:
        try:
            chunk = decoder.decode(os.read(ours, 65536))
        except OSError:  # the other side is closed
            break
        written += chunk
        terminal.write(chunk)
        watch(process, terminal)
    os.close(ours)
    return process.wait(HANGS), written


def find_display(terminal: Terminal) -> list[str]:
    labels = ("run         ", "val         ", "spend ", "stages ")
    return [line for line in terminal.scrolled + terminal.screen if line.startswith(labels)]


class Interrupting:
    """Interrupts a process when it is ready and the screen shows some words and the display, once for each of them.

    A terminal passes on what is written in parts, so the words can be there before the display is.
    """

    def __init__(self, *words: str, ready: Callable[[], bool] = lambda: True) -> None:
        self.waiting = list(words)
        self._ready = ready

    def __call__(self, process: subprocess.Popen[bytes], terminal: Terminal) -> None:
        displayed = any(line.startswith("run ") and line.endswith(("--", "──")) for line in terminal.screen)
        if (
            self.waiting
            and displayed
            and self._ready()
            and any(self.waiting[0] in line for line in terminal.screen)
        ):
            self.waiting.pop(0)
            process.send_signal(signal.SIGINT)


def test_the_demo_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """The view stands while it runs; each time the terminal is left clean, with the lines and the summary."""
    terminal, interrupting = Terminal(80, 24), Interrupting("step 1 ")
    code, written = run_at(terminal, "demo", "--out", tmp_path / "run", watch=interrupting)
    assert code == 130
    assert find_display(terminal) == []
    assert terminal.cursor_shown
    lines = terminal.scrolled + terminal.screen
    assert sum(line.startswith("Ctrl-C: work under way may finish") for line in lines) == 1
    assert sum(line.startswith("Stopped after ") for line in lines) == 1

    terminal = Terminal(160, 50)
    code, written = run_at(terminal, "demo", "--out", tmp_path / "run", NO_COLOR="1")
    assert code == 0
    assert find_display(terminal) == []
    assert terminal.cursor_shown
    lines = terminal.scrolled + terminal.screen
    assert lines[0].startswith("run r")
    assert " resumes " in lines[0]
    assert any(line.startswith("step ") for line in lines)
    assert any(line.startswith("completed: 1 step") for line in lines)
    assert "new best" in written
    assert not any(f"\x1b[{color}m" in written for color in range(30, 38))


def test_two_interrupts_end_a_run_that_hangs(tmp_path: Path) -> None:
    """The view shows the effect of the first one and stays; the second one removes it at once."""
    endpoint = Endpoint(lambda call_id, before: True)
    terminal = Terminal(80, 24)
    words = ("before the first step", "Ctrl-C: work under way may finish")
    interrupting = Interrupting(*words, ready=endpoint.held.is_set)
    with world(tmp_path, endpoint, grace=HANGS) as path:
        code, _ = run_at(terminal, "train", path, watch=interrupting, PYTHONIOENCODING="ascii")
    assert code == 130
    assert interrupting.waiting == []
    assert find_display(terminal) == []
    assert terminal.cursor_shown
    assert not any("Traceback" in line for line in terminal.screen)


def test_a_matrix_fits_its_terminal(tmp_path: Path) -> None:
    """Marks have colours and an ASCII form; no line is broken, and a wide terminal shows the questions too."""
    anyio.run(build_learning_trainer(tmp_path / "run").train)
    shown = {}
    for width in (80, 140):
        terminal = Terminal(width, 40)
        code, written = run_at(terminal, "show", tmp_path / "run", "--matrix")
        assert code == 0
        shown[width] = terminal.scrolled + terminal.screen
        assert max(map(len, shown[width])) < width
        assert "\x1b[3" in written
        assert any("\u2715 wrong" in line for line in shown[width])
    assert "input" in shown[140][0]
    terminal = Terminal(80, 40)
    code, _ = run_at(terminal, "show", tmp_path / "run", "--matrix", PYTHONIOENCODING="ascii")
    assert code == 0
    assert any("x wrong" in line for line in terminal.screen)
    code, _ = run_at(terminal, "show", tmp_path / "run", "--items", NO_COLOR="1")
    assert code == 0
