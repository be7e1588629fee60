"""`reflact demo --calibrate`: a recorded round of calibration on real traces, replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reflact import Trace
from reflact.calibration.report import CalibrationReport
from reflact.cli.app import app
from reflact.memory.models import ContrastPair
from reflact.prompts import find_data_folder
from served import assert_refused, reflact

FOLDER = find_data_folder("calibration")
PAGE = Path(__file__).parents[1] / "docs" / "demo.md"
PARTS = {
    part: sorted((FOLDER / "traces" / part).glob("*.jsonl")) for part in ("learn", "held_out", "anchors")
}


def calibrate(memory: Path, *overrides: str) -> str:
    """Replay the round through `reflact calibrate` and return the report as JSON, or the error."""
    settings = [f"memory={json.dumps(str(memory))}", *overrides]
    arguments = ["calibrate", str(FOLDER / "calibrate.yaml"), "--json"]
    for setting in settings:
        arguments += ["--set", setting]
    return reflact(*arguments).output


def recorded() -> CalibrationReport:
    """Return the report that was recorded."""
    return CalibrationReport.model_validate_json((FOLDER / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(out: Path) -> str:
    """What the demo prints, with its folder called as it is by default."""
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["demo", "--calibrate", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return result.output.replace(str(out), "demo-run")


def test_the_docs_show_what_the_demo_prints(shown: str, out: Path) -> None:
    """All that the demo prints stands in the docs, in one block; the last line names its page."""
    lines = [line.rstrip() for line in shown.strip().splitlines()]
    assert "\n".join(["```", *lines, "```"]) in PAGE.read_text(encoding="utf-8")
    assert lines[-1] == "demo-run/calibration.html shows this as a page."
    assert (out / "calibration.html").is_file()


def test_the_report_is_the_recorded_one_and_no_endpoint_is_asked(tmp_path: Path) -> None:
    """With an address where nothing listens all but the address itself is as recorded."""
    found = calibrate(tmp_path / "memory.db", "models.critic.base_url=http://127.0.0.1:9/v1")
    assert "127.0.0.1:9/" in found
    moved = found.replace("127.0.0.1:9/", "127.0.0.1:8123/")
    assert CalibrationReport.model_validate_json(moved) == recorded()


def test_every_candidate_is_a_pair_or_a_drop_with_a_reason() -> None:
    """The recorded report adds up; a batch was tested on enough traces, or it is said why it was not."""
    report = recorded()
    kept, dropped = sum(k.n_pairs for k in report.pairs), sum(d.n_candidates for d in report.dropped)
    assert report.n_candidates == kept + dropped > 0
    assert bool(report.tests) != bool(report.not_tested_reason)
    assert all(test.n_traces >= 20 for test in report.tests)


def test_a_changed_prompt_is_a_miss_that_names_it(tmp_path: Path) -> None:
    """The cassette holds no answer to a critic that is asked in other words; the difference is shown."""
    prompts = tmp_path / "prompts"
    (prompts / "critic").mkdir(parents=True)
    text = (find_data_folder("prompts") / "critic" / "v1.md").read_text(encoding="utf-8")
    changed = text.replace("version: 1", "version: 99").replace(
        "You judge one step", "You rate\u202e one step"
    )
    (prompts / "critic" / "v99.md").write_text(changed, encoding="utf-8")
    folder = f"prompts.folder={json.dumps(str(prompts))}"
    said = calibrate(tmp_path / "memory.db", folder, "prompts.versions={critic: 99}")
    sentence, *difference = said.splitlines()[-6:]
    assert sentence.startswith("error: the cassette ")
    assert "holds no answer to this request (score, critic/score/" in sentence
    assert difference[:2] == ["--- recorded", "+++ asked"]
    assert difference[3].startswith('-   "content": "You judge one step ')
    assert difference[4].startswith(r'+   "content": "You rate\u202e one step ')


@pytest.mark.usefixtures("shown")
def test_a_memory_that_is_there_is_left_alone(out: Path) -> None:
    """The recording begins with an empty memory: a second run into the same folder says so."""
    held = (out / "memory.db").read_bytes()
    result = reflact("demo", "--calibrate", "--out", out)
    assert_refused(result, "choose another --out")
    assert (out / "memory.db").read_bytes() == held


def test_traces_are_whole_and_graded_by_the_game() -> None:
    """Each trace is finished, and a program's gold stands beside each evaluation."""
    traces = [Trace.load(path) for paths in PARTS.values() for path in paths]
    assert all(trace.is_finished and trace.events for trace in traces)
    labels = [event.label for trace in traces for event in trace.events]
    assert {label and label.source for label in labels} == {"program"}


def test_no_game_is_in_two_parts() -> None:
    """What is learned from, held out and anchored are different games."""
    games = {part: {path.stem.rsplit("-", 1)[0] for path in paths} for part, paths in PARTS.items()}
    assert len(games["held_out"] | games["learn"] | games["anchors"]) == sum(map(len, games.values()))


def test_the_score_is_in_no_state() -> None:
    """What the game says of its score is cleaned away, so that gold has to be inferred."""
    texts = [path.read_text(encoding="utf-8") for paths in PARTS.values() for path in paths]
    states = [
        json.dumps([e["transition"]]) for text in texts for e in map(json.loads, text.splitlines()[1:-1])
    ]
    assert states
    assert not any("score" in state for state in states)


def test_anchors_are_gold_pairs_of_their_own_traces() -> None:
    """Each anchor is labelled by a program and comes from an anchor's trace."""
    lines = (FOLDER / "anchors.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [ContrastPair.model_validate_json(line) for line in lines]
    assert pairs
    assert {pair.label_source for pair in pairs} == {"program"}
    assert {pair.provenance.trace_id for pair in pairs} <= {path.stem for path in PARTS["anchors"]}
