"""Counts where a run's time goes, and tells which stage is under way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from reflact.events import Stage, StageFinished, StageStarted
from reflact.protocols import EventCallback

if TYPE_CHECKING:
    from reflact.integrations.opentelemetry import Tracing


class StageTimer:
    """Counts active time, in seconds of the event loop, in all and by stage, since it was last read.

    Args:
        run_id: The run whose time it is.
        emit: Told of stages.
        tracing: Makes a span of each.
    """

    def __init__(self, run_id: str, on_event: EventCallback, tracing: Tracing) -> None:
        self._run_id = run_id
        self._on_event = on_event
        self._tracing = tracing
        self._spent: dict[str, float] = {}
        self._since = anyio.current_time()

    @asynccontextmanager
    async def stage(self, *stages: Stage, step: int, name: str | None = None) -> AsyncIterator[None]:
        """Count the time of the block, however it ends, and tell of its stages.

        Args:
            stages: What is under way in the block.
            step: The step that it belongs to, 0 before the first.
            name: What the time is counted for; the stages themselves for None.
        """
        counted = " and ".join(stages) if name is None else name
        start = anyio.current_time()
        try:
            async with AsyncExitStack() as told:
                for stage in stages:
                    await told.enter_async_context(self.announce_stage(stage, step=step))
                yield
        finally:
            self._spent[counted] = self._spent.get(counted, 0.0) + anyio.current_time() - start

    @asynccontextmanager
    async def announce_stage(self, stage: Stage, *, step: int) -> AsyncIterator[None]:
        """Tell that a stage begins and, unless it fails, that it is over."""
        start = anyio.current_time()
        with self._tracing.stage(stage, step=step):
            await self._on_event(StageStarted(run_id=self._run_id, step=step, stage=stage))
            yield
            seconds = anyio.current_time() - start
            await self._on_event(StageFinished(run_id=self._run_id, step=step, stage=stage, seconds=seconds))

    def read(self, ahead: float = 0.0) -> tuple[float, dict[str, float]]:
        """Return the time since the last reading, in all and by stage, and start anew.

        ``ahead`` seconds that are still to come are added; the next reading is that much shorter, and below
        0 where it comes earlier.
        """
        now = anyio.current_time() + ahead
        read = (now - self._since, self._spent)
        self._since, self._spent = now, {}
        return read
