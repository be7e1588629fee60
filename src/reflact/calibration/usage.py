"""What a calibration's questions use, and the one layer around its models that limits and counts
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from reflact.errors import ModelError
from reflact.llm.middleware import LLMMiddleware
from reflact.messages import CallId, RenderedPrompt, Reply
from reflact.protocols import LLM, R
from reflact.records import Usage
from reflact.types import FrozenModel

# The counts of an entry, beside its usage.
COUNTS = ("n_questions", "n_unanswered", "n_invalid")


class PurposeUsage(FrozenModel):
    """The questions of one role for one purpose: ``score``, ``mistake`` or ``compare``.

    Args:
        role: Who asked, such as ``critic``.
        purpose: What for.
        n_questions: Questions; a reply that is sent back belongs to its question.
        n_unanswered: Questions without a valid reply.
        n_invalid: Invalid replies.
        usage: The usage of all replies, invalid and stored ones included.
    """

    role: str
    purpose: str
    n_questions: int = 0
    n_unanswered: int = 0
    n_invalid: int = 0
    usage: Usage = Usage()

    def combine(self, other: PurposeUsage, usage: Usage, *, sign: int) -> PurposeUsage:
        """Return an entry whose counts are the sum (sign 1) or the difference (-1), with
        a usage.
        """
        counts = {name: getattr(self, name) + sign * getattr(other, name) for name in COUNTS}
        return self.model_copy(update={**counts, "usage": usage})


class UsageLedger:
    """Sums up usage by role and purpose."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], PurposeUsage] = {}

    @property
    def entries(self) -> tuple[PurposeUsage, ...]:
        """All entries, sorted by role and purpose."""
        return tuple(self._entries[key] for key in sorted(self._entries))

    @property
    def usage(self) -> Usage:
        """The sum of all entries."""
        return sum_usage(self.entries)

    def add(self, entry: PurposeUsage) -> None:
        """Add the usage of a question."""
        key = (entry.role, entry.purpose)
        if key in self._entries:
            earlier = self._entries[key]
            entry = earlier.combine(entry, earlier.usage + entry.usage, sign=1)
        self._entries[key] = entry

    def entries_since(self, earlier: Iterable[PurposeUsage]) -> tuple[PurposeUsage, ...]:
        """Return what was added after earlier entries of this ledger."""
        earlier_by_key = {(entry.role, entry.purpose): entry for entry in earlier}
        added = []
        for key in sorted(self._entries):
            entry = self._entries[key]
            if key in earlier_by_key:
                before = earlier_by_key[key]
                entry = entry.combine(before, subtract_usage(entry.usage, before.usage), sign=-1)
            if entry.n_questions:
                added.append(entry)
        return tuple(added)


def sum_usage(entries: Iterable[PurposeUsage]) -> Usage:
    """Return the usage of several entries together."""
    return sum((entry.usage for entry in entries), Usage())


def subtract_usage(later: Usage, earlier: Usage) -> Usage:
    """Return the usage between two states of one ledger."""
    usd = None if later.usd is None else later.usd - (earlier.usd or 0.0)
    names = ("calls", "input_tokens", "cached_tokens", "output_tokens", "uncounted")
    return Usage(usd=usd, **{name: getattr(later, name) - getattr(earlier, name) for name in names})


class CountingLLM(LLMMiddleware):
    """A model whose calls wait for a semaphore, if there is one, and are added to a ledger, also if
    they fail.

    A call that is cancelled before its reply is not counted here: the store of model calls accounts
    for it.
    """

    def __init__(
        self,
        inner: LLM,
        ledger: UsageLedger,
        semaphore: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        super().__init__(inner)
        self._ledger = ledger
        self._semaphore = semaphore or nullcontext()

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the inner model and add the usage."""
        entry = PurposeUsage(role=call_id.role, purpose=call_id.purpose, n_questions=1)
        try:
            async with self._semaphore:
                reply = await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
        except ModelError as error:
            failed = {"usage": error.usage, "n_invalid": error.usage.calls, "n_unanswered": 1}
            self._ledger.add(entry.model_copy(update=failed))
            raise
        replied = {"usage": reply.usage, "n_invalid": reply.attempts - 1}
        self._ledger.add(entry.model_copy(update=replied))
        return reply
