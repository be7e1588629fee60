"""Traces: recorded as they happen, whole; what is torn is read up to where it is whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact import Trace
from reflact.errors import DataError, StoreError
from reflact.memory.models import Action, Evaluation, Label, Transition
from reflact.memory.store import MemoryStore
from reflact.types import canonical_json

PURPOSE = "Ship the order."
LOW = Evaluation(progress_before=0, progress_after=0, reasoning="Nothing yet.", confidence=0.9)
HIGH = Evaluation(progress_before=2, progress_after=6, reasoning="It is paid.", evidence=("paid",))
GOLD = Label(progress_before=2, progress_after=5, source="program")

VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def step(before: JsonValue = "open", after: JsonValue = "paid") -> Transition:
    return Transition(before=before, action=Action(name="pay", arguments={"amount": 3}), after=after)


def recorded(path: Path, events: int = 3) -> Trace:
    trace = Trace(PURPOSE, id="t", path=path)
    for n in range(events):
        trace.record(
            step(after={"n": n, "text": "\u5b8c\u6210 \U0001f389\n\u2028"}), HIGH, label=GOLD if n else None
        )
    return trace


def test_a_finished_trace_takes_nothing_more(path: Path) -> None:
    trace = recorded(path)
    with pytest.raises(DataError, match="trace t is finished"):
        Trace.load(path).record(step(), LOW)
    trace.finish()
    trace.finish()
    before = path.read_bytes()
    with pytest.raises(DataError, match="trace t is finished"):
        trace.record(step(), LOW)
    assert (len(trace.events), path.read_bytes()) == (3, before)


@example("\ud800", {"\udc00": ["\ud83d"]})
@given(before=VALUES, after=VALUES)
def test_states_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, before: JsonValue, after: JsonValue
) -> None:
    """Any text and any JSON value is kept whole, halves of surrogate pairs included."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    event = Trace(PURPOSE, path=path).record(step(before, after), HIGH)
    assert Trace.load(path).events == (event,)


@pytest.mark.slow
def test_an_event_is_in_the_file_as_soon_as_it_is_recorded(path: Path) -> None:
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


def test_a_file_torn_anywhere_gives_its_whole_part_and_goes_on(path: Path) -> None:
    torn = path.with_name("torn.jsonl")
    trace = recorded(path, events=2)
    content = path.read_bytes()
    ends = [n for n in range(len(content) + 1) if content[n : n + 1] == b"\n"]
    for length in range(ends[0], len(content) + 1):
        torn.write_bytes(content[:length])
        loaded = Trace.load(torn)
        assert loaded.events == trace.events[: sum(end <= length for end in ends[1:])], length
        assert (loaded.id, loaded.purpose) == ("t", PURPOSE)
        last = max(end for end in ends if end <= length)
        assert loaded.n_lost_bytes == max(0, length - last - 1)
        resumed = Trace.resume(torn)
        assert resumed.events == loaded.events
        event = resumed.record(step("paid", "shipped"), LOW)
        resumed.finish()
        again = Trace.load(torn)
        assert (again.events, again.n_lost_bytes) == ((*loaded.events, event), 0), length


def test_nothing_is_read_beyond_a_damaged_line(path: Path) -> None:
    trace = recorded(path)
    lines = path.read_bytes().splitlines()
    for damage in (b"\x00" * 40, b"\xff\xfe", b'{"step": 1', b"{'step': 1}", b""):
        path.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:], b""]))
        assert Trace.load(path).events == trace.events[:1], damage


WRONG_EVENTS: list[tuple[dict[str, JsonValue], str]] = [
    ({"transition": {"before": 1, "action": {}, "after": 2}}, "transition.action.name: Field required"),
    ({"transition": "paid"}, "transition: Input should be"),
    ({"step": 7}, "`step`: it is 7, and the next step is 1"),
    (
        {"label": {"progress_before": 0, "progress_after": 12, "source": "human"}},
        "less than or equal to 10; correct that line",
    ),
    ({"evaluation": {"progress_before": "x" * 99}}, "unable to parse string as a number"),
    ({"note": 1}, "note: Extra inputs"),
    ({"purpose": "Ship."}, "begins another trace"),
]
"""Fields that make the second event of a file wrong, and the reason in the message."""


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("read", [Trace.load, Trace.resume])
def test_a_whole_line_that_says_something_wrong_is_named(
    tmp_path: Path, read: Callable[[Path], Trace], last: bool
) -> None:
    path = tmp_path / "t.jsonl"
    recorded(path)
    whole = path.read_text(encoding="ascii").splitlines()
    for change, reason in WRONG_EVENTS:
        wrong = json.dumps({**json.loads(whole[2]), **change})
        lines = [*whole[:2], wrong, *([] if last else whole[3:4]), ""]
        before = "\n".join(lines).encode("ascii")
        path.write_bytes(before)
        with pytest.raises(DataError, match=rf"t\.jsonl, line 3, .*{re.escape(reason)}"):
            read(path)
        assert path.read_bytes() == before, reason


def test_a_file_without_a_whole_header_is_no_trace(path: Path) -> None:
    """What does not say what it is, is refused by name."""
    other_lines = (b"", b"\n", b"no trace\n", b'{"step": 0}\n', b"[]\n", b'{"trace": 3, "purpose": "p"}\n')
    for content in (*other_lines, b'{"trace": "t", "purp'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"t\.jsonl holds no trace"):
            Trace.load(path)


def test_threads_that_share_a_trace_lose_nothing(path: Path) -> None:
    """Steps are numbered in the order in which they were recorded, in the file as in memory."""
    trace = Trace(PURPOSE, path=path)

    def work(worker: int) -> None:
        for n in range(50):
            trace.record(step(after={"worker": worker, "n": n}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [event.step for event in trace.events] == [*range(200)]
    assert Trace.load(path).events == trace.events
    assert len({canonical_json(event.transition.after) for event in trace.events}) == 200


def test_two_traces_of_one_file_do_not_erase_each_other(path: Path) -> None:
    mine = recorded(path)
    theirs = Trace.resume(path)
    theirs.record(step("paid", "shipped"))
    with pytest.raises(StoreError, match=r"t\.jsonl has lines that this trace did not write: .* own file"):
        mine.record(step(), LOW)
    assert Trace.load(path).events == theirs.events
    assert len(mine.events) == 3


def reached(phi: float) -> Label:
    return Label(progress_after=phi, source="program")


def phis(trace: Trace) -> list[float | None]:
    return [None if event.label is None else event.label.progress_before for event in trace.events]


CHAIN: tuple[tuple[JsonValue, JsonValue, Label | None, float | None], ...] = (
    ("a", "b", reached(2), None),
    ("b", "c", reached(5), 2),
    ("other", "d", reached(6), None),
    ("d", "d", reached(6), 6),
    (1, 2, reached(7), None),
    (2.0, 3, reached(8), None),
    (3, 4, None, None),
    (4, 5, reached(9), None),
    (5, 6, Label(progress_before=1, progress_after=9, source="human"), 1),
)
"""States before and after, the label, and the phi before that is known."""


async def test_the_state_before_is_worth_what_the_same_state_was_worth(path: Path) -> None:
    trace = Trace(PURPOSE, id="t", path=path)
    for before, after, label, _ in CHAIN:
        trace.record(step(before, after), label=label)
    known = [phi for *_, phi in CHAIN]
    assert phis(trace) == known
    assert Trace.load(path).events == trace.events
    async with MemoryStore(path.with_name("memory.db")) as memory:
        await trace.save_to(memory)
        stored = await memory.trace("t")
    assert stored is not None
    assert phis(Trace.from_stored(stored)) == known


SPAN = {"name": "tool", "context": {"trace_id": "0x1", "span_id": "0x2"}}
LOGS = {
    "otlp": (
        "OpenTelemetry",
        {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "1", "spanId": "2"}]}]}]},
    ),
    "console exporter": ("OpenTelemetry", {**SPAN, "attributes": {"gen_ai.tool.name": "sort"}}),
    "one span": ("OpenTelemetry", {"traceId": "1", "spanId": "2", "name": "tool"}),
    "langfuse": ("Langfuse", {"id": "t", "input": "Sort", "observations": [{"id": "o", "type": "TOOL"}]}),
    "langfuse api": ("Langfuse", {"data": [{"id": "o", "traceId": "t", "type": "GENERATION"}], "meta": {}}),
    "langsmith": ("LangSmith", {"id": "r", "run_type": "chain", "inputs": {}, "outputs": {}}),
    "agents": ("OpenAI Agents SDK", {"object": "trace", "id": "t", "workflow_name": "w"}),
    "agents span": ("OpenAI Agents SDK", {"object": "trace.span", "span_data": {"type": "function"}}),
    "phoenix": ("OpenInference", {**SPAN, "attributes": {"openinference.span.kind": "TOOL"}}),
    "phoenix rows": ("OpenInference", {"name": "tool", "span_kind": "TOOL", "context.span_id": "2"}),
    "mlflow": ("MLflow", {"info": {"trace_id": "t"}, "data": {"spans": []}}),
    "mlflow rows": ("MLflow", {"trace_id": "t", "trace_metadata": {}, "spans": []}),
    "braintrust": ("Braintrust", {"span_attributes": {"type": "tool"}, "root_span_id": "1"}),
    "chat": ("chat messages", {"messages": [{"role": "user", "content": "Sort"}]}),
}


@pytest.mark.parametrize(("name", "entry"), LOGS.values(), ids=LOGS)
def test_logs_of_other_tools_are_named(tmp_path: Path, name: str, entry: dict[str, JsonValue]) -> None:
    recorded(tmp_path / "sound.jsonl")
    contents = {
        "lines.jsonl": f"{json.dumps(entry)}\n{json.dumps(entry)}\n",
        "list.json": json.dumps([entry]),
        "indented.json": json.dumps(entry, indent=2),
        "indented.jsonl": json.dumps([entry], indent=2),
    }
    for file, content in contents.items():
        path = tmp_path / file
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=rf"{re.escape(file)}.*{name}.*docs/logs\.md"):
            Trace.load_all(tmp_path)
        path.unlink()
    assert len(Trace.load_all(tmp_path)) == 1
