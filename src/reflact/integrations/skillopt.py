"""Converts configurations and skill documents of SkillOpt.

The files are not trusted. Their size is bounded, links must stay in their folder, and values that look like
secrets are left out.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import yaml
from pydantic import JsonValue

from reflact.config.loading import list_config_keys, load_keys, nest_keys
from reflact.errors import ConfigError, SkillError, UsageError
from reflact.skills.document import check_document, find_regions
from reflact.types import FrozenModel

BASE_KEY = "_base_"
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_BASE_DEPTH = 10
"""Configurations that build on each other at most."""

SECRET_NAME = re.compile(
    r"(api_?key|secret|passw(or)?d|credential|bearer|private_?key)|(^|_)(token|auth|key|pat)$", re.IGNORECASE
)
SECRET_TEXT = re.compile(
    r"\b((sk|pk|rk|ghp|gho|ghs|github_pat|xox[abp]|hf|glpat)[-_]|AKIA|AIza|eyJ)[-_A-Za-z0-9.]{12,}"
    r"|\b[0-9a-fA-F]{32,}\b|://[^/\s]*@|[?&][^=\s]*(key|token|sig|secret)[^=\s]*=",
)
SECTIONS = {"train", "env", "model", "gradient", "optimizer", "evaluation"}
"""The sections of a YAML file; any other mapping is a value."""

FLAT_NAMES = {
    "learning_rate": "edit_budget",
    "min_learning_rate": "min_edit_budget",
    "meta_learning_rate": "meta_edit_budget",
    "optimizer": "optimizer_model",
    "target": "target_model",
    "name": "env",
    "env_name": "env",
    "model_backend": "backend",
}
"""Other names of keys, by which a section or ``config.json`` spells them."""

PRESET = "skillopt"
"""The preset that the converted settings differ from."""

Spellings = Mapping[str, tuple[str, ...]]
"""Values, and the other spellings of each; case and spaces around do not matter."""

SAME_MEANING = {
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
    "eval_test": "test.enabled",
    "use_slow_update": "slow_update.enabled",
    "slow_update_samples": "slow_update.samples",
    "slow_update_gate_with_selection": "slow_update.gated",
    "use_meta_skill": "meta_skill.enabled",
    "use_skill_aware_reflection": "appendix.enabled",
    "skill_aware_appendix_source": "appendix.source",
}
"""Keys that mean the same here, by flat name."""

NONE_IF_ZERO = {"skill_aware_consolidate_threshold": "appendix.consolidate_threshold"}

UPDATE_MODES: Spellings = {
    "patch": ("edits",),
    "rewrite": ("rewrite_from_suggestions", "suggestions", "rewrite_suggestions"),
    "full_rewrite": ("full_rewrite_minibatch", "minibatch_full_rewrite", "skill_rewrite_minibatch"),
}

CHOICES: Mapping[str, tuple[str, Spellings]] = {
    "gate_metric": ("gate.metric", {"hard": (), "soft": (), "mixed": ()}),
    "longitudinal_pair_policy": (
        "slow_update.pair_policy",
        {
            "mixed": ("default", "random", "all"),
            "changed": ("change", "delta", "10_01", "01_10"),
            "unchanged": ("stable", "same", "00_11"),
        },
    ),
    "lr_control_mode": (
        "select.lr_control",
        {
            "fixed": ("manual", "scheduler", "scheduled"),
            "autonomous": ("auto", "optimizer"),
            "none": ("off", "no_lr"),
        },
    ),
    "skill_update_mode": ("update.mode", UPDATE_MODES),
}

BACKENDS: Spellings = {
    "azure_openai": ("azure", "azure-openai"),
    "openai_chat": (),
    "openai_compatible": ("openai_compatible_chat", "openai-compatible", "compat"),
    "qwen_chat": ("qwen",),
    "minimax_chat": ("minimax",),
    "claude_chat": ("claude", "anthropic"),
    "copilot_chat": ("copilot", "copilot_cli", "github_copilot"),
    "codex_exec": ("codex", "openai"),
    "claude_code_exec": (),
}
SHARED_BACKENDS = {"openai_compatible", "claude_chat", "copilot_chat", "codex_exec", "claude_code_exec"}
"""Common backends that serve both roles; any other one serves the target alone."""

AGENT_PROFILES = {"codex_exec": "codex", "claude_code_exec": "claude-code"}
"""Backends that are command-line agents, and the profiles of ``target.kind: command`` for them."""

NON_AZURE_MODES = {"openai_compatible", "compat", "openai"}
TOKEN_AUTH_MODES = {"azure_cli", "managed_identity", "azure_ad", "aad"}

THINKING: Spellings = {
    "enabled": ("enable", "true", "yes", "on", "1"),
    "disabled": ("disable", "false", "no", "off", "0"),
    "server_default": ("server-default", "unset", "auto", "none", "null"),
}

UNSUPPORTED_KEYS = {
    r"steps_per_epoch|batches_per_epoch|samples_per_epoch": "it follows from the data and the batches",
    r"split_seed|train_size": "a file is always split with the same seed; give a folder to choose the items",
    r"gate_mixed_weight": "the mixed score is the mean of hard and soft",
    r"split_output_dir": "splits are not written out; the store keeps their fingerprint",
    r"limit|sel_env_num|test_env_num": "splits are used whole; shorten the data instead",
    r"max_turns|max_steps|max_tool_turns": "an environment knows its own bounds",
    r"max_analyst_rounds|meta_edit_budget": "SkillOpt does not use it either",
    r"use_semantic_density|semantic_density_weight|leading_words": (
        "a bonus for wording can be earned without being any better"
    ),
    r"rewrite_reasoning_effort|rewrite_max_completion_tokens": (
        "a role has one effort and one cap: models.optimizer.reasoning_effort and .max_tokens"
    ),
    r"(codex|claude_code|cursor|copilot)_.*|sandbox|resolved_qwen_thinking_modes": (
        "command-line agents take their settings from the profile in target.options, if there is one for them"
    ),
    r".*azure_openai_(auth_mode|ad_scope|managed_identity_client_id)": (
        "keys come from an environment variable or, in Python, from an async function"
    ),
    r".*(azure|qwen_chat|minimax|openai_compatible)_.*": (
        "it belongs to a backend that no role of this configuration uses, or has no counterpart"
    ),
    r"mode|image_detail|shuffle_choices|use_theorem|use_sketch": "it belongs to an environment of SkillOpt",
    r"out_root": "old files stay as they are: out_dir names a new folder",
}
"""Patterns of the flat names of keys without a counterpart, and the reasons."""


class SkillOptKey(FrozenModel):
    """A key of a SkillOpt configuration: its name as the file spells it, and its value."""

    spelling: str
    value: JsonValue


class SkillOptConfig(FrozenModel):
    """A SkillOpt configuration: keys by flat name, the names of keys with secrets, and remarks for the user."""

    keys: Mapping[str, SkillOptKey]
    omitted_secrets: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class ConvertedConfig(FrozenModel):
    """Dotted keys of this library that differ from the preset, and the reasons for what was not converted."""

    settings: Mapping[str, JsonValue]
    unsupported: Mapping[str, tuple[str, ...]]
    omitted_secrets: tuple[str, ...]
    remarks: tuple[str, ...]

    def to_yaml(self, source: str) -> str:
        """Return the configuration as a YAML file that names its source."""
        head = f"# Made from {source} by reflact import-skillopt.\n"
        return head + yaml.safe_dump(nest_keys(self.settings), sort_keys=False, allow_unicode=True)


def read_document(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return a skill document with Unix line breaks, and what the user should know about it.

    Raises:
        UsageError: The file is missing, too large or no text.
        SkillError: Its protected regions do not pair.
    """
    text, remarks = _read_text(path)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        check_document(text)
    except SkillError as error:
        raise SkillError(f"{path}: {error}") from None
    named = {"slow_update": "slow guidance", "appendix": "execution notes"}
    regions = [named[region.name] for region in find_regions(text) if region.name in named]
    if regions:
        remarks = (*remarks, f"The protected regions stay as they are: {' and '.join(regions)}.")
    return text, remarks


def flatten_keys(raw: Mapping[str, object]) -> SkillOptConfig:
    """Return the keys of one file under their flat names, without those that contain secrets.

    If a key stands both in a section and outside of any, the section decides.
    """
    keys: dict[str, SkillOptKey] = {}
    secrets: list[str] = []
    remarks: list[str] = []
    for section, key, value in sorted(_list_keys(raw), key=lambda entry: bool(entry[0])):
        spelling = f"{section}.{key}" if section else key
        name = FLAT_NAMES.get(key, key)
        if SECRET_NAME.search(name) or _contains_secret(value):
            secrets.append(spelling)
            continue
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not is_finite:
            remarks.append(f"{spelling} is not a finite number; it counts as absent.")
        if name in keys:
            remarks.append(f"{keys[name].spelling} and {spelling} are the same key; {spelling} was used.")
        keys[name] = SkillOptKey(spelling=spelling, value=value if is_finite else None)
    return SkillOptConfig(keys=keys, omitted_secrets=tuple(secrets), remarks=tuple(remarks))


def _list_keys(raw: Mapping[str, object]) -> Iterator[tuple[str, str, JsonValue]]:
    for key, value in raw.items():
        if isinstance(value, dict) and key in SECTIONS:
            yield from ((key, str(name), _simplify(below)) for name, below in value.items())
        else:
            yield "", str(key), _simplify(value)


def _simplify(value: object) -> JsonValue:
    """Return a scalar or a list of scalars; a value that no setting can have becomes an empty list."""
    if isinstance(value, str | int | float) or value is None:
        return value
    entries = value if isinstance(value, list) else []
    return [e for e in entries if isinstance(e, str | int) or (isinstance(e, float) and math.isfinite(e))]


def _contains_secret(value: JsonValue) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, str) and SECRET_TEXT.search(entry) for entry in entries)


def read_config(path: Path, *, above: tuple[Path, ...] = ()) -> SkillOptConfig:
    """Read a configuration and every configuration that it builds on; ``above`` are those that build on it.

    A key of the file replaces the same key of its base, whether it stands in a section or not.

    Raises:
        ConfigError: A file is missing or malformed, or bases form a circle.
    """
    if path.suffix not in {".yaml", ".yml", ".json"}:
        raise ConfigError(f"{path}: a configuration of SkillOpt ends in .yaml, .yml or .json")
    resolved = path.resolve()
    if len(above) >= MAX_BASE_DEPTH or resolved in above:
        raise ConfigError(
            f"{path}: {BASE_KEY} forms a circle, or more than {MAX_BASE_DEPTH} files build on each other"
        )
    try:
        text, remarks = _read_text(path)
        value: object = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except UsageError as error:
        raise ConfigError(str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is malformed: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    base = value.pop(BASE_KEY, None)
    own = flatten_keys(value)
    under = SkillOptConfig(keys={})
    if base is not None:
        if not isinstance(base, str) or Path(base).is_absolute():
            raise ConfigError(f"{path}: {BASE_KEY} must name one file, relative to this one")
        under = read_config(path.absolute().parent / base, above=(*above, resolved))
    return SkillOptConfig(
        keys={**under.keys, **own.keys},
        omitted_secrets=tuple(dict.fromkeys((*under.omitted_secrets, *own.omitted_secrets))),
        remarks=(*under.remarks, *remarks, *own.remarks),
    )


def _read_text(path: Path) -> tuple[str, tuple[str, ...]]:
    try:
        target = path.resolve()
        if not target.is_relative_to(path.parent.resolve()):
            raise UsageError(f"{path} is a link that leads out of its folder")
        if not stat.S_ISREG(target.stat().st_mode):
            raise UsageError(f"{path} is not a file")
        with target.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    with suppress(UnicodeDecodeError):
        return raw.decode("utf-16" if wide else "utf-8-sig"), ()
    with suppress(UnicodeDecodeError):
        return raw.decode("cp1252"), (f"{path.name} is not UTF-8; it was read as cp1252.",)
    raise UsageError(f"{path} is text neither in UTF-8 nor in cp1252")


class _Conversion:
    """A configuration under conversion: the keys that were used, the new settings, and remarks."""

    def __init__(self, older: SkillOptConfig) -> None:
        self.keys = older.keys
        self.used: set[str] = set()
        self.settings: dict[str, JsonValue] = {}
        self.origins: dict[str, str] = {}
        self.remarks = [*older.remarks]

    def value(self, name: str) -> JsonValue:
        """Return the value of a key by its flat name; None if it is absent."""
        return self.keys[name].value if name in self.keys else None

    def text(self, name: str) -> str:
        """Return the text of a key; empty if it is absent or no text."""
        value = self.value(name)
        return value if isinstance(value, str) else ""

    def has_value(self, name: str) -> bool:
        """Whether a key has a value other than an empty text."""
        return self.value(name) not in (None, "")

    def resolve(self, name: str, spellings: Spellings) -> JsonValue:
        """Return the value that the spelling of a key stands for; an unknown spelling as it is."""
        value = self.value(name)
        spelling = str(value).strip().lower()
        known = (new for new, more in spellings.items() if spelling in {new, *more})
        return value if value is None else next(known, value)

    def set(self, new: str, value: JsonValue, name: str | None = None) -> None:
        """Set a key of this library, from a key of SkillOpt, unless the value is empty."""
        if value is None or value == "":
            return
        self.settings[new] = value
        if name is not None and name in self.keys:
            self.origins[new] = self.keys[name].spelling

    def find_first(self, *names: str) -> str:
        """Return the first of the keys that is not empty, or the first one; mark all of them as used."""
        self.used.update(names)
        return next(filter(self.has_value, names), names[0])

    def copy(self, new: str, *names: str, spellings: Spellings | None = None) -> None:
        """Set a key to the value of the first of the older keys that is not empty."""
        name = self.find_first(*names)
        self.set(new, self.resolve(name, spellings or {}), name)


def convert_config(older: SkillOptConfig, name: str) -> ConvertedConfig:
    """Return a SkillOpt configuration in the terms of this library; ``name`` is that of the new run's folder."""
    conversion = _Conversion(older)
    for flat, new in SAME_MEANING.items():
        conversion.copy(new, flat)
    for flat, (new, spellings) in CHOICES.items():
        conversion.copy(new, flat, spellings=spellings)
    for flat, new in NONE_IF_ZERO.items():
        conversion.used.add(flat)
        if conversion.value(flat) != 0:
            conversion.copy(new, flat)
    _convert_data(conversion)
    _convert_step_size(conversion)
    if str(conversion.settings.get("update.mode", "patch")) not in UPDATE_MODES:
        conversion.settings["update.mode"] = "patch"
        conversion.remarks.append("skill_update_mode has an unknown value; SkillOpt took it for patch.")
    _convert_roles(conversion)
    unsupported: dict[str, list[str]] = {}
    for flat, key in older.keys.items():
        if flat not in conversion.used:
            reasons = (why for pattern, why in UNSUPPORTED_KEYS.items() if re.fullmatch(pattern, flat))
            reason = next(reasons, "not a known key of SkillOpt")
            unsupported.setdefault(reason, []).append(key.spelling)
    conversion.set("out_dir", f"runs/{name}")
    settings = _select_valid(conversion, unsupported)
    return ConvertedConfig(
        settings={"preset": PRESET, **settings},
        unsupported={reason: tuple(names) for reason, names in unsupported.items()},
        omitted_secrets=older.omitted_secrets,
        remarks=tuple(conversion.remarks),
    )


def _convert_data(conversion: _Conversion) -> None:
    conversion.used |= {"split_mode", "split_dir", "data_path", "env"}
    split, raw = conversion.text("split_dir"), conversion.text("data_path")
    from_folder = conversion.text("split_mode").strip().lower() == "split_dir"
    path = split if from_folder or not raw else raw
    if path:
        conversion.set("data.path", path, "data_path" if path == raw else "split_dir")
        conversion.remarks.append(
            "data.path counts from the folder of the new file; check that it leads to the same place."
        )
    environment = conversion.text("env")
    if environment == "searchqa":
        conversion.set("environment.grader", "token_f1", "env")
        conversion.remarks.append("searchqa: hard is 1 if F1 is 1; SkillOpt asked for an exact match.")
    elif environment:
        conversion.remarks.append(
            "No configured environment corresponds to this one; pass your own in Python."
        )


def _convert_step_size(conversion: _Conversion) -> None:
    conversion.used |= {"min_edit_budget", "lr_scheduler"}
    most, least = conversion.value("edit_budget"), conversion.value("min_edit_budget")
    if isinstance(least, int):
        bound = most if isinstance(most, int) else 4
        if least > bound:
            conversion.remarks.append(
                "min_learning_rate exceeds learning_rate; SkillOpt used the greater one, here it is lowered."
            )
        conversion.set("select.min_edits", min(least, bound), "min_edit_budget")
    if conversion.text("lr_scheduler") == "autonomous":
        if conversion.settings.get("select.lr_control") != "autonomous":
            conversion.set("select.lr_control", "none", "lr_control_mode")
        conversion.remarks.append("lr_scheduler: autonomous was a budget of 999, which bounds nothing.")
    else:
        conversion.copy("select.scheduler", "lr_scheduler")


def _convert_roles(conversion: _Conversion) -> None:
    """Convert the models of both roles, and how to reach them."""
    roles = ("target", "optimizer")
    for role in roles:
        conversion.copy(f"models.{role}.model", f"{role}_model")
        conversion.used.add("reasoning_effort")
        conversion.set(
            f"models.{role}.reasoning_effort", conversion.text("reasoning_effort"), "reasoning_effort"
        )
        backend = _find_backend(conversion, role)
        if role == "target" and backend in AGENT_PROFILES:
            _convert_agent(conversion, AGENT_PROFILES[backend])
        elif backend in {"openai_chat", "azure_openai"}:
            _convert_azure(conversion, role)
        elif backend == "qwen_chat":
            _convert_qwen(conversion, role)
        elif backend == "minimax_chat":
            for name in ("base_url", "model", "temperature", "max_tokens"):
                conversion.copy(f"models.{role}.{name}", f"minimax_{name}")
        elif backend == "openai_compatible":
            conversion.remarks.append(
                f"Set models.{role}.base_url: SkillOpt read the address from an environment variable."
            )
        else:
            if backend in AGENT_PROFILES:  # an agent as the optimizer
                _convert_azure(conversion, role)
            conversion.remarks.append(
                f"The backend of the {role} has no counterpart; models.{role} must name an endpoint and its model."
            )
    for name, default in (("base_url", "https://api.openai.com/v1"), ("api", "openai")):
        if f"models.target.{name}" in conversion.settings:  # the optimizer would inherit it
            conversion.settings.setdefault(f"models.optimizer.{name}", default)
    unnamed = [role for role in roles if f"models.{role}.model" not in conversion.settings]
    if len(unnamed) == 1:
        conversion.remarks.append(
            f"The {unnamed[0]} had SkillOpt's default model; name it in models.{unnamed[0]}.model."
        )


def _find_backend(conversion: _Conversion, role: str) -> str:
    """Return the backend of a role: its own one, or the common one if its own is the default."""
    conversion.used |= {f"{role}_backend", "backend"}
    own = str(conversion.resolve(f"{role}_backend", BACKENDS) or "openai_chat")
    common = str(conversion.resolve("backend", BACKENDS) or "openai_chat")
    return common if own == "openai_chat" and (role == "target" or common in SHARED_BACKENDS) else own


def _convert_agent(conversion: _Conversion, profile: str) -> None:
    """Convert a target that is a command-line agent; Claude's models are at no Azure endpoint."""
    options: dict[str, JsonValue] = {"profile": profile}
    seconds = conversion.settings.pop("models.target.timeout", None)
    if isinstance(seconds, int | float) and seconds > 0:
        options["limits"] = {"seconds": seconds}
    conversion.set("target.kind", "command", "target_backend")
    conversion.set("target.options", options, "target_backend")
    if profile == "codex":
        _convert_azure(conversion, "target")
    conversion.remarks.append(
        "The agent asks its model through reflact: check that models.target names an endpoint of this model, and name "
        "its project folder in target.options.workspace."
    )


def _convert_azure(conversion: _Conversion, role: str) -> None:
    conversion.copy(
        f"models.{role}.base_url",
        *(f"{role}_azure_openai_endpoint", "azure_openai_endpoint", "azure_endpoint"),
    )
    if f"models.{role}.base_url" not in conversion.settings:
        return
    mode = conversion.find_first(f"{role}_azure_openai_auth_mode", "azure_openai_auth_mode")
    versions = (f"{role}_azure_openai_api_version", "azure_openai_api_version", "azure_api_version")
    version = conversion.find_first(*versions)
    mode = conversion.text(mode).strip().lower()
    if mode in NON_AZURE_MODES:
        return
    conversion.set(f"models.{role}.api", "azure")
    conversion.set(f"models.{role}.api_version", conversion.value(version), version)
    if mode in TOKEN_AUTH_MODES:
        conversion.remarks.append(
            f"The {role} signed in without a key; in Python, models.{role}.key can fetch its token, "
            f"with models.{role}.auth: token."
        )


def _convert_qwen(conversion: _Conversion, role: str) -> None:
    def find_first(name: str) -> str:
        return conversion.find_first(f"{role}_qwen_chat_{name}", f"qwen_chat_{name}")

    for name, new in (("base_url", "base_url"), ("timeout_seconds", "timeout"), ("max_tokens", "max_tokens")):
        conversion.copy(f"models.{role}.{new}", find_first(name))
    no_temperature = {"": ("none", "off", "null")}
    conversion.copy(f"models.{role}.temperature", find_first("temperature"), spellings=no_temperature)
    mode, switch = find_first("thinking_mode"), find_first("enable_thinking")
    has_mode = conversion.has_value(mode)
    name = mode if has_mode else switch
    if not conversion.has_value(name):
        return
    chosen = str(conversion.resolve(name, THINKING))
    if chosen not in THINKING:
        conversion.remarks.append(f"{name} has a value that SkillOpt does not know; it was left out.")
    elif chosen == "enabled" or (chosen == "disabled" and has_mode):  # a switch that is off sends nothing
        body: JsonValue = {"chat_template_kwargs": {"enable_thinking": chosen == "enabled"}}
        conversion.set(f"models.{role}.extra_body", body, name)


def _select_valid(conversion: _Conversion, unsupported: dict[str, list[str]]) -> dict[str, JsonValue]:
    """Return the settings that differ from the preset; add those that do not fit to the unsupported keys."""
    types = {key: kind for key, kind, *_ in list_config_keys()}
    config = load_keys({"preset": PRESET})
    settings: dict[str, JsonValue] = {}
    for new, value in conversion.settings.items():
        misfit = None
        try:
            changed = load_keys({"preset": PRESET, **settings, new: value})
        except ConfigError:
            misfit = f"its value does not fit {new}, which takes {types[new]}"
        if isinstance(value, str) and SECRET_TEXT.search(value):
            misfit = f"its value looks like a secret, and {new} is no place for one"
        if misfit is not None:
            unsupported.setdefault(misfit, []).append(conversion.origins.get(new, new))
        elif changed != config:
            settings[new], config = value, changed
    return settings
