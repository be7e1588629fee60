"""The configuration of ``reflact calibrate``: typed sections with strict keys, like a training run's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from reflact.calibration.curriculum import CurriculumSettings
from reflact.calibration.mistakes import ContrastSettings
from reflact.config.critic import CriticSettings
from reflact.config.models import ConfigSection, ModelConfig
from reflact.config.training import BudgetConfig, PromptsConfig, ReplayConfig

FullQueuePolicy = Literal["block", "drop_oldest", "reject"]

HoldoutBy = Literal["trace", "purpose"]
"""What keeps traces together in one slice."""


class PairSettings(ContrastSettings):
    """How a calibrator makes contrast pairs: judged, and with calls bounded for all traces together."""

    n_judges: int = Field(5, ge=0, description="Blind comparisons of each pair; 0: none, else at least 2.")
    concurrency: int = Field(
        32,
        ge=1,
        description="Of one trace: steps that pairs are made of at a time, and questions that are sent or "
        "wait to be, each at most. More than `calibrator.concurrency`, which says how many are in flight, so "
        "that calls go out while pairs are stored.",
    )


class CalibratorSettings(ConfigSection):
    """How a calibrator works."""

    contrast: PairSettings = Field(default_factory=PairSettings, description="How contrast pairs are made.")
    curriculum: CurriculumSettings = Field(
        default_factory=CurriculumSettings, description="What rounds of contrast pairs ask for."
    )
    queue_size: int = Field(64, ge=1, description="Traces that wait beside an agent at most.")
    full_queue_policy: FullQueuePolicy = Field(
        "drop_oldest",
        description="What happens to a trace when the queue is full: `drop_oldest` drops the one that waits "
        "longest, `reject` the new one; `block` lets `submit_and_wait` wait and rejects what is submitted.",
    )
    holdout_folds: int = Field(
        4,
        ge=2,
        description="Traces are sorted into so many slices, by a hash. One of them is held out: it tests and "
        "is never learned from.",
    )
    holdout_by: HoldoutBy | None = Field(
        None,
        description="What a trace's slice follows from: its id (`trace`), or its `purpose`, so that all "
        "traces of a purpose are on one side; null: its purpose where there are twice as many as slices.",
    )
    max_held_out_traces: int = Field(100, ge=1, description="Held-out traces that are scored at most.")
    batch_size: int = Field(
        16, ge=1, description="Beside an agent: pairs that have to be there before they are tested together."
    )
    concurrency: int = Field(
        8,
        ge=1,
        description="Questions in flight at most, over all traces: those of critic, writer and judges "
        "together. Also how many traces are worked on at a time. The endpoint has its own limit beside it, "
        "`models.critic.concurrency`.",
    )


DEFAULT_CALIBRATOR_SETTINGS = CalibratorSettings()


class CriticModels(ConfigSection):
    """The model that scores, writes mistakes and compares."""

    critic: ModelConfig = Field(default_factory=ModelConfig, description="The critic's model.")


class CalibrateConfig(ConfigSection):
    """A complete configuration of ``reflact calibrate``."""

    memory: Path = Field(Path("memory.db"), description="The file of cards, traces and tests.")
    store: Path | None = Field(
        None, description="The file of model calls that were paid for; null: the same as `memory`."
    )
    traces: Path | None = Field(
        None,
        description="A folder of traces (.jsonl), searched to any depth; null: the traces in `memory`.",
    )
    heldout: Path | None = Field(
        None,
        description="A folder of traces to test and measure on; null: a slice of `traces`, by their ids.",
    )
    anchors: Path | None = Field(
        None,
        description="A file of labelled pairs (JSON lines) to keep as anchors before the round: they are "
        "measured and never learned from; null: those that `memory` has.",
    )
    models: CriticModels = Field(default_factory=CriticModels, description="The model.")
    critic: CriticSettings = Field(
        default_factory=CriticSettings, description="The critic that is calibrated."
    )
    calibrator: CalibratorSettings = Field(
        default_factory=CalibratorSettings, description="How pairs are made and tested."
    )
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="What may be taken at most.")
    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="Which prompt files are used.")
    replay: ReplayConfig = Field(
        default_factory=ReplayConfig, description="Recorded responses instead of a live endpoint."
    )


def resolve_paths(config: CalibrateConfig, folder: Path) -> CalibrateConfig:
    """Return a configuration whose inputs count from a folder; ``memory`` and ``store`` stay as they are."""

    def at(path: Path | None) -> Path | None:
        return None if path is None else folder / path.expanduser()

    return config.model_copy(
        update={
            "traces": at(config.traces),
            "heldout": at(config.heldout),
            "anchors": at(config.anchors),
            "prompts": config.prompts.model_copy(update={"folder": at(config.prompts.folder)}),
            "replay": config.replay.model_copy(update={"cassette": at(config.replay.cassette)}),
        }
    )
