"""The command line: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from reflact import __version__
from reflact.cli import GARBAGE_THRESHOLD
from reflact.events import EVENT_ADAPTER, RunFinished, RunStarted
from reflact.records import RunSummary, SkillScore
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.trainer import Trainer
from reflact.types import Split
from served import assert_refused, configured, reflact, say_four, say_four_and_append, serving


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of the demo: its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    result = reflact("demo", "--out", folder)
    assert result.exit_code == 0, result.output
    return folder, result.stdout


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run in the toy world: four steps, of which the first three learn."""
    folder = tmp_path_factory.mktemp("toy") / "run"
    settings = {
        "out_dir": str(folder),
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 2, "batch_size": 4},
        "reflect": {"minibatch_size": 2},
    }
    optimizer = ScriptedLLM(toy_optimizer())
    trainer = Trainer(settings, environment=ToyEnvironment(), target=ToyTarget(), optimizer=optimizer)
    assert anyio.run(trainer.train).status == "completed"
    return folder


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train {folder}/none.yaml", "none.yaml: No such file"),
        ("train {folder}/broken.yaml", "broken.yaml is malformed"),
        ("train {run} --set train.bach_size=3", "did you mean batch_size?"),
        ("train {run} --set train.batch_size=0", "greater than or equal to 1"),
        ("train {run} --set nonsense", "--set takes section.key=value"),
        ("train {run} --set data.path=missing.jsonl", "missing.jsonl"),
        ("train {run} --set skill=missing.md", "missing.md"),
        (f"train {{run}} --set out_dir={{folder}}/{'n' * 300}", "run.db: File name too long"),
        ("train {run} --set prompts.folder=missing", "prompts.folder"),
        ("train {run} --set models.target.model=''", "models.target.model is required"),
        ("train {run} --set models.target.api_key_env=REFLACT_NO_KEY", "REFLACT_NO_KEY"),
        ("train {run} --replay {folder}/broken.jsonl", "broken.jsonl"),
        ("eval {run} --skill {folder}/none.md", "none.md: No such file"),
        ("show {folder}/broken", "run.db"),
        ("show {folder}", "there is no run at {folder}"),
        ("runs {folder}/none", "there is no run in {folder}/none"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, command: str, words: str) -> None:
    """Whatever is wrong, the command ends before any call with code 2, says what, and changes no file."""
    run = configured(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken.yaml").write_text("train: [1,\n", encoding="utf-8")
    (tmp_path / "broken.jsonl").write_text('{"id": "a"\n', encoding="utf-8")
    database = tmp_path / "broken" / "run.db"
    database.write_text("no database, but long enough to be read as a page" * 40)
    before = database.read_bytes()
    result = reflact(*(part.format(folder=tmp_path, run=run) for part in command.split()))
    assert_refused(result, words.format(folder=tmp_path))
    assert database.read_bytes() == before
    assert not (tmp_path / "run.db").exists()


@pytest.mark.parametrize(
    "command", ["train", "trian x.yaml", "eval x.yaml --skill s --split train", "demo --key"]
)
def test_wrong_usage_has_code_2(command: str) -> None:
    """If the parser cannot read a command, it prints a usage error on standard error."""
    result = reflact(*command.split())
    assert result.exit_code == 2
    assert "Usage" in result.stderr
    assert result.stdout == ""


def test_the_demo_replays_and_leaves_its_files(demo: tuple[Path, str]) -> None:
    """Both recorded runs print steps, scores and best skills; on sums only the best skill is confirmed better.

    The same command on the same folder takes no step and shows the same scores.
    """
    folder, printed = demo
    for run, part in zip(
        (folder, folder / "arithmetic"), printed.split("\nThe second task is sums:\n"), strict=True
    ):
        summary = RunSummary.model_validate_json((run / "summary.json").read_text(encoding="utf-8"))
        assert summary.status == "completed"
        assert len(re.findall(r"^step \d+", part, re.MULTILINE)) == summary.steps
        assert len(table(part)) >= 5
        best = (run / "best_skill.md").read_bytes()
        assert best == (run / "skills" / f"v{summary.best.number:04d}.md").read_bytes()
        assert part.endswith(f"{run / 'best_skill.md'}:\n\n{best.decode().strip()}\n")
        assert summary.verdict in " ".join(part.split())
    assert summary.claim.confirmed
    best_score = summary.score("best", Split.test)
    for name in ("baseline", "placebo", "null_empty", "null_refusal"):
        assert summary.score(name, Split.test).high < best_score.low, name
    again = reflact("demo", "--out", folder)
    assert again.exit_code == 0, again.output
    assert not re.search(r"^step \d+", again.stdout, re.MULTILINE)
    assert table(again.stdout) == table(printed)


def table(printed: str) -> list[str]:
    """Return the lines of the table of scores."""
    return re.findall(
        r"^\s*(?:baseline|placebo|empty|refusal|frequent|best|final|best, final)\s+(?:val|test)\s+\d+\s.*$",
        printed,
        re.MULTILINE,
    )


def test_runs_lists_what_lies_below_a_folder(toy: Path) -> None:
    """The folder that holds runs and the run's own folder both show it."""
    for place in (toy, toy.parent):
        result = reflact("runs", place)
        assert result.exit_code == 0, result.output
        assert re.search(r"r[0-9a-f]{12} +completed +4 +1\.000", result.stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes in folders")
def test_runs_lists_the_others_beside_damaged_ones(toy: Path, tmp_path: Path) -> None:
    """A database that cannot be read is one error each, and neither ends nor hangs the list of the others."""
    whole = tmp_path / "whole"
    shutil.copytree(toy, whole)
    for name, content in (
        ("a", b"no database" * 1000),
        ("empty", b""),
        ("z", (toy / "run.db").read_bytes()[:20_000]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").write_bytes(content)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.db")
    result = reflact("runs", tmp_path)
    assert result.exit_code == 1, result.output
    assert re.search(r"r[0-9a-f]{12} +completed +4 +1\.000", result.stdout)
    errors = result.stderr.splitlines()
    assert [error for error in errors if not error.startswith("error: database ")] == []
    assert [Path(error.split("run.db")[0].split()[-1]).name for error in errors] == [
        "a",
        "empty",
        "pipe",
        "z",
    ]
    assert "no regular file" in errors[2]
    assert (tmp_path / "empty" / "run.db").read_bytes() == b""


def test_show_prints_a_run_and_its_steps(toy: Path) -> None:
    """A run has a line for each step and score; a step has its verdict, patterns, edits and diff."""
    result = reflact("show", toy)
    assert result.exit_code == 0, result.output
    assert re.search(r"^ *1 +1 +new best +0\.000 -> 0\.500 +0/4 +2/2 +v1", result.stdout, re.M)
    assert len(re.findall(r"^ *\d+ +\d+ +[a-z]+ ", result.stdout, re.M)) == 4
    controls = ("placebo", "empty", "refusal", "frequent")
    assert [line.replace("best, final", "best").split()[:2] for line in table(result.stdout)] == [
        *([name, "val"] for name in ("baseline", "best")),
        *([name, "test"] for name in ("baseline", *controls, "best")),
    ]
    result = reflact("show", toy, "1")
    assert result.exit_code == 0, result.output
    assert "verdict: The candidate's 0.5 is above" in result.stdout
    assert re.search(r"^pattern in \d cases?: square: ", result.stdout, re.M)
    assert "edit 1 applied: append '- square: " in result.stdout
    assert "\n+- square: " in result.stdout
    assert re.search(r"^took: rollout and reflect \S+ s", result.stdout, re.M)
    listed = re.findall(
        r"^(baseline|\d+)(?: +\d+){4} +- +\S+ s$", reflact("show", toy, "--costs").stdout, re.M
    )
    assert listed == ["baseline", "1", "2", "3", "4"]
    assert_refused(reflact("show", toy, "999"), "no step 999", "4 steps are committed")
    assert_refused(reflact("show", toy / "none"), "no run none", "it holds r")


def test_a_recorded_run_replays_without_its_server(tmp_path: Path) -> None:
    """`--record` writes what `--replay` needs to give the same run when endpoint and key are gone."""
    cassette, once = tmp_path / "c.jsonl", ("--set", "train.num_epochs=1")
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        recorded = reflact("train", path, "--record", cassette, *once)
    assert recorded.exit_code == 0, recorded.output
    out = f"out_dir={tmp_path / 'again'}"
    keyless = ("--set", "models.target.api_key_env=REFLACT_TEST_NO_SUCH_KEY")
    replayed = reflact("train", path, "--replay", cassette, *once, *keyless, "--set", out)
    assert replayed.exit_code == 0, replayed.output
    assert table(replayed.stdout) == table(recorded.stdout) != []


def test_a_dry_run_foresees_that_its_folder_has_another_run(tmp_path: Path) -> None:
    """After a change that makes another run, the plan warns with the words of the refusal; with --fork it does not."""
    changed = ("--set", "models.target.max_tokens=24")
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        assert reflact("train", path, "--set", "train.num_epochs=1").exit_code == 0
        refused = reflact("train", path, *changed)
    reason = " ".join(refused.stderr.split()).removeprefix("error: ")
    assert "models.target.max_tokens was" in reason
    warned = " ".join(reflact("train", path, *changed, "--dry-run").stdout.split())
    assert warned.endswith(f"warning: without a change, reflact train will refuse to start: {reason}")
    assert "warning" not in reflact("train", path, *changed, "--fork", "--dry-run").stdout
    words = ("--set", "environment.description=Add numbers.", "--fork")
    last = reflact("train", path, *words, "--dry-run").stdout.splitlines()[-1]
    assert last == f"next: reflact train {path} --set 'environment.description=Add numbers.' --fork"
    estimate = json.loads(reflact("train", path, "--dry-run", "--show", "json").stdout)
    assert estimate["rows"]


def test_a_skill_is_measured_where_the_run_is(tmp_path: Path) -> None:
    """`eval` shows the score of a document on the split that was asked for.

    As JSON each line is an event but the last, which is the score; quietly there is only the table.
    """
    skill = tmp_path / "s.md"
    skill.write_text("Answer 4.\n", encoding="utf-8")
    with serving(say_four) as url:
        command = ("eval", configured(tmp_path, url), "--skill", skill, "--split", "test")
        lines = reflact(*command)
        *happened, last = reflact(*command, "--show", "json").stdout.splitlines()
        quiet = reflact(*command, "--show", "quiet").stdout
    assert lines.exit_code == 0, lines.output
    assert "the sealed test split is opened (1 opening in this run)" in lines.stdout
    assert re.search(r"^\S+/s\.md +test +3 ", lines.stdout, re.M)
    assert happened
    assert all(EVENT_ADAPTER.validate_json(line).run_id for line in happened)
    assert SkillScore.model_validate_json(last).n == 3
    assert re.match(r"\s*document +split", quiet)


def test_a_run_is_shown_as_asked(tmp_path: Path) -> None:
    """Without a terminal there are lines, with times on request; JSON is events alone; quietly there is the end."""
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)

        def train(name: str, *arguments: str) -> str:
            out = f"out_dir={tmp_path / name}"
            result = reflact("train", path, "--set", out, "--set", "train.num_epochs=1", *arguments)
            assert (result.exit_code, result.stderr) == (0, "")
            return result.stdout

        lines = train("a", "--times")
        happened = [EVENT_ADAPTER.validate_json(line) for line in train("b", "--show", "json").splitlines()]
        quiet = train("c", "--show", "quiet")
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 1 ", lines, re.MULTILINE)
    assert "\x1b" not in lines
    assert isinstance(happened[0], RunStarted)
    assert isinstance(happened[-1], RunFinished)
    assert happened[-1].summary.status == "completed"
    assert re.match(".*\nCost: .*\nNext: .*\nFor a better result: .*\ncompleted: ", quiet)


def test_commands_seldom_search_for_garbage() -> None:
    """The process of a command lets many objects be made between two searches for unreachable ones."""
    script = (
        "import atexit, gc, sys; from reflact.cli import main; atexit.register(lambda: print(gc.get_threshold()[0])); "
        "sys.argv = ['reflact', '--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"reflact {__version__}", f"{GARBAGE_THRESHOLD}"]
