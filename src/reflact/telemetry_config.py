"""What a run shows to systems that watch it: the section `telemetry` of a configuration."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from reflact.roles import CHANGEABLE, ConfigSection


class TelemetryConfig(ConfigSection):
    """What spans hold, and whether MLflow is told of the run."""

    content: bool = Field(
        False,
        description="Let spans of model calls hold prompts and replies, and failed spans the words of the "
        "error; keys are taken out.",
        json_schema_extra=CHANGEABLE,
    )
    mlflow: str | None = Field(
        None,
        min_length=1,
        description="MLflow's tracking address; null: MLflow is told nothing. Needs the extra `mlflow`.",
        json_schema_extra=CHANGEABLE,
    )
    experiment: str = Field(
        "reflact", min_length=1, description="MLflow's experiment.", json_schema_extra=CHANGEABLE
    )

    @field_validator("mlflow")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and "@" in urlsplit(value).netloc:
            raise ValueError(
                "an address is stored with the run, so no name or password stands in it: MLflow reads them "
                "from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return value
