"""Content keys of model requests. Imports nothing but the standard library, so that the pinned keys can be
checked on any interpreter.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import urlsplit

STREAM_FIELDS = ("stream", "stream_options")
"""Fields of a request that say in which pieces an answer comes, and nothing of what it says."""


def build_cache_key(*, endpoint: str, path: str, body: str, call_id: str, reply: str) -> str:
    """Return the identity of a request, 64 hexadecimal digits: the SHA-256 of its canonical JSON.

    Args:
        endpoint: Scheme, host and port, without credentials.
        path: Path of the request.
        body: The JSON body as text; spacing and the order of fields do not matter, nor does streaming.
        call_id: Label of the logical sample.
        reply: Name and version of the reply type.
    """
    content = drop_stream_fields(json.loads(body))
    parts = {"endpoint": endpoint, "path": path, "body": content, "sample": call_id, "reply": reply}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def drop_stream_fields(body: Any) -> Any:
    """Return what a request asks, without how the answer is to be streamed."""
    if not isinstance(body, dict):
        return body
    return {name: value for name, value in body.items() if name not in STREAM_FIELDS}


def strip_to_endpoint(url: str) -> str:
    """Return scheme, host and port of an address: no credentials, no path, no query."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


def strip_credentials(url: str) -> str:
    """Return an address as it may be shown: without credentials and query."""
    return f"{strip_to_endpoint(url)}{urlsplit(url).path}"


def derive_seed(label: str) -> int:
    """Return the sampling seed of a sample's label: 31 bits of its hash."""
    return int.from_bytes(hashlib.sha256(label.encode("ascii")).digest()[:4], "big") >> 1
