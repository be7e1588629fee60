"""The command line: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner, Result

from reflact import __version__
from reflact.cli.app import app
from reflact.events import EVENT_ADAPTER, RunFinished, RunStarted
from reflact.records import RunSummary
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.trainer import Trainer
from served import configured, say_four, serving


def reflact(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="reflact")


def assert_refused(result: Result, *words: str) -> None:
    """Check that a command ended with code 2 and one sentence that holds the words."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.output


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
        "train": {"num_epochs": 2, "batch_size": 4},
        "reflect": {"minibatch_size": 2},
    }
    optimizer = ScriptedLLM(toy_optimizer())
    trainer = Trainer(settings, environment=ToyEnvironment(), target=ToyTarget(), optimizer=optimizer)
    assert anyio.run(trainer.train).status == "completed"
    return folder


# ------------------------------------------------------------------------------------------ bad input


def test_a_missing_configuration_is_one_sentence(tmp_path: Path) -> None:
    """A path that leads nowhere is named."""
    assert_refused(reflact("train", tmp_path / "none.yaml"), "none.yaml", "No such file")


def test_a_malformed_configuration_is_one_sentence(tmp_path: Path) -> None:
    """Broken YAML is named with its place."""
    path = tmp_path / "run.yaml"
    path.write_text("train: [1,\n", encoding="utf-8")
    assert_refused(reflact("train", path), "run.yaml is malformed")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.bach_size=3", "did you mean batch_size?"),
        ("train.batch_size=0", "greater than or equal to 1"),
        ("nonsense", "--set takes section.key=value"),
        ("data.path=missing.jsonl", "missing.jsonl"),
        ("data.path=null", "data.path"),
        ("data.train_size=7", "7"),
        ("skill=missing.md", "missing.md"),
        ("prompts.folder=missing", "prompts.folder"),
        ("prompts.versions.nobody=1", "nobody"),
        ("models.target.model=''", "models.target.model is required"),
        ("models.target.api_key_env=REFLACT_TEST_NO_SUCH_KEY", "REFLACT_TEST_NO_SUCH_KEY"),
        ("models.target.base_url=localhost:8080", "base_url"),
        ("replay.cassette=missing.jsonl", "missing.jsonl"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, assignment: str, words: str) -> None:
    """Whatever is wrong with a setting, the command ends before any call with code 2 and says what."""
    assert_refused(reflact("train", configured(tmp_path), "--set", assignment), words)


def test_a_damaged_data_file_is_one_sentence(tmp_path: Path) -> None:
    """A line that is no item is named with its file."""
    path = configured(tmp_path)
    (tmp_path / "items.jsonl").write_text('{"id": "a"\n', encoding="utf-8")
    assert_refused(reflact("train", path), "items.jsonl")


def test_a_port_where_nobody_listens_is_one_sentence(tmp_path: Path) -> None:
    """An endpoint that cannot be reached ends the run with code 2 and its address."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        assert_refused(reflact("train", configured(tmp_path, url)), url)


def test_a_damaged_cassette_is_one_sentence(tmp_path: Path) -> None:
    """A recording that is none is named."""
    (tmp_path / "c.jsonl").write_text("not a recording\n", encoding="utf-8")
    assert_refused(reflact("replay", configured(tmp_path), "--cassette", tmp_path / "c.jsonl"), "c.jsonl")


def test_a_missing_cassette_is_one_sentence(tmp_path: Path) -> None:
    """A replay without a recording never asks the network instead."""
    path = configured(tmp_path)
    assert_refused(reflact("replay", path, "--cassette", tmp_path / "none.jsonl"), "none.jsonl")


def test_a_database_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    """A file in the database's place is named and left alone."""
    (tmp_path / "run.db").write_text("no database, but long enough to be read as a page" * 40)
    before = (tmp_path / "run.db").read_bytes()
    assert_refused(reflact("show", tmp_path), "run.db")
    assert (tmp_path / "run.db").read_bytes() == before


def test_a_missing_skill_document_is_one_sentence(tmp_path: Path) -> None:
    """`eval` names the document that it cannot read."""
    path = configured(tmp_path)
    assert_refused(reflact("eval", path, "--skill", tmp_path / "none.md"), "none.md", "No such file")


@pytest.mark.parametrize("command", ["runs", "show"])
def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path, command: str) -> None:
    """Looking where no run is says so, and makes no database there."""
    assert_refused(reflact(command, tmp_path), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["trian", "x.yaml"],
        ["eval", "x.yaml", "--skill", "s", "--split", "train"],
        ["demo", "--key"],
    ],
)
def test_wrong_usage_has_code_2(arguments: list[str]) -> None:
    """What the parser cannot read is a usage error on standard error."""
    result = reflact(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr
    assert result.stdout == ""


# ------------------------------------------------------------------------------------------ whole runs


def test_the_demo_completes_and_leaves_its_files(demo: tuple[Path, str]) -> None:
    """The recorded run prints its steps and scores, and leaves what the documents promise."""
    folder, printed = demo
    summary = RunSummary.model_validate_json((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary.status == "completed"
    assert len(re.findall(r"^step \d+", printed, re.MULTILINE)) == summary.steps
    for name in ("baseline", "placebo", "best", "final"):
        assert re.search(rf"^\s*{name}\s+test\s+\d+", printed, re.MULTILINE), name
    assert summary.best is not None
    best = (folder / "best_skill.md").read_bytes()
    assert best == (folder / "skills" / f"v{summary.best.number:04d}.md").read_bytes()
    assert (folder / "run.db").is_file()


def test_a_completed_run_is_not_run_again(demo: tuple[Path, str]) -> None:
    """The same command on the same folder takes no step and shows the same scores."""
    folder, printed = demo
    before = RunSummary.model_validate_json((folder / "summary.json").read_text(encoding="utf-8"))
    again = reflact("demo", "--out", folder)
    assert again.exit_code == 0, again.output
    assert not re.search(r"^step \d+", again.stdout, re.MULTILINE)
    after = RunSummary.model_validate_json((folder / "summary.json").read_text(encoding="utf-8"))
    assert (after.scores, after.spend) == (before.scores, before.spend)
    assert table(again.stdout) == table(printed)


def table(printed: str) -> list[str]:
    """Return the lines of the table of scores."""
    return re.findall(r"^\s*(?:baseline|placebo|best|final)\s+(?:val|test)\s+\d+\s.*$", printed, re.MULTILINE)


def test_two_demos_in_two_folders_are_equal(demo: tuple[Path, str], tmp_path: Path) -> None:
    """Another folder gets byte-identical skills and the same scores."""
    folder, printed = demo
    result = reflact("demo", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert table(result.stdout) == table(printed)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.md"))
    assert names == sorted(path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*.md"))
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()


def test_runs_lists_what_lies_below_a_folder(toy: Path) -> None:
    """The folder that holds runs and the run's own folder both show it."""
    for place in (toy, toy.parent):
        result = reflact("runs", place)
        assert result.exit_code == 0, result.output
        assert re.search(r"r[0-9a-f]{12} +completed +4 +1\.000", result.stdout)


def test_show_tells_a_run_by_its_steps_and_scores(toy: Path) -> None:
    """Each step is a line with its whole decision, each score a line of the table."""
    result = reflact("show", toy)
    assert result.exit_code == 0, result.output
    assert re.search(r"^ *1 +1 +accept_new_best +0\.000 -> 0\.500 +0/4 +2/2 +v1", result.stdout, re.M)
    assert len(re.findall(r"^ *\d+ +\d+ +[a-z_]+ ", result.stdout, re.M)) == 4
    assert [line.split()[:2] for line in table(result.stdout)] == [
        [name, split] for split in ("val", "test") for name in ("baseline", "best", "final")
    ]


def test_show_tells_a_step_by_its_edits_and_its_diff(toy: Path) -> None:
    """A step is shown with the verdict's reason, the patterns, the edits, and what they changed."""
    result = reflact("show", toy, "1")
    assert result.exit_code == 0, result.output
    assert "verdict: The candidate's 0.5000" in result.stdout
    assert re.search(r"^ *pattern: square \(\d\): ", result.stdout, re.M)
    assert "edit applied: append '- square: " in result.stdout
    assert "\n+- square: " in result.stdout


def test_show_names_the_steps_and_runs_that_exist(toy: Path) -> None:
    """A step or run that the folder lacks is refused with what there is."""
    assert_refused(reflact("show", toy, "999"), "no step 999", "4 steps are committed")
    assert_refused(reflact("show", toy, "--run", "r0"), "no run r0", "it holds r")


def test_a_recorded_run_replays_without_its_server(tmp_path: Path) -> None:
    """`record` writes what `replay` needs to give the same run when endpoint and key are gone."""
    cassette, once = tmp_path / "c.jsonl", ("--set", "train.num_epochs=1")
    with serving(say_four) as url:
        path = configured(tmp_path, url)
        recorded = reflact("record", path, "--cassette", cassette, *once)
    assert recorded.exit_code == 0, recorded.output
    out = f"out_dir={tmp_path / 'again'}"
    keyless = ("--set", "models.target.api_key_env=REFLACT_TEST_NO_SUCH_KEY")
    replayed = reflact("replay", path, "--cassette", cassette, *once, *keyless, "--set", out)
    assert replayed.exit_code == 0, replayed.output
    assert table(replayed.stdout) == table(recorded.stdout) != []


def test_a_skill_is_measured_where_the_run_is(tmp_path: Path) -> None:
    """`eval` shows the score of a document on the split that was asked for."""
    skill = tmp_path / "s.md"
    skill.write_text("Answer 4.\n", encoding="utf-8")
    with serving(say_four) as url:
        result = reflact("eval", configured(tmp_path, url), "--skill", skill, "--split", "test")
    assert result.exit_code == 0, result.output
    assert "test split opened (opening 1 in this run)" in result.stdout
    assert re.search(r"^ *skill +test +3 ", result.stdout, re.M)


def test_json_is_one_event_a_line_and_nothing_else(tmp_path: Path) -> None:
    """Every line of `--json` is an event; the last one carries the summary."""
    with serving(say_four) as url:
        path = configured(tmp_path, url)
        result = reflact("train", path, "--json", "--set", "train.num_epochs=1")
    assert (result.exit_code, result.stderr) == (0, "")
    happenings = [EVENT_ADAPTER.validate_json(line) for line in result.stdout.splitlines()]
    assert isinstance(happenings[0], RunStarted)
    last = happenings[-1]
    assert isinstance(last, RunFinished)
    assert last.summary.status == "completed"


def test_the_command_prints_its_version() -> None:
    """``reflact --version`` prints the version of the package."""
    assert reflact("--version").stdout == f"reflact {__version__}\n"
