"""Stage 3: many patches become one, by a tree of merges."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.concurrency import fan_out
from reflact.config.training import AggregateConfig
from reflact.messages import CallId
from reflact.prompts import PromptBook
from reflact.protocols import LLM, DecisionLog
from reflact.stages.prompt_sections import show_edits, show_skill
from reflact.stages.reply_models import (
    DraftMergeReply,
    Merge,
    NoReply,
    ask_or_fallback,
    check_whole_document,
    list_allowed_operations,
    make_merge_check,
    merge_reply_type,
)
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Edit,
    EditKind,
    Fallback,
    FrozenModel,
    Patch,
    RolloutSource,
    Skill,
)


class _Node(FrozenModel):
    patch: Patch
    fallbacks: tuple[Fallback, ...] = ()


async def aggregate(
    reports: Sequence[AnalystReport],
    skill: Skill,
    *,
    llm: LLM,
    prompts: PromptBook,
    config: AggregateConfig,
    operations: tuple[EditKind, ...],
    notes: str,
    decision_log: DecisionLog,
    step: int,
) -> AggregateResult:
    """Merge the patches of all reports: failures and successes apart, then both, failures first.

    Groups of ``merge_batch_size`` are merged level by level, those of one level at once. Groups follow
    the order of the reports, never that of completion. A patch that is alone passes unchanged. Where a
    merge cannot be had, the group's edits are put together without repetition, and the outcome says so.
    Whole drafts are combined into one; where that cannot be had, the first of them stands for all.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
    """
    merger = _Merger(
        skill=skill,
        llm=llm,
        prompts=prompts,
        size=config.merge_batch_size,
        operations=operations,
        notes=notes,
        decision_log=decision_log,
        step=step,
    )
    sides = await fan_out(
        merger.merge_tree, [(s, _collect_patches(reports, s)) for s in ("failure", "success")]
    )
    nodes = [side for side in sides if side.patch.edits]
    fallbacks = tuple(f for side in sides for f in side.fallbacks)
    if len(nodes) < 2:
        patch = nodes[0].patch if nodes else Patch()
    else:
        last = await merger.merge_group(("merge_final", "final", nodes))
        patch, fallbacks = last.patch, fallbacks + last.fallbacks
    return AggregateResult(patch=patch, fallbacks=fallbacks)


def join_edits(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Return the edits without repetition, in order; equal ones add their support."""
    kept: dict[tuple[str, str, str], Edit] = {}
    for edit in edits:
        key = (edit.op, edit.target, edit.content.strip())
        first = kept.get(key)
        if first is None:
            kept[key] = edit
        else:
            same = first.source_type == edit.source_type
            kept[key] = first.model_copy(
                update={
                    "support_count": first.support_count + edit.support_count,
                    "source_type": first.source_type if same else None,
                }
            )
    return tuple(kept.values())


def _collect_patches(reports: Sequence[AnalystReport], source: str) -> tuple[Patch, ...]:
    ordered = sorted((r for r in reports if r.source_type == source), key=lambda r: (r.batch, r.index))
    return tuple(r.patch for r in ordered if r.patch.edits)


class _Merger:
    def __init__(
        self,
        *,
        skill: Skill,
        llm: LLM,
        prompts: PromptBook,
        size: int,
        operations: tuple[EditKind, ...],
        notes: str,
        decision_log: DecisionLog,
        step: int,
    ) -> None:
        self._skill = skill
        self._llm = llm
        self._prompts = prompts
        self._size = size
        self._operations = operations
        self._notes = notes
        self._decision_log = decision_log
        self._step = step

    async def merge_tree(self, side: tuple[RolloutSource, Sequence[Patch]]) -> _Node:
        source, patches = side
        nodes = [_Node(patch=p) for p in patches]
        fallbacks: tuple[Fallback, ...] = ()
        level = 0
        while len(nodes) > 1:
            level += 1
            groups = [nodes[i : i + self._size] for i in range(0, len(nodes), self._size)]
            jobs = [("merge", f"{source}/{level}/{n}", group) for n, group in enumerate(groups)]
            nodes = list(await fan_out(self.merge_group, jobs))
            fallbacks += tuple(f for node in nodes for f in node.fallbacks)
        return _Node(patch=nodes[0].patch if nodes else Patch(), fallbacks=fallbacks)

    async def merge_group(self, job: tuple[str, str, Sequence[_Node]]) -> _Node:
        name, part, group = job
        if len(group) == 1:
            return _Node(patch=group[0].patch)
        edits = join_edits([e for node in group for e in node.patch.edits])
        reasoning = "; ".join(node.patch.reasoning for node in group if node.patch.reasoning)
        if len(edits) == 1:
            return _Node(patch=Patch(reasoning=reasoning, edits=edits))
        if edits[0].op == "rewrite":
            return await self._merge_drafts(name, part, reasoning, edits)
        prompt = self._prompts.render(name, self._variables(edits))
        call_id = CallId(role="optimizer", purpose=name, step=self._step, part=part)
        wanted = merge_reply_type(
            list_allowed_operations(self._skill, self._operations), proposals=len(edits)
        )
        check = make_merge_check(self._skill, proposals=len(edits))
        reply = await ask_or_fallback(
            self._llm, prompt, wanted, call_id=call_id, check=check, decision_log=self._decision_log
        )
        if isinstance(reply, NoReply):
            fallback = Fallback(
                label=f"{name}/{part}", reason=reply.reason, replacement="proposals joined, equal ones once"
            )
            return _Node(patch=Patch(reasoning=reasoning, edits=edits), fallbacks=(fallback,))
        merged = tuple(_build_merged_edit(e, edits) for e in reply.value.edits)
        return _Node(patch=Patch(reasoning=reasoning, edits=merged))

    async def _merge_drafts(self, name: str, part: str, reasoning: str, drafts: Sequence[Edit]) -> _Node:
        purpose = f"draft_{name}"
        prompt = self._prompts.render(purpose, self._variables(drafts))
        call_id = CallId(role="optimizer", purpose=purpose, step=self._step, part=part)

        def check(reply: DraftMergeReply) -> None:
            check_whole_document(self._skill, reply.document)

        reply = await ask_or_fallback(
            self._llm, prompt, DraftMergeReply, call_id=call_id, check=check, decision_log=self._decision_log
        )
        if isinstance(reply, NoReply):
            fallback = Fallback(
                label=f"{purpose}/{part}", reason=reply.reason, replacement="the first of the drafts"
            )
            return _Node(patch=Patch(reasoning=reasoning, edits=tuple(drafts[:1])), fallbacks=(fallback,))
        one = _credit_sources(Edit(op="rewrite", content=reply.value.document), drafts)
        return _Node(patch=Patch(reasoning=reasoning, edits=(one,)))

    def _variables(self, edits: Sequence[Edit]) -> dict[str, str]:
        return {
            "document": show_skill(self._skill),
            "notes": self._notes,
            "proposals": show_edits(edits),
        }


def _build_merged_edit(reply: Merge, proposals: Sequence[Edit]) -> Edit:
    return _credit_sources(reply.edit(), [proposals[n - 1] for n in sorted(set(reply.sources))])


def _credit_sources(edit: Edit, sources: Sequence[Edit]) -> Edit:
    kinds = {s.source_type for s in sources}
    return edit.model_copy(
        update={
            "source_type": kinds.pop() if len(kinds) == 1 else None,
            "support_count": sum(s.support_count for s in sources),
            "merge_level": 1 + max(s.merge_level for s in sources),
        }
    )
