"""Stage 3, alone, with a model that is a function."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from anyio import run
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from doubles import open_context
from reflact.config.training import AggregateConfig
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.stages.aggregate import aggregate
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer, add_reasoning
from reflact.types import AggregateResult, AnalystReport, Edit, Patch, RolloutSource, Skill

SKILL = Skill(text="Answer briefly.\n")
PROPOSAL = re.compile(r"<(proposal_(\d+)_*)>\n(.*?)\n</\1>", re.DOTALL)


def merge(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Merge by joining all proposals into one."""
    shown = "\n".join(m.content for m in prompt.messages if m.role == "user")
    proposals = PROPOSAL.findall(shown)
    content = " / ".join(text.rpartition("content: ")[2] for _, _, text in proposals)
    edit: JsonValue = {"content": content, "sources": [int(n) for _, n, _ in proposals]}
    return add_reasoning(reply_type, {"edits": [edit]})


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
    reports = [report("failure", n, f"- f{n}", f"- x{n}") for n in range(failures)]
    reports += [report("success", n, f"- s{n}") for n in range(successes)]
    shuffled = data.draw(st.permutations(reports))
    expected = run(merged, reports, ScriptedLLM(merge), size)
    assert run(merged, shuffled, ScriptedLLM(merge), size) == expected


async def test_the_support_of_a_merged_edit_is_that_of_its_sources() -> None:
    """Edits of one report together have at most all of its cases."""

    def propose(index: int, *supports: int) -> AnalystReport:
        plain = report("failure", index, *(f"- {index} {n}" for n in range(len(supports))))
        pairs = zip(plain.patch.edits, supports, strict=True)
        edits = tuple(edit.model_copy(update={"support_count": n}) for edit, n in pairs)
        patch = plain.patch.model_copy(update={"edits": edits})
        return plain.model_copy(update={"patch": patch, "item_ids": tuple("abcdefgh")})

    pool = await merged([propose(0, 2, 1), propose(1, 6, 5)], ScriptedLLM(merge))
    assert [edit.support_count for edit in pool.patch.edits] == [3 + 8]


@pytest.mark.parametrize("patches", [1, 2, 3, 8, 9, 30])
async def test_a_tree_of_merges_ends(patches: int) -> None:
    llm = ScriptedLLM(merge)
    pool = await merged([report("failure", n, f"- f{n}") for n in range(patches)], llm)
    assert len(llm.calls) == patches - 1
    (edit,) = pool.patch.edits
    assert sorted(edit.content.split(" / ")) == sorted(f"- f{n}" for n in range(patches))
    assert edit.support_count == patches


async def test_one_patch_passes_unmerged() -> None:
    llm = ScriptedLLM(useless)
    alone = report("success", 1, "- a", "- b")
    pool = await merged([report("failure", 0), report("success", 0), alone], llm)
    assert (pool.patch, pool.fallbacks, llm.calls) == (alone.patch, (), [])
    assert await merged([], llm) == AggregateResult()


async def test_a_merge_that_cannot_be_had_joins_the_proposals() -> None:
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


async def test_no_two_edits_of_the_pool_are_equal() -> None:
    once = await merged([report("failure", 0, "- a", "- b"), report("failure", 1, "- c")], ScriptedLLM(merge))
    assert [(e.content, e.support_count) for e in once.patch.edits] == [("- a / - b / - c", 2)]
    pool = await merged([report("failure", 0, "- a", "- b", "- a\n")], ScriptedLLM(useless))
    assert [(e.content, e.support_count) for e in pool.patch.edits] == [("- a", 1), ("- b", 1)]

    def keep(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        edits: list[JsonValue] = [{"content": "- one", "sources": [number]} for number in (1, 2)]
        return add_reasoning(reply_type, {"edits": edits})

    pool = await merged([report("failure", 0, "- a"), report("failure", 1, "- b")], ScriptedLLM(keep))
    assert [(e.content, e.support_count) for e in pool.patch.edits] == [("- one", 2)]
