"""Single attempts: each waits for the budget and the endpoint's limits, and its cost is recorded.

An attempt waits for the budget first, so that calls that wait for it occupy no slot of the endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio
import httpx

from reflact.concurrency import finish_if_cancelled, run_beside_loop
from reflact.config.models import ModelConfig
from reflact.errors import CassetteMiss
from reflact.llm.bodies import ERROR_BYTES, AnswerFault, decode_text, select_headers
from reflact.llm.budget import Account, Reservation
from reflact.llm.cache_keys import strip_to_endpoint
from reflact.llm.completions import read_completion
from reflact.llm.drafts import CONTEXT
from reflact.llm.errors import classify_failure, classify_status
from reflact.llm.pricing import (
    bound_usage,
    read_cap,
    read_counts,
    read_usage,
    usd_of,
    worst_case,
    write_counts,
)
from reflact.llm.rate_limit import EndpointClient
from reflact.llm.redaction import find_keys, remove_keys
from reflact.llm.retry import is_throttled, read_retry_after
from reflact.llm.sse import EVENT_STREAM, JSON
from reflact.llm.structured import remove_thoughts
from reflact.messages import CallReservation, StoredResponse
from reflact.records import FaultKind, Usage

RELEASE_SECONDS = 0.2
"""How long a cancelled caller waits until its reservation is released."""

LARGE_BYTES = 2**20
"""A body of more bytes is read on a worker thread, so that the event loop does not wait for it."""

HELD_OPEN_SECONDS = 1.0
"""How long the usage and the end of a stream are waited for after the reason why its answer ended."""

MIN_PROMPT, PROMPT_RATIO = 16_000, 8
"""A prompt of so many characters was cut by its server if that counts less than one token for eight of them."""

RESERVATION = "reflact_reservation"
"""The extension of a request that holds its ``CallReservation``."""

FORMAT_FIELDS = frozenset({"response_format", "tools"})
"""The fields of a request for which a provider may validate what its model wrote."""

FAILED_SAMPLES = ("json_validate_failed", "tool_use_failed")
"""Codes with which a provider refuses what its own model wrote, and not the request."""

UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
    CassetteMiss,
)
"""Failures before a request was sent."""


class MeteredTransport(httpx.AsyncBaseTransport):
    """Sends one attempt of a call, stores its answer, and records its cost.

    An error status is free. A time-out, a broken connection or answer, a cancellation, or an answer without usage
    counts at the worst case, since the provider may charge for it. Failed attempts are counted by kind.
    """

    def __init__(
        self, inner: httpx.AsyncBaseTransport, config: ModelConfig, account: Account, client: EndpointClient
    ) -> None:
        self._inner = inner
        self._config = config
        self._budget = account.budget
        self._responses = account.responses
        self._on_attempt = account.on_attempt
        self._client = client
        self._models: dict[str, None] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request once and return its answer, read whole. Raise BudgetSpent if the budget has no room."""
        call: CallReservation = request.extensions[RESERVATION]
        body = await request.aread()
        at = datetime.now(UTC)
        asked_for = json.loads(body)
        worst = worst_case(len(body), read_cap(asked_for), self._config, at=at)
        async with (
            self._budget.reserve(worst) as reservation,
            self._client.admit(_count_tokens(worst)) as slot,
        ):
            endpoint = strip_to_endpoint(str(request.url))
            call = self._budget.current_stage.book(
                call.model_copy(update={"worst_case": worst, "endpoint": endpoint})
            )
            await self._reserve(call)
            reservation.mark_sent()
            try:
                response = await send_whole(request, self._inner, self._config.timeout)
                if not FORMAT_FIELDS.isdisjoint(asked_for):
                    response = accept_failed_sample(response)
                read = partial(
                    _read_answer,
                    response,
                    asked_for,
                    find_keys(request),
                    worst,
                    call.role,
                    models=self._models,
                )
                large = len(response.content) > LARGE_BYTES
                response, fault = await run_beside_loop(read) if large else read()
            except Exception as error:
                slot.observe(None, None, None)
                if isinstance(error, UNSENT):
                    await self._responses.release(call)
                    reservation.release()
                await self._report_attempt(call, Usage(), classify_failure(error))
                raise
            usage = read_usage(response.text if response.is_success else "")
            asked = read_retry_after(response.headers)
            slot.observe(response.status_code, asked, None if usage.uncounted else _count_tokens(usage))
            if response.is_success:
                if not usage.uncounted:
                    usage = usage.model_copy(update={"usd": usd_of(usage, self._config, at=at)})
                await self._store(response, usage, call, reservation)
            else:
                if call.role in self._budget.answered_roles:
                    self._client.note_access()
                await self._responses.release(call)
                reservation.release()
            await self._report_attempt(call, usage, fault)
            return response

    async def _reserve(self, call: CallReservation) -> None:
        """Store the reservation; release it if the caller is cancelled before the request is sent."""
        try:
            await self._responses.reserve(call)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(RELEASE_SECONDS, shield=True):
                await self._responses.release(call)
            raise

    async def _store(
        self, response: httpx.Response, usage: Usage, call: CallReservation, reservation: Reservation
    ) -> None:
        chunks = (response.text,)
        reply = StoredResponse(key=call.key, status=200, content_type=JSON, chunks=chunks, usage=usage)

        async def store() -> None:
            await self._responses.store_response(reply, call)
            reservation.settle(usage)

        await finish_if_cancelled(store)

    async def _report_attempt(self, call: CallReservation, usage: Usage, fault: FaultKind | None) -> None:
        self._on_attempt(call, usage, fault)
        if fault is not None:
            await self._responses.count_fault(call.run_id, fault)


def accept_failed_sample(response: httpx.Response) -> httpx.Response:
    """Return an answer; if the provider refuses what its model wrote, as that text, an invalid reply like any other."""
    error: Any = None
    with suppress(ValueError, RecursionError):
        error = json.loads(response.content) if response.status_code == 400 else None
    error = error.get("error") if isinstance(error, dict) else None
    if not isinstance(error, dict) or error.get("code") not in FAILED_SAMPLES:
        return response
    message = {"role": "assistant", "content": str(error.get("failed_generation") or "")}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    return httpx.Response(200, json={"choices": choices, "usage": write_counts(Usage())})


def _read_answer(
    response: httpx.Response,
    asked_for: Any,
    keys: Sequence[str],
    worst: Usage,
    role: str,
    *,
    models: dict[str, None],
) -> tuple[httpx.Response, FaultKind | None]:
    """Return a copy of an answer in UTF-8 without API keys, and its fault; a success is a completion in JSON.

    A rate limit under another status gets the status 429. The model of the answer is added to ``models``.

    Raises:
        AnswerFault: It should be a chat completion and is none.
    """
    headers, text = select_headers(response), remove_keys(keys, decode_text(response.content))
    status = 429 if is_throttled(response.status_code, text) else response.status_code
    fault = classify_status(status)
    if response.is_success:
        text = read_completion(headers["content-type"], text)
        text = remove_keys(keys, text)  # again, since the events of a stream may divide a key
        headers = {"content-type": JSON}
        completion = json.loads(text)
        usage = read_counts(completion.get("usage"))
        if (bounded := bound_usage(usage, worst)) != usage:
            text = json.dumps({**completion, "usage": write_counts(bounded)})
            fault = "overcounted"
        elif is_prompt_cut(asked_for, usage.input_tokens):
            fault = "cut prompt"
        elif role == "target":
            fault = find_answer_fault(completion, asked_for)
        if name := completion["model"]:
            models.setdefault(name)
            fault = fault or ("other model" if name != next(iter(models)) else None)
    return httpx.Response(status, headers=headers, content=text.encode("utf-8")), fault


def is_prompt_cut(asked_for: Any, tokens: int) -> bool:
    """Whether a server counted far fewer tokens than the messages of a request have; content in parts has none."""
    messages = asked_for.get("messages")
    texts = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    size = sum(len(text) for text in texts if isinstance(text, str))
    return 0 < tokens * PROMPT_RATIO < size and size >= MIN_PROMPT


def find_answer_fault(completion: Any, asked_for: Any) -> FaultKind | None:
    """Return what is wrong with an answer of the target: it was cut, or has neither text nor a function asked for."""
    (choice,) = completion["choices"]
    message = choice["message"]
    if choice["finish_reason"] == "length":
        return "cut answer"
    text = remove_thoughts(message["content"] or message["refusal"] or "")
    has_call = "tools" in asked_for and message.get("tool_calls")
    return None if text.strip() or has_call else "empty answer"


def _count_tokens(usage: Usage) -> int:
    return usage.input_tokens + usage.output_tokens


async def send_whole(
    request: httpx.Request, inner: httpx.AsyncBaseTransport, seconds: float
) -> httpx.Response:
    """Send a request once and return its whole answer.

    The body of an error is cut after ``ERROR_BYTES``, and where it broke off or cannot be decoded.

    Raises:
        AnswerFault: The answer began, and broke off or cannot be decoded.
        httpx.TransportError: The request failed, or took longer than ``seconds`` in total.
    """
    drafts = None
    try:
        with anyio.fail_after(seconds) as time:
            response = await inner.handle_async_request(request)
            headers = select_headers(response)
            streamed = response.is_success and headers["content-type"] == EVENT_STREAM
            context = CONTEXT.get() if streamed else None
            drafts = None if context is None else context.drafts
            if drafts is not None:
                drafts.begin(find_keys(request))
            pieces, size = [], 0
            try:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for piece in response.stream:
                    pieces.append(piece)
                    size += len(piece)
                    if size > ERROR_BYTES and not response.is_success:
                        break
                    if drafts is not None:
                        drafts.feed(piece)
                        if drafts.is_finished:
                            time.deadline = min(time.deadline, anyio.current_time() + HELD_OPEN_SECONDS)
            except AnswerFault:
                if response.is_success:
                    raise
            except (httpx.NetworkError, httpx.RemoteProtocolError) as failure:
                if drafts is None or not drafts.is_finished:
                    raise AnswerFault(str(failure), "broken stream" if streamed else "truncated") from failure
            finally:
                await response.aclose()
    except TimeoutError:
        if drafts is None or not drafts.is_finished:
            raise httpx.ReadTimeout(f"no whole answer in {seconds:g} seconds") from None
    return httpx.Response(response.status_code, headers=headers, content=b"".join(pieces))
