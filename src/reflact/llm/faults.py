"""What can go wrong with one attempt of a call, by kind.

- ``408``, ``409``, ``429``, ``5xx``: statuses after which a later attempt may succeed;
- ``timeout``: no whole answer in time;
- ``unreachable``: no connection;
- ``reset``: a connection that ended before the answer began;
- ``truncated``: an answer that began and broke off;
- ``malformed``: an answer that should be JSON and is not;
- ``broken stream``: a stream of events that broke off, ended before its end mark, holds no JSON, or an error;
- ``unusable``: a success that is no chat completion.

Answers that say something about the request (400, 401, 404 and the like) are no faults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from pydantic import JsonValue

from reflact.llm.retries import RETRIED
from reflact.llm.streamed import END, chunk_of, events_of, streams
from reflact.results import FaultKind

GARBLING: frozenset[FaultKind | None] = frozenset({"malformed", "broken stream"})
"""What happens to an answer on the way, so that another attempt may bring it whole."""


class CutOff(httpx.RemoteProtocolError):
    """An answer began and broke off."""

    fault: FaultKind = "truncated"


class StreamCutOff(CutOff):
    """A stream of events began and broke off."""

    fault: FaultKind = "broken stream"


@contextmanager
def cut_off(response: httpx.Response) -> Iterator[None]:
    """Name failures that happen while the body of an answer is read.

    Raises:
        CutOff: The connection failed within.
    """
    try:
        yield
    except (httpx.NetworkError, httpx.RemoteProtocolError) as failure:
        kind = StreamCutOff if streams(response.headers.get("content-type", "")) else CutOff
        raise kind(str(failure)) from failure


def failure_fault(failure: Exception) -> FaultKind | None:
    """Return the kind of a failure on the way; None for what is no fault of the endpoint or the network."""
    match failure:
        case CutOff():
            return failure.fault
        case httpx.ConnectError() | httpx.ProxyError():
            return "unreachable"
        case httpx.TimeoutException():
            return "timeout"
        case httpx.NetworkError() | httpx.RemoteProtocolError():
            return "reset"
    return None


def status_fault(status: int) -> FaultKind | None:
    """Return the kind of an error status; None for a success and for an answer to the request."""
    match status:
        case 408:
            return "408"
        case 409:
            return "409"
        case 429:
            return "429"
    return "5xx" if status in RETRIED else None


def body_fault(content_type: str, text: str) -> FaultKind | None:
    """Return what is wrong with the body of a success; None for a whole stream or a chat completion."""
    if streams(content_type):
        return None if _whole_stream(text) else "broken stream"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return "malformed" if content_type.startswith("application/json") else "unusable"
    try:
        return None if isinstance(document["choices"][0]["message"], dict) else "unusable"
    except (LookupError, TypeError):
        return "unusable"


def _whole_stream(text: str) -> bool:
    """Whether a stream reached its end mark, and all that it says before is JSON and tells of no error."""
    *said, last = list(events_of(text)) or [""]
    chunks = [chunk_of(data) for data in said]
    return last == END and not any(chunk is None or _complains(chunk) for chunk in chunks)


def _complains(chunk: JsonValue) -> bool:
    return isinstance(chunk, dict) and bool(chunk.get("error"))
