"""Middleware around the models of a calibration: it limits calls, counts usage, and stops after invalid replies.

An invalid reply counts with its usage like a valid one. A call that is cancelled before its reply is not
counted here: the store of model calls accounts for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import anyio

from reflact.calibration.critic import Scorer
from reflact.calibration.report import PurposeUsage
from reflact.errors import CallError, ModelError, ReplyError, RunFailed
from reflact.llm.middleware import LLMMiddleware
from reflact.memory.models import ContrastPair, StateScore, Transition
from reflact.messages import CallId, RenderedPrompt, Reply
from reflact.protocols import LLM, R
from reflact.records import Usage

COUNT_FIELDS = ("n_questions", "n_unanswered", "n_invalid")

FAIL_FAST_CALLS = 10
"""A model may leave so many of its first questions without a valid reply."""


class LimitedLLM(LLMMiddleware):
    """A model whose calls wait for a semaphore."""

    def __init__(self, inner: LLM, semaphore: anyio.Semaphore) -> None:
        super().__init__(inner)
        self._semaphore = semaphore

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the inner model."""
        async with self._semaphore:
            return await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)


class LimitedCritic:
    """A critic whose scores wait for a semaphore; it shows ``pairs`` unless others are given."""

    def __init__(
        self, critic: Scorer, semaphore: anyio.Semaphore, *, pairs: Sequence[ContrastPair] | None = None
    ) -> None:
        self._critic = critic
        self._semaphore = semaphore
        self._pairs = pairs

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        pairs: Sequence[ContrastPair] | None = None,
        trial: int = 0,
    ) -> StateScore:
        """Ask the critic."""
        shown = self._pairs if pairs is None else pairs
        async with self._semaphore:
            return await self._critic.score(transition, purpose=purpose, pairs=shown, trial=trial)


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

    def entries_since(self, earlier: Iterable[PurposeUsage]) -> tuple[PurposeUsage, ...]:
        """Return what was added after earlier entries of this ledger."""
        before = {(one.role, one.purpose): one for one in earlier}
        found = []
        for one in self.entries:
            counts: dict[str, object] = {}
            if (old := before.get((one.role, one.purpose))) is not None:
                counts = {name: getattr(one, name) - getattr(old, name) for name in COUNT_FIELDS}
                counts["usage"] = subtract_usage(one.usage, old.usage)
            found.append(one.model_copy(update=counts))
        return tuple(one for one in found if one.n_questions)

    def add(self, entry: PurposeUsage) -> None:
        """Add the usage of a question."""
        key = (entry.role, entry.purpose)
        if (sofar := self._entries.get(key)) is not None:
            counts = {name: getattr(sofar, name) + getattr(entry, name) for name in COUNT_FIELDS}
            entry = entry.model_copy(update={**counts, "usage": sofar.usage + entry.usage})
        self._entries[key] = entry


def sum_usage(entries: Iterable[PurposeUsage]) -> Usage:
    """Return the usage of several entries together."""
    return sum((one.usage for one in entries), Usage())


def subtract_usage(later: Usage, earlier: Usage) -> Usage:
    """Return the usage between two states of one ledger."""
    usd = None if later.usd is None else later.usd - (earlier.usd or 0.0)
    names = ("calls", "input_tokens", "cached_tokens", "output_tokens", "uncounted")
    return Usage(usd=usd, **{name: getattr(later, name) - getattr(earlier, name) for name in names})


class MeteredLLM(LLMMiddleware):
    """A model whose usage is added to a ledger, also if a call fails."""

    def __init__(self, inner: LLM, usage_ledger: UsageLedger) -> None:
        super().__init__(inner)
        self._usage_ledger = usage_ledger

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
            reply = await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
        except ModelError as error:
            failed = {"usage": error.usage, "n_invalid": error.usage.calls, "n_unanswered": 1}
            self._usage_ledger.add(entry.model_copy(update=failed))
            raise
        replied = {"usage": reply.usage, "n_invalid": reply.attempts - 1}
        self._usage_ledger.add(entry.model_copy(update=replied))
        return reply


class FailFastCritic:
    """A critic that fails the calibration if none of its first scores is valid."""

    def __init__(self, critic: Scorer) -> None:
        self._critic = critic
        self._has_scored = False
        self._n_invalid = 0

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        pairs: Sequence[ContrastPair] | None = None,
        trial: int = 0,
    ) -> StateScore:
        """Ask the critic.

        Raises:
            RunFailed: None of the first ``FAIL_FAST_CALLS`` scores is valid.
            ModelError: This one is not.
        """
        try:
            score = await self._critic.score(transition, purpose=purpose, pairs=pairs, trial=trial)
        except CallError as error:
            self._n_invalid += 1
            if not self._has_scored and self._n_invalid >= FAIL_FAST_CALLS:
                raise RunFailed(
                    f"the critic gave no valid score of any of the first {FAIL_FAST_CALLS} questions, so no further "
                    f"call is made; the last error: {error}. Check `model`, `base_url`, `mode` and `max_tokens` of "
                    "models.critic; paid replies are stored"
                ) from error
            raise
        self._has_scored = True
        return score


class FailFastLLM(LLMMiddleware):
    """A judge or a writer that is not asked again if none of its first questions gets a valid reply.

    A judge fails the calibration at once, since no pair is kept without it. A writer is stopped by
    ``stop_if_silent`` alone, between groups of finished questions, so that the order of replies decides nothing.
    """

    def __init__(self, inner: LLM, *, fails_run: bool) -> None:
        super().__init__(inner)
        self._fails_run = fails_run
        self._invalid_questions: dict[str, str] = {}
        self.has_replied = False
        self.stop_reason: str | None = None

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the inner model, unless it was stopped.

        Raises:
            RunFailed: None of the first ``FAIL_FAST_CALLS`` replies of a judge is valid.
        """
        if self.stop_reason is not None:
            raise ReplyError(self.stop_reason)
        try:
            reply = await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
        except ReplyError as error:
            self._invalid_questions[call_id.label] = str(error)
            if self._fails_run and self._is_silent:
                raise RunFailed(
                    f"the judge gave no valid reply to any of the first {FAIL_FAST_CALLS} comparisons, so none of "
                    f"their pairs is kept and no further call is made; the last error: {error}. Check `model`, `mode` "
                    "and `max_tokens` of models.critic, or switch comparisons off (contrast.n_judges: 0); paid "
                    "replies are stored"
                ) from error
            raise
        self.has_replied = True
        return reply

    @property
    def _is_silent(self) -> bool:
        return not self.has_replied and len(self._invalid_questions) >= FAIL_FAST_CALLS

    def stop_if_silent(self) -> None:
        """Stop the writer if it got enough questions and gave no valid reply."""
        if self._is_silent and self.stop_reason is None:
            self.stop_reason = (
                f"the writer gave no valid reply to any of its first {len(self._invalid_questions)} questions, so it "
                "was not asked again, and the candidates that it was to write were dropped as bad_reply; the last "
                f"one: {self._invalid_questions[max(self._invalid_questions)]}"
            )
