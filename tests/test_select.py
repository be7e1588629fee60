"""Stage 4: the edit budget of each step, the optimizer's own step size, and all edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import open_context
from reflact.messages import ReplyModel
from reflact.stages.reply_models import AnalystReply, MergeReply
from reflact.stages.select import ReasonedStepSizeReply, SchedulerName, edit_budget, select
from reflact.testing import ScriptedLLM, ToyEnvironment, append_reply
from reflact.testing.llm import ScriptedAnswer
from reflact.types import AggregateResult, Edit, Patch, Skill
from toy_runs import Part, Ran, playing, run

schedulers: st.SearchStrategy[SchedulerName] = st.sampled_from(("constant", "linear", "cosine"))
bounds = st.integers(0, 50).flatmap(lambda top: st.tuples(st.just(top), st.integers(0, top)))


def _budgets(total: int, scheduler: SchedulerName, max_edits: int, floor: int) -> list[int]:
    steps = range(1, total + 1)
    return [edit_budget(s, total, scheduler=scheduler, max_edits=max_edits, floor=floor) for s in steps]


@given(st.integers(1, 200), schedulers, bounds)
def test_budgets_fall_from_the_largest_to_the_floor(
    total: int, scheduler: SchedulerName, bounds: tuple[int, int]
) -> None:
    max_edits, floor = bounds
    budgets = _budgets(total, scheduler, max_edits, floor)
    assert budgets[0] == max_edits
    assert budgets[-1] == (max_edits if scheduler == "constant" or total == 1 else floor)
    assert budgets == sorted(budgets, reverse=True)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [("constant", [7, 7, 7, 7, 7, 7]), ("linear", [7, 6, 5, 4, 3, 2]), ("cosine", [7, 7, 5, 4, 2, 2])],
)
def test_known_schedules(scheduler: SchedulerName, expected: list[int]) -> None:
    assert _budgets(6, scheduler, 7, 2) == expected


def test_exact_halves_are_rounded_upward() -> None:
    assert edit_budget(6, 7, scheduler="linear", max_edits=3, floor=0) == 1
    assert _budgets(4, "cosine", 6, 0) == [6, 5, 2, 0]
    assert _budgets(4, "cosine", 2, 0) == [2, 2, 1, 0]


AUTONOMOUS: dict[str, Any] = {"select": {"lr_control": "autonomous", "max_edits": 2, "min_edits": 2}}
SMALL: dict[str, Any] = {"reflect": {"minibatch_size": 1}}
UNMERGED: Part = (MergeReply, "no")
"""Without merges every proposal stays in the pool."""


def numbered() -> Part:
    """Play an analyst whose every proposal is another one, as many as it may make."""
    number = iter(range(1000))

    def propose(wanted: type[ReplyModel], _: str) -> ScriptedAnswer:
        return append_reply(wanted, *(f"- nonsense {next(number)}" for _ in range(9)))

    return AnalystReply, propose


def sized(*counts: int) -> Part:
    """Play decisions on the step size, one after the other, and the last one from then on."""
    left = list(counts)

    def give(*_: object) -> ScriptedAnswer:
        count = left.pop(0) if len(left) > 1 else left[0]
        return {"reasoning": "Few are sound.", "count": count, "confidence": 0.5, "risks": "Some."}

    return ReasonedStepSizeReply, give


def taken(done: Ran) -> list[tuple[int, int]]:
    """Return how many edits each step had in its pool, and how many it took."""
    return [(r.chosen.pool_size, len(r.chosen.patch.edits)) for r in done.records]


async def test_the_optimizer_decides_how_many_edits(tmp_path: Path) -> None:
    script = playing(numbered(), UNMERGED, sized(5, 1, 0))
    done = await run(tmp_path, script=script, train={"num_epochs": 2}, **AUTONOMOUS, **SMALL)
    assert taken(done)[:3] == [(8, 5), (8, 1), (8, 0)]
    assert done.actions[2] == "no_change"
    assert {call.call_id.step for call in done.asked("ranking")} == {1, 2}
    first, second = done.shown("step_size")[:2]
    assert all(f"<proposal_{n}>" in first for n in range(1, 9))
    assert "Earlier attempts in this round" not in first
    assert "step 1: 4 of 4 cases failed; outcome reject" in second
    for record, count in zip(done.records, (5, 1), strict=False):
        decision = record.chosen.decision
        assert (decision.count, record.chosen.budget, record.chosen.ranked) == (count, count, True)
        assert (decision.reasoning, decision.confidence, decision.risks) == ("Few are sound.", 0.5, "Some.")
        assert record.chosen.fallbacks == ()


@pytest.mark.parametrize("count", [99, -1])
async def test_without_a_valid_decision_the_schedule_decides(tmp_path: Path, count: int) -> None:
    script = playing(numbered(), UNMERGED, sized(count))
    done = await run(tmp_path, script=script, **AUTONOMOUS, **SMALL)
    assert taken(done) == [(8, 2), (8, 2)]
    for record in done.records:
        (fallback,) = record.chosen.fallbacks
        assert (fallback.label, fallback.replacement) == ("step_size", "at most 2 edits")
        assert record.chosen.decision is None
    assert sum(e.kind == "fallback_used" and e.fallback.label == "step_size" for e in done.events) == 2


async def test_none_takes_all_and_asks_nobody(tmp_path: Path) -> None:
    script = playing(numbered(), UNMERGED)
    done = await run(
        tmp_path, script=script, select={"lr_control": "none", "max_edits": 2, "min_edits": 1}, **SMALL
    )
    assert taken(done) == [(8, 8), (8, 8)]
    assert [r.chosen.budget for r in done.records] == [None, None]
    assert (done.asked("ranking"), done.asked("step_size")) == ([], [])


async def test_the_schedule_bounds_analysts_and_pool(tmp_path: Path) -> None:
    done = await run(
        tmp_path,
        script=playing(numbered(), UNMERGED),
        train={"batch_size": 2},
        select={"scheduler": "linear", "max_edits": 4, "min_edits": 1},
        **SMALL,
    )
    assert [r.chosen.budget for r in done.records] == [4, 3, 2, 1]
    assert [len(r.reports[0].patch.edits) for r in done.records] == [4, 3, 2, 1]
    assert taken(done) == [(2 * n, n) for n in (4, 3, 2, 1)]
    assert all(r.chosen.ranked for r in done.records)


async def test_an_extension_schedules_the_steps_that_are_left(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "select": {"scheduler": "linear", "max_edits": 5, "min_edits": 1},
        "environment": ToyEnvironment(train=4, val=4, test=4),
    }
    script = playing(numbered(), UNMERGED)
    short = await run(tmp_path, script=script, train={"batch_size": 2}, **sections)
    longer = await run(tmp_path, script=script, train={"batch_size": 2, "num_epochs": 2}, **sections)
    assert [r.chosen.budget for r in short.records] == [5, 1]
    assert longer.records[:2] == short.records
    assert [r.chosen.budget for r in longer.records[2:]] == [2, 1]


@pytest.mark.parametrize(
    ("size", "budget", "kept", "calls"),
    [
        (3, None, ["- 0", "- 1", "- 2"], 0),
        (3, 3, ["- 0", "- 1", "- 2"], 0),
        (3, 2, ["- 2", "- 1"], 1),
        (3, 1, ["- 2"], 1),
        (3, 0, [], 0),
        (0, 0, [], 0),
    ],
)
async def test_only_a_pool_beyond_the_budget_is_ranked(
    size: int, budget: int | None, kept: list[str], calls: int
) -> None:
    llm = ScriptedLLM(lambda *_: {"reasoning": "Last first.", "selected": [3, 2][:budget]})
    outcome = await select(pool_of(size), Skill(text="x"), context=await open_context(llm), budget=budget)
    assert [e.content for e in outcome.patch.edits] == kept
    assert (outcome.pool_size, outcome.budget, outcome.ranked) == (size, budget, calls == 1)
    assert len(llm.calls) == calls


@pytest.mark.parametrize("selected", [[1, 1], [1, 6], [1]])
async def test_without_a_valid_ranking_support_decides(selected: list[int]) -> None:
    llm = ScriptedLLM(lambda *_: {"reasoning": "r", "selected": [*selected]})
    outcome = await select(pool_of(5), Skill(text="x"), context=await open_context(llm), budget=2)
    assert [e.content for e in outcome.patch.edits] == ["- 4", "- 2"]
    assert [f.label for f in outcome.fallbacks] == ["ranking"]
    assert not outcome.ranked


def pool_of(size: int) -> AggregateResult:
    """Return a pool of edits, later ones with more support."""
    edits = tuple(Edit(op="append", content=f"- {n}", support_count=1 + n // 2) for n in range(size))
    return AggregateResult(patch=Patch(edits=edits))
