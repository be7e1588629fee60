"""reflact trains skill documents for frozen LLM agents and keeps the evidence."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.critic import Critic
    from reflact.calibration.trace import Trace
    from reflact.calls import Message, Rendered, Reply, ReplyModel, Sample
    from reflact.config import TrainerConfig
    from reflact.errors import ReflactError
    from reflact.memory_store import MemoryStore
    from reflact.ports import LLM, Environment, Session, Target
    from reflact.results import RunSummary
    from reflact.trainer import Trainer
    from reflact.types import Edit, Graded, Item, Patch, Rollout, Score, Skill, Split

__all__ = [
    "LLM",
    "Calibrator",
    "Critic",
    "Edit",
    "Environment",
    "Graded",
    "Item",
    "MemoryStore",
    "Message",
    "Patch",
    "ReflactError",
    "Rendered",
    "Reply",
    "ReplyModel",
    "Rollout",
    "RunSummary",
    "Sample",
    "Score",
    "Session",
    "Skill",
    "Split",
    "Target",
    "Trace",
    "Trainer",
    "TrainerConfig",
]

_HOMES = {
    "calibration.calibrator": ("Calibrator",),
    "calibration.critic": ("Critic",),
    "calibration.trace": ("Trace",),
    "calls": ("Message", "Rendered", "Reply", "ReplyModel", "Sample"),
    "config": ("TrainerConfig",),
    "errors": ("ReflactError",),
    "memory_store": ("MemoryStore",),
    "ports": ("LLM", "Environment", "Session", "Target"),
    "results": ("RunSummary",),
    "trainer": ("Trainer",),
    "types": ("Edit", "Graded", "Item", "Patch", "Rollout", "Score", "Skill", "Split"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"reflact.{home}"), name)
    raise AttributeError(f"module 'reflact' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
