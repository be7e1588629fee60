"""Errors of model calls: kinds of faults of single attempts, and reflact's errors for failed calls.

Kinds of faults: ``408``, ``409``, ``429``, ``5xx``: a later attempt may succeed; ``timeout``: no whole answer
in time; ``unreachable``: no connection; ``reset``: the connection ended before the answer began;
``truncated``: the answer broke off; ``malformed``: the answer should be JSON and is not; ``broken stream``: the
stream has no end mark, contains anything but chunks of a chat completion, or reports an error; ``unusable``: the
answer has a success status and is no chat completion; ``oversized``: the answer is larger than
``max_response_bytes``. The answers of five kinds are used: ``overcounted`` reports more tokens than its request can
take; ``cut prompt``: by its count of tokens the server read a part of the prompt only; ``cut answer`` and ``empty
answer``, of the target alone: it ended at the token limit, or has no text apart from thoughts;
``other model``: the reply names another model than the first reply of the role in this start.
Statuses about the request itself (400, 401, 404 and similar) are no faults.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from urllib.parse import urljoin, urlsplit

import httpx
import openai

from reflact.config.models import ModelConfig
from reflact.errors import (
    AccessDenied,
    BadRequest,
    ContextOverflow,
    ModelError,
    ProviderDown,
    ProviderError,
    QuotaSpent,
    ReflactError,
    RequestRefused,
    UnknownModel,
)
from reflact.llm.bodies import AnswerFault
from reflact.llm.cache_keys import strip_credentials
from reflact.llm.completions import COMPLETIONS_PATH
from reflact.llm.rate_limit import EndpointClient
from reflact.llm.redaction import remove_keys
from reflact.llm.retry import (
    DOUBTFUL,
    NO_API_STATUSES,
    REFUSED_KEY,
    REQUEST_STATUSES,
    RETRIED_STATUSES,
    Redirect,
    is_oversized,
    is_quota_spent,
    is_unknown_model,
    is_untrusted_certificate,
)
from reflact.records import FaultKind

OVERFLOW_WORDS = re.compile(
    "context_length_exceeded|maximum context length|context window|exceed_context_size"
    "|exceeds the available context|prompt is too long|too many tokens",
    re.IGNORECASE,
)
"""Words of OpenAI, vLLM, llama.cpp and others for a request that is too long."""

SHOWN_LOCATION = 300
"""The most characters of a redirect's address that a message shows."""

VERSION_PATH = re.compile(r"/v\d")
"""The version that is a part of the path of most OpenAI-compatible APIs."""


def translate_client_error(
    error: Exception, config: ModelConfig, role: str, key: str | None, endpoint: EndpointClient | None = None
) -> ReflactError:
    """Return reflact's error for an error of the client library, without the API key.

    The message says what happened, at which endpoint, and what to do. An error of reflact that passed
    through the client library is returned unchanged. ``endpoint`` knows whether other calls were answered.
    """
    causes = _list_causes(error)
    own = next((cause for cause in causes if isinstance(cause, ReflactError)), None)
    if own is not None:
        return own
    keys, where = [key] if key else [], f"models.{role}: {config.title}"
    if isinstance(error, openai.APIStatusError):
        text = remove_keys(keys, " ".join(error.response.text.split()))
        return _translate_status(error, config, role, text[:300], endpoint)
    if isinstance(error, openai.APITimeoutError):
        return ProviderDown(f"{where} did not answer within {config.timeout:g} seconds, after all retries")
    return _translate_failure(error, config, role, keys)


def _translate_failure(error: Exception, config: ModelConfig, role: str, keys: list[str]) -> ModelError:
    """Return reflact's error for a call that got no usable answer."""
    causes, where = _list_causes(error), f"models.{role}: {config.title}"
    is_foreign = config.api == "pydantic_ai"
    cause = causes[-1]
    if isinstance(cause, Redirect):
        return BadRequest(f"{where} {_describe_redirect(cause, config, role)}", status=cause.status)
    if is_oversized(cause):
        return ProviderDown(
            f"{where} gave an answer {cause}; it was not read further. Lower models.{role}.max_tokens, or raise "
            f"models.{role}.max_response_bytes",
            status=200,
        )
    if any(isinstance(each, AnswerFault) for each in causes):
        shown = remove_keys(keys, " ".join(str(cause).split()))[:200]
        advice = "try again" if is_foreign else f"check models.{role}.base_url, or try again"
        return ProviderDown(
            f"{where} answered with something that is no chat completion, after all retries; {advice}: {shown}",
            status=200,
        )
    if is_foreign and not any(isinstance(each, httpx.TransportError) for each in causes):
        text = remove_keys(keys, " ".join(str(cause).split()))[:300]
        return BadRequest(f"{where} failed with {type(cause).__name__}: {text}")
    if isinstance(cause, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return BadRequest(
            f"models.{role}.base_url {strip_credentials(config.base_url)!r} is not an address: {cause}"
        )
    reason = remove_keys(keys, str(cause)) or type(cause).__name__
    address = (
        "the network, and the address if your code sets one" if is_foreign else f"models.{role}.base_url"
    )
    problem = f"cannot be reached, after all retries; check {address}"
    if is_untrusted_certificate(error):
        problem = (
            f"shows a certificate that is not trusted here; check {address}, or name "
            "the file of its authority in SSL_CERT_FILE"
        )
    return ProviderDown(f"{where} {problem}: {reason}")


def _translate_status(
    error: openai.APIStatusError, config: ModelConfig, role: str, text: str, endpoint: EndpointClient | None
) -> ModelError:
    status, where = error.status_code, f"models.{role}: {config.title}"
    if status in {400, 413, 422} and OVERFLOW_WORDS.search(error.response.text):
        limit = "" if config.max_tokens is None else f" of {config.max_tokens:,}"
        texts = "lower reflect.trajectory_tokens" if role == "optimizer" else "shorten the texts"
        return ContextOverflow(
            f"{where} has too small a context for this request; the prompt and models.{role}.max_tokens{limit} must "
            f"fit into it together, so set it lower or {texts}: {text}"
        )
    if is_quota_spent(status, error.response.headers, error.response.text):
        return QuotaSpent(
            f"{where} has no quota or credit left ({status}); add some, and run the same command again: {text}",
            status=status,
        )
    if status in RETRIED_STATUSES:
        return ProviderDown(f"{where} answered {status}, after all retries: {text}", status=status)
    kind: Callable[..., ModelError]
    kind, problem = _describe_refusal(error, config, role)
    if endpoint is not None and endpoint.refusal is None and status != 401:
        if endpoint.is_answered and status in REQUEST_STATUSES:
            return RequestRefused(
                f"{where} answers others and refuses this request ({status}): {text}", status=status
            )
        if kind is not BadRequest or status in DOUBTFUL:
            kind = partial(RequestRefused, answers_others=False)
    return kind(f"{where} {problem}: {text}", status=status)


def _describe_refusal(
    error: openai.APIStatusError, config: ModelConfig, role: str
) -> tuple[type[ProviderError], str]:
    """Return the error of a refused role, and what happened and what to do, as the rest of a sentence."""
    status, is_foreign = error.status_code, config.api == "pydantic_ai"
    if status in REFUSED_KEY:
        source = f"set {config.api_key_env} to a valid key"
        if config.key is not None:
            source = "the function passed as `key` must return a valid one"
        elif config.api_key_env is None and is_foreign:
            source = "set the environment variable that its provider reads, or the key in your code, to a valid key"
        elif config.api_key_env is None:
            source = "name the environment variable that holds one in api_key_env"
        return AccessDenied, f"refused the key ({status}); {source}"
    if is_unknown_model(status, error.response.text):
        place = f"models.{role}.model" if config.open_model is None else "the model in your code"
        return UnknownModel, f"does not know this model ({status}); set {place} to one that it serves"
    if status not in NO_API_STATUSES or is_foreign:
        return BadRequest, f"will not serve this request ({status})"
    address = strip_credentials(config.base_url).rstrip("/")
    is_bare = config.api == "openai" and not VERSION_PATH.search(urlsplit(address).path)
    words = f"set models.{role}.base_url to {address}/v1" if is_bare else f"check models.{role}.base_url"
    return BadRequest, f"has no chat completions at this address ({status}); {words}"


def _describe_redirect(redirect: Redirect, config: ModelConfig, role: str) -> str:
    """Return to which address an answer redirects, and the setting to change, without credentials and query."""
    location, advice = str(redirect).partition("?")[0], f"check models.{role}.base_url"
    try:
        address = urljoin(config.base_url, location)
        if urlsplit(address).scheme in {"http", "https"} and urlsplit(address).hostname:
            location = strip_credentials(address)
    except ValueError:  # the header holds no address
        pass
    root = location.removesuffix(COMPLETIONS_PATH)
    if (
        config.api == "openai"
        and root not in {location, config.base_url.rstrip("/")}
        and len(root) < SHOWN_LOCATION
    ):
        advice = f"if that is right, set models.{role}.base_url to {root}"
    return (
        f"redirects requests to {location[:SHOWN_LOCATION]} ({redirect.status}), and no redirect is followed, so that "
        f"no other host gets them; {advice}"
    )


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and the chain of its causes; ``__context__`` does not count."""
    return [error, *(_list_causes(error.__cause__) if error.__cause__ is not None else ())]


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
