"""Graceful stop of a run: no new work begins, and work under way may finish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.lowlevel import checkpoint

from reflact.adapters import CatchExits, find_critic
from reflact.llm.middleware import LLMMiddleware
from reflact.messages import CallId, RenderedPrompt, Reply
from reflact.protocols import LLM, Annotator, R
from reflact.types import Item, Rollout

# Time to decide and commit on the last results.
SETTLE_SECONDS = 0.2


class GracefulStop:
    """Stops one start of a run when it is requested.

    From then on no rollout and no call of the optimizer begins. The run is cancelled when it has
    committed, when all work under way has finished and other work is blocked or waits for a person,
    or when ``grace`` seconds are over. ``reason`` says why the run stops; None while it goes on.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self.reason: str | None = None
        self._grace = grace
        self._scope: anyio.CancelScope | None = None
        self._in_progress = 0
        self._is_blocked = False

    @property
    def was_stopped(self) -> bool:
        """Whether the run was cancelled before its end."""
        return self._scope is not None and self._scope.cancelled_caught

    def request(self, reason: str) -> None:
        """Stop the run; further requests change nothing. Call it in the event loop's thread."""
        if self.reason is None:
            self.reason = reason
            self._end_within(self._grace)
            self._end_if_idle()

    @contextmanager
    def cancel_scope(self) -> Iterator[None]:
        """Cancel the block when the run stops; enter it once."""
        with anyio.CancelScope() as self._scope:
            if self.reason is not None:
                self._end_within(self._grace)
            yield

    @asynccontextmanager
    async def begin_unless_stopping(self) -> AsyncIterator[None]:
        """Count a piece of work as running; if the run stops, the work never begins."""
        if self.reason is not None:
            self._is_blocked = True
            self._end_if_idle()
            await anyio.sleep_forever()
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1
            self._end_if_idle()

    @contextmanager
    def wait_for_person(self) -> Iterator[None]:
        """Mark a block that waits for a person and therefore gets no grace."""
        self._is_blocked = True
        try:
            yield
        finally:
            self._is_blocked = self.reason is not None

    async def stop_after_commit(self) -> None:
        """Stop here if the run is to stop; call it after each commit."""
        if self.reason is not None:
            self._end_within(0.0)
            await checkpoint()

    def _end_if_idle(self) -> None:
        if self.reason is not None and self._is_blocked and not self._in_progress:
            self._end_within(SETTLE_SECONDS)

    def _end_within(self, seconds: float) -> None:
        if self._scope is not None:
            self._scope.deadline = min(self._scope.deadline, anyio.current_time() + seconds)


class StoppableLLM(LLMMiddleware):
    """A model that begins no call once the run stops; a call includes its retries."""

    def __init__(self, inner: LLM, graceful_stop: GracefulStop) -> None:
        super().__init__(inner)
        self._graceful_stop = graceful_stop

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the model as a piece of work that the stop waits for."""
        async with self._graceful_stop.begin_unless_stopping():
            with CatchExits():
                return await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)


class StoppableAnnotator:
    """An annotator that begins no annotation once the run stops."""

    def __init__(self, inner: Annotator, graceful_stop: GracefulStop) -> None:
        self._inner = inner
        self._graceful_stop = graceful_stop
        self.identity = inner.identity
        self.scored_by = find_critic(inner)

    async def annotate(self, item: Item, rollout: Rollout) -> Sequence[str]:
        """Annotate a rollout as a piece of work that the stop waits for."""
        async with self._graceful_stop.begin_unless_stopping():
            return await self._inner.annotate(item, rollout)
