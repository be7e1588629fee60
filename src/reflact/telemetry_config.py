"""What a run shows to systems that watch it: the section `telemetry` of a configuration."""

from __future__ import annotations

from pydantic import Field

from reflact.roles import CHANGEABLE, Section


class TelemetryConfig(Section):
    """What spans hold."""

    content: bool = Field(
        False,
        description="Let spans of model calls hold prompts and replies, and failed spans the words of the "
        "error; keys are taken out.",
        json_schema_extra=CHANGEABLE,
    )
