"""The openai client's errors under the house's names."""

from __future__ import annotations

import httpx
import openai
from pydantic import ValidationError

from reflact.errors import (
    AccessDenied,
    BadRequest,
    ContextOverflow,
    ModelError,
    ProviderDown,
    ReflactError,
    UnknownModel,
)
from reflact.llm.keys import address_of
from reflact.llm.refusals import unknown_model, untrusted
from reflact.llm.retries import RETRIED
from reflact.llm.secrets import without
from reflact.roles import ModelConfig

OVERFLOW_WORDS = (
    "context_length_exceeded",
    "maximum context length",
    "context window",
    "exceed_context_size",
    "exceeds the available context",
    "prompt is too long",
    "too many tokens",
)
"""How OpenAI, vLLM, llama.cpp and others say that a request is too long."""


def translated(error: Exception, config: ModelConfig, role: str, key: str | None) -> ReflactError:
    """Return what happened, where, and what to do; where the provider quotes the key, it is left out.

    Errors of our own that passed through the client library come out as they went in.
    """
    own = _own(error)
    if own is not None:
        return own
    where = f"models.{role}: {config.model} at {address_of(config.base_url)}"
    if isinstance(error, openai.APIStatusError):
        said = without([key] if key else (), " ".join(error.response.text.split()))
        return _refused(error, config, role, said[:300])
    if isinstance(error, openai.APITimeoutError):
        return ProviderDown(f"{where} did not answer within {config.timeout:g} seconds, after all retries")
    cause = _innermost(error)
    if isinstance(cause, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return BadRequest(
            f"models.{role}.base_url {address_of(config.base_url)!r} is not an address: {cause}"
        )
    reason = without([key] if key else (), str(cause)) or type(cause).__name__
    if untrusted(error):
        return ProviderDown(
            f"{where} shows a certificate that is not trusted here; check models.{role}.base_url, or name "
            f"the file of its authority in SSL_CERT_FILE: {reason}"
        )
    return ProviderDown(
        f"{where} cannot be reached, after all retries; check models.{role}.base_url: {reason}"
    )


def overflow(error: openai.APIStatusError) -> bool:
    """Whether a refusal says that the request is longer than the model's context."""
    text = error.response.text.lower()
    return error.status_code in {400, 413, 422} and any(word in text for word in OVERFLOW_WORDS)


def unusable(answer: object, config: ModelConfig, role: str, key: str | None) -> ProviderDown:
    """Return the error for an answer that is no chat completion although its status says success."""
    where = f"models.{role}: {config.model} at {address_of(config.base_url)}"
    shown = without([key] if key else (), " ".join(str(answer).split()))[:200]
    return ProviderDown(
        f"{where} answered with something that is no chat completion; check base_url, or try again: {shown}",
        status=200,
    )


def sentence(error: ValidationError) -> str:
    """Return what is wrong with a reply, and where in it."""
    problems = []
    for problem in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in problem["loc"])
        problems.append(f"{where}: {problem['msg']}" if where else problem["msg"])
    return "; ".join(problems)


def _refused(error: openai.APIStatusError, config: ModelConfig, role: str, said: str) -> ModelError:
    status, where = error.status_code, f"models.{role}: {config.model} at {address_of(config.base_url)}"
    if overflow(error):
        return ContextOverflow(f"{where} has too small a context for this request: {said}")
    if status in {401, 403}:
        source = f"set {config.api_key_env} to a valid key"
        if config.key is not None:
            source = "the function passed as `key` must return a valid one"
        elif config.api_key_env is None:
            source = "name the environment variable that holds one in api_key_env"
        return AccessDenied(f"{where} refused the key ({status}); {source}: {said}", status=status)
    if status in RETRIED:
        return ProviderDown(f"{where} answered {status}, after all retries: {said}", status=status)
    if unknown_model(status, error.response.text):
        return UnknownModel(
            f"{where}: the endpoint does not know this model ({status}); set models.{role}.model to one that "
            f"it serves: {said}",
            status=status,
        )
    return BadRequest(f"{where} will not serve this request ({status}): {said}", status=status)


def _own(error: BaseException) -> ReflactError | None:
    """Return the error of ours that this one was raised from; what was merely being handled is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ReflactError):
            return cause
        cause = cause.__cause__
    return None


def _innermost(error: BaseException) -> BaseException:
    return _innermost(error.__cause__) if error.__cause__ is not None else error
