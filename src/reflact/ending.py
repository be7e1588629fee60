"""The end of a run: the last skill against the best, then documents measured side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reflact import events
from reflact.errors import EnvironmentFailure, ModelError, RunFailed, Unmeasured
from reflact.folding import is_better
from reflact.judging import Judge
from reflact.ports import Emit, Journal, RunStore
from reflact.records import Promotion, RunState, Undecided
from reflact.results import Improvement, Scored
from reflact.rolling import REPORTED, Rolls
from reflact.stages.final_test import Contender, improved, placebo, scored
from reflact.types import Frozen, Rollout, Split
from reflact.wiring import Plan


class Measured(Frozen):
    """What the measurements at the end gave; ``missing`` says which could not be had, and why."""

    scores: tuple[Scored, ...] = ()
    improvements: tuple[Improvement, ...] = ()
    missing: tuple[str, ...] = ()

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            scores=self.scores + other.scores,
            improvements=self.improvements + other.improvements,
            missing=self.missing + other.missing,
        )


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
            shown = ", ".join(f"{document.name} {document.skill.hash}" for document in documents)
            await self.open_test(f"step {state.step}: {shown}")
            splits.append(Split.test)
        measured = Measured()
        for split in splits:
            measured += await self._on(split, documents, state)
        return measured

    async def open_test(self, why: str) -> None:
        """Count an opening of the sealed test split, once for each reason."""
        reasons: list[str] = []
        while (noted := await self._journal.recall(0, f"opening/{len(reasons) + 1}")) is not None:
            reasons.append(str(noted))
        if why not in reasons:
            reasons.append(why)
            await self._journal.note(0, f"opening/{len(reasons)}", why)
        self.openings = len(reasons)
        await self._tell(events.TestOpened(run_id=self._plan.run_id, count=reasons.index(why) + 1))

    async def _documents(self, state: RunState) -> tuple[Contender, ...]:
        best = await self._store.skill(state.best.skill_hash)
        last = await self._store.skill(state.current.skill_hash)
        documents = [Contender(name="baseline", skill=self._plan.initial)]
        if self._config.test.placebo:
            text = self._plan.prompts.prompts["placebo"].system
            documents.append(Contender(name="placebo", skill=placebo(text, best)))
        return (*documents, Contender(name="best", skill=best), Contender(name="final", skill=last))

    async def _on(self, split: Split, documents: Sequence[Contender], state: RunState) -> Measured:
        rollouts: dict[str, tuple[Rollout, ...]] = {}
        measured = Measured()
        for document in documents:
            try:
                rolled = await self._rolled(split, document, state)
            except (ModelError, EnvironmentFailure, RunFailed) as error:
                measured += Measured(missing=(f"{document.name} on {split.value}: {error}",))
                continue
            rollouts[document.name] = rolled
            score = scored(document, split, rolled, self._plan.data.items(split))
            score = score.model_copy(update={"selected": self._selected(document, split)})
            measured += Measured(scores=(score,))
            await self._tell(events.FinalScore(run_id=self._plan.run_id, step=state.step, score=score))
        return measured + await self._gains(split, rollouts, state)

    async def _rolled(self, split: Split, document: Contender, state: RunState) -> tuple[Rollout, ...]:
        trials = [
            await self._rolls.split(split, document.skill, step=state.step, phase="final", trial=trial)
            for trial in self._trials(split, state)
        ]
        return tuple(rollout for trial in trials for rollout in trial)

    async def _gains(
        self, split: Split, rollouts: Mapping[str, Sequence[Rollout]], state: RunState
    ) -> Measured:
        gained = Measured()
        for name in ("best", "final"):
            if name not in rollouts:
                continue
            gain = improved(name, split, rollouts.get("baseline", ()), rollouts[name])
            if gain is None:
                missed = f"improvement of {name} on {split.value}: the baseline has no score on its items"
                gained += Measured(missing=(missed,))
                continue
            gained += Measured(improvements=(gain,))
            await self._tell(
                events.ImprovementMeasured(run_id=self._plan.run_id, step=state.step, improvement=gain)
            )
        return gained

    def _trials(self, split: Split, state: RunState) -> tuple[int, ...]:
        gate = self._config.gate
        noisy = gate.enabled and gate.policy == "paired" and not state.deterministic
        if split is Split.val and noisy:
            return tuple(range(REPORTED, REPORTED + gate.report_trials))
        return (0,)

    def _selected(self, document: Contender, split: Split) -> bool:
        """Whether the document was chosen by the very trials that are reported."""
        gate, reused = self._config.gate, self._config.train.reuse_rollouts
        if split is not Split.val or not reused or document.skill.hash == self._plan.initial.hash:
            return False
        if not gate.enabled:
            return document.name == "best"
        return gate.policy == "strict" and document.name in {"best", "final"}
