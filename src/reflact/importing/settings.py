"""What the keys of the older trainer are called here, and why some are gone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import yaml
from pydantic import JsonValue

from reflact.config import TrainerConfig
from reflact.errors import ConfigError
from reflact.importing.models import Reading, role_settings
from reflact.importing.older_config import SECRET_TEXT, OlderConfig
from reflact.loading import keys, load
from reflact.types import Frozen

PRESET = "skillopt"
"""The preset that the converted settings differ from."""

SAME: Mapping[str, str] = {
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
    "gate_metric": "gate.metric",
    "gate_mixed_weight": "gate.mixed_weight",
    "eval_test": "test.enabled",
    "use_slow_update": "slow_update.enabled",
    "slow_update_samples": "slow_update.samples",
    "slow_update_gate_with_selection": "slow_update.gated",
    "longitudinal_pair_policy": "slow_update.pair_policy",
    "use_meta_skill": "meta_skill.enabled",
    "use_skill_aware_reflection": "appendix.enabled",
    "skill_aware_appendix_source": "appendix.source",
}
"""Keys that mean the same here, by flat name."""

NONE_IF_ZERO: Mapping[str, str] = {
    "train_size": "data.train_size",
    "skill_aware_consolidate_threshold": "appendix.consolidate_threshold",
}

MODES: Mapping[str, tuple[str, ...]] = {
    "patch": ("patch", "edits"),
    "rewrite": ("rewrite_from_suggestions", "rewrite", "suggestions", "rewrite_suggestions"),
    "full_rewrite": (
        "full_rewrite_minibatch",
        "full_rewrite",
        "minibatch_full_rewrite",
        "skill_rewrite_minibatch",
    ),
}


class Gone(NamedTuple):
    """Keys without a counterpart: the pattern of their flat names, and the reason."""

    pattern: str
    reason: str


GONE = (
    Gone(r"steps_per_epoch|batches_per_epoch|samples_per_epoch", "it follows from the data and the batches"),
    Gone(r"split_output_dir", "splits are not written out; the store keeps their fingerprint"),
    Gone(r"limit|sel_env_num|test_env_num", "splits are used whole; shorten the data instead"),
    Gone(r"max_turns|max_steps|max_tool_turns", "an environment knows its own bounds"),
    Gone(r"max_analyst_rounds|meta_edit_budget", "the older tool does not use it either"),
    Gone(
        r"use_semantic_density|semantic_density_weight|leading_words",
        "a bonus for wording can be earned without being any better",
    ),
    Gone(
        r"rewrite_reasoning_effort|rewrite_max_completion_tokens",
        "a role has one effort and one cap: models.optimizer.reasoning_effort and .max_tokens",
    ),
    Gone(
        r"(codex|claude_code|cursor|copilot)_.*|resolved_qwen_thinking_modes",
        "command-line agents are no backends of this configuration",
    ),
    Gone(
        r".*azure_openai_(auth_mode|ad_scope|managed_identity_client_id)",
        "keys come from an environment variable or, in Python, from an async function",
    ),
    Gone(
        r".*(azure_openai|qwen_chat|minimax|openai_compatible)_.*",
        "it belongs to a backend that no role of this configuration uses, or has no counterpart",
    ),
    Gone(
        r"mode|image_detail|shuffle_choices|use_theorem|use_sketch",
        "it belongs to an environment of the older tool",
    ),
    Gone(r"out_root", "old files stay as they are: out_dir names a new folder"),
)

SPECIAL = (
    "split_mode",
    "split_seed",
    "split_dir",
    "data_path",
    "env",
    "min_edit_budget",
    "lr_scheduler",
    "lr_control_mode",
    "skill_update_mode",
)
"""Keys that are looked at together."""


class Converted(Frozen):
    """A configuration in this library's terms.

    Args:
        settings: Dotted keys that differ from the preset, with their values.
        gone: Keys without a counterpart, by the reason.
        dropped: Names of keys that held secrets.
        remarks: What else is to be said.
    """

    settings: Mapping[str, JsonValue]
    gone: Mapping[str, tuple[str, ...]]
    dropped: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def config(self) -> TrainerConfig:
        """The complete configuration."""
        return load(_nested(self.settings))

    def yaml(self, source: str) -> str:
        """Return the configuration as a YAML file that says what it was made from."""
        head = f"# Made from {source} by reflact import-skillopt.\n"
        return head + yaml.safe_dump(_nested(self.settings), sort_keys=False, allow_unicode=True)


def convert(older: OlderConfig, name: str) -> Converted:
    """Return an older configuration in this library's terms.

    Args:
        older: What was read.
        name: What the new run's folder is called.
    """
    reading = Reading(older)
    for flat, new in SAME.items():
        reading.copy(flat, new)
    for flat, new in NONE_IF_ZERO.items():
        if reading.value(flat) != 0:
            reading.copy(flat, new)
        reading.use(flat)
    _data(reading)
    _step_size(reading)
    _update(reading)
    role_settings(reading)
    gone: dict[str, list[str]] = {}
    for key in older.keys.values():
        if key.name not in reading.used:
            reason = next((g.reason for g in GONE if re.fullmatch(g.pattern, key.name)), None)
            gone.setdefault(reason or "no key of the older tool that is known", []).append(key.shown)
    reading.set("out_dir", f"runs/{name}")
    settings, misfits = _fitting(reading)
    for reason, names in misfits.items():
        gone.setdefault(reason, []).extend(names)
    return Converted(
        settings={"preset": PRESET, **settings},
        gone={reason: tuple(names) for reason, names in gone.items()},
        dropped=older.dropped,
        remarks=tuple(reading.remarks),
    )


def _data(reading: Reading) -> None:
    for name in ("split_mode", "split_seed", "split_dir", "data_path", "env"):
        reading.use(name)
    split, raw = reading.text("split_dir"), reading.text("data_path")
    path = split if reading.text("split_mode") == "split_dir" or not raw else raw
    if path:
        reading.set("data.path", path, "data_path" if path == raw else "split_dir")
        reading.say("data.path counts from the folder of the new file; see that it leads to the same place.")
    seed = reading.value("split_seed")
    if seed is not None:
        reading.set("data.split_seed", seed if seed != 0 else reading.value("seed"), "split_seed")
    environment = reading.text("env")
    if environment == "searchqa":
        reading.set("environment.grader", "token_f1", "env")
        reading.say("searchqa: hard is 1 from an F1 of 1 on, where the older tool asked for an exact match.")
    elif environment:
        reading.say("The environment has no counterpart among the configured ones; pass your own in Python.")


def _step_size(reading: Reading) -> None:
    for name in ("min_edit_budget", "lr_scheduler", "lr_control_mode"):
        reading.use(name)
    most, least = reading.value("edit_budget"), reading.value("min_edit_budget")
    if isinstance(least, int):
        bound = most if isinstance(most, int) else 4
        if least > bound:
            reading.say("min_learning_rate exceeds learning_rate, which held it up; here it is lowered.")
        reading.set("select.min_edits", min(least, bound), "min_edit_budget")
    scheduler, control = reading.text("lr_scheduler"), reading.text("lr_control_mode")
    if scheduler == "autonomous":
        control = control if control in {"autonomous", "none"} else "none"
        reading.say("lr_scheduler: autonomous was a budget of 999, which bounds nothing.")
    elif scheduler:
        reading.set("select.scheduler", scheduler, "lr_scheduler")
    if control:
        reading.set("select.lr_control", control, "lr_control_mode")


def _update(reading: Reading) -> None:
    reading.use("skill_update_mode")
    named = reading.text("skill_update_mode")
    if named:
        mode = next((mode for mode, names in MODES.items() if named in names), None)
        if mode is None:
            reading.say("skill_update_mode is none that is known; the older tool took it for patch.")
        reading.set("update.mode", mode or "patch", "skill_update_mode")


def _fitting(reading: Reading) -> tuple[dict[str, JsonValue], dict[str, list[str]]]:
    types = {key: kind for key, kind, *_ in keys()}
    config = load({"preset": PRESET})
    settings: dict[str, JsonValue] = {}
    misfits: dict[str, list[str]] = {}
    for new, value in reading.settings.items():
        shown = reading.origins.get(new, new)
        if isinstance(value, str) and SECRET_TEXT.search(value):
            misfits.setdefault(f"its value looks like a secret, and {new} is no place for one", []).append(
                shown
            )
            continue
        try:
            tried = load(_nested({"preset": PRESET, **settings, new: value}))
        except ConfigError:
            misfits.setdefault(f"its value does not fit {new}, which takes {types[new]}", []).append(shown)
            continue
        if _at(tried, new) != _at(config, new):
            settings[new], config = value, tried
    return settings, misfits


def _at(config: TrainerConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def _nested(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
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
