"""Facts about runs in words. The sentences are in tests/snapshots; `make snapshots` writes them anew."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from reflact.gate.intervals import CLAIM_LEVEL, compute_chance, improvement_interval, mean_interval
from reflact.records import (
    Claim,
    FaultCount,
    Improvement,
    LossCount,
    RunSummary,
    SkillScore,
    SkillVersion,
    Spend,
    Usage,
)
from reflact.reporting.facts import ResultFact
from reflact.reporting.terminal import build_score_table, build_table, print_summary
from reflact.types import Skill, Split

Snapshot = Callable[[str, str], None]
V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.2)
V2 = SkillVersion(number=2, skill_hash="b" * 64, origin="step 2", score=0.58, n=28, trials=2)
FOLDER = Path("runs/my run")


def build_score(
    name: str, scores: list[float], split: Split = Split.test, *, text: str = "Rules."
) -> SkillScore:
    low, high = mean_interval(scores)
    return SkillScore(
        name=name,
        skill_hash=Skill(text=text).hash,
        split=split,
        n=len(scores),
        successes=sum(scores),
        hard=sum(scores) / len(scores),
        low=low,
        high=high,
    )


def build_summary(
    before: list[float], after: list[float], *, split: Split = Split.test, **values: Any
) -> RunSummary:
    mean, low, high = improvement_interval(before, after)
    gain = Improvement(name="best", split=split, n=len(before), mean=mean, low=low, high=high)
    scores = (build_score("baseline", before, split), build_score("best", after, split))
    chance = compute_chance(before, after)
    claim = Claim(improvement=gain, confirmed=low > 0 and chance <= CLAIM_LEVEL, chance=chance)
    plain = {"run_id": "r1", "status": "completed", "best": V2, "scores": scores, "claim": claim}
    return RunSummary.model_validate({**plain, **values})


def solve(solved: int, n: int) -> list[float]:
    return [1.0] * solved + [0.0] * (n - solved)


def end(**values: Any) -> RunSummary:
    return RunSummary.model_validate({"run_id": "r1", "status": "completed", **values})


LOSSES = (
    LossCount(kind="invalid reply", count=3, total=24),
    LossCount(kind="dropped analyst", count=2, total=6),
    LossCount(kind="replaced decision", count=1),
    LossCount(kind="lost rollout", count=1_200),
)
BETTER = build_summary(solve(10, 80), solve(45, 80), seconds=35.0)
RESULTS = {
    "better": BETTER,
    "mostly wrong": build_summary(solve(0, 80), solve(30, 80)),
    "not confirmed": build_summary(solve(10, 20), solve(12, 20)),
    "too few differ": build_summary(solve(0, 4), solve(4, 4)),
    "not better": build_summary(solve(10, 20), solve(10, 20), steps=20),
    "worse": build_summary(solve(30, 40), solve(10, 40)),
    "means": build_summary([0.25, 0.5, 0.75] * 10, [0.5, 0.75, 0.8] * 10),
    "validation": build_summary(solve(5, 20), solve(15, 20), split=Split.val),
    "initial is best": end(best=V0, scores=(build_score("baseline", solve(10, 80), text=""),)),
    "not measured": end(best=V2, missing=("best on test: the endpoint is down",)),
    "budget": end(status="budget", reason="budget.max_calls is 9", steps=3, best=V2),
    "failed": end(status="failed", reason="no key.", best=None),
    "no reports": end(status="failed", reason="no analyst gave a valid reply in 3 steps", best=V0),
    "cancelled": end(status="cancelled", steps=1, best=V0),
    "lost on the way": build_summary(solve(10, 80), solve(45, 80), losses=LOSSES),
    "one lost": end(status="budget", steps=1, best=V0, losses=(LossCount(kind="lost rollout", count=1),)),
}


def test_results_are_sentences(snapshot: Snapshot) -> None:
    """Solved items are counted, other scores are means; a stopped run says how to go on, and others what may help."""
    blocks = []
    for name, summary in RESULTS.items():
        blocks.append("\n".join((f"# {name}", *ResultFact(summary=summary).list_lines(FOLDER), "")))
    snapshot("results", "\n".join(blocks))


def print_to_text(printer: Callable[[Console], None], width: int = 100) -> str:
    console = Console(file=(text := io.StringIO()), width=width)
    printer(console)
    return text.getvalue()


def test_a_summary_is_printed(tmp_path: Path, snapshot: Snapshot) -> None:
    """A complete run has its result, scores, notes, spend and files; a stopped one says only what is new."""
    for name in ("best_skill.md", "run.db"):
        (tmp_path / name).write_text("", encoding="utf-8")
    spend = (
        Spend(role="target", purpose="rollout", usage=Usage(calls=2, input_tokens=45_210, usd=0.5)),
        Spend(role="optimizer", purpose="merge", usage=Usage(calls=1, uncounted=1), unsettled=1),
    )
    faults = (FaultCount(kind="429", count=1_200),)
    values = {"spend": spend, "faults": faults, "warnings": ("[b]x[/b]\x1b[2J",), "steps": 2, "accepts": 1}
    stopped = end(status="cancelled", reason="stopped by Ctrl-C", steps=1, best=V2, final=V0, accepts=1)
    summaries = (BETTER.model_copy(update=values), end(best=V0, final=V0), stopped)
    shown = [
        print_to_text(lambda console, each=each: print_summary(console, each, tmp_path)) for each in summaries
    ]
    snapshot("summaries", "\n".join(shown).replace(str(tmp_path), "FOLDER"))


def test_tables_keep_names_and_numbers_whole() -> None:
    scores = [build_score(name, solve(45, 80)) for name in ("baseline", "best")]
    for width in (48, 60, 100):
        shown = print_to_text(
            lambda console, width=width: console.print(build_score_table(scores, width)), width
        )
        assert max(map(len, shown.splitlines())) <= width
        assert shown.count("0.562") == 2
        assert "…" not in shown
    table = build_table([{"run": "a", "mean [/b]<b>": "1"}], 80)
    assert "mean [/b]<b>" in print_to_text(lambda console: console.print(table))
