"""The frozen agents whose instructions are the skill."""

from __future__ import annotations

from reflact.protocols import Session, Target
from reflact.targets.chat import ChatTarget
from reflact.types import Skill, Turn

__all__ = ["ChatTarget", "Session", "Skill", "Target", "Turn"]
