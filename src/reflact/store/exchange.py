"""A memory as JSON lines, which another memory learns from as from anything that it is handed.

The first line says what the file is; each other one is a trace, an anchor, or a unit with its cards. A file
proves nothing of what was measured, so an imported unit begins as any other. Copy the SQLite file to copy a
memory with its tests.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from functools import partial
from itertools import count
from typing import Annotated, Literal

import anyio.to_thread
from pydantic import Field, TypeAdapter, ValidationError

from reflact.errors import DataError
from reflact.memory import ContrastPair, MemoryCard, Origin
from reflact.memory_cards import ACTIVE, Finding, cards_of, content_id
from reflact.memory_ports import StoredTrace
from reflact.store import changing, origins, traces, units
from reflact.store.cards import SQLiteCards
from reflact.store.database import Tables
from reflact.store.encoding import plain
from reflact.store.units import Unit
from reflact.types import FrozenModel, canonical_json

PAGE = 200
"""Units that are read at once."""


class Imported(FrozenModel):
    """What an import brought; what was there already is not counted and stays as it was.

    Args:
        traces, events, anchors, units: How many were new.
        held: New units that a scan held or rejected.
    """

    traces: int = 0
    events: int = 0
    anchors: int = 0
    units: int = 0
    held: int = 0


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
    def sound(self) -> bool:
        """Whether its cards are those of its pair, or the one card's id follows from what it says."""
        first = self.cards[0]
        if self.pair is None:
            alone = len(self.cards) == 1 and first.pair_id is None
            return alone and (first.version > 1 or first.id == content_id(first))
        fixed = {"id", "kind", "scope", "pair_id", "provenance"}
        found = [card.model_dump(include=fixed) for card in self.cards]
        wanted = [card.model_dump(include=fixed) for card in cards_of(self.pair)]
        return found == wanted and len({card.version for card in self.cards}) == 1


Line = HeaderLine | TraceLine | AnchorLine | UnitLine
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


class SQLiteExchange(SQLiteCards):
    """Export and import of a memory."""

    async def export_lines(self) -> AsyncIterator[str]:
        """Yield the memory as lines of ASCII JSON, without line breaks; the same memory gives the same lines.

        Tests, histories, and what was rejected or archived stay behind. What is written while this runs may
        be missing or come along.
        """
        yield _text_of(HeaderLine())
        for (trace_id,) in await self._database.rows("SELECT id FROM traces ORDER BY id"):
            trace = await self._database.read(partial(traces.find_trace, trace_id=trace_id))
            if trace is not None:
                yield _text_of(TraceLine(trace=trace))
        for anchor in await self._database.read(_anchor_lines):
            yield _text_of(anchor)
        sql = f"SELECT id FROM memory_units WHERE status IN {ACTIVE} ORDER BY number"  # noqa: S608 - constant
        ids = [unit_id for (unit_id,) in await self._database.rows(sql)]
        for start in range(0, len(ids), PAGE):
            for line in await self._database.read(partial(_unit_lines, ids=ids[start : start + PAGE])):
                yield _text_of(line)

    async def import_lines(self, lines: Iterable[str]) -> Imported:
        """Bring in what ``export_lines`` gave, all or nothing; importing twice changes nothing.

        Each new unit is scanned and quarantined, whatever it was where it came from. What is stored already
        stays as it is, but for steps that it was made of as well. A pair of a transition that is an anchor
        here, or of a step that an anchor was made of, is left out, as it is when handed in.

        Raises:
            DataError: A line is not one of an export, or an id does not follow from its content; names the
                line.
        """

        def look() -> list[tuple[Line, Finding | None]]:
            return [
                (line, self._scan(line.unit.texts) if isinstance(line, UnitLine) else None)
                for line in _parse(lines)
            ]

        looked_at = await anyio.to_thread.run_sync(look)
        return await self._database.write(lambda tables: self._bring(tables, looked_at))

    def _bring(self, tables: Tables, lines: list[tuple[Line, Finding | None]]) -> Imported:
        done: dict[str, int] = dict.fromkeys(Imported.model_fields, 0)
        for line, finding in lines:
            match line:
                case TraceLine():
                    done["traces"] += traces.find_trace(tables, line.trace.id) is None
                    traces.open_trace(tables, line.trace.id, line.trace.purpose)
                    done["events"] += sum(
                        traces.append(tables, line.trace.id, event) for event in line.trace.events
                    )
                case AnchorLine():
                    done["anchors"] += origins.keep_anchor(tables, line.pair, line.origins)
                case UnitLine():
                    found = changing.submit(
                        tables, line.unit, finding, line.origins, bound=self._bound, now=self._clock()
                    )
                    done["units"] += found.new
                    done["held"] += found.new and finding is not None
                case HeaderLine():
                    pass
        return Imported(**done)


def _unit_lines(tables: Tables, ids: list[str]) -> list[UnitLine]:
    made_of = origins.of(tables, ids)
    return [
        UnitLine(
            cards=tuple(units.cards(tables, row)),
            pair=None if row.pair is None else units.pair_of(row),
            origins=made_of[row.id],
        )
        for unit_id in ids
        for row in units.rows(tables, "id = ?", (unit_id,))
    ]


def _anchor_lines(tables: Tables) -> list[AnchorLine]:
    pairs = origins.anchors(tables)
    made_of = origins.of(tables, [pair.id for pair in pairs])
    return [AnchorLine(pair=pair, origins=made_of[pair.id]) for pair in pairs]


def _text_of(line: Line) -> str:
    """Return a line as it is written, with its states as they are; see ``encoding.plain``."""
    shown = line.model_dump(mode="json", exclude={"pair", "trace"})
    if isinstance(line, TraceLine):
        shown["trace"] = plain(line.trace)
    if isinstance(line, AnchorLine | UnitLine):
        shown["pair"] = None if line.pair is None else plain(line.pair)
    return canonical_json(shown)


def _parse(lines: Iterable[str]) -> list[Line]:
    parsed: list[Line] = []
    for number, text in zip(count(1), lines, strict=False):
        if not text.strip():
            continue
        try:
            line = LINE.validate_python(json.loads(text))
        except ValidationError as error:
            raise DataError(f"line {number} is not one of an exported memory: {_wrong(error)}") from None
        except (ValueError, RecursionError):
            reason = "it is no whole JSON; if the file was cut off, export it again"
            raise DataError(f"line {number} is not one of an exported memory: {reason}") from None
        if isinstance(line, HeaderLine) != (not parsed):
            raise DataError(f"line {number}: the first line, and no other, says what the file is")
        if isinstance(line, UnitLine) and not line.sound:
            raise DataError(
                f"line {number}: the cards of unit {line.unit.id} do not fit its id, its pair or each other; "
                "export it again"
            )
        parsed.append(line)
    if not parsed:
        raise DataError("there is no exported memory: no line says anything")
    return parsed


def _wrong(error: ValidationError) -> str:
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
