"""The commands that look at runs: lists, steps, versions and differences, and which run a name means."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from reflact import compare_runs, read_run
from reflact.events import StepCommitted
from reflact.reporting.facts import build_compared_row
from reflact.reporting.history import StepDetails, list_runs
from reflact.reporting.html.run import read_report, render_run_page
from reflact.types import Skill, Split
from served import assert_refused, reflact
from test_hostile_words import build_hostile_trainer
from toy_runs import LINES, Actor, build_learning_trainer, build_trainer, hang_at_document
from toy_runs import settings as build_settings

SHORT = {"num_epochs": 1, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("look") / "run"
    anyio.run(build_learning_trainer(out).train)
    return out


def test_a_step_of_a_run_is_shown(folder: Path) -> None:
    shown = reflact("show", folder, 2).stdout
    assert "edit 1 applied: append " in shown
    assert re.search(r"^step size: 1 of \d+ edits?; the schedule allows 1$", shown, re.MULTILINE)
    details = StepDetails.model_validate_json(reflact("show", folder, 1, "--json").stdout)
    history = anyio.run(read_run, folder)
    assert details.record == history.steps[0]
    assert details.diff.startswith("--- before\n+++ after\n")
    last = StepDetails.model_validate_json(reflact("show", folder, len(history.steps), "--json").stdout)
    assert last.epoch_end == history.epochs[-1]


def test_the_difference_of_versions_is_printed(folder: Path) -> None:
    shown = reflact("show", folder, "--skill", "baseline..best").stdout.splitlines()
    assert shown[0] == "--- v0 (initial)"
    assert re.fullmatch(r"\+\+\+ v\d \(step \d\)", shown[1])
    added = {line[1:] for line in shown[2:] if line.startswith("+")}
    best = (folder / "best_skill.md").read_text(encoding="utf-8")
    assert added == {line for line in best.splitlines() if line or "" in added}
    assert added & set(LINES.values())
    between = json.loads(reflact("show", folder, "--skill", "1..0", "--json").stdout)
    assert (between["a"]["number"], between["b"]["number"]) == (1, 0)
    assert "\n-" in between["diff"]
    assert reflact("show", folder, "--skill", "1..1").stdout == "v1 and v1 have the same text\n"


def test_versions_are_printed_exactly_and_runs_as_json(folder: Path) -> None:
    assert reflact("show", folder, "--skill", "best").stdout_bytes == (folder / "best_skill.md").read_bytes()
    first = reflact("show", folder, "--skill", "baseline")
    assert (first.stdout_bytes, first.stderr) == (b"", "note: v0 is an empty document\n")
    assert_refused(reflact("show", folder, "--skill", "v99"), "has no version v99; it has v0 to v")
    assert_refused(reflact("show", folder, "1", "--costs"), "a step and --costs exclude each other")
    found = json.loads(reflact("show", folder, "--json").stdout)
    history = anyio.run(read_run, folder)
    assert history.summary is not None
    assert found["summary"] == json.loads(history.summary.model_dump_json())
    assert [len(found[name]) for name in ("steps", "versions")] == [len(history.steps), len(history.versions)]
    lines = reflact("show", folder, "--costs", "--json").stdout.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, *(record.step for record in history.steps)]


def test_runs_of_a_shared_store_are_found(tmp_path: Path) -> None:
    store = tmp_path / "all.db"
    trainers = [
        build_learning_trainer(tmp_path / name, seed=seed, store=store) for seed, name in enumerate("ab")
    ]
    for trainer in trainers:
        anyio.run(trainer.train)
    rows = [json.loads(line) for line in reflact("runs", tmp_path, "--json").stdout.splitlines()]
    assert [(row["folder"], row["run_id"]) for row in rows] == [
        (str(tmp_path / name), trainer.run_id) for name, trainer in zip("ab", trainers, strict=True)
    ]
    assert reflact("runs", store, "--json").stdout == reflact("runs", tmp_path, "--json").stdout
    for name, trainer in zip("ab", trainers, strict=True):
        assert f"run {trainer.run_id}, " in reflact("show", tmp_path / name).stdout
        assert reflact("show", tmp_path / name, 1).exit_code == 0


def test_a_run_that_failed_before_anything_was_paid_is_not_listed(folder: Path, tmp_path: Path) -> None:
    """A later start of the same run, which measures something and fails then, is listed."""

    def fail(skill: Skill, message: str, before: int) -> str:
        raise ValueError("no such server")

    def fail_later(skill: Skill, message: str, before: int) -> str | None:
        return fail(skill, message, before) if skill.text else None

    out = tmp_path / "run"
    controls = {"null_answers": False}
    summary = anyio.run(build_learning_trainer(out, target=Actor(fail), test=controls).train)
    assert summary.status == "failed"
    assert anyio.run(list_runs, out / "run.db") == ()
    assert_refused(reflact("runs", tmp_path), "there is no run in")
    again = build_learning_trainer(out, target=Actor(fail_later), test=controls)
    assert anyio.run(again.train).status == "failed"
    (listing,) = anyio.run(list_runs, out / "run.db")
    assert (listing.status, listing.steps, listing.val, listing.model) == ("failed", 0, 0.0, "toy")


def test_a_folder_with_several_runs_says_which_one_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "run"
    plain = {**build_settings(out), "fork": True}
    first, second = (build_trainer({**plain, "seed": seed}) for seed in range(2))
    for trainer in (first, second):
        anyio.run(trainer.train)
    note = f"{out} has 2 runs; this is the newest, {second.run_id} ({out / first.run_id} names another)"
    assert reflact("show", out, "--skill", "baseline..best").stderr == f"note: {note}\n"
    assert note in reflact("compare", out, out / first.run_id[:6]).stderr
    for run in (first, second):
        named = reflact("show", out / run.run_id[:6])
        assert (named.exit_code, named.stderr) == (0, "")
        assert f"run {run.run_id}, " in named.stdout
    assert_refused(reflact("show", out / "rx"), f"no run rx; it holds {first.run_id}, {second.run_id}")
    assert_refused(reflact("show", out / "r"), "several runs whose ids begin with r")
    whole = reflact("compare", out)
    assert (whole.exit_code, whole.stderr) == (0, "")
    assert " common items" in whole.stdout
    assert re.search(r"^seed +0 +1 *$", whole.stdout, re.M)
    assert_refused(reflact("compare", out / first.run_id), "needs at least two runs")


def test_commands_print_nothing_that_steers(tmp_path: Path) -> None:
    """A run whose data, answers and proposals hold terminal codes is shown without them."""
    anyio.run(build_hostile_trainer(tmp_path / "run", epochs=1).train)
    for command in (
        ["show", tmp_path / "run"],
        ["show", tmp_path / "run", "--skill", "baseline..best"],
        ["show", tmp_path / "run", 1],
    ):
        result = reflact(*command)
        assert result.exit_code == 0, result.output
        assert not {"\x1b", "\x07", "\r", "\u202e", "\u200b"} & set(result.output)
    assert r"\x1b[2J" in result.output


def test_runs_are_compared_on_common_items(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    anyio.run(build_learning_trainer(short, train=SHORT).train)
    found = anyio.run(compare_runs, [folder, short])
    assert [(each.key, each.values) for each in found.settings] == [("train.num_epochs", (2, 1))]
    long_run, short_run = found.runs
    assert (long_run.steps, short_run.steps) == (4, 2)
    for gain in found.gains:
        scores = [getattr(run, gain.split.value).hard for run in (long_run, short_run)]
        assert gain.mean == pytest.approx(scores[1] - scores[0])
        assert (gain.name, gain.n) == (str(short), 4)
        assert gain.low <= gain.mean <= gain.high
    assert [gain.split for gain in found.gains] == [Split.val, Split.test]
    texts = [(path / "best_skill.md").read_text(encoding="utf-8") for path in (folder, short)]
    removed = {line[1:] for line in found.diffs[0].splitlines() if line.startswith("-- ")}
    assert removed == {line for line in texts[0].splitlines() if line and line not in texts[1]}


async def test_an_open_run_is_shown_and_compared_by_what_it_has_measured(
    folder: Path, tmp_path: Path
) -> None:
    """A run that goes on after a stop is running, without the words of the stop; its score agrees with its gain."""
    stopped = build_learning_trainer(tmp_path)
    stopped.stop("enough for today")
    await stopped.train()
    before = await to_thread.run_sync(reflact, "show", tmp_path)
    assert "Stopped after 0 steps: enough for today" in before.stdout
    async with build_learning_trainer(tmp_path, target=Actor(hang_at_document(3))).stream() as stream:
        async for event in stream:
            if isinstance(event, StepCommitted):
                shown = await to_thread.run_sync(reflact, "show", tmp_path)
                listed = await to_thread.run_sync(reflact, "runs", tmp_path)
                page = render_run_page(await read_report(tmp_path))
                found = await compare_runs([folder, tmp_path])
                break
    assert "running: 1 committed step, not ended" in shown.stdout
    assert "Stopped" not in shown.stdout
    assert " running " in listed.stdout
    assert "The run is under way: 1 step so far." in page
    (ended, begun), (gain,) = found.runs, found.gains
    assert ended.val is not None
    assert begun.val is not None
    assert gain.mean == pytest.approx((begun.val.hard or 0) - (ended.val.hard or 0))
    assert (begun.val.n, begun.val.unmeasured, begun.test) == (4, 0, None)
    partial = begun.model_copy(update={"val": begun.val.model_copy(update={"unmeasured": 1})})
    assert [build_compared_row(run)["val"][-1:] for run in (ended, partial)] == ["0", "*"]


async def test_a_summary_is_short_in_print(tmp_path: Path) -> None:
    summary = await build_learning_trainer(tmp_path).train()
    assert "config" not in repr(summary)
    assert summary.config is not None
    history = await read_run(tmp_path, items=True)
    long = summary.model_copy(update={"verdict": "x" * 9_999, "warnings": ("y" * 9_999,)})
    compared = await compare_runs([tmp_path, tmp_path])
    for value in (summary, long, history, history.model_copy(update={"summary": long}), compared):
        assert max(len(repr(value)), len(str(value))) <= 24 * 100
        assert repr(value).startswith(f"{type(value).__name__}(")
