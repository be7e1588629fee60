"""Stage 2: analysts read minibatches of trajectories and propose edits or suggestions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import TypeAdapter

from reflact.concurrency import fan_out, fan_out_then
from reflact.config.training import ReflectConfig, UpdateConfig
from reflact.data import shuffle
from reflact.messages import NoReply
from reflact.prompts import ANALYST_PROMPTS
from reflact.protocols import Annotator, R
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import list_material, show_cases, show_skill, truncate
from reflact.stages.reply_models import (
    AnalysisReply,
    AnalystReply,
    PatternReply,
    Reasoned,
    ReasonedPattern,
    check_reply,
    failure_reply_type,
    list_allowed_operations,
    success_reply_type,
)
from reflact.stages.rollout import RolloutRunner, log_unmeasured, require_coverage
from reflact.types import (
    AnalystReport,
    EditKind,
    FailurePattern,
    FrozenModel,
    Item,
    Patch,
    Rollout,
    RolloutSource,
    Skill,
    is_failure,
)

T = TypeVar("T")

# Cases as evidence names them: "case 2", "cases 1, 3 and 5", "cases 1-4".
NAMED_CASES = re.compile(
    r"\bcases?\s+#?((?:\d+|[\s,;&#-]|and|to|through|\u2013)*\d)", re.IGNORECASE
)
CASE_RANGE = re.compile(r"(\d+)(?:\s*(?:-|to|through|\u2013)\s*#?(\d+))?")

SOURCES: tuple[RolloutSource, ...] = ("failure", "success")

# Bounds of the failures that are grouped by feedback, if no analyst named a pattern.
MAX_FAIL_REASONS = 3
FAIL_REASON_BYTES = 300


class Minibatch(FrozenModel):
    """The trajectories of one analyst call, in the plan's order.

    ``index`` numbers the minibatches of the same source and batch; ``batch`` numbers the step's
    batches.
    """

    source: RolloutSource
    index: int
    items: tuple[Item, ...]
    rollouts: tuple[Rollout, ...]
    batch: int = 0

    @property
    def part(self) -> str:
        """The part of its call ids: its number among the step's minibatches of its source."""
        return str(self.index) if self.batch == 0 else f"{self.batch}/{self.index}"

    def show_cases(self, tokens: int) -> str:
        """Return its trajectories in at most so many estimated tokens."""
        failed = self.source == "failure"
        return show_cases(self.rollouts, self.items, failed=failed, tokens=tokens)

    @property
    def empty_report(self) -> AnalystReport:
        """A report on it without findings."""
        ids = tuple(item.id for item in self.items)
        return AnalystReport(
            source_type=self.source, index=self.index, item_ids=ids, batch=self.batch
        )


def shuffle_batch(values: Sequence[T], *, seed: int, step: int, batch: int = 0) -> tuple[T, ...]:
    """Return a batch in the order in which it is dealt."""
    label = f"reflect/{step}" if batch == 0 else f"reflect/{step}/{batch}"
    return shuffle(values, seed, label)


def list_edit_kinds(config: UpdateConfig) -> tuple[EditKind, ...]:
    """Return the kinds of edit in a step's patches."""
    return ("suggest",) if config.mode == "rewrite" else config.operations


@dataclass(frozen=True, kw_only=True)
class Analyst:
    """Reads one minibatch at a time and proposes edits or suggestions, as ``config`` says.

    ``tokens`` is the maximum of estimated tokens of trajectories in one prompt. ``notes`` returns
    the notes on earlier attempts for a minibatch's prompt.
    """

    context: StageContext
    skill: Skill
    config: UpdateConfig
    max_edits: int
    tokens: int
    notes: Callable[[Minibatch], str]

    async def report(self, batch: Minibatch) -> AnalystReport:
        """Return the report on a minibatch; without a valid reply it holds the reason alone."""
        prompt = f"{ANALYST_PROMPTS[self.config.mode]}_{batch.source}"
        kinds = list_allowed_operations(self.skill, list_edit_kinds(self.config))
        is_reasoned = self.context.prompts.is_reasoned(prompt)
        cases = len(batch.items) if batch.source == "failure" else None
        reply_type: type[AnalysisReply] = success_reply_type(kinds, most=self.max_edits)
        if cases is not None:
            reply_type = failure_reply_type(
                kinds, cases=cases, most=self.max_edits, reasoned=is_reasoned
            )
        check = partial(
            check_reply,
            skill=self.skill,
            cases=cases,
            items=batch.items if is_reasoned else (),
            material=list_material(batch.items, batch.rollouts),
        )
        variables = {
            "document": show_skill(self.skill),
            "attempts": self.notes(batch),
            "max_edits": str(self.max_edits),
        }
        reply = await ask_about_minibatch(
            self.context,
            batch,
            prompt,
            variables,
            reply_type,
            purpose=f"analyst_{batch.source}",
            tokens=self.tokens,
            check=check,
        )
        if isinstance(reply, NoReply):
            return batch.empty_report.model_copy(update={"no_reply_reason": reply.reason})
        return _build_report(batch.empty_report, reply)


async def reflect(
    rollouts: Sequence[Rollout],
    items: Sequence[Item],
    skill: Skill,
    *,
    context: StageContext,
    update: UpdateConfig | None = None,
    config: ReflectConfig | None = None,
    max_edits: int = 4,
    notes: str = "",
    threshold: float | None = None,
) -> tuple[AnalystReport, ...]:
    """Return the analysts' reports on minibatches of failures and of successes.

    The ``rollouts`` under the ``skill`` are in the order of the items. Each analyst proposes at
    most ``max_edits`` edits of the kinds in ``update``; ``notes`` tell it what was tried before. A
    rollout is a success if its hard score reaches ``threshold``; None: if it is above 0.
    """
    config = config or ReflectConfig()
    analyst = Analyst(
        context=context,
        skill=skill,
        config=update or UpdateConfig(),
        max_edits=max_edits,
        tokens=config.trajectory_tokens,
        notes=lambda _: notes,
    )
    dealer = MinibatchDealer(items, config, batch=0, threshold=threshold)
    batches = [batch for rollout in rollouts for batch in dealer.add(rollout)]
    return await fan_out(analyst.report, batches, limit=config.concurrency)


async def ask_about_minibatch(
    context: StageContext,
    batch: Minibatch,
    prompt: str,
    variables: Mapping[str, str],
    reply_type: type[R],
    *,
    tokens: int,
    check: Callable[[R], None],
    purpose: str | None = None,
) -> R | NoReply:
    """Ask about a minibatch's cases; if they are too long, once more in half the tokens."""
    return await context.ask_or_fallback(
        prompt,
        {**variables, "cases": batch.show_cases(tokens)},
        reply_type,
        purpose=purpose,
        part=batch.part,
        check=check,
        shorten=lambda: {"cases": batch.show_cases(tokens // 2)},
    )


def _build_report(blank: AnalystReport, reply: AnalysisReply) -> AnalystReport:
    """Return a report with the patterns and the edits of a reply."""
    patterns: tuple[FailurePattern, ...] = ()
    reasoning = ""
    if isinstance(reply, AnalystReply):
        patterns = tuple(_build_pattern(pattern, blank.item_ids) for pattern in reply.patterns)
        reasoning = "; ".join(pattern.description for pattern in patterns)
    if isinstance(reply, Reasoned):
        reasoning = reply.reasoning

    edits = []
    for change in reply.edits:
        edit = change.build_edit()
        support = {
            "source_type": blank.source_type,
            "support_count": count_cases(edit.evidence, len(blank.item_ids)),
        }
        edits.append(edit.model_copy(update=support))
    patch = Patch(reasoning=reasoning, edits=tuple(edits))
    return blank.model_copy(update={"patch": patch, "patterns": patterns})


def count_cases(evidence: str, most: int) -> int:
    """Return how many of ``most`` cases the evidence of an edit names; all if it names none."""
    numbers = set[int]()
    for named in NAMED_CASES.findall(evidence):
        for first, last in CASE_RANGE.findall(named):
            numbers.update(range(int(first), min(int(last or first), most) + 1))
    return len([number for number in numbers if 1 <= number <= most]) or most


def _build_pattern(
    pattern: PatternReply | ReasonedPattern, item_ids: Sequence[str]
) -> FailurePattern:
    """Return the pattern of a reply with the items of its cases.

    Small models name a count alone; it is at most that of the items.
    """
    if isinstance(pattern, PatternReply):
        count = min(pattern.count, len(item_ids))
    else:
        item_ids = [item_ids[number - 1] for number in sorted(set(pattern.cases))]
        count = len(item_ids)
    return FailurePattern(
        type=pattern.type, count=count, description=pattern.description, item_ids=tuple(item_ids)
    )


def group_failures(
    rollouts: Sequence[Rollout], threshold: float | None
) -> tuple[FailurePattern, ...]:
    """Return the most frequent feedback of an environment on failed rollouts, as patterns."""
    groups: dict[str, list[str]] = {}
    for rollout in rollouts:
        reason = " ".join((rollout.feedback or "").split())
        if reason and is_failure(rollout, threshold):
            groups.setdefault(reason, []).append(rollout.item_id)
    patterns = []
    for reason in sorted(groups, key=lambda reason: (-len(groups[reason]), reason)):
        ids = tuple(groups[reason])
        shown = truncate(reason, FAIL_REASON_BYTES)
        pattern = FailurePattern(type="feedback", count=len(ids), description=shown, item_ids=ids)
        patterns.append(pattern)
    return tuple(patterns[:MAX_FAIL_REASONS])


_NOTES_ADAPTER: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])


async def annotate_failures(
    batch: Minibatch, annotator: Annotator, context: StageContext
) -> Minibatch:
    """Return a minibatch with notes added to the environment's feedback on failed cases.

    Notes are logged before they are used, so that a resumed run uses the same ones.
    """

    async def annotate(case: tuple[Item, Rollout]) -> Rollout:
        item, rollout = case

        async def ask() -> tuple[str, ...]:
            return tuple(await annotator.annotate(item, rollout))

        label = f"notes/{rollout.key}"
        notes = await context.decision_log.once(context.step, label, ask, _NOTES_ADAPTER)
        lines = notes if rollout.feedback is None else (rollout.feedback, *notes)
        return rollout.model_copy(update={"feedback": "\n".join(lines)}) if notes else rollout

    if batch.source == "success":
        return batch
    cases = tuple(zip(batch.items, batch.rollouts, strict=True))
    return batch.model_copy(update={"rollouts": await fan_out(annotate, cases)})


async def roll_out_and_reflect(
    batches: Sequence[Sequence[Item]],
    skill: Skill,
    *,
    runner: RolloutRunner,
    analyse: Callable[[Minibatch], Awaitable[AnalystReport]],
    config: ReflectConfig,
    seed: int,
    threshold: float | None,
) -> tuple[tuple[Rollout, ...], tuple[AnalystReport, ...]]:
    """Roll out a step's batches and analyse them; an item in several of them has a trial for each.

    Returns:
        The rollouts in the order of the items, and the reports batch by batch, failures before
        successes.
    """
    jobs = runner.make_batch_jobs(batches, skill)
    await runner.find_stored([job for row in jobs for job in row])
    order = [shuffle_batch(row, seed=seed, step=runner.step, batch=n) for n, row in enumerate(jobs)]
    dealers = [
        MinibatchDealer([job.item for job in row], config, batch=n, threshold=threshold)
        for n, row in enumerate(order)
    ]
    roll = runner.run
    if not config.overlap:
        await fan_out(roll, [job for row in order for job in row], limit=runner.limit)
        roll = runner.recall

    def deal(batch: int, prefix: Sequence[Rollout]) -> list[tuple[Minibatch, Sequence[Rollout]]]:
        return [(minibatch, prefix) for minibatch in dealers[batch].add(prefix[-1])]

    async def report(dealt: tuple[Minibatch, Sequence[Rollout]]) -> AnalystReport:
        minibatch, finished = dealt
        reported = await analyse(minibatch)
        await log_unmeasured(finished, decision_log=runner.decision_log, step=runner.step)
        return reported

    rows, reported = await fan_out_then(
        roll, order, ready=deal, then=report, limit=runner.limit, then_limit=config.concurrency
    )
    by_key = {rollout.key: rollout for row in rows for rollout in row}
    rollouts = tuple(by_key[job.key] for row in jobs for job in row)
    require_coverage(rollouts, 0.0)
    await log_unmeasured(rollouts, decision_log=runner.decision_log, step=runner.step)
    reports = [report for row in reported for report in row]
    reports.sort(key=lambda r: (r.batch, SOURCES.index(r.source_type), r.index))
    return rollouts, tuple(reports)


class MinibatchDealer:
    """Deals the rollouts of a batch, in its seeded order, into minibatches.

    Failures and successes are dealt separately, without unmeasured rollouts. A full minibatch is
    complete with its last member, a smaller one with the end of the batch.
    """

    def __init__(
        self, order: Sequence[Item], config: ReflectConfig, *, batch: int, threshold: float | None
    ) -> None:
        self._left = list(reversed(order))
        self._size = config.minibatch_size
        self._batch = batch
        self._threshold = threshold
        self._n_dealt: Counter[RolloutSource] = Counter()
        self._members: dict[RolloutSource, list[tuple[Item, Rollout]]] = {
            source: [] for source in (SOURCES[:1] if config.failure_only else SOURCES)
        }

    def add(self, rollout: Rollout) -> tuple[Minibatch, ...]:
        """Take the next rollout of the order, and return the minibatches that it completes."""
        source: RolloutSource = "failure" if is_failure(rollout, self._threshold) else "success"
        item = self._left.pop()
        if rollout.score is not None and source in self._members:
            self._members[source].append((item, rollout))
        complete = []
        for source, members in self._members.items():
            if len(members) == self._size or (members and not self._left):
                items, rollouts = zip(*members, strict=True)
                index = self._n_dealt[source]
                complete.append(
                    Minibatch(
                        source=source,
                        index=index,
                        items=items,
                        rollouts=rollouts,
                        batch=self._batch,
                    )
                )
                self._n_dealt[source] += 1
                members.clear()
        return tuple(complete)
