"""What stands between a calibration and its models: limits, counts, and giving up who never answers.

What a reply took that was refused counts like what a valid one took. A question that is cancelled before its
answer is not counted here: what it may have cost is in the books of the model's own store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import anyio

from reflact.calibration.critic import Scorer
from reflact.calibration.report import PurposeUsage
from reflact.errors import ContextOverflow, ModelError, ReplyError, RunFailed
from reflact.memory.models import ContrastPair, StateScore, Transition
from reflact.messages import CallId, RenderedPrompt, Reply
from reflact.protocols import LLM, R
from reflact.records import Usage


class LimitedLLM:
    """A model whose calls wait for a place."""

    def __init__(self, llm: LLM, semaphore: anyio.Semaphore) -> None:
        self._llm = llm
        self._semaphore = semaphore

    @property
    def identity(self) -> str:
        """That of the model."""
        return self._llm.identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the model, once there is a place; see ``reflact.protocols.LLM.ask``."""
        async with self._semaphore:
            return await self._llm.ask(prompt, reply_type, call_id=call_id, check=check)


class LimitedCritic:
    """A critic whose scores wait for a place.

    Args:
        critic: The critic.
        places: As many scores are under way at most.
        pairs: Shown if no others are given, whatever is promoted meanwhile; None: the critic chooses.
    """

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
        """Ask the critic, once there is a place."""
        shown = self._pairs if pairs is None else pairs
        async with self._semaphore:
            return await self._critic.score(transition, purpose=purpose, pairs=shown, trial=trial)


COUNT_FIELDS = ("n_questions", "n_unanswered", "n_invalid")


class UsageLedger:
    """Sums up what was consumed, by role and purpose."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], PurposeUsage] = {}

    @property
    def entries(self) -> tuple[PurposeUsage, ...]:
        """All that was booked, sorted by role and purpose."""
        return tuple(self._entries[key] for key in sorted(self._entries))

    @property
    def usage(self) -> Usage:
        """What all of it took."""
        return sum_usage(self.entries)

    def entries_since(self, earlier: Iterable[PurposeUsage]) -> tuple[PurposeUsage, ...]:
        """Return what was booked beyond earlier entries of these books."""
        before = {(one.role, one.purpose): one for one in earlier}
        found = [_subtract_entry(one, before.get((one.role, one.purpose))) for one in self.entries]
        return tuple(one for one in found if one.n_questions)

    def add(self, entry: PurposeUsage) -> None:
        """Add what a question took."""
        key = (entry.role, entry.purpose)
        sofar = self._entries.get(key)
        self._entries[key] = entry if sofar is None else _add_entries(sofar, entry)


class MeteredLLM:
    """Implements ``ports.LLM`` by another one and books what its calls consume, also where they fail."""

    def __init__(self, llm: LLM, usage_ledger: UsageLedger) -> None:
        self._llm = llm
        self._usage_ledger = usage_ledger

    @property
    def identity(self) -> str:
        """The other model's identity."""
        return self._llm.identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the other model; see ``ports.LLM.ask``."""
        one = PurposeUsage(role=call_id.role, purpose=call_id.purpose, n_questions=1)
        try:
            reply = await self._llm.ask(prompt, reply_type, call_id=call_id, check=check)
        except ModelError as error:
            refused = error.usage.calls
            self._usage_ledger.add(
                one.model_copy(update={"usage": error.usage, "n_invalid": refused, "n_unanswered": 1})
            )
            raise
        self._usage_ledger.add(one.model_copy(update={"usage": reply.usage, "n_invalid": reply.attempts - 1}))
        return reply


def sum_usage(entries: Iterable[PurposeUsage]) -> Usage:
    """Return what several entries took together."""
    return sum((one.usage for one in entries), Usage())


def _add_entries(entry: PurposeUsage, other: PurposeUsage) -> PurposeUsage:
    counts = {name: getattr(entry, name) + getattr(other, name) for name in COUNT_FIELDS}
    return entry.model_copy(update={**counts, "usage": entry.usage + other.usage})


def _subtract_entry(later: PurposeUsage, earlier: PurposeUsage | None) -> PurposeUsage:
    if earlier is None:
        return later
    counts = {name: getattr(later, name) - getattr(earlier, name) for name in COUNT_FIELDS}
    return later.model_copy(update={**counts, "usage": subtract_usage(later.usage, earlier.usage)})


def subtract_usage(later: Usage, earlier: Usage) -> Usage:
    """Return what was consumed between two looks at the same books."""
    usd = None if later.usd is None else later.usd - (earlier.usd or 0.0)
    names = ("calls", "input_tokens", "cached_tokens", "output_tokens", "uncounted")
    return Usage(usd=usd, **{name: getattr(later, name) - getattr(earlier, name) for name in names})


FAIL_FAST_CALLS = 10
"""Questions that may stay without a valid reply before there is any."""


class FailFastCritic:
    """A critic that must give one valid score among its first ones.

    Args:
        critic: The critic.
    """

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
            RunFailed: None of the first questions has a valid answer.
            ModelError: This one has none.
        """
        try:
            score = await self._critic.score(transition, purpose=purpose, pairs=pairs, trial=trial)
        except (ReplyError, ContextOverflow) as error:
            self._count_failure(error)
            raise
        self._has_scored = True
        return score

    def _count_failure(self, error: ModelError) -> None:
        self._n_invalid += 1
        if not self._has_scored and self._n_invalid >= FAIL_FAST_CALLS:
            raise RunFailed(
                f"the critic gave no valid score of any of the first {FAIL_FAST_CALLS} questions, so nothing more is "
                f"asked; the last reply was refused: {error}. Look at the model and its address "
                "(models.critic.model, base_url), at `mode` and at `max_tokens`; what was paid for is stored"
            ) from error


class FailFastJudge:
    """A judge that must give one valid reply to its first comparisons: without any it keeps no pair.

    Args:
        llm: The judge.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._has_replied = False
        self._n_invalid = 0

    @property
    def identity(self) -> str:
        """The judge's identity."""
        return self._llm.identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the judge; see ``reflact.protocols.LLM.ask``.

        Raises:
            RunFailed: None of the first comparisons has a valid reply.
            ModelError: This one has none.
        """
        try:
            reply = await self._llm.ask(prompt, reply_type, call_id=call_id, check=check)
        except ReplyError as error:
            self._n_invalid += 1
            if not self._has_replied and self._n_invalid >= FAIL_FAST_CALLS:
                raise RunFailed(
                    f"the judge gave no valid reply to any of the first {FAIL_FAST_CALLS} comparisons, without which "
                    "none of their pairs is kept, so nothing more is asked; the last reply was refused: "
                    f"{error}. Look at the model (models.critic.model), at `mode` and at `max_tokens`, or do "
                    "without comparisons (contrast.n_judges: 0); what was paid for is stored"
                ) from error
            raise
        self._has_replied = True
        return reply


class FailFastWriter:
    """A writer that is asked no more where none of its first questions got a valid reply.

    That is decided by ``settle`` alone, between groups of questions that are all over, so that it follows
    from what was said and not from when.

    Args:
        llm: The writer.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._invalid_questions: dict[str, str] = {}
        self.has_replied = False
        self.stop_reason: str | None = None

    @property
    def identity(self) -> str:
        """The writer's identity."""
        return self._llm.identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the writer; see ``reflact.protocols.LLM.ask``.

        Raises:
            ReplyError: The writer was given up, or its replies were not valid.
            ModelError: It gave no reply.
        """
        if self.stop_reason is not None:
            raise ReplyError(self.stop_reason)
        try:
            reply = await self._llm.ask(prompt, reply_type, call_id=call_id, check=check)
        except ReplyError as error:
            self._invalid_questions[call_id.label] = str(error)
            raise
        self.has_replied = True
        return reply

    def stop_if_silent(self) -> None:
        """Give the writer up if enough different questions were asked and none got a valid reply."""
        if (
            not self.has_replied
            and self.stop_reason is None
            and len(self._invalid_questions) >= FAIL_FAST_CALLS
        ):
            self.stop_reason = (
                f"the writer gave no valid reply to any of its first {len(self._invalid_questions)} questions, so it "
                "was asked no more, and candidates that it was to write were dropped as bad_reply; the last "
                f"one: {self._invalid_questions[max(self._invalid_questions)]}"
            )
