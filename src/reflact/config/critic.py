"""What a critic shows and how it is taken, and the critic of a training run: the section `critic`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from reflact.config.models import CHANGEABLE, ConfigSection


class CriticSettings(ConfigSection):
    """What a critic shows, and how it takes what comes back."""

    n_samples: int = Field(
        1, ge=1, le=25, description="Evaluations of each transition; the median one counts."
    )
    example_tokens: int = Field(
        3000, ge=0, description="Room for all worked examples and the line above them; 0 shows none."
    )
    max_examples: int = Field(8, ge=0, le=100, description="Worked examples at most.")
    state_tokens: int = Field(
        2000,
        ge=32,
        description="Room for each of purpose, state before, action, state after and change; what is longer "
        "is cut, and the cut marked.",
    )
    example_state_tokens: int = Field(300, ge=32, description="The same, for each in a worked example.")
    max_jump: float = Field(
        4.0, ge=0, le=10, description="Largest |delta phi| with confidence taken as it comes."
    )
    max_jump_confidence: float = Field(0.5, ge=0, le=1, description="Most confidence for a larger one.")
    max_unsupported_confidence: float = Field(
        0.2, ge=0, le=1, description="Most confidence without evidence, or with evidence that is not there."
    )
    include_same_transition: bool = Field(
        False, description="Show pairs of the very transition that is scored, under the same purpose."
    )
    cache_size: int = Field(
        1024, ge=0, description="Scores that are kept in memory.", json_schema_extra=CHANGEABLE
    )


class CriticConfig(CriticSettings):
    """The critic of a training run, and what it is asked for."""

    memory: Path | None = Field(
        None,
        description="The memory (a file) whose promoted pairs are its worked examples, as they are when the "
        "run first starts; null: none. The file may move; with and without one are two runs.",
        json_schema_extra=CHANGEABLE,
    )
    pass_threshold: float = Field(
        8.0, gt=0, le=10, description="The least phi of an answer that counts as solved, where it grades."
    )
    annotate: bool = Field(
        False, description="Show failure analysts what it makes of each reply of a failed trajectory."
    )
    max_anchors: int = Field(
        50,
        ge=0,
        description="Anchors of the memory that it scores before the run, at most, so that the summary says "
        "what its opinion is worth; 0: none.",
        json_schema_extra=CHANGEABLE,
    )

    @property
    def settings(self) -> CriticSettings:
        """What a critic shows and how it is taken, by itself."""
        return CriticSettings.model_validate(self.model_dump(include=set(CriticSettings.model_fields)))
