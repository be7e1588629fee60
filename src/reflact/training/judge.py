"""The judge of a run's rubric: connected, and measured on marked answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from reflact.adapters import EnvironmentAdapter
from reflact.environments.dataset import DatasetEnvironment
from reflact.environments.rubric import (
    RUBRIC_PROMPT,
    Mark,
    RubricGrader,
    measure_judge,
    read_marks,
)
from reflact.protocols import LLM
from reflact.records import JudgeDescription, JudgeError
from reflact.training.plan import ROLES, RunPlan
from reflact.training.run import Run
from reflact.types import digest_json

ERROR_ADAPTER: TypeAdapter[JudgeError | None] = TypeAdapter(JudgeError | None)


def connect_judge(plan: RunPlan, llm: LLM) -> tuple[RunPlan, RubricGrader]:
    """Return a plan whose environment grades with a model, and the grader."""
    own = plan.environment.own
    assert isinstance(own, DatasetEnvironment)
    assert isinstance(own.grader, RubricGrader)
    grader = own.grader.connect(llm, plan.prompts)
    return replace(plan, environment=EnvironmentAdapter(own.with_grader(grader))), grader


async def check_judge(run: Run) -> None:
    """Measure a run's judge, if it has one, on marked answers, once in a run.

    A judge that is also the target or the optimizer is a warning.

    Raises:
        DataError: The marks cannot be read.
        ProviderError, BudgetSpent: Its endpoint or the run's budget failed.
    """
    grader = run.judge
    if grader is None:
        return
    models = run.config.models
    same = [role for role in ROLES if getattr(models, role).title == models.critic.title]
    if same:
        await run.warn(
            f"the judge of the rubric is also the {' and the '.join(same)}, and models favour "
            "their own answers: name another model with models.critic.model"
        )
    path = run.config.environment.rubric_marks
    marks: Sequence[Mark] = () if path is None else read_marks(path, run.plan.data)

    async def measure() -> JudgeError | None:
        return await measure_judge(grader, marks, limit=models.critic.concurrency)

    digest = digest_json([mark.model_dump(mode="json") for mark in marks])
    error = await run.decision_log.once(0, f"judge_error/{digest[:16]}", measure, ERROR_ADAPTER)
    version = run.plan.prompts.prompts[RUBRIC_PROMPT].header.version
    run.results.judge = JudgeDescription(
        model=models.critic.model,
        prompt=f"{RUBRIC_PROMPT}@{version}",
        votes=grader.votes,
        error=error,
    )
