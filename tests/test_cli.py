"""The command line: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import anyio
import pytest

from reflact.events import EVENT_ADAPTER, RunFinished, RunStarted
from reflact.prompts import find_prompt_file
from reflact.records import RunSummary, SkillScore
from reflact.types import Split
from served import (
    MAIN,
    asked_of,
    assert_refused,
    configured,
    reflact,
    reflact_process,
    say_four,
    say_four_and_append,
    send,
    serving,
)
from toy_runs import build_learning_trainer


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of the demo: its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    result = reflact("demo", "--out", folder)
    assert result.exit_code == 0, result.output
    return folder, result.stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train {run} --set data.path=missing.jsonl", "missing.jsonl"),
        ("train {run} --set skill=missing.md", "missing.md"),
        (f"train {{run}} --set out_dir={{folder}}/{'n' * 300}", "run.db: File name too long"),
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
    (tmp_path / "broken.jsonl").write_text('{"id": "a"\n', encoding="utf-8")
    database = tmp_path / "broken" / "run.db"
    database.write_text("no database, but long enough to be read as a page" * 40)
    before = database.read_bytes()
    result = reflact(*(part.format(folder=tmp_path, run=run) for part in command.split()))
    assert_refused(result, words.format(folder=tmp_path))
    assert database.read_bytes() == before
    assert not (tmp_path / "run.db").exists()


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
    return re.findall(
        r"^\s*(?:baseline|placebo|empty|refusal|frequent|best|final|best, final)\s+(?:val|test)\s+\d+\s.*$",
        printed,
        re.MULTILINE,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes in folders")
def test_runs_lists_the_others_beside_damaged_ones(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert anyio.run(build_learning_trainer(whole).train).status == "completed"
    for name, content in (
        ("a", b"no database" * 1000),
        ("empty", b""),
        ("z", (whole / "run.db").read_bytes()[:20_000]),
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


def test_a_recorded_run_replays_without_its_server(tmp_path: Path) -> None:
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


def test_a_miss_names_what_changed_since_the_recording(tmp_path: Path) -> None:
    """A changed prompt, and a changed grader although the keys of its rollouts changed with it; no host is written."""
    cassette = tmp_path / "c.jsonl"
    once = ("--set", "train.num_epochs=1", "--set", "search.sources=[edits]")
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        assert reflact("train", path, "--record", cassette, *once).exit_code == 0
    assert url.removeprefix("http://").removesuffix("/v1") not in cassette.read_text(encoding="utf-8")
    (tmp_path / "own" / "analyst_failure").mkdir(parents=True)
    changed = find_prompt_file("analyst_failure").read_text(encoding="utf-8").replace("Work in", "Go in")
    (tmp_path / "own" / "analyst_failure" / "v2.md").write_text(changed, encoding="utf-8")
    for number, (change, words) in enumerate(
        (
            (f"prompts.folder={tmp_path / 'own'}", "prompts.analyst_failure was"),
            ("environment.grader=exact", "environment.grader was"),
        )
    ):
        out = f"out_dir={tmp_path / str(number)}"
        missed = reflact("train", path, "--replay", cassette, *once, "--set", change, "--set", out)
        assert missed.exit_code == 2, missed.output
        assert "since it was recorded, " in missed.stderr
        assert words in missed.stderr


def test_two_folders_of_one_store_are_two_runs(tmp_path: Path) -> None:
    """Both are listed, each with its own files; the second takes all answers from the store."""
    once = ("--set", "train.num_epochs=1", "--set", f"store={tmp_path / 'shared.db'}", "--show", "quiet")
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        for name in "ab":
            done = reflact("train", path, *once, "--set", f"out_dir={tmp_path / name}")
            assert done.exit_code == 0, done.output
            assert (tmp_path / name / "summary.json").exists()
    listed = [
        json.loads(line) for line in reflact("runs", tmp_path / "shared.db", "--json").stdout.splitlines()
    ]
    assert len({row["run_id"] for row in listed}) == 2
    first, second = (
        RunSummary.model_validate_json((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        for name in "ab"
    )
    assert first.scores == second.scores
    assert sum(entry.usage.calls for entry in second.spend) == 0


@pytest.mark.parametrize(
    ("command", "near"),
    [
        ("train {folder}/rum.yaml", "run.yaml"),
        ("train {run} --set data.path=item.jsonl", "items.jsonl"),
        ("train {run} --set skill=skil.md", "skill.md"),
        ("train {run} --replay {folder}/cassete.jsonl", "cassette.jsonl"),
        ("train {run} --set prompts.folder=prompt", "prompts"),
        ("eval {run} --skill {folder}/skil.md", "skill.md"),
        ("show {folder}/out_run", "out-run"),
        ("runs {folder}/out_run/below", "out-run"),
        ("memory list {folder}/memry.db", "memory.db"),
        ("calibrate {folder}/rum.yaml", "run.yaml"),
        ("init {folder}/item.jsonl --model m --out {folder}/new.yaml", "items.jsonl"),
    ],
)
def test_a_near_name_is_suggested_for_a_missing_file_or_folder(
    tmp_path: Path, command: str, near: str
) -> None:
    run = configured(tmp_path)
    for name in ("skill.md", "cassette.jsonl", "memory.db"):
        (tmp_path / name).touch()
    for name in ("out-run", "prompts"):
        (tmp_path / name).mkdir()
    result = reflact(*(part.format(folder=tmp_path, run=run) for part in command.split()))
    assert_refused(result, f"did you mean {tmp_path / near}?")


def refuse_key(handler: BaseHTTPRequestHandler) -> None:
    asked_of(handler)
    error = {"message": "Incorrect API key provided", "type": "invalid_request_error"}
    send(handler, {"error": error}, 401)


@pytest.mark.parametrize("command", ["check", "train", "eval", "gate"])
def test_a_wrong_key_is_code_2_and_the_words_of_its_endpoint(tmp_path: Path, command: str) -> None:
    """No call was paid; the endpoint's JSON is not repeated."""
    skill = tmp_path / "s.md"
    skill.write_text("Add.\n", encoding="utf-8")
    options = {"eval": ("--skill", skill), "gate": ("--skill", skill, "--against", skill)}
    with serving(refuse_key) as url:
        # One at a time: a call that is cut off in flight may have been charged, and the code is 1.
        one = ("--set", "models.target.concurrency=1")
        result = reflact(command, configured(tmp_path, url), *one, *options.get(command, ()))
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].endswith("Incorrect API key provided")
    assert "{" not in result.output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pipes differ")
def test_a_reader_that_goes_ends_a_command_quietly(tmp_path: Path) -> None:
    """A training goes on to its end; commands that print end with code 0; nothing is written to standard error."""
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        once = ("--set", "train.num_epochs=1")
        commands: list[tuple[object, ...]] = [
            ("train", path, *once),
            ("train", path, *once, "--show", "json"),
            ("show", tmp_path / "run", "--json"),
            ("show", tmp_path / "run"),
            ("runs", tmp_path),
            ("check", path, "--dry-run"),
            ("prompts", "merge"),
        ]
        for command in commands:
            with reflact_process(*command) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                process.stdout.close()
                said = process.stderr.read()
            assert (process.returncode, said) == (0, ""), command
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_failure_is_printed_once_if_both_streams_are_read_together(tmp_path: Path) -> None:
    with serving(refuse_key) as url:
        command = [sys.executable, "-c", MAIN, "train", str(configured(tmp_path, url))]
        # One at a time: a call that is cut off in flight may have been charged, and the code is 1.
        command += ["--set", "models.target.concurrency=1"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stdout.count("Incorrect API key provided") == 1
    assert done.stdout.splitlines()[-1] == "error: the run ended as failed; the cause is above"


def test_a_dry_run_foresees_that_its_folder_has_another_run(tmp_path: Path) -> None:
    """After a change that makes another run, the plan warns with the words of the refusal; with --fork it does not."""
    changed = ("--set", "models.target.max_tokens=24")
    with serving(say_four_and_append) as url:
        path = configured(tmp_path, url)
        assert reflact("train", path, "--set", "train.num_epochs=1").exit_code == 0
        refused = reflact("train", path, *changed)
    reason = " ".join(refused.stderr.split()).removeprefix("error: ")
    assert "models.target.max_tokens was" in reason
    warned = " ".join(reflact("check", path, *changed, "--dry-run").stdout.split())
    assert warned.endswith(f"warning: without a change, reflact train will refuse to start: {reason}")
    assert "warning" not in reflact("check", path, *changed, "--set", "fork=true", "--dry-run").stdout
    words = ("--set", "environment.description=Add numbers.", "--set", "fork=true")
    last = reflact("check", path, *words, "--dry-run").stdout.splitlines()[-1]
    assert last == f"next: reflact check {path} --set 'environment.description=Add numbers.' --set fork=true"
    found = json.loads(reflact("check", path, "--dry-run", "--json").stdout)
    assert found["estimate"]["rows"]
    assert found["trial"] is None


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
