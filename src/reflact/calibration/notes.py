"""What a critic makes of each step of a failed trajectory, for the analysts that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import JsonValue

from reflact.calibration.critic import Critic
from reflact.calibration.grading import MOST, input_of, name_of, used
from reflact.calibration.metrics import Measures
from reflact.calibration.rollouts import last_heard, transitions_of
from reflact.errors import ContextOverflow, ReplyError
from reflact.memory import Transition
from reflact.results import CriticUsed
from reflact.tasks import fan_out
from reflact.types import Item, Rollout, Turn, canonical


class CriticNotes:
    """Notes phi before and after each reply of a trajectory; pass it to ``Trainer(annotate=...)``.

    Args:
        critic: A critic that cannot change under a run: ``await critic.pin()`` or ``critic.pinned(pairs)``.
        purpose: Says what an item asks for; a function or a method, by whose name it is known in the run's
            identity.
        state: Renders the state from the turns so far (see ``transitions_of``); known by its name as well.
        measured: What the critic's scores are worth, for the summary; None: it was not measured.

    Raises:
        ConfigError: The critic is not pinned, or a function has no name.
    """

    def __init__(
        self,
        critic: Critic,
        *,
        purpose: Callable[[Item], str] = input_of,
        state: Callable[[Sequence[Turn]], JsonValue] = last_heard,
        measured: Measures | None = None,
    ) -> None:
        self._critic = critic
        self._purpose = purpose
        self._state = state
        self._used = used(critic, measured)
        self._identity = canonical(
            {
                "notes": "critic",
                "critic": critic.identity,
                "purpose": name_of(purpose),
                "state": name_of(state),
            }
        )

    @property
    def identity(self) -> str:
        """The critic with its snapshot and the functions' names, as canonical JSON."""
        return self._identity

    @property
    def scored_by(self) -> CriticUsed:
        """The critic, as a run's summary names it."""
        return self._used

    async def annotate(self, item: Item, rollout: Rollout) -> tuple[str, ...]:
        """Return a line on each reply; one that the critic gave no valid score of is named as such.

        Raises:
            ProviderError, BudgetSpent: The critic's endpoint or budget failed.
        """
        purpose = self._purpose(item)

        async def line(numbered: tuple[int, Transition]) -> str:
            number, transition = numbered
            try:
                said = (await self._critic.score(transition, purpose=purpose)).evaluation
            except (ReplyError, ContextOverflow):
                return f"reply {number}: a critic gave no score"
            phi = f"{said.phi_before:g} before and {said.phi_after:g} after"
            return f"reply {number}: a critic gave {phi}, of {MOST:g}: {said.reasoning}"

        return await fan_out(line, tuple(enumerate(transitions_of(rollout, state=self._state), 1)))
