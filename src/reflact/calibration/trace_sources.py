"""Rollouts of training as transitions, so that they feed the same traces as any agent's run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from pydantic import JsonValue

from reflact.calibration.perturbations import classify_error, find_reference
from reflact.calibration.splits import list_labeled_events
from reflact.calibration.trace import Trace
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, Provenance, ScoreEvent, Transition
from reflact.types import Rollout, Turn

REPLY_ACTION = "reply"
"""The action of a conversation's transitions; its argument is what was said."""


def last_messages(turns: Sequence[Turn]) -> str:
    """Return the messages that the agent has not answered yet; if it had the last word, what it said."""
    answered = max((n for n, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    heard = turns[answered + 1 :] or turns[answered:]
    return "\n\n".join(turn.content for turn in heard)


def list_transitions(
    rollout: Rollout, *, state: Callable[[Sequence[Turn]], JsonValue] = last_messages
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
            action=Action(name=REPLY_ACTION, arguments=turns[place].content),
            after=state(turns[:following]),
        )
        for place, following in pairwise([*places, len(turns)])
    )


def label_reply(rollout: Rollout) -> Label | None:
    """Return what a program found of a rollout's only reply: from 0 to ten times the soft score.

    None if nothing was measured, or if several replies share the score; see ``label_replies``.
    """
    golds = label_replies(rollout)
    return golds[0] if len(golds) == 1 else None


def label_replies(rollout: Rollout) -> tuple[Label | None, ...]:
    """Return what a program found of each reply, in the order of ``list_transitions``.

    The score is of what came out, so the last reply has it: ten times the soft score is progress after. Of an only
    reply progress before is 0, since nothing was answered; of several nobody knows it.
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


MIN_ANCHOR_DISTANCE = 1.0
"""So far a wrong progress after lies from the right one at least."""

CARELESS_DISTANCE = 3.0
"""So many points a careless evaluation is off, if it credits what was not achieved."""


def build_anchors(traces: Iterable[Trace]) -> tuple[ContrastPair, ...]:
    """Return one gold pair for each step whose gold is known before and after, by a program or a person.

    The right side is gold. The wrong one is what the critic said if that is off by a point or more, else a
    careless evaluation: no credit if there was progress, credit if there was none.

    Args:
        traces: Runs that are set apart: neither learned from nor held out.
    """
    return tuple(
        pair
        for trace in traces
        for event in list_labeled_events(trace)
        if (pair := _build_anchor(trace, event)) is not None
    )


def _build_anchor(trace: Trace, event: ScoreEvent) -> ContrastPair | None:
    label = None if event.label is None else find_reference(event, event.label)
    if label is None:
        return None
    own = event.evaluation
    observed = (
        own is not None and abs(own.progress_after - label.evaluation.progress_after) >= MIN_ANCHOR_DISTANCE
    )
    wrong = own if own is not None and observed else _make_careless(label.evaluation)
    high = wrong.progress_after > label.evaluation.progress_after
    return ContrastPair(
        purpose=trace.purpose,
        transition=event.transition,
        right=label.evaluation,
        wrong=wrong,
        reason="It credits what was not achieved." if high else "It overlooks what was achieved.",
        mistake=classify_error(wrong, label.evaluation),
        construction="observed" if observed else "written",
        label_source=label.source,
        provenance=Provenance(trace_id=trace.id, step=event.step),
    )


def _make_careless(right: Evaluation) -> Evaluation:
    """Return an evaluation that overlooks progress, or else one that believes in it."""
    if right.delta >= MIN_ANCHOR_DISTANCE:
        return _replace_progress(right, right.progress_before, "Nothing has changed.")
    high = right.progress_after + CARELESS_DISTANCE <= 10
    phi = right.progress_after + (CARELESS_DISTANCE if high else -CARELESS_DISTANCE)
    return _replace_progress(
        right, phi, "The agent does what it wants to do." if high else "Little of it is there."
    )


def _replace_progress(right: Evaluation, progress_after: float, reasoning: str) -> Evaluation:
    return right.model_copy(update={"progress_after": progress_after, "reasoning": reasoning, "evidence": ()})
