"""Models, environments and ledgers whose work is seen in spans and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reflact.calls import Intent, Rendered, Reply, Sample, StoredReply
from reflact.ports import LLM, EffectStore, Environment, R, Session
from reflact.results import FaultKind, Usage
from reflact.roles import ModelConfig
from reflact.telemetry import Tracing
from reflact.types import Graded, Item, Split


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
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the other one; see ``ports.LLM.ask``."""
        with self._tracing.call(reply_type, sample, self._config) as call:
            call.asks(prompt)
            reply = await self._inner.ask(prompt, reply_type, sample=sample, check=check)
            if self._config is None:
                self._tracing.paid(reply.usage, role=sample.role, purpose=sample.purpose, config=None)
            call.replied(reply)
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

    async def run(self, item: Item, session: Session, *, seed: int) -> Graded:
        """Let the session work on an item and judge the result."""
        with self._tracing.rollout(item.id) as span:
            graded = await self._inner.run(item, session, seed=seed)
            span.set_attribute("reflact.score.hard", graded.score.hard)
            span.set_attribute("reflact.score.soft", graded.score.soft)
        return graded


class TracedLedger:
    """Implements ``ports.EffectStore`` by another one; what is paid for a role's model is counted once.

    Args:
        inner: The other one.
        tracing: Where metrics go.
        config: The role's settings.
    """

    def __init__(self, inner: EffectStore, tracing: Tracing, config: ModelConfig) -> None:
        self._inner = inner
        self._tracing = tracing
        self._config = config

    async def find_reply(self, key: str) -> StoredReply | None:
        """Return what was stored under a key, or None."""
        return await self._inner.find_reply(key)

    async def intend(self, intent: Intent) -> None:
        """Book a call before it is sent."""
        await self._inner.intend(intent)

    async def keep_reply(self, reply: StoredReply, intent: Intent) -> None:
        """Store an answer and count what it consumed."""
        await self._inner.keep_reply(reply, intent)
        self._tracing.paid(reply.usage, role=intent.role, purpose=intent.purpose, config=self._config)

    async def settle(self, intent: Intent, usage: Usage) -> None:
        """Settle an intent that has no answer to be stored."""
        await self._inner.settle(intent, usage)

    async def drop_intent(self, intent: Intent) -> None:
        """Close an intent whose call has given nothing that is charged."""
        await self._inner.drop_intent(intent)

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        """Count a failed attempt of a run's call."""
        await self._inner.count_fault(run_id, kind)
