"""Configurations: strict keys, files, presets, overrides, identity."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from generate_docs import list_config_keys
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reflact.calibration.config import CalibrateConfig
from reflact.config.loading import config_identity, load_config, load_keys, nest_keys
from reflact.config.models import CONNECTION_KEYS
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train": {"bach_size": 3}}, "unknown key train.bach_size; did you mean batch_size?"),
        ({"batch_size": 4}, "unknown key batch_size; did you mean train.batch_size?"),
        ({"gate": {"metric": "hrad"}}, "gate.metric: expected 'hard', 'soft' or 'mixed'; did you mean hard?"),
        ({"gate": {"worth": float("nan")}}, "gate.worth: .*finite"),
        ({"train": [1, 2]}, "train: "),
        (
            {"models": {"target": {"base_url": "host:80"}}},
            r"^models.target.base_url: expected an address [^;]*$",
        ),
        ({"models": {"target": {"api_key_env": "sk-1"}}}, r"expected the name of [^;]*; a key itself never"),
        ({"select": {"max_edits": 2, "min_edits": 3}}, r"select: min_edits \(3\) must not exceed max_edits"),
        ({"gate": {"no_regression": False}}, r"no_regression: expected a number or null, not false "),
        ({"train": {"epochs": 1}, "select": {"budget": 2}}, r"train\.epochs.*select\.budget"),
        ({"out_dir": 5}, r"^out_dir: expected the path of a file or folder \(got 5\)$"),
        ({"out_dir": "a\0b"}, "out_dir: it has a NUL character; remove it"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_the_right_one(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(settings)


@pytest.mark.parametrize("kind", [TrainerConfig, CalibrateConfig])
@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_no_number(kind: type[TrainerConfig | CalibrateConfig], value: bool) -> None:
    numbers = [key for key, type_name, *_ in list_config_keys(kind) if re.match("integer|number", type_name)]
    assert len(numbers) > 20
    for key in numbers:
        with pytest.raises(ValidationError, match=rf"expected a number( or null)?, not {str(value).lower()}"):
            kind.model_validate(nest_keys({key: value}))


def test_yaml_and_toml_give_the_same_configuration(tmp_path: Path) -> None:
    yaml = written(tmp_path, "a.yaml", "seed: 7\nmodels:\n  target: {model: m}\ntrain:\n  num_epochs: 2\n")
    toml = written(tmp_path, "a.toml", 'seed = 7\n[models.target]\nmodel = "m"\n[train]\nnum_epochs = 2\n')
    assert load_config(yaml) == load_config(toml)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", "train: [1,", "a.yaml is malformed: .*line"),
        ("a.yaml", "", "a.yaml is empty"),
        ("a.json", "{}", "must end in .yaml, .yml or .toml; rename the file, or let `reflact init DATA`"),
        ("a.yaml", "budget: {max_usd: 5}\nseed: 1\nbudget: {}\n", "'budget' is here a second time.*line 3"),
        ("a.yaml", f"seed: {'[' * 20_000}{']' * 20_000}", "a.yaml is malformed: it is nested too deeply"),
        ("a.yaml", f"seed: {'9' * 5000}", "a.yaml is malformed: "),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(written(tmp_path, name, text))
    assert "\n" not in str(caught.value)


def test_a_key_may_replace_one_of_a_merged_mapping(tmp_path: Path) -> None:
    text = "models:\n  target: &same {model: a, max_tokens: 9}\n  optimizer: {<<: *same, model: b}\n"
    models = load_config(written(tmp_path, "a.yaml", text)).models
    assert (models.optimizer.model, models.optimizer.max_tokens) == ("b", 9)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(ConfigError, match="malformed: 'utf-8' codec"):
        load_config(tmp_path / "b.yaml")


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "train:\n  num_epochs: 9\n  batch_size: 3\n")
    config = load_config(
        path, overrides=["train.num_epochs=2", "gate.enabled=false", "models.target.model=m"]
    )
    assert (config.train.num_epochs, config.train.batch_size) == (2, 3)
    assert config.gate.enabled is False
    assert config.models.target.model == "m"


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("train.num_epochs", "--set takes section.key=value"),
        ("seed=[1", "--set seed: its value is not YAML"),
        (f"seed={'9' * 5000}", "--set seed: its value is not YAML"),
        ("environment.template={input} {country}", "--set 'environment.template=\"...\"'"),
        ("seed.deep=3", "seed: "),
    ],
)
def test_a_wrong_override_is_refused(assignment: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config({}, overrides=[assignment])


def test_the_optimizer_inherits_the_connection_alone() -> None:
    target = {
        "model": "m",
        "base_url": "http://host/v1",
        "api_key_env": None,
        "temperature": 1.0,
        "max_tokens": 5,
    }
    models = load_config({"models": {"target": target}}).models
    for name in CONNECTION_KEYS:
        assert getattr(models.optimizer, name) == getattr(models.target, name)
    assert (models.optimizer.temperature, models.optimizer.max_tokens) == (None, None)


def test_a_preset_is_a_start_that_settings_override() -> None:
    older = load_config({"preset": "skillopt"})
    assert (older.gate.policy, older.gate.metric) == ("strict", "hard")
    assert (older.slow_update.enabled, older.slow_update.gated) == (True, False)
    assert older.reflect.memory == "off"
    assert (older.select.scheduler, older.select.max_edits, older.select.floor) == ("cosine", 4, 2)
    assert load_config({"preset": "skillopt", "select": {"max_edits": 1}}).select.floor == 1
    assert load_config({"preset": "skillopt", "slow_update": {"gated": True}}).slow_update.gated


@pytest.mark.parametrize(
    ("key", "value", "is_same"),
    [
        ("out_dir", "elsewhere", True),
        ("train.num_epochs", 9, True),
        ("models.target.concurrency", 1, True),
        ("test.enabled", False, True),
        ("seed", 1, False),
        ("train.batch_size", 3, False),
        ("models.target.model", "other", False),
        ("models.optimizer.temperature", 0.1, False),
    ],
)
def test_changeable_keys_do_not_make_another_run(key: str, value: object, is_same: bool) -> None:
    assert (config_identity(load_keys({key: value})) == config_identity(load_config({}))) is is_same


@given(st.dictionaries(st.text(min_size=1, max_size=12), st.integers() | st.text() | st.none(), max_size=3))
def test_any_mapping_gives_a_configuration_or_a_config_error(settings: dict[str, object]) -> None:
    try:
        config = load_config(settings)
    except ConfigError:
        return
    assert isinstance(config, TrainerConfig)
