"""Rollouts of training as transitions, so that they feed the same traces as any agent's run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from pydantic import JsonValue

from reflact.calibration.constructions import kind_of_error, label_of
from reflact.calibration.holding import known
from reflact.calibration.trace import Trace
from reflact.memory import Action, ContrastPair, Evaluation, Gold, Provenance, ScoreEvent, Transition
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


LEAST = 1.0
"""So far a wrong phi after lies from the right one at least."""

CARELESS = 3.0
"""So many points a careless evaluation is off, where it credits what was not achieved."""


def anchors_of(traces: Iterable[Trace]) -> tuple[ContrastPair, ...]:
    """Return one gold pair for each step whose gold is known before and after, by a program or a person.

    The right side is gold. The wrong one is what the critic said where that is off by a point or more, else a
    careless evaluation: no credit where there was progress, credit where there was none.

    Args:
        traces: Runs that are set apart: neither learned from nor held out.
    """
    return tuple(
        pair for trace in traces for event in known(trace) if (pair := _anchor(trace, event)) is not None
    )


def _anchor(trace: Trace, event: ScoreEvent) -> ContrastPair | None:
    label = None if event.gold is None else label_of(event, event.gold)
    if label is None:
        return None
    own = event.evaluation
    observed = own is not None and abs(own.phi_after - label.right.phi_after) >= LEAST
    wrong = own if own is not None and observed else _careless(label.right)
    high = wrong.phi_after > label.right.phi_after
    return ContrastPair(
        purpose=trace.purpose,
        transition=event.transition,
        right=label.right,
        wrong=wrong,
        why="It credits what was not achieved." if high else "It overlooks what was achieved.",
        mistake=kind_of_error(wrong, label.right),
        construction="observed" if observed else "written",
        label=label.source,
        provenance=Provenance(trace_id=trace.id, step=event.step),
    )


def _careless(right: Evaluation) -> Evaluation:
    """Return an evaluation that overlooks progress, or else one that believes in it."""
    if right.delta >= LEAST:
        return _off(right, right.phi_before, "Nothing has changed.")
    high = right.phi_after + CARELESS <= 10
    phi = right.phi_after + (CARELESS if high else -CARELESS)
    return _off(right, phi, "The agent does what it wants to do." if high else "Little of it is there.")


def _off(right: Evaluation, phi: float, reasoning: str) -> Evaluation:
    return right.model_copy(update={"phi_after": phi, "reasoning": reasoning, "evidence": ()})
