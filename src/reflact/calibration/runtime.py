"""What the parts of a calibrator share: its collaborators, and what its questions use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from reflact.calibration.config import CalibratorSettings
from reflact.calibration.events import CalibrationEventCallback
from reflact.calibration.labeled_steps import StepScorer
from reflact.errors import ModelError
from reflact.llm.middleware import LLMMiddleware
from reflact.messages import CallId, RenderedPrompt, Reply
from reflact.prompts import PromptBook
from reflact.protocols import LLM, R
from reflact.records import Usage

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore


class Consumption(NamedTuple):
    """The numbers of questions, of those without a valid reply, and of invalid replies; and usage.

    A reply that is sent back belongs to its question. The usage is that of all replies, invalid and
    stored ones included.
    """

    n_questions: int = 0
    n_unanswered: int = 0
    n_invalid: int = 0
    usage: Usage = Usage()


class UsageLedger:
    """Sums up what a calibrator's questions use."""

    def __init__(self) -> None:
        self.total = Consumption()
        """All of it so far."""

    def add(self, usage: Usage, *, n_invalid: int, is_answered: bool) -> None:
        """Add a question and its replies."""
        total = self.total
        self.total = Consumption(
            total.n_questions + 1,
            total.n_unanswered + (not is_answered),
            total.n_invalid + n_invalid,
            total.usage + usage,
        )


class CountingLLM(LLMMiddleware):
    """A model whose questions wait for a semaphore, if there is one, and are added to a ledger.

    A call that is cancelled before its reply is not counted; the store of model calls has it.
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
        """Ask the inner model and add the usage, also if there is no valid reply."""
        try:
            async with self._semaphore:
                reply = await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
        except ModelError as error:
            self._ledger.add(error.usage, n_invalid=error.usage.calls, is_answered=False)
            raise
        self._ledger.add(reply.usage, n_invalid=reply.attempts - 1, is_answered=True)
        return reply


class CalibrationRuntime(NamedTuple):
    """The open collaborators of a calibrator; ``llm`` writes mistakes and judges them."""

    llm: LLM
    store: MemoryStore
    scorer: StepScorer
    settings: CalibratorSettings
    prompts: PromptBook
    on_event: CalibrationEventCallback
    ledger: UsageLedger

    @property
    def usage(self) -> Usage:
        """The usage of all questions so far."""
        return self.ledger.total.usage
