"""How a run comes to a halt in order: nothing new is begun, what is under way may finish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TypeVar

import anyio
from anyio.lowlevel import checkpoint

from reflact.calls import Rendered, Reply, ReplyModel, Sample
from reflact.ports import LLM, Annotator, Approve, Environment, ScoredByCritic, Session
from reflact.records import Review
from reflact.results import CriticUsed
from reflact.types import Graded, Item, Rollout, Split
from reflact.wiring import House

R = TypeVar("R", bound=ReplyModel)

BREATH_SECONDS = 0.2
"""Time in which what the last results settle may still be decided and committed."""


class Brake:
    """Halts one start of a run once it is pulled.

    From then on rollouts and calls of the optimizer that would begin are held back. The run is cancelled
    when it has committed, when all that is under way has finished and something is held back or waits for a
    person, or when the grace is over, whichever comes first. Cancelling cannot be mistaken for a failure of
    what it ends.

    Args:
        grace: Seconds that what is under way may take.

    Attributes:
        reason: Why the run halts; None while it goes on.
    """

    def __init__(self, grace: float) -> None:
        self.reason: str | None = None
        self._grace = grace
        self._scope: anyio.CancelScope | None = None
        self._under_way = 0
        self._stuck = False

    @property
    def halted(self) -> bool:
        """Whether the run was cancelled before its end."""
        return self._scope is not None and self._scope.cancelled_caught

    def pull(self, reason: str) -> None:
        """Let the run halt; pulling again changes nothing. Call it in the event loop's thread."""
        if self.reason is None:
            self.reason = reason
            self._end_within(self._grace)
            self._settle()

    @contextmanager
    def run(self) -> Iterator[None]:
        """The block that is cancelled; enter it once."""
        with anyio.CancelScope() as self._scope:
            if self.reason is not None:
                self._end_within(self._grace)
            yield

    @asynccontextmanager
    async def piece(self) -> AsyncIterator[None]:
        """Hold a piece of work back where the brake is pulled, else count it as under way."""
        if self.reason is not None:
            self._stuck = True
            self._settle()
            await anyio.sleep_forever()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._settle()

    @contextmanager
    def person(self) -> Iterator[None]:
        """A block that waits for a person: the run does not go on by itself, and gets no grace for it."""
        self._stuck = True
        try:
            yield
        finally:
            self._stuck = self.reason is not None

    async def committed(self) -> None:
        """Halt here where the brake is pulled."""
        if self.reason is not None:
            self._end_within(0.0)
            await checkpoint()

    def _settle(self) -> None:
        if self.reason is not None and self._stuck and not self._under_way:
            self._end_within(BREATH_SECONDS)

    def _end_within(self, seconds: float) -> None:
        if self._scope is not None:
            self._scope.deadline = min(self._scope.deadline, anyio.current_time() + seconds)


def patient(approve: Approve, brake: Brake) -> Approve:
    """Return an approver that is not waited for once the brake is pulled."""

    async def ask(review: Review) -> bool | str:
        with brake.person():
            return await approve(review)

    return ask


def braked(house: House, brake: Brake) -> House:
    """Return a house in which rollouts, notes and calls of the optimizer stop at the brake."""
    notes = house.plan.annotator
    plan = replace(
        house.plan,
        environment=_Rollouts(house.plan.environment, brake),
        annotator=None if notes is None else _Notes(notes, brake),
    )
    return replace(house, plan=plan, optimizer=BrakedLLM(house.optimizer, brake))


class _Rollouts:
    """An environment whose rollouts are pieces of work."""

    def __init__(self, inner: Environment, brake: Brake) -> None:
        self._inner = inner
        self._brake = brake

    @property
    def identity(self) -> str:
        return self._inner.identity

    def items(self, split: Split) -> Sequence[Item]:
        return self._inner.items(split)

    async def run(self, item: Item, session: Session, *, seed: int) -> Graded:
        async with self._brake.piece():
            return await self._inner.run(item, session, seed=seed)


class _Notes:
    """An annotator whose notes on a rollout are a piece of work."""

    def __init__(self, inner: Annotator, brake: Brake) -> None:
        self._inner = inner
        self._brake = brake

    @property
    def identity(self) -> str:
        return self._inner.identity

    @property
    def scored_by(self) -> CriticUsed | None:
        return self._inner.scored_by if isinstance(self._inner, ScoredByCritic) else None

    async def annotate(self, item: Item, rollout: Rollout) -> Sequence[str]:
        async with self._brake.piece():
            return await self._inner.annotate(item, rollout)


class BrakedLLM:
    """A model whose calls, with all their attempts, are pieces of work."""

    def __init__(self, inner: LLM, brake: Brake) -> None:
        self._inner = inner
        self._brake = brake

    @property
    def identity(self) -> str:
        """That of the model."""
        return self._inner.identity

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the model; see ``ports.LLM.ask``."""
        async with self._brake.piece():
            return await self._inner.ask(prompt, reply_type, sample=sample, check=check)
