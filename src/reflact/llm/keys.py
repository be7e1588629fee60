"""Content keys of model requests. Imports nothing but the standard library, so that the pinned keys can be
checked on any interpreter.
"""

from __future__ import annotations

import hashlib
import json
from urllib.parse import urlsplit


def effect_key(*, endpoint: str, path: str, body: str, sample: str, reply: str) -> str:
    """Return the identity of a request, 64 hexadecimal digits: the SHA-256 of its canonical JSON.

    Args:
        endpoint: Scheme, host and port, without credentials.
        path: Path of the request.
        body: The JSON body as text; spacing and the order of fields do not matter.
        sample: Label of the logical sample.
        reply: Name and version of the reply type.
    """
    parts = {"endpoint": endpoint, "path": path, "body": json.loads(body), "sample": sample, "reply": reply}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def endpoint_of(url: str) -> str:
    """Return scheme, host and port of an address: no credentials, no path, no query."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


def address_of(url: str) -> str:
    """Return an address as it may be shown: without credentials and query."""
    return f"{endpoint_of(url)}{urlsplit(url).path}"


def seed_of(label: str) -> int:
    """Return the sampling seed of a sample's label: 31 bits of its hash."""
    return int.from_bytes(hashlib.sha256(label.encode("ascii")).digest()[:4], "big") >> 1
