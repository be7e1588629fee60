"""The controls of a run: a placebo document, and null answers before the training and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from reflact import events
from reflact.errors import EnvironmentFailure, ModelError, RunFailed
from reflact.llm.middleware import unwrap_environment
from reflact.records import SkillScore
from reflact.stages.final_test import score_skill
from reflact.stages.null_answers import (
    NullAnswer,
    choose_checked_items,
    describe_high_scores,
    list_null_answers,
)
from reflact.training.rollouts import RolloutScheduler
from reflact.training.setup import Runtime
from reflact.types import Item, Split

UNMEASURABLE = (ModelError, EnvironmentFailure, RunFailed)
"""Errors that leave a final measurement out; all others end the run."""

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
        return list_null_answers(unwrap_environment(plan.environment), plan.data.train)

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
        score = score_skill(answer.name, answer.document, split, rollouts, items)
        return score.model_copy(update={"answer": answer.text})
