"""Output at a terminal: event lines, figures, tables, the summary, and escaped text."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import pure_server
from pure_world import PureNetwork, settings, write_world
from reflact import Trainer, events
from reflact.llm.pricing import CostEstimate, EstimateRow
from reflact.messages import CallId
from reflact.records import FaultCount, RunSummary, SkillScore, SkillVersion, Spend, Usage
from reflact.reporting.lines import (
    EventLines,
    escape_controls,
    escape_line,
    format_change,
    format_clock,
    format_count,
    format_duration,
    format_epoch,
    format_fallback,
    shorten_reason,
    wrap_line,
)
from reflact.reporting.summary import format_spend, print_summary
from reflact.reporting.tables import build_estimate_table, build_score_table
from reflact.types import AnalystReport, Edit, EditResult, Fallback, Split, Verdict
from served import reflact

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


def format_all(*happened: events.Event) -> list[str]:
    """Return the lines of events."""
    event_lines = EventLines()
    return [line for event in happened if (line := event_lines.format_event(event)) is not None]


@pytest.mark.parametrize(
    ("trials", "words"), [(1, ""), (2, ", rolled out 2 times, since answers may differ")]
)
def test_a_repeated_baseline_says_why(trials: int, words: str) -> None:
    """Its progress counts more rollouts than items, so the line tells of both."""
    measured = events.BaselineMeasured(run_id="r", score=0.25, n=40, trials=trials)
    assert EventLines().format_event(measured) == f"baseline  val 0.250 on 40 items{words}"


def test_a_step_is_one_line() -> None:
    """A committed step has its decision, scores, failures and edits, and nothing of the step before."""
    begun = events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",))
    skipped = events.StepCommitted(run_id=RUN, step=2, epoch=1, action="no_patches", current=V1, best=V1)
    first, second = format_all(*STEP, begun, skipped)
    for words in ("step 1", "new best", "0.250 -> 0.500", "solved 1/2", "edits 1/2", "v1"):
        assert words in first
    assert "no edits" in second
    assert "0.250" not in second
    assert "solved" not in second


@pytest.mark.parametrize(
    ("purpose", "part", "words"),
    [
        ("analyst_failure", "0", "analyst of minibatch 1 of the failures"),
        ("lapse_success", "2/1", "triage of minibatch 2 of the successes in batch 3"),
        ("draft_merge", "failure/2/0", "merge of failures, level 2, group 1"),
        ("merge_final", "final", "merge final"),
        ("write_document", "1", "rewrite 2"),
        ("score", "0123456789012345", "score"),
        ("step_size", "", "step size"),
    ],
)
def test_a_call_is_named_in_words(purpose: str, part: str, words: str) -> None:
    """A fallback names the call that failed with numbers from 1, and no id."""
    label = f"{purpose}/{part}" if part else purpose
    fallback = Fallback(label=label, reason="It failed.", replacement="nothing")
    (line,) = format_all(events.FallbackUsed(run_id=RUN, step=1, fallback=fallback))
    assert line == f"fallback  nothing (instead of: {words}): It failed."
    step = CallId(role="optimizer", purpose=purpose, part=part, step=3)
    assert step.title == f"{words} in step 3"


def test_the_line_of_a_fallback_begins_with_it_and_names_the_call_once() -> None:
    """A cut at the end of the line costs only a part of the reason; a stored step keeps all of it."""
    call = CallId(role="optimizer", purpose="merge", part="failure/1/0", step=2)
    words = "merge of failures, level 1, group 1"
    first = "models.optimizer gave no valid reply in 3 attempts"
    reason = f"{first} ({call.title}); the last reason: too many edits"
    fallback = Fallback(label="merge/failure/1/0", reason=reason, replacement="the first draft")
    (line,) = format_all(events.FallbackUsed(run_id=RUN, step=2, fallback=fallback))
    assert (
        line == f"fallback  the first draft (instead of: {words}): {first}; the last reason: too many edits"
    )
    assert format_fallback(fallback) == f"{words}: {reason}; used instead: the first draft"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ('refused: {"error": {"message": "too long", "code": 400}}', "refused: too long"),
        ('refused: {"error": "too long"}; try again', "refused: too long; try again"),
        ('refused: {"message": "too long"}', "refused: too long"),
        ('refused: {"code": 400}', 'refused: {"code": 400}'),
        ('cut: {"error": {"mess', 'cut: {"error": {"mess'),
        ("a " * 200, f"{'a ' * 77}a..."),
        ("a" * 200, f"{'a' * 157}..."),
    ],
)
def test_a_line_has_the_message_of_a_refusal_and_no_more_than_160_characters(reason: str, shown: str) -> None:
    """The JSON around the message of an endpoint is left out of a line; the stored step keeps the whole reason."""
    assert shorten_reason(reason) == shown
    fallback = Fallback(label="meta_skill", reason=reason, replacement="nothing")
    used = events.FallbackUsed(run_id=RUN, step=1, fallback=fallback)
    end: dict[str, Any] = {"slow_update": None, "meta_skill": None, "fallbacks": (fallback,)}
    closed = events.EpochCommitted(run_id=RUN, step=1, epoch=1, current=V0, best=V0, **end)
    for event in (used, closed):
        (line,) = format_all(event)
        assert f"nothing (instead of: meta skill): {shown}" in line
    assert f": {reason}; used instead: nothing" in format_epoch(closed)


def test_a_repeated_document_is_named() -> None:
    """The line of a step says if its document was used or rejected before, and the next step does not."""
    verdict = Verdict(action="no_change", reason="The same.", repeats="in step 1")
    done = events.StepCommitted(run_id=RUN, step=2, epoch=1, action="no_change", current=V1, best=V1)
    begun = events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",))
    judged = events.CandidateJudged(run_id=RUN, step=2, verdict=verdict)
    first, second = format_all(begun, judged, done, begun, done)
    assert first.endswith("v1; same as in step 1")
    assert second.endswith("v1")


def test_analysts_without_a_valid_reply_are_counted() -> None:
    """The line of a step says how many there were, and the next step does not."""
    done = events.StepCommitted(run_id=RUN, step=2, epoch=1, action="no_patches", current=V1, best=V1)
    begun = events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",))
    reports = [
        AnalystReport(source_type="failure", index=n, item_ids=("a",), no_reply_reason=reason)
        for n, reason in enumerate([None, "It failed."])
    ]
    told = [events.AnalystReported(run_id=RUN, step=2, report=report) for report in reports]
    first, second = format_all(begun, *told, done, begun, told[0], done)
    assert first.endswith("v1; no valid reply from 1 of 2 analysts")
    assert second.endswith("v1")


def test_repeated_pauses_have_one_line_in_each_step() -> None:
    """An endpoint has one line for each status in a step, and a new one in the next step.

    The line of an endpoint that cannot be reached leaves out the wait, because other calls wait for another time.
    """
    first = events.RateLimited(run_id=RUN, step=1, endpoint="api.test", status=429, seconds=9.0, rate=2.5)
    other = first.model_copy(update={"status": 503, "rate": None})
    gone = first.model_copy(update={"status": None, "rate": None})
    begun = events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",))
    line = "limit     api.test answered 429; waiting 9 s, then 2.5 calls/s"
    assert format_all(first, first, other, gone, gone.model_copy(update={"seconds": 4.0}), begun, first) == [
        line,
        "limit     api.test answered 503; waiting 9 s",
        "retry     api.test cannot be reached; trying again",
        line,
    ]


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
    ("text", "shown"),
    [
        (text, text)
        for text in (
            "plain",
            "two\nlines\tand a tab",
            "Grüße, 世界",
            "\U0001f468\u200d\U0001f469",
            "می\u200cخواهم",
        )
    ]
    + [(STEERING, r"\x1b[2J\x1b]0;title\x07\r\u202e\u200b\U000e0041")],
)
def test_only_steering_characters_are_escaped(text: str, shown: str) -> None:
    """Scripts and signs that need joiners keep them; a reviewer sees controls as escapes."""
    assert escape_controls(text) == shown


@given(st.text(st.characters() | st.sampled_from("\n\r\t\v\x85\u2028\ud800\udfff")))
def test_one_line_stays_one(text: str) -> None:
    """A text in a line of many breaks no line, and can be written as UTF-8 whatever is in it."""
    shown = escape_line(text)
    assert len(shown.splitlines()) <= 1
    assert escape_controls(text).encode().decode() == escape_controls(text)
    assert "\t" not in shown


def answer(body: dict[str, Any], call_id: str) -> str:
    """Answer as the pure server does, with steering characters in what is proposed."""
    said = pure_server.answer(body, call_id)
    return (
        said.replace(".", f".{json.dumps(STEERING)[1:-1]}")
        if said.startswith('{"reasoning": "As seen.", "patterns"')
        else said
    )


def test_commands_print_nothing_that_steers(tmp_path: Path) -> None:
    """A run whose proposals hold terminal codes is shown without them."""
    world = write_world(tmp_path / "world", train=4, val=3, test=2)
    off = {part: {"enabled": False} for part in ("slow_update", "meta_skill", "appendix", "test")}
    plain = settings(world, tmp_path / "run", train={"num_epochs": 1, "batch_size": 4}, **off)
    assert anyio.run(Trainer(plain, transport=PureNetwork(answer)).train).status == "completed"
    for command in (["show", tmp_path / "run"], ["diff", tmp_path / "run"], ["show", tmp_path / "run", 1]):
        result = reflact(*command)
        assert result.exit_code == 0, result.output
        assert not {"\x1b", "\x07", "\r", "\u202e", "\u200b"} & set(result.output)
    assert r"\x1b[2J" in result.output


@pytest.mark.parametrize(
    ("form", "number", "shown"),
    [
        *((format_clock, *pair) for pair in ((0, "0:00"), (59.9, "0:59"), (61, "1:01"), (-3, "0:00"))),
        (format_clock, 3600, "1:00:00"),
        *((format_duration, *pair) for pair in ((0.4, "0.4 s"), (42, "42 s"), (240, "4 min"))),
        *((format_duration, *pair) for pair in ((9000, "2.5 h"), (3 * 86400, "3.0 days"))),
        *((format_count, *pair) for pair in ((0, "0"), (9999, "9,999"), (45_210, "45.2k"))),
        *((format_count, *pair) for pair in ((999_700, "1M"), (1_234_000, "1.23M"))),
    ],
)
def test_figures_are_short(form: Callable[[float], str], number: float, shown: str) -> None:
    """A clock shows complete seconds, a duration has one unit, and a large count three digits and a unit."""
    assert form(number) == shown


@given(st.integers(0, 10**12))
def test_a_quantity_is_short(number: int) -> None:
    """No count takes more than six characters."""
    assert len(format_count(number)) <= 6


def test_scores_show_count_and_interval() -> None:
    """A score without measurements shows dashes; one of zero shows zero."""
    text = io.StringIO()
    console = Console(file=text, width=100)
    none = SkillScore(name="best", skill_hash="a" * 64, split=Split.test, n=0, unmeasured=3)
    zero = SkillScore(
        name="baseline", skill_hash="b" * 64, split=Split.test, n=9, hard=0.0, soft=0.0, low=0.0, high=0.3
    )
    console.print(build_score_table([none, zero], with_hash=True))
    rows = (line.split() for line in text.getvalue().splitlines())
    lines = [row for row in rows if row[:1] in (["best"], ["baseline"])]
    assert lines[0] == ["best", "test", "0", "3", "-", "-", "-", "aaaaaaaa"]
    assert lines[1] == [
        "baseline",
        "test",
        "9",
        "0",
        "0",
        "0.000",
        "0.000",
        "to",
        "0.300",
        "bbbbbbbb",
    ]


def test_spend_is_summed_by_role() -> None:
    """Purposes of one role are one line; an unknown price is left out, a known one is not."""
    target = Spend(role="target", purpose="rollout", usage=Usage(calls=2, input_tokens=5, output_tokens=1))
    again = target.model_copy(update={"purpose": "other"})
    paid = Spend(role="optimizer", purpose="merge", usage=Usage(calls=1, usd=0.5))
    assert format_spend([target, paid, again]) == (
        "optimizer: 1 call, 0 tokens in, 0 out, $0.5000",
        "target: 4 calls, 10 tokens in, 2 out",
    )


def test_what_nobody_counted_is_told_at_its_worst_case() -> None:
    """Beside what was counted, and by the reasons that there are."""
    worst = Usage(calls=2, input_tokens=900, output_tokens=100, usd=0.25)
    lost = Spend(role="target", purpose="rollout", usage=Usage(calls=1), unsettled=2, worst_case=worst)
    silent = lost.model_copy(update={"usage": Usage(calls=1, uncounted=1), "unsettled": 0})
    both = "2 interrupted calls and 1 not counted by the provider"
    begin, risk = "tokens in, 0 out; at most", "tokens, $0.2500 more for"
    assert format_spend([lost]) == (f"target: 1 call, 0 {begin} 1,000 {risk} 2 interrupted calls",)
    assert format_spend([lost, silent]) == (
        f"target: 2 calls, 0 {begin} 2,000 tokens, $0.5000 more for {both}",
    )


def test_the_summary_names_what_there_is(tmp_path: Path) -> None:
    """Only files that exist and kinds of failed attempts that occurred are named."""
    (tmp_path / "best_skill.md").write_text("x")
    faults = (FaultCount(kind="429", count=12), FaultCount(kind="timeout", count=1))
    ended = RunSummary(run_id=RUN, status="completed", steps=1, best=V1, final=V0, faults=faults)
    text = io.StringIO()
    print_summary(Console(file=text, width=100), ended, tmp_path)
    for words in (
        "best: v1 from step 1 (validation 0.500)",
        "best_skill.md",
        "attempts of calls: 12 x 429, 1 x timeout",
    ):
        assert words in text.getvalue()
    assert "run.db" not in text.getvalue()
    print_summary(Console(file=text, width=100), ended.model_copy(update={"faults": ()}), tmp_path)
    assert text.getvalue().count("failed attempts") == 1


@pytest.mark.parametrize(
    ("count", "shown"),
    [(9_999, "9,999"), (17_812, "17.8k"), (99_960, "100k"), (999_600, "1M"), (2_340_000_000, "2.34G")],
)
def test_an_estimate_fits_80_columns(count: int, shown: str) -> None:
    """A count of any size is complete in its column, also beside prices."""
    row = EstimateRow(
        role="optimizer",
        purpose="held-out steps, all",
        calls=count,
        input_tokens=count,
        output_tokens=0,
        usd=9876.543,
    )
    out = io.StringIO()
    Console(file=out, width=80).print(build_estimate_table(CostEstimate(rows=(row,), assumptions=())))
    assert "…" not in out.getvalue()
    assert out.getvalue().split().count(shown) == 4
