"""Models: how they are configured, asked and answered for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.config.models import ModelConfig
    from reflact.config.training import BudgetConfig
    from reflact.llm.cassettes import ReplayTransport, read_cassette
    from reflact.messages import CallId, Message, RenderedPrompt, Reply, ReplyModel, Text
    from reflact.protocols import LLM
    from reflact.records import Usage

__all__ = [
    "LLM",
    "BudgetConfig",
    "CallId",
    "Message",
    "ModelConfig",
    "RenderedPrompt",
    "ReplayTransport",
    "Reply",
    "ReplyModel",
    "Text",
    "Usage",
    "read_cassette",
]

__getattr__ = load_exports(
    __name__,
    {
        "config.models": ("ModelConfig",),
        "config.training": ("BudgetConfig",),
        "llm.cassettes": ("ReplayTransport", "read_cassette"),
        "messages": ("CallId", "Message", "RenderedPrompt", "Reply", "ReplyModel", "Text"),
        "protocols": ("LLM",),
        "records": ("Usage",),
    },
)
