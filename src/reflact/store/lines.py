"""The lines of an exported memory: what each holds, how it is written, and whether it is sound.

The first says what the file is; each other one is a trace, an anchor, a test or a unit with its cards and its
history.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from reflact.errors import DataError
from reflact.memory import ContrastPair, MemoryCard, Origin
from reflact.memory_cards import PAIR_KINDS, cards_of, content_id
from reflact.memory_ports import BatchTest, StatusChange, StoredTrace
from reflact.store import booking
from reflact.store.units import Unit, plain
from reflact.types import Frozen, canonical


class HeaderLine(Frozen):
    """The first line."""

    type: Literal["reflact_memory"] = "reflact_memory"
    version: Literal[1] = 1


class TraceLine(Frozen):
    """A trace with its events."""

    type: Literal["trace"] = "trace"
    trace: StoredTrace


class AnchorLine(Frozen):
    """A gold pair that is never learned from."""

    type: Literal["anchor"] = "anchor"
    pair: ContrastPair
    origins: tuple[Origin, ...] = ()

    @property
    def made_of(self) -> tuple[Origin, ...]:
        """All steps that it was made of; a line without origins has that of its pair."""
        return self.origins or self.pair.provenance.origins


class TestLine(Frozen):
    """A test of a batch, with the id by which histories refer to it."""

    type: Literal["test"] = "test"
    id: str
    test: BatchTest


class ChangeLine(Frozen):
    """A line of a history; ``test`` is the id of the evidence that it rests on."""

    change: StatusChange
    test: str | None = None


class UnitLine(Frozen):
    """A unit: its cards, the pair where it is one, and its history."""

    type: Literal["unit"] = "unit"
    cards: tuple[MemoryCard, ...] = Field(min_length=1, max_length=2)
    pair: ContrastPair | None = None
    history: tuple[ChangeLine, ...] = Field(min_length=1)
    origins: tuple[Origin, ...] = ()

    @property
    def made_of(self) -> tuple[Origin, ...]:
        """All steps that it was made of; a line without origins has that of its cards."""
        return self.origins or self.cards[0].provenance.origins


Line = HeaderLine | TraceLine | AnchorLine | TestLine | UnitLine
LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


def text_of(line: Line) -> str:
    """Return a line as it is written, with its states as they are; see ``units.plain``."""
    held = line.model_dump(mode="json", exclude={"pair", "trace"})
    if isinstance(line, TraceLine):
        held["trace"] = plain(line.trace)
    if isinstance(line, AnchorLine | UnitLine):
        held["pair"] = None if line.pair is None else plain(line.pair)
    return canonical(held)


def parse(lines: Iterable[str]) -> list[tuple[int, Line]]:
    """Return the lines of an export with their numbers, from 1.

    Raises:
        DataError: A line is not one of an export, or does not fit itself; names the line.
    """
    parsed: list[tuple[int, Line]] = []
    for number, text in zip(count(1), lines, strict=False):
        if not text.strip():
            continue
        try:
            line = LINE.validate_python(json.loads(text))
        except ValidationError as error:
            raise DataError(f"line {number} is not one of an exported memory: {_wrong(error)}") from None
        except (ValueError, RecursionError):
            said = "it is no whole JSON; where the file was cut off, export it again"
            raise DataError(f"line {number} is not one of an exported memory: {said}") from None
        if isinstance(line, HeaderLine) != (not parsed):
            raise DataError(f"line {number}: the first line, and no other, says what the file is")
        if isinstance(line, UnitLine):
            _check(line, number)
        if isinstance(line, TestLine):
            _check_test(line, number)
        parsed.append((number, line))
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
            "files of traces are for `reflact memory keep`"
        )
    return f"`{'.'.join(map(str, place[1:]))}`: {first['msg'][:1].lower()}{first['msg'][1:]}; export it again"


def _check(line: UnitLine, number: int) -> None:
    first = line.cards[0]
    same = {canonical(card.model_dump(mode="json", include=SHARED)) for card in line.cards}
    if line.pair is None:
        sound = len(line.cards) == 1 and first.pair_id is None
        sound = sound and (first.version > 1 or first.id == content_id(first))
    else:
        wanted = cards_of(line.pair)
        sound = {card.id for card in line.cards} == {card.id for card in wanted} and len(same) == 1
        sound = sound and [card.kind for card in line.cards] == list(PAIR_KINDS)
        sound = sound and all(card.pair_id == line.pair.id for card in line.cards)
        sound = sound and all(card.scope == line.pair.scope for card in line.cards)
    if not sound or line.history[-1].change.after != first.status:
        raise DataError(
            f"line {number}: the cards of unit {first.pair_id or first.id} do not fit its id, its pair, its "
            "history or each other; export it again"
        )


def _check_test(line: TestLine, number: int) -> None:
    if booking.test_id(line.test) != line.id:
        raise DataError(
            f"line {number}: the id of test {line.id} does not follow from its content; export it again"
        )
    try:
        booking.check_evidence(line.test, line.test.evidence)
    except DataError as error:
        raise DataError(f"line {number}: {error}") from None


SHARED = set(MemoryCard.model_fields) - {"id", "kind", "content", "pattern", "strategy"}


def unit_of(line: UnitLine) -> Unit:
    """Return the unit that a line holds."""
    first = line.cards[0]
    return Unit(first.id if line.pair is None else line.pair.id, line.cards, line.pair)
