"""Exact usage, read from the answers themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from reflact.llm.streamed import chunk_of, events_of, streams
from reflact.results import Usage


def usage_of(content_type: str, chunks: Sequence[str]) -> Usage:
    """Return what one answer consumed, as the provider counted it; a silent provider gives zeros, uncounted.

    Args:
        content_type: ``application/json``, or ``text/event-stream`` for a streamed body.
        chunks: The body's pieces.
    """
    text = "".join(chunks)
    usage: Usage | None = None
    for document in _documents(content_type, text):
        found = document.get("usage")
        if isinstance(found, dict):
            usage = _read(found)
    return usage or Usage(calls=1, uncounted=1)


def _documents(content_type: str, text: str) -> Iterator[dict[str, Any]]:
    for data in events_of(text) if streams(content_type) else [text]:
        value = chunk_of(data)
        if isinstance(value, dict):
            yield value


def _read(usage: dict[str, Any]) -> Usage:
    given, written = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if given is None or written is None:
        return Usage(calls=1, uncounted=1)
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return Usage(calls=1, input_tokens=given, cached_tokens=min(cached or 0, given), output_tokens=written)


def _count(value: Any) -> int | None:
    """A count as it was given; None for what cannot be one: negative, no number, beyond any ledger."""
    return value if type(value) is int and 0 <= value < 2**53 else None
