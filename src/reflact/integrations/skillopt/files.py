"""Reads files of SkillOpt: configurations with their bases, and skill documents.

Nobody vouches for these files. Their size is bounded, links must stay in their folder, and values that look
like secrets are left out.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import JsonValue

from reflact.errors import ConfigError, SkillError, UsageError
from reflact.skills.document import check_document, find_regions
from reflact.types import FrozenModel, Skill

BASE_KEY = "_base_"
MAX_FILE_BYTES = 64 * 1024 * 1024
"""Bytes of one file at most."""

MAX_BASE_DEPTH = 10
"""Configurations that build on each other at most."""

MAX_LIST_ENTRIES = 1000
"""Entries of a list at most."""

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


class SkillOptKey(FrozenModel):
    """One key of a SkillOpt configuration.

    Args:
        name: Its flat name, without the section.
        shown: Its name as the file spells it.
        value: Its value.
    """

    name: str
    spelling: str
    value: JsonValue


class SkillOptConfig(FrozenModel):
    """A SkillOpt configuration.

    Args:
        keys: Its keys by flat name, without those that hold secrets.
        dropped: The names of keys that hold secrets.
        remarks: What the user should know about the files.
    """

    keys: Mapping[str, SkillOptKey]
    omitted_secrets: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class SkillOptDocument(FrozenModel):
    """A skill document of SkillOpt, and what the user should know about it."""

    skill: Skill
    remarks: tuple[str, ...] = ()


def read_config(path: Path) -> SkillOptConfig:
    """Read a configuration and every configuration that it builds on.

    A key of the file replaces the same key of its base, whether it stands in a section or not.

    Raises:
        ConfigError: A file is missing or malformed, or bases form a circle.
    """
    return _read_layers(path, ())


def read_document(path: Path) -> SkillOptDocument:
    """Read a skill document; line breaks become those of Unix.

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
    kept = [named[region.name] for region in find_regions(text) if region.name in named]
    if kept:
        remarks = (*remarks, f"The protected regions stay as they are: {' and '.join(kept)}.")
    return SkillOptDocument(skill=Skill(text=text), remarks=remarks)


def flatten_keys(raw: Mapping[str, object]) -> SkillOptConfig:
    """Return the keys of one file under their flat names, without those that hold secrets.

    If a key stands both in a section and outside of any, the section decides.
    """
    keys: dict[str, SkillOptKey] = {}
    dropped: list[str] = []
    remarks: list[str] = []
    for section, key, value in sorted(_list_keys(raw), key=lambda entry: bool(entry[0])):
        shown = f"{section}.{key}" if section else key
        name = FLAT_NAMES.get(key, key)
        if SECRET_NAME.search(name) or _contains_secret(value):
            dropped.append(shown)
            continue
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not is_finite:
            remarks.append(f"{shown} is not a finite number; it counts as absent.")
        if name in keys:
            remarks.append(f"{keys[name].spelling} and {shown} are the same key; {shown} was used.")
        keys[name] = SkillOptKey(name=name, spelling=shown, value=value if is_finite else None)
    return SkillOptConfig(keys=keys, omitted_secrets=tuple(dropped), remarks=tuple(remarks))


def _list_keys(raw: Mapping[str, object]) -> list[tuple[str, str, JsonValue]]:
    entries: list[tuple[str, str, JsonValue]] = []
    for key, value in raw.items():
        if isinstance(value, dict) and key in SECTIONS:
            entries.extend((key, str(name), _simplify(below)) for name, below in value.items())
        else:
            entries.append(("", str(key), _simplify(value)))
    return entries


def _contains_secret(value: JsonValue) -> bool:
    if isinstance(value, str):
        return SECRET_TEXT.search(value) is not None
    if isinstance(value, list):
        return any(isinstance(entry, str) and SECRET_TEXT.search(entry) is not None for entry in value)
    return False


def _read_layers(path: Path, above: tuple[Path, ...]) -> SkillOptConfig:
    if path.suffix not in {".yaml", ".yml", ".json"}:
        raise ConfigError(f"{path}: a configuration of SkillOpt ends in .yaml, .yml or .json")
    place = path.absolute()
    if len(above) >= MAX_BASE_DEPTH or place.resolve() in above:
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
    own = own.model_copy(update={"remarks": (*remarks, *own.remarks)})
    if base is None:
        return own
    if not isinstance(base, str) or Path(base).is_absolute():
        raise ConfigError(f"{path}: {BASE_KEY} must name one file, relative to this one")
    under = _read_layers(place.parent / base, (*above, place.resolve()))
    return SkillOptConfig(
        keys={**under.keys, **own.keys},
        omitted_secrets=tuple(dict.fromkeys((*under.omitted_secrets, *own.omitted_secrets))),
        remarks=(*under.remarks, *own.remarks),
    )


def _simplify(value: object) -> JsonValue:
    """Return a value of a configuration; a value that no setting can have becomes an empty list."""
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    entries = value if isinstance(value, list) else []
    return [
        entry
        for entry in entries[:MAX_LIST_ENTRIES]
        if isinstance(entry, str | int) or (isinstance(entry, float) and math.isfinite(entry))
    ]


def _read_text(path: Path) -> tuple[str, tuple[str, ...]]:
    try:
        place = path.resolve()
        if not place.is_relative_to(path.parent.resolve()):
            raise UsageError(f"{path} is a link that leads out of its folder")
        if not stat.S_ISREG(place.stat().st_mode):
            raise UsageError(f"{path} is not a file")
        with place.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return raw.decode("utf-16" if wide else "utf-8-sig"), ()
    except UnicodeDecodeError:
        pass
    try:
        return raw.decode("cp1252"), (f"{path.name} is not UTF-8; it was read as cp1252.",)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is text neither in UTF-8 nor in cp1252") from None
