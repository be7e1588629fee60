"""Knows logs of other tools by their keys, so that a message can name the tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from reflact.errors import DataError

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
