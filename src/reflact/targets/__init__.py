"""The frozen agents whose instructions are the skill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports
from reflact.protocols import Session, Target
from reflact.types import Item, Skill, Turn

if TYPE_CHECKING:
    from reflact.targets.agent_process import CommandLimits
    from reflact.targets.chat import ChatTarget
    from reflact.targets.command import CommandTarget
    from reflact.targets.function import AgentRollout, FunctionTarget
    from reflact.targets.pydantic_ai import PydanticAITarget

__all__ = [
    "AgentRollout",
    "ChatTarget",
    "CommandLimits",
    "CommandTarget",
    "FunctionTarget",
    "Item",
    "PydanticAITarget",
    "Session",
    "Skill",
    "Target",
    "Turn",
]

__getattr__ = load_exports(
    __name__,
    {
        "targets.agent_process": ("CommandLimits",),
        "targets.chat": ("ChatTarget",),
        "targets.command": ("CommandTarget",),
        "targets.function": ("AgentRollout", "FunctionTarget"),
        "targets.pydantic_ai": ("PydanticAITarget",),
    },
)
