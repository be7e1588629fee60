"""Stages 1 and 2 together: rolls out a batch and starts analysts as soon as their cases have finished.

The cases of an analyst depend only on the outcomes along the batch's seeded order. So a minibatch is final
when the finished prefix of that order holds its members. The reports are byte-identical to those of a run
that waits for all rollouts first. A prefix's unmeasured rollouts are logged after a report on its cases. If an
outage stops the analyst as well, nothing is logged, and a resumed run rolls out the lost items again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from reflact.concurrency import fan_out, fan_out_then
from reflact.config.training import ReflectConfig
from reflact.stages.reflect import SOURCES, Minibatch, classify_rollout, shuffle_batch
from reflact.stages.rollout import RolloutRunner, log_unmeasured, require_coverage
from reflact.types import AnalystReport, Item, Rollout, RolloutSource, Skill

_ReadyMinibatch = tuple[Minibatch, Sequence[Rollout]]
"""A minibatch, and the finished prefix of its batch's order."""


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
    """Roll out a step's batches and analyse them; an item that occurs in several has a trial for each.

    Returns:
        The rollouts in the order of the items, and the reports batch by batch, failures before successes.

    Raises:
        RunFailed: No rollout could be measured; nothing is logged.
        ModelError: An endpoint serves no request of this kind, or an analyst's cannot be reached.
    """
    jobs = runner.make_batch_jobs(batches, skill)
    await runner.find_stored([job for row in jobs for job in row])
    ordered = [shuffle_batch(row, seed=seed, step=runner.step, batch=n) for n, row in enumerate(jobs)]

    dealers = [
        MinibatchDealer([job.item for job in row], config, batch=n, threshold=threshold)
        for n, row in enumerate(ordered)
    ]

    def find_ready(batch: int, prefix: Sequence[Rollout]) -> list[_ReadyMinibatch]:
        return [(minibatch, prefix) for minibatch in dealers[batch].add(prefix[-1])]

    async def report(case: _ReadyMinibatch) -> AnalystReport:
        minibatch, known = case
        finished = await analyse(minibatch)
        await log_unmeasured(known, decision_log=runner.decision_log, step=runner.step)
        return finished

    ready = find_ready if config.overlap else lambda *_: []
    rows, early = await fan_out_then(
        runner.run, ordered, ready=ready, then=report, limit=runner.limit, then_limit=config.concurrency
    )
    by_key = {rollout.key: rollout for row in rows for rollout in row}
    rollouts = tuple(by_key[job.key] for row in jobs for job in row)
    require_coverage(rollouts, 0.0)
    reports = [r for batch_reports in early for r in batch_reports]
    if not config.overlap:
        prefixes = [(batch, row[:n]) for batch, row in enumerate(rows) for n in range(1, len(row) + 1)]
        cases = [case for prefix in prefixes for case in find_ready(*prefix)]
        reports += await fan_out(report, cases, limit=config.concurrency)
    await log_unmeasured(rollouts, decision_log=runner.decision_log, step=runner.step)
    return rollouts, tuple(sorted(reports, key=lambda r: (r.batch, SOURCES.index(r.source_type), r.index)))


class MinibatchDealer:
    """Deals the rollouts of a batch, in its seeded order, into minibatches.

    Failures and successes are dealt separately, without unmeasured rollouts. A full minibatch is complete with its
    last member, a smaller one with the end of the batch.
    """

    def __init__(
        self, order: Sequence[Item], config: ReflectConfig, *, batch: int, threshold: float | None
    ) -> None:
        self._order = order
        self._size = config.minibatch_size
        self._batch = batch
        self._threshold = threshold
        self._taken = 0
        self._n_dealt: Counter[RolloutSource] = Counter()
        self._members: dict[RolloutSource, list[tuple[Item, Rollout]]] = {
            source: [] for source in (SOURCES[:1] if config.failure_only else SOURCES)
        }

    def add(self, rollout: Rollout) -> tuple[Minibatch, ...]:
        """Take the next rollout of the order, and return the minibatches that it completes."""
        source = classify_rollout(rollout, self._threshold)
        if source in self._members:
            self._members[source].append((self._order[self._taken], rollout))
        self._taken += 1
        is_last = self._taken == len(self._order)
        return tuple(
            self._deal(source)
            for source, members in self._members.items()
            if len(members) == self._size or (is_last and members)
        )

    def _deal(self, source: RolloutSource) -> Minibatch:
        items, rollouts = zip(*self._members[source], strict=True)
        index = self._n_dealt[source]
        self._n_dealt[source] += 1
        self._members[source] = []
        return Minibatch(source=source, index=index, items=items, rollouts=rollouts, batch=self._batch)
