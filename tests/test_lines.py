"""Event lines, the formats of figures, and the escaping of text at a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import pure_server
from pure_world import PureNetwork, settings, write_world
from reflact import Trainer, events
from reflact.cli.app import app
from reflact.records import SkillVersion
from reflact.reporting.lines import (
    EventLines,
    escape_controls,
    escape_line,
    format_change,
    format_clock,
    format_count,
    format_duration,
    wrap_line,
)
from reflact.types import Edit, EditResult, Verdict

RUN = "r1"
V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
V1 = SkillVersion(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)
APPLIED = EditResult(edit=Edit(op="append", content="x"), status="applied")
REJECTED = EditResult(edit=Edit(op="delete", target="y"), status="rejected", reason="not there")
STEP: tuple[events.Event, ...] = (
    events.StepStarted(run_id=RUN, step=1, epoch=1, item_ids=("a", "b")),
    events.StageProgressed(run_id=RUN, step=1, stage="rollout", done=1, total=2),
    events.StageProgressed(run_id=RUN, step=1, stage="rollout", done=2, total=2),
    events.RolloutsFinished(run_id=RUN, step=1, n=2, failures=1, unmeasured=0),
    events.EditsApplied(run_id=RUN, step=1, pool_size=2, budget=4, results=(APPLIED, REJECTED)),
    events.CandidateJudged(
        run_id=RUN,
        step=1,
        verdict=Verdict(action="accept_new_best", reason="more", candidate_score=0.5, current_score=0.25),
    ),
    events.StepCommitted(run_id=RUN, step=1, epoch=1, action="accept_new_best", current=V1, best=V1),
)


def test_a_step_is_one_line() -> None:
    """A committed step is told with its decision, its scores, its failures and its edits."""
    event_lines = EventLines()
    (line,) = [line for event in STEP if (line := event_lines.format_event(event)) is not None]
    for words in ("step 1", "accept_new_best", "0.250 -> 0.500", "solved 1/2", "edits 1/2", "v1"):
        assert words in line


def test_a_step_without_a_candidate_tells_nothing_of_the_step_before() -> None:
    """What was heard of one step is forgotten when the next one starts."""
    event_lines = EventLines()
    for event in STEP:
        event_lines.format_event(event)
    event_lines.format_event(events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",)))
    skipped = events.StepCommitted(run_id=RUN, step=2, epoch=1, action="no_patches", current=V1, best=V1)
    line = event_lines.format_event(skipped)
    assert line is not None
    assert "no edits" in line
    assert "0.250" not in line
    assert "solved" not in line


def format_all(*happened: events.Event) -> list[str]:
    """Return the lines of events."""
    event_lines = EventLines()
    return [line for event in happened if (line := event_lines.format_event(event)) is not None]


def test_repeated_pauses_have_one_line_in_each_step() -> None:
    """An endpoint has one line for each status in a step, and a new one in the next step."""
    first = events.RateLimited(
        run_id=RUN, step=1, endpoint="api.example.com", status=429, seconds=9.0, rate=2.5
    )
    other = first.model_copy(update={"status": 503, "rate": None})
    begun = events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",))
    line = "limit     api.example.com answered 429; waiting 9 s, then 2.5 calls/s"
    assert format_all(first, first, other, begun, first) == [
        line,
        "limit     api.example.com answered 503; waiting 9 s",
        line,
    ]


def test_an_endpoint_that_cannot_be_reached_has_one_line_in_each_step() -> None:
    """The line leaves out the wait, because other calls wait for another time."""
    gone = events.RateLimited(run_id=RUN, step=1, endpoint="api.example.com", status=None, seconds=0.2)
    later = gone.model_copy(update={"seconds": 4.0})
    assert format_all(gone, later) == ["retry     api.example.com cannot be reached; trying again"]


def test_long_lines_wrap_at_words() -> None:
    """The rest of a line that does not fit is indented."""
    line = "warning   these are more words than the line has room for"
    wrapped = wrap_line(line, Console(width=40)).plain
    first, rest = wrapped.split("\n")
    assert first.rstrip() == "warning   these are more words than the"
    assert rest == " " * 10 + "line has room for"


@given(st.none() | st.floats(0, 1), st.none() | st.floats(0, 1))
def test_a_change_never_invents_a_score(before: float | None, after: float | None) -> None:
    """A score that is None is a dash or is left out, never a number."""
    text = format_change(before, after)
    assert text.count("0.") + text.count("1.") == (before is not None) + (after is not None)


STEERING = "\x1b[2J\x1b]0;title\x07\r\u202e\u200b\U000e0041"


@given(st.text())
def test_nothing_that_steers_is_left(text: str) -> None:
    """Whatever the text, no control and no hidden format stays; ordinary text stays as it is."""
    shown = escape_controls(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert not any(c in shown for c in "\x7f\x9b\u202e\u2066\u200b\ufeff")
    assert escape_controls(shown) == shown


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines\tand a tab", "Grüße, 世界", "\U0001f468\u200d\U0001f469", "می\u200cخواهم"]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    """Scripts and signs that need joiners keep them."""
    assert escape_controls(text) == text


@given(st.text(st.characters() | st.sampled_from("\n\r\t\v\x85\u2028\ud800\udfff")))
def test_one_line_stays_one(text: str) -> None:
    """A text in a line of many breaks no line, and can be written as UTF-8 whatever is in it."""
    shown = escape_line(text)
    assert len(shown.splitlines()) <= 1
    assert escape_controls(text).encode().decode() == escape_controls(text)
    assert "\t" not in shown


def test_steering_characters_are_written_out() -> None:
    """They are shown as escapes, so that whoever reviews a document sees them."""
    assert escape_controls(STEERING) == r"\x1b[2J\x1b]0;title\x07\r\u202e\u200b\U000e0041"


def answer(body: dict[str, Any], call_id: str) -> str:
    """Answer as the pure server does, with steering characters in what is proposed."""
    said = pure_server.answer(body, call_id)
    return said.replace(".", f".{json.dumps(STEERING)[1:-1]}") if said.startswith('{"patterns"') else said


def test_commands_print_nothing_that_steers(tmp_path: Path) -> None:
    """A run whose proposals hold terminal codes is shown without them."""
    world = write_world(tmp_path / "world", train=4, val=3, test=2)
    plain = settings(world, tmp_path / "run", train={"num_epochs": 1, "batch_size": 4})
    assert anyio.run(Trainer(plain, transport=PureNetwork(answer)).train).status == "completed"
    for command in (["show", tmp_path / "run"], ["show", tmp_path / "run", 1]):
        result = CliRunner().invoke(app, [str(part) for part in command])
        assert result.exit_code == 0, result.output
        assert not {"\x1b", "\x07", "\r", "\u202e", "\u200b"} & set(result.output)
    assert r"\x1b[2J" in result.output


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00"), (-3, "0:00")]
)
def test_a_clock_shows_whole_seconds(seconds: float, shown: str) -> None:
    """Minutes and seconds, hours where there are any, never less than nothing."""
    assert format_clock(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.4, "0.4 s"),
        (42, "42 s"),
        (240, "4 min"),
        (9000, "2.5 h"),
        (3 * 86400, "3.0 days"),
    ],
)
def test_a_duration_has_one_unit(seconds: float, shown: str) -> None:
    """A duration is read at a glance, so it has one unit."""
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0"), (9999, "9,999"), (45_210, "45.2k"), (999_700, "1M"), (1_234_000, "1.23M")]
)
def test_a_quantity_has_few_digits(number: int, shown: str) -> None:
    """Small counts are exact, large ones have three digits and a unit."""
    assert format_count(number) == shown


@given(st.integers(0, 10**12))
def test_a_quantity_is_short(number: int) -> None:
    """No count takes more than six characters."""
    assert len(format_count(number)) <= 6
