"""One training step: a source proposes candidates, they race, the gate decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import TypeAdapter

from reflact import events
from reflact.data import plan_epoch
from reflact.records import RunState, StepRecord, Usage
from reflact.search.bandit import (
    choose_source,
    count_new_rollouts,
    count_step_items,
    estimate_rollouts,
    is_stalled,
)
from reflact.search.race import plan_slices
from reflact.skills.document import read_notes
from reflact.skills.rejected_edits import RejectedEdit, collect_rejected_edits, deduplicate_edits
from reflact.stages.evaluate import build_measurement
from reflact.stages.execution_notes import update_appendix
from reflact.stages.prompt_sections import show_buffer, show_meta
from reflact.stages.reflect import group_failures
from reflact.stages.select import edit_budget
from reflact.training.gating import JudgedStep, judge_candidates
from reflact.training.plan import RunPlan
from reflact.training.run import Run
from reflact.training.sources import StepInput, StepProposal, list_sources, propose
from reflact.training.state import choose_best, create_versions, find_current, replaces_best
from reflact.training.trouble import describe_refused
from reflact.types import (
    AggregateResult,
    AnalystReport,
    AppendixResult,
    Patch,
    SelectResult,
    Split,
)

PLANNED_ADAPTER: TypeAdapter[float | None] = TypeAdapter(float | None)


async def train_step(run: Run, state: RunState) -> StepRecord:
    """Run the next step and return its record."""
    step = state.step + 1
    epoch = state.step // run.plan.steps_per_epoch + 1
    with run.tracing.step(step, epoch=epoch):
        work = await prepare_step(run, state, step, epoch)
        proposed = await propose(run, work)
        if (refused := describe_refused(proposed.reports)) is not None:
            await run.on_event(events.WarningIssued(run_id=run.id, step=step, message=refused))
        async with run.timer.stage("evaluate", step=step):
            judged = await judge_candidates(run, work, proposed)
        appended = await add_notes(run, work, proposed.reports, judged)
        return build_record(run, work, proposed, judged, appended)


async def prepare_step(run: Run, state: RunState, step: int, epoch: int) -> StepInput:
    """Choose the source of the next step, and return what it begins with."""
    config = run.config
    train = config.train
    items = {item.id: item for item in run.plan.data.train}
    sizes = {"batch_size": train.batch_size, "accumulation": train.accumulation}
    dealt = plan_epoch(items, epoch=epoch, seed=config.seed, **sizes)
    index = state.step % run.plan.steps_per_epoch
    batches = tuple(tuple(items[item_id] for item_id in batch) for batch in dealt[index])
    batch_items = tuple(item for batch in batches for item in batch)
    ids = tuple(item.id for item in batch_items)
    await run.emit(events.StepStarted(run_id=run.id, step=step, epoch=epoch, item_ids=ids))

    source = choose_source(list_sources(run), run.records, seed=config.seed, step=step)
    max_edits = None
    select = config.select
    if select.lr_control != "none":
        bounds = {"max_edits": select.max_edits, "floor": select.floor}
        total = run.plan.total_steps
        max_edits = edit_budget(step, total, scheduler=select.scheduler, **bounds)
    planned = await plan_rollouts(run)
    attempts = state.step_buffer if state.epoch == epoch else ()
    return StepInput(
        step=step,
        source=source,
        is_stalled=is_stalled(run.records),
        epoch=epoch,
        context=run.make_context(step),
        state=state,
        skill=await run.find_skill(state.current.skill_hash),
        batches=batches,
        items=batch_items,
        attempts=attempts,
        shown_attempts=show_buffer(attempts),
        notes=show_meta(state.meta_skill),
        rejected_edits=_collect_edits(run, epoch),
        max_edits=max_edits,
        max_items=count_step_items(planned, config.reflect.minibatch_size),
        passes=count_passes_left(run.plan, planned, run.records),
    )


def _collect_edits(run: Run, epoch: int) -> tuple[RejectedEdit, ...]:
    """Return the rejected edits of other runs and of the epochs before this one."""
    if run.config.reflect.memory == "off":
        return ()
    if epoch > run.edits_until:
        new = [record for record in run.records if run.edits_until <= record.epoch < epoch]
        run.rejected_edits = collect_rejected_edits(new, known=run.rejected_edits)
        run.edits_until = epoch
    return deduplicate_edits((*run.pinned_edits, *run.rejected_edits))


async def plan_rollouts(run: Run) -> float:
    """Return how many rollouts ``train.max_rollouts`` or the limits of ``budget`` pay for.

    For a limit, the mean cost of the rollouts so far counts. The result is logged before it is
    used, under the limits, so that a resumed run plans with the same number until somebody changes
    a limit.
    """
    config = run.config
    limits = config.budget
    if config.train.max_rollouts is not None or config.search.is_published:
        return config.train.max_rollouts or math.inf
    if limits.max_usd is None and limits.max_tokens is None and limits.max_calls is None:
        return math.inf

    async def estimate() -> float | None:
        spent = [entry.usage for entry in await run.store.spend(run.id) if entry.role == "target"]
        done = config.baseline_passes * len(run.plan.data.val)
        done += sum(record.n_rollouts for record in run.records)
        planned = estimate_rollouts(limits, sum(spent, Usage()), done)
        return None if planned == math.inf else planned

    label = f"planned_rollouts/{limits.max_usd}/{limits.max_tokens}/{limits.max_calls}"
    planned = await run.decision_log.once(0, label, estimate, PLANNED_ADAPTER)
    return math.inf if planned is None else planned


def count_passes_left(plan: RunPlan, planned: float, earlier: Sequence[StepRecord]) -> float:
    """Return how many passes over the validation items the rest of the rollouts pays for."""
    n = len(plan.data.val)
    used = plan.config.baseline_passes * n + sum(record.n_rollouts for record in earlier)
    return (planned - used) / n


def find_end(plan: RunPlan, state: RunState, records: Sequence[StepRecord]) -> str | None:
    """Return why no further step is taken; None if one is.

    The training ends by ``train.patience``, when the budget of rollouts is used, or when the
    document solves all validation items.
    """
    train = plan.config.train
    accepted = [n for n, record in enumerate(records, 1) if record.verdict.accepted]
    since = len(records) - max(accepted, default=0)
    if train.patience is not None and since >= train.patience:
        return f"train.patience is {train.patience}, and the last {since} steps accepted no edit"
    n = len(plan.data.val)
    passes = count_passes_left(plan, train.max_rollouts or math.inf, records)
    if passes * n < plan_slices(n, passes)[0]:
        return (
            f"train.max_rollouts is {train.max_rollouts}, and the rest is too little to measure "
            "another candidate"
        )
    current = state.current
    if plan.config.search.is_published or current.score is None or current.inherited:
        return None
    return f"the document solves all {n} validation items" if current.score >= 1 else None


async def add_notes(
    run: Run, work: StepInput, reports: Sequence[AnalystReport], judged: JudgedStep
) -> AppendixResult:
    """Return the document with which the run goes on, with new reminders in its appendix."""
    verdict = judged.verdict
    skill = judged.candidate.skill
    if not verdict.accepted:
        skill = await run.find_skill(find_current(work.state, verdict).skill_hash)
    appendix = run.config.appendix
    if not appendix.enabled:
        return AppendixResult(skill=skill)
    async with run.timer.stage("appendix", step=work.step):
        return await update_appendix(
            skill,
            reports,
            context=work.context,
            threshold=appendix.consolidate_threshold,
            earlier=read_notes(work.skill.text) if verdict.action == "return" else (),
        )


def build_record(
    run: Run, work: StepInput, proposed: StepProposal, judged: JudgedStep, appended: AppendixResult
) -> StepRecord:
    """Return the record of a step, and let the next commit store its documents."""
    state = work.state
    skill = work.skill
    verdict = judged.verdict
    candidate = judged.candidate
    rollouts = proposed.rollouts
    created = create_versions(state, work.step, candidate, verdict, appended.skill)
    patch = Patch(edits=tuple(result.edit for result in candidate.results))
    record = StepRecord(
        step=work.step,
        epoch=work.epoch,
        source=work.source,
        skill_before=skill.hash,
        item_ids=tuple(r.item_id for r in rollouts),
        rollout=build_measurement(skill.hash, Split.train, rollouts),
        n_failures=sum(run.is_failure(r) for r in rollouts),
        reports=proposed.reports,
        rewrites=proposed.rewrites,
        merged=proposed.merged or AggregateResult(patch=patch, fallbacks=proposed.fallbacks),
        chosen=proposed.chosen or SelectResult(patch=patch, pool_size=len(proposed.candidates)),
        edits=candidate.results,
        rewrite_summary=candidate.summary,
        candidate_hash=candidate.skill.hash,
        race=judged.race,
        verdict=verdict,
        created_versions=created,
        notes=appended.notes,
        current=created[-1] if created else find_current(state, verdict),
        best=created[0] if replaces_best(verdict, state.best) else state.best,
        fallbacks=(*candidate.fallbacks, *appended.fallbacks),
        n_tokens=sum(work.context.asked),
    )
    update: dict[str, object] = {"n_rollouts": count_new_rollouts(record, run.records)}
    if not record.patterns:
        update["fail_reasons"] = group_failures(rollouts, run.config.train.success_threshold)
    for skill in (*(c.skill for c in proposed.candidates), candidate.skill, appended.skill):
        run.add_document(skill)
    return choose_best(state, record.model_copy(update=update))
