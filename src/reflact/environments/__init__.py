"""Environments: the source of tasks, and graders of answers."""

from __future__ import annotations

from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment
from reflact.environments.graders import (
    CheckedGrader,
    ContainsGrader,
    ExactGrader,
    Grader,
    NormalizedGrader,
    NumericGrader,
    ReferenceGrader,
    RegexGrader,
    SimilarityGrader,
    TokenF1Grader,
)
from reflact.environments.json_graders import (
    JsonFieldsGrader,
    JsonSchemaGrader,
    JsonSubsetGrader,
)
from reflact.environments.python_grader import PythonGrader
from reflact.environments.simulators import CallBatcher, SimulatorEnvironment
from reflact.environments.sql_grader import SQLGrader, read_tables
from reflact.protocols import Environment, Session
from reflact.types import Grade, Item, Score, Split

__all__ = [
    "CallBatcher",
    "CheckedGrader",
    "ContainsGrader",
    "DataSet",
    "DatasetEnvironment",
    "Environment",
    "ExactGrader",
    "Grade",
    "Grader",
    "Item",
    "JsonFieldsGrader",
    "JsonSchemaGrader",
    "JsonSubsetGrader",
    "NormalizedGrader",
    "NumericGrader",
    "PythonGrader",
    "ReferenceGrader",
    "RegexGrader",
    "SQLGrader",
    "Score",
    "Session",
    "SimilarityGrader",
    "SimulatorEnvironment",
    "Split",
    "TokenF1Grader",
    "read_tables",
]
