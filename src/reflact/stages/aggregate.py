"""Stage 3: merges the patches of all reports into one, by a tree of merge calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from reflact.concurrency import fan_out
from reflact.config.training import AggregateConfig
from reflact.messages import NoReply
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_edits, show_skill
from reflact.stages.reply_models import (
    DraftMergeReply,
    MergeReply,
    ReasonedDraftMergeReply,
    ReasonedMergeReply,
    build_edit,
    check_reply,
    list_allowed_operations,
    merge_reply_type,
)
from reflact.types import (
    AggregateResult,
    AnalystReport,
    Edit,
    EditKind,
    Fallback,
    Patch,
    RolloutSource,
    Skill,
)

EditKey = tuple[str, str, str]
"""What an edit does: its operation, its target, and its content without spaces around it."""


async def aggregate(
    reports: Sequence[AnalystReport],
    skill: Skill,
    *,
    context: StageContext,
    config: AggregateConfig,
    operations: tuple[EditKind, ...],
    notes: str,
) -> AggregateResult:
    """Merge the patches of all reports: failures and successes separately, then both, failures first.

    Groups of ``merge_batch_size`` patches are merged level by level, in the order of the reports. A single
    patch passes unchanged. If a merge call gives no valid reply, the group's edits are concatenated without
    duplicates, or the first of whole drafts is taken, and the result records the fallback.

    No two edits of the result are equal. Those of one report count once, those of several reports add their support.
    """
    merger = _Merger(skill, context, config.merge_batch_size, operations, notes)
    sides = await fan_out(
        merger.merge_tree, [(s, _collect_patches(reports, s)) for s in ("failure", "success")]
    )
    nodes = [side for side in sides if side.patch.edits]
    fallbacks = tuple(f for side in sides for f in side.fallbacks)
    if len(nodes) < 2:
        patch = nodes[0].patch if nodes else Patch()
    else:
        merged = await merger.merge_group(("merge_final", "final", nodes))
        patch, fallbacks = merged.patch, fallbacks + merged.fallbacks
    pool = patch.model_copy(update={"edits": join_edits(patch.edits)})
    return AggregateResult(patch=pool, fallbacks=fallbacks)


def join_edits(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Return the edits without duplicates, in order; equal edits add their support."""
    unique: dict[EditKey, Edit] = {}
    for edit in edits:
        key = _identify(edit)
        first = unique.get(key)
        if first is None:
            unique[key] = edit
        else:
            same = first.source_type == edit.source_type
            unique[key] = first.model_copy(
                update={
                    "support_count": first.support_count + edit.support_count,
                    "source_type": first.source_type if same else None,
                }
            )
    return tuple(unique.values())


def _collect_patches(reports: Sequence[AnalystReport], source: str) -> tuple[Patch, ...]:
    ordered = sorted((r for r in reports if r.source_type == source), key=lambda r: (r.batch, r.index))
    return tuple(_drop_repeats(r.patch) for r in ordered if r.patch.edits)


def _identify(edit: Edit) -> EditKey:
    return edit.op, edit.target, edit.content.strip()


def _drop_repeats(patch: Patch) -> Patch:
    """Return the patch of one report with each edit once; its support stays, since the cases are the same."""
    first = {_identify(edit): edit for edit in reversed(patch.edits)}
    return patch.model_copy(
        update={"edits": tuple(edit for edit in patch.edits if first[_identify(edit)] is edit)}
    )


@dataclass(frozen=True)
class _Merger:
    skill: Skill
    context: StageContext
    group_size: int
    operations: tuple[EditKind, ...]
    notes: str

    async def merge_tree(self, side: tuple[RolloutSource, Sequence[Patch]]) -> AggregateResult:
        source, patches = side
        nodes = [AggregateResult(patch=p) for p in patches]
        fallbacks: tuple[Fallback, ...] = ()
        level = 0
        while len(nodes) > 1:
            level += 1
            groups = [nodes[i : i + self.group_size] for i in range(0, len(nodes), self.group_size)]
            jobs = [("merge", f"{source}/{level}/{n}", group) for n, group in enumerate(groups)]
            nodes = list(await fan_out(self.merge_group, jobs))
            fallbacks += tuple(f for node in nodes for f in node.fallbacks)
        return AggregateResult(patch=nodes[0].patch if nodes else Patch(), fallbacks=fallbacks)

    async def merge_group(self, job: tuple[str, str, Sequence[AggregateResult]]) -> AggregateResult:
        name, part, group = job
        if len(group) == 1:
            return AggregateResult(patch=group[0].patch)
        edits = join_edits([e for node in group for e in node.patch.edits])
        reasoning = "; ".join(node.patch.reasoning for node in group if node.patch.reasoning)
        if len(edits) == 1:
            return AggregateResult(patch=Patch(reasoning=reasoning, edits=edits))
        is_draft = edits[0].op == "rewrite"
        purpose = f"draft_{name}" if is_draft else name
        reasoned = self.context.prompts.is_reasoned(purpose)
        reply_type: type[MergeReply | DraftMergeReply] = (
            ReasonedDraftMergeReply if reasoned else DraftMergeReply
        )
        if not is_draft:
            kinds = list_allowed_operations(self.skill, self.operations)
            reply_type = merge_reply_type(kinds, proposals=len(edits), reasoned=reasoned)
        reply = await self.context.ask_or_fallback(
            purpose,
            {"document": show_skill(self.skill), "notes": self.notes, "proposals": show_edits(edits)},
            reply_type,
            part=part,
            check=partial(check_reply, skill=self.skill, material=[edit.content for edit in edits]),
        )
        if isinstance(reply, NoReply):
            replacement = "the first draft" if is_draft else "the proposals, concatenated without duplicates"
            fallback = Fallback(label=f"{purpose}/{part}", reason=reply.reason, replacement=replacement)
            kept = edits[:1] if is_draft else edits
            return AggregateResult(patch=Patch(reasoning=reasoning, edits=kept), fallbacks=(fallback,))
        if isinstance(reply, ReasonedMergeReply | ReasonedDraftMergeReply):
            reasoning = reply.reasoning
        if isinstance(reply, DraftMergeReply):
            draft = Edit(op="rewrite", content=reply.document)
            merged = [_credit_sources(draft, edits)]
        else:
            merged = [
                _credit_sources(build_edit(e), [edits[n - 1] for n in sorted(set(e.sources))])
                for e in reply.edits
            ]
        return AggregateResult(patch=Patch(reasoning=reasoning, edits=tuple(merged)))


def _credit_sources(edit: Edit, sources: Sequence[Edit]) -> Edit:
    kinds = {s.source_type for s in sources}
    return edit.model_copy(
        update={
            "source_type": kinds.pop() if len(kinds) == 1 else None,
            "support_count": sum(s.support_count for s in sources),
            "merge_level": 1 + max(s.merge_level for s in sources),
            "evidence": "; ".join(dict.fromkeys(s.evidence for s in sources if s.evidence)),
        }
    )
