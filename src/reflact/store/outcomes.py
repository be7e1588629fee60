"""The journal: what has been seen is stored, and what is stored is not done again.

An outcome has a kind, a key, and a run if it belongs to one alone. The first outcome under a key
stays. Each has a checksum, since SQLite does not check contents; a damaged outcome is an error.

============ ===================================== ==========================================
kind         key                                   value
============ ===================================== ==========================================
``response`` content key of a request              ``StoredResponse``, for all runs
``rollout``  content key of a rollout              ``Rollout``, for all runs
``skill``    hash of a document                    its text, for all runs
``data``     fingerprint of a data set             ``DataSet`` without rows, for all runs
``decision`` step and label, such as ``3/note/2``  what a decision of the run used, as JSON
``event``    id of a durable event                 ``Event`` without its time
``failure``  where the caller's code failed        ``CodeFailure``
============ ===================================== ==========================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from pydantic import JsonValue, TypeAdapter

from reflact.errors import StoreError
from reflact.jsonutil import parse_stored
from reflact.protocols import DecisionLog
from reflact.store.database import Database, Tables
from reflact.types import canonical_json

T = TypeVar("T")

Kind = Literal["response", "rollout", "skill", "data", "decision", "event", "failure"]

JSON_ADAPTER: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
SELECT = "SELECT key, value, checksum FROM outcomes WHERE kind = ? AND run_id = ?"
AMONG = "(SELECT value FROM json_each(?))"


def compute_checksum(*parts: object) -> str:
    """Return a checksum of a row's values, as 16 hexadecimal digits."""
    text = "\0".join("\1" if part is None else str(part) for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def parse_checked(validate: Callable[[str], T], text: str, what: str, *, valid: bool) -> T:
    """Return the value of a stored text; StoreError if it is not valid or damaged."""
    value = parse_stored(validate, text, what)
    if not valid:
        raise StoreError(
            f"the stored {what} does not match its checksum, so the database is damaged; put back "
            "a copy of it, or choose another out_dir"
        )
    return value


def insert_outcome(
    tables: Tables, kind: Kind, key: str, value: str, run_id: str = "", *, replaces: bool = False
) -> bool:
    """Store an outcome unless its key has one, which ``replaces`` removes; whether it is new."""
    row = (kind, run_id, key, value)
    verb = "REPLACE" if replaces else "IGNORE"
    sql = (
        f"INSERT OR {verb} INTO outcomes (kind, run_id, key, value, checksum)"  # noqa: S608 - a constant
        " VALUES (?, ?, ?, ?, ?)"
    )
    return tables.execute(sql, (*row, compute_checksum(*row))).rowcount == 1


class OutcomeStore:
    """The journal of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find_outcomes(
        self, kind: Kind, keys: Sequence[str], validate: Callable[[str], T], run_id: str = ""
    ) -> dict[str, T]:
        """Return the values under those of the keys that have one, in the order of the keys."""
        condition = "key = ?"
        value = keys[0] if keys else ""
        if len(keys) > 1:
            condition = f"key IN {AMONG}"
            value = json.dumps(list(keys))
        found = await self._select(kind, validate, run_id, condition, value)
        return {key: found[key] for key in keys if key in found}

    async def list_outcomes(
        self, kind: Kind, validate: Callable[[str], T], run_id: str = "", *, pattern: str = "%"
    ) -> dict[str, T]:
        """Return the values under the keys that are LIKE a pattern, in the order of storing."""
        return await self._select(kind, validate, run_id, "key LIKE ?", pattern)

    async def put_outcome(
        self, kind: Kind, key: str, value: str, run_id: str = "", *, replaces: bool = False
    ) -> bool:
        """Store an outcome; see ``insert_outcome``. It is on disk when this returns."""
        return await self._database.write(
            lambda tables: insert_outcome(tables, kind, key, value, run_id, replaces=replaces)
        )

    def decision_log(self, run_id: str) -> SQLiteDecisionLog:
        """Return the run's decision log."""
        return SQLiteDecisionLog(self._database, run_id)

    async def _select(
        self, kind: Kind, validate: Callable[[str], T], run_id: str, condition: str, value: str
    ) -> dict[str, T]:
        sql = f"{SELECT} AND {condition} ORDER BY rowid"
        outcomes = {}
        for key, text, checksum in await self._database.fetch_rows(sql, (kind, run_id, value)):
            what = f"{kind} {key} of run {run_id}" if run_id else f"{kind} {key}"
            valid = checksum == compute_checksum(kind, run_id, key, text)
            outcomes[key] = parse_checked(validate, text, what, valid=valid)
        return outcomes


class SQLiteDecisionLog(DecisionLog):
    """The decision log of one run, on a database."""

    def __init__(self, database: Database, run_id: str) -> None:
        self._outcomes = OutcomeStore(database)
        self._run_id = run_id

    async def get(self, step: int, label: str) -> JsonValue:
        """Return the stored outcome, or None."""
        return (await self.find(step, [label])).get(label)

    async def find(self, step: int, labels: Sequence[str]) -> Mapping[str, JsonValue]:
        """Return the stored outcomes among those of the labels."""
        keys = [f"{step}/{label}" for label in labels]
        found = await self._outcomes.find_outcomes(
            "decision", keys, JSON_ADAPTER.validate_json, self._run_id
        )
        return {key.partition("/")[2]: value for key, value in found.items()}

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        """Store an outcome before its first use; the first one under a label stays."""
        key = f"{step}/{label}"
        await self._outcomes.put_outcome("decision", key, canonical_json(value), self._run_id)
