"""The response cache: every model request has a content key and is paid once.

Each attempt of a call has its own stored response, including replies that failed validation. A process that
is killed and restarted sends only the missing requests, since ``reflact.llm.metering`` stores a response before
anyone sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from weakref import WeakValueDictionary

import anyio
from pydantic import JsonValue

from reflact.llm.budget import Account
from reflact.llm.cache_keys import build_cache_key
from reflact.llm.drafts import RequestContext
from reflact.messages import CallId, CallReservation


class ResponseCache:
    """The stored responses to the requests of a role.

    Args:
        role: The role.
        model: The name of its model, for the ledger.
        account: Where responses are stored.
        endpoint: Scheme, host and port, without credentials.
        root: The path before that of each request.
    """

    def __init__(self, role: str, model: str, account: Account, *, endpoint: str, root: str) -> None:
        self._role = role
        self._model = model
        self._account = account
        self._endpoint = endpoint
        self._root = root.rstrip("/")
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    async def get_or_send(
        self,
        path: str,
        body: Mapping[str, JsonValue],
        call_id: CallId,
        reply: str,
        context: RequestContext,
        *,
        send: Callable[[], Awaitable[str]],
    ) -> str:
        """Return the stored response to a request, or send it; equal requests wait for each other.

        Args:
            path: Below the root, such as ``/chat/completions``.
            body: The body of the request.
            call_id: The call.
            reply: Name and version of the reply type.
            context: Takes the key and the reservation of the request.
            send: Sends the request, and stores its response.
        """
        label = call_id.label
        key = build_cache_key(
            endpoint=self._endpoint, path=self._root + path, body=body, call_id=label, reply=reply
        )
        context.keys.append(key)
        async with self._locks.setdefault(key, anyio.Lock(fast_acquire=True)):
            stored = await self._account.responses.find_response(key)
            if stored is not None:
                return "".join(stored.chunks)
            context.reservation = CallReservation(
                key=key,
                run_id=self._account.run_id,
                call_id=label,
                role=self._role,
                purpose=call_id.purpose,
                endpoint=self._endpoint,
                model=self._model,
            )
            text = await send()
            context.sent = True
            return text
