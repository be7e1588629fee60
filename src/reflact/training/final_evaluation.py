"""The end of a run: comparison of the last skill with the best one, final measurements, and their controls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pydantic import Field, TypeAdapter

from reflact import events
from reflact.concurrency import start_ahead
from reflact.errors import EnvironmentFailure, InterfaceError, ModelError, RunFailed
from reflact.protocols import EventCallback
from reflact.records import Claim, Improvement, PromotionRecord, RunState, SkillScore
from reflact.search.examples import apply_examples, shuffle_answers
from reflact.stages.final_test import judge_claim, make_placebo, measure_improvement, score_skill
from reflact.stages.null_answers import (
    NullAnswer,
    choose_checked_items,
    describe_high_scores,
    list_null_answers,
)
from reflact.training.gating import CommitOutcome, GateKeeper, build_metric
from reflact.training.rollouts import FIRST_REPORT_TRIAL, RolloutScheduler
from reflact.training.setup import Runtime
from reflact.training.state import find_current, replaces_best
from reflact.types import FrozenModel, Item, Rollout, Skill, Split

SCORE_ORDER = (
    "baseline",
    "placebo",
    "shuffled",
    "null_empty",
    "null_refusal",
    "null_frequent",
    "best",
    "final",
)
"""The names of final scores, in the order of reports."""

UNMEASURABLE = (ModelError, EnvironmentFailure, RunFailed)
"""Errors that leave a final measurement out; all others end the run."""

DocumentKey = tuple[Split, str]
"""A split, and the hash of the document that is rolled out on it."""

Trials = tuple[tuple[Rollout, ...], ...]

CHECK_LABEL = "null_answers"

SCORES_ADAPTER: TypeAdapter[tuple[SkillScore, ...]] = TypeAdapter(tuple[SkillScore, ...])


@dataclass
class NullAnswerGrader:
    """Grades constants in place of the target's answers; the environment grades them as always."""

    runtime: Runtime
    scheduler: RolloutScheduler

    def list_answers(self) -> tuple[NullAnswer, ...]:
        """Return the constants of the run; none if its configuration switches them off."""
        return self.list_all() if self.runtime.plan.config.test.null_answers else ()

    def list_all(self) -> tuple[NullAnswer, ...]:
        """Return the constants of the run, also if its configuration switches them off."""
        plan = self.runtime.plan
        return list_null_answers(plan.environment, plan.data.train)

    async def check_train_items(self) -> events.NullAnswersGraded | None:
        """Grade the constants on some train items, once in a run.

        None if there is nothing to say: constants are off or cannot be graded, or a critic grades, which costs calls.
        """
        plan, log = self.runtime.plan, self.runtime.decision_log
        if not plan.config.test.null_answers or plan.critic is not None:
            return None
        stored = await log.get(0, CHECK_LABEL)
        if stored is None:
            items, scores = choose_checked_items(plan.data.train), list[SkillScore]()
            for answer in self.list_answers():
                try:
                    scores.append(await self.grade(answer, Split.train, items, step=0))
                except InterfaceError:
                    raise
                except UNMEASURABLE:
                    continue
            stored = SCORES_ADAPTER.dump_python(tuple(scores), mode="json")
            await log.put(0, CHECK_LABEL, stored)
        graded = SCORES_ADAPTER.validate_python(stored)
        if not graded:
            return None
        return events.NullAnswersGraded(
            run_id=self.runtime.run_id, scores=graded, warning=describe_high_scores(graded)
        )

    async def grade(
        self, answer: NullAnswer, split: Split, items: Sequence[Item], *, step: int
    ) -> SkillScore:
        """Return the score of a constant on items of a split.

        Raises:
            RunFailed: Too few items could be measured.
        """
        rollouts = await self.scheduler.roll_out_constant(split, items, answer, step=step)
        metric = build_metric(self.runtime.config)
        score = score_skill(answer.name, answer.document, split, rollouts, items, metric=metric)
        return score.model_copy(update={"answer": answer.text})


class FinalMeasurements(FrozenModel):
    """The final measurements; ``missing`` names each one that failed, and ``unmeasured`` items, with the reason."""

    scores: tuple[SkillScore, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    claim: Claim | None = None
    missing: tuple[str, ...] = ()
    unmeasured: dict[str, str | None] = Field(default_factory=dict)


@dataclass
class FinalEvaluator:
    """Evaluates the skills at the end of a run.

    ``measured`` is what was measured so far; ``openings`` counts those of the sealed test split.
    """

    runtime: Runtime
    scheduler: RolloutScheduler
    gate_keeper: GateKeeper
    null_answers: NullAnswerGrader
    on_event: EventCallback
    measured: FinalMeasurements = field(default_factory=FinalMeasurements)
    openings: int = 0

    async def judge_promotion(self, state: RunState) -> CommitOutcome | None:
        """Compare the last skill with the best one; None if they are the same document.

        If beliefs choose the best skill, only a last skill without a pass is compared, with the one it was made from.

        Raises:
            Unmeasured: Too little could be measured to decide.
        """
        against = state.best
        if state.ranking is not None and not state.deterministic:
            measured = state.ranking.list_lineage(state.current.skill_hash)[-1]
            against = next(version for version in state.kept if version.skill_hash == measured)
        if state.current.skill_hash == against.skill_hash:
            return None
        last = await self.runtime.store.skill(state.current.skill_hash)
        before = state.model_copy(update={"current": against})
        verdict = await self.gate_keeper.judge(
            last,
            before,
            step=state.step,
            part="promotion",
            subject="the last skill could not be compared with the best",
        )
        update = {"score": verdict.candidate_score, "inherited": False}
        current = state.current.model_copy(update=update)
        if verdict.ranked is not None and not verdict.accepted:
            current = find_current(before, verdict)
        best = current if replaces_best(verdict, state.best) else state.best
        record = PromotionRecord(step=state.step, verdict=verdict, current=current, best=best)
        return CommitOutcome(record=record)

    async def measure(self, state: RunState) -> None:
        """Measure baseline, best and last skill on the validation and the test split, then controls on the last one.

        A failed measurement is recorded in ``missing`` and does not affect the others. ``measured`` has what was
        measured also if an error ends the run. Documents are rolled out together, or one after another if a budget
        may end between them.
        """
        documents, controls = await self._documents(state)
        splits = [Split.val]
        if self.runtime.config.test.enabled:
            shown = [f"{name} {skill.hash}" for name, skill in (documents | controls).items()]
            shown += [answer.name for answer in self.null_answers.list_answers()]
            await self.open_test_split(f"step {state.step}: {', '.join(shown)}")
            splits.append(Split.test)
        planned = self._plan_rollouts(splits, documents, controls, state)
        for (split, _), (name, _) in planned.items():
            await self.scheduler.announce(split, self._trials(split, state), step=state.step, note=name)
        if self.runtime.plan.critic is not None:  # its calls take time
            for answer in self.null_answers.list_answers():
                await self.scheduler.announce(splits[-1], (0,), step=state.step, note=answer.name)
        calls = {key: roll_out for key, (_, roll_out) in planned.items()}
        async with start_ahead(calls, lazily=self.runtime.config.budget.is_limited) as take:
            for split in splits:
                rollouts = await self._measure_documents(split, documents, state, take)
                for name in [name for name in ("best", "final") if name in rollouts]:
                    await self._measure_improvement(name, split, rollouts, state)
            self._judge_claim(splits[-1], rollouts, state)
            await self._grade_null_answers(splits[-1], state)
            await self._measure_documents(splits[-1], controls, state, take)

    def _judge_claim(
        self, split: Split, rollouts: Mapping[str, tuple[Rollout, ...]], state: RunState
    ) -> None:
        if state.best.skill_hash != self.runtime.plan.initial_skill.hash:
            claim = judge_claim(
                split,
                rollouts.get("baseline", ()),
                rollouts.get("best", ()),
                metric=self.gate_keeper.metric,
                on_these_items=split is Split.val and not state.deterministic,
            )
            self.measured = self.measured.model_copy(update={"claim": claim})

    def _plan_rollouts(
        self,
        splits: Sequence[Split],
        documents: Mapping[str, Skill],
        controls: Mapping[str, Skill],
        state: RunState,
    ) -> dict[DocumentKey, tuple[str, Callable[[], Awaitable[Trials]]]]:
        """Return names of documents and the functions that roll these out, in order of importance.

        Equal texts are measured once, under the first of their names.
        """
        wanted = [(split, *named) for split in splits for named in documents.items()]
        wanted += [(splits[-1], *named) for named in controls.items()]
        planned: dict[DocumentKey, tuple[str, Callable[[], Awaitable[Trials]]]] = {}
        for split, name, skill in wanted:
            roll_out = partial(
                self.scheduler.roll_out_trials, split, skill, self._trials(split, state), step=state.step
            )
            planned.setdefault((split, skill.hash), (name, partial(roll_out, phase="final", note=name)))
        return planned

    async def _measure_documents(
        self,
        split: Split,
        documents: Mapping[str, Skill],
        state: RunState,
        take: Callable[[DocumentKey], Awaitable[Trials]],
    ) -> dict[str, tuple[Rollout, ...]]:
        """Measure documents on a split, and return the rollouts of those that could be measured."""
        rollouts: dict[str, tuple[Rollout, ...]] = {}
        for name, skill in documents.items():
            try:
                trials = await take((split, skill.hash))
                await self.scheduler.require_trials(trials, step=state.step)
            except UNMEASURABLE as error:
                self._add_missing(f"{name} on {split.value}: {error}")
                continue
            rollouts[name] = tuple(rollout for trial in trials for rollout in trial)
            lost = {rollout.item_id: rollout.error for rollout in rollouts[name] if rollout.score is None}
            self.measured = self.measured.model_copy(update={"unmeasured": lost | self.measured.unmeasured})
            items, metric = self.runtime.plan.data.items(split), self.gate_keeper.metric
            score = score_skill(name, skill, split, rollouts[name], items, metric=metric)
            is_selected = self._is_selected(name, skill, split, state)
            await self._add_score(score.model_copy(update={"selected_on": is_selected}), state)
        return rollouts

    async def _measure_improvement(
        self, name: str, split: Split, rollouts: Mapping[str, tuple[Rollout, ...]], state: RunState
    ) -> None:
        baseline = rollouts.get("baseline", ())
        gain = measure_improvement(name, split, baseline, rollouts[name], metric=self.gate_keeper.metric)
        if gain is None:
            self._add_missing(
                f"improvement of {name} on {split.value}: the baseline has no score on its items"
            )
            return
        improvements = (*self.measured.improvements, gain)
        self.measured = self.measured.model_copy(update={"improvements": improvements})
        await self.on_event(
            events.ImprovementMeasured(run_id=self.runtime.run_id, step=state.step, improvement=gain)
        )

    async def _grade_null_answers(self, split: Split, state: RunState) -> None:
        items = self.runtime.plan.data.items(split)
        for answer in self.null_answers.list_answers():
            try:
                score = await self.null_answers.grade(answer, split, items, step=state.step)
            except UNMEASURABLE as error:
                self._add_missing(f"{answer.name} on {split.value}: {error}")
                continue
            await self._add_score(score, state)

    async def _add_score(self, score: SkillScore, state: RunState) -> None:
        """Add a score in the order of reports, and emit it."""
        splits = list(Split)
        scores = sorted(
            [*self.measured.scores, score], key=lambda s: (splits.index(s.split), SCORE_ORDER.index(s.name))
        )
        self.measured = self.measured.model_copy(update={"scores": tuple(scores)})
        await self.on_event(
            events.FinalScoreMeasured(run_id=self.runtime.run_id, step=state.step, score=score)
        )

    def _add_missing(self, reason: str) -> None:
        self.measured = self.measured.model_copy(update={"missing": (*self.measured.missing, reason)})

    async def open_test_split(self, reason: str) -> None:
        """Count an opening of the sealed test split; the same reason counts once."""
        reasons, log = list[str](), self.runtime.decision_log
        while (logged := await log.get(0, f"test_opening/{len(reasons) + 1}")) is not None:
            reasons.append(str(logged))
        if reason not in reasons:
            reasons.append(reason)
            await log.put(0, f"test_opening/{len(reasons)}", reason)
        self.openings = len(reasons)
        await self.on_event(
            events.TestSplitOpened(run_id=self.runtime.run_id, count=reasons.index(reason) + 1)
        )

    async def _documents(self, state: RunState) -> tuple[dict[str, Skill], dict[str, Skill]]:
        """Return the documents by name, and those that are controls, if there is a gain to doubt.

        They are a placebo, and the best document with the answers of its worked examples shuffled.
        """
        best = await self.runtime.store.skill(state.best.skill_hash)
        last = await self.runtime.store.skill(state.current.skill_hash)
        documents = {"baseline": self.runtime.plan.initial_skill, "best": best, "final": last}
        if not self.runtime.config.test.placebo or best.hash == self.runtime.plan.initial_skill.hash:
            return documents, {}
        text = self.runtime.plan.prompts.prompts["placebo"].system
        controls = {"placebo": make_placebo(text, best)}
        examples = state.best.examples
        if shuffled := shuffle_answers(examples, self.runtime.config.seed):
            controls["shuffled"] = apply_examples(best, shuffled).skill
        return documents, controls

    def _trials(self, split: Split, state: RunState) -> tuple[int, ...]:
        config = self.runtime.config
        if split is Split.val and config.reports_fresh_trials and not state.deterministic:
            return tuple(range(FIRST_REPORT_TRIAL, FIRST_REPORT_TRIAL + config.gate.report_trials))
        return (0,)

    def _is_selected(self, name: str, skill: Skill, split: Split, state: RunState) -> bool:
        """Whether the reported trials also selected the document."""
        gate, reused = self.runtime.config.gate, self.runtime.config.train.reuse_rollouts
        is_initial = skill.hash == self.runtime.plan.initial_skill.hash
        if split is not Split.val or not reused or is_initial:
            return False
        if not gate.enabled:
            return name == "best"
        is_fresh = FIRST_REPORT_TRIAL in self._trials(split, state)
        return not is_fresh and name in {"best", "final"}
