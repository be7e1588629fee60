"""Readers that go away: ``reflact calibrate | head -1`` loses lines, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """A block that ends silently where nobody reads any more what it prints.

    From then on what is printed there goes nowhere, so that the end of the process does not stumble over it.
    """
    try:
        yield
    except BrokenPipeError:
        _redirect_to_null()


def guard_callback(on_event: Callable[[T], None]) -> Callable[[T], None]:
    """Return what tells as ``tell`` does as long as somebody reads it, and goes on in silence after that."""

    def say(event: T) -> None:
        with ignore_broken_pipe():
            on_event(event)

    return say


def _redirect_to_null() -> None:
    """Lead standard output and standard error nowhere where nobody reads them."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
