"""The configuration of ``reflact calibrate``: typed sections with strict keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from reflact.calibration.asked import KNOWN_MISTAKES, Mistake
from reflact.config.critic import CriticSettings
from reflact.config.models import ConfigSection, ModelConfig, option
from reflact.config.training import BudgetConfig, PromptsConfig, ReplayConfig

FullQueuePolicy = Literal["block", "drop_oldest", "reject"]

# What keeps traces together in one fold.
HoldoutBy = Literal["trace", "purpose"]


class CalibratorSettings(ConfigSection):
    """How a calibrator makes pairs and tests them."""

    min_delta: float = option(0.5, ge=0, le=10)
    """Least change of progress of the steps to learn from; steps without any change count too."""

    pairs_per_step: int = option(4, ge=1)
    """Maximum number of new pairs of each step in a round."""

    max_pairs: int | None = option(120, ge=3)
    """Maximum number of pairs of a round and of a tested batch. On the right side, progress rises
    in at most a third of them, stays in a third and falls in a third. null: no limit."""

    max_asked: int = option(8, ge=0)
    """Maximum number of mistakes that the model is asked to write in a round; each takes up to
    three calls. 0: only pairs that need no model."""

    mistakes: tuple[Mistake, ...] = ()
    """Your own kinds of mistakes, each with a name and a description."""

    max_rounds: int = option(3, ge=1)
    """Maximum number of rounds."""

    holdout_folds: int = option(4, ge=2)
    """Number of folds. A hash assigns each trace to a fold. The traces of one fold are held out:
    they only test and measure."""

    holdout_by: HoldoutBy | None = None
    """What is hashed: the trace's id (`trace`), or its `purpose`, so that all traces of a purpose
    are in one fold; null: the purpose if there are at least twice as many purposes as folds."""

    max_held_out_traces: int = option(100, ge=1)
    """Maximum number of held-out traces that are scored."""

    concurrency: int = option(8, ge=1)
    """Maximum number of questions in flight. `models.critic.concurrency` is the endpoint's own
    limit."""

    batch_size: int = option(16, ge=1)
    """Beside an agent: number of waiting pairs at which they are tested."""

    queue_size: int = option(64, ge=1)
    """Beside an agent: maximum number of waiting traces."""

    full_queue_policy: FullQueuePolicy = "drop_oldest"
    """If the queue is full: `drop_oldest` drops the oldest trace; `reject` rejects the new one;
    with `block`, `submit_and_wait` waits and `submit` rejects."""

    @property
    def all_mistakes(self) -> Mapping[str, Mistake]:
        """The known kinds of mistakes and the user's own, by name."""
        return {mistake.name: mistake for mistake in (*KNOWN_MISTAKES, *self.mistakes)}


DEFAULT_CALIBRATOR_SETTINGS = CalibratorSettings()


class CriticModels(ConfigSection):
    """The model that scores, writes mistakes and compares."""

    critic: ModelConfig = ModelConfig()


class CalibrateConfig(ConfigSection):
    """A complete configuration of ``reflact calibrate``."""

    outputs = frozenset({"memory", "store"})

    memory: Path = Path("memory.db")
    """The file of cards, traces and tests."""

    store: Path | None = None
    """The file of stored model replies; null: the same as `memory`."""

    traces: Path | None = None
    """A folder of traces (.jsonl), with its subfolders; null: the traces in `memory`."""

    heldout: Path | None = None
    """A folder of held-out traces; null: one fold of `traces`, see `calibrator.holdout_folds`."""

    anchors: Path | None = None
    """A file of labelled pairs (JSON lines) that are added to the anchors in `memory`. Anchors only
    measure the critic."""

    models: CriticModels = CriticModels()
    critic: CriticSettings = CriticSettings()
    calibrator: CalibratorSettings = CalibratorSettings()
    budget: BudgetConfig = BudgetConfig()
    prompts: PromptsConfig = PromptsConfig()
    replay: ReplayConfig = ReplayConfig()
