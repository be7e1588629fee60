"""Stages 1 and 2 together: rolls out a batch and starts analysts as soon as their cases have finished.

The cases of an analyst depend only on the outcomes along the batch's seeded order. So a minibatch is final
when the finished prefix of that order holds its members. The reports are byte-identical to those of a run
that waits for all rollouts first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from reflact.concurrency import fan_out, fan_out_then
from reflact.config.training import ReflectConfig
from reflact.protocols import DecisionLog, Environment, RolloutStore, Target
from reflact.stages.reflect import SOURCES, Minibatch, batch_order, classify_rollout, deal_minibatches
from reflact.stages.rollout import RolloutRunner, log_unmeasured, number_trials, require_coverage
from reflact.types import AnalystReport, Item, Rollout, Skill


async def roll_out_and_reflect(
    batches: Sequence[Sequence[Item]],
    skill: Skill,
    *,
    target: Target,
    environment: Environment,
    store: RolloutStore,
    decision_log: DecisionLog,
    step: int,
    seed: int,
    config: ReflectConfig,
    threshold: float | None,
    limit: int,
    analyse: Callable[[Minibatch], Awaitable[AnalystReport]],
    phase: str | None = None,
    on_rollout: Callable[[Rollout], Awaitable[None]] | None = None,
) -> tuple[tuple[Rollout, ...], tuple[AnalystReport, ...]]:
    """Roll out a step's batches with feedback and analyse them.

    An unmeasured rollout is logged before the first report on later cases of its batch's order is returned;
    all are logged with the last report of the step. If an outage stops an analyst, nothing is logged for it,
    so a resumed run rolls out the lost items again.

    Args:
        batches: The step's accumulated batches. An item that occurs in several has a trial for each.
        skill: The current document.
        target: The frozen agent.
        environment: Runs and grades items.
        store: Stores finished rollouts.
        decision_log: Where unmeasured rollouts are logged.
        step: The step.
        seed: Root of the batches' orders.
        config: Size of minibatches, concurrency, and whether analysts may start before all rollouts have
            finished.
        threshold: A rollout with a lower hard score failed; None: only 0 fails.
        limit: Maximum of rollouts in flight, over all batches.
        analyse: Returns the report on a minibatch.
        phase: See ``rollout``.
        on_rollout: Called with each rollout as it finishes, in any order.

    Returns:
        The rollouts of all batches in the order of their items, and the reports in the plan's order:
        batch by batch, failures before successes.

    Raises:
        RunFailed: No rollout could be measured; nothing is logged.
        ModelError: An endpoint serves no request of this kind, or an analyst's cannot be reached.
    """
    runner = RolloutRunner(
        target=target,
        environment=environment,
        store=store,
        decision_log=decision_log,
        step=step,
        feedback=True,
        phase=phase,
        on_rollout=on_rollout,
    )
    trials = iter(number_trials([item for batch in batches for item in batch]))
    jobs = [[runner.make_job(item, skill, next(trials)) for item in batch] for batch in batches]
    await runner.find_stored([job for row in jobs for job in row])
    orders = [batch_order(len(row), seed=seed, step=step, batch=n) for n, row in enumerate(jobs)]
    ordered_jobs = [[row[i] for i in order] for row, order in zip(jobs, orders, strict=True)]

    def ready(batch: int, prefix: Sequence[Rollout]) -> list[_ReadyMinibatch]:
        order = [job.item for job in ordered_jobs[batch]]
        filled = (
            find_completed_minibatches(order, prefix, config, batch=batch, threshold=threshold)
            if config.overlap
            else ()
        )
        return [_ReadyMinibatch(minibatch, tuple(prefix)) for minibatch in filled]

    async def analyse_and_log(case: _ReadyMinibatch) -> AnalystReport:
        report = await analyse(case.minibatch)
        await log_unmeasured(case.known, decision_log=decision_log, step=step)
        return report

    rows, early = await fan_out_then(
        runner.run,
        ordered_jobs,
        ready=ready,
        then=analyse_and_log,
        limit=limit,
        then_limit=config.concurrency,
    )
    rollouts = [_restore_order(row, order) for row, order in zip(rows, orders, strict=True)]
    flat = tuple(r for row in rollouts for r in row)
    require_coverage(flat, 0.0)
    reports = [report for batch_reports in early for report in batch_reports]
    if not config.overlap:
        dealt = [
            deal_minibatches(items, row, config, seed=seed, step=step, batch=n, threshold=threshold)
            for n, (items, row) in enumerate(zip(batches, rollouts, strict=True))
        ]
        cases = [_ReadyMinibatch(minibatch, flat) for row in dealt for minibatch in row]
        reports += await fan_out(analyse_and_log, cases, limit=config.concurrency)
    await log_unmeasured(flat, decision_log=decision_log, step=step)
    return flat, tuple(sorted(reports, key=lambda r: (r.batch, SOURCES.index(r.source_type), r.index)))


def find_completed_minibatches(
    order: Sequence[Item],
    prefix: Sequence[Rollout],
    config: ReflectConfig,
    *,
    batch: int,
    threshold: float | None,
) -> tuple[Minibatch, ...]:
    """Return the minibatches that the last rollout of a finished prefix completes.

    ``order`` is the whole batch in its seeded order. A full minibatch is complete with its last member, a
    smaller one with the end of the batch. Over all prefixes the result equals ``deal_minibatches``.
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


def _restore_order(ordered: Sequence[Rollout], order: Sequence[int]) -> tuple[Rollout, ...]:
    by_index = dict(zip(order, ordered, strict=True))
    return tuple(by_index[i] for i in range(len(order)))


class _ReadyMinibatch(NamedTuple):
    minibatch: Minibatch
    known: tuple[Rollout, ...]
