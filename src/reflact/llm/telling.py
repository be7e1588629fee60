"""What is told of model calls."""

from __future__ import annotations

from contextvars import ContextVar

import anyio

from reflact.calls import Sample
from reflact.errors import ReflactError, ReplyError
from reflact.events import ModelCalled
from reflact.llm.streamed import Listener
from reflact.results import Usage


class Call:
    """A model call under way.

    Attributes:
        attempts: Its attempts so far.
        usage: What those that were answered consumed.
        sent: Whether an answer came from elsewhere than the store.

    Args:
        listener: Who hears the answers while they come; None: nobody.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener = listener
        self.attempts = 0
        self.usage = Usage()
        self.sent = False
        self._start = anyio.current_time()

    def sent_back(self, reason: str) -> None:
        """Tell whoever listens that the attempt's reply is sent back."""
        if self.listener is not None:
            self.listener.dropped(reason)

    def over(self, run_id: str, sample: Sample, error: ReflactError | None) -> ModelCalled:
        """Return what is told of the call at its end; ``error`` is why there is no reply."""
        answered = error is None or isinstance(error, ReplyError)
        return ModelCalled(
            run_id=run_id,
            step=0 if sample.step is None else sample.step,
            role=sample.role,
            purpose=sample.purpose,
            sample=sample.label,
            outcome="reply" if error is None else "failed",
            attempts=self.attempts,
            usage=self.usage,
            seconds=anyio.current_time() - self._start,
            stored=answered and not self.sent,
        )


CALL: ContextVar[Call | None] = ContextVar("reflact_call", default=None)
"""The call that a task is making: tells the transports below the client library whose request they carry."""
