"""Failures of model calls: their kinds, what each means for its role, and reflact's errors.

``reflact.records.FaultKind`` lists the kinds. The answers of five kinds are used: ``overcounted``
reports more tokens than its request can take; ``cut prompt``: by its count of tokens the server
read a part of the prompt only; ``cut answer`` and ``empty answer``, of the target alone: it ended
at the token limit, or has no text apart from thoughts; ``other model``: the reply names another
model than the first reply of the role in this start. Statuses about the request itself (400, 401,
404 and similar) are no faults.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from urllib.parse import urljoin, urlsplit

import httpx

from reflact import errors
from reflact.config.models import ModelConfig
from reflact.llm.cache_keys import strip_credentials
from reflact.llm.completions import COMPLETIONS_PATH, AnswerFault
from reflact.llm.rate_limit import EndpointClient, Outcome
from reflact.llm.redaction import remove_keys
from reflact.records import FaultKind
from reflact.text import replace_json

# Statuses after which a later attempt may succeed.
RETRIED_STATUSES = frozenset({408, 409, 424, 429, *range(500, 600)} - {501, 505})

# Failures of the transfer after which a later attempt may succeed.
RETRIED_FAILURES = (
    httpx.TimeoutException,
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ProxyError,
)

# Failures to connect.
CONNECT_FAILURES = (httpx.ConnectError, httpx.ConnectTimeout)
REFUSED_KEY = frozenset({401, 403})
# Statuses of an address that has no such API.
NO_API_STATUSES = frozenset({404, 405})
# Statuses that may refuse all calls of a role, or one prompt.
DOUBTFUL = NO_API_STATUSES | {403}
# Statuses that refuse one request, once others were answered.
REQUEST_STATUSES = DOUBTFUL | {400, 406, 413, 415, 422, 451}
# Statuses with which endpoints report a spent quota; 402 says nothing else.
QUOTA_STATUSES = frozenset({400, 403, 429})

# Words for a spent quota of OpenAI, Anthropic, DeepSeek, Mistral, OpenRouter and others.
QUOTA_WORDS = re.compile(
    r"insufficient[ _](quota|balance|credit|fund)|exceeded your (current|monthly) quota"
    r"|credit balance"
    r"|(out of|no more|run out of) (credit|quota|fund)|billing|(spend|spending|usage) limit",
    re.IGNORECASE,
)

# Words of answers that refuse one request because of its time.
RATE_WORDS = re.compile(
    r"retry|try again (in|after|later)|rate[ _-]?limit|per[ _-]?(second|min|hour|day)",
    re.IGNORECASE,
)

THROTTLE_STATUSES = frozenset({400, 403})

# Statuses and words with which some endpoints, such as those of AWS, report a rate limit.
THROTTLE_WORDS = re.compile(
    r"throttl|too many requests|rate exceeded|rate[ _-]?limit", re.IGNORECASE
)

# Statuses with which endpoints report an unknown model.
UNKNOWN_MODEL = frozenset({400, 404})

# Words for an unknown model of OpenAI, Azure, vLLM, Ollama, Anthropic, Mistral and others.
MODEL_WORDS = re.compile(
    r"model_not_found|deploymentnotfound|model:"
    r"|(no such|unknown|invalid|not a valid) (model|deployment)"
    r"|\b(model|deployment)s?\b.{0,120}?(not exist|not found|not available|no access|have access)",
    re.IGNORECASE | re.DOTALL,
)

# Words of answers that refuse the form of a request and not the model.
FORMAT_WORDS = re.compile(
    r"response_format|json_schema|json_object|\btools?\b|tool_choice|\bformat\b|\bstream",
    re.IGNORECASE,
)

# Words of OpenAI, vLLM, llama.cpp and others for a request that is too long.
OVERFLOW_WORDS = re.compile(
    "context_length_exceeded|maximum context length|context window|exceed_context_size"
    "|exceeds the available context|prompt is too long|too many tokens",
    re.IGNORECASE,
)

# The most characters of a redirect's address that a message shows.
SHOWN_LOCATION = 300
# The version that is a part of the path of most OpenAI-compatible APIs.
VERSION_PATH = re.compile(r"/v\d")


def classify_failure(failure: Exception) -> FaultKind | None:
    """Return the kind of a failed transfer; None if neither the endpoint nor the network failed."""
    match failure:
        case AnswerFault():
            return failure.fault
        case httpx.ConnectError() | httpx.ProxyError():
            return "unreachable"
        case httpx.TimeoutException():
            return "timeout"
        case httpx.NetworkError() | httpx.RemoteProtocolError():
            return "reset"
    return None


def classify_status(status: int) -> FaultKind | None:
    """Return the kind of an error status; None for a success or a status about the request."""
    kinds: dict[int, FaultKind] = {408: "408", 409: "409", 429: "429"}
    return kinds.get(status, "5xx" if status in RETRIED_STATUSES else None)


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a ``Retry-After`` header: a number, an HTTP date, or None.

    A date counts from the ``Date`` of the same answer, if it has one: this machine's clock may be
    wrong.
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    moment = _parse_date(value)
    now = _parse_date(headers.get("date", "")) or datetime.now(UTC)
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _parse_date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def is_passing(outcome: Outcome) -> bool:
    """Whether a later attempt may succeed."""
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in RETRIED_STATUSES
    return isinstance(outcome, RETRIED_FAILURES) and not is_oversized(outcome)


def refuses_role(outcome: Outcome, client: EndpointClient, *, last: bool) -> bool:
    """Whether an outcome, which is counted, stands for all calls of its role.

    A refused key, a redirect and an untrusted certificate always do, a spent quota and an address
    that never answered after the retries of a call, and what may refuse one prompt after some in a
    row.
    """
    if not isinstance(outcome, httpx.Response):
        unreached = isinstance(outcome, CONNECT_FAILURES) and not client.endpoint.answered
        return is_untrusted_certificate(outcome) or (last and unreached)
    status = outcome.status_code
    if status == 401 or outcome.has_redirect_location:
        return True
    if last and is_quota_spent(status, outcome.headers, outcome.text):
        return True
    return (
        status in DOUBTFUL or is_unknown_model(status, outcome.text)
    ) and client.observe_refusal()


def is_quota_spent(status: int, headers: Mapping[str, str], text: str) -> bool:
    """Whether an answer reports that an account has no quota or credit left."""
    if status == 402:
        return True
    spent = status in QUOTA_STATUSES and QUOTA_WORDS.search(text) is not None
    return spent and "retry-after" not in headers and not RATE_WORDS.search(text)


def is_throttled(status: int, text: str) -> bool:
    """Whether a refusal is one of a rate limit, although its status is another."""
    return (
        status in THROTTLE_STATUSES
        and bool(THROTTLE_WORDS.search(text))
        and not QUOTA_WORDS.search(text)
    )


def is_unknown_model(status: int, text: str) -> bool:
    """Whether an answer reports an unknown model."""
    return (
        status in UNKNOWN_MODEL and not FORMAT_WORDS.search(text) and bool(MODEL_WORDS.search(text))
    )


def is_oversized(failure: BaseException) -> bool:
    """Whether an answer was larger than its bound, as the next one would be too."""
    return isinstance(failure, AnswerFault) and failure.fault == "oversized"


def is_untrusted_certificate(failure: BaseException) -> bool:
    """Whether a connection failed because of an untrusted certificate."""
    causes = list_causes(failure, with_context=True)
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes)


def list_causes(error: BaseException | None, *, with_context: bool = False) -> list[BaseException]:
    """Return an error and the chain of its causes, which foreign code may have closed to a ring."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or (error.__context__ if with_context else None)
    return causes


def translate_outcome(
    outcome: Outcome, config: ModelConfig, role: str, keys: Sequence[str], endpoint: EndpointClient
) -> errors.ReflactError:
    """Return reflact's error for a refusal or a failure, without the API keys.

    The message says what happened, at which endpoint, and what to do. An error of reflact that
    passed through foreign code is returned unchanged. ``endpoint`` knows whether other calls were
    answered.
    """
    if isinstance(outcome, httpx.Response):
        refusal = _translate_refusal(outcome, config, role, keys, endpoint)
        refusal.answer = outcome.text
        return refusal
    causes = list_causes(outcome)
    for cause in causes:
        if isinstance(cause, errors.ReflactError):
            return cause
    return _translate_failure(causes, config, role, keys)


def _translate_failure(
    causes: Sequence[BaseException], config: ModelConfig, role: str, keys: Sequence[str]
) -> errors.ModelError:
    """Return the error of a call without a usable answer; ``causes`` begin with the failure."""
    where = f"models.{role}: {config.title}"
    cause = causes[-1]
    reason = remove_keys(keys, " ".join(str(cause).split()))[:300] or type(cause).__name__
    is_foreign = config.api == "pydantic_ai"
    if isinstance(causes[0], httpx.TimeoutException):
        return errors.ProviderDown(
            f"{where} did not answer within {config.timeout:g} seconds, after all retries"
        )
    if is_oversized(cause):
        return errors.ProviderDown(
            f"{where} gave an answer {cause}; it was not read further. Set "
            f"models.{role}.max_tokens to the most tokens that a reply needs, or use another model",
            status=200,
        )
    address = f"models.{role}.base_url"
    if is_foreign:
        address = "the network, and the address if your code sets one"
    if any(isinstance(each, AnswerFault) for each in causes):
        return errors.ProviderDown(
            f"{where} answered with something that is no chat completion, after all retries; "
            f"check {address}, or try again: {reason}",
            status=200,
        )
    if is_foreign and not any(isinstance(each, httpx.TransportError) for each in causes):
        return errors.BadRequest(f"{where} failed with {type(cause).__name__}: {reason}")
    if isinstance(cause, httpx.UnsupportedProtocol | httpx.InvalidURL):
        shown = strip_credentials(config.base_url)
        return errors.BadRequest(f"models.{role}.base_url {shown!r} is not an address: {cause}")
    problem = f"cannot be reached, after all retries; check {address}"
    if is_untrusted_certificate(causes[0]):
        problem = (
            f"shows a certificate that is not trusted here; check {address}, or name "
            "the file of its authority in SSL_CERT_FILE"
        )
    return errors.ProviderDown(f"{where} {problem}: {reason}")


def _translate_refusal(
    refusal: httpx.Response,
    config: ModelConfig,
    role: str,
    keys: Sequence[str],
    endpoint: EndpointClient,
) -> errors.ModelError:
    status = refusal.status_code
    where = f"models.{role}: {config.title}"
    text = remove_keys(keys, " ".join(replace_json(refusal.text).split()))[:300]
    if refusal.has_redirect_location:
        return errors.BadRequest(
            f"{where} {_describe_redirect(refusal, config, role)}", status=status
        )
    if status in {400, 413, 422} and OVERFLOW_WORDS.search(refusal.text):
        advice = "shorten the texts"
        if role == "optimizer":
            advice = "lower reflect.trajectory_tokens"
        return errors.ContextOverflow(
            f"{where} has too small a context for this request; the prompt and "
            f"models.{role}.max_tokens must fit into it together, so set it lower or {advice}: "
            f"{text}"
        )
    if is_quota_spent(status, refusal.headers, refusal.text):
        return errors.QuotaSpent(
            f"{where} has no quota or credit left ({status}); add some, and run the same command "
            f"again: {text}",
            status=status,
        )
    if status in RETRIED_STATUSES:
        return errors.ProviderDown(
            f"{where} answered {status}, after all retries: {text}", status=status
        )
    kind: Callable[..., errors.ModelError]
    kind, problem = _describe_refusal(refusal, config, role)
    if endpoint.refusal is None and status != 401:
        if endpoint.is_answered and status in REQUEST_STATUSES:
            return errors.RequestRefused(
                f"{where} answers others and refuses this request ({status}): {text}", status=status
            )
        if kind is not errors.BadRequest or status in DOUBTFUL:
            kind = partial(errors.RequestRefused, answers_others=False)
    return kind(f"{where} {problem}: {text}", status=status)


def _describe_refusal(
    refusal: httpx.Response, config: ModelConfig, role: str
) -> tuple[type[errors.ProviderError], str]:
    """Return the error of a refusal, and the rest of the sentence that says what to do."""
    status = refusal.status_code
    is_foreign = config.api == "pydantic_ai"
    if status in REFUSED_KEY:
        source = "name the environment variable that holds one in api_key_env"
        if config.key is not None:
            source = "the function passed as `key` must return a valid one"
        elif config.api_key_env is not None:
            source = f"set {config.api_key_env} to a valid key"
        elif is_foreign:
            source = "set the environment variable that its provider reads to a valid key"
        return errors.AccessDenied, f"refused the key ({status}); {source}"
    if is_unknown_model(status, refusal.text):
        place = f"models.{role}.model" if config.open_model is None else "the model in your code"
        problem = f"does not know this model ({status}); set {place} to one that it serves"
        return errors.UnknownModel, problem
    if status not in NO_API_STATUSES or is_foreign:
        return errors.BadRequest, f"will not serve this request ({status})"
    address = strip_credentials(config.base_url).rstrip("/")
    advice = f"check models.{role}.base_url"
    if config.api == "openai" and not VERSION_PATH.search(urlsplit(address).path):
        advice = f"set models.{role}.base_url to {address}/v1"
    return errors.BadRequest, f"has no chat completions at this address ({status}); {advice}"


def _describe_redirect(redirect: httpx.Response, config: ModelConfig, role: str) -> str:
    """Return where an answer redirects, without credentials, and the setting to change."""
    location = redirect.headers["location"].partition("?")[0]
    with suppress(ValueError):  # the header may hold no address
        address = urljoin(config.base_url, location)
        if urlsplit(address).scheme in {"http", "https"} and urlsplit(address).hostname:
            location = strip_credentials(address)
    root = location.removesuffix(COMPLETIONS_PATH)
    advice = f"check models.{role}.base_url"
    is_other = root not in {location, config.base_url.rstrip("/")}
    if is_other and len(root) < SHOWN_LOCATION:
        advice = f"if that is right, set models.{role}.base_url to {root}"
    return (
        f"redirects requests to {location[:SHOWN_LOCATION]} ({redirect.status_code}), and no "
        f"redirect is followed, so that no other host gets them; {advice}"
    )
