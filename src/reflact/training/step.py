"""One training step: a source proposes candidates, they race, the gate decides, and the appendix gets reminders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from reflact import events
from reflact.data import plan_epoch
from reflact.gate.ranked_decision import REJECT_BELOW
from reflact.records import RunState, StepRecord, Usage
from reflact.search.bandit import (
    SourceChoice,
    choose_source,
    count_new_rollouts,
    count_passes_left,
    count_step_items,
    estimate_rollouts,
)
from reflact.search.race import limit_contenders, plan_slices
from reflact.skills.document import digest_form, read_notes
from reflact.skills.rejected_edits import RejectedEdit, collect_rejected_edits, deduplicate_edits
from reflact.stages.context import StageContext
from reflact.stages.evaluate import build_measurement, decide_without_evaluation
from reflact.stages.execution_notes import update_appendix
from reflact.stages.reflect import group_failures
from reflact.stages.select import edit_budget
from reflact.training.gating import CommitOutcome, GateKeeper
from reflact.training.proposals import StepInput, StepProposal
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import RunPlan, Runtime
from reflact.training.sources import list_sources, propose
from reflact.training.state import create_versions, find_current, name_documents, replaces_best
from reflact.training.timing import StageTimer
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


class JudgedStep(FrozenModel):
    """The decision on a step's candidates, and what the race measured of them."""

    verdict: Verdict
    candidate: Candidate
    race: tuple[RaceEntry, ...] = ()


@dataclass(frozen=True)
class StepRunner:
    """Runs steps, for one start of a run; ``pinned_edits`` are rejected edits of other runs."""

    runtime: Runtime
    scheduler: RolloutScheduler
    gate_keeper: GateKeeper
    timer: StageTimer
    pinned_edits: tuple[RejectedEdit, ...]
    _collected_edits: dict[int, tuple[RejectedEdit, ...]] = field(default_factory=dict, init=False)
    """The rejected edits that the steps of the latest epoch begin with, by that epoch."""

    def list_batches(self, step: int) -> tuple[tuple[Item, ...], ...]:
        """Return the batches of a step."""
        epoch, index = self.locate_step(step)
        items = {item.id: item for item in self.runtime.plan.data.train}
        train = self.runtime.config.train
        plan = plan_epoch(
            items,
            epoch=epoch,
            seed=self.runtime.config.seed,
            batch_size=train.batch_size,
            accumulation=train.accumulation,
        )
        return tuple(tuple(items[i] for i in batch) for batch in plan[index])

    def locate_step(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, from 1, and its index in the epoch, from 0."""
        epoch, index = divmod(step - 1, self.runtime.plan.steps_per_epoch)
        return epoch + 1, index

    async def run(self, step: int, state: RunState, earlier: Sequence[StepRecord]) -> CommitOutcome:
        """Run a step and return its outcome; ``earlier`` are the records of the steps before it.

        Raises:
            Unmeasured: Too little could be measured to decide on the candidate.
        """
        epoch, index = self.locate_step(step)
        skill = await self.runtime.store.skill(state.current.skill_hash)
        source = self._choose_source(step, earlier)
        work = build_step_input(
            self.runtime,
            step=step,
            epoch=epoch,
            skill=skill,
            batches=self.list_batches(step),
            state=state,
            rejected=self._collect_edits(earlier, epoch),
            is_stalled=source.is_stalled,
            max_items=count_step_items(
                await plan_rollouts(self.runtime, earlier), self.runtime.config.reflect.minibatch_size
            ),
        )
        proposed = await propose(source.name, work, self.runtime, self.scheduler, self.timer)
        if (refused := describe_refused(proposed.reports)) is not None:
            warning = events.WarningIssued(run_id=self.runtime.run_id, step=step, message=refused)
            await self.scheduler.on_event(warning)
        async with self.timer.stage("evaluate", step=step):
            judged = await self._judge(proposed, skill, state, step, earlier)
        verdict, candidate, rollouts = judged.verdict, judged.candidate, proposed.rollouts
        kept = candidate.skill
        if not verdict.accepted:
            kept = await self.runtime.store.skill(find_current(state, verdict).skill_hash)
        notes = read_notes(skill.text) if verdict.action == "return" else ()
        appended = await self._update_appendix(work.context, kept, proposed.reports, earlier=notes)
        created = create_versions(state, step, candidate, verdict, appended.skill)
        patch = Patch(edits=tuple(result.edit for result in candidate.results))
        threshold = self.runtime.config.train.success_threshold
        record = StepRecord(
            step=step,
            epoch=epoch,
            step_in_epoch=index + 1,
            skill_before=skill.hash,
            item_ids=tuple(r.item_id for r in rollouts),
            rollout=build_measurement(skill.hash, Split.train, rollouts),
            batches=_measure_batches(work.batches, skill, rollouts),
            n_failures=sum(is_failure(r, threshold) for r in rollouts),
            reports=proposed.reports,
            merged=proposed.merged or AggregateResult(patch=patch, fallbacks=proposed.fallbacks),
            chosen=proposed.chosen or SelectResult(patch=patch, pool_size=len(proposed.contenders)),
            edits=candidate.results,
            rewrite_summary=candidate.summary,
            candidate_hash=candidate.skill.hash,
            verdict=verdict,
            created_versions=created,
            notes=appended.notes,
            current=created[-1] if created else find_current(state, verdict),
            best=created[0] if replaces_best(verdict, state.best) else state.best,
            fallbacks=(*candidate.fallbacks, *appended.fallbacks),
            source=source.name,
            rewrites=proposed.rewrites,
            race=judged.race,
            n_rollouts=count_new_rollouts(
                rollouts, judged.race, verdict, candidate.skill.hash, current=skill.hash, earlier=earlier
            ),
            n_tokens=work.context.asked.tokens,
            barred=proposed.barred,
        )
        if not record.patterns:
            reasons = group_failures(rollouts, threshold)
            record = record.model_copy(update={"fail_reasons": reasons})
        raced = tuple(contender.candidate.skill for contender in proposed.contenders)
        skills = tuple({skill.hash: skill for skill in (*raced, candidate.skill, appended.skill)}.values())
        return CommitOutcome(record=record, skills=skills)

    def _choose_source(self, step: int, earlier: Sequence[StepRecord]) -> SourceChoice:
        barred = [name for record in earlier for name in record.barred]
        sources = list_sources(self.runtime)
        return choose_source(sources, earlier, seed=self.runtime.config.seed, step=step, barred=barred)

    def _decide_without_race(
        self, proposed: StepProposal, current: Skill, state: RunState, earlier: Sequence[StepRecord]
    ) -> JudgedStep | None:
        """Return the decision on a step without a candidate to measure; None if there is one."""
        if proposed.verdict is not None:
            return JudgedStep(verdict=proposed.verdict, candidate=Candidate(skill=current))
        if proposed.merged is None or proposed.chosen is None:
            return None
        candidate = proposed.contenders[0].candidate
        known = name_documents(state, earlier)
        if not self.runtime.config.gate.enabled:  # an earlier document may come back, with its stored score
            vetoed = {record.candidate_hash for record in earlier if record.verdict.veto is not None}
            known = {document: name for document, name in known.items() if document in vetoed}
        verdict = decide_without_evaluation(
            candidate, current, merged=proposed.merged, chosen=proposed.chosen, known=known
        )
        return None if verdict is None else JudgedStep(verdict=verdict, candidate=candidate)

    async def _judge(
        self,
        proposed: StepProposal,
        current: Skill,
        state: RunState,
        step: int,
        earlier: Sequence[StepRecord],
    ) -> JudgedStep:
        """Drop candidates that are known, race the others, and let the gate decide on the one that is left."""
        decided = self._decide_without_race(proposed, current, state, earlier)
        if decided is not None:
            return decided
        if self.runtime.config.search.is_published and self.runtime.plan.proposer is None:
            return await self._ask_gate(proposed.contenders[0].candidate, state, step)
        known = await self._name_forms(state, earlier)
        first = {c.form: c for c in reversed(proposed.contenders)}
        fresh = [c for c in proposed.contenders if c.form not in known and first[c.form] is c]
        if not fresh:
            name = known[proposed.contenders[0].form]
            reason = (
                f"Every candidate says the same as a document that is known ({name}), so none was measured."
            )
            verdict = Verdict(action="no_change", reason=reason, repeats=name)
            return JudgedStep(verdict=verdict, candidate=proposed.contenders[0].candidate)
        if not self.runtime.config.gate.enabled:
            return await self._ask_gate(fresh[0].candidate, state, step)
        n = len(self.runtime.plan.data.val)
        left = _count_passes_left(self.runtime.plan, await plan_rollouts(self.runtime, earlier), earlier)
        passes = left - len(proposed.rollouts) / n
        fresh = list(limit_contenders(fresh, plan_slices(n, passes), passes * n))
        race = await self.gate_keeper.race(fresh, current, state, step=step, passes=passes)
        if race.winner is None:
            verdict, best = build_race_verdict(race.entries)
            return JudgedStep(verdict=verdict, candidate=fresh[best].candidate, race=race.entries)
        judged = await self._ask_gate(fresh[race.winner].candidate, state, step)
        return judged.model_copy(update={"race": race.entries})

    async def _ask_gate(self, candidate: Candidate, state: RunState, step: int) -> JudgedStep:
        verdict = await self.gate_keeper.judge(
            candidate.skill, state, step=step, part="step", subject=f"step {step} is unmeasured"
        )
        return JudgedStep(verdict=verdict, candidate=candidate)

    async def _name_forms(self, state: RunState, earlier: Sequence[StepRecord]) -> dict[str, str]:
        """Return where each document that is not judged again is from, by the digest of its form.

        These are all that the run has measured; without a gate only the current one.
        """
        if not self.runtime.config.gate.enabled:
            current = await self.runtime.store.skill(state.current.skill_hash)
            return {digest_form(current.text): f"v{state.current.number}"}
        names = {entry.form: f"in step {record.step}" for record in earlier for entry in record.race}
        for version in state.kept:
            skill = await self.runtime.store.skill(version.skill_hash)
            names[digest_form(skill.text)] = f"v{version.number}"
        return names

    def _collect_edits(self, earlier: Sequence[StepRecord], epoch: int) -> tuple[RejectedEdit, ...]:
        """Return the rejected edits of other runs and of the epochs before this one."""
        if epoch not in self._collected_edits:
            first, known = self._collected_edits.popitem() if self._collected_edits else (0, ())
            new = [record for record in earlier if first <= record.epoch < epoch]
            self._collected_edits[epoch] = collect_rejected_edits(new, known=known)
        return deduplicate_edits((*self.pinned_edits, *self._collected_edits[epoch]))

    async def _update_appendix(
        self, context: StageContext, skill: Skill, reports: Sequence[AnalystReport], *, earlier: Sequence[str]
    ) -> AppendixResult:
        if not self.runtime.config.appendix.enabled:
            return AppendixResult(skill=skill)
        async with self.timer.stage("appendix", step=context.step):
            return await update_appendix(
                skill,
                reports,
                context=context,
                threshold=self.runtime.config.appendix.consolidate_threshold,
                earlier=earlier,
            )


def build_step_input(
    runtime: Runtime,
    *,
    step: int,
    epoch: int,
    skill: Skill,
    batches: tuple[tuple[Item, ...], ...],
    state: RunState,
    rejected: tuple[RejectedEdit, ...],
    is_stalled: bool = False,
    max_items: int | None = None,
) -> StepInput:
    """Return what a step begins with; ``rejected`` are the edits of other runs and earlier epochs that did not help."""
    reflect, sizes = runtime.config.reflect, runtime.config.select
    most = None
    if sizes.lr_control != "none":
        most = edit_budget(
            step,
            runtime.plan.total_steps,
            scheduler=sizes.scheduler,
            max_edits=sizes.max_edits,
            floor=sizes.floor,
        )
    return StepInput(
        context=runtime.make_context(step),
        skill=skill,
        batches=batches,
        attempts=state.step_buffer if reflect.step_buffer and state.epoch == epoch else (),
        rejected_edits=() if reflect.memory == "off" else rejected,
        meta_skill=state.meta_skill,
        max_edits=most,
        examples=state.current.examples,
        is_stalled=is_stalled,
        max_items=max_items,
    )


async def plan_rollouts(runtime: Runtime, earlier: Sequence[StepRecord]) -> float:
    """Return how many rollouts the run pays for: ``train.max_rollouts``, or else what the limits of ``budget`` allow.

    For a limit, the mean cost of the rollouts so far counts. The result is logged before it is used, under the limits, so
    that a resumed run plans with the same number until somebody changes a limit.
    """
    config, log = runtime.config, runtime.decision_log
    if config.train.max_rollouts is not None or config.search.is_published:
        return config.train.max_rollouts or math.inf
    limits = config.budget
    if limits.max_usd is None and limits.max_tokens is None and limits.max_calls is None:
        return math.inf
    label = f"planned_rollouts/{limits.max_usd}/{limits.max_tokens}/{limits.max_calls}"
    logged = await log.get(0, label)
    if logged is not None:
        return float(str(logged))
    spent = [entry.usage for entry in await runtime.store.spend(runtime.run_id) if entry.role == "target"]
    done = config.baseline_passes * len(runtime.plan.data.val) + sum(r.n_rollouts for r in earlier)
    planned = estimate_rollouts(limits, sum(spent, Usage()), done)
    if planned < math.inf:
        await log.put(0, label, planned)
    return planned


def _count_passes_left(plan: RunPlan, planned: float, earlier: Sequence[StepRecord]) -> float:
    return count_passes_left(
        planned,
        n_items=len(plan.data.val),
        baseline_passes=plan.config.baseline_passes,
        earlier=earlier,
    )


def find_search_end(plan: RunPlan, state: RunState, earlier: Sequence[StepRecord]) -> str | None:
    """Return why the search has nothing to do any more; None if it goes on.

    It ends when the budget of rollouts is used, or when the best document solves all validation items.
    """
    train, n = plan.config.train, len(plan.data.val)
    passes = _count_passes_left(plan, train.max_rollouts or math.inf, earlier)
    if passes * n < plan_slices(n, passes)[0]:
        return f"train.max_rollouts is {train.max_rollouts}, and the rest is too little to measure another candidate"
    if plan.config.search.is_published or state.current.score is None or state.current.inherited:
        return None
    return f"the document solves all {n} validation items" if state.current.score >= 1 else None


def build_race_verdict(entries: Sequence[RaceEntry]) -> tuple[Verdict, int]:
    """Return the verdict of a race that nobody won, and the index of its best candidate.

    It has no scores: those of the race are means on a part of the items, and stay in its entries.
    """
    scores = [-1.0 if entry.score is None else entry.score for entry in entries]
    best = scores.index(max(scores))
    subject = (
        "The candidate does not look" if len(entries) == 1 else f"None of the {len(entries)} candidates looks"
    )
    reason = f"{subject} better than the current document. Best in the race: {entries[best].words}."
    is_refuted = all(e.p_better is not None and e.p_better < REJECT_BELOW for e in entries)
    return Verdict(action="reject" if is_refuted else "set_aside", reason=reason), best


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
