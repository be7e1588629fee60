"""Measures the time of a run by stage, and announces stages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from reflact.events import Stage, StageFinished, StageStarted
from reflact.llm.budget import CurrentStage
from reflact.protocols import EventCallback

if TYPE_CHECKING:
    from reflact.integrations.opentelemetry import Tracing


StageKey = tuple[int, str]
"""A step, and what is measured in it."""


class StageTimer:
    """Measures active time since the last reading, in seconds of the event loop, in total and by step and stage.

    ``current`` is told what the run works on. Stages that are measured follow one another.
    """

    def __init__(self, run_id: str, on_event: EventCallback, tracing: Tracing, current: CurrentStage) -> None:
        self._run_id = run_id
        self._on_event = on_event
        self._tracing = tracing
        self._current = current
        self._spent: dict[StageKey, float] = {}
        self._running: dict[StageKey, float] = {}
        self._since = anyio.current_time()

    @asynccontextmanager
    async def stage(self, *stages: Stage, step: int, name: str | None = None) -> AsyncIterator[None]:
        """Measure the time of the block, even if it fails, and announce its stages; step 0 is the baseline."""
        key = (step, " and ".join(stages) if name is None else name)
        self._running[key] = anyio.current_time()
        self._current.step, self._current.stage = key
        try:
            async with AsyncExitStack() as stack:
                for stage in stages:
                    await stack.enter_async_context(self.announce_stage(stage, step=step))
                yield
        finally:
            self._measure_running()
            del self._running[key]

    def _measure_running(self) -> None:
        now = anyio.current_time()
        for key, since in self._running.items():
            self._spent[key] = self._spent.get(key, 0.0) + now - since
            self._running[key] = now

    @asynccontextmanager
    async def announce_stage(self, stage: Stage, *, step: int) -> AsyncIterator[None]:
        """Emit the start of a stage and, unless the block fails, its end."""
        start = anyio.current_time()
        with self._tracing.stage(stage, step=step):
            await self._on_event(StageStarted(run_id=self._run_id, step=step, stage=stage))
            yield
            seconds = anyio.current_time() - start
            await self._on_event(StageFinished(run_id=self._run_id, step=step, stage=stage, seconds=seconds))

    def read_and_reset(self, ahead: float = 0.0) -> tuple[float, dict[StageKey, float]]:
        """Return the time since the last reading, in total and by step and stage, and reset both.

        ``ahead`` adds seconds in advance. The next reading is that much shorter, and negative if it comes
        earlier.
        """
        self._measure_running()
        now = anyio.current_time() + ahead
        read = (now - self._since, self._spent)
        self._since, self._spent = now, {}
        return read
