"""Measures documents outside a training, one beside others."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.errors import DataError
from reflact.protocols import EventCallback
from reflact.records import EVALUATION_LABEL, SkillComparison, SkillScore
from reflact.stages.final_test import make_placebo, measure_improvement, score_skill
from reflact.training.gating import build_metric
from reflact.training.rollouts import manage_environment
from reflact.training.run import Run
from reflact.training.setup import Overrides, RunPlan, open_runtime
from reflact.types import Control, Rollout, Skill, Split


async def compare_skill(
    plan: RunPlan,
    overrides: Overrides,
    skill: Skill,
    against: Sequence[Skill | Control],
    split: Split,
    *,
    on_event: EventCallback,
) -> SkillComparison:
    """Measure a document beside others on a split, paired by item; see ``Trainer.compare``."""
    items, metric = plan.data.items(split), build_metric(plan.config)
    if not items:
        raise DataError(
            f"there is no {split.value} split, so no document can be measured on it; choose another split"
        )
    documents = {"skill": skill}
    for number, other in enumerate(against, 1):
        if isinstance(other, Skill):
            documents[f"other_{number}"] = other
        elif other != "null":
            text = plan.prompts.prompts["placebo"].system
            documents[other] = Skill(text="") if other == "none" else make_placebo(text, skill)
    scores: list[SkillScore] = []
    rollouts: dict[str, Sequence[Rollout]] = {}
    async with open_runtime(plan, overrides, on_event) as runtime:
        run = Run(runtime, on_event)
        await run.start_or_resume(resume=False)
        runtime.budget.report_usage()
        with runtime.tracing.run("reflact.eval"):
            async with manage_environment(runtime.plan.environment, run.failures):
                await run.test_skill()
                for name, document in documents.items():
                    if split is Split.test:
                        await run.final_evaluator.open_test_split(f"eval {document.hash}")
                    rolled = await run.scheduler.roll_out_split(split, document, step=0, phase="eval")
                    rollouts[name] = rolled
                    scores.append(score_skill(name, document, split, rolled, items, metric=metric))
                for constant in run.final_evaluator.null_answers.list_all() if "null" in against else ():
                    rolled = await run.scheduler.roll_out_constant(split, items, constant, step=0)
                    rollouts[constant.name] = rolled
                    scores.append(
                        score_skill(constant.name, constant.document, split, rolled, items, metric=metric)
                    )
        label = f"{EVALUATION_LABEL}{split.value}/{skill.hash}/{scores[0].n}"
        await runtime.decision_log.put(0, label, scores[0].model_dump(mode="json"))
    gains = (
        measure_improvement(s.name, split, rollouts[s.name], rollouts["skill"], metric=metric)
        for s in scores[1:]
    )
    return SkillComparison(
        skill=scores[0], others=tuple(scores[1:]), improvements=tuple(g for g in gains if g is not None)
    )
