"""Targets and environments that a configuration names by an import path or an entry point."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bank_agent import ITEMS, RULE
from reflact import Trainer
from reflact.adapters import load_named_environment, load_named_target
from reflact.cli.app import app
from reflact.config.loading import load_config
from reflact.errors import ConfigError, UsageError
from reflact.records import SkillComparison
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, append_reply

SUPPORT = """
from bank_agent import BankModel, make_agent, make_deps
from reflact.testing import ToyEnvironment, ToyTarget

agent = make_agent(BankModel())
world = ToyEnvironment(train=4, val=2, test=2)
number = 7

def make_agent_again():
    return agent

def make_target(noise):
    return ToyTarget(noise=noise)

def leave():
    raise SystemExit(3)
"""

CONFIG = """
data: {path: data}
environment: {grader: json_fields}
target:
  kind: my_support:agent
  options: {deps: "bank_agent:make_deps"}
models:
  optimizer: {model: m, api_key_env: null}
search: {sources: [edits]}
train: {num_epochs: 1}
out_dir: out
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_support.py").write_text(SUPPORT, encoding="utf-8")
    (tmp_path / "my_broken.py").write_text("raise ValueError('no shop')", encoding="utf-8")
    (tmp_path / "my_script.py").write_text("raise SystemExit('usage: ...')", encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    for split, item in zip(("train", "val", "test"), ITEMS, strict=True):
        entry = item.model_dump(exclude_none=True) | {"reference": {"support_advice": item.reference}}
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "items.json").write_text(json.dumps([entry]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_support", raising=False)
    return tmp_path


def name(key: str, value: Any, **options: Any) -> Any:
    section, _, field = key.partition(".")
    return load_config({"out_dir": "out", section: {field: value, "options": options}})


async def test_an_agent_is_trained_from_a_file(folder: Path) -> None:
    sys.path.append(str(folder))
    optimizer = ScriptedLLM(lambda prompt, reply_type, call_id: append_reply(reply_type, RULE))
    summary = await Trainer(folder / "run.yaml", optimizer=optimizer).train()
    assert (summary.status, summary.best.score) == ("completed", 1.0)


def test_a_document_for_an_agent_is_compared_with_others(folder: Path) -> None:
    (folder / "rule.md").write_text(RULE, encoding="utf-8")
    (folder / "kind.md").write_text("Be kind.", encoding="utf-8")
    command = ["eval", "run.yaml", "--skill", "rule.md", "--show", "json"]
    for other in ("none", "placebo", "null", "kind.md"):
        command += ["--against", other]
    last = [CliRunner().invoke(app, command).output.splitlines()[-1] for _ in range(2)]
    compared = SkillComparison.model_validate_json(last[0])
    assert [score.hard for score in (compared.skill, *compared.others)] == [1, 0, 0, 0, 0, 0]
    assert [(gain.mean, gain.n) for gain in compared.improvements] == [(1, 1)] * 5
    assert last[1] == last[0]
    assert len(sys.modules["my_support"].agent.model.function.instructions) == 2 * 4


def test_objects_classes_and_functions_are_taken(folder: Path) -> None:
    sys.path.append(str(folder))
    assert isinstance(load_named_environment(name("environment.name", "my_support:world")), ToyEnvironment)
    made = load_named_target(name("target.kind", "my_support:make_target", noise=0.5))
    assert made.identity == ToyTarget(noise=0.5).identity
    agent = load_named_target(name("target.kind", "my_support:make_agent_again"))
    assert '"pydantic_ai"' in getattr(agent, "identity", "")
    assert load_named_target(name("target.kind", "chat")) is None


def test_entry_points_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.append(str(folder))
    entry = importlib.metadata.EntryPoint("shop", "my_support:world", "reflact.environments")

    def find(*, group: str, name: str | None = None) -> Any:
        return [entry] if group == entry.group and name in {None, entry.name} else []

    monkeypatch.setattr("reflact.adapters.entry_points", find)
    assert isinstance(load_named_environment(name("environment.name", "shop")), ToyEnvironment)
    with pytest.raises(ConfigError, match=r"no installed package offers 'shap'.*there are: shop"):
        load_named_environment(name("environment.name", "shap"))


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("missing_module:agent", {}, "target.kind: missing_module:agent cannot be imported: ModuleNotFound"),
        ("my_support:number", {}, "my_support:number cannot be used: `identity` of the target, of type int"),
        ("my_support:number", {"a": 1}, "target.options has no effect: my_support:number is an object"),
        ("my_support:make_target", {"b": 2}, "my_support:make_target failed with them: TypeError"),
        ("my_broken:agent", {}, "my_broken:agent cannot be imported: ValueError: no shop"),
        ("my_script:agent", {}, "my_script:agent cannot be imported: ExitRaised: the code raised SystemExit"),
        (
            "my_support:leave",
            {},
            "my_support:leave failed with them: ExitRaised: the code raised SystemExit(3)",
        ),
        ("my_support:make_target", {"api_key": "x"}, "api_key looks like the name of a secret"),
    ],
)
def test_a_wrong_name_is_one_sentence(folder: Path, path: str, options: dict[str, Any], words: str) -> None:
    sys.path.append(str(folder))
    with pytest.raises(UsageError) as caught:
        load_named_target(name("target.kind", path, **options))
    assert words in str(caught.value)
