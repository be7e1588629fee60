"""The environment that a configuration names: the section `environment`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from reflact.roles import CHANGEABLE, ConfigSection


class EnvironmentConfig(ConfigSection):
    """The environment that runs and grades items."""

    name: Literal["dataset"] = Field(
        "dataset", description="Which environment; `dataset` asks one question an item."
    )
    grader: Literal[
        "exact", "normalized", "token_f1", "numeric", "regex", "json_fields", "sql", "python", "critic"
    ] = Field(
        "normalized",
        description="How an answer is compared with the item's reference; `critic` looks at no reference and "
        "has a section of its own.",
    )
    tolerance: float = Field(0.0, ge=0, description="Absolute tolerance of the `numeric` grader.")
    relative_tolerance: float = Field(1e-6, ge=0, description="Relative tolerance of the `numeric` grader.")
    threshold: float = Field(1.0, gt=0, le=1, description="F1 from which `token_f1` counts as solved.")
    tables: Path | None = Field(
        None,
        description="Folder of .csv tables that the `sql` grader runs queries on.",
        json_schema_extra=CHANGEABLE,
    )
    time_limit: int = Field(
        5,
        ge=1,
        description="Seconds of processor time that an answer may take with the `python` grader; ten times "
        "as long on the clock.",
    )
    memory_limit: int = Field(
        1024, ge=64, description="MiB of memory that an answer may take with the `python` grader."
    )
    allow_unconfined: bool = Field(
        False,
        description="Let the `python` grader run answers even where this system cannot lock them in.",
        json_schema_extra=CHANGEABLE,
    )
    template: str = Field(
        "{input}", description="The message to the target; `{input}` is the only hole.", pattern=r"\{input\}"
    )
