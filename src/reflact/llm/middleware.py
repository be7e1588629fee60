"""The base of layers around a model, and the function that composes layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from reflact.protocols import LLM

T = TypeVar("T")


class LLMMiddleware:
    """A model around another one; implements ``protocols.LLM``. A subclass adds ``ask``."""

    def __init__(self, inner: LLM) -> None:
        self.inner = inner

    @property
    def identity(self) -> str:
        """The identity of the inner model: middleware never changes a reply."""
        return self.inner.identity


def compose(inner: T, layers: Sequence[Callable[[T], T]]) -> T:
    """Return ``inner`` inside all layers; the first layer is the outermost one."""
    for layer in reversed(layers):
        inner = layer(inner)
    return inner
