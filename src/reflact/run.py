"""The corridor: calls the doors in order, folds the state, commits, tells what happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata

import anyio
from pydantic import TypeAdapter

from reflact import events, exports
from reflact.cards import RejectedEdit, distinct, rejected
from reflact.clock import Clock
from reflact.closing import EpochEnd
from reflact.data import steps_per_epoch
from reflact.ending import Ending, Measured
from reflact.errors import RunFailed, Unmeasured
from reflact.folding import (
    after,
    after_epoch,
    after_promotion,
    epoch_events,
    first_state,
    step_events,
    versions,
)
from reflact.gate import measure
from reflact.halting import Brake
from reflact.judging import Judge
from reflact.ports import Approve, Committed, Emit
from reflact.records import EpochRecord, Promotion, RunState, StepRecord
from reflact.results import CriticUsed, RunSummary, Status
from reflact.rolling import Rolls
from reflact.steps import Steps
from reflact.summing import counted
from reflact.tasks import beside, seen_through
from reflact.types import Skill, Split
from reflact.wiring import House

BEAT_SECONDS = 1.0
"""How far ahead active time is booked: the most by which a kill makes it too long."""

CARDS: TypeAdapter[tuple[RejectedEdit, ...]] = TypeAdapter(tuple[RejectedEdit, ...])


class Run:
    """One start of a run: its state, and the parts of the corridor bound to its collaborators.

    Args:
        house: The collaborators.
        emit: Told of everything that happens.
        approve: Asked about each candidate that the gate would accept.
        brake: Halts the run after a commit, once it is pulled.
    """

    def __init__(
        self, house: House, emit: Emit, approve: Approve | None = None, brake: Brake | None = None
    ) -> None:
        plan, store = house.plan, house.store
        self._house = house
        self._plan = plan
        self._config = plan.config
        self._sink = emit
        self._brake = brake
        self._store = store
        self._journal = store.journal(plan.run_id)
        self._clock = Clock(plan.run_id, emit, house.tracing)
        self._measured = Measured()
        self.id = plan.run_id
        self.state: RunState | None = None
        self._critic: CriticUsed | None = None
        train = self._config.train
        self._per_epoch = steps_per_epoch(len(plan.data.train), train.batch_size, train.accumulation)
        self._total = self._per_epoch * train.num_epochs
        self.rolls = Rolls(house, emit=emit)
        self._judge = Judge(
            plan,
            store=store,
            journal=self._journal,
            rolls=self.rolls,
            approve=approve,
            total=self._total,
            per_epoch=self._per_epoch,
        )
        self._epoch_end = EpochEnd(
            plan,
            store=store,
            journal=self._journal,
            llm=house.optimizer,
            rolls=self.rolls,
            judge=self._judge,
            clock=self._clock,
        )
        self.ending = Ending(
            plan, store=store, journal=self._journal, rolls=self.rolls, judge=self._judge, tell=self._emit
        )

    async def open(self, *, goes_on: bool = True) -> None:
        """Start the run in its store, or find the state that it last committed."""
        plain = self._config.model_dump(mode="json")
        self.state = await self._store.open_run(self.id, self._plan.identity, plain, goes_on=goes_on)
        seconds = await self._store.add_seconds(self.id, 0.0)
        self._house.budget.begin(await self._store.spend(self.id), seconds)

    async def complete(self) -> RunSummary:
        """Measure the baseline, take all steps that are left, measure the end, and sum up.

        Raises:
            BudgetSpent: The budget has no room for a call, or its time is over.
        """
        with anyio.CancelScope(deadline=self._house.budget.deadline) as time:
            await beside(self._advance, self._keep_time)
        if time.cancelled_caught:
            raise self._house.budget.out_of_time()
        return await self.finish("completed", None)

    async def _keep_time(self) -> None:
        while True:
            await self._store.add_seconds(self.id, *self._clock.read(ahead=BEAT_SECONDS))
            await anyio.sleep(BEAT_SECONDS)

    async def _advance(self) -> None:
        await self._announce()
        await self._appraise()
        state = self.state or await self._baseline()
        records = list(await self._store.records(self.id))
        await self._tell_again(state, records)
        steps = Steps(
            self._house,
            rolls=self.rolls,
            judge=self._judge,
            clock=self._clock,
            pinned=await self._pinned(),
            total=self._total,
            per_epoch=self._per_epoch,
        )
        while state.step < self._total:
            state = await self._twice(self._close_epoch, state, state.step)
            state = await self._twice(lambda now: self._step(steps, now, records), state, state.step + 1)
        state = await self._twice(self._close_epoch, state, state.step)
        state = await self._twice(self._promote, state, state.step)
        async with self._clock.stage("final_test", step=state.step, name="final test"):
            self._measured = await self.ending.measure(state)

    async def finish(self, status: Status, reason: str | None) -> RunSummary:
        """Store and return the summary of this start of the run."""
        seconds = await self._store.add_seconds(self.id, *self._clock.read())
        summary = RunSummary(
            version=metadata.version("reflact"),
            run_id=self.id,
            status=status,
            reason=reason,
            scores=self._measured.scores,
            improvements=self._measured.improvements,
            missing=self._measured.missing,
            spend=await self._store.spend(self.id),
            stages=await self._store.stage_times(self.id),
            faults=await self._store.faults(self.id),
            reused=self._store.reused,
            surplus=self.rolls.surplus,
            test_openings=self.ending.openings,
            seconds=seconds,
            config=self._config.model_dump(mode="json"),
            critic=self._measured_critic(self._plan.critic),
            noted_by=self._measured_critic(self._plan.noted_by),
        )
        summary = counted(
            summary, await self._store.records(self.id), await self._store.epochs(self.id), self.state
        )
        await self._store.finish(self.id, status, reason, summary.model_dump_json())
        exports.export_summary(self._config.out_dir, summary)
        return summary

    async def _announce(self) -> None:
        sizes = {split: len(self._plan.data.items(split)) for split in Split}
        await self._emit(
            events.RunStarted(
                run_id=self.id,
                steps_per_epoch=self._per_epoch,
                n_train=sizes[Split.train],
                n_val=sizes[Split.val],
                n_test=sizes[Split.test],
            )
        )
        await self._emit(events.Outlook(run_id=self.id, **self._judge.outlook(self.state).model_dump()))

    async def _appraise(self) -> None:
        """Learn what the scores of the run's own critic are worth, where it has one."""
        if self._house.critic is not None:
            step = 0 if self.state is None else self.state.step
            async with self._clock.stage("evaluate", step=step, name="critic"):
                self._critic = await self._house.critic.appraise()

    def _measured_critic(self, used: CriticUsed | None) -> CriticUsed | None:
        own = self._critic
        return own if own is not None and used is not None and used.identity == own.identity else used

    async def _baseline(self) -> RunState:
        """Measure the initial skill, twice where the gate has to find out whether repeats agree."""
        initial = self._plan.initial
        async with self._clock.stage("evaluate", step=0, name="baseline"):
            first = await self.rolls.split(Split.val, initial, step=0, phase="baseline")
            deterministic = self._judge.presumed
            if self._judge.learns:
                second = await self.rolls.split(Split.val, initial, step=0, phase="baseline", trial=1)
                deterministic = self._judge.agree(first, second)
        measured = measure(initial.hash, Split.val, first)
        mark = self._judge.scale.mean(measured)
        if mark is None:
            raise RunFailed("the initial skill has no score on the validation split")
        await self._emit(events.BaselineMeasured(run_id=self.id, score=mark, n=measured.n))
        return await self._commit(None, first_state(initial, mark, deterministic=deterministic), [initial])

    async def _step(self, steps: Steps, state: RunState, records: list[StepRecord]) -> RunState:
        step = state.step + 1
        epoch, _ = steps.place(step)
        ids = tuple(item.id for batch in steps.batches(step) for item in batch)
        with self._house.tracing.step(step, epoch=epoch):
            await self._emit(events.StepStarted(run_id=self.id, step=step, epoch=epoch, item_ids=ids))
            stepped = await steps.take(step, state, records)
            new = after(state, stepped.record, self._judge.alpha(state, step=step), stepped.undecided)
            await self._commit(stepped.record, new, stepped.skills)
        records.append(stepped.record)
        return new

    async def _close_epoch(self, state: RunState) -> RunState:
        """Close the epoch that the last step ended; the first one only when another follows."""
        epoch, rest = divmod(state.step, self._per_epoch)
        is_last = state.step >= self._total
        if rest or epoch <= state.closed_epoch or not self._epoch_end.needed or (epoch == 1 and is_last):
            return state
        async with self._clock.stage("slow_update", step=state.step, name="epoch end"):
            closed = await self._epoch_end.close(state, epoch=epoch)
        alpha = self._judge.alpha(state, step=state.step)
        new = after_epoch(state, closed.record, alpha, closed.undecided)
        return await self._commit(closed.record, new, closed.skills)

    async def _promote(self, state: RunState) -> RunState:
        """Let the last skill take the place of the best where it wins, once for each end of the run."""
        done = await self._store.promotions(self.id)
        if done and done[-1].step == state.step:
            return state
        async with self._clock.stage("evaluate", step=state.step, name="promotion"):
            promoted = await self.ending.promotion(state)
        if promoted is None:
            return state
        promotion, undecided = promoted
        alpha = self._judge.alpha(state, step=state.step)
        return await self._commit(promotion, after_promotion(state, promotion, alpha, undecided), [])

    async def _twice(
        self, work: Callable[[RunState], Awaitable[RunState]], state: RunState, step: int
    ) -> RunState:
        """Do what changes the state; once more where too little of it could be measured in a step."""
        try:
            return await work(state)
        except Unmeasured as error:
            await self._sink(events.Repeated(run_id=self.id, step=step, reason=str(error)))
        return await work(state)

    async def _commit(self, record: Committed | None, state: RunState, skills: Sequence[Skill]) -> RunState:
        await seen_through(lambda: self._save(record, state, skills))
        await self._tell(record, state)
        if self._brake is not None:
            await self._brake.committed()
        return state

    async def _save(self, record: Committed | None, state: RunState, skills: Sequence[Skill]) -> None:
        await self._store.commit(self.id, record, state, skills)
        self.state = state
        if record is not None:
            await self._export(record, skills)

    async def _export(self, record: Committed, skills: Sequence[Skill]) -> None:
        texts = {skill.hash: skill for skill in skills}
        made = () if isinstance(record, Promotion) else record.made
        for version in made:
            exports.export_version(self._config.out_dir, version.number, texts[version.skill_hash])
        exports.export_best(self._config.out_dir, await self._store.skill(record.best.skill_hash))

    async def _tell_again(self, state: RunState, records: Sequence[StepRecord]) -> None:
        """Export and tell what an earlier start committed and may not have told."""
        epochs = await self._store.epochs(self.id)
        numbered = versions(self._plan.initial, records, epochs)
        exports.drop_versions(self._config.out_dir, beyond=numbered)
        for number, skill_hash in numbered.items():
            exports.export_version(self._config.out_dir, number, await self._store.skill(skill_hash))
        exports.export_best(self._config.out_dir, await self._store.skill(state.best.skill_hash))
        last: list[Committed | None] = [*records[-1:]] or [None]
        last += [e for e in epochs[-1:] if e.step == state.step]
        last += [p for p in (await self._store.promotions(self.id))[-1:] if p.step == state.step]
        for record in last:
            await self._tell(record, state)

    async def _pinned(self) -> tuple[RejectedEdit, ...]:
        """Return other runs' rejected edits, as they were when this run first started."""
        if self._config.reflect.memory != "environment":
            return ()
        noted = await self._journal.recall(0, "pinned_cards")
        if noted is None:
            others = await self._store.histories(str(self._plan.identity["environment"]), but=self.id)
            cards = [card for run_id, steps in others.items() for card in rejected(steps, run_id=run_id)]
            noted = CARDS.dump_python(distinct(cards), mode="json")
            await self._journal.note(0, "pinned_cards", noted)
        return CARDS.validate_python(noted)

    async def _tell(self, record: Committed | None, state: RunState) -> None:
        """Tell what a commit did; without a record it is the first, and the state is the one after it."""
        for event in told(self.id, record, state):
            await self._emit(event)

    async def _emit(self, event: events.Event) -> None:
        if await self._store.append(event):
            await self._sink(event)


def told(run_id: str, record: Committed | None, state: RunState) -> tuple[events.Event, ...]:
    """Return the durable events of a commit; without a record, of the one that began with ``state``."""
    match record:
        case None:
            return (events.SkillMade(run_id=run_id, version=state.current),)
        case StepRecord():
            return step_events(run_id, record)
        case EpochRecord():
            return epoch_events(run_id, record)
        case Promotion():
            return (
                events.Promoted(run_id=run_id, step=record.step, verdict=record.verdict, best=record.best),
            )
