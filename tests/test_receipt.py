"""Receipts: anybody with the recording can check a run's claim, and what it is under another model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import pure_server
import pure_world
from reflact import read_run
from reflact.reporting.asking import AnswerFile
from reflact.reporting.history import read_matrix
from reflact.reporting.receipt import list_differences, read_receipt
from reflact.types import Split
from served import asked_of, assert_refused, reflact, send, serving


class Made(NamedTuple):
    """A recorded run with its receipt."""

    config: Path
    recording: Path
    receipt: Path

    def change(self, folder: Path, **fields: Any) -> Path:
        """Return a copy of the receipt with other fields."""
        changed = {**json.loads(self.receipt.read_text(encoding="utf-8")), **fields}
        path = folder / "receipt.json"
        path.write_text(json.dumps(changed), encoding="utf-8")
        return path


class Models:
    """Answers as the pure server does; the model ``other`` is wrong on some words, ``worse`` on all.

    Attributes:
        lost: The words that ``other`` gets wrong under every skill.
        url: The root of the API.
    """

    url = ""

    def __init__(self) -> None:
        self.lost = set[str]()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = asked_of(handler)
        sample = handler.headers["x-sample"]
        if sample.startswith("target/"):  # a rollout's key holds the port, which is another one each time
            sample = "target/step=0"
        said = pure_server.answer(body, sample)
        is_lost = body["messages"][-1]["content"] in self.lost
        if body["model"] == "worse" or (body["model"] == "other" and is_lost):
            said = "unknown"
        send(handler, pure_server.completion(body, said))


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    models = Models()
    with serving(models.answer) as models.url:
        yield models


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Made:
    folder = tmp_path_factory.mktemp("receipt")
    plain = pure_world.settings(
        pure_world.write_world(folder / "world", val=4, test=32),
        folder / "run",
        url=models.url.removesuffix("/v1"),
        train={"num_epochs": 1, "accumulation": 1},
    )
    (folder / "run.yaml").write_text(json.dumps(plain), encoding="utf-8")
    made = Made(folder / "run.yaml", folder / "recording.jsonl", folder / "receipt.json")
    result = reflact("train", made.config, "--record", made.recording, "--show", "lines")
    assert result.exit_code == 0, result.output
    run_id = anyio.run(read_run, folder / "run").run_id
    matrix = anyio.run(lambda: read_matrix(folder / "run", run_id, split=Split.test, ends_only=True))
    file = AnswerFile(folder / "run" / f"answers-{run_id}.jsonl")
    for row in matrix.rows:
        if row.is_different:
            file.add("Ada Lovelace", row.item_id, 1.0)
    result = reflact("export", folder / "run", "--receipt", made.receipt)
    assert result.exit_code == 0, result.output
    return made


def verify(made: Made, *options: object, receipt: Path | None = None) -> tuple[int, str]:
    result = reflact("verify", receipt or made.receipt, made.config, *options)
    return result.exit_code, " ".join(result.output.split())


def test_a_replay_holds_without_a_key_or_a_network(made: Made) -> None:
    code, output = verify(made, "--replay", made.recording)
    assert code == 0, output
    assert "The replay gives the same skill, answers, scores and claim." in output


def test_a_receipt_holds_no_text_of_the_run(made: Made) -> None:
    written = made.receipt.read_text(encoding="utf-8")
    for text in ("rule alpha", "alpha 200", "alpha:200", "127.0.0.1", "Lovelace", str(made.config.parent)):
        assert text not in written
    receipt = json.loads(written)
    assert receipt["corrected"]["proven"] == "better"
    assert receipt["claim"]["confirmed"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"skill": "0" * 64}, "the best skill is"),
        ({"model": "another"}, "the model is pure, and the receipt says another"),
        ({"initial_skill": "0" * 64}, "the initial skill is"),
        ({"run_id": "r0"}, "the run is"),
        ({"test_openings": 7}, "opened another number of times"),
        ({"claim": None}, "the claim differs"),
        ({"scores": ()}, "the scores differ"),
        ({"items": ()}, "the replay has 32 test items"),
    ],
)
def test_a_changed_receipt_does_not_hold(made: Made, fields: dict[str, Any], reason: str) -> None:
    receipt = read_receipt(made.receipt)
    assert list(list_differences(receipt, receipt)) == []
    changed = receipt.model_copy(update=fields)
    (difference,) = list_differences(changed, receipt)
    assert reason in difference


@pytest.mark.slow
def test_answers_that_were_changed_give_another_claim(made: Made, tmp_path: Path) -> None:
    changed = made.change(tmp_path, answers={}, test_openings=7)
    code, output = verify(made, "--replay", made.recording, receipt=changed)
    assert code == 1
    assert "the claim that persons' answers correct differs" in output
    assert "opened another number of times" in output


def test_a_changed_byte_of_items_skill_or_settings_is_named(made: Made) -> None:
    items = made.config.parent / "world" / "test" / "items.jsonl"
    skill = made.config.parent / "world" / "skill.md"
    changes = (
        (items, b"200", "the items (data)"),
        (skill, b"slip", "the initial skill"),
    )
    for path, old, part in changes:
        text = path.read_bytes()
        path.write_bytes(text.replace(old, old[:-1] + b"9", 1))
        code, output = verify(made, "--replay", made.recording)
        path.write_bytes(text)
        assert code == 1
        assert f"does not hold: {part} is not that of the receipt" in output
    code, output = verify(made, "--replay", made.recording, "--set", "select.max_edits=3")
    assert code == 1
    assert "select.max_edits is not that of the receipt" in output


@pytest.mark.slow
def test_a_changed_byte_of_the_recording_is_told(made: Made, tmp_path: Path) -> None:
    changed = tmp_path / "recording.jsonl"
    text = made.recording.read_text(encoding="utf-8")
    solved = next(item.item_id for item in read_receipt(made.receipt).items if item.after == 1)
    number = int(solved.partition("-")[2])
    rule = pure_server.RULES[number % 4]
    assert f"{rule}:{200 + number}" in text
    changed.write_text(text.replace(f"{rule}:{200 + number}", f"{rule}:9"), encoding="utf-8")
    code, output = verify(made, "--replay", changed)
    assert code == 1
    assert f"answers or scores differ for 1 item: {solved}" in output
    changed.write_text(text.replace(f"{rule} {200 + number}", f"{rule} 999"), encoding="utf-8")
    code, output = verify(made, "--replay", changed)
    assert code == 1
    assert "the recording is not that of the run" in output


def test_another_model_loses_three_items_and_the_claim_stands(made: Made, models: Models) -> None:
    solved = [item.item_id for item in read_receipt(made.receipt).items if item.after == 1]
    lost = solved[:3]
    for item_id in lost:
        number = int(item_id.partition("-")[2])
        models.lost.add(f"{pure_server.RULES[number % 4]} {200 + number}")
    result = reflact("verify", made.receipt, made.config, "--model", "other", "--json")
    assert result.exit_code == 0, result.output
    check = json.loads(result.stdout)
    assert check["verdict"] == "still true"
    assert check["worse"] == lost
    assert check["better"] == []


@pytest.mark.slow
def test_a_claim_that_is_no_longer_true_fails_a_build(made: Made) -> None:
    code, output = verify(made, "--model", "worse")
    assert code == 1
    assert "Under worse: no longer true." in output


def test_another_model_is_measured_on_the_same_items(made: Made) -> None:
    items = made.config.parent / "world" / "test" / "items.jsonl"
    text = items.read_text(encoding="utf-8")
    items.write_text("".join(text.splitlines(keepends=True)[:12]), encoding="utf-8")
    refused = reflact("verify", made.receipt, made.config, "--model", "other")
    items.write_text(text, encoding="utf-8")
    assert_refused(refused, "the items (data): not that of the receipt")


def test_what_is_wrong_is_refused(made: Made, tmp_path: Path) -> None:
    assert_refused(reflact("verify", made.receipt, made.config), "--replay", "--model")
    assert_refused(reflact("verify", made.config, made.config, "--model", "x"), "no receipt")
    other = tmp_path / "other.md"
    other.write_text("- another rule\n", encoding="utf-8")
    refused = reflact("verify", made.receipt, made.config, "--model", "other", "--skill", other)
    assert_refused(refused, "is not the skill of the receipt")
