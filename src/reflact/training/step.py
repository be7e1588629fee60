"""One training step: a source proposes candidates, they race, the gate decides, and the appendix
gets reminders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from reflact import events
from reflact.data import plan_epoch
from reflact.gate.ranked_decision import REJECT_BELOW
from reflact.records import RunState, StepRecord, Usage
from reflact.search.bandit import (
    choose_source,
    count_new_rollouts,
    count_passes_left,
    count_step_items,
    estimate_rollouts,
)
from reflact.search.race import Contender, limit_contenders, plan_slices
from reflact.skills.document import digest_form, read_notes
from reflact.skills.rejected_edits import RejectedEdit, collect_rejected_edits, deduplicate_edits
from reflact.stages.evaluate import build_measurement, decide_without_evaluation
from reflact.stages.execution_notes import update_appendix
from reflact.stages.reflect import group_failures
from reflact.stages.select import edit_budget
from reflact.training.gating import judge, race
from reflact.training.plan import RunPlan
from reflact.training.run import Run
from reflact.training.sources import StepInput, StepProposal, list_sources, propose
from reflact.training.state import (
    choose_best,
    create_versions,
    find_current,
    name_documents,
    replaces_best,
)
from reflact.training.trouble import describe_refused
from reflact.types import (
    AggregateResult,
    AnalystReport,
    AppendixResult,
    Candidate,
    FrozenModel,
    Item,
    Measurement,
    Patch,
    RaceEntry,
    Rollout,
    SelectResult,
    Skill,
    Split,
    Verdict,
    is_failure,
)


async def train_step(run: Run, state: RunState) -> StepRecord:
    """Run the next step and return its record.

    Raises:
        Unmeasured: Too little could be measured to decide on the candidate.
    """
    step = state.step + 1
    epoch, _ = locate_step(run.plan, step)
    with run.tracing.step(step, epoch=epoch):
        work = await prepare_step(run, state)
        proposed = await propose(run, work)
        if (refused := describe_refused(proposed.reports)) is not None:
            await run.on_event(events.WarningIssued(run_id=run.id, step=step, message=refused))
        async with run.timer.stage("evaluate", step=step):
            judged = await judge_candidates(run, work, proposed)
        appended = await add_notes(run, work, proposed.reports, judged)
        return build_record(run, work, proposed, judged, appended)


def locate_step(plan: RunPlan, step: int) -> tuple[int, int]:
    """Return a step's epoch, from 1, and its index in the epoch, from 0."""
    epoch, index = divmod(step - 1, plan.steps_per_epoch)
    return epoch + 1, index


def list_batches(plan: RunPlan, step: int) -> tuple[tuple[Item, ...], ...]:
    """Return the batches of a step."""
    epoch, index = locate_step(plan, step)
    train = plan.config.train
    items = {item.id: item for item in plan.data.train}
    dealt = plan_epoch(
        items,
        epoch=epoch,
        seed=plan.config.seed,
        batch_size=train.batch_size,
        accumulation=train.accumulation,
    )
    return tuple(tuple(items[i] for i in batch) for batch in dealt[index])


async def prepare_step(run: Run, state: RunState) -> StepInput:
    """Choose the source of the next step, and return what it begins with."""
    config = run.config
    step = state.step + 1
    epoch, _ = locate_step(run.plan, step)
    batches = list_batches(run.plan, step)
    ids = tuple(item.id for batch in batches for item in batch)
    await run.emit(events.StepStarted(run_id=run.id, step=step, epoch=epoch, item_ids=ids))

    source = choose_source(list_sources(run), run.records, seed=config.seed, step=step)
    sizes = config.select
    max_edits = None
    if sizes.lr_control != "none":
        max_edits = edit_budget(
            step,
            run.plan.total_steps,
            scheduler=sizes.scheduler,
            max_edits=sizes.max_edits,
            floor=sizes.floor,
        )
    return StepInput(
        source=source.name,
        is_stalled=source.is_stalled,
        epoch=epoch,
        context=run.make_context(step),
        state=state,
        skill=await run.find_skill(state.current.skill_hash),
        batches=batches,
        rejected_edits=_collect_edits(run, epoch),
        max_edits=max_edits,
        max_items=count_step_items(await plan_rollouts(run), config.reflect.minibatch_size),
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
    """Return how many rollouts the run pays for: ``train.max_rollouts``, or else what the limits of
    ``budget`` allow.

    For a limit, the mean cost of the rollouts so far counts. The result is logged before it is
    used, under the limits, so that a resumed run plans with the same number until somebody changes
    a limit.
    """
    config = run.config
    if config.train.max_rollouts is not None or config.search.is_published:
        return config.train.max_rollouts or math.inf
    limits = config.budget
    if limits.max_usd is None and limits.max_tokens is None and limits.max_calls is None:
        return math.inf
    label = f"planned_rollouts/{limits.max_usd}/{limits.max_tokens}/{limits.max_calls}"
    logged = await run.decision_log.get(0, label)
    if logged is not None:
        return float(str(logged))
    spent = [entry.usage for entry in await run.store.spend(run.id) if entry.role == "target"]
    done = config.baseline_passes * len(run.plan.data.val) + sum(r.n_rollouts for r in run.records)
    planned = estimate_rollouts(limits, sum(spent, Usage()), done)
    if planned < math.inf:
        await run.decision_log.put(0, label, planned)
    return planned


class JudgedStep(FrozenModel):
    """The decision on a step's candidates, and what the race measured of them."""

    verdict: Verdict
    candidate: Candidate
    race: tuple[RaceEntry, ...] = ()


async def judge_candidates(run: Run, work: StepInput, proposed: StepProposal) -> JudgedStep:
    """Drop candidates that are known, race the others, and let the gate decide on the one that is
    left.
    """
    decided = _decide_without_race(run, work, proposed)
    if decided is not None:
        return decided
    contenders = proposed.contenders
    if run.config.search.is_published and run.plan.proposer is None:
        return await _ask_gate(run, work, contenders[0])

    known = await _name_forms(run, work.state)
    fresh = _drop_known(contenders, known)
    if not fresh:
        name = known[contenders[0].form]
        reason = (
            f"Every candidate says the same as a document that is known ({name}), so none was "
            "measured."
        )
        verdict = Verdict(action="no_change", reason=reason, repeats=name)
        return JudgedStep(verdict=verdict, candidate=contenders[0].candidate)
    if not run.config.gate.enabled:
        return await _ask_gate(run, work, fresh[0])

    n = len(run.plan.data.val)
    left = _count_passes_left(run.plan, await plan_rollouts(run), run.records)
    passes = left - len(proposed.rollouts) / n
    fresh = limit_contenders(fresh, plan_slices(n, passes), passes * n)
    raced = await race(run, fresh, work.skill, work.state, step=work.step, passes=passes)
    if raced.winner is None:
        verdict, best = build_race_verdict(raced.entries)
        return JudgedStep(verdict=verdict, candidate=fresh[best].candidate, race=raced.entries)
    return await _ask_gate(run, work, fresh[raced.winner], raced.entries)


def _decide_without_race(run: Run, work: StepInput, proposed: StepProposal) -> JudgedStep | None:
    """Return the decision on a step without a candidate to measure; None if there is one."""
    if proposed.verdict is not None:
        return JudgedStep(verdict=proposed.verdict, candidate=Candidate(skill=work.skill))
    if proposed.merged is None or proposed.chosen is None:
        return None
    candidate = proposed.contenders[0].candidate
    known: Mapping[str, str] = name_documents(work.state, run.records)
    if not run.config.gate.enabled:  # an earlier document may come back, with its stored score
        vetoed = {
            record.candidate_hash for record in run.records if record.verdict.veto is not None
        }
        known = {document: name for document, name in known.items() if document in vetoed}
    verdict = decide_without_evaluation(
        candidate, work.skill, merged=proposed.merged, chosen=proposed.chosen, known=known
    )
    return None if verdict is None else JudgedStep(verdict=verdict, candidate=candidate)


async def _ask_gate(
    run: Run, work: StepInput, contender: Contender, entries: tuple[RaceEntry, ...] = ()
) -> JudgedStep:
    candidate = contender.candidate
    subject = f"step {work.step} is unmeasured"
    verdict = await judge(
        run, candidate.skill, work.state, step=work.step, part="step", subject=subject
    )
    return JudgedStep(verdict=verdict, candidate=candidate, race=entries)


def _drop_known(contenders: Sequence[Contender], known: Mapping[str, str]) -> Sequence[Contender]:
    """Return the candidates whose form is new, and the first of those that share one."""
    first: dict[str, Contender] = {}
    for contender in contenders:
        if contender.form not in known:
            first.setdefault(contender.form, contender)
    return list(first.values())


async def _name_forms(run: Run, state: RunState) -> dict[str, str]:
    """Return where each document that is not judged again is from, by the digest of its form.

    These are all that the run has measured; without a gate only the current one.
    """
    if not run.config.gate.enabled:
        current = await run.find_skill(state.current.skill_hash)
        return {digest_form(current.text): f"v{state.current.number}"}
    names = {
        entry.form: f"in step {record.step}" for record in run.records for entry in record.race
    }
    for version in state.kept:
        skill = await run.find_skill(version.skill_hash)
        names[digest_form(skill.text)] = f"v{version.number}"
    return names


def build_race_verdict(entries: Sequence[RaceEntry]) -> tuple[Verdict, int]:
    """Return the verdict of a race that nobody won, and the index of its best candidate.

    It has no scores: those of the race are means on a part of the items, and stay in its entries.
    """
    scores = [-1.0 if entry.score is None else entry.score for entry in entries]
    best = scores.index(max(scores))
    subject = "The candidate does not look"
    if len(entries) > 1:
        subject = f"None of the {len(entries)} candidates looks"
    reason = f"{subject} better than the current document. Best in the race: {entries[best].words}."
    is_refuted = all(e.p_better is not None and e.p_better < REJECT_BELOW for e in entries)
    return Verdict(action="reject" if is_refuted else "set_aside", reason=reason), best


def _count_passes_left(plan: RunPlan, planned: float, earlier: Sequence[StepRecord]) -> float:
    return count_passes_left(
        planned,
        n_items=len(plan.data.val),
        baseline_passes=plan.config.baseline_passes,
        earlier=earlier,
    )


def find_search_end(plan: RunPlan, state: RunState, earlier: Sequence[StepRecord]) -> str | None:
    """Return why the search has nothing to do any more; None if it goes on.

    It ends when the budget of rollouts is used, or when the best document solves all validation
    items.
    """
    most = plan.config.train.max_rollouts
    n = len(plan.data.val)
    passes = _count_passes_left(plan, most or math.inf, earlier)
    if passes * n < plan_slices(n, passes)[0]:
        return (
            f"train.max_rollouts is {most}, and the rest is too little to measure another candidate"
        )
    if plan.config.search.is_published or state.current.score is None or state.current.inherited:
        return None
    return f"the document solves all {n} validation items" if state.current.score >= 1 else None


async def add_notes(
    run: Run, work: StepInput, reports: Sequence[AnalystReport], judged: JudgedStep
) -> AppendixResult:
    """Return the document with which the run goes on, with new reminders in its appendix if these
    are on.
    """
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
    threshold = run.config.train.success_threshold
    created = create_versions(state, work.step, candidate, verdict, appended.skill)
    patch = Patch(edits=tuple(result.edit for result in candidate.results))
    record = StepRecord(
        step=work.step,
        epoch=work.epoch,
        source=work.source,
        skill_before=skill.hash,
        item_ids=tuple(r.item_id for r in rollouts),
        rollout=build_measurement(skill.hash, Split.train, rollouts),
        batches=_measure_batches(work.batches, skill, rollouts),
        n_failures=sum(is_failure(r, threshold) for r in rollouts),
        reports=proposed.reports,
        rewrites=proposed.rewrites,
        merged=proposed.merged or AggregateResult(patch=patch, fallbacks=proposed.fallbacks),
        chosen=proposed.chosen or SelectResult(patch=patch, pool_size=len(proposed.contenders)),
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
        n_rollouts=count_new_rollouts(
            rollouts,
            judged.race,
            verdict,
            candidate.skill.hash,
            current=skill.hash,
            earlier=run.records,
        ),
        n_tokens=work.context.asked.tokens,
    )
    if not record.patterns:
        record = record.model_copy(update={"fail_reasons": group_failures(rollouts, threshold)})
    for contender in proposed.contenders:
        run.add_document(contender.candidate.skill)
    run.add_document(candidate.skill)
    run.add_document(appended.skill)
    return choose_best(state, record)


def _measure_batches(
    batches: Sequence[Sequence[Item]], skill: Skill, rollouts: Sequence[Rollout]
) -> tuple[Measurement, ...]:
    """Return the measurement of each batch; of all rollouts if the budget left items out."""
    sizes = [len(batch) for batch in batches]
    if sum(sizes) != len(rollouts):
        sizes = [len(rollouts)] if rollouts else []
    return tuple(
        build_measurement(skill.hash, Split.train, rollouts[end - size : end])
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
