"""Stage 3: many patches become one, by a tree of merges."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.calls import Sample
from reflact.config import AggregateConfig
from reflact.ports import LLM, Journal
from reflact.prompts import PromptBook
from reflact.stages.material import show_edits, show_skill
from reflact.stages.replies import (
    DraftMergeReply,
    Merge,
    merge_check,
    merging,
    operations_on,
    whole_document,
)
from reflact.stages.settled import Refusal, ask_or_refusal
from reflact.tasks import fan_out
from reflact.types import Edit, EditKind, Fallback, Frozen, Merged, Patch, Report, Skill, Source


class _Node(Frozen):
    patch: Patch
    fallbacks: tuple[Fallback, ...] = ()


async def aggregate(
    reports: Sequence[Report],
    skill: Skill,
    *,
    llm: LLM,
    prompts: PromptBook,
    config: AggregateConfig,
    operations: tuple[EditKind, ...],
    notes: str,
    journal: Journal,
    step: int,
) -> Merged:
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
        journal=journal,
        step=step,
    )
    sides = await fan_out(merger.tree, [(s, _patches(reports, s)) for s in ("failure", "success")])
    nodes = [side for side in sides if side.patch.edits]
    fallbacks = tuple(f for side in sides for f in side.fallbacks)
    if len(nodes) < 2:
        patch = nodes[0].patch if nodes else Patch()
    else:
        last = await merger.merge(("merge_final", "final", nodes))
        patch, fallbacks = last.patch, fallbacks + last.fallbacks
    return Merged(patch=patch, fallbacks=fallbacks)


def together(edits: Sequence[Edit]) -> tuple[Edit, ...]:
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


def _patches(reports: Sequence[Report], source: str) -> tuple[Patch, ...]:
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
        journal: Journal,
        step: int,
    ) -> None:
        self._skill = skill
        self._llm = llm
        self._prompts = prompts
        self._size = size
        self._operations = operations
        self._notes = notes
        self._journal = journal
        self._step = step

    async def tree(self, side: tuple[Source, Sequence[Patch]]) -> _Node:
        source, patches = side
        nodes = [_Node(patch=p) for p in patches]
        fallbacks: tuple[Fallback, ...] = ()
        level = 0
        while len(nodes) > 1:
            level += 1
            groups = [nodes[i : i + self._size] for i in range(0, len(nodes), self._size)]
            jobs = [("merge", f"{source}/{level}/{n}", group) for n, group in enumerate(groups)]
            nodes = list(await fan_out(self.merge, jobs))
            fallbacks += tuple(f for node in nodes for f in node.fallbacks)
        return _Node(patch=nodes[0].patch if nodes else Patch(), fallbacks=fallbacks)

    async def merge(self, job: tuple[str, str, Sequence[_Node]]) -> _Node:
        name, part, group = job
        if len(group) == 1:
            return _Node(patch=group[0].patch)
        edits = together([e for node in group for e in node.patch.edits])
        reasoning = "; ".join(node.patch.reasoning for node in group if node.patch.reasoning)
        if len(edits) == 1:
            return _Node(patch=Patch(reasoning=reasoning, edits=edits))
        if edits[0].op == "rewrite":
            return await self._combine(name, part, reasoning, edits)
        prompt = self._prompts.render(name, self._holes(edits))
        sample = Sample(role="optimizer", purpose=name, step=self._step, part=part)
        wanted = merging(operations_on(self._skill, self._operations), proposals=len(edits))
        check = merge_check(self._skill, proposals=len(edits))
        reply = await ask_or_refusal(
            self._llm, prompt, wanted, sample=sample, check=check, journal=self._journal
        )
        if isinstance(reply, Refusal):
            fallback = Fallback(
                label=f"{name}/{part}", reason=reply.reason, instead="proposals joined, equal ones once"
            )
            return _Node(patch=Patch(reasoning=reasoning, edits=edits), fallbacks=(fallback,))
        merged = tuple(_merged(e, edits) for e in reply.value.edits)
        return _Node(patch=Patch(reasoning=reasoning, edits=merged))

    async def _combine(self, name: str, part: str, reasoning: str, drafts: Sequence[Edit]) -> _Node:
        purpose = f"draft_{name}"
        prompt = self._prompts.render(purpose, self._holes(drafts))
        sample = Sample(role="optimizer", purpose=purpose, step=self._step, part=part)

        def check(reply: DraftMergeReply) -> None:
            whole_document(self._skill, reply.document)

        reply = await ask_or_refusal(
            self._llm, prompt, DraftMergeReply, sample=sample, check=check, journal=self._journal
        )
        if isinstance(reply, Refusal):
            fallback = Fallback(
                label=f"{purpose}/{part}", reason=reply.reason, instead="the first of the drafts"
            )
            return _Node(patch=Patch(reasoning=reasoning, edits=tuple(drafts[:1])), fallbacks=(fallback,))
        one = _standing_for(Edit(op="rewrite", content=reply.value.document), drafts)
        return _Node(patch=Patch(reasoning=reasoning, edits=(one,)))

    def _holes(self, edits: Sequence[Edit]) -> dict[str, str]:
        return {
            "document": show_skill(self._skill),
            "notes": self._notes,
            "proposals": show_edits(edits),
        }


def _merged(reply: Merge, proposals: Sequence[Edit]) -> Edit:
    return _standing_for(reply.edit(), [proposals[n - 1] for n in sorted(set(reply.sources))])


def _standing_for(edit: Edit, sources: Sequence[Edit]) -> Edit:
    kinds = {s.source_type for s in sources}
    return edit.model_copy(
        update={
            "source_type": kinds.pop() if len(kinds) == 1 else None,
            "support_count": sum(s.support_count for s in sources),
            "merge_level": 1 + max(s.merge_level for s in sources),
        }
    )
