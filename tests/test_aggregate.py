"""Stages 3 and 4, each alone, with a model that is a function: merging and ranking."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from anyio import run
from hypothesis import given
from hypothesis import strategies as st

from doubles import open_context
from reflact.config.training import AggregateConfig
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.stages.aggregate import aggregate
from reflact.stages.select import select, sort_by_support
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer, add_reasoning
from reflact.types import AggregateResult, AnalystReport, Edit, Patch, RolloutSource, SelectResult, Skill

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
    return add_reasoning(reply_type, {"edits": [{name: whole[name] for name in edit_type.model_fields}]})


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
        context=await open_context(llm),
        config=AggregateConfig(merge_batch_size=size),
        operations=("append",),
        notes="",
    )


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


async def test_a_report_supports_a_merged_edit_once() -> None:
    """Two edits of one report, merged with one of another, are supported by the cases of both reports."""
    pool = await merged([report("failure", 0, "- a", "- b"), report("failure", 1, "- c")], ScriptedLLM(pure))
    assert [(e.content, e.support_count) for e in pool.patch.edits] == [("- a / - b / - c", 2)]


async def test_no_two_edits_of_the_pool_are_equal() -> None:
    """Repeats in one report count once, and equal edits that merges of two sides kept add their support."""
    pool = await merged([report("failure", 0, "- a", "- b", "- a\n")], ScriptedLLM(useless))
    assert [(e.content, e.support_count) for e in pool.patch.edits] == [("- a", 1), ("- b", 1)]

    def keep(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        proposals = PROPOSAL.findall("\n".join(m.content for m in prompt.messages))
        whole = [
            {"op": "append", "target": "", "content": "- one", "sources": [int(n)]} for _, n, _ in proposals
        ]
        (edit_type,) = get_args(reply_type.model_fields["edits"].annotation)
        edits = [{name: edit[name] for name in edit_type.model_fields} for edit in whole]
        return add_reasoning(reply_type, {"edits": edits})

    pool = await merged([report("failure", 0, "- a"), report("failure", 1, "- b")], ScriptedLLM(keep))
    assert [(e.content, e.support_count) for e in pool.patch.edits] == [("- one", 2)]


def pool_of(size: int) -> AggregateResult:
    """Return a pool of edits, later ones with more support."""
    edits = tuple(Edit(op="append", content=f"- {n}", support_count=1 + n // 2) for n in range(size))
    return AggregateResult(patch=Patch(edits=edits))


async def chosen(size: int, budget: int | None, llm: ScriptedLLM) -> SelectResult:
    """Select with the packaged prompts."""
    return await select(pool_of(size), SKILL, context=await open_context(llm), budget=budget, notes="")


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
