"""Checksums of stored texts: SQLite checks the structure of its file, and not the content of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from reflact.errors import StoreError
from reflact.jsonutil import parse_stored

T = TypeVar("T")


def compute_checksum(*parts: object) -> str:
    """Return a checksum of a row's key and texts, as 16 hexadecimal digits."""
    text = "\0".join("\1" if part is None else str(part) for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def parse_checked(validate: Callable[[str], T], text: str, what: str, *, valid: bool) -> T:
    """Return the value of a stored text; StoreError if it does not validate or match its checksum."""
    value = parse_stored(validate, text, what)
    if not valid:
        raise StoreError(
            f"the stored {what} does not match its checksum, so the database is damaged; put back a copy of it, or "
            "choose another out_dir"
        )
    return value
