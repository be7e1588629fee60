"""The frozen agents whose instructions are the skill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.protocols import Session, Target
    from reflact.targets.chat import ChatTarget
    from reflact.types import Skill, Turn

__all__ = ["ChatTarget", "Session", "Skill", "Target", "Turn"]

__getattr__ = load_exports(
    __name__,
    {"protocols": ("Session", "Target"), "targets.chat": ("ChatTarget",), "types": ("Skill", "Turn")},
)
