"""Which answers and failures mean that no call of a role will ever be served. Pure."""

from __future__ import annotations

import re
import ssl

REFUSED_KEY = frozenset({401, 403})

UNKNOWN_MODEL = frozenset({400, 404})
"""Statuses with which endpoints say that they do not know a model."""

MODEL_WORDS = re.compile(
    r"model_not_found|deploymentnotfound|model:|(no such|unknown|invalid|not a valid) (model|deployment)"
    r"|\b(model|deployment)s?\b.{0,120}?(not exist|not found|not available|no access|have access)",
    re.IGNORECASE | re.DOTALL,
)
"""How OpenAI, Azure, vLLM, Ollama, Anthropic, Mistral and others say so."""

FORMAT_WORDS = re.compile(
    r"response_format|json_schema|json_object|\btools?\b|tool_choice|\bformat\b|\bstream", re.IGNORECASE
)
"""What a refusal is about instead: the same model may accept another form of request."""


def of_role(status: int, text: str) -> bool:
    """Whether an answer refuses every call of a role: its key, or its model."""
    return status in REFUSED_KEY or unknown_model(status, text)


def unknown_model(status: int, text: str) -> bool:
    """Whether an answer says that the endpoint does not know the model."""
    if status not in UNKNOWN_MODEL or FORMAT_WORDS.search(text):
        return False
    return MODEL_WORDS.search(text) is not None


def untrusted(failure: BaseException) -> bool:
    """Whether a connection failed because the other side's certificate is not trusted."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
