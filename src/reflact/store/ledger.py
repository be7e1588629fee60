"""The ledger of calls: what each run reserved and paid.

A row is one call. It is *open* from its reservation until its cost is known, then *settled*. An
open call becomes *unsettled* when the run is started again. Open and unsettled calls count at their
worst case. Money is in whole billionths of a dollar, so its sums are exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reflact.messages import CallReservation, StoredResponse
from reflact.records import BILLION, FaultCount, FaultKind, Spend, StageCost, Usage
from reflact.store.database import Database, Tables
from reflact.store.outcomes import AMONG, OutcomeStore, insert_outcome

USAGE_COLUMNS = ("calls", "input_tokens", "cached_tokens", "output_tokens", "uncounted")
CALL_COLUMNS = ("key", "run_id", "call_id", "role", "purpose", "endpoint", "model", "step", "stage")
WORST_COLUMNS = ("calls", "input_tokens", "output_tokens", "billionths")

INSERT_CALL = (
    f"INSERT INTO calls ({', '.join(CALL_COLUMNS)},"  # noqa: S608 - constants
    f" {', '.join(f'worst_{name}' for name in WORST_COLUMNS)})"
    f" VALUES ({', '.join('?' * len([*CALL_COLUMNS, *WORST_COLUMNS]))})"
)
SETTLE_CALL = (
    f"UPDATE calls SET state = 'settled', {' = ?, '.join(USAGE_COLUMNS)} = ?,"  # noqa: S608 - constants
    " billionths = ? WHERE id ="
)
NEWEST_OPEN_CALL = "(SELECT max(id) FROM calls WHERE run_id = ? AND key = ? AND state = 'open')"

# The sums of a group of calls. The cost of an open call is unknown, and in part that of an
# uncounted one.
SUMS = """
    sum(calls), sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(uncounted),
    sum(billionths),
    sum(state <> 'settled'),
    sum(iif(state <> 'settled', worst_calls, 0)),
    sum(iif(state <> 'settled' OR uncounted > 0, worst_input_tokens, 0)),
    sum(iif(state <> 'settled' OR uncounted > 0, worst_output_tokens, 0)),
    sum(iif(state <> 'settled' OR uncounted > 0, worst_billionths, NULL))
"""

# Raises an error if a call with its worst case does not fit beside the spend so far.
CheckCall = Callable[[tuple[Spend, ...], Usage], None]


class Ledger(OutcomeStore):
    """Implements ``protocols.ResponseStore``, and knows what was spent."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._n_replies_reused = 0
        self._check_call: CheckCall | None = None

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return the response under a key, or None."""
        found = await self.find_outcomes("response", [key], StoredResponse.model_validate_json)
        self._n_replies_reused += len(found)
        return found.get(key)

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
        usage = response.usage
        counts = [*(getattr(usage, name) for name in USAGE_COLUMNS), usage.billionths]

        def store(tables: Tables) -> None:
            sql = f"{SETTLE_CALL} {NEWEST_OPEN_CALL}"
            if not tables.execute(sql, (*counts, reservation.run_id, reservation.key)).rowcount:
                tables.execute(f"{SETTLE_CALL} ?", (*counts, _insert_call(tables, reservation)))
            insert_outcome(tables, "response", response.key, text)

        await self._database.write(store)

    async def forget_responses(self, keys: Sequence[str]) -> None:
        """Remove the responses under some keys; what they cost stays in the ledger."""
        among = f"kind = 'response' AND run_id = '' AND key IN {AMONG}"
        await self._database.execute(
            f"DELETE FROM outcomes WHERE {among}",  # noqa: S608 - constants
            (json.dumps(list(keys)),),
        )

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
        sql = "SELECT kind, count FROM faults WHERE run_id = ? ORDER BY kind"
        rows = await self._database.fetch_rows(sql, (run_id,))
        return tuple(FaultCount(kind=kind, count=count) for kind, count in rows)

    async def rollout_usage(self) -> Mapping[str, Usage]:
        """Return the usage of the calls that were made for each rollout, by its key."""
        sql = (
            f"SELECT call_id, {', '.join(USAGE_COLUMNS)}, billionths FROM calls"  # noqa: S608 - constants
            " WHERE call_id LIKE '%/rollout=%' ORDER BY id"
        )
        usage: dict[str, Usage] = {}
        for call_id, *counts in await self._database.fetch_rows(sql):
            key = call_id.partition("/rollout=")[2].partition("/")[0]
            used = _read_usage(USAGE_COLUMNS, counts)
            usage[key] = usage[key] + used if key in usage else used
        return usage

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
            "SELECT DISTINCT call_id FROM calls WHERE EXISTS (SELECT 1 FROM outcomes"
            " WHERE kind = 'response' AND outcomes.run_id = '' AND outcomes.key = calls.key)"
        )
        return frozenset(call_id for (call_id,) in rows)

    async def spend(self, run_id: str) -> tuple[Spend, ...]:
        """Return the run's spending by role and purpose, sorted, whatever the order of answers."""
        return await self._database.read(lambda tables: _sum_spend(tables, run_id))

    async def add_seconds(
        self, run_id: str, seconds: float, stages: Mapping[tuple[int, str], float] | None = None
    ) -> float:
        """Add active seconds, total and by step and stage, and return the run's total."""
        rows = [(run_id, *stage, spent) for stage, spent in (stages or {}).items()]

        def add(tables: Tables) -> float:
            tables.conn.executemany(
                "INSERT INTO stage_times (run_id, step, stage, seconds) VALUES (?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET seconds = seconds + excluded.seconds",
                rows,
            )
            sql = "UPDATE runs SET seconds = seconds + ? WHERE run_id = ? RETURNING seconds"
            ((total,),) = tables.execute(sql, (seconds, run_id)).fetchall()
            return float(total)

        return await self._database.write(add)

    async def stage_costs(self, run_id: str) -> tuple[StageCost, ...]:
        """Return what each stage of each step took: steps in order, stages as they ended first."""

        def read(tables: Tables) -> tuple[StageCost, ...]:
            sql = (
                "SELECT step, stage, seconds FROM stage_times WHERE run_id = ? ORDER BY step, rowid"
            )
            costs = {
                (step, stage): StageCost(step=step, stage=stage, seconds=seconds)
                for step, stage, seconds in tables.execute(sql, (run_id,))
            }
            for (step, stage), entry in _sum_groups(tables, run_id, "step, stage, "):
                cost = costs.get((step, stage), StageCost(step=step, stage=stage))
                costs[step, stage] = cost.model_copy(update={"spend": (*cost.spend, entry)})
            return tuple(sorted(costs.values(), key=lambda cost: cost.step))

        return await self._database.read(read)


def mark_unsettled(tables: Tables, run_id: str) -> None:
    """Mark the open calls of a run as unsettled; only the process that owns the run may do so."""
    tables.execute(
        "UPDATE calls SET state = 'unsettled' WHERE run_id = ? AND state = 'open'", (run_id,)
    )


def _insert_call(tables: Tables, reservation: CallReservation) -> int | None:
    values = [getattr(reservation, name) for name in CALL_COLUMNS]
    values += [getattr(reservation.worst_case, name) for name in WORST_COLUMNS]
    return tables.execute(INSERT_CALL, values).lastrowid


def _read_usage(names: Sequence[str], counts: Sequence[Any]) -> Usage:
    """Return a usage from its counts and, as the last one, its billionths of a dollar."""
    *tokens, billionths = counts
    usd = None if billionths is None else billionths / BILLION
    return Usage(**dict(zip(names, tokens, strict=True)), usd=usd)


def _sum_spend(tables: Tables, run_id: str) -> tuple[Spend, ...]:
    return tuple(entry for _, entry in _sum_groups(tables, run_id))


def _sum_groups(
    tables: Tables, run_id: str, groups: str = ""
) -> list[tuple[tuple[Any, ...], Spend]]:
    """Return the spend of each group of calls, sorted by group, role and purpose."""
    columns = f"{groups}role, purpose"
    sql = (
        f"SELECT {SUMS}, {columns} FROM calls WHERE run_id = ?"  # noqa: S608 - constants
        f" GROUP BY {columns} ORDER BY {columns}"
    )
    spend = []
    for row in tables.execute(sql, (run_id,)):
        *group, role, purpose = row[11:]
        entry = Spend(
            role=role,
            purpose=purpose,
            usage=_read_usage(USAGE_COLUMNS, row[:6]),
            unsettled=row[6],
            worst_case=_read_usage(WORST_COLUMNS[:-1], row[7:11]),
        )
        spend.append((tuple(group), entry))
    return spend
