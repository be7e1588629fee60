"""Stored JSON back into values; what no longer validates is an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from reflact.errors import StoreError

T = TypeVar("T")


def read_back(validate: Callable[[str], T], text: str, what: str) -> T:
    """Return the value that a stored text holds.

    Raises:
        StoreError: The text does not validate; names ``what`` it is and the first thing wrong with it.
    """
    try:
        return validate(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        place = f" at {where}" if where else ""
        raise StoreError(
            f"the stored {what} cannot be read by this version of reflact{place}: {first['msg']}; "
            "use the version that wrote it, or choose another out_dir"
        ) from None
