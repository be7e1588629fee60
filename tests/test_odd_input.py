"""Odd values in a memory: they come back exactly as they were, or are refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from typer.testing import CliRunner

from memory_pairs import make_pair
from profiles import cases
from reflact import MemoryStore
from reflact.cli.app import app
from reflact.errors import DataError
from reflact.memory.models import Action, ContrastPair, Label, Provenance, ScoreEvent, Transition

pytestmark = pytest.mark.anyio

TEXTS = st.text(st.characters() | st.sampled_from("\ud800\udfff\0\n\x85\u2028"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ODD: JsonValue = {"\udc00": 1, "a\ud800b": ["\udfff", {"\0": 10**300}]}
LONG: JsonValue = {"digits": 10**5000}


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[MemoryStore]:
    async with MemoryStore(tmp_path / "memory.db") as opened:
        yield opened


def step_of(value: JsonValue) -> Transition:
    return Transition(before=value, action=Action(name="a", arguments=value), after="b")


def event_of(value: JsonValue) -> ScoreEvent:
    gold = Label(progress_before=0, progress_after=1, source="human")
    return ScoreEvent(step=0, transition=step_of(value), label=gold)


def pair_of(value: JsonValue) -> ContrastPair:
    return make_pair(1).model_copy(update={"transition": step_of(value), "reason": "half \ud800"})


def exactly(value: JsonValue) -> str:
    """Return what tells a value from every other, 1 from 1.0 too."""
    return json.dumps(value, sort_keys=True)


@cases(60, 10)
@given(VALUES)
async def test_what_is_stored_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, value: JsonValue
) -> None:
    """Whatever texts and names of fields are made of, in traces, pairs, anchors and their exports."""
    folder = tmp_path_factory.mktemp("odd")
    event, pair, anchor = event_of(value), pair_of(value), pair_of([value])
    async with MemoryStore(folder / "a.db") as memory:
        await memory.open_trace("t", "purpose \ud800")
        assert await memory.append("t", event)
        assert not await memory.append("t", event)
        await memory.submit(pair)
        await memory.add_anchors([anchor.model_copy(update={"provenance": Provenance(trace_id="other")})])
        lines = [line async for line in memory.export_lines()]
    async with MemoryStore(folder / "b.db") as other:
        await other.import_lines(lines)
        trace = await other.trace("t")
        assert trace is not None
        assert trace.purpose == "purpose \ud800"
        assert exactly(trace.events[0].transition.before) == exactly(value)
        (stored,) = await other.pairs()
        assert (stored.pair, stored.pair.id) == (pair, pair.id)
        assert exactly(stored.pair.transition.before) == exactly(value)
        assert [one.id for one in await other.anchors()] == [anchor.id]


async def test_fields_whose_names_differ_by_half_a_pair_are_two_events(memory: MemoryStore) -> None:
    """Names that cannot be told apart once they are altered are not altered."""
    await memory.open_trace("t", "p")
    await memory.append("t", event_of({"\ud800": 1}))
    with pytest.raises(DataError, match="another event as step 0"):
        await memory.append("t", event_of({"\ud801": 1}))


async def test_a_number_of_too_many_digits_is_refused(memory: MemoryStore) -> None:
    """JSON with it could not be read again: nothing of the step, the pair or the anchor is stored."""
    await memory.open_trace("t", "p")
    with pytest.raises(DataError, match=r"step 0 of trace t cannot be stored: .*digits"):
        await memory.append("t", event_of(LONG))
    with pytest.raises(DataError, match=r"a pair made of step 1 of trace trace cannot be stored: .*digits"):
        await memory.submit(pair_of(LONG))
    with pytest.raises(DataError, match="write the number as a text"):
        await memory.add_anchors([pair_of(LONG)])
    assert await memory.pairs() == ()
    assert await memory.anchors() == ()


async def test_names_that_no_file_holds_are_refused(memory: MemoryStore) -> None:
    """Half a surrogate pair in a name, a step beyond 64 bits: one sentence, on reading and on writing."""
    half = "t\ud800"
    pair = make_pair(1).model_copy(update={"provenance": Provenance(trace_id=half, step=0)})
    for work in (
        memory.open_trace(half, "p"),
        memory.trace(half),
        memory.forget(half),
        memory.find_trace_ids(half),
        memory.submit(pair),
        memory.release(half, reason="r"),
    ):
        with pytest.raises(DataError, match="holds half of a surrogate pair"):
            await work
    await memory.open_trace("t", "p")
    with pytest.raises(DataError, match="beyond the 64 bits"):
        await memory.append("t", event_of("s").model_copy(update={"step": 10**30}))
    assert await memory.pairs() == ()


async def test_a_name_with_a_line_break_is_kept(memory: MemoryStore) -> None:
    """A trace is what it was called, and is found and forgotten by that."""
    name = "one\ntwo\u2028three"
    await memory.open_trace(name, "p")
    assert await memory.trace_ids() == (name,)
    assert (await memory.forget(name)).trace_removed


def test_a_terminal_gets_what_it_can_write(tmp_path: Path) -> None:
    """A trace and a pair with odd names of fields are shown, as JSON with these names."""
    path = tmp_path / "memory.db"

    async def fill() -> None:
        async with MemoryStore(path) as memory:
            await memory.open_trace("odd trace", "p\ud800")
            await memory.append("odd trace", event_of(ODD))
            await memory.submit(pair_of(ODD))

    anyio.run(fill)
    pair = pair_of(ODD).id
    for command in (
        ["list"],
        ["list", "--kind", "trace"],
        ["show", "odd trace"],
        ["show", pair],
        ["search", "half"],
    ):
        done = CliRunner().invoke(app, ["memory", command[0], str(path), *command[1:]])
        assert done.exit_code == 0, done.output
        assert done.stdout.encode()
    shown = CliRunner().invoke(app, ["memory", "show", str(path), "odd trace", "--json"]).stdout
    assert json.loads(shown)["events"][0]["transition"]["before"] == ODD
