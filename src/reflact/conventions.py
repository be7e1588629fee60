"""Model calls in the words of OpenTelemetry's conventions for generative AI.

They are at https://github.com/open-telemetry/semantic-conventions-genai, and still in development: what is
here follows them as they stood in autumn 2026.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio

from reflact.calls import RenderedPrompt, Reply, Text
from reflact.errors import ReplyError
from reflact.ports import R
from reflact.results import Usage
from reflact.roles import ModelConfig

if TYPE_CHECKING:
    from opentelemetry.trace import Span

AttributeValue = str | bool | int | float
Attributes = dict[str, AttributeValue]

TOKEN_BOUNDS = tuple(4.0**n for n in range(14))
SECOND_BOUNDS = tuple(0.01 * 2**n for n in range(14))
"""The bounds of histograms that the conventions recommend."""


class ModelCallSpan:
    """A model call under way.

    Args:
        span: Its span.
        hide: Frees content of keys; None: no content is taken down.
        seen: Whether it is seen what is sent, and what comes from a store.

    Attributes:
        usage: What its answers that came from elsewhere than a store have consumed so far.
        attempts: Its attempts, where they are known.
        answered: Whether the model had its say, valid or not.
        error: The name of the error that it ended with, if it did.
        cut_off: Whether it was cancelled.
    """

    def __init__(self, span: Span, hide: Callable[[str], str] | None, *, seen: bool) -> None:
        self.usage = Usage()
        self.attempts: int | None = None
        self.answered = False
        self.error: str | None = None
        self.cut_off = False
        self._start = anyio.current_time()
        self._span = span
        self._hide = hide
        self._seen = seen

    def record_prompt(self, prompt: RenderedPrompt) -> None:
        """Take the prompt down, where content is asked for."""
        if self._hide is not None:
            said = [_message(m.role, self._hide(m.content)) for m in prompt.messages]
            self._span.set_attribute("gen_ai.input.messages", json.dumps(said, ensure_ascii=False))

    def record_reply(self, reply: Reply[R]) -> None:
        """Take the reply down. How plain text ended is not known here, and a typed reply is whole."""
        self.attempts, self.answered = reply.attempts, True
        if self._hide is not None:
            plain = isinstance(reply.value, Text)
            text = reply.value.text if isinstance(reply.value, Text) else reply.value.model_dump_json()
            said = _message("assistant", self._hide(text)) | {"finish_reason": "unknown" if plain else "stop"}
            self._span.set_attribute("gen_ai.output.messages", json.dumps([said], ensure_ascii=False))

    def record_failure(self, error: BaseException) -> None:
        """Take it down that there is no reply."""
        self.error, self.cut_off = type(error).__name__, not isinstance(error, Exception)
        if isinstance(error, ReplyError):
            self.attempts, self.answered = len(error.reasons), True

    @property
    def from_store(self) -> bool:
        """Whether every answer came from a store, so that there was no operation."""
        return self._seen and self.answered and not self.usage.calls

    def finish(self) -> float:
        """Take down what it consumed, and return how long it took, in seconds."""
        if self.usage.calls > self.usage.uncounted:
            self._span.set_attribute("gen_ai.usage.input_tokens", self.usage.input_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", self.usage.output_tokens)
        if self.usage.cached_tokens:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", self.usage.cached_tokens)
        if self.attempts is not None:
            self._span.set_attribute("reflact.attempts", self.attempts)
        if self._seen:
            self._span.set_attribute("reflact.stored", self.from_store)
        return anyio.current_time() - self._start


def common_attributes(config: ModelConfig | None) -> Attributes:
    """Return what spans and metrics of a model's calls share; of one that was passed in nothing is known."""
    chat: Attributes = {"gen_ai.operation.name": "chat"}
    if config is None:
        return {**chat, "gen_ai.provider.name": "other"}
    address = urlsplit(config.base_url)
    return {
        **chat,
        "gen_ai.provider.name": "azure.ai.openai" if config.api == "azure" else "openai",
        "gen_ai.request.model": config.model,
        "server.address": address.hostname or "",
        "server.port": address.port or {"http": 80}.get(address.scheme, 443),
    }


def request_attributes(config: ModelConfig | None) -> Attributes:
    """Return what spans of a model's calls say of its settings."""
    if config is None:
        return {}
    given = {
        "gen_ai.request.temperature": config.temperature,
        "gen_ai.request.top_p": config.top_p,
        "gen_ai.request.max_tokens": config.max_tokens,
        "gen_ai.request.seed": config.seed if isinstance(config.seed, int) else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
