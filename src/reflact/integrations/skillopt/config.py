"""Converts SkillOpt configurations: the new name of each key, or the reason why it is gone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import yaml
from pydantic import JsonValue

from reflact.config.loading import list_config_keys, load_config
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError
from reflact.integrations.skillopt.files import SECRET_TEXT, SkillOptConfig
from reflact.types import FrozenModel

ROLES = ("target", "optimizer")
OPENAI_URL = "https://api.openai.com/v1"
CHAT_BACKENDS = {"openai_chat", "azure_openai"}
SHARED_BACKENDS = {"openai_compatible", "claude_chat", "copilot_chat", "codex_exec"}
"""Common backends that serve both roles; any other one serves the target alone."""

BACKENDS: Mapping[str, tuple[str, ...]] = {
    "azure_openai": ("azure", "azure-openai"),
    "openai_chat": (),
    "openai_compatible": ("openai_compatible_chat", "openai-compatible", "compat"),
    "qwen_chat": ("qwen",),
    "minimax_chat": ("minimax",),
    "claude_chat": ("claude", "anthropic"),
    "copilot_chat": ("copilot", "copilot_cli", "github_copilot"),
    "codex_exec": ("codex", "openai"),
}

NON_AZURE_MODES = {"openai_compatible", "compat", "openai"}
TOKEN_AUTH_MODES = {"azure_cli", "managed_identity", "azure_ad", "aad"}

THINKING: Mapping[str, tuple[str, ...]] = {
    "enabled": ("enable", "true", "yes", "on", "1"),
    "disabled": ("disable", "false", "no", "off", "0"),
    "server_default": ("server-default", "unset", "auto", "none", "null"),
}

NO_TEMPERATURE: Mapping[str, tuple[str, ...]] = {"": ("none", "off", "null")}


class Conversion:
    """A configuration under conversion: the keys that were used, the new settings, and remarks."""

    def __init__(self, older: SkillOptConfig) -> None:
        self._older = older
        self.used_keys: set[str] = set()
        self.settings: dict[str, JsonValue] = {}
        self.origins: dict[str, str] = {}
        self.remarks: list[str] = []

    def value(self, name: str) -> JsonValue:
        """Return the value of a key by its flat name; None if it is absent."""
        key = self._older.keys.get(name)
        return None if key is None else key.value

    def text(self, name: str) -> str:
        """Return the text of a key; empty if it is absent or no text."""
        value = self.value(name)
        return value if isinstance(value, str) else ""

    def resolve(self, name: str, spellings: Mapping[str, tuple[str, ...]]) -> JsonValue:
        """Return the value that the spelling of a key stands for; an unknown spelling as it is.

        Args:
            name: The key's flat name.
            spellings: The other spellings of each value; case and spaces around do not matter.
        """
        value = self.value(name)
        if value is None:
            return None
        spelling = str(value).strip().lower()
        return next((known for known, more in spellings.items() if spelling in {known, *more}), value)

    def mark_used(self, *names: str) -> None:
        """Mark keys as used."""
        self.used_keys.update(names)

    def set(self, new: str, value: JsonValue, name: str | None = None) -> None:
        """Set a key of this library, from a key of SkillOpt."""
        if value is None:
            return
        self.settings[new] = value
        if name is not None and name in self._older.keys:
            self.origins[new] = self._older.keys[name].spelling

    def copy(self, name: str, new: str, spellings: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """Set a key to the value of an older one, unless that is empty."""
        self.mark_used(name)
        value = self.resolve(name, spellings or {})
        if value != "":
            self.set(new, value, name)

    def add_remark(self, sentence: str) -> None:
        """Add a remark."""
        self.remarks.append(sentence)

    def find_first(self, *names: str) -> str | None:
        """Return the first of the keys that has a value, and mark all of them as used."""
        self.mark_used(*names)
        return next((name for name in names if self.value(name) is not None and self.value(name) != ""), None)


def convert_roles(conversion: Conversion) -> None:
    """Convert the models of both roles, and how to reach them."""
    conversion.mark_used("reasoning_effort")
    for role in ROLES:
        conversion.copy(f"{role}_model", f"models.{role}.model")
        effort = conversion.text("reasoning_effort")
        if effort:
            conversion.set(f"models.{role}.reasoning_effort", effort, "reasoning_effort")
        backend = _find_backend(conversion, role)
        if backend in CHAT_BACKENDS:
            _convert_azure(conversion, role)
        elif backend == "qwen_chat":
            _convert_qwen(conversion, role)
        elif backend == "minimax_chat":
            _convert_minimax(conversion, role)
        elif backend == "openai_compatible":
            conversion.add_remark(
                f"Set models.{role}.base_url: SkillOpt read the address from an environment variable."
            )
        else:
            conversion.add_remark(
                f"The backend of the {role} has no counterpart; set models.{role} to an endpoint."
            )
    _separate_optimizer(conversion)
    unnamed = [role for role in ROLES if f"models.{role}.model" not in conversion.settings]
    if len(unnamed) == 1:
        conversion.add_remark(
            f"The {unnamed[0]} had SkillOpt's default model; name it in models.{unnamed[0]}.model."
        )


def _find_backend(conversion: Conversion, role: str) -> str:
    """Return the backend of a role: its own one, or the common one if its own is the default."""
    conversion.mark_used(f"{role}_backend", "backend")
    own = str(conversion.resolve(f"{role}_backend", BACKENDS) or "openai_chat")
    common = str(conversion.resolve("backend", BACKENDS) or "openai_chat")
    return common if own == "openai_chat" and (role == "target" or common in SHARED_BACKENDS) else own


def _convert_azure(conversion: Conversion, role: str) -> None:
    endpoint = conversion.find_first(
        f"{role}_azure_openai_endpoint", "azure_openai_endpoint", "azure_endpoint"
    )
    if endpoint is None:
        return
    conversion.set(f"models.{role}.base_url", conversion.value(endpoint), endpoint)
    mode = conversion.find_first(f"{role}_azure_openai_auth_mode", "azure_openai_auth_mode")
    version = conversion.find_first(
        f"{role}_azure_openai_api_version", "azure_openai_api_version", "azure_api_version"
    )
    named = "" if mode is None else conversion.text(mode).strip().lower()
    if named in NON_AZURE_MODES:
        return
    conversion.set(f"models.{role}.api", "azure")
    if version is not None:
        conversion.set(f"models.{role}.api_version", conversion.value(version), version)
    if named in TOKEN_AUTH_MODES:
        conversion.add_remark(
            f"The {role} signed in without a key; in Python, models.{role}.key can fetch its token."
        )


def _convert_qwen(conversion: Conversion, role: str) -> None:
    for name, new in (("base_url", "base_url"), ("timeout_seconds", "timeout"), ("max_tokens", "max_tokens")):
        found = conversion.find_first(f"{role}_qwen_chat_{name}", f"qwen_chat_{name}")
        if found is not None:
            conversion.set(f"models.{role}.{new}", conversion.value(found), found)
    temperature = conversion.find_first(f"{role}_qwen_chat_temperature", "qwen_chat_temperature")
    if temperature is not None:
        conversion.copy(temperature, f"models.{role}.temperature", NO_TEMPERATURE)
    mode = conversion.find_first(f"{role}_qwen_chat_thinking_mode", "qwen_chat_thinking_mode")
    switch = conversion.find_first(f"{role}_qwen_chat_enable_thinking", "qwen_chat_enable_thinking")
    named = mode or switch
    if named is None:
        return
    chosen = str(conversion.resolve(named, THINKING))
    if chosen not in THINKING:
        conversion.add_remark(f"{named} has a value that SkillOpt does not know; it was left out.")
    elif chosen == "enabled" or (chosen == "disabled" and mode is not None):  # switched off, it sends nothing
        body: JsonValue = {"chat_template_kwargs": {"enable_thinking": chosen == "enabled"}}
        conversion.set(f"models.{role}.extra_body", body, named)


def _convert_minimax(conversion: Conversion, role: str) -> None:
    for name in ("base_url", "model", "temperature", "max_tokens"):
        found = conversion.find_first(f"minimax_{name}")
        if found is not None:
            conversion.set(f"models.{role}.{name}", conversion.value(found), found)


def _separate_optimizer(conversion: Conversion) -> None:
    """Prevent that the optimizer inherits a connection of the target that it never had."""
    if "models.target.base_url" in conversion.settings:
        conversion.settings.setdefault("models.optimizer.base_url", OPENAI_URL)
    if "models.target.api" in conversion.settings:
        conversion.settings.setdefault("models.optimizer.api", "openai")


PRESET = "skillopt"
"""The preset that the converted settings differ from."""

SAME_MEANING: Mapping[str, str] = {
    "split_ratio": "data.ratio",
    "num_epochs": "train.num_epochs",
    "batch_size": "train.batch_size",
    "accumulation": "train.accumulation",
    "seed": "seed",
    "skill_init": "skill",
    "workers": "train.rollout_concurrency",
    "exec_timeout": "models.target.timeout",
    "max_api_workers": "models.target.concurrency",
    "max_completion_tokens": "models.target.max_tokens",
    "minibatch_size": "reflect.minibatch_size",
    "analyst_workers": "reflect.concurrency",
    "failure_only": "reflect.failure_only",
    "merge_batch_size": "aggregate.merge_batch_size",
    "edit_budget": "select.max_edits",
    "use_gate": "gate.enabled",
    "gate_mixed_weight": "gate.mixed_weight",
    "eval_test": "test.enabled",
    "use_slow_update": "slow_update.enabled",
    "slow_update_samples": "slow_update.samples",
    "slow_update_gate_with_selection": "slow_update.gated",
    "use_meta_skill": "meta_skill.enabled",
    "use_skill_aware_reflection": "appendix.enabled",
    "skill_aware_appendix_source": "appendix.source",
}
"""Keys that mean the same here, by flat name."""

NONE_IF_ZERO: Mapping[str, str] = {
    "train_size": "data.train_size",
    "skill_aware_consolidate_threshold": "appendix.consolidate_threshold",
}

CHOICES: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    "gate_metric": ("gate.metric", {"hard": (), "soft": (), "mixed": ()}),
    "longitudinal_pair_policy": (
        "slow_update.pair_policy",
        {
            "mixed": ("default", "random", "all"),
            "changed": ("change", "delta", "10_01", "01_10"),
            "unchanged": ("stable", "same", "00_11"),
        },
    ),
}
"""Keys with a choice of values: the new key, and the other spellings of each value."""

LR_CONTROL: Mapping[str, tuple[str, ...]] = {
    "fixed": ("manual", "scheduler", "scheduled"),
    "autonomous": ("auto", "optimizer"),
    "none": ("off", "no_lr"),
}

UPDATE_MODES: Mapping[str, tuple[str, ...]] = {
    "patch": ("edits",),
    "rewrite": ("rewrite_from_suggestions", "suggestions", "rewrite_suggestions"),
    "full_rewrite": ("full_rewrite_minibatch", "minibatch_full_rewrite", "skill_rewrite_minibatch"),
}


class UnsupportedKeys(NamedTuple):
    """Keys without a counterpart: the pattern of their flat names, and the reason."""

    pattern: str
    reason: str


UNSUPPORTED_KEYS = (
    UnsupportedKeys(
        r"steps_per_epoch|batches_per_epoch|samples_per_epoch", "it follows from the data and the batches"
    ),
    UnsupportedKeys(r"split_output_dir", "splits are not written out; the store keeps their fingerprint"),
    UnsupportedKeys(r"limit|sel_env_num|test_env_num", "splits are used whole; shorten the data instead"),
    UnsupportedKeys(r"max_turns|max_steps|max_tool_turns", "an environment knows its own bounds"),
    UnsupportedKeys(r"max_analyst_rounds|meta_edit_budget", "SkillOpt does not use it either"),
    UnsupportedKeys(
        r"use_semantic_density|semantic_density_weight|leading_words",
        "a bonus for wording can be earned without being any better",
    ),
    UnsupportedKeys(
        r"rewrite_reasoning_effort|rewrite_max_completion_tokens",
        "a role has one effort and one cap: models.optimizer.reasoning_effort and .max_tokens",
    ),
    UnsupportedKeys(
        r"(codex|claude_code|cursor|copilot)_.*|sandbox|resolved_qwen_thinking_modes",
        "command-line agents are no backends of this configuration",
    ),
    UnsupportedKeys(
        r".*azure_openai_(auth_mode|ad_scope|managed_identity_client_id)",
        "keys come from an environment variable or, in Python, from an async function",
    ),
    UnsupportedKeys(
        r".*(azure|qwen_chat|minimax|openai_compatible)_.*",
        "it belongs to a backend that no role of this configuration uses, or has no counterpart",
    ),
    UnsupportedKeys(
        r"mode|image_detail|shuffle_choices|use_theorem|use_sketch",
        "it belongs to an environment of SkillOpt",
    ),
    UnsupportedKeys(r"out_root", "old files stay as they are: out_dir names a new folder"),
)


class ConvertedConfig(FrozenModel):
    """A configuration in the terms of this library.

    Args:
        settings: Dotted keys that differ from the preset, with their values.
        gone: Keys without a counterpart, by the reason.
        dropped: Names of keys that held secrets.
        remarks: What else the user should know.
    """

    settings: Mapping[str, JsonValue]
    unsupported: Mapping[str, tuple[str, ...]]
    omitted_secrets: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def config(self) -> TrainerConfig:
        """The complete configuration."""
        return load_config(_nest(self.settings))

    def to_yaml(self, source: str) -> str:
        """Return the configuration as a YAML file that names its source."""
        head = f"# Made from {source} by reflact import-skillopt.\n"
        return head + yaml.safe_dump(_nest(self.settings), sort_keys=False, allow_unicode=True)


def convert_config(older: SkillOptConfig, name: str) -> ConvertedConfig:
    """Return a SkillOpt configuration in the terms of this library.

    Args:
        older: The configuration as it was read.
        name: The name of the new run's folder.
    """
    conversion = Conversion(older)
    for flat, new in SAME_MEANING.items():
        conversion.copy(flat, new)
    for flat, (new, spellings) in CHOICES.items():
        conversion.copy(flat, new, spellings)
    for flat, new in NONE_IF_ZERO.items():
        if conversion.value(flat) != 0:
            conversion.copy(flat, new)
        conversion.mark_used(flat)
    _convert_data(conversion)
    _convert_step_size(conversion)
    _convert_update_mode(conversion)
    convert_roles(conversion)
    gone: dict[str, list[str]] = {}
    for key in older.keys.values():
        if key.name not in conversion.used_keys:
            reason = next((g.reason for g in UNSUPPORTED_KEYS if re.fullmatch(g.pattern, key.name)), None)
            gone.setdefault(reason or "not a known key of SkillOpt", []).append(key.spelling)
    conversion.set("out_dir", f"runs/{name}")
    settings, misfits = _select_valid(conversion)
    for reason, names in misfits.items():
        gone.setdefault(reason, []).extend(names)
    return ConvertedConfig(
        settings={"preset": PRESET, **settings},
        unsupported={reason: tuple(names) for reason, names in gone.items()},
        omitted_secrets=older.omitted_secrets,
        remarks=(*older.remarks, *conversion.remarks),
    )


def _convert_data(conversion: Conversion) -> None:
    conversion.mark_used("split_mode", "split_seed", "split_dir", "data_path", "env")
    split, raw = conversion.text("split_dir"), conversion.text("data_path")
    from_folder = conversion.text("split_mode").strip().lower() == "split_dir"
    path = split if from_folder or not raw else raw
    if path:
        conversion.set("data.path", path, "data_path" if path == raw else "split_dir")
        conversion.add_remark(
            "data.path counts from the folder of the new file; check that it leads to the same place."
        )
    seed = conversion.value("split_seed")
    if seed is not None:
        conversion.set("data.split_seed", seed if seed != 0 else conversion.value("seed"), "split_seed")
    environment = conversion.text("env")
    if environment == "searchqa":
        conversion.set("environment.grader", "token_f1", "env")
        conversion.add_remark("searchqa: hard is 1 if F1 is 1; SkillOpt asked for an exact match.")
    elif environment:
        conversion.add_remark("No configured environment corresponds to this one; pass your own in Python.")


def _convert_step_size(conversion: Conversion) -> None:
    conversion.mark_used("min_edit_budget", "lr_scheduler", "lr_control_mode")
    most, least = conversion.value("edit_budget"), conversion.value("min_edit_budget")
    if isinstance(least, int):
        bound = most if isinstance(most, int) else 4
        if least > bound:
            conversion.add_remark(
                "min_learning_rate exceeds learning_rate; SkillOpt used the greater one, here it is lowered."
            )
        conversion.set("select.min_edits", min(least, bound), "min_edit_budget")
    control = conversion.resolve("lr_control_mode", LR_CONTROL)
    if conversion.text("lr_scheduler") == "autonomous":
        control = "autonomous" if control == "autonomous" else "none"
        conversion.add_remark("lr_scheduler: autonomous was a budget of 999, which bounds nothing.")
    else:
        conversion.copy("lr_scheduler", "select.scheduler")
    if control != "":
        conversion.set("select.lr_control", control, "lr_control_mode")


def _convert_update_mode(conversion: Conversion) -> None:
    conversion.mark_used("skill_update_mode")
    if not conversion.value("skill_update_mode"):
        return
    mode = str(conversion.resolve("skill_update_mode", UPDATE_MODES))
    if mode not in UPDATE_MODES:
        conversion.add_remark("skill_update_mode has an unknown value; SkillOpt took it for patch.")
    conversion.set("update.mode", mode if mode in UPDATE_MODES else "patch", "skill_update_mode")


def _select_valid(conversion: Conversion) -> tuple[dict[str, JsonValue], dict[str, list[str]]]:
    types = {key: kind for key, kind, *_ in list_config_keys()}
    config = load_config({"preset": PRESET})
    settings: dict[str, JsonValue] = {}
    misfits: dict[str, list[str]] = {}
    for new, value in conversion.settings.items():
        shown = conversion.origins.get(new, new)
        if isinstance(value, str) and SECRET_TEXT.search(value):
            misfits.setdefault(f"its value looks like a secret, and {new} is no place for one", []).append(
                shown
            )
            continue
        try:
            tried = load_config(_nest({"preset": PRESET, **settings, new: value}))
        except ConfigError:
            misfits.setdefault(f"its value does not fit {new}, which takes {types[new]}", []).append(shown)
            continue
        if _read_key(tried, new) != _read_key(config, new):
            settings[new], config = value, tried
    return settings, misfits


def _read_key(config: TrainerConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def _nest(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    nested: dict[str, JsonValue] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            below = place.setdefault(section, {})
            assert isinstance(below, dict)
            place = below
        place[name] = value
    return nested
