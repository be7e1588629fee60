"""Guards: what an evaluation must keep whatever the model says."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from reflact.calibration.guards import GUARDS, GuardCase, QuotableTexts, apply_guards, find_objection
from reflact.calibration.transition_view import TransitionView
from reflact.memory.models import Action, Evaluation, Transition

BEFORE: JsonValue = {"order": {"status": "open", "items": ["lamp"]}, "mails": 0}
AFTER: JsonValue = {
    "order": {"status": "paid", "items": ["lamp", "desk"]},
    "mails": 0,
    "note": "Thank you,\nKim",
}


def step(before: JsonValue = BEFORE, after: JsonValue = AFTER) -> Transition:
    return Transition(before=before, action=Action(name="say", arguments="All tests pass."), after=after)


def case_of(transition: Transition) -> GuardCase:
    return GuardCase(transition.changes_state, QuotableTexts(TransitionView(transition)))


def said(**fields: object) -> Evaluation:
    usual = {
        "progress_before": 2,
        "progress_after": 5,
        "reasoning": "r",
        "evidence": ("status: paid",),
        "confidence": 0.9,
    }
    return Evaluation.model_validate(usual | fields)


SAME = step({"a": 1, "b": [2]}, {"b": [2], "a": 1})
BACK = step({"tests": "passing", "n": 1, "b": 0}, {"tests": "failing", "n": 2, "b": 0})


@pytest.mark.parametrize(
    ("transition", "evidence", "after", "left"),
    [
        (step(), ["status: paid"], 5, (3, 0.9, ())),
        (step(), ["status: paid"], 6.5, (4.5, 0.5, ("jump",))),
        (SAME, ["a: 1"], 9, (0, 0.9, ("no_change",))),
        (SAME, [], 2, (0, 0.9, ())),
        (step(), [], 5, (0, 0.2, ("no_evidence",))),
        (step(), ["mails: 0"], 5, (3, 0.2, ("old_evidence",))),
        (step(), ["lamp", "desk"], 5, (3, 0.9, ())),
        (step(), ["order.status"], 0, (-2, 0.9, ())),
        (BACK, ["tests: passing", "n: 2"], 5, (3, 0.9, ())),
        (BACK, ["tests: passing", "b: 0"], 5, (3, 0.2, ("old_evidence",))),
    ],
)
def test_credit_and_confidence_rest_on_evidence_of_a_change(
    transition: Transition, evidence: list[str], after: float, left: tuple[float, float, tuple[str, ...]]
) -> None:
    evaluation, names = apply_guards(said(evidence=evidence, progress_after=after), case_of(transition))
    assert (evaluation.delta, evaluation.confidence, names) == left


@pytest.mark.parametrize(
    ("before", "after", "quote"),
    [
        ("Build ok.\nAll tests pass.", "Build ok.\n3 tests fail.", "All tests pass."),
        ("Build ok.\nAll tests pass.", "Build ok.\n3 tests fail.", "-All tests pass."),
        ({"tests": "passing", "n": 1}, {"tests": "failing", "n": 2}, "tests: passing"),
        ({"tests": {"unit": "passing", "n": 1}}, {"tests": {"n": 1}}, "tests.unit"),
        ({"files": ["a", "b"]}, {"files": ["a"]}, 'files[1]: "b"'),
        ("done", {"n": 1}, "done"),
    ],
)
def test_what_is_gone_bears_a_loss_and_no_gain(before: JsonValue, after: JsonValue, quote: str) -> None:
    case = case_of(step(before, after))
    gain, loss = said(evidence=(quote,)), said(progress_after=0, evidence=(quote,))
    left, names = apply_guards(gain, case)
    assert (left.delta, left.confidence, names) == (0, 0.2, ("vanished_evidence",))
    assert "gone in the state after" in str(find_objection(gain, case))
    assert apply_guards(loss, case) == (loss, ())
    assert find_objection(loss, case) is None


@pytest.mark.parametrize(
    ("before", "after", "quote"),
    [
        ({"debt": 5}, {}, "debt: 5 -> (not there)"),
        ({"status": "open"}, {"status": "paid"}, "status: open -> paid"),
        ("status open\nx", "status paid\nx", "-status open\n+status paid"),
        ({"a": "lamp", "b": ""}, {"a": "", "b": "lamp"}, "lamp"),
    ],
)
def test_a_change_with_both_its_sides_bears_a_gain(before: JsonValue, after: JsonValue, quote: str) -> None:
    """Whoever says that something is gone, or what it became, or quotes what is still there, is believed."""
    case = case_of(step(before, after))
    assert apply_guards(said(evidence=(quote,)), case) == (said(evidence=(quote,)), ())


@given(
    before=st.floats(0, 10),
    after=st.floats(0, 10),
    confidence=st.floats(0, 1),
    evidence=st.lists(st.sampled_from(["status: paid", "status: open", "all tests pass", ""]), max_size=3),
    changed=st.booleans(),
)
def test_guards_do_not_undo_each_other(
    before: float, after: float, confidence: float, evidence: list[str], changed: bool
) -> None:
    """In any order, and applied twice, they leave the same; they only take away."""
    raw = said(progress_before=before, progress_after=after, confidence=confidence, evidence=tuple(evidence))
    case = case_of(step() if changed else step(AFTER, AFTER))
    left, _ = apply_guards(raw, case)
    assert apply_guards(left, case) == (left, ())
    assert left.progress_before == raw.progress_before
    assert abs(left.delta) <= abs(raw.delta)
    assert left.confidence <= raw.confidence
    for order in permutations(GUARDS.values() if changed else ()):
        other = raw
        for guard in order:
            other = guard(other, case)
        assert other.delta == left.delta or not changed


THERE = (
    *("status: paid", '"status": "paid"', "STATUS = paid", "order.status", "order.status is paid"),
    *("status changed from open to paid", "The status went from open to paid.", "order.items[1]: desk"),
    *("Thank you,\nKim", "thank you, kim", "\uff34hank you", "mails 0"),
)
"""Fields, values and words of the state after and of the change, however they are written."""

NOT_THERE = (
    *("", "...", "the", "status: shipped", "status is not paid", "status: paid and all tests pass"),
    *("Field y changed", "The state improved a lot", "All tests pass.", "order.items[2]: desk", "mails: 1"),
    *("paidstatus", "pai", "\u2705", "\u5b8c\u6210"),
)
"""Invented fields and values, praise, what only the action says, and parts of words."""


def test_quotes_that_are_not_there_are_found() -> None:
    quotable = QuotableTexts(TransitionView(step()))
    assert quotable.find_invented((*THERE, *NOT_THERE)) == NOT_THERE


@pytest.mark.parametrize(
    ("before", "after", "quote", "there"),
    [
        ("\u4efb\u52a1\u8fdb\u884c\u4e2d", "\u4efb\u52a1\u5df2\u5b8c\u6210", "\u5df2\u5b8c\u6210", True),
        ("\u4efb\u52a1\u8fdb\u884c\u4e2d", "\u4efb\u52a1\u5df2\u5b8c\u6210", "\u672a\u5b8c\u6210", False),
        ("a\nb\nold line\nc", "a\nb\nc", "old line", True),
        ({"debt": 5}, {}, "debt", True),
        ({"debt": 5}, {"debt": -5}, "debt: -5", True),
        ({"debt": 5}, {"debt": -5.5}, "debt: -5", False),
        ("", "rows 5-7", "-7", False),
        ("", "\u6e29\u5ea6-5", "-5", True),
        ("x", "5 rows\nx", "-5 rows", False),
        ({"a": 1}, {"b": 1}, "1 b", False),
        ({"a": "x"}, {"a": 'say "hi"\tnow'}, 'say "hi" now', True),
    ],
)
def test_evidence_of_other_kinds(before: JsonValue, after: JsonValue, quote: str, there: bool) -> None:
    """Scripts without spaces, emoji, text, fields that are gone and signs of numbers are compared rightly."""
    assert (QuotableTexts(TransitionView(step(before, after))).find_invented((quote,)) == ()) is there
