"""A critic that is given up where its first replies are all invalid: a wrong model looks like that."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.calibration.agreement import Scorer
from reflact.errors import ContextOverflow, ModelError, ReplyError, RunFailed
from reflact.memory import ContrastPair, StateScore, Transition

FIRST = 10
"""Questions that may stay without a valid score before there is any."""


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
