"""Anchors made of recorded steps: right by gold, wrong by the critic's own mistake or a careless one."""

from __future__ import annotations

import pytest

from reflact import Trace
from reflact.calibration import build_anchors, label_replies, list_transitions
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, Transition
from reflact.types import Rollout, Score, Turn


def pairs(gold: Label | None, said: float | None = None) -> tuple[ContrastPair, ...]:
    trace = Trace("Sort the mail.", id="t")
    own = Evaluation(progress_before=0, progress_after=said or 0, reasoning="It looks done.")
    step = Transition(before="2 left", action=Action(name="sort"), after="1 left")
    trace.record(step, None if said is None else own, label=gold)
    return build_anchors([trace])


@pytest.mark.parametrize(
    ("before", "after", "said", "wrong", "construction", "mistake"),
    [
        (0, 4, 9, 9, "observed", "inflated_score"),
        (0, 4, 3, 3, "observed", "ignored_evidence"),
        (0, 4, 4.5, 0, "written", "ignored_evidence"),
        (4, 4, None, 7, "written", "credit_for_intention"),
        (9.5, 10, None, 7, "written", "ignored_evidence"),
    ],
)
def test_the_critics_own_mistake_is_the_wrong_side(  # noqa: PLR0917
    before: float, after: float, said: float | None, wrong: float, construction: str, mistake: str
) -> None:
    """Where it made one; else progress is overlooked, or credit is given where there was none."""
    (pair,) = pairs(Label(progress_before=before, progress_after=after, source="human"), said)
    assert (pair.wrong.progress_after, pair.construction, pair.mistake) == (wrong, construction, mistake)


def rollout(*said: str, score: float | None = None) -> Rollout:
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
    return Transition(before=before, action=Action(name="reply", arguments=said), after=after)


@pytest.mark.parametrize(
    ("said", "steps"),
    [
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


def test_the_last_reply_has_the_score() -> None:
    said = rollout("u1", "a1", "u2", "a2", score=0.5)
    golds = label_replies(said)
    assert golds == (None, Label(progress_after=5, source="program", reasoning="Half of it."))
    trace = Trace("Answer the user.")
    for transition, gold in zip(list_transitions(said), golds, strict=True):
        trace.record(transition, label=gold)
    assert [event.label for event in trace.events] == list(golds)
    only = Label(progress_before=0, progress_after=5, source="program", reasoning="Half of it.")
    assert label_replies(rollout("u1", "a1", score=0.5)) == (only,)
    assert label_replies(rollout("u1", "a1")) == (None,)
    assert label_replies(rollout("u1", "a1", "u2", "a2")) == (None, None)
    assert label_replies(rollout("u1", score=0.5)) == ()
