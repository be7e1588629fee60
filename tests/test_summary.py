"""The summary of a run at a terminal."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from reflact.records import FaultCount, RunSummary, SkillScore, SkillVersion, Spend, Usage
from reflact.reporting.summary import build_score_table, format_spend, print_summary
from reflact.types import Split

RUN = "r1"
V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.25)
V1 = SkillVersion(number=1, skill_hash="b" * 64, origin="step 1", score=0.5)


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    """Return a console and what it writes to."""
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=100), text


def test_scores_show_count_and_interval() -> None:
    """A score without measurements shows dashes; one of zero shows zero."""
    to, text = console()
    none = SkillScore(name="best", skill_hash="a" * 64, split=Split.test, n=0, unmeasured=3)
    zero = SkillScore(
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
    lost = Spend(role="target", purpose="rollout", usage=Usage(calls=1), unsettled=2, worst_case=worst)
    silent = lost.model_copy(update={"usage": Usage(calls=1, uncounted=1), "unsettled": 0})
    both = "2 interrupted calls and 1 not counted by the provider"
    begin, risk = "tokens in, 0 out; at most", "tokens, $0.2500 more for"
    assert format_spend([lost]) == (f"target: 1 calls, 0 {begin} 1,000 {risk} 2 interrupted calls",)
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
