"""The critic of a run: its pinned pairs, its measured accuracy, and what it grades or annotates.

It is imported only by runs with a critic, since the start of a run is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import JsonValue, TypeAdapter

from reflact.adapters import EnvironmentAdapter
from reflact.calibration.critic import Critic
from reflact.calibration.grading import (
    CriticAnnotator,
    CriticGrader,
    describe_critic,
    measure_critic_on_steps,
)
from reflact.calibration.labeled_steps import list_pair_steps
from reflact.config.training import TrainerConfig
from reflact.environments.dataset import DatasetEnvironment
from reflact.errors import ConfigError
from reflact.memory.models import ContrastPair
from reflact.memory.store import MemoryStore
from reflact.prompts import PromptBook
from reflact.protocols import LLM, DecisionLog
from reflact.records import CriticAccuracy, CriticDescription

if TYPE_CHECKING:
    from reflact.store.runs import SQLiteRunStore

PAIRS_ADAPTER: TypeAdapter[tuple[ContrastPair, ...]] = TypeAdapter(tuple[ContrastPair, ...])
ACCURACY_ADAPTER: TypeAdapter[CriticAccuracy | None] = TypeAdapter(CriticAccuracy | None)
PAIRS_LABEL = "critic_pairs"
ACCURACY_LABEL = "critic_accuracy"


async def pin_critic(
    llm: LLM,
    store: SQLiteRunStore,
    *,
    config: TrainerConfig,
    prompts: PromptBook,
    run_id: str,
    identity: Mapping[str, JsonValue],
) -> Critic:
    """Return a run's critic with the pairs that were promoted at the run's first start."""
    decision_log = store.decision_log(run_id)
    critic = Critic(llm, settings=config.critic.settings, prompts=prompts)

    async def read_pairs() -> tuple[ContrastPair, ...]:
        pairs: tuple[ContrastPair, ...] = ()
        path = config.critic.memory
        if path is not None:
            if not path.is_file():
                raise ConfigError(
                    f"critic.memory: there is no file {path}; null is a critic without examples"
                )
            async with MemoryStore(path) as memory:
                pairs = (await Critic(llm, memory=memory).pin()).pairs or ()
        await store.open_run(run_id, identity, config.model_dump(mode="json"), resume=False)
        return pairs

    pairs = await decision_log.once(0, PAIRS_LABEL, read_pairs, PAIRS_ADAPTER)
    return critic.pin_to(pairs)


async def measure_critic(
    critic: Critic, config: TrainerConfig, decision_log: DecisionLog
) -> CriticDescription:
    """Return a run's critic with its accuracy on the memory's anchors, which are scored once in a
    run.

    Raises:
        ProviderError, BudgetSpent: Its endpoint or the run's budget failed.
        StoreError: The memory cannot be read.
    """

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

    accuracy = await decision_log.once(0, ACCURACY_LABEL, measure, ACCURACY_ADAPTER)
    return describe_critic(critic, None).model_copy(update={"accuracy": accuracy})


def grade_with_critic(
    environment: EnvironmentAdapter, critic: Critic, config: TrainerConfig
) -> tuple[EnvironmentAdapter, CriticAnnotator | None]:
    """Return the environment, graded by the run's critic if the configuration says so, and an
    annotator if it asks.
    """
    if config.environment.grader == "critic" and isinstance(environment.own, DatasetEnvironment):
        grader = CriticGrader(critic, pass_threshold=config.critic.pass_threshold)
        environment = EnvironmentAdapter(environment.own.with_grader(grader))
    return environment, CriticAnnotator(critic) if config.critic.annotate else None
