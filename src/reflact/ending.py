"""The end of a run: the last skill against the best, then documents measured side by side."""

from __future__ import annotations

from collections.abc import Sequence

from reflact import events
from reflact.errors import EnvironmentFailure, ModelError, RunFailed, Unmeasured
from reflact.folding import is_better
from reflact.judging import Judge
from reflact.ports import Journal, RunStore
from reflact.records import Promotion, RunState, Undecided
from reflact.results import Improvement, Scored
from reflact.rolling import REPORTED, Emit, Rolls
from reflact.stages.final_test import Contender, improved, placebo, scored
from reflact.types import Frozen, Rollout, Split
from reflact.wiring import Plan


class Measured(Frozen):
    """What the measurements at the end gave; ``missing`` says which could not be had, and why."""

    scores: tuple[Scored, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    missing: tuple[str, ...] = ()


class Ending:
    """Ends runs, for one start.

    Args:
        plan: The run's plan.
        store: Where skills are.
        journal: Where openings of the test split are counted.
        rolls: Rolls skills out.
        judge: Decides whether the last skill takes the place of the best.
        tell: Told of durable events.
    """

    def __init__(
        self, plan: Plan, *, store: RunStore, journal: Journal, rolls: Rolls, judge: Judge, tell: Emit
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._store = store
        self._journal = journal
        self._rolls = rolls
        self._judge = judge
        self._tell = tell
        self.openings = 0

    async def promotion(self, state: RunState) -> tuple[Promotion, Undecided | None] | None:
        """Compare the last skill with the best one, and return with that what stayed inconclusive.

        None where they are the same document.

        Raises:
            Unmeasured: Too little could be measured to decide.
        """
        if state.current.skill_hash == state.best.skill_hash:
            return None
        last = await self._store.skill(state.current.skill_hash)
        against = state.model_copy(update={"current": state.best})
        evaluated, undecided = await self._judge.judge(last, against, step=state.step, part="promotion")
        verdict = evaluated.verdict
        if verdict.action == "unmeasured":
            raise Unmeasured(f"the last skill could not be compared with the best: {verdict.reason}")
        measured = {"score": verdict.candidate_score, "inherited": False}
        current = state.current.model_copy(update=measured)
        best = current if is_better(verdict, state.best) else state.best
        return Promotion(step=state.step, verdict=verdict, current=current, best=best), undecided

    async def measure(self, state: RunState) -> Measured:
        """Measure baseline, placebo, best and last skill on the validation and the test split.

        A failure leaves out what it keeps from being measured, and nothing else.
        """
        documents = await self._documents(state)
        splits = [Split.val]
        if self._config.test.enabled:
            await self.open_test(f"best {state.best.skill_hash}, final {state.current.skill_hash}")
            splits.append(Split.test)
        measured = Measured()
        for split in splits:
            measured = await self._on(split, documents, state, measured)
        return measured

    async def open_test(self, why: str) -> None:
        """Count an opening of the sealed test split, once for each reason."""
        number = 1
        while (noted := await self._journal.recall(0, f"opening/{number}")) not in {None, why}:
            number += 1
        if noted is None:
            await self._journal.note(0, f"opening/{number}", why)
        self.openings = number
        await self._tell(events.TestOpened(run_id=self._plan.run_id, count=number))

    async def _documents(self, state: RunState) -> tuple[Contender, ...]:
        best = await self._store.skill(state.best.skill_hash)
        last = await self._store.skill(state.current.skill_hash)
        documents = [Contender(name="baseline", skill=self._plan.initial)]
        if self._config.test.placebo:
            text = self._plan.prompts.prompts["placebo"].system
            documents.append(Contender(name="placebo", skill=placebo(text, best)))
        return (*documents, Contender(name="best", skill=best), Contender(name="final", skill=last))

    async def _on(
        self, split: Split, documents: Sequence[Contender], state: RunState, so_far: Measured
    ) -> Measured:
        trials = self._trials(split, state)
        rollouts: dict[str, tuple[Rollout, ...]] = {}
        scores, gains, missing = [], [], []
        for document in documents:
            try:
                rolled = [
                    await self._rolls.split(
                        split, document.skill, step=state.step, phase="final", trial=trial
                    )
                    for trial in trials
                ]
            except (ModelError, EnvironmentFailure, RunFailed) as error:
                missing.append(f"{document.name} on {split.value}: {error}")
                break
            rollouts[document.name] = tuple(rollout for trial in rolled for rollout in trial)
            score = scored(document, split, rollouts[document.name], self._plan.data.items(split))
            score = score.model_copy(update={"selected": self._selected(document, split, trials)})
            scores.append(score)
            await self._tell(events.FinalScore(run_id=self._plan.run_id, step=state.step, score=score))
        for name in ("best", "final"):
            if name in rollouts:
                gain = improved(name, split, rollouts["baseline"], rollouts[name])
                if gain is None:
                    continue
                gains.append(gain)
                await self._tell(
                    events.ImprovementMeasured(run_id=self._plan.run_id, step=state.step, improvement=gain)
                )
        return Measured(
            scores=(*so_far.scores, *scores),
            improvements=(*so_far.improvements, *gains),
            missing=(*so_far.missing, *missing),
        )

    def _trials(self, split: Split, state: RunState) -> tuple[int, ...]:
        gate = self._config.gate
        noisy = gate.enabled and gate.policy == "paired" and not state.deterministic
        if split is Split.val and noisy:
            return tuple(range(REPORTED, REPORTED + gate.report_trials))
        return (0,)

    def _selected(self, document: Contender, split: Split, trials: Sequence[int]) -> bool:
        gate = self._config.gate
        chosen = document.name in {"best", "final"} and document.skill.hash != self._plan.initial.hash
        return chosen and split is Split.val and gate.policy == "strict" and trials == (0,)
