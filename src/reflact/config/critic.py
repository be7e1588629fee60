"""Configuration of critics, and of the critic of a training run (the section `critic`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from reflact.config.models import ConfigSection, changeable_field


class CriticSettings(ConfigSection):
    """The prompt of a critic, and the bounds on its replies."""

    n_samples: int = Field(
        1, ge=1, le=25, description="Evaluations of each transition; the median one counts."
    )
    example_tokens: int = Field(
        3000, ge=0, description="Maximum of tokens of all worked examples and their heading; 0: none."
    )
    max_examples: int = Field(8, ge=0, le=100, description="Maximum number of worked examples.")
    state_tokens: int = Field(
        2000,
        ge=32,
        description="Maximum of tokens of each of purpose, state before, action, state after and change; longer "
        "ones are cut with a mark.",
    )
    example_state_tokens: int = Field(300, ge=32, description="The same for each part of a worked example.")
    max_jump: float = Field(
        4.0, ge=0, le=10, description="Largest change of progress whose confidence is not limited."
    )
    max_jump_confidence: float = Field(0.5, ge=0, le=1, description="Maximum confidence of a larger change.")
    max_unsupported_confidence: float = Field(
        0.2, ge=0, le=1, description="Maximum confidence without evidence, or with quotes that do not occur."
    )
    include_same_transition: bool = Field(
        False, description="Show pairs of the same transition and purpose as the scored one."
    )
    cache_size: int = changeable_field(1024, ge=0, description="Number of scores kept in memory.")


class CriticConfig(CriticSettings):
    """The critic of a training run, and its uses."""

    memory: Path | None = changeable_field(
        None,
        description="File of the memory whose promoted pairs are its worked examples, as of the first start of the "
        "run; null: none. The path may change, but a run with a memory and one without are different runs.",
    )
    pass_threshold: float = Field(
        8.0, gt=0, le=10, description="Minimum progress of a solved answer, if the critic grades."
    )
    annotate: bool = Field(
        False, description="Show failure analysts its scores of each reply of a failed trajectory."
    )
    max_anchors: int = changeable_field(
        50,
        ge=0,
        description="Maximum number of the memory's anchors that it scores before the run; the summary reports "
        "its accuracy on them; 0: none.",
    )

    @property
    def settings(self) -> CriticSettings:
        """The critic's own settings."""
        return CriticSettings.model_validate(self.model_dump(include=set(CriticSettings.model_fields)))
