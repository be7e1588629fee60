"""The end of the way for requests that no endpoint of ours answers: those of agents, and of pydantic-ai's models."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from reflact.llm.drafts import CONTEXT
from reflact.llm.pricing import write_counts
from reflact.messages import AgentAnswer


class AgentTransport(httpx.AsyncBaseTransport):
    """Lets the answerer of a call answer its request, and sends any other one through ``inner``."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer as a chat completion, or the refusal of its provider."""
        context = CONTEXT.get()
        if context is None or context.answer is None:
            return await self._inner.handle_async_request(request)
        try:
            answer = await context.answer(request.content)
        except ConnectionError as error:
            raise httpx.ReadError(str(error)) from error
        except Exception as error:
            if (refusal := _read_refusal(error)) is None:
                raise
            return refusal
        return httpx.Response(200, json=_write_completion(answer))

    async def aclose(self) -> None:
        """Close the other network."""
        await self._inner.aclose()


def _read_refusal(error: Exception) -> httpx.Response | None:
    """Return the refusal that a provider's library raised; None for any other error."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 300 <= status <= 599:
        return None
    headers = getattr(error, "headers", None)
    asked = headers.get("retry-after") if isinstance(headers, Mapping) else None
    body = getattr(error, "body", None)
    return httpx.Response(
        status,
        headers={} if asked is None else {"retry-after": str(asked)},
        json={"error": {"message": str(error) if body is None else str(body)}},
    )


def _write_completion(answer: AgentAnswer) -> dict[str, object]:
    message = {"role": "assistant", "content": answer.text}
    reason = "length" if answer.truncated else "stop"
    counts = {} if answer.usage.uncounted else {"usage": write_counts(answer.usage)}
    return {"choices": [{"index": 0, "finish_reason": reason, "message": message}], **counts}
