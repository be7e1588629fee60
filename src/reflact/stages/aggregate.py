"""Stage 3: merges the patches of all reports into one, by a tree of merge calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from reflact.concurrency import fan_out
from reflact.config.training import AggregateConfig
from reflact.messages import NoReply
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import show_edits, show_skill
from reflact.stages.reply_models import (
    ReasonedMergeReply,
    build_edit,
    check_reply,
    list_allowed_operations,
    list_changes,
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

# What an edit does: its operation, its target, and its content without spaces around it.
EditKey = tuple[str, str, str]


async def aggregate(
    reports: Sequence[AnalystReport],
    skill: Skill,
    *,
    context: StageContext,
    config: AggregateConfig | None = None,
    operations: tuple[EditKind, ...] = OPERATIONS,
    notes: str = "",
) -> AggregateResult:
    """Merge the patches of all reports: failures and successes separately, then both, failures
    first.

    Groups of ``merge_batch_size`` patches are merged level by level, in the order of the reports. A
    single patch passes unchanged. If a merge call gives no valid reply, the group's edits are
    concatenated without duplicates, and the result records the fallback.

    No two edits of the result are equal. The support of a merged edit is the number of cases in the
    reports that it comes from; a report counts once, however many of its edits were merged.
    """
    ordered = sorted(reports, key=lambda r: (r.source_type, r.batch, r.index))
    group_size = (config or AggregateConfig()).merge_batch_size
    cases = tuple(len(report.item_ids) for report in ordered)
    merger = _Merger(skill, context, group_size, operations, notes, cases)
    leaves = [
        (r.source_type, _build_leaf(n, r.patch)) for n, r in enumerate(ordered) if r.patch.edits
    ]
    sides = await fan_out(
        merger.merge_tree,
        [(side, [leaf for source, leaf in leaves if source == side]) for side in SIDES],
    )
    nodes = [side for side in sides if side.proposals]
    pool = nodes[0] if nodes else _Node()
    if len(nodes) > 1:
        pool = await merger.merge_group(("merge_final", "final", nodes))
        pool = replace(
            pool, fallbacks=(*(f for node in nodes for f in node.fallbacks), *pool.fallbacks)
        )
    edits = tuple(proposal.edit for proposal in merger.join(pool.proposals))
    return AggregateResult(
        patch=Patch(reasoning=pool.reasoning, edits=edits), fallbacks=pool.fallbacks
    )


def _identify(edit: Edit) -> EditKey:
    return edit.op, edit.target, edit.content.strip()


@dataclass(frozen=True)
class _Proposal:
    """An edit, and the positions of the reports that it comes from."""

    edit: Edit
    reports: frozenset[int]


@dataclass(frozen=True)
class _Node:
    """A patch in the tree of merges, and the fallbacks used below it."""

    reasoning: str = ""
    proposals: tuple[_Proposal, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()


def _build_leaf(position: int, patch: Patch) -> _Node:
    """Return the patch of one report with each edit once; its support stays, since the cases are
    the same.
    """
    first = {_identify(edit): edit for edit in reversed(patch.edits)}
    edits = [edit for edit in patch.edits if first[_identify(edit)] is edit]
    reports = frozenset({position})
    return _Node(patch.reasoning, tuple(_Proposal(edit, reports) for edit in edits))


@dataclass(frozen=True)
class _Merger:
    skill: Skill
    context: StageContext
    group_size: int
    operations: tuple[EditKind, ...]
    notes: str
    cases: tuple[int, ...]
    """The number of cases in each report, by its position."""

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
        reply = await self.context.ask_or_fallback(
            name,
            {
                "document": show_skill(self.skill),
                "notes": self.notes,
                "proposals": show_edits(edits),
            },
            reply_type,
            part=part,
            check=partial(check_reply, skill=self.skill, material=[edit.content for edit in edits]),
        )
        if isinstance(reply, NoReply):
            replacement = "the proposals, concatenated without duplicates"
            fallback = Fallback(
                label=f"{name}/{part}", reason=reply.reason, replacement=replacement
            )
            return _Node(reasoning, proposals, (fallback,))
        if isinstance(reply, ReasonedMergeReply):
            reasoning = reply.reasoning
        merged = []
        for change in list_changes(reply):
            sources = [proposals[number - 1] for number in sorted(set(change.sources))]
            merged.append(self._credit(build_edit(change), sources))
        return _Node(reasoning, tuple(merged))

    def join(self, proposals: Sequence[_Proposal]) -> tuple[_Proposal, ...]:
        """Return the proposals without equal edits, in order; an edit is supported by all reports
        that have it.
        """
        unique: dict[EditKey, _Proposal] = {}
        for proposal in proposals:
            key = _identify(proposal.edit)
            first = unique.get(key)
            if first is None:
                unique[key] = proposal
                continue
            reports = first.reports | proposal.reports
            same = first.edit.source_type == proposal.edit.source_type
            values = {
                "support_count": self._count_cases(reports),
                "source_type": first.edit.source_type if same else None,
            }
            unique[key] = _Proposal(first.edit.model_copy(update=values), reports)
        return tuple(unique.values())

    def _credit(self, edit: Edit, sources: Sequence[_Proposal]) -> _Proposal:
        """Return a merged edit with the source, support, level and evidence of its sources."""
        kinds = {source.edit.source_type for source in sources}
        reports = frozenset[int]().union(*(source.reports for source in sources))
        values = {
            "source_type": kinds.pop() if len(kinds) == 1 else None,
            "support_count": self._count_cases(reports),
            "merge_level": 1 + max(source.edit.merge_level for source in sources),
            "evidence": "; ".join(
                dict.fromkeys(s.edit.evidence for s in sources if s.edit.evidence)
            ),
        }
        return _Proposal(edit.model_copy(update=values), reports)

    def _count_cases(self, reports: frozenset[int]) -> int:
        return max(1, sum(self.cases[position] for position in reports))
