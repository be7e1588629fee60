"""Files and values that nobody vouches for: bounded, inside their folder, decoded, and typed field by field.

What is odd but leaves the rest standing becomes a remark; what nothing can be made of is an error that
names the file.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from reflact.errors import UsageError

LARGEST = 64 * 1024 * 1024
"""Bytes of one file at most."""

BIGGEST = 10**12
"""Whole numbers beyond this are no counts."""

_SURROGATES = re.compile("[\ud800-\udfff]")


class Remarks:
    """What an import has to say of what it read, in order, each sentence once."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        """Take a sentence down."""
        self._lines.setdefault(line)

    @property
    def lines(self) -> tuple[str, ...]:
        """All sentences."""
        return tuple(self._lines)


class Folder:
    """Reads files below a folder and never leaves it, through links neither.

    Args:
        root: The folder.
        remarks: Where oddities are noted.
        largest: Bytes of one file at most.

    Raises:
        UsageError: There is no such folder.
    """

    def __init__(self, root: Path, remarks: Remarks, *, largest: int = LARGEST) -> None:
        try:
            self.root = root.resolve(strict=True)
        except (OSError, RuntimeError):
            raise UsageError(f"there is no folder {root}; name the folder of a run") from None
        self.remarks = remarks
        self._largest = largest

    def has(self, name: str) -> bool:
        """Whether there is anything under a name; says nothing of whether it can be read."""
        path = self.root / name
        return path.is_symlink() or path.exists()

    def names(self, name: str, pattern: re.Pattern[str]) -> tuple[str, ...]:
        """Return the names in a folder below this one that fit a pattern as a whole, sorted."""
        try:
            place = self._inside(name)
            found = [path.name for path in place.iterdir()] if place.is_dir() else []
        except (OSError, UsageError) as error:
            self.remarks.add(f"{name} cannot be listed: {_reason(error)}.")
            return ()
        return tuple(sorted(entry for entry in found if pattern.fullmatch(entry)))

    def need_text(self, name: str) -> str:
        """Return a file's text.

        Raises:
            UsageError: It is missing, too large, no text, or outside the folder.
        """
        text = self._text(name)
        if text is None:
            raise UsageError(f"there is no {name} in {self.root}; the rest makes no sense without it")
        return text

    def text(self, name: str) -> str | None:
        """Return a file's text; None where it is missing or, with a remark, cannot be read."""
        try:
            return self._text(name)
        except UsageError as error:
            self.remarks.add(f"{_reason(error)}; left out.")
            return None

    def need_value(self, name: str) -> JsonValue:
        """Return the value of a JSON file.

        Raises:
            UsageError: It is missing or malformed; names the file.
        """
        return self._parsed(name, self.need_text(name))

    def value(self, name: str) -> JsonValue:
        """Return the value of a JSON file; None where it is missing or, with a remark, cannot be read."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return self._parsed(name, text)
        except UsageError as error:
            self.remarks.add(f"{_reason(error)}; left out.")
            return None

    def object(self, name: str) -> Fields | None:
        """Return the object of a JSON file; None where there is none."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.remarks.add(f"{name} holds {_kind(value)} instead of an object; left out.")
            return None
        return Fields(value, name, self.remarks)

    def rows(self, name: str) -> tuple[Fields, ...]:
        """Return the objects of a file with one JSON object a line; lines that are none are remarked on."""
        rows = []
        for number, line in enumerate((self.text(name) or "").splitlines(), start=1):
            if not line.strip():
                continue
            where = f"{name} line {number}"
            try:
                value = self._parsed(where, line)
            except UsageError as error:
                self.remarks.add(f"{_reason(error)}; left out.")
                continue
            if isinstance(value, dict):
                rows.append(Fields(value, where, self.remarks))
            else:
                self.remarks.add(f"{where} holds {_kind(value)} instead of an object; left out.")
        return tuple(rows)

    def _inside(self, name: str) -> Path:
        try:
            place = (self.root / name).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"{name} cannot be followed: {error}") from None
        if not place.is_relative_to(self.root):
            raise UsageError(f"{name} leads out of {self.root}")
        return place

    def _text(self, name: str) -> str | None:
        place = self._inside(name)
        try:
            if not stat.S_ISREG(place.stat().st_mode):
                raise UsageError(f"{name} is not a file")
            with place.open("rb") as file:
                raw = file.read(self._largest + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror or error}") from None
        if len(raw) > self._largest:
            raise UsageError(f"{name} is larger than {self._largest} bytes")
        return self._decoded(name, raw)

    def _decoded(self, name: str, raw: bytes) -> str:
        wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        try:
            return raw.decode("utf-16" if wide else "utf-8-sig")
        except UnicodeDecodeError:
            pass
        try:
            text = raw.decode("cp1252")
        except UnicodeDecodeError:
            raise UsageError(f"{name} is text neither in UTF-8 nor in cp1252") from None
        self.remarks.add(f"{name} is not UTF-8 and was read as cp1252.")
        return text

    def _parsed(self, name: str, text: str) -> JsonValue:
        odd: set[str] = set()
        try:
            value = _clean(json.loads(text), odd)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name} is not JSON: {_first_line(error)}") from None
        for what in sorted(odd):
            self.remarks.add(f"{name} holds {what}.")
        return value


class Fields:
    """An object that nobody vouches for: a field of another type than asked for counts as absent.

    Args:
        value: The object.
        where: What to call it in remarks.
        remarks: Where fields of a wrong type are noted; their values never are.
    """

    def __init__(self, value: Mapping[str, JsonValue], where: str, remarks: Remarks) -> None:
        self._value = value
        self.where = where
        self.remarks = remarks

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def raw(self, name: str) -> JsonValue:
        """Return a field as it is; None where it is absent."""
        return self._value.get(name)

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self._value.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= BIGGEST:
            return float(value)
        self._wrong(name, "a number")
        return None

    def share(self, name: str) -> float | None:
        """Return a number in 0..1."""
        value = self.number(name)
        if value is None or 0 <= value <= 1:
            return value
        self._wrong(name, "a number in 0..1")
        return None

    def count(self, name: str) -> int | None:
        """Return a whole number from 0 on."""
        value = self.number(name)
        if value is None or (value >= 0 and value == int(value)):
            return None if value is None else int(value)
        self._wrong(name, "a whole number from 0 on")
        return None

    def text(self, name: str) -> str:
        """Return a text; empty where it is absent."""
        value = self._value.get(name)
        if isinstance(value, str):
            return value
        self._wrong(name, "text")
        return ""

    def flag(self, name: str) -> bool:
        """Return a truth value; False where it is absent."""
        value = self._value.get(name)
        if isinstance(value, bool):
            return value
        self._wrong(name, "true or false")
        return False

    def fields(self, name: str) -> Fields | None:
        """Return an object."""
        value = self._value.get(name)
        if isinstance(value, dict):
            return Fields(value, f"{self.where}: {name}", self.remarks)
        self._wrong(name, "an object")
        return None

    def values(self, name: str) -> tuple[JsonValue, ...]:
        """Return the values of a list; none where it is absent."""
        value = self._value.get(name)
        if isinstance(value, list):
            return tuple(value)
        self._wrong(name, "a list")
        return ()

    def objects(self, name: str) -> tuple[Fields, ...]:
        """Return the objects of a list; what is none is remarked on."""
        found = []
        for number, value in enumerate(self.values(name)):
            where = f"{self.where}: {name} {number}"
            if isinstance(value, dict):
                found.append(Fields(value, where, self.remarks))
            else:
                self.remarks.add(f"{where} is {_kind(value)} instead of an object; left out.")
        return tuple(found)

    def called(self, where: str) -> Fields:
        """Return the same object under another name for remarks."""
        return Fields(self._value, where, self.remarks)

    def _wrong(self, name: str, wanted: str) -> None:
        if self._value.get(name) is not None:
            self.remarks.add(f"{self.where}: {name} is not {wanted}; read as absent.")


def _clean(value: JsonValue, odd: set[str]) -> JsonValue:
    if isinstance(value, dict):
        return {str(_clean(k, odd)): _clean(v, odd) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v, odd) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        odd.add("numbers that are NaN or infinite; they were read as absent")
        return None
    if isinstance(value, str) and _SURROGATES.search(value):
        odd.add("half surrogate pairs; they were replaced")
        return _SURROGATES.sub("\ufffd", value)
    return value


def _kind(value: JsonValue) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _first_line(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
