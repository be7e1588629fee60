"""The frozen agents whose instructions are the skill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports
from reflact.protocols import Session, Target
from reflact.types import Item, Skill, Turn

if TYPE_CHECKING:
    from reflact.agents.agent_process import CommandLimits
    from reflact.agents.command import CommandTarget
    from reflact.agents.function import AgentRollout, FunctionTarget
    from reflact.targets.chat import ChatTarget
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
        "agents.agent_process": ("CommandLimits",),
        "agents.command": ("CommandTarget",),
        "agents.function": ("AgentRollout", "FunctionTarget"),
        "targets.chat": ("ChatTarget",),
        "targets.pydantic_ai": ("PydanticAITarget",),
    },
)
