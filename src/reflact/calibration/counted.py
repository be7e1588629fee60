"""A model whose consumption is counted."""

from __future__ import annotations

from collections.abc import Callable

from reflact.calls import Rendered, Reply, Sample
from reflact.ports import LLM, R
from reflact.results import Usage


class CountedLLM:
    """Implements ``ports.LLM`` by another one and sums up what replies took; failed calls are not seen."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._usage = Usage()

    @property
    def identity(self) -> str:
        """The other model's identity."""
        return self._llm.identity

    @property
    def usage(self) -> Usage:
        """What all replies so far consumed, those that a store had included."""
        return self._usage

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the other model; see ``ports.LLM.ask``."""
        reply = await self._llm.ask(prompt, reply_type, sample=sample, check=check)
        self._usage += reply.usage
        return reply
