"""The training loop: runs steps and ends of epochs, commits each, and emits events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata

import anyio
from pydantic import TypeAdapter

from reflact import events
from reflact.concurrency import finish_if_cancelled, run_beside
from reflact.config.training import TrainerConfig
from reflact.data import describe_near_copies
from reflact.errors import RunFailed, Unmeasured
from reflact.llm.pricing import BYTES_PER_TOKEN
from reflact.messages import NO_REPORTS, NO_VALID_REPLY, CallId, Message, RenderedPrompt, Text
from reflact.protocols import Approver, EventCallback, ProbedTarget
from reflact.records import (
    CommitRecord,
    CriticDescription,
    RunState,
    RunStatus,
    RunSummary,
    StepRecord,
    sum_step_costs,
)
from reflact.skills.rejected_edits import RejectedEdit, collect_rejected_edits, deduplicate_edits
from reflact.stages.evaluate import build_measurement
from reflact.store import artifacts as exports
from reflact.text import name_count
from reflact.training.cost_estimate import PREFLIGHT
from reflact.training.epoch_end import EpochFinalizer
from reflact.training.final_evaluation import FinalEvaluator, NullAnswerGrader
from reflact.training.gating import CommitOutcome, GateKeeper, add_beliefs, estimate_gate_power
from reflact.training.rollouts import GATE_PHASE, RolloutScheduler
from reflact.training.setup import RunPlan, Runtime
from reflact.training.state import (
    build_commit_events,
    build_first_state,
    find_stop_reason,
    find_unmeasured,
    summarize_history,
    version_hashes,
)
from reflact.training.step import StepRunner, find_search_end
from reflact.training.timing import StageTimer
from reflact.training.trouble import (
    FailureLog,
    advise_on_replies,
    describe_refused,
    describe_unmeasured,
    list_answer_faults,
)
from reflact.types import Skill, Split

TIME_RECORD_SECONDS = 1.0
"""Active time is stored this far in advance; after a kill it is too long by at most this."""

REJECTED_EDITS_ADAPTER: TypeAdapter[tuple[RejectedEdit, ...]] = TypeAdapter(tuple[RejectedEdit, ...])


SKILL_TEST_LABEL = "skill_test"
"""The label of the warning of a test of the skill in the decision log; empty if there is none."""


class Run:
    """One start of a run; ``on_event`` receives all events.

    ``tests_optimizer``: a small call tests the optimizer before the baseline is paid. ``describe`` words the result.
    """

    def __init__(
        self,
        runtime: Runtime,
        on_event: EventCallback,
        approve: Approver | None = None,
        *,
        tests_optimizer: bool = False,
        describe: Callable[[RunSummary], str] | None = None,
    ) -> None:
        plan = runtime.plan
        self._runtime = runtime
        self._plan = plan
        self._config = plan.config
        self._on_event = on_event
        self._tests_optimizer = tests_optimizer
        self._describe = describe
        self._store = runtime.store
        self._decision_log = runtime.decision_log
        self._timer = StageTimer(plan.run_id, on_event, runtime.tracing, runtime.budget.current_stage)
        self._warnings: tuple[str, ...] = ()
        self._stop_reason: str | None = None
        self.id = plan.run_id
        self.state: RunState | None = None
        self._critic: CriticDescription | None = None
        self.failures = FailureLog(plan.run_id, plan.config, runtime.store, on_event, plan.label)
        self.scheduler = RolloutScheduler(runtime, on_event, self.failures)
        self._gate_keeper = GateKeeper(runtime, self.scheduler, approve)
        self._epoch_end = EpochFinalizer(runtime, self.scheduler, self._gate_keeper, self._timer)
        null_answers = NullAnswerGrader(runtime, self.scheduler)
        self.final_evaluator = FinalEvaluator(
            runtime, self.scheduler, self._gate_keeper, null_answers, self._emit
        )

    async def start_or_resume(self, *, resume: bool = True) -> None:
        """Start the run in its store, or read its last committed state."""
        config = self._config.model_dump(mode="json")
        self.state = await self._store.open_run(self.id, self._plan.identity, config, resume=resume)
        await self._store.store_items(self._plan.data)
        seconds = await self._store.add_seconds(self.id, 0.0)
        self._runtime.budget.begin(await self._store.spend(self.id), seconds)

    async def run_to_end(self) -> RunSummary:
        """Measure the baseline, run all remaining steps, evaluate the result, and return the summary.

        Raises:
            BudgetSpent: The budget has no room for a call, or its time is over.
        """
        with anyio.CancelScope(deadline=self._runtime.budget.deadline) as time:
            await run_beside(self._advance, self._keep_time)
        if time.cancelled_caught:
            raise self._runtime.budget.out_of_time()
        return await self.store_summary("completed", self._stop_reason)

    async def record_time(self, *, ahead: float = 0.0) -> None:
        """Store the active time so far, and so many seconds in advance."""
        await self._store.add_seconds(self.id, *self._timer.read_and_reset(ahead=ahead))

    async def _keep_time(self) -> None:
        while True:
            await self.record_time(ahead=TIME_RECORD_SECONDS)
            await anyio.sleep(TIME_RECORD_SECONDS)

    async def _advance(self) -> None:
        await self._emit_start()
        await self.test_skill()
        await self._check_null_answers()
        await self._test_optimizer()
        await self._measure_critic()
        state = self.state or await self._measure_baseline()
        records = list(await self._store.records(self.id))
        await self._emit_last_commit(state, records)
        pinned_edits = await self._load_pinned_edits()
        steps = StepRunner(self._runtime, self.scheduler, self._gate_keeper, self._timer, pinned_edits)
        while state.step < self._plan.total_steps:
            state = await self._retry_once(self._finalize_epoch, state, state.step)
            self._stop_reason = await self._find_stop_reason(state, records)
            if self._stop_reason is not None:
                break
            state = await self._retry_once(
                lambda now: self._run_step(steps, now, records), state, state.step + 1
            )
        require_reports(records, self._config)
        state = await self._retry_once(self._finalize_epoch, state, state.step)
        state = await self._retry_once(self._judge_promotion, state, state.step)
        async with self._timer.stage("final_test", step=state.step, name="final test"):
            await self.final_evaluator.measure(state)

    async def store_summary(self, status: RunStatus, reason: str | None) -> RunSummary:
        """Store and return the summary of this start of the run.

        After a failure, replies of the critic that were all invalid are forgotten; see ``reflact.llm.budget.Account``.
        """
        if status == "failed":
            await self._store.forget_responses(self._runtime.rejected)
        seconds = await self._store.add_seconds(self.id, *self._timer.read_and_reset())
        measured, records = self.final_evaluator.measured, await self._store.records(self.id)
        lost = dict.fromkeys(find_unmeasured(records)) | measured.unmeasured
        losses = (describe_unmeasured(lost), describe_refused([r for each in records for r in each.reports]))
        summary = RunSummary(
            version=metadata.version("reflact"),
            run_id=self.id,
            status=status,
            reason=reason,
            scores=measured.scores,
            improvements=measured.improvements,
            claim=measured.claim,
            missing=measured.missing,
            warnings=(
                *self._warnings,
                *(loss for loss in losses if loss is not None),
                *await list_answer_faults(self._store, self.id, self._config),
            ),
            spend=await self._store.spend(self.id),
            stages=await self._store.stage_times(self.id),
            step_costs=sum_step_costs(await self._store.stage_costs(self.id)),
            faults=await self._store.faults(self.id),
            reuse=self._store.reuse,
            test_openings=self.final_evaluator.openings,
            seconds=seconds,
            config=self._config.model_dump(mode="json"),
            critic=self._describe_critic(self._plan.critic),
            annotated_by=self._describe_critic(self._plan.notes_critic),
        )
        summary = summarize_history(summary, records, await self._store.epochs(self.id), self.state)
        summary = summary.model_copy(update={"added_tokens": await self._count_added_tokens(summary)})
        if self._describe is not None:
            summary = summary.model_copy(update={"verdict": self._describe(summary)})
        await self._store.finish(self.id, status, reason, summary.model_dump_json())
        exports.export_summary(self._runtime.folder, summary)
        return summary

    async def _count_added_tokens(self, summary: RunSummary) -> int:
        """Return about how many tokens the best document adds to each call."""
        if summary.best is None:
            return 0
        best = await self._store.skill(summary.best.skill_hash)
        more = len(best.text.encode()) - len(self._plan.initial_skill.text.encode())
        return round(more / BYTES_PER_TOKEN)

    async def _emit_start(self) -> None:
        data = self._plan.data
        await self._emit(
            events.RunStarted(
                run_id=self.id,
                steps_per_epoch=self._plan.steps_per_epoch,
                n_train=len(data.train),
                n_val=len(data.val),
                n_test=len(data.test),
            )
        )
        await self._emit(estimate_gate_power(self._plan))
        if (warning := describe_near_copies(data)) is not None:
            self._warnings += (warning,)
            await self._emit(events.WarningIssued(run_id=self.id, message=warning))

    async def _check_null_answers(self) -> None:
        """Warn if a constant answer has a high score on train items, before anything is paid."""
        checked = await self.final_evaluator.null_answers.check_train_items()
        if checked is not None:
            self._warnings += () if checked.warning is None else (checked.warning,)
            await self._emit(checked)

    async def test_skill(self) -> None:
        """Find out once in a run whether the skill reaches the agent; on a cluster, the agent may be elsewhere.

        The outcome is logged, so that a resumed run has the same warning.

        Raises:
            EnvironmentFailure: It does not reach the agent.
        """
        target, is_near = self._plan.target, self._config.executor.name != "ray"
        warning = await self._decision_log.get(0, SKILL_TEST_LABEL)
        if warning is None and is_near and isinstance(target, ProbedTarget) and target.preflight:
            plan, config = self._plan, self._config.models.target
            items = plan.data.train or plan.data.val
            warning = await target.test_skill(plan.environment, items, plan.initial_skill, config) or ""
            await self._decision_log.put(0, SKILL_TEST_LABEL, warning)
        if warning:
            self._warnings += (str(warning),)
            await self._on_event(events.WarningIssued(run_id=self.id, message=str(warning)))

    async def _test_optimizer(self) -> None:
        """Find a wrong key, model or address of the optimizer before the baseline is paid; its reply is stored."""
        if self.state is None and self._tests_optimizer:
            message = Message(
                role="user", content="This is a test of the connection. Reply with the word ready."
            )
            prompt = RenderedPrompt(name="preflight", version=1, messages=(message,))
            call_id = CallId(role="optimizer", purpose=PREFLIGHT, step=0)
            await self._runtime.optimizer.ask(prompt, Text, call_id=call_id)

    async def _measure_critic(self) -> None:
        if self._runtime.critic is not None:
            from reflact.training.critic import measure_critic

            step = 0 if self.state is None else self.state.step
            async with self._timer.stage("evaluate", step=step, name="critic"):
                self._critic = await measure_critic(self._runtime.critic, self._config, self._decision_log)

    def _describe_critic(self, used: CriticDescription | None) -> CriticDescription | None:
        own = self._critic
        return own if own is not None and used is not None and used.identity == own.identity else used

    async def _measure_baseline(self) -> RunState:
        """Measure the initial skill, twice if beliefs decide from the start."""
        initial, trials = self._plan.initial_skill, range(self._config.baseline_passes)
        async with self._timer.stage("evaluate", step=0, name="baseline"):
            passes = await self.scheduler.roll_out_trials(
                Split.val, initial, trials, step=0, phase=GATE_PHASE
            )
            await self.scheduler.require_trials(passes, step=0)
        deterministic = self._gate_keeper.presumes_deterministic
        first, ranking = passes[0], self._gate_keeper.start_ranking(initial, passes)
        measured = build_measurement(initial.hash, Split.val, first)
        score = self._gate_keeper.metric.score_measurement(measured)
        if score is None:
            raise RunFailed(
                "the initial skill has no score on the validation split, so nothing can be compared with it; start again "
                "to measure it anew"
            )
        await self._emit(
            events.BaselineMeasured(run_id=self.id, score=score, n=measured.n, trials=len(trials))
        )
        return await self._commit(
            None, build_first_state(initial, score, deterministic=deterministic, ranking=ranking), [initial]
        )

    async def _find_stop_reason(self, state: RunState, records: Sequence[StepRecord]) -> str | None:
        """Return why the training ends before its last step, and emit it; None if it goes on."""
        train = self._config.train
        epochs = () if train.stop_at is None else await self._store.epochs(self.id)  # reading them takes long
        reason = find_stop_reason(train, state, records, epochs) or find_search_end(
            self._plan, state, records
        )
        if reason is not None:
            await self._emit(events.TrainingStopped(run_id=self.id, step=state.step, reason=reason))
        return reason

    async def _run_step(self, steps: StepRunner, state: RunState, records: list[StepRecord]) -> RunState:
        step = state.step + 1
        epoch, _ = steps.locate_step(step)
        ids = tuple(item.id for batch in steps.list_batches(step) for item in batch)
        with self._runtime.tracing.step(step, epoch=epoch):
            await self._emit(events.StepStarted(run_id=self.id, step=step, epoch=epoch, item_ids=ids))
            outcome = add_beliefs(state, await steps.run(step, state, records))
            state = await self._commit_outcome(state, outcome)
        if isinstance(outcome.record, StepRecord):
            records.append(outcome.record)
        return state

    async def _finalize_epoch(self, state: RunState) -> RunState:
        """Run the end of an epoch after its last step; skip it for the first epoch if no other follows."""
        epoch, rest = divmod(state.step, self._plan.steps_per_epoch)
        is_only = epoch == 1 and state.step >= self._plan.total_steps
        if rest or epoch <= state.last_committed_epoch or is_only or not self._epoch_end.is_needed:
            return state
        if not compares_epochs(self._plan, await self._store.records(self.id), epoch):
            return state
        async with self._timer.stage("slow_update", step=state.step, name="epoch end"):
            outcome = add_beliefs(state, await self._epoch_end.finalize(state, epoch=epoch))
        return await self._commit_outcome(state, outcome)

    async def _judge_promotion(self, state: RunState) -> RunState:
        """Compare the last skill with the best one, once for each end of the run."""
        done = await self._store.promotions(self.id)
        if done and done[-1].step == state.step:
            return state
        async with self._timer.stage("evaluate", step=state.step, name="promotion"):
            outcome = await self.final_evaluator.judge_promotion(state)
        return state if outcome is None else await self._commit_outcome(state, outcome)

    async def _retry_once(
        self, work: Callable[[RunState], Awaitable[RunState]], state: RunState, step: int
    ) -> RunState:
        """Do work that changes the state; retry once if too few of its rollouts could be measured."""
        try:
            return await work(state)
        except Unmeasured as error:
            await self._on_event(events.StepRetried(run_id=self.id, step=step, reason=str(error)))
        return await work(state)

    async def _commit_outcome(self, state: RunState, outcome: CommitOutcome) -> RunState:
        return await self._commit(outcome.record, state.after([outcome.record]), outcome.skills)

    async def _commit(
        self, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]
    ) -> RunState:
        await finish_if_cancelled(lambda: self._save(record, state, skills))
        await self._emit_commit(record, state)
        await self._runtime.graceful_stop.stop_after_commit()
        return state

    async def _save(self, record: CommitRecord | None, state: RunState, skills: Sequence[Skill]) -> None:
        await self._store.commit(self.id, record, state, skills)
        self.state = state
        if record is not None:
            await self._export(record, skills)

    async def _export(self, record: CommitRecord, skills: Sequence[Skill]) -> None:
        texts = {skill.hash: skill for skill in skills}
        for version in record.created_versions:
            exports.export_version(self._runtime.folder, version.number, texts[version.skill_hash])
        exports.export_best(self._runtime.folder, await self._store.skill(record.best.skill_hash))

    async def _emit_last_commit(self, state: RunState, records: Sequence[StepRecord]) -> None:
        """Export the versions of earlier starts, and emit the events of their last commit again."""
        epochs = await self._store.epochs(self.id)
        hashes = version_hashes(self._plan.initial_skill, records, epochs)
        exports.remove_versions(self._runtime.folder, beyond=hashes)
        for number, skill_hash in hashes.items():
            exports.export_version(self._runtime.folder, number, await self._store.skill(skill_hash))
        exports.export_best(self._runtime.folder, await self._store.skill(state.best.skill_hash))
        last: list[CommitRecord | None] = [*records[-1:]] or [None]
        last += [e for e in epochs[-1:] if e.step == state.step]
        last += [p for p in (await self._store.promotions(self.id))[-1:] if p.step == state.step]
        for record in last:
            await self._emit_commit(record, state)

    async def _load_pinned_edits(self) -> tuple[RejectedEdit, ...]:
        """Return the rejected edits of other runs as of the first start of this run."""
        if self._config.reflect.memory != "environment":
            return ()
        stored = await self._decision_log.get(0, "pinned_cards")
        if stored is None:
            environment = str(self._plan.identity["environment"])
            others = await self._store.records_of_other_runs(environment, exclude=self.id)
            edits = [
                e for run_id, steps in others.items() for e in collect_rejected_edits(steps, run_id=run_id)
            ]
            stored = REJECTED_EDITS_ADAPTER.dump_python(deduplicate_edits(edits), mode="json")
            await self._decision_log.put(0, "pinned_cards", stored)
        return REJECTED_EDITS_ADAPTER.validate_python(stored)

    async def _emit_commit(self, record: CommitRecord | None, state: RunState) -> None:
        for event in build_commit_events(self.id, record, state):
            await self._emit(event)

    async def _emit(self, event: events.Event) -> None:
        if await self._store.append_event(event):
            await self._on_event(event)


def compares_epochs(plan: RunPlan, records: Sequence[StepRecord], epoch: int) -> bool:
    """Whether the end of an epoch compares its document with that of the epoch before, for guidance and memory.

    They belong to the source of edits: beside other sources, an epoch in which no edit was accepted has nothing to compare.
    """
    if plan.config.search.is_published:
        return True
    edited = [record for record in records if record.source == "edits" and record.verdict.accepted]
    return any(record.epoch == epoch for record in edited)


def require_reports(records: Sequence[StepRecord], config: TrainerConfig) -> None:
    """Check that at least one analyst gave a valid reply, if any was asked and no source gave a candidate.

    Raises:
        RunFailed: None did, so the run could not learn anything.
    """
    reasons = [report.no_reply_reason for record in records for report in record.reports]
    is_measured = any(record.race for record in records)
    if reasons and None not in reasons and not is_measured:
        reason = str(reasons[0])
        advice = f". To mend it, {advise_on_replies('optimizer', config, reason)}" * (
            NO_VALID_REPLY in reason
        )
        raise RunFailed(
            f"{NO_REPORTS} in {name_count(len(records), 'step')}, so nothing could be learned; the first reason: "
            f"{reason}{advice}"
        )
