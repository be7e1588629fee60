"""Rollouts of training as transitions."""

from __future__ import annotations

import pytest

from reflact import Trace
from reflact.calibration.trace_sources import label_replies, label_reply, last_messages, list_transitions
from reflact.memory.models import Action, Label, Transition
from reflact.types import Rollout, Score, Turn


def rollout(*said: str, score: float | None = None) -> Rollout:
    """Return a conversation; each line begins with the role's first letter."""
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    turns = [Turn.model_validate({"role": roles[line[0]], "content": line}) for line in said]
    return Rollout(
        key="k",
        item_id="i",
        skill_hash="s",
        turns=tuple(turns),
        score=None if score is None else Score(hard=0, soft=score),
        feedback="Half of it.",
    )


def reply(before: str, said: str, after: str) -> Transition:
    """Return the transition of a reply."""
    return Transition(before=before, action=Action(name="reply", arguments=said), after=after)


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ((), []),
        (("u1",), []),
        (("u1", "a1"), [("u1", "a1", "a1")]),
        (("u1", "a1", "u2", "a2"), [("u1", "a1", "u2"), ("u2", "a2", "a2")]),
        (("u1", "a1", "t1", "t2", "a2", "u3"), [("u1", "a1", "t1\n\nt2"), ("t1\n\nt2", "a2", "u3")]),
        (("a1", "u1"), [("", "a1", "u1")]),
        (("u1", "a1", "a2"), [("u1", "a1", "a1"), ("a1", "a2", "a2")]),
    ],
)
def test_each_reply_is_a_transition(said: tuple[str, ...], steps: list[tuple[str, str, str]]) -> None:
    """Before is what the agent had to answer, after is what came of it, or its last word."""
    assert list_transitions(rollout(*said)) == tuple(reply(*step) for step in steps)


def test_the_caller_may_say_what_a_state_is() -> None:
    """Any rendering of the turns so far serves."""
    (first, last) = list_transitions(
        rollout("u1", "a1", "u2", "a2"), state=lambda turns: {"turns": len(turns)}
    )
    assert (first.before, first.after) == ({"turns": 1}, {"turns": 3})
    assert (last.before, last.after) == ({"turns": 3}, {"turns": 4})


def test_nothing_was_heard_of_no_conversation() -> None:
    """Without turns there is no text."""
    assert last_messages([]) == ""


def test_a_score_is_gold_for_a_single_reply() -> None:
    """The program's soft score is the phi after; several replies share it, and none has it alone."""
    assert label_reply(rollout("u1", "a1", score=0.5)) == Label(
        progress_before=0, progress_after=5, source="program", reasoning="Half of it."
    )
    assert label_reply(rollout("u1", "a1")) is None
    assert label_reply(rollout("u1", "a1", "u2", "a2", score=1)) is None


def test_of_several_replies_the_last_one_has_the_score() -> None:
    """What came out is worth what the program says; what the state before was worth nobody knows."""
    said = rollout("u1", "a1", "u2", "a2", score=0.5)
    golds = label_replies(said)
    assert golds == (None, Label(progress_after=5, source="program", reasoning="Half of it."))
    trace = Trace("Answer the user.")
    for transition, gold in zip(list_transitions(said), golds, strict=True):
        trace.record(transition, label=gold)
    assert [event.label for event in trace.events] == list(golds)
    assert label_replies(rollout("u1", "a1", score=0.5)) == (label_reply(rollout("u1", "a1", score=0.5)),)
    assert label_replies(rollout("u1", "a1", "u2", "a2")) == (None, None)
    assert label_replies(rollout("u1", score=0.5)) == ()
