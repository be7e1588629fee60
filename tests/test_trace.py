"""Traces: recorded as they happen, whole; what is torn is read up to where it is whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact import Trace
from reflact.concurrency import fan_out
from reflact.errors import DataError, StoreError
from reflact.memory.models import Action, Evaluation, Label, ScoreEvent, StateScore, StoredTrace, Transition
from reflact.memory.store import MemoryStore
from reflact.types import canonical_json

pytestmark = pytest.mark.anyio

PURPOSE = "Ship the order."
LOW = Evaluation(progress_before=0, progress_after=0, reasoning="Nothing yet.", confidence=0.9)
HIGH = Evaluation(progress_before=2, progress_after=6, reasoning="It is paid.", evidence=("paid",))
GOLD = Label(progress_before=2, progress_after=5, source="program")

VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def step(before: JsonValue = "open", after: JsonValue = "paid") -> Transition:
    """Return a transition between two states."""
    return Transition(before=before, action=Action(name="pay", arguments={"amount": 3}), after=after)


def recorded(path: Path, events: int = 3) -> Trace:
    """Return a trace in a file, not finished."""
    trace = Trace(PURPOSE, id="t", path=path)
    for n in range(events):
        trace.record(
            step(after={"n": n, "text": "\u5b8c\u6210 \U0001f389\n\u2028"}), HIGH, label=GOLD if n else None
        )
    return trace


class Kept:
    """A trace store that lists what it was handed."""

    def __init__(self) -> None:
        self.purposes: dict[str, str] = {}
        self.events: dict[tuple[str, int], ScoreEvent] = {}

    async def open_trace(self, trace_id: str, purpose: str) -> None:
        self.purposes[trace_id] = purpose

    async def append(self, trace_id: str, event: ScoreEvent) -> bool:
        new = (trace_id, event.step) not in self.events
        self.events[trace_id, event.step] = event
        return new

    async def label(self, trace_id: str, step: int, label: Label) -> None:
        raise AssertionError

    async def trace(self, trace_id: str) -> StoredTrace | None:
        events = tuple(event for (of, _), event in sorted(self.events.items()) if of == trace_id)
        return StoredTrace(id=trace_id, purpose=self.purposes[trace_id], events=events)

    async def trace_ids(self) -> tuple[str, ...]:
        return tuple(sorted(self.purposes))


def test_a_trace_takes_names_of_files_as_text_and_makes_their_folder(tmp_path: Path) -> None:
    """A path may be text, its folder need not be there, and what stands in a folder's place is an error."""
    path = str(tmp_path / "traces" / "today" / "order.jsonl")
    Trace(PURPOSE, id="t", path=path).record(step(), HIGH)
    Trace.resume(path).record(step(), LOW)
    assert [event.evaluation for event in Trace.load(path).events] == [HIGH, LOW]
    with pytest.raises(StoreError, match="cannot write"):
        Trace(PURPOSE, path=f"{path}/inner.jsonl")


def test_a_trace_shows_what_it_is(tmp_path: Path) -> None:
    """The representation tells purpose, name, events and whether the trace is finished."""
    trace = recorded(tmp_path / "t.jsonl")
    assert repr(trace) == "Trace('Ship the order.', id='t': 3 events, open)"
    trace.finish()
    assert repr(trace).endswith("3 events, finished)")


# ------------------------------------------------------------------------------------------ recording


def test_steps_are_numbered_and_kept_in_order() -> None:
    """Each recorded step is an event with its number, its evaluation and its gold score."""
    trace = Trace(PURPOSE)
    assert trace.record(step(), LOW) == ScoreEvent(step=0, transition=step(), evaluation=LOW)
    trace.record(step("paid", "shipped"), HIGH, label=GOLD)
    assert [(event.step, event.evaluation, event.label) for event in trace.events] == [
        (0, LOW, None),
        (1, HIGH, GOLD),
    ]


def test_of_a_score_what_counts_is_recorded() -> None:
    """A critic's score is recorded as it stands after the guards."""
    score = StateScore(evaluation=LOW, raw=HIGH, applied_guards=("no_change",))
    assert Trace(PURPOSE).record(step(), score).evaluation == LOW


def test_traces_without_a_name_get_different_ones() -> None:
    """Two traces are two, whatever their purpose."""
    assert Trace(PURPOSE).id != Trace(PURPOSE).id


def test_a_finished_trace_takes_nothing_more(tmp_path: Path) -> None:
    """Recording after the end is refused and changes neither trace nor file."""
    trace = recorded(tmp_path / "t.jsonl")
    trace.finish()
    trace.finish()
    before = (tmp_path / "t.jsonl").read_bytes()
    with pytest.raises(DataError, match="trace t is finished"):
        trace.record(step(), LOW)
    assert len(trace.events) == 3
    assert (tmp_path / "t.jsonl").read_bytes() == before


@given(before=VALUES, after=VALUES)
def test_states_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, before: JsonValue, after: JsonValue
) -> None:
    """Any text and any JSON value is kept whole."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    event = Trace(PURPOSE, path=path).record(step(before, after), HIGH)
    assert Trace.load(path).events == (event,)


@pytest.mark.parametrize("half", ["\ud800", {"\udc00": ["\ud83d"]}])
def test_halves_of_surrogate_pairs_are_kept(tmp_path: Path, half: JsonValue) -> None:
    """What has no UTF-8 is kept as well, fields of that name included."""
    event = Trace(PURPOSE, path=tmp_path / "t.jsonl").record(step(half, 1), HIGH)
    assert Trace.load(tmp_path / "t.jsonl").events == (event,)


# ---------------------------------------------------------------------------------------------- files


def test_an_event_is_in_the_file_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    """A process that dies right after recording loses nothing that it had recorded."""
    path = tmp_path / "t.jsonl"
    program = (
        "import os, sys; from pathlib import Path; from reflact import Trace\n"
        "from reflact.memory.models import Action, Evaluation, Transition\n"
        "trace = Trace('p', id='t', path=Path(sys.argv[1]))\n"
        "for n in range(20):\n"
        "    now = Transition(before=n, action=Action(name='add'), after=n + 1)\n"
        "    trace.record(now, Evaluation(progress_before=0, progress_after=1, reasoning='r'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert [event.transition.after for event in Trace.load(path).events] == [*range(1, 21)]


def test_a_file_torn_anywhere_gives_its_whole_part(tmp_path: Path) -> None:
    """Whatever byte a file ends at, exactly the events whose lines are whole come back."""
    path, torn = tmp_path / "t.jsonl", tmp_path / "torn.jsonl"
    trace = recorded(path)
    trace.finish()
    content = path.read_bytes()
    ends = [n for n in range(len(content) + 1) if content[n : n + 1] == b"\n"]
    for length in range(ends[0], len(content)):
        torn.write_bytes(content[:length])
        whole = sum(end <= length for end in ends[1:4])
        loaded = Trace.load(torn)
        assert loaded.events == trace.events[:whole], length
        assert (loaded.id, loaded.purpose) == ("t", PURPOSE)
        kept = max(end for end in ends if end <= length)
        assert loaded.n_lost_bytes == max(0, length - kept - 1)


def test_nothing_is_read_beyond_a_damaged_line(tmp_path: Path) -> None:
    """A line that is no JSON ends what is read, though whole lines follow."""
    path = tmp_path / "t.jsonl"
    trace = recorded(path)
    lines = path.read_bytes().splitlines()
    for damage in (b"\x00" * 40, b"\xff\xfe", b'{"step": 1', b"{'step': 1}", b""):
        path.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:], b""]))
        assert Trace.load(path).events == trace.events[:1], damage


WRONG_EVENTS: list[tuple[dict[str, JsonValue], str]] = [
    ({"transition": {"before": 1, "action": {}, "after": 2}}, "`transition.action.name`: is missing"),
    ({"transition": "paid"}, '`transition`: expected a JSON object, got "paid"'),
    ({"step": "one"}, "`step`: input should be a valid integer"),
    ({"step": 7}, "`step`: it is 7, and the next step is 1"),
    (
        {"label": {"progress_before": 0, "progress_after": 12, "source": "human"}},
        "less than or equal to 10, got 12",
    ),
    (
        {"label": {"progress_before": 0, "progress_after": 1, "source": "me"}},
        "`label.source`: input should be 'program'",
    ),
    ({"evaluation": {"progress_before": "x" * 99}}, "unable to parse string as a number; mend that line"),
    ({"note": 1}, "`note`: is not a known field"),
    ({"purpose": "Ship."}, "begins another trace"),
    ({"events": 3}, "is not a known field"),
]
"""Fields that make the second event of a file wrong, and the reason in the message."""


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("read", [Trace.load, Trace.resume])
def test_a_whole_line_that_says_something_wrong_is_named(
    tmp_path: Path, read: Callable[[Path], Trace], last: bool
) -> None:
    """What is no event is not taken for a torn end: file, line, field are told, the file stays as it is."""
    path = tmp_path / "t.jsonl"
    recorded(path)
    whole = path.read_text(encoding="ascii").splitlines()
    for change, reason in WRONG_EVENTS:
        lines = [
            *whole[:2],
            json.dumps({**json.loads(whole[2]), **change}),
            *([] if last else whole[3:4]),
            "",
        ]
        before = "\n".join(lines).encode("ascii")
        path.write_bytes(before)
        with pytest.raises(DataError, match=rf"t\.jsonl, line 3, .*{re.escape(reason)}"):
            read(path)
        assert path.read_bytes() == before, reason


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    """JSON of another kind, and values that Python cannot read, were not left by a torn recording."""
    path = tmp_path / "t.jsonl"
    recorded(path)
    whole = path.read_text(encoding="ascii")
    for line, reason in (
        *(
            (line, "expected a JSON object, got .*; mend that line")
            for line in ("[1]", "null", '"step"', "7")
        ),
        ("9" * 5000, "cannot be read: .*take such values out"),
        ("[" * 100_000 + "]" * 100_000, "cannot be read: .*take such values out"),
    ):
        path.write_text(f"{whole}{line}\n", encoding="ascii")
        with pytest.raises(DataError, match=rf"t\.jsonl, line 5, {reason}"):
            Trace.load(path)


def test_two_traces_in_one_file_are_refused(tmp_path: Path) -> None:
    """What follows the end of a trace would be lost unseen."""
    path = tmp_path / "t.jsonl"
    recorded(path).finish()
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match=r"t\.jsonl, line 6, follows the end of the trace"):
        Trace.load(path)


def test_a_file_without_a_whole_header_is_no_trace(tmp_path: Path) -> None:
    """What does not say what it is, is refused by name."""
    path = tmp_path / "t.jsonl"
    for content in (
        b"",
        b"\n",
        b'{"trace": "t", "purp',
        b"no trace\n",
        b'{"step": 0}\n',
        b"[]\n",
        b'{"trace": 3, "purpose": "p"}\n',
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"t\.jsonl holds no trace"):
            Trace.load(path)


def test_a_loaded_trace_is_closed(tmp_path: Path) -> None:
    """What was only read is not recorded into: it would go nowhere."""
    recorded(tmp_path / "t.jsonl")
    with pytest.raises(DataError, match="finished"):
        Trace.load(tmp_path / "t.jsonl").record(step(), LOW)


def test_a_torn_trace_goes_on_where_it_was_whole(tmp_path: Path) -> None:
    """Whatever byte a file ends at, a resumed trace takes the next event, and all of them come back."""
    path, torn = tmp_path / "t.jsonl", tmp_path / "torn.jsonl"
    trace = recorded(path)
    content = path.read_bytes()
    for length in range(content.index(b"\n"), len(content) + 1):
        torn.write_bytes(content[:length])
        resumed = Trace.resume(torn)
        before = resumed.events
        assert before == trace.events[: len(before)]
        event = resumed.record(step("paid", "shipped"), LOW)
        resumed.finish()
        assert Trace.load(torn).events == (*before, event), length
        assert Trace.load(torn).n_lost_bytes == 0


def test_a_finished_trace_stays_finished(tmp_path: Path) -> None:
    """Resuming does not open again what was ended; what stands after the end is cut off."""
    path = tmp_path / "t.jsonl"
    recorded(path).finish()
    whole = path.read_bytes()
    path.write_bytes(whole + b"more")
    resumed = Trace.resume(path)
    assert resumed.is_finished
    assert path.read_bytes() == whole
    with pytest.raises(DataError, match="finished"):
        resumed.record(step(), LOW)


def test_an_end_that_counts_other_events_is_none(tmp_path: Path) -> None:
    """A file that lost its last events is not taken for a finished trace, and can go on."""
    path = tmp_path / "t.jsonl"
    recorded(path).finish()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[-1]]))
    resumed = Trace.resume(path)
    assert not resumed.is_finished
    assert resumed.n_lost_bytes == len(lines[-1])
    assert len(Trace.load(path).events) == len(resumed.events) == 2


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    """A second trace of the same file is refused, and told how to go on."""
    recorded(tmp_path / "t.jsonl")
    before = (tmp_path / "t.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"Trace\.resume"):
        Trace(PURPOSE, path=tmp_path / "t.jsonl")
    assert (tmp_path / "t.jsonl").read_bytes() == before


def test_what_cannot_be_written_is_not_recorded(tmp_path: Path) -> None:
    """A disk error is one error with the path, and leaves trace and file in step."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        Trace(PURPOSE, path=tmp_path / "file" / "t.jsonl")
    trace = recorded(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(StoreError, match=r"t\.jsonl"):
        trace.record(step(), LOW)
    assert len(trace.events) == 3


def test_half_a_line_that_an_error_left_is_written_over(tmp_path: Path) -> None:
    """The next event stands on a line of its own."""
    path = tmp_path / "t.jsonl"
    trace = recorded(path)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "tra')
    trace.record(step(), LOW)
    assert Trace.load(path).events == trace.events


def test_a_file_is_plain_json_lines(tmp_path: Path) -> None:
    """Other programs read it line by line: header, events, end."""
    path = tmp_path / "t.jsonl"
    recorded(path, events=1).finish()
    header, event, end = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    assert header == {"trace": "t", "purpose": PURPOSE, "version": 1}
    assert event["transition"]["action"] == {"name": "pay", "arguments": {"amount": 3}}
    assert end == {"events": 1}


# --------------------------------------------------------------------------------------------- stores


async def test_a_store_gets_what_it_does_not_have() -> None:
    """Keeping a trace appends its new events, and says how many they were."""
    store, trace = Kept(), Trace(PURPOSE, id="t")
    trace.record(step(), LOW)
    assert await trace.save_to(store) == 1
    trace.record(step("paid", "shipped"), HIGH)
    assert await trace.save_to(store) == 1
    assert await trace.save_to(store) == 0
    stored = await store.trace("t")
    assert stored is not None
    assert Trace.from_stored(stored).events == trace.events
    assert (Trace.from_stored(stored).id, Trace.from_stored(stored).purpose) == ("t", PURPOSE)


async def test_a_trace_in_the_memory_comes_back_whole(tmp_path: Path) -> None:
    """The store that users open keeps header and events; a torn file that was resumed adds what is new."""
    path = tmp_path / "t.jsonl"
    trace = recorded(path)
    async with MemoryStore(tmp_path / "memory.db") as store:
        assert await trace.save_to(store) == 3
        path.write_bytes(path.read_bytes() + b'{"step": 3, "tor')
        resumed = Trace.resume(path)
        resumed.record(step("paid", "shipped"), LOW)
        assert await resumed.save_to(store) == 1
        stored = await store.trace("t")
    assert stored is not None
    assert Trace.from_stored(stored).events == resumed.events


# ------------------------------------------------------------------------------------- much, and at once


def test_threads_that_share_a_trace_lose_nothing(tmp_path: Path) -> None:
    """Steps are numbered in the order in which they were recorded, in the file as in memory."""
    trace = Trace(PURPOSE, path=tmp_path / "t.jsonl")

    def work(worker: int) -> None:
        for n in range(50):
            trace.record(step(after={"worker": worker, "n": n}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [event.step for event in trace.events] == [*range(200)]
    assert Trace.load(tmp_path / "t.jsonl").events == trace.events
    assert len({canonical_json(event.transition.after) for event in trace.events}) == 200


async def test_tasks_that_share_a_trace_lose_nothing() -> None:
    """Two tasks that record in turns give one trace with the steps of both."""
    trace = Trace(PURPOSE)

    async def work(worker: int) -> None:
        for n in range(5):
            trace.record(step(after=[worker, n]))
            await anyio.lowlevel.checkpoint()

    await fan_out(work, range(2))
    assert [event.step for event in trace.events] == [*range(10)]


def test_two_traces_of_one_file_do_not_erase_each_other(tmp_path: Path) -> None:
    """What somebody else recorded into the file meanwhile stays, and the step is refused."""
    path = tmp_path / "t.jsonl"
    mine = recorded(path)
    theirs = Trace.resume(path)
    theirs.record(step("paid", "shipped"))
    with pytest.raises(StoreError, match=r"t\.jsonl has lines that this trace did not write: .* own file"):
        mine.record(step(), LOW)
    assert Trace.load(path).events == theirs.events
    assert len(mine.events) == 3


async def test_a_long_trace_is_recorded_and_kept(tmp_path: Path) -> None:
    """Thousands of steps come back in their order; those that are new later are added."""
    path = tmp_path / "t.jsonl"
    trace = Trace(PURPOSE, id="t", path=path)
    for n in range(3_000):
        trace.record(step(n, n + 1))
    assert Trace.load(path).events == trace.events
    trace.record(step())
    async with MemoryStore(tmp_path / "memory.db") as memory:
        assert await Trace.load(path).save_to(memory) == 3_001
        stored = await memory.trace("t")
    assert stored is not None
    assert stored.events == trace.events


def test_a_purpose_may_be_long(tmp_path: Path) -> None:
    """It is kept whole, and shown by its beginning."""
    purpose = "user: do this\nassistant: I will\n" * 10_000
    Trace(purpose, id="t", path=tmp_path / "t.jsonl").finish()
    trace = Trace.load(tmp_path / "t.jsonl")
    assert trace.purpose == purpose
    assert repr(trace) == f"Trace({purpose[:60] + '...'!r}, id='t': 0 events, finished)"


def test_an_id_in_a_file_is_one_line(tmp_path: Path) -> None:
    """A header whose id would print other lines than its own is refused by file and field."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"trace": "a\\nb", "purpose": "p"}\n', encoding="ascii")
    with pytest.raises(DataError, match=r"t\.jsonl, line 1, `trace`: the id of a trace is 'a\\nb'; give it"):
        Trace.load(path)


def test_what_a_store_holds_is_read_whatever_its_id() -> None:
    """A trace that an older version stored under an odd id can still be learned from."""
    assert Trace.from_stored(StoredTrace(id="a\nb", purpose="p", events=())).id == "a\nb"
