"""The network of agents that ask their own models: their requests pass all other layers, and end here."""

from __future__ import annotations

import httpx

from reflact.llm.drafts import CONTEXT
from reflact.llm.pricing import write_counts
from reflact.messages import AgentAnswer


class AgentTransport(httpx.AsyncBaseTransport):
    """Lets an agent answer its own requests, and sends any other one through ``inner``."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the agent's answer as a chat completion, or the refusal of its provider."""
        context = CONTEXT.get()
        if context is None or context.answer is None:
            return await self._inner.handle_async_request(request)
        try:
            answer = await context.answer()
        except ConnectionError as error:
            raise httpx.ReadError(str(error)) from error
        headers = {} if answer.retry_after is None else {"retry-after": answer.retry_after}
        if answer.status != 200:
            return httpx.Response(answer.status, headers=headers, json={"error": {"message": answer.text}})
        return httpx.Response(200, json=_write_completion(answer))

    async def aclose(self) -> None:
        """Close the other network."""
        await self._inner.aclose()


def _write_completion(answer: AgentAnswer) -> dict[str, object]:
    message = {"role": "assistant", "content": answer.text}
    counts = {} if answer.usage.uncounted else {"usage": write_counts(answer.usage)}
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": message}], **counts}
