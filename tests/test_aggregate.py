"""The doors of a step, each alone, with a model that is a function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from anyio import run
from hypothesis import given
from hypothesis import strategies as st

from doubles import RUN, opened
from reflact.concurrency import fan_out
from reflact.config.training import AggregateConfig, ReflectConfig
from reflact.errors import ContextOverflow
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import fence, load_prompts
from reflact.stages.aggregate import aggregate, join_edits
from reflact.stages.reflect import Analyst, deal_minibatches, make_edit_analysis
from reflact.stages.select import select, sort_by_support
from reflact.testing import InMemoryRunStore, ScriptedLLM
from reflact.testing.llm import ScriptedAnswer
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Edit,
    Item,
    Patch,
    Rollout,
    RolloutSource,
    Score,
    SelectResult,
    Skill,
    Turn,
)

pytestmark = pytest.mark.anyio

BOOK = load_prompts()
SKILL = Skill(text="Answer briefly.\n")
PROPOSAL = re.compile(r"<(proposal_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)


def pure(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Merge by joining all proposals into one; rank the last proposals first."""
    shown = "\n".join(m.content for m in prompt.messages if m.role == "user")
    proposals = [(int(n), text.rpartition("content: ")[2]) for _, n, text in PROPOSAL.findall(shown)]
    if "selected" in reply_type.model_fields:
        budget = next(m.min_length for m in reply_type.model_fields["selected"].metadata)
        return {"reasoning": "Last first.", "selected": [n for n, _ in reversed(proposals)][:budget]}
    (edit_type,) = get_args(reply_type.model_fields["edits"].annotation)
    whole: dict[str, Any] = {
        "op": "append",
        "target": "",
        "content": " / ".join(content for _, content in proposals),
        "sources": [n for n, _ in proposals],
    }
    return {"edits": [{name: whole[name] for name in edit_type.model_fields}]}


def useless(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Give no valid reply."""
    return "I would rather not."


def report(source: RolloutSource, index: int, *contents: str) -> AnalystReport:
    """Return an analyst's report that proposes to append these lines."""
    edits = tuple(Edit(op="append", content=c, source_type=source) for c in contents)
    patch = Patch(reasoning=f"{source} {index}", edits=edits)
    return AnalystReport(source_type=source, index=index, item_ids=("a",), patch=patch)


async def merged(reports: Sequence[AnalystReport], llm: ScriptedLLM, size: int = 2) -> AggregateResult:
    """Aggregate with the packaged prompts."""
    return await aggregate(
        reports,
        SKILL,
        llm=llm,
        prompts=BOOK,
        config=AggregateConfig(merge_batch_size=size),
        operations=("append",),
        notes="",
        decision_log=(await opened()).decision_log(RUN),
        step=1,
    )


# ----------------------------------------------------------------------------------------------- merges


@given(st.data(), st.integers(0, 6), st.integers(0, 6), st.integers(2, 4))
def test_a_merge_does_not_depend_on_the_order_of_reports(
    data: st.DataObject, failures: int, successes: int, size: int
) -> None:
    """Any permutation of the reports gives the same pool of edits."""
    reports = [report("failure", n, f"- f{n}", f"- x{n}") for n in range(failures)]
    reports += [report("success", n, f"- s{n}") for n in range(successes)]
    shuffled = data.draw(st.permutations(reports))
    expected = run(merged, reports, ScriptedLLM(pure), size)
    assert run(merged, shuffled, ScriptedLLM(pure), size) == expected


@pytest.mark.parametrize("patches", range(1, 31))
async def test_a_tree_of_merges_ends(patches: int) -> None:
    """Pairs are merged level by level: n patches take n - 1 calls, whatever n is."""
    llm = ScriptedLLM(pure)
    pool = await merged([report("failure", n, f"- f{n}") for n in range(patches)], llm)
    assert len(llm.calls) == patches - 1
    (edit,) = pool.patch.edits
    assert sorted(edit.content.split(" / ")) == sorted(f"- f{n}" for n in range(patches))
    assert edit.support_count == patches


async def test_one_patch_passes_unmerged() -> None:
    """A patch that is alone comes out as it went in, without a call; empty ones count for nothing."""
    llm = ScriptedLLM(useless)
    alone = report("success", 1, "- a", "- b")
    pool = await merged([report("failure", 0), report("success", 0), alone], llm)
    assert (pool.patch, pool.fallbacks, llm.calls) == (alone.patch, (), [])
    assert await merged([], llm) == AggregateResult()


async def test_a_merge_that_cannot_be_had_joins_the_proposals() -> None:
    """The fallback is every proposal once, failures first, and every merge that failed is named."""
    reports = [
        report("success", 0, "- s", "- same"),
        report("failure", 0, "- f"),
        report("failure", 1, "- same"),
    ]
    pool = await merged(reports, ScriptedLLM(useless))
    assert [e.content for e in pool.patch.edits] == ["- f", "- same", "- s"]
    assert [e.source_type for e in pool.patch.edits] == ["failure", None, "success"]
    assert pool.patch.edits[1].support_count == 2
    assert [f.label for f in pool.fallbacks] == ["merge/failure/1/0", "merge_final/final"]


def test_equal_edits_are_joined_once() -> None:
    """Equal edits add their support and keep the first one's place."""
    edits = [Edit(op="append", content=c, support_count=n) for c, n in [("a", 1), ("b", 2), ("a ", 3)]]
    assert [(e.content, e.support_count) for e in join_edits(edits)] == [("a", 4), ("b", 2)]


# ---------------------------------------------------------------------------------------------- ranking


def pool_of(size: int) -> AggregateResult:
    """Return a pool of edits, later ones with more support."""
    edits = tuple(Edit(op="append", content=f"- {n}", support_count=1 + n // 2) for n in range(size))
    return AggregateResult(patch=Patch(edits=edits))


async def chosen(size: int, budget: int | None, llm: ScriptedLLM) -> SelectResult:
    """Select with the packaged prompts."""
    journal = (await opened()).decision_log(RUN)
    return await select(
        pool_of(size), SKILL, budget=budget, notes="", llm=llm, prompts=BOOK, decision_log=journal, step=1
    )


@pytest.mark.parametrize(
    ("size", "budget", "kept", "calls"),
    [
        (3, None, ["- 0", "- 1", "- 2"], 0),
        (3, 3, ["- 0", "- 1", "- 2"], 0),
        (2, 3, ["- 0", "- 1"], 0),
        (3, 2, ["- 2", "- 1"], 1),
        (3, 1, ["- 2"], 1),
        (3, 0, [], 0),
        (1, 0, [], 0),
        (0, 0, [], 0),
    ],
)
async def test_only_a_pool_beyond_the_budget_is_ranked(
    size: int, budget: int | None, kept: list[str], calls: int
) -> None:
    """A budget of 0 takes nothing and one of None everything, both without a call; 1 takes one."""
    llm = ScriptedLLM(pure)
    outcome = await chosen(size, budget, llm)
    assert [e.content for e in outcome.patch.edits] == kept
    assert (outcome.pool_size, outcome.budget, outcome.ranked) == (size, budget, calls == 1)
    assert len(llm.calls) == calls


async def test_without_a_ranking_support_decides() -> None:
    """Where no valid ranking can be had the most supported edits are taken, and that is recorded."""
    outcome = await chosen(5, 2, ScriptedLLM(useless))
    assert [e.content for e in outcome.patch.edits] == ["- 4", "- 2"]
    assert [f.label for f in outcome.fallbacks] == ["ranking"]
    assert not outcome.ranked
    assert [e.content for e in sort_by_support(pool_of(4).patch.edits)] == ["- 2", "- 3", "- 0", "- 1"]


# -------------------------------------------------------------------------------------------- reflection


def rollout(item: Item, hard: float | None, answer: str = "no") -> Rollout:
    """Return a rollout of an item; None leaves it unmeasured."""
    turns = (Turn(role="user", content=str(item.input)), Turn(role="assistant", content=answer))
    score = None if hard is None else Score.of(hard)
    error = "down" if hard is None else None
    return Rollout(key=item.id, item_id=item.id, skill_hash="s", turns=turns, score=score, error=error)


def items(size: int) -> list[Item]:
    """Return items that differ."""
    return [Item(id=f"i{n}", input=f"q{n}") for n in range(size)]


@given(
    st.lists(st.sampled_from([0.0, 0.3, 1.0, None]), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(0, 9),
)
def test_minibatches_follow_one_seeded_order(outcomes: list[float | None], size: int, step: int) -> None:
    """Failures and successes are two subsequences of one order; unmeasured rollouts are in neither."""
    batch = items(len(outcomes))
    config = ReflectConfig(minibatch_size=size)
    rollouts = [rollout(i, o) for i, o in zip(batch, outcomes, strict=True)]
    dealt = deal_minibatches(batch, rollouts, config, seed=7, step=step)
    whole = deal_minibatches(batch, [rollout(i, 0) for i in batch], config, seed=7, step=step)
    order = [i.id for b in whole for i in b.items]
    for source, wanted in (("failure", {0.0}), ("success", {0.3, 1.0})):
        mine = [b for b in dealt if b.source == source]
        members = {i.id for i, o in zip(batch, outcomes, strict=True) if o in wanted}
        assert [i.id for b in mine for i in b.items] == [i for i in order if i in members]
        assert [b.index for b in mine] == list(range(len(mine)))
        assert all(len(b.items) == size for b in mine[:-1])
    assert all(r.item_id == i.id for b in dealt for r, i in zip(b.rollouts, b.items, strict=True))


def test_failure_only_skips_successes() -> None:
    """Where only failures are asked for, there is no success minibatch."""
    batch = items(4)
    rollouts = [rollout(i, n % 2) for n, i in enumerate(batch)]
    dealt = deal_minibatches(batch, rollouts, ReflectConfig(failure_only=True), seed=1, step=1)
    assert [(b.source, len(b.items)) for b in dealt] == [("failure", 2)]


async def reported(llm: ScriptedLLM, config: ReflectConfig, answer: str = "no") -> tuple[AnalystReport, ...]:
    """Reflect on two failures with the packaged prompts."""
    batch = items(2)
    dealt = deal_minibatches(batch, [rollout(i, 0, answer) for i in batch], config, seed=1, step=1)
    store = InMemoryRunStore()
    await store.open_run("r", {}, {})
    analyst = Analyst(
        llm=llm,
        prompts=BOOK,
        decision_log=store.decision_log("r"),
        step=1,
        tokens=config.trajectory_tokens,
        analysis=make_edit_analysis(SKILL, max_edits=1, operations=("append",)),
        notes=lambda batch: "",
    )
    return await fan_out(analyst.report, dealt)


async def test_an_analyst_without_a_valid_reply_is_recorded() -> None:
    """A minibatch whose analyst gave nothing valid has a report that says why."""
    (only,) = await reported(ScriptedLLM(useless), ReflectConfig())
    assert only.patch == Patch()
    assert only.no_reply_reason is not None
    assert "3 attempts" in only.no_reply_reason


async def test_an_overflow_leads_to_shorter_trajectories_once() -> None:
    """A minibatch too long for the model is shown at half the size, then recorded as refused."""

    def overflow(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        return ContextOverflow("too long")

    llm = ScriptedLLM(overflow)
    (only,) = await reported(llm, ReflectConfig(trajectory_tokens=500), answer="x" * 9000)
    assert only.no_reply_reason == "too long"
    marks = [
        re.findall(r"\[\.\.\. ([0-9,]+) characters cut \.\.\.\]", call.prompt.messages[-1].content)
        for call in llm.calls
    ]
    shown = [[9000 - int(cut.replace(",", "")) for cut in cuts] for cuts in marks]
    assert [len(cases) for cases in shown] == [2, 2]
    assert all(600 < case < 750 for case in shown[0])
    assert all(250 < case < 375 for case in shown[1])


# ---------------------------------------------------------------------------------------------- material


@given(st.text(alphabet=st.sampled_from("<>/case_1\n x"), max_size=80))
def test_a_fence_cannot_be_closed_from_inside(text: str) -> None:
    """The closing tag of a fence stands at its end alone, whatever the text holds."""
    fenced = fence("case_1", text)
    closing = fenced.rpartition("\n")[2]
    assert re.fullmatch(r"</case_1_*>", closing)
    assert fenced.count(closing) == 1
    assert fenced.count(closing.replace("/", "")) == 1
