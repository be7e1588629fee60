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
from reflact.integrations.skillopt.models import Conversion, convert_roles
from reflact.types import FrozenModel

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
