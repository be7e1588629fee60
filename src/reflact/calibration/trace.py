"""Traces: what an agent did, and how each step was scored if somebody did, kept as it happens.

A trace's file holds JSON lines: a header, one line an event, and a last line once the trace is
finished.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from reflact.concurrency import fan_out
from reflact.errors import DataError, StoreError
from reflact.memory.cards import TraceIdentity, extend_content_hash, hash_purpose
from reflact.memory.models import Evaluation, Label, ScoreEvent, StateScore, StoredTrace, Transition
from reflact.text import suggest_path
from reflact.types import FrozenModel, canonical_json, digest_json

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore


# At most so many characters of a wrong value stand in a message.
MAX_SHOWN_INPUT = 40


def require_trace_id(name: str, *, subject: str = "the id of a trace") -> str:
    """Return the id of a trace; raise ``DataError`` unless it is printable text on one line."""
    if not name.strip() or not name.isprintable():
        raise DataError(f"{subject} is {name!r}; give it letters, digits and signs on one line")
    return name


def describe_first_error(error: ValidationError) -> str:
    """Return the first error of a value from JSON: its field, the reason and the wrong value."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    field = f"`{name}`: " if name else ""
    match first["type"]:
        case "missing":
            return f"{field}is missing"
        case "extra_forbidden":
            return f"{field}is not a known field"
        case "json_invalid":
            return f"{field}it is not complete JSON"
        case "model_type":
            reason = "expected a JSON object"
        case _:
            reason = first["msg"][:1].lower() + first["msg"][1:]
    wrong = json.dumps(first["input"])
    return field + (reason if len(wrong) > MAX_SHOWN_INPUT else f"{reason}, got {wrong}")


class TraceHeader(FrozenModel):
    """The first line."""

    trace: str
    purpose: str
    version: Literal[1] = 1


class TraceEnd(FrozenModel):
    """The last line of a finished trace: how many events stand above it."""

    events: int


L = TypeVar("L", TraceHeader, ScoreEvent, TraceEnd)


class TraceFileContent(NamedTuple):
    """The complete lines of a file; the number of their bytes, and of the bytes after them.

    ``is_open`` says that the last whole line lacks its line break.
    """

    header: TraceHeader
    events: tuple[ScoreEvent, ...]
    finished: bool = True
    n_bytes: int = 0
    n_lost_bytes: int = 0
    is_open: bool = False


def _read_file(path: Path) -> TraceFileContent:
    """Read the complete lines of a trace's file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    lines = content.splitlines(keepends=True)
    try:
        header = _read_header(path, lines)
    except DataError:
        refuse_foreign_format(path, content)
        raise
    events: list[ScoreEvent] = []
    end: TraceEnd | None = None
    for number, line in enumerate(lines[1:], 2):
        location = f"{path}, line {number}"
        try:
            value = _parse_json(line, location)
        except _TornLine:
            break
        if end is not None:
            raise DataError(
                f"{location}, follows the end of the trace; remove it, because a file has one trace"
            )
        if isinstance(value, dict) and "events" in value:
            end = _parse_line(value, TraceEnd, location)
        else:
            events.append(_parse_event(value, location, step=len(events)))
    finished = end == TraceEnd(events=len(events))
    length = sum(map(len, lines[: 1 + len(events) + finished]))
    unbroken = not content[:length].endswith(b"\n")
    return TraceFileContent(
        header, tuple(events), finished, length, len(content) - length, unbroken
    )


def _read_header(path: Path, lines: Sequence[bytes]) -> TraceHeader:
    try:
        value = _parse_json(lines[0] if lines else b"", f"{path}, line 1")
        header = TraceHeader.model_validate(value)
    except (_TornLine, ValidationError):
        raise DataError(
            f"{path} holds no trace: its first line is not the header that Trace(path=...) writes; "
            f"{OTHER_LOGS_HINT}"
        ) from None
    require_trace_id(header.trace, subject=f"{path}, line 1, `trace`: the id of a trace")
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
            "numbered from 0, so a line before it is missing or occurs twice"
        )
    return event


# Logs of others, by keys that one of their objects has together; a dot stands before the keys of an
# object in it.
FOREIGN_FORMATS: Mapping[str, tuple[str, ...]] = {
    "OpenInference (Arize Phoenix)": (
        "attributes.openinference.span.kind",
        "span_kind context.span_id",
    ),
    "OpenTelemetry": (
        "resourceSpans",
        "scopeSpans",
        "traceId spanId",
        "context.trace_id context.span_id",
    ),
    "Langfuse": ("observations", "traceId type"),
    "LangSmith": ("run_type", "child_runs"),
    "the OpenAI Agents SDK": ("span_data", "object workflow_name"),
    "MLflow": ("info data.spans", "trace_metadata spans"),
    "Braintrust": ("span_attributes root_span_id",),
    "chat messages": ("messages",),
}

# A longer file is not looked at to find out whose format it has.
MAX_LOG_BYTES = 64 * 1024 * 1024


def refuse_foreign_format(path: Path, content: bytes) -> None:
    """Raise DataError if a file looks like logs of another tool."""
    found = None
    for part in (content[:MAX_LOG_BYTES], content.partition(b"\n")[0]):
        with suppress(ValueError, RecursionError):
            found = found or _find_format(json.loads(part), depth=3)
    if found is not None:
        raise DataError(
            f"{path}: this looks like an export of {found}, and not like a trace of reflact; "
            "convert it as docs/logs.md (From logs to a critic) shows"
        )


def _find_format(value: object, *, depth: int) -> str | None:
    """Return whose format a value has, or the first entry of a list in it."""
    entries = value[:1] if isinstance(value, list) else []
    if isinstance(value, dict):
        nested = (
            f"{key}.{name}"
            for key, inner in value.items()
            if isinstance(inner, dict)
            for name in inner
        )
        keys = {*value, *nested}
        for name, marks in FOREIGN_FORMATS.items():
            if any(keys.issuperset(mark.split()) for mark in marks):
                return name
        entries = [inner for inner in value.values() if isinstance(inner, list)]
    found = (_find_format(entry, depth=depth - 1) for entry in entries if depth)
    return next(filter(None, found), None)


# What stands behind every message about a file of another format.
OTHER_LOGS_HINT = "docs/logs.md (From logs to a critic) shows how logs of other tools are converted"


class _TornLine(Exception):
    """A line that is not whole; never leaves this module."""


def _parse_json(line: bytes, location: str) -> object:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise _TornLine from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location}, cannot be read: {error}; remove such values from the states"
        ) from None


def _parse_line(value: object, line_type: type[L], location: str) -> L:
    try:
        return line_type.model_validate(value)
    except ValidationError as error:
        raise DataError(f"{location}, {describe_first_error(error)}; correct that line") from None


# Events that are appended to a store in one transaction.
SAVE_BATCH_SIZE = 100

# Characters of a purpose in a representation.
MAX_SHOWN_PURPOSE = 60


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
        self._header = TraceHeader(
            trace=uuid4().hex if id is None else require_trace_id(id), purpose=purpose
        )
        self._events: list[ScoreEvent] = []
        self._lock = Lock()
        self._contents: list[str] = []
        self.is_finished = False
        """Whether nothing can be recorded any more."""
        self.n_lost_bytes = 0
        """Bytes at the end of the file that were not whole when it was read, and were left out."""
        self._path = None if path is None else Path(path)
        self._length = 0
        if self._path is not None:
            _create_file(self._path)
        self._write(_encode_line(self._header, str(self._path)))

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
            self._write(_encode_line(TraceEnd(events=len(self._events)), str(self._path)))
            self.is_finished = True

    async def save_to(self, store: MemoryStore) -> int:
        """Append to a store what it does not have yet, and return how many events that were.

        Raises:
            DataError: The store has another trace of this name.
            StoreError: The store cannot be written.
        """
        await store.open_trace(self.id, self.purpose)
        events = self.events
        new = 0
        for start in range(0, len(events), SAVE_BATCH_SIZE):
            together = events[start : start + SAVE_BATCH_SIZE]
            new += sum(await fan_out(lambda event: store.append(self.id, event), together))
        return new

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read the complete lines of a file; the trace takes no further events.

        Raises:
            DataError: The header is not whole, it has no purpose, or a whole line says something
                wrong; names file, line and field.
            StoreError: The file cannot be read.
        """
        return cls._from_file(_read_file(Path(path)))

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
        for path in sorted(folder.rglob("*.json")):
            if path.is_file() and path.stat().st_size <= MAX_LOG_BYTES:
                refuse_foreign_format(path, path.read_bytes())
        files = (
            path
            for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in {".jsonl", ".ndjson"}
        )
        traces = tuple(cls.load(path) for path in files)
        if not traces:
            raise DataError(
                f"{folder} holds no trace, which is a .jsonl file that Trace(path=...) writes; "
                f"{OTHER_LOGS_HINT}"
            )
        names = Counter(trace.id for trace in traces)
        twice = next((name for name, count in sorted(names.items()) if count > 1), None)
        if twice is not None:
            raise DataError(f"{folder}: several files have the trace {twice}; keep one of them")
        return traces

    @classmethod
    def resume(cls, path: Path | str) -> Trace:
        """Read the complete lines of a file, cut off the rest, and continue to record into it.

        A trace that was finished stays so.

        Raises:
            DataError: As for ``load``; the file stays as it is.
            StoreError: The file cannot be read or written.
        """
        path = Path(path)
        whole = _read_file(path)
        trace = cls._from_file(whole)
        trace.is_finished = whole.finished
        trace._path = path
        trace._length = whole.n_bytes
        if whole.n_lost_bytes or whole.is_open:
            trace._write_after_whole(path, b"\n" if whole.is_open else b"")
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
        header = TraceHeader(trace=stored.id, purpose=stored.purpose)
        return cls._from_file(TraceFileContent(header, stored.events))

    def add_evaluations(self, evaluations: Mapping[int, Evaluation]) -> Trace:
        """Return a finished copy in which steps, by number, have these evaluations."""
        events = tuple(
            event.model_copy(update={"evaluation": evaluations.get(event.step, event.evaluation)})
            for event in self._events
        )
        return self._from_file(TraceFileContent(self._header, events))

    @classmethod
    def _from_file(cls, whole: TraceFileContent) -> Trace:
        trace = cls(whole.header.purpose)
        trace._header = whole.header
        for event in whole.events:
            trace._events.append(_add_progress_before(event, trace._events))
        trace.is_finished = True
        trace.n_lost_bytes = whole.n_lost_bytes
        return trace

    def _write(self, line: bytes) -> None:
        """Write after what is whole; what an earlier attempt left half-written there is cut off."""
        if self._path is None:
            return
        with _name_write_errors(self._path), self._path.open("rb") as file:
            file.seek(self._length)
            others = b"\n" in file.read()
        if others:
            raise StoreError(
                f"{self._path} has lines that this trace did not write: another process records in "
                "it, so this step was not recorded; give each process its own file"
            )
        self._write_after_whole(self._path, line)

    def _write_after_whole(self, path: Path, line: bytes) -> None:
        """Write a line in place of whatever follows what is whole."""
        with _name_write_errors(path), path.open("r+b") as file:
            file.truncate(self._length)
            file.seek(self._length)
            file.write(line)
        self._length += len(line)


def _encode_line(value: TraceHeader | ScoreEvent | TraceEnd, location: str) -> bytes:
    """Return a line of the file, also if there is none: what no file can hold, no memory can."""
    try:
        return f"{canonical_json(value.model_dump())}\n".encode("ascii")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location} cannot be written: {error}; remove such values from the states"
        ) from None


def _add_progress_before(event: ScoreEvent, earlier_events: Sequence[ScoreEvent]) -> ScoreEvent:
    """Return a step whose label has the progress before, if that follows from equal states."""
    label = event.label
    step = event.transition
    if label is None or label.progress_before is not None:
        return event
    last = earlier_events[-1] if earlier_events else None
    known: float | None = None
    if not step.changes_state:
        known = label.progress_after
    elif last is not None and last.label is not None:
        # what samples agree on says nothing beside a program or a person
        is_as_reliable = last.label.source != "agreement" or label.source == "agreement"
        if is_as_reliable and digest_json(last.transition.after) == digest_json(step.before):
            known = last.label.progress_after
    return event.model_copy(update={"label": label.model_copy(update={"progress_before": known})})


def _create_file(path: Path) -> None:
    with _name_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise DataError(
                f"{path} exists: continue it with Trace.resume, remove it, or name another file"
            ) from None


@contextmanager
def _name_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from None
