"""Anchors made of recorded steps: right by gold, wrong by the critic's own mistake or a careless one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact import Trace
from reflact.calibration.trace_sources import build_anchors
from reflact.memory.models import Action, ContrastPair, Evaluation, Label, LabelSource, Transition
from reflact.memory.store import MemoryStore

pytestmark = pytest.mark.anyio

PHI = st.floats(0, 10)


def pairs(gold: Label | None, said: float | None = None) -> tuple[ContrastPair, ...]:
    """Return the anchors of one step."""
    trace = Trace("Sort the mail.", id="t")
    own = (
        None
        if said is None
        else Evaluation(progress_before=0, progress_after=said, reasoning="It looks done.")
    )
    trace.record(Transition(before="2 left", action=Action(name="sort"), after="1 left"), own, label=gold)
    return build_anchors([trace])


@given(before=PHI, after=PHI, said=st.none() | PHI)
def test_right_and_wrong_are_a_point_apart_at_least(before: float, after: float, said: float | None) -> None:
    """Whatever gold is, the right side is gold, and the wrong one is on the scale and clearly off."""
    (pair,) = pairs(Label(progress_before=before, progress_after=after, source="program"), said)
    assert (pair.right.progress_before, pair.right.progress_after) == (before, after)
    assert 0 <= pair.wrong.progress_after <= 10
    assert abs(pair.wrong.progress_after - pair.right.progress_after) >= 1
    assert (pair.label_source, pair.provenance.trace_id, pair.provenance.step) == ("program", "t", 0)


@pytest.mark.parametrize(
    ("before", "after", "said", "wrong", "construction", "mistake"),
    [
        (0, 4, 9, 9, "observed", "inflated_score"),
        (0, 4, 3, 3, "observed", "ignored_evidence"),
        (0, 4, 4.5, 0, "written", "ignored_evidence"),
        (0, 4, None, 0, "written", "ignored_evidence"),
        (4, 4, None, 7, "written", "credit_for_intention"),
        (4, 2, None, 5, "written", "credit_for_intention"),
        (9.5, 10, None, 7, "written", "ignored_evidence"),
    ],
)
def test_the_critics_own_mistake_is_the_wrong_side(  # noqa: PLR0917
    before: float, after: float, said: float | None, wrong: float, construction: str, mistake: str
) -> None:
    """Where it made one; else progress is overlooked, or credit is given where there was none."""
    (pair,) = pairs(Label(progress_before=before, progress_after=after, source="human"), said)
    assert (pair.wrong.progress_after, pair.construction, pair.mistake) == (wrong, construction, mistake)


@pytest.mark.parametrize(("before", "source"), [(None, "program"), (None, "human"), (1, "agreement")])
def test_only_whole_gold_that_is_no_opinion_makes_one(before: float | None, source: LabelSource) -> None:
    """What samples agree on measures nothing, and half a label is no right side."""
    assert pairs(Label(progress_before=before, progress_after=4, source=source)) == ()
    assert pairs(None) == ()


async def test_a_memory_keeps_them_once(tmp_path: Path) -> None:
    """Made again of the same traces they are the same, so that a program can be run again."""
    found = pairs(Label(progress_before=0, progress_after=4, source="program"))
    async with MemoryStore(tmp_path / "memory.db") as memory:
        assert await memory.add_anchors(found) == 1
        assert await memory.add_anchors(found) == 0
        assert await memory.anchors() == found
