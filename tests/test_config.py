"""Configurations: strict keys, files, presets, overrides, identity."""

from __future__ import annotations

import json
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

MODELS = {"target": {"model": "small"}}


def written(folder: Path, name: str, text: str) -> Path:
    """Write a file and return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train": {"bach_size": 3}}, "unknown key train.bach_size; did you mean batch_size?"),
        ({"gaet": {}}, "unknown key gaet; did you mean gate?"),
        ({"batch_size": 4}, "unknown key batch_size; did you mean train.batch_size?"),
        ({"models": {"target": {"modle": "x"}}}, r"models.target.modle; did you mean model\?$"),
        ({"models": {"target": {"price": {"input": 1, "ouput": 2}}}}, "price.ouput; did you mean output?"),
        ({"models": {"target": {"price": {"input": 1}}}}, "models.target.price.output is required"),
        ({"gate": {"metric": "hrad"}}, "gate.metric: expected 'hard', 'soft' or 'mixed'; did you mean hard?"),
        ({"gate": {"worth": float("nan")}}, "gate.worth: .*finite"),
        ({"preset": "fast"}, "preset: expected 'default' or 'skillopt'"),
        ({"train": {"batch_size": 0}}, "train.batch_size: .*greater than or equal to 1 .got 0"),
        ({"train": {"batch_size": "many"}}, "train.batch_size: .*integer.*'many'"),
        ({"train": [1, 2]}, "train: "),
        ({"data": {"ratio": "2:1"}}, "data.ratio: expected train:val:test"),
        ({"environment": {"template": "hello"}}, "template: expected a text with {input} in it"),
        (
            {"models": {"target": {"base_url": "host:80"}}},
            r"^models.target.base_url: expected an address [^;]*$",
        ),
        ({"models": {"target": {"base_url": "http://host:99999/v1"}}}, "base_url: an address may have only"),
        ({"models": {"target": {"base_url": "http://host:0/v1"}}}, "base_url: an address may have only"),
        ({"models": {"target": {"api_key_env": "sk-1"}}}, r"expected the name of [^;]*; a key itself never"),
        ({"select": {"max_edits": 2, "min_edits": 3}}, r"select: min_edits \(3\) must not exceed max_edits"),
        ({"train": {"batch_size": True}}, r"^train\.batch_size: expected a number, not true \(got True\)$"),
        ({"gate": {"no_regression": False}}, r"no_regression: expected a number or null, not false "),
        ({"prompts": {"versions": {"merge": True}}}, r"^prompts\.versions: expected a number, not true"),
        ({"train": {"epochs": 1}, "select": {"budget": 2}}, r"train\.epochs.*select\.budget"),
        ({"out_dir": 5}, r"^out_dir: expected the path of a file or folder \(got 5\)$"),
        ({"out_dir": "a\0b"}, "out_dir: it has a NUL character; remove it"),
        ({"environment": {"description": "a\0b"}}, "description: it has a NUL character; remove it"),
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


def test_a_wrong_value_is_cut_in_the_message(tmp_path: Path) -> None:
    lines = ["seed0: &v0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"seed{n}: &v{n} [{', '.join([f'*v{n - 1}'] * 10)}]" for n in range(1, 9)]
    path = written(tmp_path, "run.yaml", "\n".join([*lines, "seed: *v8"]))
    with pytest.raises(ConfigError, match=r"seed: Input should be a valid integer \(got \[") as refused:
        load_config(path)
    assert len(str(refused.value)) < 5_000


def test_yaml_and_toml_give_the_same_configuration(tmp_path: Path) -> None:
    yaml = written(tmp_path, "a.yaml", "seed: 7\nmodels:\n  target: {model: m}\ntrain:\n  num_epochs: 2\n")
    toml = written(tmp_path, "a.toml", 'seed = 7\n[models.target]\nmodel = "m"\n[train]\nnum_epochs = 2\n')
    assert load_config(yaml) == load_config(toml)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", "train: [1,", "a.yaml is malformed: .*line"),
        ("a.toml", "seed = = 1", "a.toml is malformed: .*line 1"),
        ("a.yaml", "- 1\n", "expected a mapping of sections at the top level, found list"),
        ("a.yaml", "", "a.yaml is empty"),
        ("a.json", "{}", "must end in .yaml, .yml or .toml; rename the file, or let `reflact init DATA`"),
        ("a.yaml", "budget: {max_usd: 5}\nseed: 1\nbudget: {}\n", "'budget' is here a second time.*line 3"),
        (
            "a.yaml",
            "train:\n  batch_size: 3\n  batch_size: 4\n",
            "'batch_size' is here a second time.*line 3",
        ),
        ("a.yaml", f"seed: {'[' * 20_000}{']' * 20_000}", "a.yaml is malformed: it is nested too deeply"),
        ("a.yaml", f"seed: {'9' * 5000}", "a.yaml is malformed: "),
        ("a.yaml", "seed: 2026-13-41", "a.yaml is malformed: "),
        ("a.toml", f"seed = {'9' * 5000}", "a.toml is malformed: "),
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


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "out_dir: ~/runs\nstore: ~/all.db\ndata: {path: ~/data}\n"
    config = load_config(written(tmp_path, "a.yaml", text), overrides=["skill=~nobody-here/skill.md"])
    assert (config.out_dir, config.store) == (tmp_path / "runs", tmp_path / "all.db")
    assert config.data.path == tmp_path / "data"
    assert config.skill == tmp_path / "~nobody-here/skill.md"


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


def test_overrides_apply_to_a_ready_configuration() -> None:
    config = load_config({"models": MODELS, "seed": 5})
    assert load_config(config) is config
    changed = load_config(config, overrides=["models.target.temperature=0.5"])
    assert changed.models.target.temperature == 0.5
    assert (changed.seed, changed.models.target.model) == (5, "small")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("train.num_epochs", "--set takes section.key=value"),
        ("=3", "--set takes section.key=value"),
        ("seed=[1", "--set seed: its value is not YAML"),
        (f"seed={'9' * 5000}", "--set seed: its value is not YAML"),
        (f"seed={'[' * 5000}{']' * 5000}", "--set seed: its value is not YAML"),
        ("seed=2026-13-41", "--set seed: its value is not YAML"),
        ("environment.template={input} {country}", "--set 'environment.template=\"...\"'"),
        ("environment.description=", "--set 'environment.description=\"\"'"),
        ("train.epochs=3", "unknown key train.epochs"),
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


@pytest.mark.parametrize(("base_url", "taken"), [(None, True), ("http://elsewhere/v1", False)])
def test_the_optimizer_takes_the_limits_of_the_targets_endpoint(base_url: str | None, taken: bool) -> None:
    limits = {
        "concurrency": 40,
        "requests_per_minute": 500,
        "tokens_per_minute": 9000,
    }
    own = {} if base_url is None else {"base_url": base_url}
    target = {"model": "m", "base_url": "http://host/v1", **limits}
    models = load_config({"models": {"target": target, "optimizer": own}}).models
    assert {
        name: getattr(models.optimizer, name) == value for name, value in limits.items()
    } == dict.fromkeys(limits, taken)
    kept = load_config({"models": {"target": target, "optimizer": {**own, "concurrency": 3}}}).models
    assert kept.optimizer.concurrency == 3


def test_input_paths_count_from_the_file(tmp_path: Path) -> None:
    text = (
        "skill: s.md\nout_dir: out\ndata: {path: data}\nprompts: {folder: p}\n"
        "replay: {cassette: /abs/c.jsonl}\n"
    )
    config = load_config(written(tmp_path, "a.yaml", text))
    assert (config.skill, config.data.path, config.prompts.folder) == (
        tmp_path / "s.md",
        tmp_path / "data",
        tmp_path / "p",
    )
    assert config.replay.cassette == Path("/abs/c.jsonl")
    assert config.out_dir == Path("out")


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
        ("models.target.api_key_env", "OTHER_NAME", True),
        ("test.enabled", False, True),
        ("replay.cassette", "c.jsonl", True),
        ("budget.max_usd", 0.5, True),
        ("models.target.price", {"input": 1, "output": 2}, True),
        ("seed", 1, False),
        ("train.batch_size", 3, False),
        ("models.target.model", "other", False),
        ("models.optimizer.temperature", 0.1, False),
        ("gate.metric", "soft", False),
    ],
)
def test_changeable_keys_do_not_make_another_run(key: str, value: object, is_same: bool) -> None:
    assert (config_identity(load_keys({key: value})) == config_identity(load_config({}))) is is_same


def test_types_and_defaults_are_told_as_a_file_has_them() -> None:
    told = {
        key: (kind, default)
        for section in (TrainerConfig, CalibrateConfig)
        for key, kind, default, *_ in list_config_keys(section)
    }
    assert told["calibrator.mistakes"] == ("list of mapping", "[]")
    assert told["update.operations"] == (
        "list of `append` or `insert_after` or `replace` or `delete`",
        "[append, insert_after, replace, delete]",
    )
    assert not [key for key, (kind, _) in told.items() if "class" in kind or "Ellipsis" in kind]
    assert not [key for key, *_, description in list_config_keys() if not description.endswith(".")]


def test_the_identity_names_known_keys_and_no_secret() -> None:
    known = {key for key, *_ in list_config_keys()}
    named = config_identity(load_config({"models": MODELS}))
    assert set(named) <= known
    assert not {key for key in named if "api_key" in key}
    json.dumps(named)


@given(st.dictionaries(st.text(min_size=1, max_size=12), st.integers() | st.text() | st.none(), max_size=3))
def test_any_mapping_gives_a_configuration_or_a_config_error(settings: dict[str, object]) -> None:
    try:
        config = load_config(settings)
    except ConfigError:
        return
    assert isinstance(config, TrainerConfig)


@pytest.mark.parametrize(
    ("written", "ratio"),
    [
        *[("2:1:7", "2:1:7"), ("'2:1:7'", "2:1:7"), ("[2, 1, 7]", "2:1:7")],
        *[("1:1:0", "1:1:0"), ("10:10:70", "10:10:70"), ("null", None)],
    ],
)
def test_ratios_have_several_forms(written: str, ratio: str | None) -> None:
    assert load_config({}, overrides=[f"data.ratio={written}"]).data.ratio == ratio
