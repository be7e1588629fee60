"""Configurations and skill documents of SkillOpt are converted with the same meaning."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from reflact.cli.app import app
from reflact.config.loading import load_config
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError, SkillError, UsageError
from reflact.integrations.skillopt.config import ConvertedConfig, convert_config
from reflact.integrations.skillopt.files import MAX_FILE_BYTES, flatten_keys, read_config, read_document
from reflact.skills.document import find_regions

KEYS = (Path(__file__).parent / "skillopt_keys.txt").read_text(encoding="utf-8").split()
UNKNOWN = "not a known key of SkillOpt"
SECRET = "sk-" + "live0123456789abcdefghij"
TOKEN = "ghp_" + "0123456789abcdefghij0123456789abcdef"

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.lists(st.integers())
)


def converted(raw: dict[str, object]) -> ConvertedConfig:
    """Convert a configuration, given as it stands in a file."""
    return convert_config(flatten_keys(json.loads(json.dumps(raw))), "old")


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
    assert UNKNOWN not in done.unsupported
    assert set(done.omitted_secrets) == {key for key in KEYS if key.endswith("api_key")}


def test_an_unknown_key_is_listed() -> None:
    """A key that the older tool would have ignored in silence is named."""
    assert converted({"optimizer": {"learning_rat": 3}}).unsupported == {UNKNOWN: ("optimizer.learning_rat",)}


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


@pytest.mark.parametrize(
    ("key", "spellings", "new", "given"),
    [
        ("lr_control_mode", "fixed manual scheduler scheduled FIXED", "select.lr_control", "fixed"),
        ("lr_control_mode", "autonomous auto optimizer Auto", "select.lr_control", "autonomous"),
        ("lr_control_mode", "none off no_lr OFF", "select.lr_control", "none"),
        ("longitudinal_pair_policy", "mixed default random all", "slow_update.pair_policy", "mixed"),
        (
            "longitudinal_pair_policy",
            "changed change delta 10_01 01_10 Delta",
            "slow_update.pair_policy",
            "changed",
        ),
        ("longitudinal_pair_policy", "unchanged stable same 00_11", "slow_update.pair_policy", "unchanged"),
        ("skill_update_mode", "patch edits PATCH", "update.mode", "patch"),
        (
            "skill_update_mode",
            "rewrite rewrite_from_suggestions suggestions rewrite_suggestions Rewrite",
            "update.mode",
            "rewrite",
        ),
        (
            "skill_update_mode",
            "full_rewrite full_rewrite_minibatch minibatch_full_rewrite skill_rewrite_minibatch",
            "update.mode",
            "full_rewrite",
        ),
        ("gate_metric", "mixed Mixed MIXED", "gate.metric", "mixed"),
    ],
)
def test_every_spelling_of_a_choice_is_converted(key: str, spellings: str, new: str, given: str) -> None:
    """Each spelling that SkillOpt accepts means the same here, whatever its case and the spaces around."""
    for spelling in spellings.split():
        done = converted({"optimizer": {key: f" {spelling} "}})
        assert done.unsupported == {}
        section, _, name = new.partition(".")
        assert getattr(getattr(done.config, section), name) == given


@pytest.mark.parametrize("key", ["lr_control_mode", "longitudinal_pair_policy", "gate_metric"])
def test_an_unknown_spelling_is_listed(key: str) -> None:
    """A value that SkillOpt refuses is left out, with the reason."""
    done = converted({"optimizer": {key: "sometimes"}})
    ((reason, names),) = done.unsupported.items()
    assert ("does not fit" in reason, names) == (True, (f"optimizer.{key}",))


def test_an_unknown_update_mode_is_patch() -> None:
    """SkillOpt takes any other update mode for patch; it is said."""
    done = converted({"optimizer": {"skill_update_mode": "pathc"}})
    assert done.config.update.mode == "patch"
    assert any("took it for patch" in remark for remark in done.remarks)


AZURE = {"azure_openai_endpoint": "https://a.example"}
QWEN = {"qwen_chat_base_url": "https://q.example"}
MINIMAX = {"minimax_base_url": "https://m.example"}


@pytest.mark.parametrize(
    ("spellings", "address", "reached"),
    [
        ("azure azure_openai azure-openai openai_chat Azure", AZURE, ("a", "a")),
        ("qwen qwen_chat QWEN", QWEN, ("q", "api.openai.com")),
        ("minimax minimax_chat", MINIMAX, ("m", "api.openai.com")),
    ],
)
def test_every_spelling_of_a_backend_is_converted(
    spellings: str, address: dict[str, object], reached: tuple[str, str]
) -> None:
    """The common backend decides for roles that have the default one; Qwen and MiniMax serve the target."""
    for spelling in spellings.split():
        model = {"backend": spelling, "target_backend": "openai_chat", "optimizer_backend": "openai_chat"}
        models = converted({"model": model | address}).config.models
        for url, name in zip((models.target.base_url, models.optimizer.base_url), reached, strict=True):
            assert url.startswith(f"https://{name}"), spelling
        role = converted({"model": {"target_backend": spelling} | address}).config.models.target
        assert role.base_url == models.target.base_url


@pytest.mark.parametrize(
    "spelling", ["openai_compatible", "openai_compatible_chat", "openai-compatible", "compat"]
)
def test_a_compatible_backend_asks_for_both_addresses(spelling: str) -> None:
    """SkillOpt reads its addresses from environment variables alone, so a remark asks for them."""
    remarks = converted({"model": {"backend": spelling}}).remarks
    assert [remark.split()[1] for remark in remarks] == [
        "models.target.base_url:",
        "models.optimizer.base_url:",
    ]


@pytest.mark.parametrize(
    ("spelling", "roles"),
    [
        *((name, 2) for name in ("claude", "claude_chat", "anthropic", "openai", "codex", "codex_exec")),
        *((name, 2) for name in ("copilot", "copilot_cli", "github_copilot", "copilot_chat")),
        *(
            (name, 1)
            for name in ("claude_code_exec", "cursor", "cursor_agent", "cursor_exec", "copilot_exec")
        ),
    ],
)
def test_a_command_line_agent_has_no_counterpart(spelling: str, roles: int) -> None:
    """A remark names each role that such a backend served, under every spelling."""
    remarks = converted({"model": {"backend": spelling}}).remarks
    assert sum("no counterpart" in remark for remark in remarks) == roles


def test_the_older_names_of_azure_keys_are_converted() -> None:
    """They count where the newer names are empty, and the key in clear text is dropped."""
    older = {"azure_endpoint": "https://a.example", "azure_api_version": "v", "azure_api_key": "k"}
    done = converted({"model": older})
    target = done.config.models.target
    assert (target.base_url, target.api, target.api_version) == ("https://a.example", "azure", "v")
    assert (done.omitted_secrets, done.unsupported) == (("model.azure_api_key",), {})
    newer = converted({"model": older | {"azure_openai_endpoint": "https://b.example"}})
    assert newer.config.models.target.base_url == "https://b.example"


@pytest.mark.parametrize(
    ("spellings", "api", "fetched"),
    [
        ("openai_compatible compat openai Compat", "openai", False),
        ("api_key key", "azure", False),
        ("azure_cli managed_identity azure_ad aad", "azure", True),
    ],
)
def test_every_spelling_of_an_azure_sign_in_is_converted(spellings: str, api: str, fetched: bool) -> None:
    """It decides on the API, and a remark says where a token was fetched."""
    for spelling in spellings.split():
        done = converted({"model": AZURE | {"azure_openai_auth_mode": spelling}})
        assert done.config.models.target.api == api
        assert any("signed in without a key" in remark for remark in done.remarks) == fetched


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        *(
            ({"thinking_mode": on}, True)
            for on in ("enabled", "enable", "true", "yes", "on", "1", True, "ON")
        ),
        *(({"thinking_mode": off}, False) for off in ("disabled", "disable", "false", "no", "off", 0, False)),
        *(
            ({"thinking_mode": own}, None)
            for own in ("", "server_default", "server-default", "unset", "auto")
        ),
        *(({"thinking_mode": own}, None) for own in ("none", "null", None)),
        *(({"enable_thinking": on}, True) for on in (True, "true", "yes", "on", 1)),
        *(({"enable_thinking": off}, None) for off in (False, "false", "no", 0)),
        ({"thinking_mode": "disabled", "enable_thinking": True}, False),
    ],
)
def test_every_spelling_of_thinking_is_converted(settings: dict[str, object], sent: bool | None) -> None:
    """A mode is sent; the server's default and an older switch that is off send nothing."""
    model = {"target_backend": "qwen"} | {f"qwen_chat_{name}": value for name, value in settings.items()}
    done = converted({"model": model})
    expected = {} if sent is None else {"chat_template_kwargs": {"enable_thinking": sent}}
    assert done.config.models.target.extra_body == expected
    assert not any("thinking" in remark for remark in done.remarks)


def test_an_unknown_thinking_mode_is_named() -> None:
    """SkillOpt refuses it; here it is left out, and the remark names the key."""
    done = converted({"model": {"target_backend": "qwen", "qwen_chat_thinking_mode": "maybe"}})
    assert any("qwen_chat_thinking_mode" in remark for remark in done.remarks)


@pytest.mark.parametrize("spelling", ["", "none", "off", "null", "None"])
def test_no_temperature_has_many_spellings(spelling: str) -> None:
    """They leave the temperature out of requests, as they did."""
    done = converted({"model": {"target_backend": "qwen", "qwen_chat_temperature": spelling}})
    assert (done.config.models.target.temperature, done.unsupported) == (None, {})


@pytest.mark.parametrize(
    "key", ["codex_path", "codex_cli_bin", "codex_bin", "sandbox", "codex_sandbox", "codex_exec_full_auto"]
)
def test_older_names_of_codex_keys_are_known(key: str) -> None:
    """They are gone for the same reason as the keys that they stand for."""
    done = converted({"model": {key: "x", "codex_exec_path": "x"}})
    assert len(done.unsupported) == 1
    assert UNKNOWN not in done.unsupported


def test_a_section_decides_over_a_flat_key_of_the_same_file(tmp_path: Path) -> None:
    """In one file the section wins wherever it stands; over a base the own file wins in either form."""
    flat, section = "batch_size: 5\n", "train: {batch_size: 7}\n"
    for text in (flat + section, section + flat):
        path = written(tmp_path / "c.yaml", text)
        assert convert_config(read_config(path), "c").config.train.batch_size == 7
    for base, own, size in ((flat, section, 7), (section, flat, 5), (flat + section, flat, 5)):
        written(tmp_path / "base.yaml", base)
        path = written(tmp_path / "c.yaml", f"_base_: base.yaml\n{own}")
        assert convert_config(read_config(path), "c").config.train.batch_size == size


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
    assert {name for names in done.unsupported.values() for name in names} == {*more}


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
    (first, second) = done.unsupported.items()
    assert first == ("its value does not fit train.batch_size, which takes integer", ("train.batch_size",))
    assert second[1] == ("gradient.merge_batch_size",)


@given(st.dictionaries(st.sampled_from(KEYS), leaves, max_size=12))
def test_any_configuration_is_converted(older: dict[str, object]) -> None:
    """Whatever the values, the result is a configuration that loads."""
    raw: dict[str, dict[str, object]] = {}
    for name, value in older.items():
        section, _, key = name.partition(".")
        raw.setdefault(section, {})[key] = value
    done = convert_config(flatten_keys(raw), "old")
    assert isinstance(done.config, TrainerConfig)
    assert load_config(yaml.safe_load(done.to_yaml("x"))) == done.config


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
    assert done.omitted_secrets == (f"model.{key}",)
    text = str(value[0]) if isinstance(value, list) else str(value)
    assert text not in done.model_dump_json() + done.to_yaml("x")


@pytest.mark.parametrize(
    ("key", "value"),
    [("skill_init", "skills/skills_for_searchqa.md"), ("data_path", "hfdatasets_searchqa.json")],
)
def test_a_path_is_no_secret(key: str, value: str) -> None:
    """Names of files that begin like a key, but have no sign after those letters, are taken over."""
    assert converted({"env": {key: value}}).omitted_secrets == ()


def test_a_number_that_is_not_finite_counts_as_absent() -> None:
    """A remark names the key."""
    done = convert_config(flatten_keys({"train": {"seed": float("inf")}}), "old")
    assert done.remarks == ("train.seed is not a finite number; it counts as absent.",)


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
    config = convert_config(read_config(path), "c").config
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
        read_config(path)


def test_aliases_that_multiply_do_no_harm(tmp_path: Path) -> None:
    """Values that grow without bound when written out are cut to what a setting can be."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path = written(tmp_path / "c.yaml", "\n".join(lines) + "\n")
    assert len(convert_config(read_config(path), "c").unsupported[UNKNOWN]) == 12


def test_the_command_writes_a_configuration_that_loads(tmp_path: Path) -> None:
    """The new file holds the same meaning and no secret; what is gone is printed with the reason."""
    model = f"model: {{target: small, qwen_chat_api_key: {SECRET}}}\n"
    text = f"train: {{num_epochs: 2}}\n{model}env: {{limit: 9}}\n"
    path = written(tmp_path / "old.yaml", text)
    done = reflact("import-skillopt", path, "--out", tmp_path / "new.yaml")
    assert done.exit_code == 0, done.output
    assert load_config(tmp_path / "new.yaml").train.num_epochs == 2
    assert "note: env.limit: splits are used whole; shorten the data instead.\n" in done.stdout
    assert "model.qwen_chat_api_key: left out" in done.stdout
    assert SECRET not in done.output + (tmp_path / "new.yaml").read_text(encoding="utf-8")
    again = reflact("import-skillopt", path, "--out", tmp_path / "new.yaml")
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


def test_what_is_not_a_file_to_convert_is_refused(tmp_path: Path) -> None:
    """A folder, a missing file and a file of another kind are errors that name the file."""
    (tmp_path / "older").mkdir()
    written(tmp_path / "picture.png", "x")
    for name, words in (
        ("older", "config.json"),
        ("nowhere.yaml", "no file"),
        ("picture.png", "ends neither"),
    ):
        refused = reflact("import-skillopt", tmp_path / name, "--out", tmp_path / "new.yaml")
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")
        assert (words in refused.stderr, name in refused.stderr) == (True, True)
    path = written(tmp_path / "old.json", "{}")
    assert "end in .yaml" in reflact("import-skillopt", path, "--out", tmp_path / "new.json").stderr


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes are made as on Unix")
def test_only_plain_files_are_read(tmp_path: Path) -> None:
    """A link out of the folder, a link to itself, a pipe and a file that is too large are refused."""
    outside = written(tmp_path / "secret.md", "private")
    place = tmp_path / "older"
    place.mkdir()
    (place / "link.md").symlink_to(outside)
    (place / "loop.md").symlink_to("loop.md")
    os.mkfifo(place / "pipe.md")
    with (place / "large.md").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    reasons = {"link": "leads out", "loop": "cannot be read", "pipe": "not a file", "large": "larger than"}
    for name, words in reasons.items():
        with pytest.raises(UsageError, match=words):
            read_document(place / f"{name}.md")


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Control characters and half surrogate pairs in a key's name are printed as escapes."""
    path = written(tmp_path / "old.json", json.dumps({"train": {"a\x1b[2J\ud800": 1}}))
    done = reflact("import-skillopt", path, "--out", tmp_path / "new.yaml")
    assert done.exit_code == 0, done.output
    assert "note: train.a\\x1b[2J\\ud800: " in done.stdout


# ------------------------------------------------------------------------------------------- documents

DOCUMENT = "# Skill\n\nAnswer in São Paulo’s way.\n"
REGIONS = (
    "<!-- SLOW_UPDATE_START -->\nMind units.\n<!-- SLOW_UPDATE_END -->\n"
    "<!-- APPENDIX_START -->\n## Execution Notes Appendix\n\n- Count.\n<!-- APPENDIX_END -->\n"
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
def test_a_document_is_read_in_the_encodings_that_systems_write(tmp_path: Path, encoding: str) -> None:
    """UTF-8 with and without a mark, UTF-16 with one, and cp1252, which is named; line breaks become one."""
    path = tmp_path / "best_skill.md"
    path.write_bytes(DOCUMENT.replace("\n", "\r\n").encode(encoding))
    document = read_document(path)
    assert document.skill.text == DOCUMENT
    assert any("cp1252" in remark for remark in document.remarks) == (encoding == "cp1252")


def test_text_in_no_known_encoding_is_refused(tmp_path: Path) -> None:
    """Bytes that are text neither in UTF-8 nor in cp1252 are an error that names the file."""
    (tmp_path / "s.md").write_bytes(b"\xff\x81\x8d")
    with pytest.raises(UsageError, match=r"s\.md is text neither"):
        read_document(tmp_path / "s.md")


def test_the_command_writes_a_document_that_a_run_can_start_from(tmp_path: Path) -> None:
    """The new document has the same text, its protected regions are protected here, and it is named."""
    path = written(tmp_path / "best_skill.md", DOCUMENT + REGIONS)
    done = reflact("import-skillopt", path, "--out", tmp_path / "skill.md")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "skill.md").read_text(encoding="utf-8")
    assert text == DOCUMENT + REGIONS
    assert [region.name for region in find_regions(text)] == ["slow_update", "appendix"]
    assert "note: The protected regions stay as they are: slow guidance and execution notes.\n" in done.stdout
    again = reflact("import-skillopt", path, "--out", tmp_path / "skill.md")
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


def test_a_document_whose_regions_do_not_pair_is_refused(tmp_path: Path) -> None:
    """The error names the file and the line; nothing is written."""
    path = written(tmp_path / "s.md", "a\n<!-- APPENDIX_START -->\n")
    with pytest.raises(SkillError, match=r"s\.md: .*line 2"):
        read_document(path)
    assert reflact("import-skillopt", path, "--out", tmp_path / "new.md").exit_code == 2
    assert not (tmp_path / "new.md").exists()


def test_without_a_name_the_new_file_is_called_like_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NAME.reflact.yaml and NAME.reflact.md appear in the current folder; the old files stay."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "older/a.yml", "train: {num_epochs: 2}\n")
    written(tmp_path / "older/b.md", DOCUMENT)
    for name in ("a.yml", "b.md"):
        assert reflact("import-skillopt", f"older/{name}").exit_code == 0
    assert load_config(Path("a.reflact.yaml")).train.num_epochs == 2
    assert Path("b.reflact.md").read_text(encoding="utf-8") == DOCUMENT
    assert sorted(path.name for path in (tmp_path / "older").iterdir()) == ["a.yml", "b.md"]
