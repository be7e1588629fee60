"""The configuration of ``reflact calibrate``: typed sections with strict keys, like a training run's."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from reflact.calibration.settings import CalibratorSettings
from reflact.config import BudgetConfig, PromptsConfig, ReplayConfig
from reflact.critic_config import CriticSettings
from reflact.roles import ModelConfig, Section


class CriticModels(Section):
    """The model that scores, writes mistakes and compares."""

    critic: ModelConfig = Field(default_factory=ModelConfig, description="The critic's model.")


class CalibrateConfig(Section):
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
        description="A file of gold pairs (JSON lines) to keep as anchors before the round: they are "
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


def anchored(config: CalibrateConfig, base: Path) -> CalibrateConfig:
    """Return a configuration whose inputs count from a folder; ``memory`` and ``store`` stay as they are."""

    def at(path: Path | None) -> Path | None:
        return None if path is None else base / path.expanduser()

    return config.model_copy(
        update={
            "traces": at(config.traces),
            "heldout": at(config.heldout),
            "anchors": at(config.anchors),
            "prompts": config.prompts.model_copy(update={"folder": at(config.prompts.folder)}),
            "replay": config.replay.model_copy(update={"cassette": at(config.replay.cassette)}),
        }
    )
