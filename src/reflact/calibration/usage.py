"""What a calibration's questions use, and the layer around its model that limits them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from reflact.errors import ModelError
from reflact.llm.middleware import LLMMiddleware
from reflact.messages import CallId, RenderedPrompt, Reply
from reflact.protocols import LLM, R
from reflact.records import Usage
from reflact.types import FrozenModel


class Consumption(FrozenModel):
    """Questions and what they used.

    Args:
        n_questions: Questions; a reply that is sent back belongs to its question.
        n_unanswered: Questions without a valid reply.
        n_invalid: Invalid replies.
        usage: The usage of all replies, invalid and stored ones included.
    """

    n_questions: int = 0
    n_unanswered: int = 0
    n_invalid: int = 0
    usage: Usage = Usage()

    def __add__(self, other: Consumption) -> Consumption:
        """Return the sum."""
        return Consumption(
            n_questions=self.n_questions + other.n_questions,
            n_unanswered=self.n_unanswered + other.n_unanswered,
            n_invalid=self.n_invalid + other.n_invalid,
            usage=self.usage + other.usage,
        )

    def __sub__(self, earlier: Consumption) -> Consumption:
        """Return what was added since an earlier state of one ledger."""
        return Consumption(
            n_questions=self.n_questions - earlier.n_questions,
            n_unanswered=self.n_unanswered - earlier.n_unanswered,
            n_invalid=self.n_invalid - earlier.n_invalid,
            usage=self.usage - earlier.usage,
        )


class UsageLedger:
    """Sums up what a calibrator's questions use."""

    def __init__(self) -> None:
        self.total = Consumption()
        """All of it so far."""

    @property
    def usage(self) -> Usage:
        """The usage of all questions so far."""
        return self.total.usage


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
        try:
            async with self._semaphore:
                reply = await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
        except ModelError as error:
            self._ledger.total += Consumption(
                n_questions=1, n_unanswered=1, n_invalid=error.usage.calls, usage=error.usage
            )
            raise
        self._ledger.total += Consumption(
            n_questions=1, n_invalid=reply.attempts - 1, usage=reply.usage
        )
        return reply
