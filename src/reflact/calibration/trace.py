"""Traces: what an agent did, and how each step was scored if somebody did, kept as it happens.

A trace's file holds JSON lines: a header, one line an event, and a last line once the trace is
finished.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from reflact.calibration.foreign_logs import refuse_foreign_format
from reflact.concurrency import fan_out
from reflact.errors import DataError, StoreError
from reflact.jsonutil import describe_problems
from reflact.memory.cards import TraceIdentity, extend_content_hash, hash_purpose
from reflact.memory.models import Evaluation, Label, ScoreEvent, StateScore, StoredTrace, Transition
from reflact.text import suggest_path
from reflact.types import FrozenModel, canonical_json, digest_json

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

# What stands behind a message about a file that may be of another tool.
OTHER_LOGS_HINT = "docs/logs.md (From logs to a critic) shows how logs of other tools are converted"

# Events that are appended to a store in one transaction.
SAVE_BATCH_SIZE = 100

# The endings of files of traces.
TRACE_SUFFIXES = frozenset({".jsonl", ".ndjson"})

# Characters of a purpose in a representation.
MAX_SHOWN_PURPOSE = 60


# ------------------------------------------------------------------------------------------ files


class TraceHeader(FrozenModel):
    """The first line."""

    trace: str
    purpose: str
    version: Literal[1] = 1


class TraceEnd(FrozenModel):
    """The last line of a finished trace: how many events stand above it."""

    events: int


L = TypeVar("L", ScoreEvent, TraceEnd)


def _parse_header(path: Path, line: bytes) -> TraceHeader:
    try:
        header = TraceHeader.model_validate(_parse_json(line, f"{path}, line 1"))
    except ValidationError:
        raise DataError(
            f"{path} holds no trace: its first line is not the header that Trace(path=...) writes; "
            f"{OTHER_LOGS_HINT}"
        ) from None
    _require_trace_id(header.trace, subject=f"{path}, line 1, `trace`: the id of a trace")
    if not header.purpose.strip():
        raise DataError(
            f"{path}: the trace has no purpose; write into `purpose` of its first line what the "
            "agent was to achieve"
        )
    return header


def _parse_event(value: object, location: str, *, step: int) -> ScoreEvent:
    if isinstance(value, dict) and "purpose" in value:
        raise DataError(f"{location}, begins another trace; give each trace a file of its own")
    event = _parse_line(value, ScoreEvent, location)
    if event.step != step:
        raise DataError(
            f"{location}, `step`: it is {event.step}, and the next step is {step}; steps are "
            "numbered from 0 without gaps"
        )
    return event


def _parse_json(line: bytes, location: str) -> object:
    """Return the value of a line; None if the line is not whole."""
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location}, cannot be read: {error}; remove such values from the states"
        ) from None


def _parse_line(value: object, line_type: type[L], location: str) -> L:
    try:
        return line_type.model_validate(value)
    except ValidationError as error:
        raise DataError(f"{location}, {describe_problems(error)}; correct that line") from None


def _require_trace_id(name: str, *, subject: str = "the id of a trace") -> str:
    """Return the id of a trace; raise ``DataError`` unless it is printable text on one line."""
    if not name.strip() or not name.isprintable():
        raise DataError(f"{subject} is {name!r}; give it letters, digits and signs on one line")
    return name


def _create_file(path: Path) -> None:
    with _name_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise DataError(
                f"{path} exists: continue it with Trace.resume, remove it, or name another file"
            ) from None


def _write_line(path: Path, line: bytes, n_bytes: int, *, is_resumed: bool = False) -> None:
    """Write a line after what is whole; what was left half-written there is cut off.

    Whole lines are cut off only if the file ``is_resumed``; else another process wrote them.
    """
    with _name_write_errors(path), path.open("r+b") as file:
        file.seek(n_bytes)
        if not is_resumed and b"\n" in file.read():
            raise StoreError(
                f"{path} has lines that this trace did not write: another process records in it, "
                "so this step was not recorded; give each process its own file"
            )
        file.truncate(n_bytes)
        file.seek(n_bytes)
        file.write(line)


@contextmanager
def _name_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from None


def _encode_line(value: TraceHeader | ScoreEvent | TraceEnd, location: str) -> bytes:
    """Return a line of the file, also if there is none: what no file can hold, no memory can."""
    try:
        return f"{canonical_json(value.model_dump())}\n".encode("ascii")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location} cannot be written: {error}; remove such values from the states"
        ) from None


# ------------------------------------------------------------------------------------------ traces


class Trace:
    """The steps of one run of an agent, each with its score and what is right where these are
    known.

    Args:
        purpose: What the agent is to achieve, in words.
        id: Names the trace; None: a random name.
        path: A file that each event is appended to as it happens; its folder is created if missing.
            The file must not exist; see ``resume``.

    Raises:
        DataError: The purpose is empty, the id is no line of text, or the file exists.
        StoreError: The file cannot be written.
    """

    def __init__(
        self,
        purpose: str,
        *,
        id: str | None = None,  # noqa: A002
        path: Path | str | None = None,
    ) -> None:
        if not purpose.strip():
            raise DataError(
                "a trace needs a purpose: say in words what the agent was to achieve, because "
                "steps are scored by their progress towards it"
            )
        trace_id = uuid4().hex if id is None else _require_trace_id(id)
        self._header = TraceHeader(trace=trace_id, purpose=purpose)
        self._events: list[ScoreEvent] = []
        self._contents: list[str] = []
        self._lock = Lock()
        self.is_finished = False
        """Whether nothing can be recorded any more."""
        self.n_lost_bytes = 0
        """Bytes at the end of the file that were not whole when it was read, and were left out."""
        self._path = None if path is None else Path(path)
        self._n_bytes = 0
        self._lacks_break = False
        if self._path is not None:
            _create_file(self._path)
        self._write(_encode_line(self._header, f"trace {trace_id}"))

    def __repr__(self) -> str:
        state = "finished" if self.is_finished else "open"
        rest = "..." if len(self.purpose) > MAX_SHOWN_PURPOSE else ""
        short = f"{self.purpose[:MAX_SHOWN_PURPOSE]}{rest}"
        return f"Trace({short!r}, id={self.id!r}: {len(self.events)} events, {state})"

    @property
    def id(self) -> str:
        """The trace's name."""
        return self._header.trace

    @property
    def purpose(self) -> str:
        """What the agent is to achieve."""
        return self._header.purpose

    @property
    def events(self) -> tuple[ScoreEvent, ...]:
        """The steps so far; the n-th has number n, from 0."""
        return tuple(self._events)

    @property
    def n_labels(self) -> int:
        """The number of labelled steps."""
        return sum(event.label is not None for event in self._events)

    @property
    def recording(self) -> TraceIdentity:
        """Its name and the hashes of what it holds, by which tests on it are counted."""
        contents = list(self._contents)
        for event in self._events[len(contents) :]:
            last = contents[-1] if contents else hash_purpose(self.purpose)
            contents.append(extend_content_hash(last, event.transition))
        self._contents = contents
        return TraceIdentity(self.id, tuple(contents) or (hash_purpose(self.purpose),))

    @property
    def content_hash(self) -> str:
        """The hash of its purpose and all steps, without name and scores: copies are equal."""
        return self.recording.content_hashes[-1]

    def record(
        self,
        transition: Transition,
        score: StateScore | Evaluation | None = None,
        *,
        label: Label | None = None,
    ) -> ScoreEvent:
        """Append a step; it is in the file, if there is one, when this returns. Tasks and threads
        may share a trace.

        Args:
            transition: What the agent did; states are kept whole.
            score: How it was judged; of a critic's score what counts after the guards. None if no
                critic saw it.
            label: What is right, if that is known. If it says nothing of the state before, that
                follows from equal states: after the step before, or after this step if nothing
                changed.

        Raises:
            DataError: The trace is finished, or a state cannot be written.
            StoreError: The file cannot be written; the step is not recorded.
        """
        if self.is_finished:
            raise DataError(f"trace {self.id} is finished: record further steps in another trace")
        evaluation = score.evaluation if isinstance(score, StateScore) else score
        with self._lock:
            event = ScoreEvent(
                step=len(self._events), transition=transition, evaluation=evaluation, label=label
            )
            event = _add_progress_before(event, self._events)
            self._write(_encode_line(event, f"step {event.step} of trace {self.id}"))
            self._events.append(event)
        return event

    def finish(self) -> None:
        """End the trace; ending it again does nothing.

        Raises:
            StoreError: The file cannot be written; the trace goes on.
        """
        if not self.is_finished:
            self._write(_encode_line(TraceEnd(events=len(self._events)), f"trace {self.id}"))
            self.is_finished = True

    async def save_to(self, store: MemoryStore) -> int:
        """Append to a store what it does not have yet, and return how many events that were.

        Raises:
            DataError: The store has another trace of this name.
            StoreError: The store cannot be written.
        """
        await store.open_trace(self.id, self.purpose)
        events = self.events
        n_new = 0
        for start in range(0, len(events), SAVE_BATCH_SIZE):
            batch = events[start : start + SAVE_BATCH_SIZE]
            n_new += sum(await fan_out(lambda event: store.append(self.id, event), batch))
        return n_new

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read the complete lines of a file; the trace takes no further events.

        Raises:
            DataError: The header is not whole, it has no purpose, or a whole line says something
                wrong; names file, line and field.
            StoreError: The file cannot be read.
        """
        trace = cls._read(Path(path))
        trace.is_finished = True
        return trace

    @classmethod
    def load_all(cls, folder: Path | str) -> tuple[Trace, ...]:
        """Read the ``.jsonl`` and ``.ndjson`` files of a folder, to any depth, in the order of
        their paths.

        Raises:
            DataError: It is no folder, holds none, one that is no trace, or two of one name.
            StoreError: A file cannot be read.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(
                f"{folder} is not a folder of traces; name the one that holds their .jsonl files"
                f"{suggest_path(folder)}"
            )
        paths = sorted(folder.rglob("*"))
        for path in paths:
            if path.suffix.lower() == ".json" and path.is_file():
                refuse_foreign_format(path, path.read_bytes())
        traces = tuple(cls.load(path) for path in paths if path.suffix.lower() in TRACE_SUFFIXES)
        if not traces:
            raise DataError(
                f"{folder} holds no trace, which is a .jsonl file that Trace(path=...) writes; "
                f"{OTHER_LOGS_HINT}"
            )
        for name, count in sorted(Counter(trace.id for trace in traces).items()):
            if count > 1:
                raise DataError(f"{folder}: several files have the trace {name}; keep one of them")
        return traces

    @classmethod
    def resume(cls, path: Path | str) -> Trace:
        """Read the complete lines of a file, cut off the rest, and continue to record into it.

        A trace that was finished stays so.

        Raises:
            DataError: As for ``load``; the file stays as it is.
            StoreError: The file cannot be read or written.
        """
        trace = cls._read(Path(path))
        trace._path = Path(path)
        if trace.n_lost_bytes or trace._lacks_break:
            trace._write(b"\n" if trace._lacks_break else b"", is_resumed=True)
        return trace

    @classmethod
    def from_stored(cls, stored: StoredTrace) -> Trace:
        """Return a stored trace; it takes no further events.

        Raises:
            DataError: It has no purpose.
        """
        if not stored.purpose.strip():
            raise DataError(
                f"trace {stored.id} is stored without a purpose, so its steps cannot be scored: "
                "forget the trace and store it again with a purpose"
            )
        return cls._build(TraceHeader(trace=stored.id, purpose=stored.purpose), stored.events)

    def add_evaluations(self, evaluations: Mapping[int, Evaluation]) -> Trace:
        """Return a finished copy in which steps, by number, have these evaluations."""
        events = [
            event.model_copy(update={"evaluation": evaluations.get(event.step, event.evaluation)})
            for event in self._events
        ]
        return self._build(self._header, events)

    @classmethod
    def _build(cls, header: TraceHeader, events: Iterable[ScoreEvent]) -> Trace:
        trace = cls(header.purpose)
        trace._header = header
        for event in events:
            trace._events.append(_add_progress_before(event, trace._events))
        trace.is_finished = True
        return trace

    @classmethod
    def _read(cls, path: Path) -> Trace:
        """Return the trace of a file's complete lines; it is finished if its last line says so."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
        first, *lines = content.splitlines(keepends=True) or [b""]
        try:
            header = _parse_header(path, first)
        except DataError:
            refuse_foreign_format(path, content)
            raise
        n_bytes = len(first)
        events: list[ScoreEvent] = []
        end: TraceEnd | None = None
        for number, line in enumerate(lines, 2):
            location = f"{path}, line {number}"
            value = _parse_json(line, location)
            if value is None:  # nothing is read beyond a damaged line
                break
            if end is not None:
                raise DataError(
                    f"{location}, follows the end of the trace; remove it, because a file has one "
                    "trace"
                )
            if isinstance(value, dict) and "events" in value:
                end = _parse_line(value, TraceEnd, location)
                if end.events != len(events):
                    continue
            else:
                events.append(_parse_event(value, location, step=len(events)))
            n_bytes += len(line)
        trace = cls._build(header, events)
        trace.is_finished = end == TraceEnd(events=len(events))
        trace.n_lost_bytes = len(content) - n_bytes
        trace._n_bytes = n_bytes
        trace._lacks_break = not content[:n_bytes].endswith(b"\n")
        return trace

    def _write(self, line: bytes, *, is_resumed: bool = False) -> None:
        if self._path is not None:
            _write_line(self._path, line, self._n_bytes, is_resumed=is_resumed)
            self._n_bytes += len(line)


def _add_progress_before(event: ScoreEvent, earlier_events: Sequence[ScoreEvent]) -> ScoreEvent:
    """Return a step whose label has the progress before, if that follows from equal states."""
    label = event.label
    step = event.transition
    if label is None or label.progress_before is not None:
        return event
    last = earlier_events[-1] if earlier_events else None
    progress_before: float | None = None
    if not step.changes_state:
        progress_before = label.progress_after
    elif last is not None and digest_json(last.transition.after) == digest_json(step.before):
        progress_before = None if last.label is None else last.label.progress_after
    label = label.model_copy(update={"progress_before": progress_before})
    return event.model_copy(update={"label": label})
