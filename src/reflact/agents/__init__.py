"""Agents of any framework or language, which ask their model through a gateway of the run."""

from __future__ import annotations

from reflact.agents.agent_process import CommandLimits
from reflact.agents.command import CommandTarget
from reflact.agents.function import AgentRollout, FunctionTarget

__all__ = ["AgentRollout", "CommandLimits", "CommandTarget", "FunctionTarget"]
