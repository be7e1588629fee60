"""Models, environments and ledgers whose work is seen in spans and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reflact.calls import CallId, CallReservation, RenderedPrompt, Reply, StoredResponse
from reflact.ports import LLM, Environment, R, ResponseStore, Session
from reflact.results import FaultKind, Usage
from reflact.roles import ModelConfig
from reflact.telemetry import Tracing
from reflact.types import Grade, Item, Split


class TracedLLM:
    """Implements ``ports.LLM`` by another one; each call is a span.

    Args:
        inner: The other one.
        tracing: Where spans go.
        config: Its settings, where a ``TracedLedger`` sees what it pays. None: it was passed in, and what
            its replies say that they consumed is taken as paid.
    """

    def __init__(self, inner: LLM, tracing: Tracing, config: ModelConfig | None = None) -> None:
        self._inner = inner
        self._tracing = tracing
        self._config = config

    @property
    def identity(self) -> str:
        """The other one's identity."""
        return self._inner.identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the other one; see ``ports.LLM.ask``."""
        with self._tracing.call(reply_type, call_id, self._config) as call:
            call.record_prompt(prompt)
            reply = await self._inner.ask(prompt, reply_type, call_id=call_id, check=check)
            if self._config is None:
                self._tracing.count_usage(
                    reply.usage, role=call_id.role, purpose=call_id.purpose, config=None
                )
            call.record_reply(reply)
        return reply


class TracedEnvironment:
    """Implements ``ports.Environment`` by another one; each rollout is a span.

    Args:
        inner: The other one.
        tracing: Where spans go.
    """

    def __init__(self, inner: Environment, tracing: Tracing) -> None:
        self._inner = inner
        self._tracing = tracing

    @property
    def identity(self) -> str:
        """The other one's identity."""
        return self._inner.identity

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's items, in a fixed order."""
        return self._inner.items(split)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Let the session work on an item and judge the result."""
        with self._tracing.rollout(item.id) as span:
            graded = await self._inner.run(item, session, seed=seed)
            span.set_attribute("reflact.score.hard", graded.score.hard)
            span.set_attribute("reflact.score.soft", graded.score.soft)
        return graded


class TracedResponseStore:
    """Implements ``ports.EffectStore`` by another one; what is paid for a role's model is counted once.

    Args:
        inner: The other one.
        tracing: Where metrics go.
        config: The role's settings.
    """

    def __init__(self, inner: ResponseStore, tracing: Tracing, config: ModelConfig) -> None:
        self._inner = inner
        self._tracing = tracing
        self._config = config

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return what was stored under a key, or None."""
        return await self._inner.find_response(key)

    async def reserve(self, reservation: CallReservation) -> None:
        """Book a call before it is sent."""
        await self._inner.reserve(reservation)

    async def store_response(self, reply: StoredResponse, reservation: CallReservation) -> None:
        """Store an answer and count what it consumed."""
        await self._inner.store_response(reply, reservation)
        self._tracing.count_usage(
            reply.usage, role=reservation.role, purpose=reservation.purpose, config=self._config
        )

    async def settle(self, reservation: CallReservation, usage: Usage) -> None:
        """Settle an intent that has no answer to be stored."""
        await self._inner.settle(reservation, usage)

    async def release(self, reservation: CallReservation) -> None:
        """Close an intent whose call has given nothing that is charged."""
        await self._inner.release(reservation)

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        """Count a failed attempt of a run's call."""
        await self._inner.count_fault(run_id, kind)
