"""reflact trains skill documents for frozen LLM agents and keeps the evidence."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reflact.config import TrainerConfig as TrainerConfig
    from reflact.errors import ReflactError as ReflactError
    from reflact.trainer import Trainer as Trainer

_HOMES = {
    "ReflactError": "errors",
    "RunSummary": "results",
    "TrainerConfig": "config",
    "Trainer": "trainer",
}
_HOMES |= dict.fromkeys(("Edit", "Graded", "Item", "Patch", "Rollout", "Score", "Skill", "Split"), "types")
_HOMES |= dict.fromkeys(("LLM", "Environment", "Session", "Target"), "ports")
_HOMES |= dict.fromkeys(("Message", "Rendered", "Reply", "ReplyModel", "Sample"), "calls")

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'reflact' has no attribute {name!r}")
    return getattr(import_module(f"reflact.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
