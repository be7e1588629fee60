"""The critic of a run: its pinned pairs, its measured accuracy, and what it grades or annotates.

It is imported only by runs with a critic, since the start of a run is waited for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from reflact.adapters import EnvironmentAdapter
from reflact.calibration.critic import Critic
from reflact.calibration.grading import (
    CriticAnnotator,
    CriticGrader,
    describe_critic,
    measure_critic_on_steps,
)
from reflact.calibration.labeled_steps import list_pair_steps
from reflact.environments.dataset import DatasetEnvironment
from reflact.errors import ConfigError
from reflact.memory.models import ContrastPair
from reflact.memory.store import MemoryStore
from reflact.protocols import LLM
from reflact.records import CriticAccuracy, CriticDescription
from reflact.text import suggest_path
from reflact.training.plan import RunPlan

if TYPE_CHECKING:
    from reflact.store.runs import SQLiteRunStore
    from reflact.training.run import Run

PAIRS_ADAPTER: TypeAdapter[tuple[ContrastPair, ...]] = TypeAdapter(tuple[ContrastPair, ...])
ACCURACY_ADAPTER: TypeAdapter[CriticAccuracy | None] = TypeAdapter(CriticAccuracy | None)


async def connect_critic(plan: RunPlan, store: SQLiteRunStore, llm: LLM) -> tuple[RunPlan, Critic]:
    """Return a plan whose environment or annotator is the run's critic, and the critic."""
    config = plan.config
    settings = config.critic

    async def read_pairs() -> tuple[ContrastPair, ...]:
        pairs: tuple[ContrastPair, ...] = ()
        path = settings.memory
        if path is not None:
            if not path.is_file():
                raise ConfigError(
                    f"critic.memory: there is no file {path}; null is a critic without examples"
                    f"{suggest_path(path)}"
                )
            async with MemoryStore(path) as memory:
                pairs = (await Critic(llm, memory=memory).pin()).pairs or ()
        row = config.model_dump(mode="json")
        await store.open_run(plan.run_id, plan.identity, row, resume=False)
        return pairs

    log = store.decision_log(plan.run_id)
    pairs = await log.once(0, "critic_pairs", read_pairs, PAIRS_ADAPTER)
    critic = Critic(llm, settings=settings.settings, prompts=plan.prompts).pin_to(pairs)
    if settings.annotate:
        plan = replace(plan, annotator=CriticAnnotator(critic))
    environment = plan.environment
    if config.environment.grader == "critic" and isinstance(environment.own, DatasetEnvironment):
        grader = CriticGrader(critic, pass_threshold=settings.pass_threshold)
        environment = EnvironmentAdapter(environment.own.with_grader(grader))
    return replace(plan, environment=environment, critic=environment.scored_by), critic


async def measure_critic(run: Run, critic: Critic) -> CriticDescription:
    """Return a run's critic with its accuracy on the memory's anchors, scored once in a run."""
    config = run.config

    async def measure() -> CriticAccuracy | None:
        anchors: tuple[ContrastPair, ...] = ()
        path = config.critic.memory
        most = config.critic.max_anchors
        if path is not None and most and path.is_file():
            async with MemoryStore(path) as memory:
                anchors = (await memory.anchors())[:most]
        measurements = await measure_critic_on_steps(
            critic, list_pair_steps(anchors), max_concurrent=config.models.critic.concurrency
        )
        return describe_critic(critic, measurements).accuracy

    accuracy = await run.decision_log.once(0, "critic_accuracy", measure, ACCURACY_ADAPTER)
    return describe_critic(critic, None).model_copy(update={"accuracy": accuracy})
