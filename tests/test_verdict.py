"""The verdict on a run in words: one test for each wording."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from reflact.gate.intervals import CLAIM_LEVEL, compute_chance, improvement_interval, mean_interval
from reflact.records import (
    ActionCount,
    Claim,
    Improvement,
    RunSummary,
    SkillScore,
    SkillVersion,
    Spend,
    Usage,
)
from reflact.reporting.summary import print_summary
from reflact.reporting.verdict import (
    advise_on_training,
    describe_cost,
    describe_next,
    describe_outcome,
    describe_result,
    describe_verdict,
)
from reflact.testing import ToyEnvironment
from reflact.types import Skill, Split
from toy_runs import build_trainer

V0 = SkillVersion(number=0, skill_hash="a" * 64, origin="initial", score=0.2)
V2 = SkillVersion(number=2, skill_hash="b" * 64, origin="step 2", score=0.58, n=28, trials=2)


def build_score(
    name: str, scores: list[float], split: Split, trials: int = 1, *, text: str = "Rules."
) -> SkillScore:
    """Return the score of a document that has these means of items."""
    low, high = mean_interval(scores)
    return SkillScore(
        name=name,
        skill_hash=Skill(text=text).hash,
        split=split,
        n=len(scores) * trials,
        trials=trials,
        successes=sum(scores) * trials,
        hard=sum(scores) / len(scores),
        low=low,
        high=high,
    )


def build_summary(
    before: list[float], after: list[float], *, split: Split = Split.test, trials: int = 1, **values: Any
) -> RunSummary:
    """Return the summary of a completed run whose initial and best document have these scores of items."""
    mean, low, high = improvement_interval(before, after)
    gain = Improvement(name="best", split=split, n=len(before), mean=mean, low=low, high=high)
    scores = (
        build_score("baseline", before, split, trials),
        build_score("best", after, split, trials),
    )
    chance = compute_chance(before, after)
    claim = Claim(improvement=gain, confirmed=low > 0 and chance <= CLAIM_LEVEL, chance=chance)
    plain = {"run_id": "r1", "status": "completed", "best": V2, "scores": scores, "claim": claim}
    return RunSummary.model_validate({**plain, **values})


def solve(solved: int, n: int) -> list[float]:
    """Return the scores of items of which the first ones are solved."""
    return [1.0] * solved + [0.0] * (n - solved)


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (
            build_summary(solve(10, 80), solve(45, 80)),
            "Better: 45 of 80 test items solved instead of 10 (+44 points; 95% interval +32 to +54).",
        ),
        (
            build_summary(solve(10, 20), solve(12, 20)),
            "Perhaps better, not confirmed: 12 of 20 test items solved instead of 10 "
            "(+10 points; 95% interval -6 to +24).",
        ),
        (
            build_summary(solve(10, 20), solve(10, 20)),
            "Not better: 10 of 20 test items solved instead of 10 (0 points; 95% interval -9 to +9).",
        ),
        (
            build_summary(solve(30, 40), solve(10, 40)),
            "Worse than the initial document: 10 of 40 test items solved instead of 30 "
            "(-50 points; 95% interval -63 to -32).",
        ),
        (
            build_summary([0.25, 0.5, 0.75] * 10, [0.5, 0.75, 0.8] * 10),
            "Better: mean score 0.68 on 30 test items instead of 0.50 (+18 points; 95% interval +15 to +22).",
        ),
        (
            build_summary(solve(5, 20), solve(15, 20), split=Split.val),
            "Better: 15 of 20 validation items solved instead of 5 (+50 points; 95% interval +23 to +68). "
            "There is no test split, so this holds for these items only; expect less on new ones.",
        ),
        (
            build_summary([0.25, 0.5] * 10, [0.75, 1.0] * 10, split=Split.val, trials=4),
            "Better: mean score 0.88 on 20 validation items, 4 trials each instead of 0.38 "
            "(+50 points; 95% interval +38 to +53). "
            "There is no test split, so this holds for these items only; expect less on new ones.",
        ),
        (
            build_summary([0.5, 0.5, 0.5] * 2, [0.502, 0.503, 0.504] * 2),
            "Better: mean score 0.50 on 6 test items instead of 0.50 "
            "(+0.3 points; 95% interval +0.2 to +0.4).",
        ),
        (
            build_summary(solve(0, 4), solve(4, 4)),
            "Perhaps better, not confirmed: 4 of 4 test items solved instead of 0 "
            "(+100 points; 95% interval +17 to +100). So few items differ that chance alone gives such a result in 6.2% "
            "of cases; a confirmed one may have 2.5% at most.",
        ),
    ],
)
def test_a_claim_is_a_sentence(summary: RunSummary, words: str) -> None:
    """Solved items are counted, other scores are means; a claim says if it is confirmed, and for which items."""
    assert describe_result(summary) == words


def test_unmeasured_items_have_a_count_of_their_own() -> None:
    """If the initial document was measured on fewer items, both counts name their items."""
    summary = build_summary(solve(10, 80), solve(45, 80))
    fewer = build_score("baseline", solve(10, 79), Split.test)
    summary = summary.model_copy(update={"scores": (fewer, summary.scores[1])})
    assert "45 of 80 test items solved instead of 10 of 79 (" in describe_result(summary)


def test_no_better_document_is_said() -> None:
    """If the initial document is the best one, the sentence says what best_skill.md is."""
    scores = (build_score("baseline", solve(10, 80), Split.test),)
    summary = RunSummary(run_id="r1", status="completed", best=V0, scores=scores)
    words = "No better document was found; best_skill.md is your initial one."
    assert describe_result(summary) == f"{words} Its result: 10 of 80 test items solved."
    assert describe_result(summary.model_copy(update={"scores": ()})) == words


def test_a_gain_that_was_not_measured_is_no_claim() -> None:
    """If the final measurement failed, the sentence names the document and the reason."""
    missing = ("best on test: the endpoint is down",)
    summary = RunSummary(run_id="r1", status="completed", best=V2, missing=missing)
    assert describe_result(summary) == (
        "The best document is v2 from step 2 (validation 0.580, 28 items measured twice). Its gain was not measured at the end: "
        "best on test: the endpoint is down."
    )


@pytest.mark.parametrize(
    ("values", "words", "advice"),
    [
        (
            {"status": "budget", "reason": "budget.max_calls is 9", "steps": 3, "best": V2},
            "Stopped by its budget after 3 steps: budget.max_calls is 9. So far the best document is v2 from step 2 "
            "(validation 0.580, 28 items measured twice); its test follows at the end.",
            "raise the limit, then run the same command or program again to resume",
        ),
        (
            {"status": "failed", "reason": "no key.", "best": None},
            "Failed after 0 steps: no key. Nothing was measured yet.",
            "mend the cause, then run the same command or program again to resume, with --fork (in Python: fork=True) if keys "
            "changed",
        ),
        (
            {"status": "cancelled", "steps": 1, "best": V0},
            "Stopped after 1 step. So far no better document was found.",
            "run the same command or program again to resume",
        ),
    ],
)
def test_an_unfinished_run_says_how_far_it_came(values: dict[str, Any], words: str, advice: str) -> None:
    """A run that stopped says why, what it has so far, and how to go on."""
    summary = RunSummary(run_id="r1", **values)
    assert describe_result(summary) == words
    assert describe_next(summary, Path("runs/x")) == advice
    assert describe_verdict(summary) == f"{words} Next: {advice}."


def test_a_complete_run_without_a_score_advises_to_measure_it() -> None:
    """If the endpoint was away at the end, the same command measures what is missing."""
    summary = RunSummary(run_id="r1", status="completed", best=V2, missing=("best on test: 5 items failed",))
    assert describe_next(summary, Path("runs/x")) == "run the same command again to measure what is missing"


@pytest.mark.parametrize(
    ("spend", "words"),
    [
        ((), "no calls were counted"),
        (
            (Usage(calls=800, input_tokens=100_000, output_tokens=17_000),),
            "price unknown, 800 calls, 117k tokens",
        ),
        ((Usage(calls=3, usd=0.06), Usage(calls=2, usd=0.001)), "$0.06, 5 calls"),
        ((Usage(calls=3, usd=0.0012),), "$0.0012, 3 calls"),
        (
            (Usage(calls=3, usd=0.06), Usage(calls=2)),
            "$0.06, 5 calls, and calls of role1 with an unknown price",
        ),
    ],
)
def test_an_unknown_price_is_said(spend: tuple[Usage, ...], words: str) -> None:
    """A price is a sum of known prices, and calls without one are named."""
    entries = tuple(Spend(role=f"role{n}", purpose="p", usage=usage) for n, usage in enumerate(spend))
    assert describe_cost(RunSummary(run_id="r1", status="completed", spend=entries)) == words


def test_unfinished_calls_have_a_worst_case() -> None:
    """Calls that were cut off are counted beside the known cost, at most."""
    entry = Spend(
        role="target", purpose="p", usage=Usage(calls=1, usd=0.5), unsettled=1, worst_case=Usage(usd=0.25)
    )
    summary = RunSummary(run_id="r1", status="completed", spend=(entry,))
    assert describe_cost(summary) == "$0.50, 1 call, at most $0.25 more for unfinished calls"


def test_the_verdict_comes_before_the_tables(tmp_path: Path) -> None:
    """The closing lines begin with result, cost and time, skill and next step; a folder with spaces is quoted."""
    folder = tmp_path / "my run"
    summary = build_summary(solve(10, 80), solve(45, 80), seconds=35.0)
    lines = describe_outcome(summary, folder)
    assert lines[1:] == (
        "Cost: no calls were counted; 35 s.",
        f"Skill: {folder / 'best_skill.md'}",
        f"Next: reflact show '{folder}' --items --changed",
    )
    text = io.StringIO()
    print_summary(Console(file=text, width=80), summary, folder)
    assert text.getvalue().splitlines()[:4] == list(lines)


@pytest.mark.parametrize(("final", "others"), [(V2, []), (V0, ["final: v0 from initial (validation 0.200)"])])
def test_a_stopped_run_says_its_result_once(tmp_path: Path, final: SkillVersion, others: list[str]) -> None:
    """After the closing lines there is only news: decisions, another last version, calls of each role, other files."""
    for name in ("best_skill.md", "run.db"):
        (tmp_path / name).write_text("", encoding="utf-8")
    spend = (Spend(role="target", purpose="rollout", usage=Usage(calls=2)),)
    values = {"steps": 1, "accepts": 1, "reason": "stopped by Ctrl-C", "best": V2, "final": final}
    summary = RunSummary(run_id="r1", status="cancelled", spend=spend, **values)
    text = io.StringIO()
    print_summary(Console(file=text, width=300), summary, tmp_path)
    closing, lines = describe_outcome(summary, tmp_path), text.getvalue().splitlines()
    assert lines[: len(closing)] == list(closing)
    assert lines[len(closing) :] == [
        "decisions: 1 accepted, 0 rejected, 0 without a change",
        *others,
        "target: 2 calls, 0 tokens in, 0 out",
        f"{tmp_path / 'run.db'}  everything",
    ]


@pytest.mark.parametrize(("best", "words"), [(V0, "the initial skill"), (V2, "the best skill")])
def test_the_list_of_files_says_which_skill_it_names(tmp_path: Path, best: SkillVersion, words: str) -> None:
    """If no better document was found, best_skill.md is not called the best skill."""
    (tmp_path / "best_skill.md").write_text("", encoding="utf-8")
    text = io.StringIO()
    print_summary(Console(file=text, width=300), build_summary(solve(1, 8), solve(1, 8), best=best), tmp_path)
    assert text.getvalue().splitlines()[-1] == f"{tmp_path / 'best_skill.md'}  {words}"


SETTINGS = {"models": {"optimizer": {"model": "tiny"}}, "environment": {"description": ""}}
MORE_STEPS = "take more steps than 6 (a larger train.num_epochs extends this run; a smaller train.batch_size needs another one)"


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"steps": 20}, "use more than 80 test items"),
        ({"steps": 6}, f"{MORE_STEPS}; or use more than 80 test items"),
        (
            {"steps": 6, "claim": None, "best": V0, "actions": (ActionCount(action="no_patches", count=2),)}
            | {"config": SETTINGS},
            f"{MORE_STEPS}; or let a larger model than tiny write the edits, since 2 of 6 steps had no edits "
            "(models.optimizer.model); or say what a good answer is (environment.description)",
        ),
        (
            {"steps": 20, "claim": None, "best": V0}
            | {"config": {"models": {"optimizer": {"model": "tiny-1.5b"}}}},
            "let a larger model than tiny-1.5b write the edits (models.optimizer.model); or write the rules "
            "that you know into the skill, with which a run begins (skill)",
        ),
        (
            {"steps": 20, "scores": (build_score("baseline", solve(0, 80), Split.test, text=""),)},
            "begin with instructions of your own, not with an empty document (skill); or use more than 80 test items",
        ),
        ({"steps": 6, "status": "cancelled"}, None),
        ({"steps": 6, "missing": ("best on test: 5 items failed",)}, None),
    ],
)
def test_a_run_without_a_confirmed_gain_says_what_may_help(
    values: dict[str, Any], advice: str | None
) -> None:
    """The closing lines name changes that fit the run: more steps, another optimizer, a description, or more items."""
    summary = build_summary(solve(10, 80), solve(12, 80), **values)
    expected = () if advice is None else (f"For a better result: {advice}.",)
    assert advise_on_training(summary) == expected
    assert describe_outcome(summary, Path("runs/x"))[4 if summary.best == V2 else 3 :] == expected


@pytest.mark.parametrize(("solved", "is_named"), [(30, True), (45, False)])
def test_a_better_skill_that_mostly_fails_names_the_wrong_answers(solved: int, is_named: bool) -> None:
    """If less than half of the test items are solved, the next step has the answers that are still wrong too."""
    step = describe_next(build_summary(solve(0, 80), solve(solved, 80)), Path("runs/x"))
    assert step.startswith("reflact show runs/x --items --changed")
    assert ("--wrong" in step) is is_named


def test_a_confirmed_gain_needs_no_advice() -> None:
    """A run that reached its aim is not told to change anything."""
    assert advise_on_training(build_summary(solve(10, 80), solve(45, 80), steps=2)) == ()


def test_the_verdict_is_stored(tmp_path: Path) -> None:
    """The summary of a run, and its file, have the sentence."""
    trainer = build_trainer(
        {"out_dir": tmp_path, "search": {"sources": ["edits"]}, "train": {"num_epochs": 1}},
        environment=ToyEnvironment(train=4, val=4, test=4),
    )
    summary = anyio.run(trainer.train)
    assert summary.verdict == describe_verdict(summary) == describe_result(summary) != ""
    stored = (tmp_path / "summary.json").read_text(encoding="utf-8")
    assert RunSummary.model_validate_json(stored).verdict == summary.verdict
