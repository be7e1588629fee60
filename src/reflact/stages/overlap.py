"""Stages 1 and 2 together: rolls out a batch and starts analysts as soon as their cases have finished.

The cases of an analyst depend only on the outcomes along the batch's seeded order. So a minibatch is final
when the finished prefix of that order holds its members. The reports are byte-identical to those of a run
that waits for all rollouts first. A prefix's unmeasured rollouts are logged after a report on its cases. If an
outage stops the analyst as well, nothing is logged, and a resumed run rolls out the lost items again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reflact.concurrency import fan_out, fan_out_then
from reflact.config.training import ReflectConfig
from reflact.stages.reflect import SOURCES, Minibatch, classify_rollout, shuffle_batch
from reflact.stages.rollout import RolloutRunner, log_unmeasured, require_coverage
from reflact.types import AnalystReport, Item, Rollout, Skill

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

    def find_ready(batch: int, prefix: Sequence[Rollout]) -> list[_ReadyMinibatch]:
        order = [job.item for job in ordered[batch]]
        completed = find_completed_minibatches(order, prefix, config, batch=batch, threshold=threshold)
        return [(minibatch, prefix) for minibatch in completed]

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


def find_completed_minibatches(
    order: Sequence[Item],
    prefix: Sequence[Rollout],
    config: ReflectConfig,
    *,
    batch: int,
    threshold: float | None,
) -> tuple[Minibatch, ...]:
    """Return the minibatches that the last rollout of a finished prefix completes.

    ``order`` is the whole batch in its seeded order. Failures and successes are dealt separately along it,
    without unmeasured rollouts. A full minibatch is complete with its last member, a smaller one with the end
    of the batch.
    """
    dealt = []
    for source in SOURCES[:1] if config.failure_only else SOURCES:
        matching = [i for i, rollout in enumerate(prefix) if classify_rollout(rollout, threshold) == source]
        full, rest = divmod(len(matching), config.minibatch_size)
        if rest == 0 and matching[-1:] == [len(prefix) - 1]:
            index, members = full - 1, matching[-config.minibatch_size :]
        elif rest > 0 and len(prefix) == len(order):
            index, members = full, matching[-rest:]
        else:
            continue
        dealt.append(
            Minibatch(
                source=source,
                index=index,
                items=tuple(order[i] for i in members),
                rollouts=tuple(prefix[i] for i in members),
                batch=batch,
            )
        )
    return tuple(dealt)
