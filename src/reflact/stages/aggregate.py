"""Stage 3: merges the patches of all reports into one, by a tree of merge calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from reflact.concurrency import fan_out
from reflact.config.training import AggregateConfig
from reflact.messages import NoReply
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_edits, show_skill
from reflact.stages.reply_models import (
    ReasonedMergeReply,
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

# The sides of the merge, in the order in which a final merge gets them.
SIDES: tuple[RolloutSource, ...] = ("failure", "success")

# The kinds of edit in patches, unless the configuration allows fewer.
OPERATIONS: tuple[EditKind, ...] = ("append", "insert_after", "replace", "delete")


async def aggregate(
    reports: Sequence[AnalystReport],
    skill: Skill,
    *,
    context: StageContext,
    config: AggregateConfig | None = None,
    operations: tuple[EditKind, ...] = OPERATIONS,
    notes: str = "",
) -> AggregateResult:
    """Merge the patches of all reports: failures and successes apart, then both, failures first.

    Groups of ``merge_batch_size`` patches are merged level by level, in the order of the reports. A
    single patch passes unchanged. If a merge call gives no valid reply, the group's edits are
    concatenated without duplicates, and the result records the fallback.

    No two edits of the result are equal. The support of a merged edit is the sum of the supports of
    the edits that it comes from; those of one report count at most all of its cases.
    """
    ordered = sorted(reports, key=lambda r: (r.source_type, r.batch, r.index))
    merger = _Merger(
        skill=skill,
        context=context,
        group_size=(config or AggregateConfig()).merge_batch_size,
        operations=operations,
        notes=notes,
        cases=tuple(len(report.item_ids) for report in ordered),
    )
    leaves: dict[RolloutSource, list[_Node]] = {side: [] for side in SIDES}
    for position, report in enumerate(ordered):
        if report.patch.edits:
            leaves[report.source_type].append(_build_leaf(position, report.patch))
    nodes = [node for node in await fan_out(merger.merge_tree, [*leaves.items()]) if node.proposals]
    pool = nodes[0] if nodes else _Node()
    if len(nodes) > 1:
        pool = await merger.merge_group(("merge_final", "final", nodes))
        below = tuple(fallback for node in nodes for fallback in node.fallbacks)
        pool = replace(pool, fallbacks=below + pool.fallbacks)
    edits = tuple(proposal.edit for proposal in merger.join(pool.proposals))
    patch = Patch(reasoning=pool.reasoning, edits=edits)
    return AggregateResult(patch=patch, fallbacks=pool.fallbacks)


def _identify(edit: Edit) -> tuple[str, str, str]:
    """Return what an edit does."""
    return edit.op, edit.target, edit.content.strip()


@dataclass(frozen=True)
class _Proposal:
    """An edit, and the cases that ask for it by the position of their report."""

    edit: Edit
    cases: Mapping[int, int]


@dataclass(frozen=True)
class _Node:
    """A patch in the tree of merges, and the fallbacks used below it."""

    reasoning: str = ""
    proposals: tuple[_Proposal, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()


def _build_leaf(position: int, patch: Patch) -> _Node:
    """Return one report's patch with each edit once, whose support stays the same."""
    unique = {_identify(edit): edit for edit in reversed(patch.edits)}
    edits = tuple(edit for edit in patch.edits if unique[_identify(edit)] is edit)
    proposals = tuple(_Proposal(edit, {position: edit.support_count}) for edit in edits)
    return _Node(patch.reasoning, proposals)


@dataclass(frozen=True, kw_only=True)
class _Merger:
    """``cases`` are the numbers of cases in the reports, by their positions."""

    skill: Skill
    context: StageContext
    group_size: int
    operations: tuple[EditKind, ...]
    notes: str
    cases: tuple[int, ...]

    async def merge_tree(self, side: tuple[RolloutSource, Sequence[_Node]]) -> _Node:
        source, leaves = side
        nodes = list(leaves)
        fallbacks: tuple[Fallback, ...] = ()
        level = 0
        while len(nodes) > 1:
            level += 1
            groups = [nodes[i : i + self.group_size] for i in range(0, len(nodes), self.group_size)]
            jobs = [("merge", f"{source}/{level}/{n}", group) for n, group in enumerate(groups)]
            nodes = list(await fan_out(self.merge_group, jobs))
            fallbacks += tuple(f for node in nodes for f in node.fallbacks)
        return replace(nodes[0], fallbacks=fallbacks) if nodes else _Node()

    async def merge_group(self, job: tuple[str, str, Sequence[_Node]]) -> _Node:
        name, part, group = job
        if len(group) == 1:
            return replace(group[0], fallbacks=())
        proposals = self.join([proposal for node in group for proposal in node.proposals])
        reasoning = "; ".join(node.reasoning for node in group if node.reasoning)
        if len(proposals) == 1:
            return _Node(reasoning, proposals)
        edits = [proposal.edit for proposal in proposals]
        reply_type = merge_reply_type(
            list_allowed_operations(self.skill, self.operations),
            proposals=len(edits),
            reasoned=self.context.prompts.is_reasoned(name),
        )
        variables = {
            "document": show_skill(self.skill),
            "notes": self.notes,
            "proposals": show_edits(edits),
        }
        material = [edit.content for edit in edits]
        check = partial(check_reply, skill=self.skill, material=material)
        reply = await self.context.ask_or_fallback(
            name, variables, reply_type, part=part, check=check
        )
        if isinstance(reply, NoReply):
            fallback = Fallback(
                label=f"{name}/{part}",
                reason=reply.reason,
                replacement="the proposals, concatenated without duplicates",
            )
            return _Node(reasoning, proposals, (fallback,))
        if isinstance(reply, ReasonedMergeReply):
            reasoning = reply.reasoning
        merged = []
        for change in reply.edits:
            sources = [proposals[number - 1] for number in change.list_sources()]
            level = 1 + max(source.edit.merge_level for source in sources)
            evidence = dict.fromkeys(s.edit.evidence for s in sources if s.edit.evidence)
            edit = change.build_edit()
            merged.append(
                self._combine(edit, sources, merge_level=level, evidence="; ".join(evidence))
            )
        return _Node(reasoning, tuple(merged))

    def join(self, proposals: Sequence[_Proposal]) -> tuple[_Proposal, ...]:
        """Return the proposals in order without equal edits, each supported by all that have it."""
        equal: dict[tuple[str, str, str], list[_Proposal]] = {}
        for proposal in proposals:
            equal.setdefault(_identify(proposal.edit), []).append(proposal)
        return tuple(
            same[0] if len(same) == 1 else self._combine(same[0].edit, same)
            for same in equal.values()
        )

    def _combine(self, edit: Edit, sources: Sequence[_Proposal], **values: object) -> _Proposal:
        """Return an edit that stands for several, supported by the cases that ask for them."""
        kinds = {source.edit.source_type for source in sources}
        counts = Counter[int]()
        for source in sources:
            counts.update(source.cases)
        cases = {position: min(n, self.cases[position]) for position, n in counts.items()}
        values["source_type"] = kinds.pop() if len(kinds) == 1 else None
        values["support_count"] = max(1, sum(cases.values()))
        return _Proposal(edit.model_copy(update=values), cases)
