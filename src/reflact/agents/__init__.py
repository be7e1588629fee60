"""Agents of any framework or language, which ask their model through a gateway of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.agents.agent_process import CommandLimits
    from reflact.agents.command import CommandTarget
    from reflact.agents.function import AgentRollout, FunctionTarget

__all__ = ["AgentRollout", "CommandLimits", "CommandTarget", "FunctionTarget"]

__getattr__ = load_exports(
    __name__,
    {
        "agents.agent_process": ("CommandLimits",),
        "agents.command": ("CommandTarget",),
        "agents.function": ("AgentRollout", "FunctionTarget"),
    },
)
