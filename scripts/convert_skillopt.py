"""Converts a configuration of SkillOpt, a YAML file or a run's ``config.json``, for ``reflact train``.

    python convert_skillopt.py configs/searchqa/default.yaml run.yaml

The script prints each key that it does not convert. It copies no keys of providers, and it replaces no file.
``docs/coming-from.md`` says what each key means here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from reflact.config.loading import load_keys, nest_keys
from reflact.errors import ConfigError

KEYS = {
    "split_ratio": "data.ratio",
    "split_dir": "data.path",
    "data_path": "data.path",
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
    "learning_rate": "select.max_edits",
    "edit_budget": "select.max_edits",
    "min_learning_rate": "select.min_edits",
    "min_edit_budget": "select.min_edits",
    "lr_scheduler": "select.scheduler",
    "lr_control_mode": "select.lr_control",
    "skill_update_mode": "update.mode",
    "use_gate": "gate.enabled",
    "gate_metric": "gate.metric",
    "eval_test": "test.enabled",
    "use_slow_update": "slow_update.enabled",
    "slow_update_samples": "slow_update.samples",
    "slow_update_gate_with_selection": "slow_update.gated",
    "longitudinal_pair_policy": "slow_update.pair_policy",
    "use_meta_skill": "meta_skill.enabled",
    "use_skill_aware_reflection": "appendix.enabled",
    "skill_aware_appendix_source": "appendix.source",
    "skill_aware_consolidate_threshold": "appendix.consolidate_threshold",
    "optimizer": "models.optimizer.model",
    "optimizer_model": "models.optimizer.model",
    "target": "models.target.model",
    "target_model": "models.target.model",
    "optimizer_azure_openai_endpoint": "models.optimizer.base_url",
    "target_azure_openai_endpoint": "models.target.base_url",
    "azure_openai_endpoint": "models.target.base_url",
    "optimizer_azure_openai_api_version": "models.optimizer.api_version",
    "target_azure_openai_api_version": "models.target.api_version",
    "azure_openai_api_version": "models.target.api_version",
    "reasoning_effort": "models.target.reasoning_effort",
}
"""Keys here by the names of SkillOpt's keys; the optimizer has the target's endpoint unless it names its own."""

VALUES = {
    "select.lr_control": {
        "manual": "fixed",
        "scheduler": "fixed",
        "scheduled": "fixed",
        "auto": "autonomous",
    }
    | {"optimizer": "autonomous", "off": "none", "no_lr": "none"},
    "slow_update.pair_policy": {
        "default": "mixed",
        "random": "mixed",
        "all": "mixed",
        "change": "changed",
    }
    | {"delta": "changed", "10_01": "changed", "01_10": "changed", "stable": "unchanged"}
    | {"same": "unchanged", "00_11": "unchanged"},
    "update.mode": {
        "edits": "patch",
        "rewrite_from_suggestions": "rewrite",
        "suggestions": "rewrite",
    }
    | {"rewrite_suggestions": "rewrite", "full_rewrite_minibatch": "full_rewrite"}
    | {"minibatch_full_rewrite": "full_rewrite", "skill_rewrite_minibatch": "full_rewrite"},
}
"""The other spellings of values, in lower case."""

ZERO_IS_ABSENT = {"appendix.consolidate_threshold"}
PROFILES = {"codex": "codex", "codex_exec": "codex", "claude_code_exec": "claude-code"}
SECRET_NAME = re.compile(r"key|secret|token$|passw|credential", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"\b(sk|ghp|hf)[-_]\w{12,}|://[^/\s]*@|[?&][^=\s]*(key|token|sig)[^=\s]*="
)


def read_keys(path: Path, depth: int = 0) -> dict[str, Any]:
    """Return the keys of a file over those of the files that its ``_base_`` names, without their sections."""
    if depth > 10:
        raise ConfigError(f"{path}: _base_ forms a circle")
    raw = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    base = raw.pop("_base_", None)
    keys = {} if base is None else read_keys(path.parent / str(base), depth + 1)
    keys |= {name: value for name, value in raw.items() if not isinstance(value, dict)}
    for section in raw.values():
        keys |= section if isinstance(section, dict) else {}
    return keys


def convert(keys: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that differ from ``preset: skillopt``, and a note for each key that is not converted."""
    settings: dict[str, Any] = {"preset": "skillopt"}
    notes: list[str] = []
    for name, value in keys.items():
        if SECRET_NAME.search(name) or (isinstance(value, str) and SECRET_VALUE.search(value)):
            notes.append(f"{name!a} is left out, because it may be a secret")
            continue
        new = KEYS.get(name)
        spelling = value.strip().lower() if isinstance(value, str) else value
        if name in {"backend", "target_backend"} and spelling in PROFILES:
            settings |= {
                "target.kind": "command",
                "target.options": {"profile": PROFILES[spelling]},
            }
        elif new is None or not isinstance(value, str | int | float | None):
            notes.append(f"{name!a} is not converted")
        elif value is not None and value != "" and not (value == 0 and new in ZERO_IS_ABSENT):
            known = VALUES.get(new, {spelling: value})
            changed = known.get(spelling, spelling)
            try:
                if load_keys({**settings, new: changed}) != load_keys(settings):
                    settings[new] = changed
            except ConfigError:
                notes.append(f"{name!a} is not converted, because {new} takes no such value")
    for role in ("target", "optimizer"):
        if f"models.{role}.api_version" in settings:
            settings[f"models.{role}.api"] = "azure"
    return settings, notes


def main() -> None:
    """Convert the file that the first argument names into the one that the second names."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    settings, notes = convert(read_keys(source))
    with target.open("x", encoding="utf-8") as file:
        yaml.safe_dump(nest_keys(settings), file, sort_keys=False, allow_unicode=True)
    print("\n".join([*notes, f"wrote {target}: check its paths, and its models"]))


if __name__ == "__main__":
    main()
