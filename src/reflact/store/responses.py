"""Stored outcomes by key, and the ledger of calls.

What has been seen is stored, and what is stored is not done again: responses and rollouts by
content key, for all runs of a store, and the other outcomes that decisions of a run used, by step
and label. Each has a checksum, since SQLite does not check contents; a damaged outcome is an error.

A row of the ledger is one call. It is *open* from its reservation until its cost is known, then
*settled*. An open call becomes *unsettled* when the run is started again. Open and unsettled calls
count at their worst case. The ledger names the run that paid.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import JsonValue, TypeAdapter

from reflact.errors import StoreError
from reflact.jsonutil import parse_stored
from reflact.messages import CallReservation, StoredResponse
from reflact.protocols import DecisionLog
from reflact.records import FaultCount, FaultKind, Reuse, Spend, Usage
from reflact.store.database import Database, Tables
from reflact.types import Rollout, canonical_json

T = TypeVar("T")

JSON_ADAPTER: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
NEWEST_OPEN_CALL = "(SELECT max(id) FROM calls WHERE run_id = ? AND key = ? AND state = 'open')"

SPEND_SUMS = """
    sum(state <> 'settled'),
    sum(calls), sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(uncounted),
    sum(iif(state <> 'settled', worst_calls, 0)),
    sum(iif(state <> 'settled' OR uncounted > 0, worst_input_tokens, 0)),
    sum(iif(state <> 'settled' OR uncounted > 0, worst_output_tokens, 0))
"""

# The columns by which spend is summed: over a run, and by stage.
SPEND_COLUMNS = "role, purpose"
STAGE_COLUMNS = "step, stage, role, purpose"
USAGE_COLUMNS = ("calls", "input_tokens", "cached_tokens", "output_tokens", "usd", "uncounted")
CALL_FIELDS = tuple(name for name in CallReservation.model_fields if name != "worst_case")
WORST_FIELDS = ("calls", "input_tokens", "output_tokens", "usd")
CALL_COLUMNS = (*CALL_FIELDS, *(f"worst_{name}" for name in WORST_FIELDS))
CALL_VALUES = (
    f"INTO calls ({', '.join(CALL_COLUMNS)}) VALUES ({', '.join('?' * len(CALL_COLUMNS))})"
)
SETTLE_CALL = (
    f"UPDATE calls SET state = 'settled', {', '.join(f'{name} = ?' for name in USAGE_COLUMNS)}"  # noqa: S608
)
ROLLOUT_CALLS_QUERY = (
    f"SELECT call_id, {', '.join(USAGE_COLUMNS)} FROM calls"  # noqa: S608 - constants
    " WHERE call_id LIKE '%/rollout=%' ORDER BY id"
)

# Calls with a price, and those whose worst case may have been charged.
PAID = "usd IS NOT NULL"
UNSETTLED = "worst_usd IS NOT NULL AND (state <> 'settled' OR uncounted > 0)"

# Raises an error if a call with its worst case does not fit beside the spend so far.
CheckCall = Callable[[tuple[Spend, ...], Usage], None]


def compute_checksum(*parts: object) -> str:
    """Return a checksum of a row's key and texts, as 16 hexadecimal digits."""
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


class SQLiteResponseStore:
    """Implements ``protocols.ResponseStore`` and ``protocols.RolloutStore`` on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._n_rollouts_reused = self._n_replies_reused = 0
        self._check_call: CheckCall | None = None

    @property
    def reuse(self) -> Reuse:
        """Number of stored responses and rollouts that were found since the store was opened."""
        return Reuse(rollouts=self._n_rollouts_reused, replies=self._n_replies_reused)

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return the response under a key, or None."""
        sql = "SELECT response, checksum FROM responses WHERE key = ?"
        for text, checksum in await self._database.fetch_rows(sql, (key,)):
            self._n_replies_reused += 1
            return _parse_outcome(
                StoredResponse.model_validate_json, "response", key, text, checksum
            )
        return None

    async def reserve(self, reservation: CallReservation) -> None:
        """Add an open call to the ledger before it is sent; on disk when this returns."""

        def insert(tables: Tables) -> None:
            if self._check_call is not None:
                self._check_call(_sum_spend(tables, reservation.run_id), reservation.worst_case)
            _insert_call(tables, reservation)

        await self._database.write(insert)

    def check_calls(self, check: CheckCall) -> None:
        """Let a function refuse calls by what all connections have spent and reserved."""
        self._check_call = check

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store a response, unless its key has one, and settle its call in one transaction."""
        text = response.model_dump_json()
        row = (response.key, reservation.run_id, text, compute_checksum(response.key, text))

        def store(tables: Tables) -> None:
            _settle(tables, reservation, response.usage)
            tables.execute(
                "INSERT OR IGNORE INTO responses (key, run_id, response, checksum) VALUES (?, ?, "
                "?, ?)",
                row,
            )

        await self._database.write(store)

    async def forget_responses(self, keys: Sequence[str]) -> None:
        """Remove the responses under some keys; what they cost stays in the ledger."""
        sql = "DELETE FROM responses WHERE key IN (SELECT value FROM json_each(?))"
        await self._database.execute(sql, (json.dumps(list(keys)),))

    async def release(self, reservation: CallReservation) -> None:
        """Remove an open call that cost nothing."""
        sql = f"DELETE FROM calls WHERE id = {NEWEST_OPEN_CALL}"  # noqa: S608 - a constant
        await self._database.execute(sql, (reservation.run_id, reservation.key))

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        """Count a failed attempt of a run's call; on disk when this returns."""
        await self._database.execute(
            "INSERT INTO faults (run_id, kind, count) VALUES (?, ?, 1)"
            " ON CONFLICT (run_id, kind) DO UPDATE SET count = count + 1",
            (run_id, kind),
        )

    async def faults(self, run_id: str) -> tuple[FaultCount, ...]:
        """Return how often attempts failed, over all starts of the run, sorted by kind."""
        rows = await self._database.fetch_rows(
            "SELECT kind, count FROM faults WHERE run_id = ? ORDER BY kind", (run_id,)
        )
        return tuple(FaultCount(kind=kind, count=count) for kind, count in rows)

    async def find_rollouts(self, keys: Sequence[str]) -> Mapping[str, Rollout]:
        """Return the stored rollouts among the keys, in their order."""
        sql = (
            "SELECT key, rollout, checksum FROM rollouts WHERE key IN (SELECT value FROM "
            "json_each(?))"
        )
        rows = await self._database.fetch_rows(sql, (json.dumps(list(keys)),))
        found = {
            row[0]: _parse_outcome(Rollout.model_validate_json, "rollout", *row) for row in rows
        }
        self._n_rollouts_reused += len(found)
        return {key: found[key] for key in keys if key in found}

    async def list_rollouts(self, skill_hashes: Sequence[str]) -> tuple[Rollout, ...]:
        """Return the stored rollouts of all runs under some documents, in the order of storing."""
        sql = (
            "SELECT key, rollout, checksum FROM rollouts WHERE json_extract(rollout, "
            "'$.skill_hash') IN (SELECT value FROM json_each(?)) ORDER BY rowid"
        )
        rows = await self._database.fetch_rows(sql, (json.dumps(list(skill_hashes)),))
        return tuple(_parse_outcome(Rollout.model_validate_json, "rollout", *row) for row in rows)

    async def latest_rollouts(self, count: int) -> tuple[Rollout, ...]:
        """Return the rollouts that were stored last, of any run, the newest first."""
        sql = "SELECT key, rollout, checksum FROM rollouts ORDER BY rowid DESC LIMIT ?"
        rows = await self._database.fetch_rows(sql, (count,))
        return tuple(_parse_outcome(Rollout.model_validate_json, "rollout", *row) for row in rows)

    async def rollout_usage(self) -> Mapping[str, Usage]:
        """Return the usage of the calls that were made for each rollout, by its key."""
        rows = await self._database.fetch_rows(ROLLOUT_CALLS_QUERY)
        usage: dict[str, Usage] = {}
        for call_id, *counts in rows:
            key = call_id.partition("/rollout=")[2].partition("/")[0]
            used = Usage(**dict(zip(USAGE_COLUMNS, counts, strict=True)))
            usage[key] = usage[key] + used if key in usage else used
        return usage

    async def unmeasured(self, run_id: str) -> Mapping[str, str]:
        """Return the error of each rollout of a run that could not be measured, by its key."""
        sql = (
            "SELECT label, value FROM decision_log WHERE run_id = ? AND label LIKE "
            "'unmeasured/%' ORDER BY rowid"
        )
        rows = await self._database.fetch_rows(sql, (run_id,))
        return {
            label.partition("/")[2]: str(JSON_ADAPTER.validate_json(value)) for label, value in rows
        }

    async def store_rollout(self, rollout: Rollout) -> None:
        """Store a measured rollout, unless its key has one; StoreError if it is unmeasured."""
        if rollout.score is None:
            raise StoreError(
                f"rollout {rollout.key} was not measured ({rollout.error}) and cannot be stored"
            )
        text = rollout.model_dump_json()
        await self._database.execute(
            "INSERT OR IGNORE INTO rollouts (key, rollout, checksum) VALUES (?, ?, ?)",
            (rollout.key, text, compute_checksum(rollout.key, text)),
        )

    async def count_replies(self, run_id: str, role: str) -> tuple[int, int]:
        """Return how many replies of a role a run has paid, and how many of them were asked for
        because the one before was invalid.
        """
        ((replies, asked_again),) = await self._database.fetch_rows(
            "SELECT count(DISTINCT call_id),"
            " count(DISTINCT iif(call_id LIKE '%/attempt=0', NULL, call_id))"
            " FROM calls WHERE run_id = ? AND role = ? AND state = 'settled'",
            (run_id, role),
        )
        return replies, asked_again

    async def answered_calls(self) -> frozenset[str]:
        """Return the ids of all calls of all runs that have a stored response."""
        rows = await self._database.fetch_rows(
            "SELECT DISTINCT call_id FROM calls JOIN responses USING (key)"
        )
        return frozenset(call_id for (call_id,) in rows)

    async def spend(self, run_id: str) -> tuple[Spend, ...]:
        """Return the run's spending by role and purpose, sorted, whatever the order of answers."""
        return await self._database.read(lambda tables: _sum_spend(tables, run_id))


class SQLiteDecisionLog(DecisionLog):
    """The decision log of one run, on a database."""

    def __init__(self, database: Database, run_id: str) -> None:
        self._database = database
        self._run_id = run_id

    async def get(self, step: int, label: str) -> JsonValue:
        """Return the stored outcome, or None."""
        return (await self.find(step, [label])).get(label)

    async def find(self, step: int, labels: Sequence[str]) -> Mapping[str, JsonValue]:
        """Return the stored outcomes among those of the labels."""
        rows = await self._database.fetch_rows(
            "SELECT label, value, checksum FROM decision_log"
            " WHERE run_id = ? AND step = ? AND label IN (SELECT value FROM json_each(?))",
            (self._run_id, step, json.dumps(list(labels))),
        )
        return {
            label: parse_checked(
                JSON_ADAPTER.validate_json,
                text,
                self._describe(step, label),
                valid=checksum == compute_checksum(self._run_id, step, label, text),
            )
            for label, text, checksum in rows
        }

    async def put(self, step: int, label: str, value: JsonValue) -> None:
        """Store an outcome before its first use; the first one under a label stays."""
        row = (self._run_id, step, label, canonical_json(value))
        await self._database.execute(
            "INSERT OR IGNORE INTO decision_log (run_id, step, label, value, checksum) VALUES (?, "
            "?, ?, ?, ?)",
            (*row, compute_checksum(*row)),
        )

    def _describe(self, step: int, label: str) -> str:
        return f"outcome {label} of step {step} of run {self._run_id}"


def mark_unsettled(tables: Tables, run_id: str) -> None:
    """Mark the open calls of a run as unsettled; only the process that owns the run may do so."""
    tables.execute(
        "UPDATE calls SET state = 'unsettled' WHERE run_id = ? AND state = 'open'", (run_id,)
    )


def _parse_outcome(
    validate: Callable[[str], T], what: str, key: str, text: str, checksum: str
) -> T:
    return parse_checked(
        validate, text, f"{what} {key}", valid=checksum == compute_checksum(key, text)
    )


def _insert_call(tables: Tables, reservation: CallReservation) -> int:
    values = [getattr(reservation, name) for name in CALL_FIELDS]
    values += [getattr(reservation.worst_case, name) for name in WORST_FIELDS]
    return tables.execute(f"INSERT {CALL_VALUES}", values).lastrowid or 0


def _settle(tables: Tables, reservation: CallReservation, usage: Usage) -> None:
    counts = [getattr(usage, name) for name in USAGE_COLUMNS]
    key = (reservation.run_id, reservation.key)
    if not tables.execute(f"{SETTLE_CALL} WHERE id = {NEWEST_OPEN_CALL}", [*counts, *key]).rowcount:
        call_id = _insert_call(tables, reservation)
        tables.execute(f"{SETTLE_CALL} WHERE id = ?", [*counts, call_id])


def sum_spend_by_stage(tables: Tables, run_id: str) -> dict[tuple[int, str], tuple[Spend, ...]]:
    """Return the run's spend by step and stage, each sorted by role and purpose."""
    spend: dict[tuple[int, str], tuple[Spend, ...]] = {}
    for (step, stage, *_), entry in _sum_groups(tables, run_id, STAGE_COLUMNS):
        spend[step, stage] = (*spend.get((step, stage), ()), entry)
    return spend


def _sum_spend(tables: Tables, run_id: str) -> tuple[Spend, ...]:
    return tuple(entry for _, entry in _sum_groups(tables, run_id, SPEND_COLUMNS))


def _sum_groups(
    tables: Tables, run_id: str, columns: str
) -> Iterator[tuple[tuple[Any, ...], Spend]]:
    """Yield the spend of each group of calls; its last two columns are role and purpose."""
    usd = _sum_prices(tables, run_id, columns, "usd", PAID)
    worst_usd = _sum_prices(tables, run_id, columns, "worst_usd", UNSETTLED)
    names = ("calls", "input_tokens", "cached_tokens", "output_tokens", "uncounted")
    worst_names = ("calls", "input_tokens", "output_tokens")
    sql = (
        f"SELECT {columns}, {SPEND_SUMS} FROM calls WHERE run_id = ?"  # noqa: S608 - constants
        f" GROUP BY {columns} ORDER BY {columns}"
    )
    for row in tables.execute(sql, (run_id,)).fetchall():
        size = len(columns.split(", "))
        group = row[:size]
        unsettled, *sums = row[size:]
        usage = Usage(**dict(zip(names, sums[:5], strict=True)), usd=usd.get(group))
        worst = Usage(**dict(zip(worst_names, sums[5:], strict=True)), usd=worst_usd.get(group))
        role, purpose = group[-2:]
        yield (
            group,
            Spend(role=role, purpose=purpose, usage=usage, unsettled=unsettled, worst_case=worst),
        )


def _sum_prices(
    tables: Tables, run_id: str, columns: str, price: str, condition: str
) -> dict[tuple[Any, ...], float]:
    """Return sums of prices by group, exact in any order."""
    prices: dict[tuple[Any, ...], list[float]] = {}
    sql = f"SELECT {columns}, {price} FROM calls WHERE run_id = ? AND {condition}"  # noqa: S608 - constants
    for *group, usd in tables.execute(sql, (run_id,)):
        prices.setdefault(tuple(group), []).append(usd)
    return {group: math.fsum(values) for group, values in prices.items()}
