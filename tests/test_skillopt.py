"""Configurations of SkillOpt are converted with the same meaning, by ``scripts/convert_skillopt.py``."""

from __future__ import annotations

import sys
from operator import attrgetter
from pathlib import Path

import convert_skillopt
import pytest
from convert_skillopt import convert, read_keys
from hypothesis import given
from hypothesis import strategies as st

from reflact.config.loading import load_config, load_keys
from reflact.errors import ConfigError

OLDER = (Path(__file__).parent / "skillopt_keys.txt").read_text(encoding="utf-8").split()
NAMES = [key.partition(".")[2] for key in OLDER]
SECRET = "sk-" + "live0123456789abcdefghij"
POLICY = "slow_update.pair_policy"


@pytest.mark.parametrize(
    ("name", "spellings", "new", "value"),
    [
        ("num_epochs", [2], "train.num_epochs", 2),
        ("learning_rate", [8], "select.max_edits", 8),
        ("lr_control_mode", ["fixed", "manual", " FIXED "], "select.lr_control", "fixed"),
        ("lr_control_mode", ["none", "off", "no_lr"], "select.lr_control", "none"),
        ("longitudinal_pair_policy", ["default", "all"], POLICY, "mixed"),
        ("longitudinal_pair_policy", ["Delta", "10_01"], POLICY, "changed"),
        ("skill_update_mode", ["edits", "PATCH"], "update.mode", "patch"),
        ("skill_update_mode", ["suggestions", "Rewrite"], "update.mode", "rewrite"),
        ("skill_update_mode", ["minibatch_full_rewrite"], "update.mode", "full_rewrite"),
        ("use_gate", [False], "gate.enabled", False),
        ("optimizer", ["large"], "models.optimizer.model", "large"),
        ("target_backend", ["codex_exec", "Codex"], "target.options", {"profile": "codex"}),
        ("azure_openai_api_version", ["v"], "models.target.api", "azure"),
    ],
)
def test_a_key_keeps_its_meaning(name: str, spellings: list[object], new: str, value: object) -> None:
    """Each key has the same value under its name here, in every spelling that SkillOpt accepts."""
    for spelling in spellings:
        settings, notes = convert({name: spelling})
        assert (attrgetter(new)(load_keys(settings)), notes) == (value, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rat", 3),
        ("lr_control_mode", "sometimes"),
        ("batch_size", "forty"),
        ("num_epochs", [1]),
        ("qwen_chat_api_key", "anything"),
        ("target", SECRET),
        ("azure_openai_endpoint", "https://user:pass@a.example"),
        ("a\x1b[2J", 1),
    ],
)
def test_a_key_that_is_not_converted_is_listed(name: str, value: object) -> None:
    """An unknown key, a value that does not fit and what looks like a secret are named, and no value is shown."""
    settings, [note] = convert({name: value})
    assert settings == {"preset": "skillopt"}
    assert ascii(name) in note
    assert str(value) not in note.removeprefix(ascii(name)) or value == 1


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.just([1]))


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=9))
def test_any_configuration_is_converted(keys: dict[str, object]) -> None:
    load_keys(convert(keys)[0])


def test_a_file_is_converted_over_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("train: {num_epochs: 1, batch_size: 5}\nseed: 7\n")
    Path("old.yaml").write_text("_base_: base.yaml\nnum_epochs: 3\ntrain: {num_epochs: 2}\n")
    monkeypatch.setattr(sys, "argv", ["convert_skillopt.py", "old.yaml", "run.yaml"])
    convert_skillopt.main()
    config = load_config(Path("run.yaml"))
    assert (config.train.num_epochs, config.train.batch_size, config.seed) == (2, 5, 7)
    with pytest.raises(FileExistsError):
        convert_skillopt.main()
    Path("base.yaml").write_text("_base_: old.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        read_keys(Path("old.yaml"))
