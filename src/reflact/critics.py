"""The critic of a training run: pinned when the run first starts, whatever is promoted after that."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from pydantic import TypeAdapter

from reflact.calibration.critic import Critic
from reflact.calibration.grading import (
    CriticAnnotator,
    CriticGrader,
    describe_critic,
    measure_critic_on_steps,
)
from reflact.calibration.replay import list_pair_steps
from reflact.critic_config import CriticConfig
from reflact.errors import ConfigError
from reflact.memory import ContrastPair
from reflact.memory_store import MemoryStore
from reflact.ports import LLM, DecisionLog
from reflact.prompts import PromptBook
from reflact.results import CriticAccuracy, CriticDescription
from reflact.store.encoding import parse_stored
from reflact.types import canonical_json

PAIRS_ADAPTER: TypeAdapter[tuple[ContrastPair, ...]] = TypeAdapter(tuple[ContrastPair, ...])

PAIRS_LABEL = "critic_pairs"
ACCURACY_LABEL = "critic_measured"


class RunCritic:
    """What a run asks its critic for, and what it says of it.

    Args:
        critic: The critic, pinned.
        config: What it is asked for.
        journal: Where it stands what it was measured to be worth.
        limit: Steps that are scored at a time where it is measured.
    """

    def __init__(
        self, critic: Critic, config: CriticConfig, *, decision_log: DecisionLog, max_concurrent: int
    ) -> None:
        self._critic = critic
        self._config = config
        self._decision_log = decision_log
        self._max_concurrent = max_concurrent

    @property
    def grader(self) -> CriticGrader:
        """The critic as grader."""
        return CriticGrader(self._critic, pass_threshold=self._config.pass_threshold)

    @property
    def annotator(self) -> CriticAnnotator:
        """The critic beside the failure analyst."""
        return CriticAnnotator(self._critic)

    async def measure_accuracy(self) -> CriticDescription:
        """Return the critic with its accuracy on anchors, which are scored where no earlier start did it.

        Raises:
            ProviderError, BudgetSpent: Its endpoint or the run's budget failed.
            StoreError: The memory cannot be read.
        """
        noted = await self._decision_log.get(0, ACCURACY_LABEL)
        if noted is not None:
            measured = CriticAccuracy.model_validate(noted)
            return describe_critic(self._critic, None).model_copy(update={"accuracy": measured})
        anchors = await _load_anchors(self._config)
        found = describe_critic(self._critic, await measure_critic_on_steps(self._critic, list_pair_steps(anchors), max_concurrent=self._max_concurrent))
        if found.accuracy is not None:
            await self._decision_log.put(0, ACCURACY_LABEL, found.accuracy.model_dump(mode="json"))
        return found


async def pin_critic(
    llm: LLM,
    config: CriticConfig,
    *,
    prompts: PromptBook,
    decision_log: DecisionLog,
    ensure_run: Callable[[], Awaitable[object]],
) -> Critic:
    """Return a run's critic with the pairs that it began with; at the first start, with those promoted now.

    Args:
        llm: The model that scores.
        config: Where its memory is, and how it works.
        prompts: The run's prompts.
        decision_log: Where the pairs are kept, whole, so that the memory is not needed again.
        ensure_run: Makes sure that the run is in its store, where something is about to be noted.

    Raises:
        ConfigError: There is no such memory.
        StoreError: The memory cannot be read, or what was kept.
    """
    critic = Critic(llm, settings=config.settings, prompts=prompts)
    noted = await decision_log.get(0, PAIRS_LABEL)
    if noted is None:
        pairs = await _load_promoted_pairs(llm, config)
        await ensure_run()
        await decision_log.put(0, PAIRS_LABEL, canonical_json(PAIRS_ADAPTER.dump_python(pairs, mode="json")))
        noted = await decision_log.get(0, PAIRS_LABEL)
    return critic.pin_to(
        parse_stored(
            lambda text: PAIRS_ADAPTER.validate_python(json.loads(text)), str(noted), "critic of this run"
        )
    )


async def _load_promoted_pairs(llm: LLM, config: CriticConfig) -> tuple[ContrastPair, ...]:
    if config.memory is None:
        return ()
    if not config.memory.is_file():
        raise ConfigError(
            f"critic.memory: there is no file {config.memory}; null is a critic without examples"
        )
    async with MemoryStore(config.memory) as memory:
        return (await Critic(llm, memory=memory).pin()).pairs or ()


async def _load_anchors(config: CriticConfig) -> tuple[ContrastPair, ...]:
    """Return the anchors to measure on; none where the memory is gone since the run began."""
    if config.memory is None or not config.max_anchors or not config.memory.is_file():
        return ()
    async with MemoryStore(config.memory) as memory:
        return (await memory.anchors())[: config.max_anchors]
