"""Rollouts of training as transitions, so that they feed the same traces as any agent's run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from pydantic import JsonValue

from reflact.memory import Action, Gold, Transition
from reflact.types import Rollout, Turn

REPLY = "reply"
"""The action of a conversation's transitions; its argument is what was said."""


def last_heard(turns: Sequence[Turn]) -> str:
    """Return the messages that the agent has not answered yet; where it had the last word, what it said."""
    answered = max((n for n, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    heard = turns[answered + 1 :] or turns[answered:]
    return "\n\n".join(turn.content for turn in heard)


def transitions_of(
    rollout: Rollout, *, state: Callable[[Sequence[Turn]], JsonValue] = last_heard
) -> tuple[Transition, ...]:
    """Return one transition for each reply of the agent.

    Args:
        rollout: A conversation, without the skill.
        state: Renders the state from the turns so far: before a reply, and before the next one or at the end.
    """
    turns = rollout.turns
    places = [n for n, turn in enumerate(turns) if turn.role == "assistant"]
    return tuple(
        Transition(
            before=state(turns[:place]),
            action=Action(name=REPLY, arguments=turns[place].content),
            after=state(turns[:following]),
        )
        for place, following in pairwise([*places, len(turns)])
    )


def gold_of(rollout: Rollout) -> Gold | None:
    """Return what a program found of a rollout's only reply: from 0 to ten times the soft score.

    None where nothing was measured, or where several replies share the score; see ``golds_of``.
    """
    golds = golds_of(rollout)
    return golds[0] if len(golds) == 1 else None


def golds_of(rollout: Rollout) -> tuple[Gold | None, ...]:
    """Return what a program found of each reply, in the order of ``transitions_of``.

    The score is of what came out, so the last reply has it: ten times the soft score is phi after. Of an only
    reply phi before is 0, since nothing was answered; of several nobody knows it.
    """
    replies = sum(turn.role == "assistant" for turn in rollout.turns)
    if rollout.score is None or replies == 0:
        return (None,) * replies
    last = Gold(
        phi_before=0 if replies == 1 else None,
        phi_after=10 * rollout.score.soft,
        source="program",
        reasoning=rollout.feedback or "",
    )
    return (*(None,) * (replies - 1), last)
