"""The memory that calibration keeps, as users open it: cards, pairs, tests and traces in one file."""

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
from reflact.memory import lifecycle as changing
from reflact.memory import rows as origins
from reflact.memory import rows as units
from reflact.memory import trace_store as traces
from reflact.memory.card_store import MAX_ACTIVE_CARDS, SQLiteCardStore, TimeSource, utc_now
from reflact.memory.cards import ACTIVE_STATUSES, ScanFinding, Scanner, build_cards, content_id
from reflact.memory.encoding import to_json_object
from reflact.memory.models import ContrastPair, MemoryCard, Origin
from reflact.memory.protocols import StoredTrace
from reflact.memory.rows import Unit
from reflact.memory.scan import CachingScanner
from reflact.memory.trace_store import SQLiteCalibrationStore, SQLiteTraceStore
from reflact.store.database import LOCK_TIMEOUT_SECONDS, Database, Tables
from reflact.store.schema import SCHEMA
from reflact.types import FrozenModel, canonical_json

PAGE_SIZE = 200


"""Units that are read at once."""


class ImportResult(FrozenModel):
    """What an import brought; what was there already is not counted and stays as it was.

    Args:
        n_traces, n_events, n_anchors, n_units: How many were new.
        n_blocked: New units that a scan held or rejected.
    """

    n_traces: int = 0
    n_events: int = 0
    n_anchors: int = 0
    n_units: int = 0
    n_blocked: int = 0


class HeaderLine(FrozenModel):
    """The first line."""

    type: Literal["reflact_memory"] = "reflact_memory"
    version: Literal[1] = 1


class TraceLine(FrozenModel):
    """A trace with its events."""

    type: Literal["trace"] = "trace"
    trace: StoredTrace


class AnchorLine(FrozenModel):
    """A gold pair that is never learned from."""

    type: Literal["anchor"] = "anchor"
    pair: ContrastPair
    origins: tuple[Origin, ...]


class UnitLine(FrozenModel):
    """A unit: its cards as they stand where it was exported, and the pair if it is one."""

    type: Literal["unit"] = "unit"
    cards: tuple[MemoryCard, ...] = Field(min_length=1, max_length=2)
    pair: ContrastPair | None = None
    origins: tuple[Origin, ...]

    @property
    def unit(self) -> Unit:
        """The unit as it is handed in here: nothing of what was measured elsewhere comes with it."""
        unmeasured = {"status": "candidate", "reason": None, "trust": 0.5, "utility": 0.5}
        cards = tuple(card.model_copy(update=unmeasured) for card in self.cards)
        return Unit(cards[0].id if self.pair is None else self.pair.id, cards, self.pair)

    @property
    def is_consistent(self) -> bool:
        """Whether its cards are those of its pair, or the one card's id follows from what it says."""
        first = self.cards[0]
        if self.pair is None:
            alone = len(self.cards) == 1 and first.pair_id is None
            return alone and (first.version > 1 or first.id == content_id(first))
        fixed = {"id", "kind", "scope", "pair_id", "provenance"}
        found = [card.model_dump(include=fixed) for card in self.cards]
        wanted = [card.model_dump(include=fixed) for card in build_cards(self.pair)]
        return found == wanted and len({card.version for card in self.cards}) == 1


ExportLine = HeaderLine | TraceLine | AnchorLine | UnitLine


LINE_ADAPTER: TypeAdapter[ExportLine] = TypeAdapter(Annotated[ExportLine, Field(discriminator="type")])


class SQLiteExportStore(SQLiteCardStore):
    """Export and import of a memory."""

    async def export_lines(self) -> AsyncIterator[str]:
        """Yield the memory as lines of ASCII JSON, without line breaks; the same memory gives the same lines.

        Tests, histories, and what was rejected or archived stay behind. What is written while this runs may
        be missing or come along.
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
        """Bring in what ``export_lines`` gave, all or nothing; importing twice changes nothing.

        Each new unit is scanned and quarantined, whatever it was where it came from. What is stored already
        stays as it is, but for steps that it was made of as well. A pair of a transition that is an anchor
        here, or of a step that an anchor was made of, is left out, as it is when handed in.

        Raises:
            DataError: A line is not one of an export, or an id does not follow from its content; names the
                line.
        """

        def look() -> list[tuple[ExportLine, ScanFinding | None]]:
            return [
                (line, self._scan(line.unit.all_texts) if isinstance(line, UnitLine) else None)
                for line in _parse_lines(lines)
            ]

        looked_at = await anyio.to_thread.run_sync(look)
        return await self._database.write(lambda tables: self._import_parsed(tables, looked_at))

    def _import_parsed(
        self, tables: Tables, lines: list[tuple[ExportLine, ScanFinding | None]]
    ) -> ImportResult:
        done: dict[str, int] = dict.fromkeys(ImportResult.model_fields, 0)
        for line, finding in lines:
            match line:
                case TraceLine():
                    done["n_traces"] += traces.find_trace(tables, line.trace.id) is None
                    traces.open_trace(tables, line.trace.id, line.trace.purpose)
                    done["n_events"] += sum(
                        traces.append_event(tables, line.trace.id, event) for event in line.trace.events
                    )
                case AnchorLine():
                    done["n_anchors"] += origins.add_anchor(tables, line.pair, line.origins)
                case UnitLine():
                    found = changing.submit_unit(
                        tables,
                        line.unit,
                        finding,
                        line.origins,
                        max_active=self._max_active_cards,
                        now=self._clock(),
                    )
                    done["n_units"] += found.is_new
                    done["n_blocked"] += found.is_new and finding is not None
                case HeaderLine():
                    pass
        return ImportResult(**done)


def _read_unit_lines(tables: Tables, ids: list[str]) -> list[UnitLine]:
    made_of = origins.read_origins(tables, ids)
    return [
        UnitLine(
            cards=tuple(units.read_cards(tables, row)),
            pair=None if row.pair is None else units.parse_pair(row),
            origins=made_of[row.id],
        )
        for unit_id in ids
        for row in units.select_rows(tables, "id = ?", (unit_id,))
    ]


def _read_anchor_lines(tables: Tables) -> list[AnchorLine]:
    pairs = origins.read_anchors(tables)
    made_of = origins.read_origins(tables, [pair.id for pair in pairs])
    return [AnchorLine(pair=pair, origins=made_of[pair.id]) for pair in pairs]


def _encode_line(line: ExportLine) -> str:
    """Return a line as it is written, with its states as they are; see ``encoding.plain``."""
    shown = line.model_dump(mode="json", exclude={"pair", "trace"})
    if isinstance(line, TraceLine):
        shown["trace"] = to_json_object(line.trace)
    if isinstance(line, AnchorLine | UnitLine):
        shown["pair"] = None if line.pair is None else to_json_object(line.pair)
    return canonical_json(shown)


def _parse_lines(lines: Iterable[str]) -> list[ExportLine]:
    parsed: list[ExportLine] = []
    for number, text in zip(count(1), lines, strict=False):
        if not text.strip():
            continue
        try:
            line = LINE_ADAPTER.validate_python(json.loads(text))
        except ValidationError as error:
            raise DataError(
                f"line {number} is not one of an exported memory: {_describe_line_error(error)}"
            ) from None
        except (ValueError, RecursionError):
            reason = "it is no whole JSON; if the file was cut off, export it again"
            raise DataError(f"line {number} is not one of an exported memory: {reason}") from None
        if isinstance(line, HeaderLine) != (not parsed):
            raise DataError(f"line {number}: the first line, and no other, says what the file is")
        if isinstance(line, UnitLine) and not line.is_consistent:
            raise DataError(
                f"line {number}: the cards of unit {line.unit.id} do not fit its id, its pair or each other; "
                "export it again"
            )
        parsed.append(line)
    if not parsed:
        raise DataError("there is no exported memory: no line says anything")
    return parsed


def _describe_line_error(error: ValidationError) -> str:
    """Return what is wrong first with a line, and what to do about it."""
    first = error.errors()[0]
    place = first["loc"]
    if place == ("reflact_memory", "version"):
        return f"its version is {first['input']!r}, which this reflact does not know; upgrade reflact"
    if not place:
        return (
            "it does not say with a known `type` what it is; `reflact memory export` writes such files, and "
            "a calibration's `traces` names files of traces"
        )
    return f"`{'.'.join(map(str, place[1:]))}`: {first['msg'][:1].lower()}{first['msg'][1:]}; export it again"


class MemoryStore(SQLiteExportStore, SQLiteTraceStore, SQLiteCalibrationStore):
    """Memory cards and traces in a SQLite file, opened and closed by ``async with``, once.

    The file may be a run's own and may be shared by several processes: what one promotes, the next read of
    another finds.

    Args:
        path: The file; it and its folder are made where missing.
        active_cards: At most so many candidate, quarantined and promoted cards of each kind; beyond it the
            weakest are archived.
        scan: Looks at every text before it is stored; None: the rules that stand on the page on memory.
        clock: Gives the time of changes, with its time zone.
        patience: Seconds to wait for another process's lock.
        read_only: Write nothing to the file, which has to be there. If its folder cannot be written to, a
            copy is read. Methods that write raise.

    Raises:
        StoreError: On opening and from every method; says what is wrong with which file.
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
        looks = CachingScanner() if scan is None else scan
        super().__init__(database, scan=looks, max_active_cards=max_active_cards, clock=clock)

    async def __aenter__(self) -> Self:
        await self._database.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._database.__aexit__(kind, error, trace)
