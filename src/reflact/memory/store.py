"""The memory of a critic: one SQLite file of cards, pairs, tests and traces, with export and import."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

import anyio.to_thread
from pydantic import Field, TypeAdapter, ValidationError

from reflact.errors import DataError
from reflact.memory import lifecycle, rows
from reflact.memory import trace_store as traces
from reflact.memory.card_store import MAX_ACTIVE_CARDS, SQLiteCardStore, TimeSource, utc_now
from reflact.memory.cards import ACTIVE_STATUSES, ScanFinding, Scanner, build_cards, content_id
from reflact.memory.models import ContrastPair, MemoryCard, Origin, StoredTrace
from reflact.memory.rows import Unit, to_json_object
from reflact.memory.scan import CachingScanner
from reflact.memory.trace_store import SQLiteCalibrationStore, SQLiteTraceStore
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database, Tables
from reflact.store.schema import SCHEMA
from reflact.types import FrozenModel, canonical_json

PAGE_SIZE = 200
"""Units that an export reads at a time."""


class ImportResult(FrozenModel):
    """The result of an import; entries that were stored already are not counted.

    Args:
        n_traces, n_events, n_anchors, n_units: The numbers of new entries.
        n_blocked: New units that need review or were rejected.
    """

    n_traces: int = 0
    n_events: int = 0
    n_anchors: int = 0
    n_units: int = 0
    n_blocked: int = 0


class HeaderLine(FrozenModel):
    """The first line of an export."""

    type: Literal["reflact_memory"] = "reflact_memory"
    version: Literal[1] = 1


class TraceLine(FrozenModel):
    """A trace with its events."""

    type: Literal["trace"] = "trace"
    trace: StoredTrace


class AnchorLine(FrozenModel):
    """An anchor."""

    type: Literal["anchor"] = "anchor"
    pair: ContrastPair
    origins: tuple[Origin, ...]


class UnitLine(FrozenModel):
    """A unit: its cards, and its pair if it has one."""

    type: Literal["unit"] = "unit"
    cards: tuple[MemoryCard, ...] = Field(min_length=1, max_length=2)
    pair: ContrastPair | None = None
    origins: tuple[Origin, ...]

    @property
    def unit(self) -> Unit:
        """The unit to submit, without statuses and measurements of the exporting store."""
        unmeasured = {"status": "candidate", "reason": None, "trust": 0.5, "utility": 0.5}
        cards = tuple(card.model_copy(update=unmeasured) for card in self.cards)
        return Unit(cards[0].id if self.pair is None else self.pair.id, cards, self.pair)

    @property
    def is_consistent(self) -> bool:
        """Whether the cards belong to the pair, or the id of the single card matches its content."""
        first = self.cards[0]
        if self.pair is None:
            is_single = len(self.cards) == 1 and first.pair_id is None
            return is_single and (first.version > 1 or first.id == content_id(first))
        fixed = {"id", "kind", "scope", "pair_id", "provenance"}
        actual = [card.model_dump(include=fixed) for card in self.cards]
        expected = [card.model_dump(include=fixed) for card in build_cards(self.pair)]
        return actual == expected and len({card.version for card in self.cards}) == 1


ExportLine = HeaderLine | TraceLine | AnchorLine | UnitLine

LINE_ADAPTER: TypeAdapter[ExportLine] = TypeAdapter(Annotated[ExportLine, Field(discriminator="type")])


class SQLiteExportStore(SQLiteCardStore):
    """Export and import of a memory."""

    async def export_lines(self) -> AsyncIterator[str]:
        """Yield the memory as lines of ASCII JSON without line breaks; equal memories give equal lines.

        Tests, histories, and rejected or archived units are not exported. Concurrent writes may be missing
        or included.
        """
        yield _encode_line(HeaderLine())
        for (trace_id,) in await self._database.fetch_rows("SELECT id FROM traces ORDER BY id"):
            trace = await self._database.read(partial(traces.find_trace, trace_id=trace_id))
            if trace is not None:
                yield _encode_line(TraceLine(trace=trace))
        for anchor in await self._database.read(_read_anchor_lines):
            yield _encode_line(anchor)
        sql = f"SELECT id FROM memory_units WHERE status IN {ACTIVE_STATUSES} ORDER BY number"  # noqa: S608 - constant
        ids = [unit_id for (unit_id,) in await self._database.fetch_rows(sql)]
        for start in range(0, len(ids), PAGE_SIZE):
            for line in await self._database.read(
                partial(_read_unit_lines, ids=ids[start : start + PAGE_SIZE])
            ):
                yield _encode_line(line)

    async def import_lines(self, lines: Iterable[str]) -> ImportResult:
        """Import the lines of ``export_lines``, all or none; a second import changes nothing.

        Each new unit is scanned and quarantined, whatever its status was. Units that are stored already only
        get the new origins. Pairs that share a transition or a trace with an anchor are left out.

        Raises:
            DataError: A line is not part of an export, or an id does not match its content; names the line.
        """

        def parse_and_scan() -> list[tuple[ExportLine, ScanFinding | None]]:
            return [
                (line, self._scan(line.unit.all_texts) if isinstance(line, UnitLine) else None)
                for line in _parse_lines(lines)
            ]

        parsed = await anyio.to_thread.run_sync(parse_and_scan)
        return await self._database.write(lambda tables: self._import_parsed(tables, parsed))

    def _import_parsed(
        self, tables: Tables, lines: list[tuple[ExportLine, ScanFinding | None]]
    ) -> ImportResult:
        counts: dict[str, int] = dict.fromkeys(ImportResult.model_fields, 0)
        for line, finding in lines:
            match line:
                case TraceLine():
                    counts["n_traces"] += traces.find_trace(tables, line.trace.id) is None
                    traces.open_trace(tables, line.trace.id, line.trace.purpose)
                    counts["n_events"] += sum(
                        traces.append_event(tables, line.trace.id, event) for event in line.trace.events
                    )
                case AnchorLine():
                    counts["n_anchors"] += rows.add_anchor(tables, line.pair, line.origins)
                case UnitLine():
                    submission = lifecycle.submit_unit(
                        tables,
                        line.unit,
                        finding,
                        line.origins,
                        max_active=self._max_active_cards,
                        now=self._clock(),
                    )
                    counts["n_units"] += submission.is_new
                    counts["n_blocked"] += submission.is_new and finding is not None
                case HeaderLine():
                    pass
        return ImportResult(**counts)


def _read_unit_lines(tables: Tables, ids: list[str]) -> list[UnitLine]:
    origins = rows.read_origins(tables, ids)
    return [
        UnitLine(
            cards=tuple(rows.read_cards(tables, row)),
            pair=None if row.pair is None else rows.parse_pair(row),
            origins=origins[row.id],
        )
        for unit_id in ids
        for row in rows.select_rows(tables, "id = ?", (unit_id,))
    ]


def _read_anchor_lines(tables: Tables) -> list[AnchorLine]:
    pairs = rows.read_anchors(tables)
    origins = rows.read_origins(tables, [pair.id for pair in pairs])
    return [AnchorLine(pair=pair, origins=origins[pair.id]) for pair in pairs]


def _encode_line(line: ExportLine) -> str:
    """Return a line as text, with unchanged states; see ``to_json_object``."""
    fields = line.model_dump(mode="json", exclude={"pair", "trace"})
    if isinstance(line, TraceLine):
        fields["trace"] = to_json_object(line.trace)
    if isinstance(line, AnchorLine | UnitLine):
        fields["pair"] = None if line.pair is None else to_json_object(line.pair)
    return canonical_json(fields)


def _parse_lines(lines: Iterable[str]) -> list[ExportLine]:
    parsed: list[ExportLine] = []
    for number, text in zip(count(1), lines, strict=False):
        if not text.strip():
            continue
        try:
            line = LINE_ADAPTER.validate_python(json.loads(text))
        except ValidationError as error:
            raise DataError(
                f"line {number} is not part of an exported memory: {_describe_line_error(error)}"
            ) from None
        except (ValueError, RecursionError):
            reason = "it is not complete JSON; if the file was cut off, export it again"
            raise DataError(f"line {number} is not part of an exported memory: {reason}") from None
        if isinstance(line, HeaderLine) != (not parsed):
            raise DataError(f"line {number}: the first line, and no other, must be the header")
        if isinstance(line, UnitLine) and not line.is_consistent:
            raise DataError(
                f"line {number}: the cards of unit {line.unit.id} do not match its id, its pair or each other; "
                "export it again"
            )
        parsed.append(line)
    if not parsed:
        raise DataError("this is no exported memory: all lines are empty")
    return parsed


def _describe_line_error(error: ValidationError) -> str:
    """Return the first problem of a line, and what to do about it."""
    first = error.errors()[0]
    location = first["loc"]
    if location == ("reflact_memory", "version"):
        return f"its version is {first['input']!r}, which this reflact does not know; upgrade reflact"
    if not location:
        return (
            "its `type` is missing or unknown; `reflact memory export` writes files that can be imported, and "
            "files of traces belong to a calibration's `traces`"
        )
    return (
        f"`{'.'.join(map(str, location[1:]))}`: {first['msg'][:1].lower()}{first['msg'][1:]}; export it again"
    )


class MemoryStore(SQLiteExportStore, SQLiteTraceStore, SQLiteCalibrationStore):
    """Memory cards and traces in a SQLite file, opened and closed by ``async with``, once.

    The file may be that of a run, and several processes may share it. The next read of each process sees what
    another has promoted.

    Args:
        path: The file. It and its folder are created if they are missing.
        max_active_cards: The bound on candidate, quarantined and promoted cards of each kind. Beyond it the
            weakest are archived.
        scan: Scans every text before it is stored; None: the rules of docs/memory.md.
        clock: Returns the time of a change, with its time zone.
        lock_timeout: Seconds to wait for another process's lock.
        read_only: Write nothing to the file, which must exist. If its folder is not writable, a copy is read.
            Methods that write raise.

    Raises:
        StoreError: On opening and from every method; names the file and the problem.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        max_active_cards: int = MAX_ACTIVE_CARDS,
        scan: Scanner | None = None,
        clock: TimeSource = utc_now,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        read_only: bool = False,
    ) -> None:
        database = Database(Path(path), SCHEMA, lock_timeout=lock_timeout, read_only=read_only)
        scanner = CachingScanner() if scan is None else scan
        super().__init__(database, scan=scanner, max_active_cards=max_active_cards, clock=clock)

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._database.__aexit__(kind, error, trace)
