"""Cassettes: recorded HTTP requests and answers, replayed by content.

A cassette is a file of JSON lines, one per answered request. Hosts, keys and other headers are
never written. A line before them has the identity of the run that was recorded, so that a miss can
name what has changed since. An answer is found by method, path, body and call, independent of
order. A request without a recorded answer is an error and is not sent. A recording serves streamed
and plain requests alike.
"""

from __future__ import annotations

import codecs
import difflib
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
from pydantic import Field, JsonValue, ValidationError

from reflact.errors import CassetteError, CassetteMiss
from reflact.llm.cache_keys import drop_stream_fields
from reflact.llm.completions import AgentTransport, AnswerFault, read_completion, select_headers
from reflact.llm.connection_pool import PooledTransport
from reflact.llm.redaction import RedactingTransport
from reflact.text import suggest_path
from reflact.types import FrozenModel, canonical_json, digest_json

# The method in the line of a run's identity.
IDENTITY_METHOD = "IDENTITY"

# The scheme and the host of an address, in JSON inside JSON too.
ADDRESS = re.compile(r"(https?://)[^\s\"\\\\/]*")

# The extension of a request with the caps of its recording: a nearly spent budget sends lower ones.
RECORDED_CAPS = "reflact_recorded_caps"

# What to do if a cassette cannot be read or written.
ADVICE = "; mend that and run the same command again, which keeps what is recorded"

# Long lines are split here before they are compared.
CLAUSE_END = re.compile("(?<=[.,;!?]) ")


class Interaction(FrozenModel):
    """One line of a cassette."""

    call_id: str
    method: str
    path: str
    body: JsonValue
    status: int = Field(ge=100, le=599)
    content_type: str
    chunks: tuple[str, ...]

    @property
    def key(self) -> str:
        """Digest of call, method, path and body; the key of an answer."""
        body = canonical_json(drop_stream_fields(self.body))
        return digest_json([self.call_id, self.method, self.path, body])


# Returns a phrase for each difference of two identities.
DescribeChanges = Callable[[Mapping[str, JsonValue], Mapping[str, JsonValue]], Sequence[str]]


class RunIdentity(NamedTuple):
    """What a run is made of, and how its differences from another one are described."""

    values: Mapping[str, JsonValue]
    describe_changes: DescribeChanges

    def hide_hosts(self) -> JsonValue:
        """Return the values without the hosts of addresses."""
        value: JsonValue = json.loads(ADDRESS.sub(r"\1", canonical_json(dict(self.values))))
        return value


@asynccontextmanager
async def open_cassette(
    path: Path,
    *,
    mode: Literal["replay", "record"],
    inner: httpx.AsyncBaseTransport | None = None,
    identity: RunIdentity | None = None,
) -> AsyncIterator[httpx.AsyncBaseTransport]:
    """Open a cassette as a transport; recording asks ``inner`` (default: the network).

    ``identity`` is that of the run.

    A last line that was cut off is removed. A new file into which nothing was recorded is removed
    at the end.

    Raises:
        CassetteError: The file is missing, malformed or cannot be written.
    """
    if mode == "replay":
        yield ReplayTransport(path, read_cassette(path), identity)
        return
    async with AsyncExitStack() as stack:
        file = stack.enter_context(_open_recording(path))
        if inner is None:
            inner = await stack.enter_async_context(PooledTransport())
        yield RecordTransport(path, file, inner, identity)


@contextmanager
def _open_recording(path: Path) -> Iterator[FileIO]:
    with _explain(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise CassetteError(
                f"cannot write the cassette {path}: it is no regular file; name another"
            )
        file = path.open("a+b", buffering=0)
    with file:
        yield file
    if path.stat().st_size == 0:
        path.unlink()


def read_cassette(path: Path) -> tuple[Interaction, ...]:
    """Read all lines of a cassette; CassetteError names the line that is malformed."""
    with _explain(path, "read"):
        interactions = _parse_lines(path, path.read_bytes())
    if not interactions:
        raise CassetteError(f"the cassette {path} holds no recorded answer; record it again")
    return interactions


@contextmanager
def _explain(path: Path, verb: str) -> Iterator[None]:
    """Raise CassetteError in place of an error of the system."""
    try:
        yield
    except OSError as error:
        raise CassetteError(
            f"cannot {verb} the cassette {path}: {error.strerror or error}"
            f"{suggest_path(path) or ADVICE}"
        ) from None


def _parse_lines(path: Path, content: bytes) -> tuple[Interaction, ...]:
    interactions = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                interactions.append(Interaction.model_validate_json(line))
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise CassetteError(
                    f"the cassette {path} is malformed in line {number}: {reason}"
                ) from None
    return tuple(interactions)


def _read_recorded(path: Path, file: FileIO) -> tuple[Interaction, ...]:
    """Return what is recorded, and remove a last line that was cut off."""
    file.seek(0)
    content = file.readall()
    end = content.rfind(b"\n") + 1
    last = content[end:]
    try:
        interactions = _parse_lines(path, content)
    except CassetteError:
        if not last or not last.startswith(LINE_START[: len(last)]):
            raise
        interactions = _parse_lines(path, content[:end])
        file.truncate(end)
    else:
        if last:
            file.write(b"\n")
    return interactions


class ReplayTransport(httpx.AsyncBaseTransport):
    """Answers requests from a cassette."""

    def __init__(
        self,
        path: Path,
        interactions: tuple[Interaction, ...],
        identity: RunIdentity | None = None,
    ) -> None:
        self._path = path
        self._identity = identity
        self._recorded = [i.body for i in interactions if i.method == IDENTITY_METHOD]
        self._answers = {i.key: i for i in interactions if i.method != IDENTITY_METHOD}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the recorded answer.

        Raises:
            CassetteMiss: The cassette has no answer; shows the nearest recorded request and the
                difference.
        """
        body = json.loads((await request.aread()).decode("utf-8") or "null")
        if caps := request.extensions.get(RECORDED_CAPS):
            body |= caps
        asked = Interaction(
            call_id=request.extensions.get("reflact_call_id", ""),
            method=request.method,
            path=request.url.path,
            body=body,
            status=200,
            content_type="",
            chunks=(),
        )
        found = self._answers.get(asked.key)
        if found is None:
            return await self._answer_unknown(request, asked)
        return _build_response(found, {"content-type": found.content_type})

    async def _answer_unknown(self, request: httpx.Request, asked: Interaction) -> httpx.Response:
        purpose = asked.call_id.split("/")[1] if "/" in asked.call_id else "unknown purpose"
        start = (
            f"the cassette {self._path} holds no answer to this request ({purpose}, "
            f"{asked.call_id})"
        )
        if changes := self._list_changes():
            start += f"; since it was recorded, {', '.join(changes)}"
        near = [i for i in self._answers.values() if i.call_id == asked.call_id]
        near = near or [i for i in self._answers.values() if f"/{purpose}/" in i.call_id]
        if not near:
            raise CassetteMiss(f"{start}, nor one of its kind; record it again")
        text = _format_body(asked.body)
        matcher = difflib.SequenceMatcher(b=text)

        def measure_similarity(other: Interaction) -> float:
            matcher.set_seq1(_format_body(other.body))
            return matcher.quick_ratio()

        nearest = max(near[:50], key=measure_similarity)
        recorded = _split_clauses(_format_body(nearest.body))
        asked_for = _split_clauses(text)
        lines = difflib.unified_diff(recorded, asked_for, "recorded", "asked", n=0, lineterm="")
        raise CassetteMiss(
            f"{start}; the nearest recorded one is {nearest.call_id}",
            difference=tuple(line[:200] for line in islice(lines, 12)),
        )

    def _list_changes(self) -> Sequence[str]:
        """Return what has changed in the run since it was recorded, as far as that is known."""
        before = self._recorded[-1] if self._recorded else None
        if self._identity is None or not isinstance(before, dict):
            return ()
        after = self._identity.hide_hosts()
        assert isinstance(after, dict)
        return self._identity.describe_changes(before, after)


# Final statuses; redirects, refused keys and temporary failures are not recorded.
RECORDED = frozenset({*range(200, 300), 400, 404, 413, 415, 422, 501})
# The beginning of each line.
LINE_START = b'{"call_id":'


class RecordTransport(ReplayTransport):
    """Sends requests and writes each final answer as a line; does not repeat recorded requests.

    A successful answer that is no completion is repeated by the client, so it is not recorded.
    """

    def __init__(
        self,
        path: Path,
        file: FileIO,
        inner: httpx.AsyncBaseTransport,
        identity: RunIdentity | None = None,
    ) -> None:
        with _explain(path, "write"):
            recorded = _read_recorded(path, file)
        super().__init__(path, tuple(filter(_is_final, recorded)), identity)
        self._file = file
        self._inner = RedactingTransport(AgentTransport(inner))

    @property
    def call_ids(self) -> frozenset[str]:
        """The calls that have a recorded answer."""
        return frozenset(interaction.call_id for interaction in self._answers.values())

    async def _answer_unknown(self, request: httpx.Request, asked: Interaction) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        pieces: list[bytes] = []
        try:
            async for piece in response.aiter_raw():
                pieces.append(piece)  # noqa: PERF401 - an error keeps what arrived before
        except AnswerFault:
            if response.is_success:
                raise
        finally:
            await response.aclose()
        headers = select_headers(response)
        answered = asked.model_copy(
            update={
                "status": response.status_code,
                "content_type": headers["content-type"],
                "chunks": _decode_pieces(pieces),
            }
        )
        if _is_final(answered):
            with _explain(self._path, "write"):
                self._append_identity()
                self._append(answered)
            self._answers[answered.key] = answered
        return _build_response(answered, headers)

    def _append_identity(self) -> None:
        """Write the identity of the run before its first answer."""
        if self._identity is None:
            return
        identity = self._identity.hide_hosts()
        if identity not in self._recorded[-1:]:
            line = Interaction(
                call_id="",
                method=IDENTITY_METHOD,
                path="",
                body=identity,
                status=100,
                content_type="",
                chunks=(),
            )
            self._append(line)
            self._recorded.append(identity)

    def _append(self, interaction: Interaction) -> None:
        """Write a line as a whole, or nothing of it."""
        line = memoryview(interaction.model_dump_json().encode("utf-8") + b"\n")
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(end)
            raise


def _is_final(answered: Interaction) -> bool:
    """Whether a line is an answer that the client uses, or an identity; other requests have no call
    id.
    """
    if answered.method == IDENTITY_METHOD:
        return True
    if answered.status not in RECORDED:
        return False
    if answered.status < 300 and answered.call_id:
        try:
            read_completion(answered.content_type, "".join(answered.chunks))
        except AnswerFault:
            return False
    return True


def _decode_pieces(pieces: list[bytes]) -> tuple[str, ...]:
    """Return the text of an answer in its pieces, decoded as ``completions.decode_text`` does."""
    decoder = codecs.getincrementaldecoder(json.detect_encoding(b"".join(pieces)))("replace")
    texts = [*map(decoder.decode, pieces), decoder.decode(b"", final=True)]
    return tuple(text for text in texts if text)


def _build_response(answered: Interaction, headers: dict[str, str]) -> httpx.Response:
    """Return an answer whose body keeps its division into pieces."""

    async def write() -> AsyncIterator[bytes]:
        for piece in answered.chunks:
            yield piece.encode("utf-8")

    return httpx.Response(answered.status, headers=headers, content=write())


def _format_body(body: JsonValue) -> str:
    text = json.dumps(drop_stream_fields(body), indent=1, sort_keys=True, ensure_ascii=False)
    return text.replace("\\n", "\n")


def _split_clauses(text: str) -> list[str]:
    """Return the lines of a text, split into clauses to show differences in long lines."""
    return [clause for line in text.splitlines() for clause in CLAUSE_END.split(line)]
