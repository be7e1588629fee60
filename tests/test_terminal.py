"""A run as a person sees it: lines, bars and tables."""

from __future__ import annotations

import io
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from reflact import events
from reflact.records import Version
from reflact.reporting.lines import EventLines, change
from reflact.reporting.summary import build_score_table, format_spend, print_summary
from reflact.results import FaultCount, RunSummary, Scored, Spend, Usage
from reflact.types import Edit, EditResult, Split, Verdict

RUN = "r1"
V0 = Version(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
V1 = Version(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)
APPLIED = EditResult(edit=Edit(op="append", content="x"), status="applied")
REJECTED = EditResult(edit=Edit(op="delete", target="y"), status="rejected", reason="not there")
STEP: tuple[events.Event, ...] = (
    events.StepStarted(run_id=RUN, step=1, epoch=1, item_ids=("a", "b")),
    events.Progress(run_id=RUN, step=1, stage="rollout", done=1, total=2),
    events.Progress(run_id=RUN, step=1, stage="rollout", done=2, total=2),
    events.RolloutsDone(run_id=RUN, step=1, n=2, failures=1, unmeasured=0),
    events.EditsApplied(run_id=RUN, step=1, pool_size=2, budget=4, results=(APPLIED, REJECTED)),
    events.Decided(
        run_id=RUN,
        step=1,
        verdict=Verdict(action="accept_new_best", reason="more", candidate_score=0.5, current_score=0.25),
    ),
    events.StepCommitted(run_id=RUN, step=1, epoch=1, action="accept_new_best", current=V1, best=V1),
)


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    """Return a console and what it writes to."""
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=100), text


def test_a_step_is_one_line() -> None:
    """A committed step is told with its decision, its scores, its failures and its edits."""
    story = EventLines()
    (line,) = [line for event in STEP if (line := story.tell(event)) is not None]
    for words in ("step 1", "accept_new_best", "0.250 -> 0.500", "solved 1/2", "edits 1/2", "v1"):
        assert words in line


def test_a_step_without_a_candidate_tells_nothing_of_the_step_before() -> None:
    """What was heard of one step is forgotten when the next one starts."""
    story = EventLines()
    for event in STEP:
        story.tell(event)
    story.tell(events.StepStarted(run_id=RUN, step=2, epoch=1, item_ids=("a",)))
    skipped = events.StepCommitted(run_id=RUN, step=2, epoch=1, action="no_patches", current=V1, best=V1)
    line = story.tell(skipped)
    assert line is not None
    assert "no edits" in line
    assert "0.250" not in line
    assert "solved" not in line


def test_scores_show_count_and_interval() -> None:
    """A score without measurements shows dashes; one of zero shows zero."""
    to, text = console()
    none = Scored(name="best", skill_hash="a" * 64, split=Split.test, n=0, unmeasured=3)
    zero = Scored(
        name="baseline", skill_hash="b" * 64, split=Split.test, n=9, hard=0.0, soft=0.0, low=0.0, high=0.3
    )
    to.print(build_score_table([none, zero]))
    rows = (line.split() for line in text.getvalue().splitlines())
    lines = [row for row in rows if row[:1] in (["best"], ["baseline"])]
    assert lines[0] == ["best", "test", "0", "(+3", "unmeasured)", "-", "-", "-", "-", "aaaaaaaa"]
    assert lines[1] == ["baseline", "test", "9", "0", "0.000", "0.000", "to", "0.300", "0.000", "bbbbbbbb"]


def test_spend_is_summed_by_role() -> None:
    """Purposes of one role are one line; an unknown price is left out, a known one is not."""
    target = Spend(role="target", purpose="rollout", usage=Usage(calls=2, input_tokens=5, output_tokens=1))
    again = target.model_copy(update={"purpose": "other"})
    paid = Spend(role="optimizer", purpose="merge", usage=Usage(calls=1, usd=0.5))
    assert format_spend([target, paid, again]) == (
        "optimizer: 1 calls, 0 tokens in, 0 out, $0.5000",
        "target: 4 calls, 10 tokens in, 2 out",
    )


def test_what_nobody_counted_is_told_at_its_worst_case() -> None:
    """Beside what was counted, and by the reasons that there are."""
    worst = Usage(calls=2, input_tokens=900, output_tokens=100, usd=0.25)
    lost = Spend(role="target", purpose="rollout", usage=Usage(calls=1), unsettled=2, worst=worst)
    silent = lost.model_copy(update={"usage": Usage(calls=1, uncounted=1), "unsettled": 0})
    both = "2 calls cut off in flight and 1 that the provider did not count"
    begin, risk = "tokens in, 0 out; at most", "tokens, $0.2500 more for"
    assert format_spend([lost]) == (f"target: 1 calls, 0 {begin} 1,000 {risk} 2 calls cut off in flight",)
    assert format_spend([lost, silent]) == (
        f"target: 2 calls, 0 {begin} 2,000 tokens, $0.5000 more for {both}",
    )


def test_the_summary_names_the_files_that_exist(tmp_path: Path) -> None:
    """Only what a run has written is pointed at."""
    (tmp_path / "best_skill.md").write_text("x")
    to, text = console()
    print_summary(to, RunSummary(run_id=RUN, status="completed", steps=1, best=V1, final=V0), tmp_path)
    assert "best: v1 from step 1, val 0.500" in text.getvalue()
    assert "best_skill.md" in text.getvalue()
    assert "run.db" not in text.getvalue()


def test_the_summary_counts_failed_attempts_by_kind(tmp_path: Path) -> None:
    """What went wrong on the way is one line; a run without a fault has no such line."""
    faults = (FaultCount(kind="429", count=12), FaultCount(kind="timeout", count=1))
    to, text = console()
    print_summary(to, RunSummary(run_id=RUN, status="completed", faults=faults), tmp_path)
    print_summary(to, RunSummary(run_id=RUN, status="completed"), tmp_path)
    assert text.getvalue().count("failed attempts of calls: 12 x 429, 1 x timeout") == 1
    assert text.getvalue().count("failed attempts") == 1


@given(st.none() | st.floats(0, 1), st.none() | st.floats(0, 1))
def test_a_change_never_invents_a_score(before: float | None, after: float | None) -> None:
    """A score that is None is a dash or is left out, never a number."""
    text = change(before, after)
    assert text.count("0.") + text.count("1.") == (before is not None) + (after is not None)
