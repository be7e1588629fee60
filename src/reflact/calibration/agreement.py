"""What independent samples of a critic agree on, where no gold says what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from reflact.errors import ContextOverflow, ReplyError
from reflact.memory import ContrastPair, Evaluation, StateScore, Transition

FIRST_TRIAL = 1
"""Trial 0 is the score that the agent's own loop asked for; samples are independent of it."""


class Scorer(Protocol):
    """A critic, as far as contrasts need one."""

    async def score(
        self,
        transition: Transition,
        *,
        purpose: str,
        pairs: Sequence[ContrastPair] | None = None,
        trial: int = 0,
    ) -> StateScore:
        """Evaluate a transition; another trial is an independent sample."""
        ...


async def agreed(
    critic: Scorer, transition: Transition, *, purpose: str, samples: int, max_spread: float
) -> Evaluation | str:
    """Return the middle one of so many samples, or in words why they do not agree.

    They agree where their phi before and their phi after each lie within ``max_spread``. A sample from which
    a guard took credit for a change is no opinion, and neither is a missing one. One sample follows the
    other, and asking ends as soon as they cannot agree any more, so that none is paid for in vain.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
        BudgetSpent: The budget has no room for a call.
    """

    async def one(trial: int) -> Evaluation | str:
        try:
            score = await critic.score(transition, purpose=purpose, trial=trial)
        except (ReplyError, ContextOverflow) as error:
            return f"a sample gave no score: {error}"
        if transition.changed and score.raw.phi_after != score.evaluation.phi_after:
            return "a sample rests on no evidence"
        return score.evaluation

    found: list[Evaluation] = []
    for trial in range(FIRST_TRIAL, FIRST_TRIAL + samples):
        said = await one(trial)
        if isinstance(said, str):
            return said
        found.append(said)
        apart = _dissent(found, max_spread)
        if apart is not None:
            return apart
    return middle(found)


def middle(samples: Sequence[Evaluation]) -> Evaluation:
    """Return the middle sample by phi after, then phi before; of an even number the lower of the two."""
    ordered = sorted(samples, key=lambda one: (one.phi_after, one.phi_before, one.reasoning))
    return ordered[(len(ordered) - 1) // 2]


def _dissent(scores: Sequence[Evaluation], max_spread: float) -> str | None:
    for phis in ([one.phi_before for one in scores], [one.phi_after for one in scores]):
        if max(phis) - min(phis) > max_spread:
            return f"samples lie {max(phis) - min(phis):g} apart, more than {max_spread:g}"
    return None
