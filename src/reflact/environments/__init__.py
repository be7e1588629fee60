"""Environments: the source of tasks, and graders of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.data import DataSet
from reflact.lazy import load_exports
from reflact.protocols import Environment, Session
from reflact.types import Grade, Item, Score, Split

if TYPE_CHECKING:
    from reflact.environments.dataset import DatasetEnvironment
    from reflact.environments.graders import (
        CheckedGrader,
        ExactGrader,
        Grader,
        JsonFieldsGrader,
        NormalizedGrader,
        NumericGrader,
        ReferenceGrader,
        RegexGrader,
        TokenF1Grader,
    )
    from reflact.environments.python_grader import PythonGrader
    from reflact.environments.simulators import CallBatcher, SimulatorEnvironment
    from reflact.environments.sql_grader import SQLGrader, read_tables

__all__ = [
    "CallBatcher",
    "CheckedGrader",
    "DataSet",
    "DatasetEnvironment",
    "Environment",
    "ExactGrader",
    "Grade",
    "Grader",
    "Item",
    "JsonFieldsGrader",
    "NormalizedGrader",
    "NumericGrader",
    "PythonGrader",
    "ReferenceGrader",
    "RegexGrader",
    "SQLGrader",
    "Score",
    "Session",
    "SimulatorEnvironment",
    "Split",
    "TokenF1Grader",
    "read_tables",
]

__getattr__ = load_exports(
    __name__,
    {
        "environments.dataset": ("DatasetEnvironment",),
        "environments.graders": (
            "CheckedGrader",
            "ExactGrader",
            "Grader",
            "JsonFieldsGrader",
            "NormalizedGrader",
            "NumericGrader",
            "ReferenceGrader",
            "RegexGrader",
            "TokenF1Grader",
        ),
        "environments.python_grader": ("PythonGrader",),
        "environments.simulators": ("CallBatcher", "SimulatorEnvironment"),
        "environments.sql_grader": ("SQLGrader", "read_tables"),
    },
)
