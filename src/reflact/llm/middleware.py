"""The base of layers around a model."""

from __future__ import annotations

from reflact.protocols import LLM


class LLMMiddleware:
    """A model around another one; implements ``protocols.LLM``. A subclass adds ``ask``."""

    def __init__(self, inner: LLM) -> None:
        self.inner = inner

    @property
    def identity(self) -> str:
        """The identity of the inner model: middleware never changes a reply."""
        return self.inner.identity
