"""Pairs, their origins, and anchors: reading and changing them within one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, JsonValue

from reflact.errors import DataError
from reflact.jsonutil import parse_stored
from reflact.memory.cards import ACTIVE_STATUSES, check_status_change
from reflact.memory.models import (
    CardStatus,
    ContrastPair,
    ForgetResult,
    Origin,
    StoredPair,
    Submission,
)
from reflact.memory.scan import ScanFinding
from reflact.store.database import Tables

Value = TypeVar("Value", bound=BaseModel)


def encode_value(value: BaseModel, what: str = "a value") -> str:
    """Return a value as stored text: ASCII, since SQLite cannot store lone surrogates.

    DataError if a number has more digits than Python reads from JSON; names ``what`` the value is.
    """
    try:
        # pydantic's own JSON would replace lone surrogates in the field names of a state.
        return json.dumps(value.model_dump(), sort_keys=True, allow_nan=False, default=str)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise DataError(f"{what} cannot be stored: {reason}; write the number as a text") from None


def encode_pair(pair: ContrastPair) -> str:
    """Return a pair as stored text; DataError names its step."""
    origin = pair.provenance
    return encode_value(pair, f"a pair made of step {origin.step} of trace {origin.trace_id}")


def decode_value(kind: type[Value], text: str, what: str) -> Value:
    """Return a stored value; StoreError if the text does not validate."""
    return parse_stored(lambda stored: kind.model_validate(json.loads(stored)), text, what)


def format_time(at: datetime) -> str:
    """Return a time as stored text: UTC with microseconds, so texts sort in the order of times."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ---------------------------------------------------------------------------------- texts of a pair

# Characters of each text of a pair that are searched.
MAX_INDEXED_CHARS = 5_000


def list_pair_texts(pair: ContrastPair) -> tuple[str, ...]:
    """Return all texts of a pair that are scanned, each once."""
    scope = pair.scope
    origin = pair.provenance
    names = [*scope.roles, *scope.tools, *scope.task_categories, scope.user]
    names += [origin.trace_id, origin.prompt, origin.model]
    return tuple(dict.fromkeys([*_list_content(pair), *filter(None, names)]))


def build_search_text(pair: ContrastPair) -> str:
    """Return the words by which a pair is found, without NUL and lone surrogates."""
    joined = "\n".join(text[:MAX_INDEXED_CHARS] for text in _list_content(pair))
    return _replace_unsearchable(joined)


def _list_content(pair: ContrastPair) -> list[str]:
    """Return the texts of a pair's purpose, transition and evaluations."""
    step = pair.transition
    texts = [pair.purpose, step.action.name, pair.mistake, pair.reason]
    for evaluation in (pair.right, pair.wrong):
        texts += [evaluation.reasoning, *evaluation.evidence]
    for state in (step.before, step.action.arguments, step.after):
        texts += _iter_texts(state)
    return texts


def _replace_unsearchable(text: str) -> str:
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def _iter_texts(value: JsonValue) -> Iterator[str]:
    """Yield all texts in a JSON value, and the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _iter_texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _iter_texts(item)


# ------------------------------------------------------------------------------------------ origins

# Pairs or anchors that came from a trace.
FROM_TRACE = "id IN (SELECT owner FROM memory_origins WHERE trace_id = ?1)"


def add_origins(tables: Tables, owner: str, origins: Iterable[Origin]) -> None:
    """Write origins of a pair or an anchor that are not stored yet."""
    records = ({"owner": owner, **origin.model_dump()} for origin in origins)
    tables.table("memory_origins").insert_all(records, ignore=True)


def read_origins(tables: Tables, owners: Sequence[str]) -> Mapping[str, tuple[Origin, ...]]:
    """Return the origins of each pair or anchor, sorted by trace and step."""
    origins: dict[str, tuple[Origin, ...]] = dict.fromkeys(owners, ())
    sql = (
        "SELECT owner, trace_id, step FROM memory_origins "
        "WHERE owner IN (SELECT value FROM json_each(?)) ORDER BY trace_id, step"
    )
    for owner, trace_id, step in tables.execute(sql, (json.dumps(list(owners)),)):
        origins[owner] += (Origin(trace_id=trace_id, step=step),)
    return origins


# ------------------------------------------------------------------------------------------ reading


def select_pairs(
    tables: Tables, where: str, parameters: Sequence[Any] = ()
) -> tuple[StoredPair, ...]:
    """Return the pairs that meet an SQL condition; it must be a constant of this package."""
    columns = "id, pair, status, reason, utility, changed_at"
    rows = list(tables.query(f"SELECT {columns} FROM memory_pairs WHERE {where}", parameters))  # noqa: S608 - constant
    origins = read_origins(tables, [row["id"] for row in rows])
    pairs = []
    for row in rows:
        pair_id = row.pop("id")
        pair = decode_value(ContrastPair, row.pop("pair"), f"pair {pair_id}")
        pairs.append(StoredPair(pair=pair, origins=origins[pair_id], **row))
    return tuple(pairs)


def read_pair(tables: Tables, pair_id: str) -> StoredPair:
    """Return a pair by its id; DataError if it is not stored."""
    for stored in select_pairs(tables, "id = ?", (pair_id,)):
        return stored
    raise DataError(f"the memory has no pair {pair_id}; list its pairs with `reflact memory list`")


# The index holds all parts of three characters, so shorter words find nothing.
MIN_WORD_CHARS = 3

FOUND_CONDITION = """
(?1 = '[]' OR status IN (SELECT value FROM json_each(?1))) AND
(?2 = '' OR number IN (SELECT rowid FROM memory_pairs_fts WHERE memory_pairs_fts MATCH ?2))
ORDER BY utility DESC, changed_at DESC, id LIMIT ?3
"""


def find_pairs(
    tables: Tables, words: str, statuses: Sequence[CardStatus], limit: int
) -> tuple[StoredPair, ...]:
    """Return the pairs that hold all words of some length; see ``MemoryStore.find``."""
    parts = [word for word in _replace_unsearchable(words).split() if len(word) >= MIN_WORD_CHARS]
    query = tables.quote_fts(" ".join(parts)) if parts else ""
    return select_pairs(tables, FOUND_CONDITION, (json.dumps(list(statuses)), query, limit))


# ---------------------------------------------------------------------------- submission and status


class PairWriter(NamedTuple):
    """What changes pairs within one transaction.

    Args:
        tables: The tables of the transaction.
        now: The time of the changes.
        max_active: The bound on active pairs.
    """

    tables: Tables
    now: datetime
    max_active: int

    def submit(
        self, pair: ContrastPair, finding: ScanFinding | None, origins: Sequence[Origin]
    ) -> Submission:
        """Store a scanned pair and archive the weakest; of a stored one only add its origins."""
        exclusion = self._find_exclusion(pair, origins)
        if exclusion is not None:
            return Submission(pair_id=pair.id, is_new=False, status="rejected", reason=exclusion)
        is_new = not self.tables.table("memory_pairs").count_where("id = ?", [pair.id])
        if is_new:
            self._insert(pair, finding)
        add_origins(self.tables, pair.id, origins)
        if is_new:
            self._archive_weakest()
        stored = read_pair(self.tables, pair.id)
        return Submission(
            pair_id=pair.id, is_new=is_new, status=stored.status, reason=stored.reason
        )

    def _find_exclusion(self, pair: ContrastPair, origins: Iterable[Origin]) -> str | None:
        """Return why calibration must not learn from a pair, see ``Submission``; or None."""
        anchors = self.tables.table("memory_anchors")
        if anchors.count_where("subject = ?", [pair.hashes.subject]):
            return "anchor"
        if any(anchors.count_where(FROM_TRACE, [origin.trace_id]) for origin in origins):
            return "anchor_trace"
        return None

    def _insert(self, pair: ContrastPair, finding: ScanFinding | None) -> None:
        is_rejected = finding is not None and finding.verdict == "reject"
        self.tables.table("memory_pairs").insert(
            {
                "id": pair.id,
                "status": "rejected" if is_rejected else "quarantined",
                "reason": None if finding is None else finding.rule,
                "changed_at": format_time(self.now),
                "subject": pair.hashes.subject,
                "pair": encode_pair(pair),
                "words": build_search_text(pair),
            }
        )

    def move(self, stored: StoredPair, after: CardStatus, reason: str | None = None) -> None:
        """Change the status of a pair, and clear the mark of a failed test."""
        try:
            check_status_change(stored.status, after)
        except DataError as error:
            raise DataError(f"pair {stored.pair.id}: {error}") from None
        sql = (
            "UPDATE memory_pairs SET status = ?, reason = ?, failed_test = 0, changed_at = ? "
            "WHERE id = ?"
        )
        self.tables.execute(sql, (after, reason, format_time(self.now), stored.pair.id))

    def _archive_weakest(self) -> None:
        """Archive the weakest active pairs until the bound is met.

        Pairs that failed a test are archived first. Then the order is: lowest measured utility, not
        promoted, and the longest time without a change.
        """
        surplus = max(0, self.tables.table("memory_pairs").count_where(ACTIVE) - self.max_active)
        for stored in select_pairs(self.tables, WEAKEST_CONDITION, (surplus,)):
            self.move(stored, "archived", "bound")


ACTIVE = f"status IN {ACTIVE_STATUSES}"

# The weakest active pairs, which an index gives at once.
WEAKEST_CONDITION = (
    f"{ACTIVE} ORDER BY failed_test DESC, utility, status = 'promoted', changed_at, number LIMIT ?"
)


def count_free(tables: Tables, max_active: int) -> int:
    """Return how many pairs can be added before one is archived that has not failed a test."""
    n_active = tables.table("memory_pairs").count_where(f"{ACTIVE} AND failed_test = 0")
    return max(0, max_active - n_active)


# ------------------------------------------------------------------------------------------ anchors


def add_anchor(tables: Tables, pair: ContrastPair, origins: Sequence[Origin]) -> bool:
    """Store an anchor that came from these steps, and return whether it is new."""
    anchors = tables.table("memory_anchors")
    is_new = not anchors.count_where("id = ?", [pair.id])
    if not is_new and set(origins) <= set(read_origins(tables, [pair.id])[pair.id]):
        return False
    for stored in select_pairs(tables, "subject = ? ORDER BY id LIMIT 1", (pair.hashes.subject,)):
        raise DataError(
            f"anchor {pair.id} has the transition of stored pair {stored.pair.id}; calibration "
            "never learns from anchors, so choose another one"
        )
    for origin in origins:
        for stored in select_pairs(tables, f"{FROM_TRACE} ORDER BY id LIMIT 1", (origin.trace_id,)):
            raise DataError(
                f"anchor {pair.id} was made of trace {origin.trace_id}, and so was stored pair "
                f"{stored.pair.id}; calibration never learns from traces of anchors, so choose "
                "another trace"
            )
    record = {"id": pair.id, "subject": pair.hashes.subject, "pair": encode_pair(pair)}
    anchors.insert(record, ignore=True)
    add_origins(tables, pair.id, origins)
    return is_new


def read_anchors(tables: Tables) -> tuple[ContrastPair, ...]:
    """Return the anchors in the order of their ids."""
    stored = tables.execute("SELECT id, pair FROM memory_anchors ORDER BY id").fetchall()
    return tuple(decode_value(ContrastPair, pair, f"anchor {pair_id}") for pair_id, pair in stored)


# --------------------------------------------------------------------------------------- forgetting

# Cached responses to questions of calibrations, by the role that asked.
CALIBRATION_RESPONSES = """
key IN (SELECT key FROM calls WHERE substr(call_id, 1, instr(call_id, '/')) IN
('critic/', 'contrast/', 'judge/', 'meta_judge/'))
"""


def forget_trace(tables: Tables, trace_id: str, *, calls: bool) -> ForgetResult:
    """Remove everything that came from a trace; see ``MemoryStore.forget``.

    A response does not record which traces its prompt showed, because worked examples come from
    other traces. So either all responses are removed or none.
    """
    sql = f"SELECT id FROM memory_pairs WHERE {FROM_TRACE} ORDER BY id"  # noqa: S608 - constant
    pair_ids = [pair_id for (pair_id,) in tables.execute(sql, (trace_id,)).fetchall()]
    sql = f"DELETE FROM memory_anchors WHERE {FROM_TRACE} RETURNING id"  # noqa: S608 - constant
    anchor_ids = [anchor_id for (anchor_id,) in tables.execute(sql, (trace_id,)).fetchall()]
    owned = "IN (SELECT value FROM json_each(?))"
    tables.table("memory_pairs").delete_where(f"id {owned}", [json.dumps(pair_ids)])
    tables.table("memory_origins").delete_where(
        f"owner {owned}", [json.dumps(anchor_ids + pair_ids)]
    )
    n_events = tables.execute("DELETE FROM trace_events WHERE trace_id = ?", (trace_id,)).rowcount
    n_traces = tables.execute("DELETE FROM traces WHERE id = ?", (trace_id,)).rowcount
    if pair_ids:
        # Merges the parts of the search index; deleted words stay in the old ones until then.
        tables.table("memory_pairs").optimize()
    responses = tables.table("responses")
    n_responses = responses.count_where(CALIBRATION_RESPONSES)
    if calls:
        responses.delete_where(CALIBRATION_RESPONSES)
    return ForgetResult(
        trace_id=trace_id,
        trace_removed=n_traces > 0,
        n_events=n_events,
        pair_ids=tuple(pair_ids),
        n_anchors=len(anchor_ids),
        n_responses=n_responses if calls else 0,
        n_responses_left=0 if calls else n_responses,
    )
