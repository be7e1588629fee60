"""Loading of configurations: files, mappings, presets, overrides, and error messages."""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import JsonValue, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from reflact.config.models import CHANGEABLE, ConfigSection, expand_home, list_kinds
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError
from reflact.text import suggest_path

S = TypeVar("S", bound=ConfigSection)

# The most characters of a wrong value in a message.
SHOWN_CHARS = 300

# Prefixes of the keys of a critic.
CRITIC_PREFIXES = ("critic.", "models.critic.")

# The ratio of a large file without ``data.ratio``.
LARGE_RATIO = "2:1:7"

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "skillopt": {
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 4, "batch_size": 40},
        "data": {"ratio": LARGE_RATIO},
        "reflect": {"minibatch_size": 8, "memory": "off"},
        "select": {"scheduler": "cosine", "max_edits": 4},
        "gate": {"policy": "strict", "metric": "hard"},
        "slow_update": {"enabled": True, "samples": 20, "pair_policy": "mixed", "gated": False},
        "meta_skill": {"enabled": True},
        "appendix": {"enabled": False},
    },
}


def load_config(
    source: TrainerConfig | Mapping[str, Any] | Path | str, *, overrides: Sequence[str] = ()
) -> TrainerConfig:
    """Return the configuration in a file, a mapping or a ``TrainerConfig``.

    Paths to inputs inside a file are relative to that file; ``out_dir`` is relative to the current
    folder. ``overrides`` are assignments such as ``train.num_epochs=2``; values are read as YAML.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong; names the nearest one.
    """
    if isinstance(source, TrainerConfig) and not overrides:
        return source
    raw: Mapping[str, Any]
    base = None
    if isinstance(source, TrainerConfig):
        raw = _keep_explicit(source)
    elif isinstance(source, Mapping):
        raw = source
    else:
        raw = _read(Path(source))
        base = Path(source).resolve().parent
    raw = reduce(_assign, overrides, raw)
    preset = PRESETS.get(str(raw.get("preset", "default")), {})
    config = _validate(TrainerConfig, _overlay(preset, raw))
    return config if base is None else _resolve_paths(config, base)


def load_section(kind: type[S], path: Path, *, overrides: Sequence[str] = ()) -> S:
    """Return a configuration of another kind from a file; paths of inputs are relative to it.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong; names the nearest one.
    """
    config = _validate(kind, reduce(_assign, overrides, _read(path)))
    return _resolve_paths(config, path.resolve().parent)


def load_keys(values: Mapping[str, Any]) -> TrainerConfig:
    """Return the configuration for values under dotted keys, such as ``train.num_epochs``.

    Raises:
        ConfigError: A key is unknown or has a wrong value.
    """
    return load_config(nest_keys(values))


def config_identity(config: TrainerConfig) -> dict[str, JsonValue]:
    """Return the values of a run's identity by dotted key: all keys that are not changeable.

    The keys of a critic count only if one is used. A missing ratio counts as the ratio of large
    files, because the splits themselves are part of the identity.
    """
    unused = () if config.uses_critic else CRITIC_PREFIXES
    values = config.model_dump(mode="json")
    values["data"]["ratio"] = values["data"]["ratio"] or LARGE_RATIO
    return {
        key: reduce(getitem, key.split("."), values)
        for key, field in list_fields(TrainerConfig)
        if not (is_changeable(field) or key.startswith(unused))
    }


def list_idle_keys(config: TrainerConfig) -> frozenset[str]:
    """Return the dotted keys that have no effect, because their section is not used."""
    idle = [] if config.uses_critic else [*CRITIC_PREFIXES]
    if config.replay.cassette is None:
        idle.append("replay.")
    sections = {name: getattr(config, name) for name in TrainerConfig.model_fields}
    idle += [f"{name}." for name, it in sections.items() if getattr(it, "enabled", True) is False]
    return frozenset(
        key
        for key, _ in list_fields(TrainerConfig)
        if key.startswith(tuple(idle)) and not key.endswith(".enabled")
    )


def list_set_keys(
    section: ConfigSection, prefix: str = "", preset: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield the dotted keys that have a value which neither a default nor the preset gave them."""
    usual = PRESETS[section.preset] if isinstance(section, TrainerConfig) else preset or {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, ConfigSection):
            yield from list_set_keys(value, f"{prefix}{name}.", usual.get(name))
        elif value is not None and value != usual.get(name):
            yield f"{prefix}{name}"


def list_fields(section: type[ConfigSection], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a section and of those below it, with their fields."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, ConfigSection):
            yield from list_fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def is_changeable(field: FieldInfo) -> bool:
    """Whether a key may differ between two starts of a run."""
    return field.json_schema_extra == CHANGEABLE


class _StrictLoader(yaml.SafeLoader):
    """Reads YAML as ``yaml.safe_load`` does, but refuses a key that a mapping has twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and check its keys."""
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"the key {key.value!r:.80} is here a second time; join the two"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def _keep_explicit(section: ConfigSection) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.model_fields_set}


def _validate(kind: type[S], raw: Mapping[str, Any]) -> S:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, kind)) from None


def _read(path: Path) -> dict[str, Any]:
    parsers: Mapping[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
    }
    if path.suffix not in parsers:
        raise ConfigError(
            f"{path}: the name of a configuration must end in .yaml, .yml or .toml; rename the "
            "file, or let `reflact init DATA` write a configuration for your data"
        )
    try:
        value = parsers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        advice = suggest_path(path)
        if not path.exists():
            advice = advice or "; `reflact init DATA` writes a configuration"
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror or error}{advice}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} is malformed: it is nested too deeply") from None
    # ValueError: no UTF-8, no TOML, or a date or number that cannot be.
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is malformed: {_describe_parse_error(error)}") from None
    if value is None:
        raise ConfigError(f"{path} is empty; `reflact init DATA` writes a configuration")
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: expected a mapping of sections at the top level, found "
            f"{type(value).__name__}; begin with a section, such as `data:`"
        )
    return value


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, _StrictLoader)  # noqa: S506 - a safe loader


def nest_keys(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the sections of values under dotted keys."""
    sections: dict[str, object] = {}
    for key, value in values.items():
        sections = _overlay(sections, _nest_key(key, value))
    return sections


def _nest_key(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return {**value}


def _assign(raw: Mapping[str, Any], assignment: str) -> dict[str, Any]:
    key, sign, text = assignment.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set takes section.key=value, got {assignment!r}")
    try:
        value: Any = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        raise ConfigError(
            f"--set {key}: its value is not YAML; quote it inside the quotes of the shell: --set "
            f"'{key}=\"...\"'"
        ) from None
    return _overlay(raw, _nest_key(key.strip(), value))


def _overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, ConfigSection):
            below = _keep_explicit(below)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[name] = _overlay(below, value)
        else:
            merged[name] = value
    return merged


def _resolve_paths(section: S, base: Path) -> S:
    """Return a section whose paths of inputs count from a folder; outputs stay where they are."""
    changes: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ConfigSection):
            changes[name] = _resolve_paths(value, base)
        elif isinstance(value, Path) and name in section.outputs:
            changes[name] = expand_home(value)
        elif isinstance(value, Path):
            changes[name] = base / expand_home(value)
    changes = {name: value for name, value in changes.items() if value != getattr(section, name)}
    return section.model_copy(update=changes) if changes else section


# What keys of a special form expect, by the last part of the key.
EXPECTED_FORMS = {
    "base_url": "expected an address that begins with http:// or https://, such as "
    "http://localhost:8000/v1",
    "api_key_env": "expected the name of an environment variable, or null; a key itself never "
    "stands here",
    "template": "expected a text with {input} in it, where the item's input goes",
    "description": 'expected a text; an empty one is "", as in --set '
    "'environment.description=\"\"'",
    "ratio": "expected train:val:test, such as 2:1:7",
}


def _explain(error: ValidationError, kind: type[ConfigSection]) -> str:
    problems = error.errors()
    wrong = {problem["loc"]: problem["input"] for problem in problems}
    own = [problem for problem in problems if not _is_inherited(problem["loc"], wrong)]
    return "; ".join(dict.fromkeys(_describe_problem(problem, kind) for problem in own))


def _is_inherited(
    loc: tuple[int | str, ...], wrong: Mapping[tuple[int | str, ...], object]
) -> bool:
    """Whether a wrong value of a role is that of the target, which the role took over."""
    source = ("models", "target", *loc[2:])
    is_other = loc[:1] == ("models",) and loc != source
    return is_other and source in wrong and wrong[source] == wrong[loc]


def _describe_problem(problem: ErrorDetails, kind: type[ConfigSection]) -> str:
    path = [str(part) for part in problem["loc"]]
    where = ".".join(path) or "configuration"
    value = problem.get("input")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where}; {_suggest_key(path, kind)}"
    if problem["type"] == "missing":
        return f"{where} is required"
    if problem["type"] in {"literal_error", "enum"} and isinstance(value, str):
        message = f"expected {problem['ctx']['expected']}"
        choices = message.split("'")[1::2]
        for choice in difflib.get_close_matches(value, choices, n=1, cutoff=0.4):
            message += f"; did you mean {choice}?"
    elif problem["type"] in {"string_pattern_mismatch", "string_type"}:
        message = EXPECTED_FORMS.get(path[-1], message)
    elif problem["type"] == "path_type":
        message = "expected the path of a file or folder"
    # A wrong value of a model may be a misplaced key or password, which no message repeats.
    if isinstance(value, Mapping | ConfigSection) or path[:1] == ["models"]:
        return f"{where}: {message}"
    return f"{where}: {message} (got {_show_value(value)})"


def _suggest_key(path: Sequence[str], kind: type[ConfigSection]) -> str:
    """Return the key that an unknown one was meant to be, or the keys of its section."""
    *above, name = path
    known = _list_known_keys(above, kind)
    fields = dict(list_fields(kind))
    # A value in place of its key: `ranked: true` for `policy: ranked`.
    hints = [
        f"{key}: {name}"
        for key in known
        if (field := fields.get(".".join([*above, key]))) and name in list_kinds(field.annotation)
    ]
    hints += [key for key in known if sorted(key) == sorted(name)]  # letters changed places
    hints += difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hints += [key for key in fields if key.rpartition(".")[2] == name]
    hints += difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {hints[0]}?" if hints else f"known here: {', '.join(known)}"


def _show_value(value: object) -> str:
    """Return a value for a message, cut, since aliases of YAML can make it endless."""
    limited = reprlib.Repr()
    limited.maxlevel = 2
    limited.maxstring = SHOWN_CHARS
    limited.maxother = SHOWN_CHARS
    return limited.repr(value)


def _describe_parse_error(error: Exception) -> str:
    """Return a parser's problem and its position, without the text, which may contain a key."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (at line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def _list_known_keys(path: Sequence[str], section: type[ConfigSection]) -> list[str]:
    """Return the keys of the section at a path; none if there is no such section."""
    for part in path:
        field = section.model_fields.get(part)
        kinds = [] if field is None else list_kinds(field.annotation)
        below = [
            kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ConfigSection)
        ]
        if not below:
            return []
        section = below[0]
    return list(section.model_fields)
