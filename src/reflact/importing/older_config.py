"""Configurations of the older trainer: YAML with one base, or the flat JSON that it writes beside a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import JsonValue

from reflact.errors import ConfigError, UsageError
from reflact.importing.reading import Folder, Remarks

BASE = "_base_"
DEEPEST = 10
"""Configurations that stand on each other at most."""

MOST = 1000
"""Entries of a list at most."""

SECRET_NAME = re.compile(
    r"(api_?key|secret|passw(or)?d|credential|bearer|private_?key)|(^|_)(token|auth|key|pat)$", re.IGNORECASE
)
SECRET_TEXT = re.compile(
    r"\b(sk|pk|rk|ghp|gho|ghs|github_pat|xox[abp]|hf|glpat|AKIA|AIza|eyJ)[-_A-Za-z0-9.]{12,}"
    r"|\b[0-9a-fA-F]{32,}\b|://[^/\s]*@|[?&][^=\s]*(key|token|sig|secret)[^=\s]*=",
)


class OlderKey:
    """One key of an older configuration.

    Args:
        name: Its flat name: without the section, and as ``config.json`` spells it.
        shown: Its name as the file spells it.
        value: Its value.
    """

    def __init__(self, name: str, shown: str, value: JsonValue) -> None:
        self.name = name
        self.shown = shown
        self.value = value


class OlderConfig:
    """The keys of an older configuration by flat name, without those that hold secrets."""

    def __init__(self, keys: Mapping[str, OlderKey], dropped: tuple[str, ...]) -> None:
        self.keys = keys
        self.dropped = dropped


SECTIONS = {"train", "env", "model", "gradient", "optimizer", "evaluation"}
"""The sections of a YAML file; any other mapping is a value."""

FLAT = {
    "learning_rate": "edit_budget",
    "min_learning_rate": "min_edit_budget",
    "meta_learning_rate": "meta_edit_budget",
    "optimizer": "optimizer_model",
    "target": "target_model",
    "name": "env",
    "env_name": "env",
}
"""Keys whose flat name differs from that in YAML."""


def read_config(path: Path, remarks: Remarks) -> OlderConfig:
    """Read a configuration with all that it is based on.

    Raises:
        ConfigError: A file is missing or malformed, or bases go round in a circle.
    """
    return flattened(_read(path, remarks, ()), remarks)


def flattened(raw: Mapping[str, JsonValue], remarks: Remarks) -> OlderConfig:
    """Return the keys of a configuration, sections opened, without those that hold secrets."""
    keys: dict[str, OlderKey] = {}
    dropped: list[str] = []
    for section, value in raw.items():
        opened = isinstance(value, dict) and section in SECTIONS
        for key, below in value.items() if isinstance(value, dict) and opened else [(section, value)]:
            shown = f"{section}.{key}" if opened else section
            name = FLAT.get(key, key)
            if SECRET_NAME.search(name) or _holds_secret(below):
                dropped.append(shown)
                continue
            if name in keys:
                remarks.add(f"{keys[name].shown} and {shown} are the same key; the latter was taken.")
            keys[name] = OlderKey(name, shown, below)
    return OlderConfig(keys, tuple(dropped))


def _holds_secret(value: JsonValue) -> bool:
    if isinstance(value, str):
        return SECRET_TEXT.search(value) is not None
    if isinstance(value, list):
        return any(isinstance(entry, str) and SECRET_TEXT.search(entry) is not None for entry in value)
    return False


def _read(path: Path, remarks: Remarks, above: tuple[Path, ...]) -> dict[str, JsonValue]:
    if path.suffix not in {".yaml", ".yml", ".json"}:
        raise ConfigError(f"{path}: a configuration of the older tool ends in .yaml, .yml or .json")
    place = path.absolute()
    if len(above) >= DEEPEST or place.resolve() in above:
        raise ConfigError(f"{path}: {BASE} goes round in a circle, or more than {DEEPEST} files deep")
    try:
        folder = Folder(place.parent, remarks)
        if path.suffix == ".json":
            value: object = folder.need_value(place.name)
        else:
            value = yaml.safe_load(folder.need_text(place.name))
    except UsageError as error:
        raise ConfigError(str(error)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is malformed: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a mapping of sections at the top")
    raw = {str(key): _plain(below) for key, below in value.items()}
    base = raw.pop(BASE, None)
    if base is None:
        return raw
    if not isinstance(base, str) or Path(base).is_absolute():
        raise ConfigError(f"{path}: {BASE} must name one file, relative to this one")
    under = _read(place.parent / base, remarks, (*above, place.resolve()))
    return {name: _over(under.get(name), raw.get(name, under.get(name))) for name in {**under, **raw}}


def _over(base: JsonValue, own: JsonValue) -> JsonValue:
    return {**base, **own} if isinstance(base, dict) and isinstance(own, dict) else own


def _plain(value: object, depth: int = 0) -> JsonValue:
    """Return a value of a configuration; whatever a setting cannot be becomes an empty list."""
    if isinstance(value, dict) and depth == 0:
        return {str(key): _plain(below, 1) for key, below in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    entries = value if isinstance(value, list) else []
    return [entry for entry in entries[:MOST] if isinstance(entry, str | int | float)]
