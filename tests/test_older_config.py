"""Configurations of the older trainer: read with their bases, written with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from reflact.config import TrainerConfig
from reflact.errors import ConfigError
from reflact.importing.older_config import flattened, read_config
from reflact.importing.reading import Remarks
from reflact.importing.settings import Converted, convert
from reflact.loading import load

KEYS = (Path(__file__).parent / "skillopt_keys.txt").read_text(encoding="utf-8").split()
UNKNOWN = "no key of the older tool that is known"
SECRET = "sk-" + "live0123456789abcdefghij"
TOKEN = "ghp_" + "0123456789abcdefghij0123456789abcdef"

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.lists(st.integers())
)


def converted(raw: dict[str, object]) -> Converted:
    """Convert a configuration, given as it stands in a file."""
    return convert(flattened(json.loads(json.dumps(raw)), Remarks()), "old")


def settings(raw: dict[str, object]) -> dict[str, object]:
    """Return the settings that a configuration is converted to, but those that every one has."""
    new: dict[str, object] = dict(converted(raw).settings)
    assert (new.pop("preset"), new.pop("out_dir")) == ("skillopt", "runs/old")
    return new


def nested(names: list[str], value: object) -> dict[str, object]:
    """Return the mapping of sections in which dotted keys have a value."""
    raw: dict[str, dict[str, object]] = {}
    for name in names:
        section, _, key = name.partition(".")
        raw.setdefault(section, {})[key] = value
    return dict(raw)


def reflact(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="reflact")


# -------------------------------------------------------------------------------------------- meaning


def test_every_key_of_the_older_tool_is_known() -> None:
    """No key of the reference is reported as unknown: each is taken over, or gone for a reason."""
    done = converted(nested(KEYS, 1))
    assert UNKNOWN not in done.gone
    assert set(done.dropped) == {key for key in KEYS if key.endswith("api_key")}


def test_an_unknown_key_is_listed() -> None:
    """A key that the older tool would have ignored in silence is named."""
    assert converted({"optimizer": {"learning_rat": 3}}).gone == {UNKNOWN: ("optimizer.learning_rat",)}


@pytest.mark.parametrize(
    ("section", "key", "value", "new", "given"),
    [
        ("train", "num_epochs", 2, "train.num_epochs", 2),
        ("train", "accumulation", 3, "train.accumulation", 3),
        ("train", "seed", 7, "seed", 7),
        ("train", "train_size", 400, "data.train_size", 400),
        ("env", "split_ratio", "1:1:1", "data.ratio", "1:1:1"),
        ("env", "split_seed", 5, "data.split_seed", 5),
        ("env", "skill_init", "s.md", "skill", "s.md"),
        ("env", "workers", 24, "train.rollout_concurrency", 24),
        ("gradient", "merge_batch_size", 4, "aggregate.merge_batch_size", 4),
        ("gradient", "failure_only", True, "reflect.failure_only", True),
        ("optimizer", "learning_rate", 8, "select.max_edits", 8),
        ("optimizer", "min_learning_rate", 1, "select.min_edits", 1),
        ("optimizer", "lr_scheduler", "linear", "select.scheduler", "linear"),
        ("optimizer", "lr_scheduler", "autonomous", "select.lr_control", "none"),
        ("optimizer", "lr_control_mode", "autonomous", "select.lr_control", "autonomous"),
        ("optimizer", "slow_update_gate_with_selection", True, "slow_update.gated", True),
        ("optimizer", "longitudinal_pair_policy", "changed", "slow_update.pair_policy", "changed"),
        ("optimizer", "use_meta_skill", False, "meta_skill.enabled", False),
        ("optimizer", "use_skill_aware_reflection", True, "appendix.enabled", True),
        ("optimizer", "skill_aware_consolidate_threshold", 6, "appendix.consolidate_threshold", 6),
        ("optimizer", "skill_update_mode", "suggestions", "update.mode", "rewrite"),
        ("optimizer", "skill_update_mode", "full_rewrite_minibatch", "update.mode", "full_rewrite"),
        ("evaluation", "use_gate", False, "gate.enabled", False),
        ("evaluation", "gate_metric", "mixed", "gate.metric", "mixed"),
        ("evaluation", "gate_mixed_weight", 0.0, "gate.mixed_weight", 0.0),
        ("evaluation", "eval_test", False, "test.enabled", False),
        ("model", "target", "small", "models.target.model", "small"),
        ("model", "optimizer", "large", "models.optimizer.model", "large"),
    ],
)
def test_a_key_keeps_its_meaning(section: str, key: str, value: object, new: str, given: object) -> None:
    """Each key has the same value under its name here."""
    assert settings({section: {key: value}})[new] == given


def test_what_the_preset_says_already_is_left_out() -> None:
    """Older defaults give an empty configuration: the preset restores them."""
    older = {
        "train": {"num_epochs": 4, "batch_size": 40, "accumulation": 1, "seed": 42, "train_size": 0},
        "gradient": {"minibatch_size": 8, "merge_batch_size": 8, "failure_only": False},
        "optimizer": {
            "learning_rate": 4,
            "min_learning_rate": 2,
            "lr_scheduler": "cosine",
            "lr_control_mode": "fixed",
            "skill_update_mode": "patch",
            "use_slow_update": True,
            "slow_update_samples": 20,
            "slow_update_gate_with_selection": False,
            "use_meta_skill": True,
            "skill_aware_consolidate_threshold": 0,
        },
        "evaluation": {"use_gate": True, "gate_metric": "hard", "eval_test": True},
    }
    assert set(settings(older)) <= {"select.min_edits"}
    assert converted(older).config.select.floor == 2


def test_the_floor_never_exceeds_the_budget() -> None:
    """A budget of 1 means 1 here, where the older tool's floor of 2 held it up; it is said."""
    done = converted({"optimizer": {"learning_rate": 1, "min_learning_rate": 2}})
    assert (done.config.select.max_edits, done.config.select.floor) == (1, 1)
    assert any("min_learning_rate" in remark for remark in done.remarks)


def test_a_seed_of_zero_is_that_of_the_run() -> None:
    """The older tool took 0 for the run's own seed."""
    assert settings({"train": {"seed": 7}, "env": {"split_seed": 0}})["data.split_seed"] == 7


@pytest.mark.parametrize(
    ("older", "path"),
    [
        ({"split_mode": "ratio", "data_path": "a.json", "split_dir": "b"}, "a.json"),
        ({"split_mode": "split_dir", "data_path": "a.json", "split_dir": "b"}, "b"),
        ({"split_dir": "b", "data_path": ""}, "b"),
    ],
)
def test_the_data_are_those_that_were_used(older: dict[str, object], path: str) -> None:
    """The split mode decides which of the two paths counts."""
    assert settings({"env": older})["data.path"] == path


def test_a_flat_configuration_means_the_same() -> None:
    """config.json has other names for three keys, and no sections; values of its own are no sections."""
    flat = {"edit_budget": 3, "min_edit_budget": 1, "optimizer": "large", "num_epochs": 2}
    more = {"resolved_qwen_thinking_modes": {"optimizer": "server_default"}, "meta_edit_budget": 1}
    done = converted(flat | more)
    assert done.config.select.max_edits == 3
    assert done.config.models.optimizer.model == "large"
    assert {name for names in done.gone.values() for name in names} == {*more}


@pytest.mark.parametrize(
    ("model", "new"),
    [
        (
            {"azure_openai_endpoint": "https://a.example", "azure_openai_api_version": "v"},
            {"base_url": "https://a.example", "api": "azure", "api_version": "v"},
        ),
        (
            {
                "azure_openai_endpoint": "https://a.example",
                "target_azure_openai_auth_mode": "openai_compatible",
            },
            {"base_url": "https://a.example", "api": "openai"},
        ),
        (
            {
                "target_backend": "qwen_chat",
                "qwen_chat_base_url": "http://q.example/v1",
                "qwen_chat_temperature": 0.0,
                "target_qwen_chat_thinking_mode": "disabled",
            },
            {
                "base_url": "http://q.example/v1",
                "temperature": 0.0,
                "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
            },
        ),
        (
            {"target_backend": "minimax_chat", "minimax_base_url": "https://m.example", "minimax_model": "M"},
            {"base_url": "https://m.example", "model": "M"},
        ),
    ],
)
def test_a_role_reaches_the_endpoint_it_had(model: dict[str, object], new: dict[str, object]) -> None:
    """Addresses, versions and sampling come from the backend that the role uses."""
    target = converted({"model": model}).config.models.target
    assert {name: getattr(target, name) for name in new} == new


def test_the_optimizer_does_not_take_over_the_targets_endpoint() -> None:
    """A target of its own backend leaves the optimizer where it was."""
    done = converted({"model": {"target_backend": "qwen_chat", "qwen_chat_base_url": "http://q.example"}})
    assert done.config.models.optimizer.base_url == "https://api.openai.com/v1"


def test_a_value_that_does_not_fit_is_listed() -> None:
    """A value that the key here refuses is left out, with the reason and without the value."""
    done = converted({"train": {"batch_size": "forty"}, "gradient": {"merge_batch_size": 1}})
    assert done.config.train.batch_size == 40
    (first, second) = done.gone.items()
    assert first == ("its value does not fit train.batch_size, which takes integer", ("train.batch_size",))
    assert second[1] == ("gradient.merge_batch_size",)


@given(st.dictionaries(st.sampled_from(KEYS), leaves, max_size=12))
def test_any_configuration_is_converted(older: dict[str, object]) -> None:
    """Whatever the values, the result is a configuration that loads."""
    raw: dict[str, dict[str, object]] = {}
    for name, value in older.items():
        section, _, key = name.partition(".")
        raw.setdefault(section, {})[key] = value
    done = convert(flattened(dict(raw), Remarks()), "old")  # type: ignore[arg-type]
    assert isinstance(done.config, TrainerConfig)
    assert load(yaml.safe_load(done.yaml("x"))) == done.config


# -------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen_chat_api_key", "anything"),
        ("azure_openai_api_key", SECRET),
        ("hub_token", "anything"),
        ("db_password", "anything"),
        ("target", SECRET),
        ("azure_openai_endpoint", "https://user:pass@a.example"),
        ("azure_openai_endpoint", "https://a.example/?api-key=abc"),
        ("target", TOKEN),
        ("codex_exec_path", [TOKEN]),
    ],
)
def test_secrets_are_dropped_by_name_and_by_look(key: str, value: object) -> None:
    """The value is nowhere in what is made of the configuration; the key's name is listed."""
    done = converted({"model": {key: value}})
    assert done.dropped == (f"model.{key}",)
    text = str(value[0]) if isinstance(value, list) else str(value)
    assert text not in done.model_dump_json() + done.yaml("x")


# ----------------------------------------------------------------------------------------------- files


def written(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_configuration_stands_on_its_base(tmp_path: Path) -> None:
    """Sections are joined key by key over all bases; the file nearest to the given one wins."""
    written(tmp_path / "base/a.yaml", "train: {num_epochs: 1, batch_size: 5}\nenv: {name: searchqa}\n")
    written(tmp_path / "base/b.yaml", "_base_: a.yaml\ntrain: {num_epochs: 2}\n")
    path = written(tmp_path / "env/c.yaml", "_base_: ../base/b.yaml\ntrain: {accumulation: 3}\n")
    config = convert(read_config(path, Remarks()), "c").config
    assert (config.train.num_epochs, config.train.batch_size, config.train.accumulation) == (2, 5, 3)
    assert config.environment.grader == "token_f1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("_base_: c.yaml\n", "circle"),
        ("_base_: [a.yaml, b.yaml]\n", "must name one file"),
        ("_base_: /etc/hosts.yaml\n", "relative"),
        ("_base_: ../secrets.txt\n", "ends in .yaml"),
        ("_base_: missing.yaml\n", "missing.yaml"),
        ("- 1\n", "mapping"),
        ("a: [\n", "malformed"),
        ("a: 2024-13-45\n", "malformed"),
        ("a: !!python/object/apply:os.system [ls]\n", "malformed"),
    ],
)
def test_a_malformed_configuration_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    """The error names the file and what is wrong with it."""
    path = written(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError, match=words):
        read_config(path, Remarks())


def test_aliases_that_multiply_do_no_harm(tmp_path: Path) -> None:
    """Values that grow without bound when written out are cut to what a setting can be."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path = written(tmp_path / "c.yaml", "\n".join(lines) + "\n")
    assert len(convert(read_config(path, Remarks()), "c").gone[UNKNOWN]) == 12


def test_the_command_writes_a_configuration_that_loads(tmp_path: Path) -> None:
    """The new file holds the same meaning and no secret; what is gone is printed with the reason."""
    model = f"model: {{target: small, qwen_chat_api_key: {SECRET}}}\n"
    text = f"train: {{num_epochs: 2}}\n{model}env: {{limit: 9}}\n"
    path = written(tmp_path / "old.yaml", text)
    done = reflact("import-skillopt", path, "--out", tmp_path / "new.yaml")
    assert done.exit_code == 0, done.output
    assert load(tmp_path / "new.yaml").train.num_epochs == 2
    assert "note: env.limit: splits are used whole; shorten the data instead.\n" in done.stdout
    assert "model.qwen_chat_api_key: left out" in done.stdout
    assert SECRET not in done.output + (tmp_path / "new.yaml").read_text(encoding="utf-8")
    again = reflact("import-skillopt", path, "--out", tmp_path / "new.yaml")
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)


def test_a_folder_with_a_configuration_alone_is_one(tmp_path: Path) -> None:
    """Its config.json is converted; nothing may be written beside it."""
    path = written(tmp_path / "old" / "config.json", json.dumps({"num_epochs": 2}))
    assert reflact("import-skillopt", path.parent, "--out", tmp_path / "new.yaml").exit_code == 0
    assert load(tmp_path / "new.yaml").train.num_epochs == 2
    inside = reflact("import-skillopt", path.parent, "--out", path.parent / "new.yaml")
    assert (inside.exit_code, "stays as it is" in inside.stderr) == (2, True)
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """A folder without a run or a configuration, and a path that leads nowhere, are one sentence."""
    (tmp_path / "empty").mkdir()
    for place, words in ((tmp_path / "empty", "config.json"), (tmp_path / "nowhere", "nowhere")):
        refused = reflact("import-skillopt", place, "--out", tmp_path / "new.yaml")
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")
        assert words in refused.stderr
