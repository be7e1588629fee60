"""Critics, judges and writers that are given up where their first replies are all invalid: a wrong model
looks like that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reflact.calibration.agreement import Scorer
from reflact.calls import Rendered, Reply, Sample
from reflact.errors import ContextOverflow, ModelError, ReplyError, RunFailed
from reflact.memory import ContrastPair, StateScore, Transition
from reflact.ports import LLM, R

FIRST = 10
"""Questions that may stay without a valid reply before there is any."""


class HeardCritic:
    """A critic that must give one valid score among its first ones.

    Args:
        critic: The critic.
    """

    def __init__(self, critic: Scorer) -> None:
        self._critic = critic
        self._scored = False
        self._lost = 0

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
            self._count(error)
            raise
        self._scored = True
        return score

    def _count(self, error: ModelError) -> None:
        self._lost += 1
        if not self._scored and self._lost >= FIRST:
            raise RunFailed(
                f"the critic gave no valid score of any of the first {FIRST} questions, so nothing more is "
                f"asked; the last reply was refused: {error}. Look at the model and its address "
                "(models.critic.model, base_url), at `mode` and at `max_tokens`; what was paid for is stored"
            ) from error


class HeardJudge:
    """A judge that must give one valid reply to its first comparisons: without any it keeps no pair.

    Args:
        llm: The judge.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._heard = False
        self._lost = 0

    @property
    def identity(self) -> str:
        """The judge's identity."""
        return self._llm.identity

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the judge; see ``reflact.ports.LLM.ask``.

        Raises:
            RunFailed: None of the first comparisons has a valid reply.
            ModelError: This one has none.
        """
        try:
            reply = await self._llm.ask(prompt, reply_type, sample=sample, check=check)
        except ReplyError as error:
            self._lost += 1
            if not self._heard and self._lost >= FIRST:
                raise RunFailed(
                    f"the judge gave no valid reply to any of the first {FIRST} comparisons, without which "
                    "none of their pairs is kept, so nothing more is asked; the last reply was refused: "
                    f"{error}. Look at the model (models.critic.model), at `mode` and at `max_tokens`, or do "
                    "without comparisons (contrast.judges: 0); what was paid for is stored"
                ) from error
            raise
        self._heard = True
        return reply


class HeardWriter:
    """A writer that is asked no more where none of its first questions got a valid reply.

    That is decided by ``settle`` alone, between groups of questions that are all over, so that it follows
    from what was said and not from when.

    Args:
        llm: The writer.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._refused: dict[str, str] = {}
        self.heard = False
        self.given_up: str | None = None

    @property
    def identity(self) -> str:
        """The writer's identity."""
        return self._llm.identity

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the writer; see ``reflact.ports.LLM.ask``.

        Raises:
            ReplyError: The writer was given up, or its replies were not valid.
            ModelError: It gave no reply.
        """
        if self.given_up is not None:
            raise ReplyError(self.given_up)
        try:
            reply = await self._llm.ask(prompt, reply_type, sample=sample, check=check)
        except ReplyError as error:
            self._refused[sample.label] = str(error)
            raise
        self.heard = True
        return reply

    def settle(self) -> None:
        """Give the writer up if enough different questions were asked and none got a valid reply."""
        if not self.heard and self.given_up is None and len(self._refused) >= FIRST:
            self.given_up = (
                f"the writer gave no valid reply to any of its first {len(self._refused)} questions, so it "
                "was asked no more, and candidates that it was to write were dropped as bad_reply; the last "
                f"one: {self._refused[max(self._refused)]}"
            )
