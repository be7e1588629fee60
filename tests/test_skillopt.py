"""Configurations and skill documents of SkillOpt are converted with the same meaning."""

from __future__ import annotations

import json
import os
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from reflact.config.loading import load_config, load_keys
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError, SkillError, UsageError
from reflact.integrations.skillopt import (
    MAX_FILE_BYTES,
    ConvertedConfig,
    convert_config,
    flatten_keys,
    read_config,
    read_document,
)
from reflact.skills.document import find_regions
from reflact.targets import CommandTarget
from reflact.targets.profiles import PROFILES
from served import reflact

KEYS = (Path(__file__).parent / "skillopt_keys.txt").read_text(encoding="utf-8").split()
UNKNOWN = "not a known key of SkillOpt"
SECRET = "sk-" + "live0123456789abcdefghij"
TOKEN = "ghp_" + "0123456789abcdefghij0123456789abcdef"

POLICY, FULL = "slow_update.pair_policy", "update.mode"

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.lists(st.integers())
)


def convert(raw: dict[str, object]) -> tuple[ConvertedConfig, TrainerConfig]:
    """Convert the content of a configuration file; return the result and what it loads as."""
    done = convert_config(flatten_keys(json.loads(json.dumps(raw))), "old")
    assert (done.settings["preset"], done.settings["out_dir"]) == ("skillopt", "runs/old")
    return done, load_keys(done.settings)


def nested(names: list[str], value: object) -> dict[str, object]:
    """Return the mapping of sections in which dotted keys have a value."""
    raw: dict[str, dict[str, object]] = {}
    for name in names:
        section, _, key = name.partition(".")
        raw.setdefault(section, {})[key] = value
    return dict(raw)


def test_every_key_of_skillopt_is_known() -> None:
    """No key of the reference is reported as unknown: each is converted, or gone for a reason."""
    done, _ = convert(nested(KEYS, 1))
    assert UNKNOWN not in done.unsupported
    assert set(done.omitted_secrets) == {key for key in KEYS if key.endswith("api_key")}


@pytest.mark.parametrize(
    ("key", "spellings", "new", "value"),
    [
        ("train.num_epochs", 2, "train.num_epochs", 2),
        ("train.accumulation", 3, "train.accumulation", 3),
        ("train.seed", 7, "seed", 7),
        ("env.split_ratio", "1:1:1", "data.ratio", "1:1:1"),
        ("env.skill_init", "s.md", "skill", Path("s.md")),
        ("env.workers", 24, "train.rollout_concurrency", 24),
        ("gradient.merge_batch_size", 4, "aggregate.merge_batch_size", 4),
        ("gradient.failure_only", True, "reflect.failure_only", True),
        ("optimizer.learning_rate", 8, "select.max_edits", 8),
        ("optimizer.min_learning_rate", 1, "select.min_edits", 1),
        ("optimizer.lr_scheduler", "linear", "select.scheduler", "linear"),
        ("optimizer.lr_scheduler", "autonomous", "select.lr_control", "none"),
        ("optimizer.lr_control_mode", "fixed manual scheduler FIXED", "select.lr_control", "fixed"),
        ("optimizer.lr_control_mode", "scheduled", "select.lr_control", "fixed"),
        ("optimizer.lr_control_mode", "autonomous auto optimizer Auto", "select.lr_control", "autonomous"),
        ("optimizer.lr_control_mode", "none off no_lr OFF", "select.lr_control", "none"),
        ("optimizer.slow_update_gate_with_selection", True, "slow_update.gated", True),
        ("optimizer.longitudinal_pair_policy", "mixed default random all", POLICY, "mixed"),
        ("optimizer.longitudinal_pair_policy", "changed change delta 10_01 01_10 Delta", POLICY, "changed"),
        ("optimizer.longitudinal_pair_policy", "unchanged stable same 00_11", POLICY, "unchanged"),
        ("optimizer.use_meta_skill", False, "meta_skill.enabled", False),
        ("optimizer.use_skill_aware_reflection", True, "appendix.enabled", True),
        ("optimizer.skill_aware_consolidate_threshold", 6, "appendix.consolidate_threshold", 6),
        ("optimizer.skill_update_mode", "patch edits PATCH pathc", "update.mode", "patch"),
        ("optimizer.skill_update_mode", "rewrite rewrite_from_suggestions", "update.mode", "rewrite"),
        ("optimizer.skill_update_mode", "suggestions rewrite_suggestions Rewrite", "update.mode", "rewrite"),
        ("optimizer.skill_update_mode", "full_rewrite full_rewrite_minibatch", FULL, "full_rewrite"),
        ("optimizer.skill_update_mode", "minibatch_full_rewrite", FULL, "full_rewrite"),
        ("optimizer.skill_update_mode", "skill_rewrite_minibatch", FULL, "full_rewrite"),
        ("evaluation.use_gate", False, "gate.enabled", False),
        ("evaluation.gate_metric", "mixed Mixed MIXED", "gate.metric", "mixed"),
        ("evaluation.eval_test", False, "test.enabled", False),
        ("model.target", "small", "models.target.model", "small"),
        ("model.optimizer", "large", "models.optimizer.model", "large"),
    ],
)
def test_a_key_keeps_its_meaning(key: str, spellings: object, new: str, value: object) -> None:
    """Each key has the same value under its name here, in every spelling that SkillOpt accepts.

    Case and spaces around a choice do not matter.
    """
    is_choice = isinstance(value, str) and isinstance(spellings, str)
    for spelling in spellings.split() if is_choice else [spellings]:
        padded = f" {spelling} " if " " in str(spellings) else spelling
        done, config = convert(nested([key], padded))
        assert (done.unsupported, attrgetter(new)(config)) == ({}, value), spelling
        assert any("took it for patch" in remark for remark in done.remarks) == (spelling == "pathc")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("optimizer.learning_rat", 3, UNKNOWN),
        ("optimizer.lr_control_mode", "sometimes", "its value does not fit select.lr_control"),
        ("optimizer.longitudinal_pair_policy", "sometimes", "its value does not fit slow_update.pair_policy"),
        ("evaluation.gate_metric", "sometimes", "its value does not fit gate.metric"),
        ("train.batch_size", "forty", "its value does not fit train.batch_size, which takes integer"),
        ("gradient.merge_batch_size", 1, "its value does not fit aggregate.merge_batch_size"),
        ("model.codex_path", "x", "command-line agents"),
        ("model.codex_cli_bin", "x", "command-line agents"),
        ("model.codex_bin", "x", "command-line agents"),
        ("model.sandbox", "x", "command-line agents"),
        ("model.codex_sandbox", "x", "command-line agents"),
        ("model.codex_exec_full_auto", "x", "command-line agents"),
    ],
)
def test_a_key_that_is_not_converted_is_listed(key: str, value: object, reason: str) -> None:
    """A key without a counterpart, or with a value that has none, is left out and listed with the reason."""
    done, config = convert(nested([key], value))
    ((listed, names),) = done.unsupported.items()
    assert (listed.startswith(reason), names) == (True, (key,))
    assert str(value) not in listed
    assert config == load_keys({"preset": "skillopt", "out_dir": "runs/old"})


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
        models = convert({"model": model | address})[1].models
        for url, name in zip((models.target.base_url, models.optimizer.base_url), reached, strict=True):
            assert url.startswith(f"https://{name}"), spelling
        role = convert({"model": {"target_backend": spelling} | address})[1].models.target
        assert role.base_url == models.target.base_url


@pytest.mark.parametrize(
    ("spellings", "words", "roles"),
    [
        ("openai_compatible openai_compatible_chat openai-compatible compat", ".base_url: SkillOpt read", 2),
        ("claude claude_chat anthropic", "no counterpart", 2),
        ("openai codex codex_exec claude_code_exec", "backend of the optimizer has no counterpart", 1),
        ("copilot copilot_cli github_copilot copilot_chat", "no counterpart", 2),
        ("cursor cursor_agent cursor_exec copilot_exec", "no counterpart", 1),
    ],
)
def test_a_remark_names_each_role_without_an_address(spellings: str, words: str, roles: int) -> None:
    """No address of a command-line agent, or from an environment variable, can be converted."""
    for spelling in spellings.split():
        done, _ = convert({"model": {"backend": spelling}})
        assert sum(words in remark for remark in done.remarks) == roles, spelling


@pytest.mark.parametrize(
    ("model", "profile", "target", "optimizer"),
    [
        ({"target_backend": "codex_exec"}, "codex", "a", "a"),
        ({"target_backend": "Codex", "backend": "azure_openai"}, "codex", "a", "a"),
        ({"backend": "codex", "target_backend": "openai_chat"}, "codex", "a", "a"),
        ({"backend": "codex", "optimizer_azure_openai_endpoint": "https://o.example"}, "codex", "a", "o"),
        ({"target_backend": "claude_code_exec"}, "claude-code", "api", "a"),
        ({"backend": "claude_code_exec"}, "claude-code", "api", "a"),
        ({"backend": "codex", "optimizer_backend": "minimax_chat"} | MINIMAX, "codex", "a", "m"),
    ],
)
def test_a_command_line_agent_is_a_target_with_its_profile(
    model: dict[str, object], profile: str, target: str, optimizer: str
) -> None:
    """Codex and Claude Code are commands; the optimizer keeps its Azure endpoint, and seconds bound a rollout."""
    older = {"model": AZURE | {"target": "t", "optimizer": "o"} | model, "env": {"exec_timeout": 90}}
    done, config = convert(older)
    assert (config.target.kind, config.target.options) == (
        "command",
        {"profile": profile, "limits": {"seconds": 90}},
    )
    built = CommandTarget(**config.target.options)
    assert (built.limits.seconds, built.skill_file) == (90, PROFILES[profile].skill_file)
    addresses = (config.models.target.base_url, config.models.optimizer.base_url)
    assert [
        address.startswith(f"https://{name}.")
        for address, name in zip(addresses, (target, optimizer), strict=True)
    ] == [True] * 2
    assert config.models.optimizer.api == ("openai" if optimizer == "m" else "azure")
    assert (config.models.target.model, config.models.optimizer.model) == ("t", "o")
    assert any("models.target names an endpoint" in remark for remark in done.remarks)
    assert done.unsupported == {}


@pytest.mark.parametrize("backend", ["cursor_exec", "copilot_exec", "openai_chat"])
def test_another_backend_leaves_the_kind_of_the_target(backend: str) -> None:
    """An agent without a profile is named, and stays the default kind."""
    assert convert({"model": {"target_backend": backend}})[1].target.kind == "chat"


def test_the_older_names_of_azure_keys_are_converted() -> None:
    """They count where the newer names are empty, and the key in clear text is dropped."""
    older = {"azure_endpoint": "https://a.example", "azure_api_version": "v", "azure_api_key": "k"}
    done, config = convert({"model": older})
    target = config.models.target
    assert (target.base_url, target.api, target.api_version) == ("https://a.example", "azure", "v")
    assert (done.omitted_secrets, done.unsupported) == (("model.azure_api_key",), {})
    _, config = convert({"model": older | {"azure_openai_endpoint": "https://b.example"}})
    assert config.models.target.base_url == "https://b.example"


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
        done, config = convert({"model": AZURE | {"azure_openai_auth_mode": spelling}})
        assert config.models.target.api == api
        assert any("signed in without a key" in remark for remark in done.remarks) == fetched


@pytest.mark.parametrize(
    ("name", "spellings", "sent"),
    [
        ("thinking_mode", ("enabled", "enable", "true", "yes", "on", "1", True, "ON"), True),
        ("thinking_mode", ("disabled", "disable", "false", "no", "off", 0, False), False),
        ("thinking_mode", ("", "server_default", "server-default", "unset", "auto", "none", None), None),
        ("thinking_mode", ("null", "maybe"), None),
        ("enable_thinking", (True, "true", "yes", "on", 1), True),
        ("enable_thinking", (False, "false", "no", 0), None),
    ],
)
def test_every_spelling_of_thinking_is_converted(
    name: str, spellings: tuple[object, ...], sent: bool | None
) -> None:
    """A mode is sent; the server's default, an older switch that is off, and no temperature send nothing.

    SkillOpt refuses an unknown mode. Here it is left out, and a remark names the key.
    """
    expected = {} if sent is None else {"chat_template_kwargs": {"enable_thinking": sent}}
    for spelling in spellings:
        done, config = convert({"model": {"target_backend": "qwen", f"qwen_chat_{name}": spelling}})
        assert config.models.target.extra_body == expected, spelling
        assert any("qwen_chat_thinking_mode" in line for line in done.remarks) == (spelling == "maybe")
    for none in ("", "none", "off", "null", "None"):
        done, config = convert({"model": {"target_backend": "qwen", "qwen_chat_temperature": none}})
        assert (config.models.target.temperature, done.unsupported) == (None, {})


def test_a_section_decides_over_a_flat_key_of_the_same_file(tmp_path: Path) -> None:
    """In one file the section wins wherever it stands; over a base the own file wins in either form."""
    flat, section = "batch_size: 5\n", "train: {batch_size: 7}\n"
    for base, own, size in (
        ("", flat + section, 7),
        ("", section + flat, 7),
        (flat, section, 7),
        (section, flat, 5),
        (flat + section, flat, 5),
    ):
        written(tmp_path / "base.yaml", base or "{}")
        assert load(written(tmp_path / "c.yaml", f"_base_: base.yaml\n{own}")).train.batch_size == size


def test_what_the_preset_says_already_is_left_out() -> None:
    """The defaults of SkillOpt give an empty configuration: the preset restores them."""
    older = yaml.safe_load("""
        train: {num_epochs: 4, batch_size: 40, accumulation: 1, seed: 42}
        gradient: {minibatch_size: 8, merge_batch_size: 8, failure_only: false}
        optimizer: {learning_rate: 4, min_learning_rate: 2, lr_scheduler: cosine, lr_control_mode: fixed,
            skill_update_mode: patch, use_slow_update: true, slow_update_samples: 20, use_meta_skill: true,
            slow_update_gate_with_selection: false, skill_aware_consolidate_threshold: 0}
        evaluation: {use_gate: true, gate_metric: hard, eval_test: true}
    """)
    done, config = convert(older)
    assert set(done.settings) <= {"preset", "out_dir", "select.min_edits"}
    assert config.select.floor == 2


def test_the_floor_never_exceeds_the_budget() -> None:
    """A budget of 1 means 1 here, though SkillOpt's floor of 2 raised it; a remark says so."""
    done, config = convert({"optimizer": {"learning_rate": 1, "min_learning_rate": 2}})
    assert (config.select.max_edits, config.select.floor) == (1, 1)
    assert any("min_learning_rate" in remark for remark in done.remarks)


def test_a_seed_that_is_not_finite_counts_as_absent() -> None:
    """A remark says so."""
    done, _ = convert({"train": {"seed": float("inf")}})
    assert done.remarks == ("train.seed is not a finite number; it counts as absent.",)


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
    assert convert({"env": older})[1].data.path == Path(path)


def test_a_flat_configuration_means_the_same() -> None:
    """config.json has other names for three keys, and no sections; values of its own are no sections."""
    flat = {"edit_budget": 3, "min_edit_budget": 1, "optimizer": "large", "num_epochs": 2}
    more = {"resolved_qwen_thinking_modes": {"optimizer": "server_default"}, "meta_edit_budget": 1}
    done, config = convert(flat | more)
    assert (config.select.max_edits, config.models.optimizer.model) == (3, "large")
    assert {name for names in done.unsupported.values() for name in names} == {*more}


THOUGHTLESS = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


@pytest.mark.parametrize(
    ("model", "new"),
    [
        (AZURE | {"azure_openai_api_version": "v"}, {"base_url": "a", "api": "azure", "api_version": "v"}),
        (AZURE | {"target_azure_openai_auth_mode": "openai_compatible"}, {"base_url": "a", "api": "openai"}),
        (
            QWEN
            | {"target_backend": "qwen_chat", "qwen_chat_temperature": 0.0}
            | {"target_qwen_chat_thinking_mode": "disabled", "qwen_chat_enable_thinking": True},
            {"base_url": "q", "temperature": 0.0, **THOUGHTLESS},
        ),
        (MINIMAX | {"target_backend": "minimax_chat", "minimax_model": "M"}, {"base_url": "m", "model": "M"}),
    ],
)
def test_a_role_reaches_the_endpoint_it_had(model: dict[str, object], new: dict[str, object]) -> None:
    """Addresses, versions and sampling come from the backend that the role uses."""
    target = convert({"model": model})[1].models.target
    new = new | {"base_url": f"https://{new['base_url']}.example"}
    assert {name: getattr(target, name) for name in new} == new


@given(st.dictionaries(st.sampled_from(KEYS), leaves, max_size=12))
def test_any_configuration_is_converted(older: dict[str, object]) -> None:
    """Whatever the values, the result is a configuration that loads."""
    raw: dict[str, dict[str, object]] = {}
    for name, value in older.items():
        section, _, key = name.partition(".")
        raw.setdefault(section, {})[key] = value
    done = convert_config(flatten_keys(raw), "old")
    assert load_config(yaml.safe_load(done.to_yaml("x"))) == load_keys(done.settings)


@pytest.mark.parametrize(
    ("section", "key", "value", "omitted"),
    [
        ("model", "qwen_chat_api_key", "anything", True),
        ("model", "azure_openai_api_key", SECRET, True),
        ("model", "hub_token", "anything", True),
        ("model", "db_password", "anything", True),
        ("model", "target", SECRET, True),
        ("model", "azure_openai_endpoint", "https://user:pass@a.example", True),
        ("model", "azure_openai_endpoint", "https://a.example/?api-key=abc", True),
        ("model", "target", TOKEN, True),
        ("model", "codex_exec_path", [TOKEN], True),
        ("env", "skill_init", "skills/skills_for_searchqa.md", False),
        ("env", "data_path", "hfdatasets_searchqa.json", False),
    ],
)
def test_secrets_are_dropped_by_name_and_by_look(
    section: str, key: str, value: object, omitted: bool
) -> None:
    """No secret is in what is made of the configuration, and the key's name is listed.

    A file's name that begins like a key, but has no sign after those letters, is no secret.
    """
    done, _ = convert({section: {key: value}})
    assert done.omitted_secrets == ((f"{section}.{key}",) if omitted else ())
    text = str(value[0]) if isinstance(value, list) else str(value)
    assert (text in done.model_dump_json() + done.to_yaml("x")) is not omitted


def written(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path) -> TrainerConfig:
    """Read and convert a configuration of SkillOpt."""
    return load_keys(convert_config(read_config(path), "c").settings)


def test_a_configuration_stands_on_its_base(tmp_path: Path) -> None:
    """Sections are joined key by key over all bases; the file nearest to the given one wins."""
    written(tmp_path / "base/a.yaml", "train: {num_epochs: 1, batch_size: 5}\nenv: {name: searchqa}\n")
    written(tmp_path / "base/b.yaml", "_base_: a.yaml\ntrain: {num_epochs: 2}\n")
    path = written(tmp_path / "env/c.yaml", "_base_: ../base/b.yaml\ntrain: {accumulation: 3}\n")
    config = load(path)
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
    """The new file has the same meaning and no secret; what is gone is printed with the reason, escaped."""
    model = {"target": "small", "qwen_chat_api_key": SECRET}
    older = {"train": {"num_epochs": 2, "a\x1b[2J\ud800": 1}, "model": model, "env": {"limit": 9}}
    path, new = written(tmp_path / "old.json", json.dumps(older)), tmp_path / "new.yaml"
    done = reflact("import-skillopt", path, "--out", new)
    assert done.exit_code == 0, done.output
    assert load_config(new).train.num_epochs == 2
    assert "note: env.limit: splits are used whole; shorten the data instead.\n" in done.stdout
    assert "note: train.a\\x1b[2J\\ud800: " in done.stdout
    assert "model.qwen_chat_api_key: left out" in done.stdout
    assert SECRET not in done.output + new.read_text(encoding="utf-8")
    again = reflact("import-skillopt", path, "--out", new)
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
    text, remarks = read_document(path)
    assert text == DOCUMENT
    assert any("cp1252" in remark for remark in remarks) == (encoding == "cp1252")
    path.write_bytes(b"\xff\x81\x8d")
    with pytest.raises(UsageError, match=r"skill\.md is text neither"):
        read_document(path)


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
