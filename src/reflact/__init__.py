"""reflact trains skill documents for frozen LLM agents and keeps the evidence.

These names, and those in ``__all__`` of ``reflact.types``, ``stages``, ``config``,
``environments``, ``targets``, ``agents``, ``proposers``, ``calibration``, ``memory``, ``llm``,
``events``, ``errors``, ``reporting``, ``testing`` and ``integrations.*``, are public. All other
modules are private and may change with any release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.critic import Critic
    from reflact.calibration.trace import Trace
    from reflact.concurrency import Stream
    from reflact.config.training import TrainerConfig
    from reflact.errors import ReflactError
    from reflact.events import Event
    from reflact.memory.store import MemoryStore
    from reflact.protocols import LLM, Environment, Session, Target
    from reflact.records import CandidateReview, ItemResult, RunSummary
    from reflact.reporting.history import (
        RunComparison,
        RunHistory,
        compare_runs,
        export_skill,
        read_run,
    )
    from reflact.sweep import SweepSummary, train_many
    from reflact.trainer import Trainer
    from reflact.types import Grade, Item, Rollout, Score, Skill, Split

    __version__: str

__all__ = [
    "LLM",
    "Calibrator",
    "CandidateReview",
    "Critic",
    "Environment",
    "Event",
    "Grade",
    "Item",
    "ItemResult",
    "MemoryStore",
    "ReflactError",
    "Rollout",
    "RunComparison",
    "RunHistory",
    "RunSummary",
    "Score",
    "Session",
    "Skill",
    "Split",
    "Stream",
    "SweepSummary",
    "Target",
    "Trace",
    "Trainer",
    "TrainerConfig",
    "__version__",
    "compare_runs",
    "export_skill",
    "read_run",
    "train_many",
]

_load = load_exports(
    __name__,
    {
        "calibration.calibrator": ("Calibrator",),
        "calibration.critic": ("Critic",),
        "calibration.trace": ("Trace",),
        "concurrency": ("Stream",),
        "config.training": ("TrainerConfig",),
        "errors": ("ReflactError",),
        "events": ("Event",),
        "memory.store": ("MemoryStore",),
        "protocols": ("LLM", "Environment", "Session", "Target"),
        "records": ("CandidateReview", "ItemResult", "RunSummary"),
        "reporting.history": (
            "RunComparison",
            "RunHistory",
            "compare_runs",
            "export_skill",
            "read_run",
        ),
        "sweep": ("SweepSummary", "train_many"),
        "trainer": ("Trainer",),
        "types": ("Grade", "Item", "Rollout", "Score", "Skill", "Split"),
    },
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("reflact")
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
