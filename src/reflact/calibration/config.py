"""The configuration of ``reflact calibrate``: typed sections with strict keys, like a training run's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from reflact.calibration.curriculum import CurriculumSettings
from reflact.calibration.mistakes import JUDGED_PAIRS_HELP, ContrastSettings, JudgedPairs
from reflact.config.critic import CriticSettings
from reflact.config.models import ConfigSection, ModelConfig, option, resolve_path
from reflact.config.training import BudgetConfig, PromptsConfig, ReplayConfig

FullQueuePolicy = Literal["block", "drop_oldest", "reject"]

HoldoutBy = Literal["trace", "purpose"]
"""What keeps traces together in one fold."""


class PairSettings(ContrastSettings):
    """How a calibrator makes contrast pairs."""

    n_judges: int = option(
        5, ge=0, description="Blind comparisons of each judged pair; 0: none, else at least 2."
    )
    judged_pairs: JudgedPairs = option("unproven", description=JUDGED_PAIRS_HELP)
    max_pairs: int | None = option(
        120,
        ge=3,
        description="Maximum number of pairs of a round and of a tested batch. On the right side, progress rises in at most a "
        "third of them, stays in a third and falls in a third. null: no limit, here and in `max_unproven`.",
    )
    max_unproven: int = option(
        8,
        ge=0,
        description="Maximum number of unproven candidates of a round; only these need calls. Raise it if your traces "
        "have no labels.",
    )
    concurrency: int = option(
        32,
        ge=1,
        description="For one trace, the maximum of steps at a time, and of questions that are sent or wait. Keep it "
        "above `calibrator.concurrency`, so that calls continue while pairs are stored.",
    )


class CalibratorSettings(ConfigSection):
    """How a calibrator works."""

    contrast: PairSettings = Field(default_factory=PairSettings, description="How contrast pairs are made.")
    curriculum: CurriculumSettings = Field(
        default_factory=CurriculumSettings, description="Which mistakes the rounds of contrast pairs ask for."
    )
    queue_size: int = option(64, ge=1, description="Beside an agent: maximum number of waiting traces.")
    full_queue_policy: FullQueuePolicy = option(
        "drop_oldest",
        description="If the queue is full: `drop_oldest` drops the oldest trace; `reject` rejects the new one; with "
        "`block`, `submit_and_wait` waits and `submit` rejects.",
    )
    holdout_folds: int = option(
        4,
        ge=2,
        description="Number of folds. A hash assigns each trace to a fold. The traces of one fold are held out: they "
        "only test and measure.",
    )
    holdout_by: HoldoutBy | None = option(
        None,
        description="What is hashed: the trace's id (`trace`), or its `purpose`, so that all traces of a purpose are "
        "in one fold; null: the purpose if there are at least twice as many purposes as folds.",
    )
    max_held_out_traces: int = option(
        100, ge=1, description="Maximum number of held-out traces that are scored."
    )
    batch_size: int = option(
        16, ge=1, description="Beside an agent: number of waiting pairs at which they are tested."
    )
    concurrency: int = option(
        8,
        ge=1,
        description="Maximum of questions in flight, of critic, writer and judges together. It is also the maximum "
        "of traces at a time. `models.critic.concurrency` is the endpoint's own limit.",
    )


DEFAULT_CALIBRATOR_SETTINGS = CalibratorSettings()


class CriticModels(ConfigSection):
    """The model that scores, writes mistakes and compares."""

    critic: ModelConfig = Field(default_factory=ModelConfig, description="The critic's model.")


class CalibrateConfig(ConfigSection):
    """A complete configuration of ``reflact calibrate``."""

    memory: Path = option(Path("memory.db"), description="The file of cards, traces and tests.")
    store: Path | None = option(
        None, description="The file of stored model replies; null: the same as `memory`."
    )
    traces: Path | None = option(
        None,
        description="A folder of traces (.jsonl), with its subfolders; null: the traces in `memory`.",
    )
    heldout: Path | None = option(
        None,
        description="A folder of held-out traces; null: one fold of `traces`, see `calibrator.holdout_folds`.",
    )
    anchors: Path | None = option(
        None,
        description="A file of labelled pairs (JSON lines) that are added to the anchors in `memory`. Anchors only "
        "measure the critic.",
    )
    models: CriticModels = Field(default_factory=CriticModels, description="The model.")
    critic: CriticSettings = Field(
        default_factory=CriticSettings, description="The critic that is calibrated."
    )
    calibrator: CalibratorSettings = Field(
        default_factory=CalibratorSettings, description="How pairs are made and tested."
    )
    budget: BudgetConfig = Field(
        default_factory=BudgetConfig, description="Limits of all starts with this memory."
    )
    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="Which prompt files are used.")
    replay: ReplayConfig = Field(
        default_factory=ReplayConfig, description="Recorded responses instead of a live endpoint."
    )


def resolve_paths(config: CalibrateConfig, folder: Path) -> CalibrateConfig:
    """Return a configuration whose inputs count from a folder; ``memory`` and ``store`` stay as they are."""
    at = partial(resolve_path, folder)
    return config.model_copy(
        update={
            "traces": at(config.traces),
            "heldout": at(config.heldout),
            "anchors": at(config.anchors),
            "prompts": config.prompts.model_copy(update={"folder": at(config.prompts.folder)}),
            "replay": config.replay.model_copy(update={"cassette": at(config.replay.cassette)}),
        }
    )
