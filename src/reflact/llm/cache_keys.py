"""Content keys of model requests, and addresses without credentials."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urlsplit

from reflact.types import digest_json

# Fields of a request that affect the transfer of the answer and not its content.
STREAM_FIELDS = ("stream", "stream_options")


def build_cache_key(*, endpoint: str, path: str, body: Any, call_id: str, reply: str) -> str:
    """Return the identity of a request, 64 hexadecimal digits.

    ``endpoint`` is without credentials, ``body`` a JSON value, ``reply`` the name and version of
    the reply type.
    """
    content = drop_stream_fields(body)
    return digest_json(
        {"endpoint": endpoint, "path": path, "body": content, "sample": call_id, "reply": reply}
    )


def drop_stream_fields(body: Any) -> Any:
    """Return a request's body without the fields that control streaming."""
    if not isinstance(body, dict):
        return body
    return {name: value for name, value in body.items() if name not in STREAM_FIELDS}


def strip_to_endpoint(url: str) -> str:
    """Return scheme, host and port of an address, without credentials, path and query."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


def strip_credentials(url: str) -> str:
    """Return an address for messages, without credentials and query."""
    return f"{strip_to_endpoint(url)}{urlsplit(url).path}"


def derive_seed(label: str) -> int:
    """Return the sampling seed of a call's label: 31 bits of its SHA-256."""
    return int.from_bytes(hashlib.sha256(label.encode("ascii")).digest()[:4], "big") >> 1
