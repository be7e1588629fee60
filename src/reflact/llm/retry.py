"""Retries of failed requests."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import anyio
import httpx

from reflact.llm.bodies import AnswerFault, BodyStream, select_headers
from reflact.llm.rate_limit import (
    LIMIT_STATUSES,
    PATIENCE_SECONDS,
    EndpointClient,
    Outcome,
    RoleRefused,
    jitter,
)

RETRIED_STATUSES = frozenset({408, 409, 424, 429, *range(500, 600)} - {501, 505})
"""Statuses after which a later attempt may succeed."""

RETRIED_FAILURES = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)
"""Failures of the transfer after which a later attempt may succeed."""

CONNECT_FAILURES = (httpx.ConnectError, httpx.ConnectTimeout)
"""Failures to connect."""


class Redirect(httpx.RemoteProtocolError):
    """An answer sends its request to another address, which is the message; it is not followed."""

    def __init__(self, location: str, status: int = 308) -> None:
        super().__init__(location)
        self.status = status


class RetryTransport(httpx.AsyncBaseTransport):
    """Retries requests after connection errors, time-outs, temporary statuses and garbled answers.

    After 429 and 503 a retry waits for the endpoint's back-off (``reflact.llm.rate_limit``). Otherwise the
    delay before retry n is drawn uniformly from 0..min(cap, base * 2**n) seconds (full jitter: Brooker,
    "Exponential Backoff And Jitter", 2015), and is at least the server's ``Retry-After``. One above
    ``PATIENCE_SECONDS`` ends the retries, and so does an answer that is too large. After a refused key, an unknown
    model (see ``EndpointClient.observe_refusal``), a redirect, a spent quota, an untrusted certificate, an address
    that fails all retries before it ever answered, or ``outage_seconds`` of failures alone, all calls of the role get
    the same outcome unsent.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, client: EndpointClient) -> None:
        self._inner = inner
        self._client = client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request until it succeeds, fails permanently, or has used up its retries.

        Raises:
            Redirect: The answer is one.
        """
        try:
            return await self._send_with_retries(request)
        except RoleRefused as refused:
            return replay_outcome(refused.outcome)

    async def _send_with_retries(self, request: httpx.Request) -> httpx.Response:
        client, attempt = self._client, 0
        while True:
            status: int | None = None
            asked, unreached, last = None, False, attempt == client.config.max_retries
            try:
                response = await self._inner.handle_async_request(request)
            except RETRIED_FAILURES as failure:
                if is_oversized(failure):
                    raise
                unreached = isinstance(failure, CONNECT_FAILURES)
                never_answered = unreached and not client.endpoint.answered
                out = client.endpoint.is_out(served=False) or is_untrusted_certificate(failure)
                if out or (last and never_answered):
                    client.refuse(failure)
                if last or out:
                    raise
            else:
                status = response.status_code
                passing = status in RETRIED_STATUSES
                out = client.endpoint.is_out(served=not passing)
                refuse_redirect(response, client)
                if status >= 400:
                    await response.aread()
                    if out or refuses_role(response, client, last=last or not passing):
                        client.refuse(response)
                    response = replay_outcome(response)
                elif response.is_success:
                    client.observe_answer()
                asked = read_retry_after(response.headers)
                patient = asked is None or asked <= PATIENCE_SECONDS
                if last or out or not patient or not passing:
                    return response
            if status not in LIMIT_STATUSES:
                seconds = max(asked or 0.0, jitter(attempt, client.endpoint.draw()))
                if unreached:
                    client.report_unreached(seconds)
                await anyio.sleep(seconds)
            attempt += 1


def refuse_redirect(response: httpx.Response, client: EndpointClient) -> None:
    """Raise ``Redirect`` if an answer is one, and let all calls of its role have the same outcome."""
    if response.has_redirect_location:
        redirect = Redirect(response.headers["location"], response.status_code)
        client.refuse(redirect)
        raise redirect


def replay_outcome(outcome: Outcome) -> httpx.Response:
    """Return a copy of an answer, or raise a failure again."""
    if isinstance(outcome, httpx.TransportError):
        raise type(outcome)(str(outcome)) from outcome
    return httpx.Response(
        outcome.status_code, headers=select_headers(outcome), stream=BodyStream([outcome.content])
    )


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a ``Retry-After`` header, a number or an HTTP date; None if it is neither.

    A date counts from the ``Date`` of the same answer, if it has one: this machine's clock may be wrong.
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    moment, now = _parse_date(value), _parse_date(headers.get("date", "")) or datetime.now(UTC)
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _parse_date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


REFUSED_KEY = frozenset({401, 403})

NO_API_STATUSES = frozenset({404, 405})
"""Statuses of an address that has no such API."""

DOUBTFUL = NO_API_STATUSES | {403}
"""Statuses that may refuse all calls of a role, or one prompt."""

REQUEST_STATUSES = DOUBTFUL | {400, 406, 413, 415, 422, 451}
"""Statuses that refuse one request, once others were answered."""

QUOTA_STATUSES = frozenset({400, 403, 429})
"""Statuses with which endpoints report a spent quota; 402 says nothing else."""

QUOTA_WORDS = re.compile(
    r"insufficient[ _](quota|balance|credit|fund)|exceeded your (current|monthly) quota|credit balance"
    r"|(out of|no more|run out of) (credit|quota|fund)|billing|(spend|spending|usage) limit",
    re.IGNORECASE,
)
"""Words for a spent quota of OpenAI, Anthropic, DeepSeek, Mistral, OpenRouter and others."""

RATE_WORDS = re.compile(
    r"retry|try again (in|after|later)|rate[ _-]?limit|per[ _-]?(second|min|hour|day)", re.IGNORECASE
)
"""Words of answers that refuse one request because of its time."""

THROTTLE_STATUSES = frozenset({400, 403})
THROTTLE_WORDS = re.compile(r"throttl|too many requests|rate exceeded|rate[ _-]?limit", re.IGNORECASE)
"""Statuses and words with which some endpoints, such as those of AWS, report a rate limit."""

UNKNOWN_MODEL = frozenset({400, 404})
"""Statuses with which endpoints report an unknown model."""

MODEL_WORDS = re.compile(
    r"model_not_found|deploymentnotfound|model:|(no such|unknown|invalid|not a valid) (model|deployment)"
    r"|\b(model|deployment)s?\b.{0,120}?(not exist|not found|not available|no access|have access)",
    re.IGNORECASE | re.DOTALL,
)
"""Words for an unknown model of OpenAI, Azure, vLLM, Ollama, Anthropic, Mistral and others."""

FORMAT_WORDS = re.compile(
    r"response_format|json_schema|json_object|\btools?\b|tool_choice|\bformat\b|\bstream", re.IGNORECASE
)
"""Words of answers that refuse the form of a request and not the model."""


def is_quota_spent(status: int, headers: Mapping[str, str], text: str) -> bool:
    """Whether an answer reports that an account has no quota or credit left, rather than a rate limit."""
    if status == 402:
        return True
    spent = status in QUOTA_STATUSES and QUOTA_WORDS.search(text) is not None
    return spent and "retry-after" not in headers and not RATE_WORDS.search(text)


def is_throttled(status: int, text: str) -> bool:
    """Whether a refusal is one of a rate limit, although its status is another."""
    return status in THROTTLE_STATUSES and bool(THROTTLE_WORDS.search(text)) and not QUOTA_WORDS.search(text)


def refuses_role(response: httpx.Response, client: EndpointClient, *, last: bool) -> bool:
    """Whether an answer refuses all calls of a role; a spent quota does so in the last attempt of a call."""
    status = response.status_code
    if status == 401 or (last and is_quota_spent(status, response.headers, response.text)):
        return True
    return (status in DOUBTFUL or is_unknown_model(status, response.text)) and client.observe_refusal()


def is_unknown_model(status: int, text: str) -> bool:
    """Whether an answer reports an unknown model."""
    return status in UNKNOWN_MODEL and not FORMAT_WORDS.search(text) and bool(MODEL_WORDS.search(text))


def is_oversized(failure: BaseException) -> bool:
    """Whether an answer was larger than its bound; another one would be charged too, and hardly smaller."""
    return isinstance(failure, AnswerFault) and failure.fault == "oversized"


def is_untrusted_certificate(failure: BaseException) -> bool:
    """Whether a connection failed because of an untrusted certificate."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
