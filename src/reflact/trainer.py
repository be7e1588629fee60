"""The corridor: calls the doors in order, folds the state, commits, tells what happens."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from reflact import events, exports, loading, wiring
from reflact.config import TrainerConfig
from reflact.data import epoch_plan, steps_per_epoch
from reflact.errors import EnvironmentFailure, ModelError, ReflactError, RunFailed
from reflact.folding import after, first_state, record_of, step_events, summarise, versions
from reflact.gate import measure, score
from reflact.ports import LLM, Environment, Target
from reflact.results import RunSummary, Scored, Status
from reflact.schedule import budget
from reflact.stages.aggregate import aggregate
from reflact.stages.evaluate import evaluate
from reflact.stages.final_test import Contender, final_test, placebo
from reflact.stages.reflect import minibatches, reflect
from reflact.stages.rollout import rollout
from reflact.stages.select import select
from reflact.stages.update import update
from reflact.tasks import Stream
from reflact.types import Item, Rollout, RunState, Skill, Split, StepRecord

if TYPE_CHECKING:
    import httpx

Emit = Callable[[events.Event], Awaitable[None]]


class Trainer:
    """Trains a skill document.

    Args:
        config: A ``TrainerConfig``, a mapping, or the path of a YAML or TOML file.
        environment: Used instead of the one that the configuration names.
        target: Used instead of a chat model.
        optimizer: Used instead of the configured model.
        transport: Carries HTTP requests instead of the network.

    Raises:
        UsageError: The configuration, the data, a prompt or the initial skill is wrong.
    """

    def __init__(
        self,
        config: TrainerConfig | Mapping[str, Any] | Path | str,
        *,
        environment: Environment | None = None,
        target: Target | None = None,
        optimizer: LLM | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._passed = wiring.Passed(environment, target, optimizer, transport)
        self._plan = wiring.plan(loading.load(config), self._passed)

    @property
    def run_id(self) -> str:
        """The run's identity: equal for equal configuration, data, prompts and initial skill."""
        return self._plan.run_id

    async def train(self) -> RunSummary:
        """Run to the end, or go on where an earlier start stopped, and return the summary.

        A run that a provider or environment ended has the status ``failed`` and a reason; it can be
        started again. Cancelling ends it within a second and loses nothing that had finished.

        Raises:
            RunConflict: The folder holds another run, or another process works in it.
            CassetteError: A recording is missing, malformed, or lacks a request.
            StoreError: The database cannot be opened, read or written.
        """
        return await self._train(_unheard)

    def stream(self) -> Stream[events.Event]:
        """Run as ``train`` does and iterate over what happens; ``Finished`` comes last.

        ``async with trainer.stream() as happenings`` guarantees clean-up within a second of leaving;
        a bare ``break`` cancels the run as soon as the event loop finalises the iterator.
        """

        async def produce(emit: Emit) -> None:
            await self._train(emit)

        return Stream(produce)

    async def _train(self, emit: Emit) -> RunSummary:
        async with wiring.compose(self._plan, self._passed) as house:
            run = _Run(house, emit)
            try:
                await run.open()
                summary = await run.complete()
            except (ModelError, EnvironmentFailure, RunFailed) as error:
                summary = await run.finish("failed", str(error))
            except ReflactError as error:
                await run.finish("failed", str(error))
                raise
            except anyio.get_cancelled_exc_class():
                with anyio.move_on_after(0.8, shield=True):
                    await run.finish("cancelled", None)
                raise
            await emit(events.Finished(run_id=run.id, step=summary.steps, summary=summary))
            return summary


async def evaluate_skill(
    config: TrainerConfig | Mapping[str, Any] | Path | str,
    skill: Skill,
    split: Split,
    *,
    passed: wiring.Passed | None = None,
    emit: Emit | None = None,
) -> Scored:
    """Measure one document on a split under a configuration; finished rollouts are reused.

    Raises:
        UsageError: The configuration or the data is wrong, or the folder holds another run.
        ModelError, RunFailed: Too few items could be measured.
    """
    given = passed or wiring.Passed()
    planned = wiring.plan(loading.load(config), given)
    async with wiring.compose(planned, given) as house:
        run = _Run(house, emit or _unheard)
        await run.open(goes_on=False)
        if split is Split.test:
            await run.open_test(f"eval {skill.hash}")
        (result,) = await final_test(
            [Contender(name="skill", skill=skill)], split, roll=run.roller(split, step=0)
        )
        return result


class _Run:
    """One start of a run: its state and the collaborators that the doors need."""

    def __init__(self, house: wiring.House, emit: Emit) -> None:
        self._house = house
        self._plan = house.plan
        self._config = house.plan.config
        self._sink = emit
        self._store = house.store
        self._journal = house.store.journal(house.plan.run_id)
        self._started = time.monotonic()
        self._scores: tuple[Scored, ...] = ()
        self._openings = 0
        self.id = house.plan.run_id
        self.state: RunState | None = None
        self._items = {i.id: i for i in house.plan.data.train}
        self._per_epoch = steps_per_epoch(len(self._items), self._config.train.batch_size)
        self._total = self._per_epoch * self._config.train.num_epochs

    async def open(self, *, goes_on: bool = True) -> None:
        """Start the run in its store, or find the state that it last committed."""
        plain = self._config.model_dump(mode="json")
        self.state = await self._store.open_run(self.id, self._plan.identity, plain, goes_on=goes_on)

    async def complete(self) -> RunSummary:
        """Measure the baseline, take all steps that are left, measure the end, and sum up."""
        sizes = {s: len(self._plan.data.items(s)) for s in Split}
        await self._emit(
            events.RunStarted(
                run_id=self.id,
                steps_per_epoch=self._per_epoch,
                n_train=sizes[Split.train],
                n_val=sizes[Split.val],
                n_test=sizes[Split.test],
            )
        )
        state = self.state or await self._baseline()
        records = await self._store.records(self.id)
        await self._export_all(state, records)
        for last in records[-1:]:
            for event in step_events(self.id, last, state):
                await self._emit(event)
        while state.step < self._total:
            state = await self._step(state.step + 1, state)
        await self._measure(state)
        return await self.finish("completed", None)

    async def _baseline(self) -> RunState:
        initial, gate = self._plan.initial, self._config.gate
        measured = measure(initial.hash, Split.val, await self.roller(Split.val, step=0)(initial))
        mark = score(measured, metric=gate.metric, mixed_weight=gate.mixed_weight)
        if mark is None:
            raise RunFailed("the initial skill has no score on the validation split")
        await self._emit(events.BaselineMeasured(run_id=self.id, score=mark, n=measured.n))
        state = first_state(initial, mark)
        await self._store.commit(self.id, None, state, [initial])
        self.state = state
        return state

    async def _step(self, step: int, state: RunState) -> RunState:
        config, prompts, llm = self._config, self._plan.prompts, self._house.optimizer
        epoch, place = (step - 1) // self._per_epoch + 1, (step - 1) % self._per_epoch
        items = self._batch(epoch, place)
        skill = await self._store.skill(state.current.skill_hash)
        ids = tuple(i.id for i in items)
        await self._emit(events.StepStarted(run_id=self.id, step=step, epoch=epoch, item_ids=ids))

        rollouts = await self._roll(items, skill, step=step)
        batches = minibatches(items, rollouts, config.reflect, seed=config.seed, step=step)
        most = self._budget(step)
        reports = await reflect(
            batches,
            skill,
            llm=llm,
            prompts=prompts,
            config=config.reflect,
            max_edits=config.select.max_edits if most is None else most,
            operations=config.update.operations,
            buffer=state.step_buffer if config.reflect.step_buffer and state.epoch == epoch else (),
            step=step,
            report=self._counter("reflect", step, len(batches)),
        )
        merged = await aggregate(
            reports,
            skill,
            llm=llm,
            prompts=prompts,
            config=config.aggregate,
            operations=config.update.operations,
            step=step,
        )
        chosen = await select(merged, skill, budget=most, llm=llm, prompts=prompts, step=step)
        candidate = update(skill, chosen)
        verdict = await evaluate(
            candidate,
            skill,
            merged=merged,
            known=state.seen_hashes,
            best_score=state.best.score,
            roll=self.roller(Split.val, step=step),
            config=config.gate,
        )
        record = record_of(
            state,
            step=step,
            epoch=epoch,
            step_in_epoch=place + 1,
            rollouts=rollouts,
            reports=reports,
            merged=merged,
            chosen=chosen,
            candidate=candidate,
            verdict=verdict,
        )
        return await self._commit(record, after(state, record), candidate.skill)

    async def _commit(self, record: StepRecord, state: RunState, candidate: Skill) -> RunState:
        if record.verdict.action == "unmeasured":
            raise RunFailed(f"step {record.step}: {record.verdict.reason} Start the run again to go on.")
        with anyio.CancelScope(shield=True):
            await self._store.commit(self.id, record, state, [candidate])
            self.state = state
            if record.verdict.accepted:
                self._export(state, candidate)
        for event in step_events(self.id, record, state):
            await self._emit(event)
        return state

    async def _measure(self, state: RunState) -> None:
        best = await self._store.skill(state.best.skill_hash)
        documents = [Contender(name="baseline", skill=self._plan.initial)]
        if self._config.test.placebo:
            text = self._plan.prompts.prompts["placebo"].system
            documents.append(Contender(name="placebo", skill=placebo(text, best)))
        documents.append(Contender(name="best", skill=best))
        documents.append(Contender(name="final", skill=await self._store.skill(state.current.skill_hash)))
        splits = [Split.val]
        if self._config.test.enabled:
            await self.open_test(f"best {state.best.skill_hash}, final {state.current.skill_hash}")
            splits.append(Split.test)
        for split in splits:
            scores = await final_test(documents, split, roll=self.roller(split, step=state.step))
            self._scores += scores
            for result in scores:
                await self._emit(events.FinalScore(run_id=self.id, step=state.step, score=result))

    async def open_test(self, why: str) -> None:
        """Count an opening of the sealed test split, once for each reason."""
        number = 1
        while (noted := await self._journal.recall(0, f"opening/{number}")) not in {None, why}:
            number += 1
        if noted is None:
            await self._journal.note(0, f"opening/{number}", why)
        self._openings = number
        await self._emit(events.TestOpened(run_id=self.id, count=number))

    async def finish(self, status: Status, reason: str | None) -> RunSummary:
        """Store and return the summary of this start of the run."""
        seconds = await self._store.add_seconds(self.id, time.monotonic() - self._started)
        self._started = time.monotonic()
        summary = summarise(
            await self._store.records(self.id),
            self.state,
            run_id=self.id,
            status=status,
            reason=reason,
            scores=self._scores,
            spend=await self._store.spend(self.id),
            openings=self._openings,
            seconds=seconds,
            config=self._config.model_dump(mode="json"),
        )
        await self._store.finish(self.id, status, reason, summary.model_dump_json())
        exports.export_summary(self._config.out_dir, summary)
        return summary

    def roller(self, split: Split, *, step: int) -> Callable[[Skill], Awaitable[tuple[Rollout, ...]]]:
        """Return the function that rolls a skill out on a whole split, for the decisions of a step."""

        async def roll(skill: Skill) -> tuple[Rollout, ...]:
            return await self._roll(self._plan.data.items(split), skill, step=step, split=split)

        return roll

    async def _roll(
        self, items: Sequence[Item], skill: Skill, *, step: int, split: Split = Split.train
    ) -> tuple[Rollout, ...]:
        training = split is Split.train
        stage: events.Stage = "rollout" if training else "final_test" if split is Split.test else "evaluate"
        return await rollout(
            items,
            skill,
            target=self._house.target,
            environment=self._plan.environment,
            store=self._store,
            journal=self._journal,
            step=step,
            feedback=training,
            coverage=0.0 if training else self._config.gate.coverage,
            limit=self._config.train.rollout_concurrency,
            report=self._counter(stage, step, len(items)),
        )

    def _batch(self, epoch: int, place: int) -> tuple[Item, ...]:
        plan = epoch_plan(
            self._items, epoch=epoch, seed=self._config.seed, batch_size=self._config.train.batch_size
        )
        return tuple(self._items[i] for batch in plan[place] for i in batch)

    def _budget(self, step: int) -> int | None:
        sizes = self._config.select
        if sizes.lr_control == "none":
            return None
        return budget(
            step, self._total, scheduler=sizes.scheduler, max_edits=sizes.max_edits, floor=sizes.floor
        )

    def _counter(self, stage: events.Stage, step: int, total: int) -> Callable[[object], Awaitable[None]]:
        done = 0

        async def count(_: object) -> None:
            nonlocal done
            done += 1
            await self._sink(events.Progress(run_id=self.id, step=step, stage=stage, done=done, total=total))

        return count

    async def _export_all(self, state: RunState, records: Sequence[StepRecord]) -> None:
        """Write what an earlier start committed and may not have exported."""
        for number, skill_hash in versions(self._plan.initial, records).items():
            exports.export_version(self._config.out_dir, number, await self._store.skill(skill_hash))
        exports.export_best(self._config.out_dir, await self._store.skill(state.best.skill_hash))

    def _export(self, state: RunState, skill: Skill) -> None:
        exports.export_version(self._config.out_dir, state.current.number, skill)
        if state.best == state.current:
            exports.export_best(self._config.out_dir, skill)

    async def _emit(self, event: events.Event) -> None:
        if await self._store.append(event):
            await self._sink(event)


async def _unheard(event: events.Event) -> None:
    """Take an event and tell nobody."""
