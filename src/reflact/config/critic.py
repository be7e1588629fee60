"""Configuration of critics, and of the critic of a training run (the section `critic`)."""

from __future__ import annotations

from pathlib import Path

from reflact.config.models import ConfigSection, changeable_field, option


class CriticSettings(ConfigSection):
    """The prompt of a critic, and the bounds on its replies."""

    n_samples: int = option(1, ge=1, le=25)
    """Number of evaluations of each step; their median is used."""

    example_tokens: int = option(3000, ge=0)
    """Maximum of tokens of all worked examples and their heading; 0: none."""

    max_examples: int = option(8, ge=0, le=100)
    """Maximum number of worked examples."""

    state_tokens: int = option(2000, ge=32)
    """Maximum of tokens of each part of the prompt, such as the state before; cuts are marked."""

    example_state_tokens: int = option(300, ge=32)
    """The same for each part of a worked example."""


class CriticConfig(CriticSettings):
    """The critic, whose model is `models.critic`.

    It grades if `environment.grader` is `critic`, and advises failure analysts with `annotate`.
    """

    memory: Path | None = changeable_field(None)
    """File of the memory with the critic's worked examples: the pairs that are promoted when the
    run first starts; null: none. The path may change, but a run with a memory is another run."""

    pass_threshold: float = option(8.0, gt=0, le=10)
    """If the critic grades: the progress from which on an answer counts as solved."""

    annotate: bool = False
    """Show failure analysts its scores of each reply of a failed trajectory."""

    max_anchors: int = changeable_field(50, ge=0)
    """Maximum of the memory's anchors that the critic scores first, to report its accuracy."""

    @property
    def settings(self) -> CriticSettings:
        """The critic's own settings."""
        return CriticSettings.model_validate(
            self.model_dump(include=set(CriticSettings.model_fields))
        )
