"""Rollouts of training as transitions, and anchors from labelled traces. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from pydantic import JsonValue

from reflact.calibration.pairs import (
    MIN_DISTANCE,
    StepToContrast,
    classify_error,
    find_reference,
)
from reflact.calibration.trace import Trace
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, Transition
from reflact.types import Rollout, Turn

# The action of a conversation's transitions; its argument is what was said.
REPLY_ACTION = "reply"


def last_messages(turns: Sequence[Turn]) -> str:
    """Return the messages that the agent has not answered yet, or else its last words."""
    answered = max((n for n, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    unanswered = turns[answered + 1 :] or turns[answered:]
    return "\n\n".join(turn.content for turn in unanswered)


def list_transitions(
    rollout: Rollout, *, state: Callable[[Sequence[Turn]], JsonValue] = last_messages
) -> tuple[Transition, ...]:
    """Return one transition for each reply of the agent.

    Args:
        rollout: A conversation, without the skill.
        state: Renders the state from the turns so far: before a reply, and before the next one or
            at the end.
    """
    turns = rollout.turns
    places = [n for n, turn in enumerate(turns) if turn.role == "assistant"]
    return tuple(
        Transition(
            before=state(turns[:place]),
            action=Action(name=REPLY_ACTION, arguments=turns[place].content),
            after=state(turns[:following]),
        )
        for place, following in pairwise([*places, len(turns)])
    )


def label_replies(rollout: Rollout) -> tuple[Label | None, ...]:
    """Return what a program found of each reply, in the order of ``list_transitions``.

    The score is of what came out, so the last reply has it: ten times the soft score is progress
    after. Of an only reply progress before is 0, since nothing was answered; of several nobody
    knows it.
    """
    replies = sum(turn.role == "assistant" for turn in rollout.turns)
    if rollout.score is None or replies == 0:
        return (None,) * replies
    last = Label(
        progress_before=0 if replies == 1 else None,
        progress_after=10 * rollout.score.soft,
        source="program",
        reasoning=rollout.feedback or "",
    )
    return (*(None,) * (replies - 1), last)


# So many points a careless evaluation is off, if it credits what was not achieved.
CARELESS_DISTANCE = 3.0


def build_anchors(traces: Iterable[Trace]) -> tuple[ContrastPair, ...]:
    """Return one labelled pair for each step whose label has both numbers, by a program or a
    person.

    The right side is the label. The wrong one is what the critic said if that is off by a point or
    more, else a careless evaluation: no credit if there was progress, credit if there was none.

    Args:
        traces: Runs that are set apart: neither learned from nor held out.
    """
    anchors = []
    for trace in traces:
        for event in trace.events:
            right = find_reference(event)
            if event.label is None or right is None:
                continue
            step = StepToContrast(event, right, trace.purpose, trace.id)
            wrong = _make_careless(right)
            construction = "written"
            if event.evaluation is not None and step.contrasts(event.evaluation, right):
                wrong = event.evaluation
                construction = "observed"
            reason = "It overlooks what was achieved."
            if wrong.progress_after > right.progress_after:
                reason = "It credits what was not achieved."
            anchor = step.build_pair(
                wrong,
                construction=construction,
                mistake=classify_error(wrong, right),
                reason=reason,
            )
            anchors.append(anchor)
    return tuple(anchors)


def _make_careless(right: Evaluation) -> Evaluation:
    """Return an evaluation that overlooks progress, or else one that believes in it."""
    if right.delta >= MIN_DISTANCE:
        progress = right.progress_before
        reasoning = "Nothing has changed."
    elif right.progress_after + CARELESS_DISTANCE <= 10:
        progress = right.progress_after + CARELESS_DISTANCE
        reasoning = "The agent does what it wants to do."
    else:
        progress = right.progress_after - CARELESS_DISTANCE
        reasoning = "Little of it is there."
    return right.model_copy(
        update={"progress_after": progress, "reasoning": reasoning, "evidence": ()}
    )
