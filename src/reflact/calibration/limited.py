"""Models and critics that together have so many calls in flight at most; a critic that is shown set pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from reflact.calibration.agreement import Scorer
from reflact.calls import Rendered, Reply, Sample
from reflact.memory import ContrastPair, StateScore, Transition
from reflact.ports import LLM, R


class LimitedLLM:
    """A model whose calls wait for a place."""

    def __init__(self, llm: LLM, places: anyio.Semaphore) -> None:
        self._llm = llm
        self._places = places

    @property
    def identity(self) -> str:
        """That of the model."""
        return self._llm.identity

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the model, once there is a place; see ``reflact.ports.LLM.ask``."""
        async with self._places:
            return await self._llm.ask(prompt, reply_type, sample=sample, check=check)


class LimitedCritic:
    """A critic whose scores wait for a place."""

    def __init__(self, critic: Scorer, places: anyio.Semaphore) -> None:
        self._critic = critic
        self._places = places

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        pairs: Sequence[ContrastPair] | None = None,
        trial: int = 0,
    ) -> StateScore:
        """Ask the critic, once there is a place."""
        async with self._places:
            return await self._critic.score(transition, purpose=purpose, pairs=pairs, trial=trial)


class ShownCritic:
    """A critic that is shown these pairs, whatever is promoted meanwhile."""

    def __init__(self, critic: Scorer, pairs: Sequence[ContrastPair]) -> None:
        self._critic = critic
        self._pairs = pairs

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        pairs: Sequence[ContrastPair] | None = None,
        trial: int = 0,
    ) -> StateScore:
        """Ask the critic, with its pairs where no others are given."""
        shown = self._pairs if pairs is None else pairs
        return await self._critic.score(transition, purpose=purpose, pairs=shown, trial=trial)
