"""Traces: what an agent did and how each step was scored, kept as it happens."""

from __future__ import annotations

from pathlib import Path

from reflact.memory import Evaluation, Gold, ScoreEvent, StateScore, Transition
from reflact.memory_ports import StoredTrace, TraceStore


class Trace:
    """The scored steps of one run of an agent.

    Args:
        purpose: What the agent is to achieve.
        id: Names the trace; None: a random one.
        path: A file of JSON lines that each event is appended to as it happens; made here, must not exist.

    Raises:
        DataError: The file exists or cannot be written.
    """

    def __init__(self, purpose: str, *, id: str | None = None, path: Path | None = None) -> None:  # noqa: A002
        raise NotImplementedError

    @property
    def id(self) -> str:
        """The trace's name."""
        raise NotImplementedError

    @property
    def purpose(self) -> str:
        """What the agent was to achieve."""
        raise NotImplementedError

    @property
    def events(self) -> tuple[ScoreEvent, ...]:
        """The steps so far, numbered from 0."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether nothing can be recorded any more."""
        raise NotImplementedError

    def record(
        self, transition: Transition, score: StateScore | Evaluation, *, gold: Gold | None = None
    ) -> ScoreEvent:
        """Append a step; in the file, if there is one, when this returns.

        Raises:
            DataError: The trace is finished, or the file cannot be written.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """End the trace; ending it twice does nothing."""
        raise NotImplementedError

    async def keep(self, store: TraceStore) -> int:
        """Append to a store what it does not have yet; returns how many events were new there."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a file up to where it is whole; what comes back is finished."""
        raise NotImplementedError

    @classmethod
    def resume(cls, path: Path) -> Trace:
        """Read a file up to where it is whole, cut off what is torn, and go on recording into it."""
        raise NotImplementedError

    @classmethod
    def of(cls, stored: StoredTrace) -> Trace:
        """Return a stored trace, finished."""
        raise NotImplementedError
