"""reflact trains skill documents for frozen LLM agents and keeps the evidence."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.config import CalibratorSettings
    from reflact.calibration.critic import Critic
    from reflact.calibration.results import CalibrationReport
    from reflact.calibration.trace import Trace
    from reflact.calls import CallId, Message, RenderedPrompt, Reply, ReplyModel
    from reflact.config import BudgetConfig, TrainerConfig
    from reflact.connection import connect
    from reflact.critic_config import CriticSettings
    from reflact.errors import ReflactError
    from reflact.history import RunHistory, read_run
    from reflact.memory import (
        Action,
        ContrastPair,
        Evaluation,
        Label,
        ScoreEvent,
        StateScore,
        Transition,
    )
    from reflact.memory_store import MemoryStore
    from reflact.ports import LLM, Environment, Session, Target
    from reflact.results import RunSummary
    from reflact.roles import ModelConfig
    from reflact.trainer import Trainer
    from reflact.types import Edit, Grade, Item, Patch, Rollout, Score, Skill, Split

    __version__: str

__all__ = [
    "LLM",
    "Action",
    "BudgetConfig",
    "CalibrationReport",
    "Calibrator",
    "CalibratorSettings",
    "CallId",
    "ContrastPair",
    "Critic",
    "CriticSettings",
    "Edit",
    "Environment",
    "Evaluation",
    "Grade",
    "Item",
    "Label",
    "MemoryStore",
    "Message",
    "ModelConfig",
    "Patch",
    "ReflactError",
    "RenderedPrompt",
    "Reply",
    "ReplyModel",
    "Rollout",
    "RunHistory",
    "RunSummary",
    "Score",
    "ScoreEvent",
    "Session",
    "Skill",
    "Split",
    "StateScore",
    "Target",
    "Trace",
    "Trainer",
    "TrainerConfig",
    "Transition",
    "__version__",
    "connect",
    "read_run",
]

_HOMES = {
    "calibration.calibrator": ("Calibrator",),
    "calibration.critic": ("Critic",),
    "calibration.results": ("CalibrationReport",),
    "calibration.config": ("CalibratorSettings",),
    "calibration.trace": ("Trace",),
    "calls": ("Message", "Rendered", "Reply", "ReplyModel", "Sample"),
    "config": ("BudgetConfig", "TrainerConfig"),
    "connection": ("connect",),
    "critic_config": ("CriticSettings",),
    "errors": ("ReflactError",),
    "history": ("RunHistory", "read_run"),
    "memory": ("Action", "ContrastPair", "Evaluation", "Gold", "ScoreEvent", "StateScore", "Transition"),
    "memory_store": ("MemoryStore",),
    "ports": ("LLM", "Environment", "Session", "Target"),
    "results": ("RunSummary",),
    "roles": ("ModelConfig",),
    "trainer": ("Trainer",),
    "types": ("Edit", "Graded", "Item", "Patch", "Rollout", "Score", "Skill", "Split"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("reflact")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"reflact.{home}"), name)
    raise AttributeError(f"module 'reflact' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
