"""The training loop: what comes next, its commit, and the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata

import anyio
from pydantic import TypeAdapter

from reflact import events
from reflact.adapters import find_critic
from reflact.concurrency import finish_if_cancelled, open_task_group
from reflact.config.training import TrainerConfig
from reflact.errors import (
    BudgetSpent,
    EnvironmentFailure,
    ModelError,
    QuotaSpent,
    ReflactError,
    RunFailed,
    StoreError,
    Unmeasured,
)
from reflact.gate.ranked_decision import start_ranking
from reflact.llm.pricing import BYTES_PER_TOKEN
from reflact.messages import NO_REPORTS, NO_VALID_REPLY
from reflact.records import (
    CommitRecord,
    CriticDescription,
    RunState,
    RunStatus,
    RunSummary,
    StepRecord,
)
from reflact.skills.rejected_edits import RejectedEdit, collect_rejected_edits, deduplicate_edits
from reflact.stages.evaluate import build_measurement
from reflact.store import artifacts
from reflact.text import name_count
from reflact.training.epoch_end import finish_epoch, is_epoch_end_due
from reflact.training.final_test import final_test, find_promotion_rival, judge_promotion
from reflact.training.gating import estimate_gate_power
from reflact.training.open_run import start
from reflact.training.preflight import check_run
from reflact.training.rollouts import manage_environment, roll_out_trials
from reflact.training.run import Run
from reflact.training.state import (
    build_commit_events,
    build_first_state,
    find_unmeasured,
    summarize_history,
    version_hashes,
)
from reflact.training.step import find_end, train_step
from reflact.training.trouble import (
    advise_on_replies,
    count_losses,
    describe_refused,
    describe_unmeasured,
    list_answer_faults,
)
from reflact.types import Split

# Active time is stored this far in advance; after a kill it is too long by at most this.
TIME_RECORD_SECONDS = 1.0

# How long the end of a cancelled run waits for a database that another process has locked.
LOCK_SECONDS = 0.4

# How long it may take in total to store the summary; only a busy machine needs more than a fraction
# of a second.
FINISH_SECONDS = 3.0

REJECTED_EDITS_ADAPTER: TypeAdapter[tuple[RejectedEdit, ...]] = TypeAdapter(
    tuple[RejectedEdit, ...]
)

# All that can end a run whose summary is stored; a KeyboardInterrupt of code arrives in a group.
ENDS = (Exception, BaseExceptionGroup, asyncio.CancelledError)

# Errors that are ends of a run; all others are raised, too.
FORESEEN = (BudgetSpent, ModelError, EnvironmentFailure, RunFailed)

# What a run does between two commits: a step, the end of an epoch, or the comparison of the last
# skill with the best.
Task = Callable[[Run, RunState], Awaitable[CommitRecord]]


async def run_loop(run: Run) -> None:
    """Do what comes next until nothing is left, commit each record, and measure the result."""
    await announce_run(run)
    await check_run(run)
    state = run.state or await measure_baseline(run)
    await restore(run, state)
    while (task := await choose_next(run, state)) is not None:
        record = await retry_once(run, state, task)
        state = await commit(run, record, state.after([record]))
    await final_test(run, state)


async def train(run: Run) -> RunSummary:
    """Run to the end, or on from an earlier start, and return the summary, also of a failure."""
    try:
        await start(run)
        with run.graceful_stop.cancel_scope():
            async with manage_environment(run.plan.environment, run.failures):
                await train_to_end(run)
    except ENDS as error:
        return await finish(run, error)
    return await finish(run, None)


async def train_to_end(run: Run) -> None:
    """Train within the run's time, which is stored as it passes."""
    with anyio.CancelScope(deadline=run.budget.deadline) as time:
        async with open_task_group() as tasks:
            tasks.start_soon(keep_time, run)
            await run_loop(run)
            tasks.cancel_scope.cancel()
    if time.cancelled_caught:
        raise run.budget.out_of_time()


async def announce_run(run: Run) -> None:
    """Emit the sizes of the plan, and what the gate does with them."""
    data = run.plan.data
    await run.emit(
        events.RunStarted(
            run_id=run.id,
            steps_per_epoch=run.plan.steps_per_epoch,
            n_train=len(data.train),
            n_val=len(data.val),
            n_test=len(data.test),
        )
    )
    await run.emit(estimate_gate_power(run.plan))


async def choose_next(run: Run, state: RunState) -> Task | None:
    """Return what comes next; None if the training is over."""
    if is_epoch_end_due(run, state):
        return finish_epoch
    if state.step < run.plan.total_steps and run.results.stop_reason is None:
        reason = find_end(run.plan, state, run.records)
        if reason is None:
            return train_step
        run.results.stop_reason = reason
        await run.emit(events.TrainingStopped(run_id=run.id, step=state.step, reason=reason))
    require_reports(run.records, run.config)
    done = await run.store.promotions(run.id)
    is_compared = bool(done) and done[-1].step == state.step
    return None if is_compared or find_promotion_rival(state) is None else judge_promotion


async def measure_baseline(run: Run) -> RunState:
    """Measure the initial skill, twice if beliefs decide, and commit the first state."""
    plan = run.plan
    initial = plan.initial_skill
    trials = range(run.config.baseline_passes)
    async with run.timer.stage("evaluate", step=0, name="baseline"):
        passes = await roll_out_trials(run, initial, Split.val, step=0, trials=trials)
    measured = build_measurement(initial.hash, Split.val, passes[0])
    score = plan.metric.score_measurement(measured)
    if score is None:
        raise RunFailed(
            "the initial skill has no score on the validation split, so nothing can be compared "
            "with it; start again to measure it anew"
        )
    await run.emit(
        events.BaselineMeasured(run_id=run.id, score=score, n=measured.n, trials=len(trials))
    )
    run.add_document(initial)
    is_deterministic = run.config.target.deterministic is not False
    ranking = None
    gate = run.config.gate
    if gate.enabled and gate.policy == "ranked":
        scores = [plan.metric.score_items(rollouts) for rollouts in passes]
        ranking = start_ranking(initial.hash, scores, is_hard=gate.metric == "hard")
    state = build_first_state(initial, score, deterministic=is_deterministic, ranking=ranking)
    return await commit(run, None, state)


async def retry_once(run: Run, state: RunState, task: Task) -> CommitRecord:
    """Return the record of a task; do it once more if too little could be measured."""
    try:
        return await task(run, state)
    except Unmeasured as error:
        step = state.step + (task is train_step)
        await run.on_event(events.StepRetried(run_id=run.id, step=step, reason=str(error)))
    run.documents.clear()
    return await task(run, state)


async def commit(run: Run, record: CommitRecord | None, state: RunState) -> RunState:
    """Store a record, its documents and its state in one transaction, and emit its events."""
    await finish_if_cancelled(partial(_save, run, record, state))
    for event in build_commit_events(run.id, record, state):
        await run.emit(event)
    await run.graceful_stop.stop_after_commit()
    return state


async def _save(run: Run, record: CommitRecord | None, state: RunState) -> None:
    documents = dict(run.documents)
    await run.store.commit(run.id, record, state, tuple(documents.values()))
    run.documents.clear()
    run.state = state
    if record is None:
        return
    if isinstance(record, StepRecord):
        run.records.append(record)
    for version in record.created_versions:
        artifacts.export_version(run.folder, version.number, documents[version.skill_hash])
    artifacts.export_best(run.folder, await run.store.skill(record.best.skill_hash))


async def restore(run: Run, state: RunState) -> None:
    """Read and export the history of earlier starts, and emit its last events again."""
    run.records = list(await run.store.records(run.id))
    epochs = await run.store.epochs(run.id)
    promotions = await run.store.promotions(run.id)
    hashes = version_hashes(run.plan.initial_skill, run.records, epochs)
    artifacts.remove_versions(run.folder, beyond=hashes)
    for number, skill_hash in hashes.items():
        artifacts.export_version(run.folder, number, await run.store.skill(skill_hash))
    artifacts.export_best(run.folder, await run.store.skill(state.best.skill_hash))
    last: list[CommitRecord | None] = [*run.records[-1:]] or [None]
    last += [end for end in epochs[-1:] if end.step == state.step]
    last += [promotion for promotion in promotions[-1:] if promotion.step == state.step]
    for record in last:
        for event in build_commit_events(run.id, record, state):
            await run.emit(event)
    if run.config.reflect.memory == "environment":
        run.pinned_edits = await run.decision_log.once(
            0, "pinned_cards", partial(_read_edits_of_others, run), REJECTED_EDITS_ADAPTER
        )


async def _read_edits_of_others(run: Run) -> tuple[RejectedEdit, ...]:
    """Return the rejected edits of other runs, as of the first start of this run."""
    environment = str(run.plan.identity["environment"])
    others = await run.store.records_of_other_runs(environment, exclude=run.id)
    edits: list[RejectedEdit] = []
    for run_id, steps in others.items():
        edits += collect_rejected_edits(steps, run_id=run_id)
    return deduplicate_edits(edits)


def require_reports(records: Sequence[StepRecord], config: TrainerConfig) -> None:
    """Check that an analyst gave a valid reply, unless none was asked or a candidate raced."""
    reasons = [report.no_reply_reason for record in records for report in record.reports]
    is_measured = any(record.race for record in records)
    if not reasons or None in reasons or is_measured:
        return
    reason = str(reasons[0])
    advice = ""
    if NO_VALID_REPLY in reason:
        advice = f". To mend it, {advise_on_replies('optimizer', config, reason)}"
    raise RunFailed(
        f"{NO_REPORTS} in {name_count(len(records), 'step')}, so nothing could be learned; the "
        f"first reason: {reason}{advice}"
    )


async def keep_time(run: Run) -> None:
    """Store the active time as it passes."""
    while True:
        reading = run.timer.read_and_reset(ahead=TIME_RECORD_SECONDS)
        await run.store.add_seconds(run.id, *reading)
        await anyio.sleep(TIME_RECORD_SECONDS)


async def finish(run: Run, error: BaseException | None) -> RunSummary:
    """Store and return how the run ended; then raise an error that is no end of a run."""
    status, reason = _describe_end(run, error)
    if error is None or isinstance(error, FORESEEN):
        storing = partial(store_summary, run, status, reason)
        return await finish_if_cancelled(storing, seconds=FINISH_SECONDS)
    with anyio.move_on_after(LOCK_SECONDS, shield=True) as scope, suppress(StoreError):
        await run.store.add_seconds(run.id, *run.timer.read_and_reset())
        scope.deadline += FINISH_SECONDS - LOCK_SECONDS
        await store_summary(run, status, reason)
    raise error


def _describe_end(run: Run, error: BaseException | None) -> tuple[RunStatus, str | None]:
    """Return the status of a run that has ended, and the reason."""
    stop = run.graceful_stop
    if error is None:
        if stop.was_stopped:
            return "cancelled", stop.reason
        return "completed", run.results.stop_reason
    if isinstance(error, (BudgetSpent, QuotaSpent)):
        return "budget", str(error)
    if isinstance(error, ReflactError):
        return "failed", str(error)
    if isinstance(error, Exception):
        return "failed", f"{type(error).__name__} was raised"
    reason = stop.reason or "cancelled by its caller"
    if isinstance(error, BaseExceptionGroup):  # of code; the event loop is about to end
        reason = "KeyboardInterrupt was raised"
    return "cancelled", reason


async def store_summary(run: Run, status: RunStatus, reason: str | None) -> RunSummary:
    """Store and return the summary of this start of the run."""
    store = run.store
    results = run.results
    if status == "failed":
        # An invalid reply of a critic left an item unmeasured; the next start asks again.
        await store.forget_responses(run.rejected)
    seconds = await store.add_seconds(run.id, *run.timer.read_and_reset())
    records = await store.records(run.id)
    summary = RunSummary(
        version=metadata.version("reflact"),
        run_id=run.id,
        status=status,
        reason=reason,
        scores=tuple(results.scores),
        improvements=tuple(results.improvements),
        claim=results.claim,
        missing=tuple(results.missing),
        warnings=await _list_warnings(run, records),
        spend=await store.spend(run.id),
        faults=await store.faults(run.id),
        losses=await count_losses(store, run.id, records),
        reuse=store.reuse,
        test_openings=results.test_openings,
        seconds=seconds,
        config=run.config.model_dump(mode="json"),
        critic=_describe_critic(run, run.plan.critic),
        judge=run.results.judge,
        annotated_by=_describe_critic(run, find_critic(run.plan.annotator)),
    )
    summary = summarize_history(summary, records)
    state = run.state
    if state is not None:
        best = await store.skill(state.best.skill_hash)
        added = len(best.text.encode()) - len(run.plan.initial_skill.text.encode())
        summary = summary.model_copy(
            update={
                "best": state.best,
                "final": state.current,
                "deterministic": state.deterministic,
                "added_tokens": round(added / BYTES_PER_TOKEN),
            }
        )
    if run.describe is not None:
        summary = summary.model_copy(update={"verdict": run.describe(summary)})
    await store.finish(run.id, status, reason, summary.model_dump_json())
    artifacts.export_summary(run.folder, summary)
    return summary


async def _list_warnings(run: Run, records: Sequence[StepRecord]) -> tuple[str, ...]:
    lost = dict.fromkeys(find_unmeasured(records)) | run.results.unmeasured
    losses = (
        describe_unmeasured(lost),
        describe_refused([report for record in records for report in record.reports]),
    )
    faults = await list_answer_faults(run.store, run.id, run.config)
    return (*run.results.warnings, *(loss for loss in losses if loss is not None), *faults)


def _describe_critic(run: Run, used: CriticDescription | None) -> CriticDescription | None:
    """Return a critic with its accuracy, if it is the one that this start measured."""
    measured = run.results.critic
    if measured is None or used is None or used.identity != measured.identity:
        return used
    return measured
