"""Errors of the store with what to do: those of SQLite and its driver, and runs of another
identity.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue, ValidationError

from reflact.errors import DataError, RunConflict, StoreError
from reflact.jsonutil import describe_problems, list_field_differences
from reflact.text import shorten
from reflact.types import canonical_json

SQLITE_REASONS: Mapping[int, str] = {
    sqlite3.SQLITE_BUSY: "another process kept it locked; end that process or try again",
    sqlite3.SQLITE_LOCKED: "another process kept it locked; end that process or try again",
    sqlite3.SQLITE_READONLY: "it or its folder is read-only; make them writable or name another "
    "place",
    sqlite3.SQLITE_PERM: "it may not be opened; check the permissions of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that its folder exists and is writable",
    sqlite3.SQLITE_FULL: "the disk is full; free some space and start again; stored data is kept",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write, or a limit on the size of files was "
    "reached; fix that and start again; stored data is kept",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; put back a copy of it or name another place",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database; name another, or a new one",
    sqlite3.SQLITE_CONSTRAINT: "a value contradicts what is stored",
}

# How to undo a change of what is part of a run's identity and no key of the configuration.
RESTORE_ADVICE = {
    "data": "restore the items of the data",
    "environment": "use the same environment and grader, with the same code and values",
    "skill": "restore the initial skill document",
    "target": "pass the same target",
    "optimizer": "pass the same optimizer",
    "annotator": "pass the same annotator",
    "proposer": "pass the same proposer",
}

PROMPT_ADVICE = (
    "use the same prompts (a new version of reflact, preset or prompts.folder has changed them)"
)

# Values in a conflict: their number and their length.
MAX_SHOWN_DIFFERENCES = 5
MAX_SHOWN_CHARS = 60
# Errors of the driver for values that SQLite cannot store.
UNSTORABLE_ERRORS = (UnicodeEncodeError, OverflowError)


def translate_error(error: BaseException, path: Path) -> BaseException:
    """Return reflact's error for an error of SQLite or its driver; others that a future can hold
    are unchanged.
    """
    if isinstance(error, UnicodeEncodeError):
        return DataError(
            f"{error.object!a} holds half of a surrogate pair, which cannot be stored; remove it"
        )
    if isinstance(error, OverflowError):
        return DataError(
            "a whole number has more than 64 bits and cannot be stored; give a smaller one"
        )
    # These errors quote what is damaged.
    if isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.Error) and str(error).startswith("Could not decode")
    ):
        return StoreError(
            f"database {path}: {SQLITE_REASONS[sqlite3.SQLITE_CORRUPT]} (a text is not UTF-8)"
        )
    if isinstance(error, ValidationError | json.JSONDecodeError):
        problem = describe_problems(error) if isinstance(error, ValidationError) else error
        return StoreError(f"database {path}: {SQLITE_REASONS[sqlite3.SQLITE_CORRUPT]} ({problem})")
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0)  # errors of the driver have none
        reason = SQLITE_REASONS.get(code & 0xFF)
        problem = f"{reason} ({error})" if reason else str(error)
        refusal = StoreError(f"database {path}: {problem}")
        refusal.__cause__ = error
        return refusal
    return error


def build_conflict(run_id: str, path: Path, differences: Sequence[str]) -> RunConflict:
    """Return the error for a folder that contains a run with another identity."""
    keys = {difference.partition(" ")[0] for difference in differences}
    prompts = {key for key in keys if key.startswith("prompts.")}
    settings = keys - RESTORE_ADVICE.keys() - prompts
    advice = [words for key, words in RESTORE_ADVICE.items() if key in keys]
    if prompts:
        advice.append(PROMPT_ADVICE)
    if settings:
        advice.append(f"put the old value of {', '.join(sorted(settings))} back")
    shown = list(differences[:MAX_SHOWN_DIFFERENCES])
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    return RunConflict(
        f"run {run_id} in {path} differs from this one: {'; '.join(shown)}; to resume it, "
        f"{' and '.join(advice)}; to start another run, choose another out_dir, or set fork: true "
        "(--fork)"
    )


def describe_changes(before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]) -> list[str]:
    """Return a phrase for each difference of two identities; a setting says more than the identity
    of its object.
    """
    keys = sorted({*before, *after}, key=lambda key: (key in RESTORE_ADVICE, key))
    changed = [key for key in keys if _write(before, key) != _write(after, key)]
    explained = {key.partition(".")[0] for key in changed if "." in key}
    phrases = list[str]()
    for key in changed:
        fields = list_field_differences([before.get(key), after.get(key)])
        if key in explained and (fields or key == "data"):
            continue
        for name, pair in fields.items():
            phrases.append(_describe_change(f"{key} ({name})", *map(canonical_json, pair)))
        if not fields:
            phrases.append(_describe_change(key, _write(before, key), _write(after, key)))
    return phrases


def _write(identity: Mapping[str, JsonValue], key: str) -> str:
    return canonical_json(identity[key]) if key in identity else "absent"


def _describe_change(name: str, was: str, now: str) -> str:
    """Return what was and what is now, but for hashes."""
    if all(re.fullmatch('"[0-9a-f]{64}"', text) for text in (was, now)):
        return f"{name} has changed"
    return f"{name} was {shorten(was, MAX_SHOWN_CHARS)} and is now {shorten(now, MAX_SHOWN_CHARS)}"
