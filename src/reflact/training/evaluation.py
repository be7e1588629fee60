"""Measures documents outside a training, one beside others."""

from __future__ import annotations

from collections.abc import Sequence

from reflact.errors import DataError
from reflact.protocols import EventCallback
from reflact.records import EVALUATION_LABEL, Improvement, SkillComparison, SkillScore
from reflact.stages.final_test import make_placebo, measure_improvement, score_skill
from reflact.training.final_test import open_test_split
from reflact.training.loop import start
from reflact.training.open_run import open_run
from reflact.training.plan import RunPlan
from reflact.training.preflight import check_skill, list_constants
from reflact.training.rollouts import manage_environment, roll_out_constant, roll_out_split
from reflact.types import Control, Rollout, Skill, Split


async def compare_skill(
    plan: RunPlan,
    skill: Skill,
    against: Sequence[Skill | Control],
    split: Split,
    *,
    on_event: EventCallback,
) -> SkillComparison:
    """Measure a document beside others on a split, paired by item; see ``Trainer.compare``."""
    items = plan.data.items(split)
    if not items:
        raise DataError(
            f"there is no {split.value} split, so no document can be measured on it; choose another split"
        )
    documents = {"skill": skill}
    for number, other in enumerate(against, 1):
        if isinstance(other, Skill):
            documents[f"other_{number}"] = other
        elif other == "none":
            documents[other] = Skill(text="")
        elif other == "placebo":
            documents[other] = make_placebo(plan.prompts.prompts["placebo"].system, skill)
    scores: list[SkillScore] = []
    rollouts: dict[str, Sequence[Rollout]] = {}

    def add_score(name: str, document: Skill, rolled: Sequence[Rollout]) -> None:
        rollouts[name] = rolled
        scores.append(score_skill(name, document, split, rolled, items, metric=plan.metric))

    async with open_run(plan, on_event) as run:
        await start(run, resume=False)
        run.budget.report_usage()
        with run.tracing.run("reflact.eval"):
            async with manage_environment(run.plan.environment, run.failures):
                await check_skill(run)
                for name, document in documents.items():
                    if split is Split.test:
                        await open_test_split(run, f"eval {document.hash}")
                    add_score(name, document, await roll_out_split(run, split, document, step=0))
                for constant in list_constants(run) if "null" in against else ():
                    rolled = await roll_out_constant(run, split, items, constant, step=0)
                    add_score(constant.name, constant.document, rolled)
        label = f"{EVALUATION_LABEL}{split.value}/{skill.hash}/{scores[0].n}"
        await run.decision_log.put(0, label, scores[0].model_dump(mode="json"))

    gains: list[Improvement] = []
    for score in scores[1:]:
        gain = measure_improvement(
            score.name, split, rollouts[score.name], rollouts["skill"], metric=plan.metric
        )
        gains += [] if gain is None else [gain]
    return SkillComparison(skill=scores[0], others=tuple(scores[1:]), improvements=tuple(gains))
