"""The configuration of models by role, and what all sections of a configuration share."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

KeyProvider = Callable[[], Awaitable[str]]
CHANGEABLE: dict[str, JsonValue] = {"changeable": True}

SECRET_NAME = re.compile(
    r"(api|access|auth|private|secret|subscription)key$|secret|passw|credential|authorization|cookie"
    r"|^(api|access|auth|bearer|hf|id|refresh|session)?token$"
)
"""What names of secrets look like, in lower case and without dashes and underscores."""


class ConfigSection(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, hide_input_in_errors=True
    )


class Price(ConfigSection):
    """What a model's tokens cost, in dollars for a million."""

    input: float = Field(ge=0, description="Input tokens.")
    cached_input: float | None = Field(
        None, ge=0, description="Input tokens that the provider had cached; null: as the others."
    )
    output: float = Field(ge=0, description="Output tokens.")


class ModelConfig(ConfigSection):
    """One role's model and how to reach it."""

    model: str = Field(
        "", description="Model name, as the endpoint knows it; needed unless the role is passed in Python."
    )
    base_url: str = Field(
        "https://api.openai.com/v1",
        pattern=r"^https?://\S+$",
        description="Root of an OpenAI-compatible API.",
    )
    api: Literal["openai", "azure"] = Field("openai", description="API flavour.")
    api_version: str | None = Field(None, description="Azure's API version; used by `api: azure` only.")
    api_key_env: str | None = Field(
        "OPENAI_API_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of the environment variable that holds the key; null for endpoints without keys.",
        json_schema_extra=CHANGEABLE,
    )
    key: KeyProvider | None = Field(
        None,
        exclude=True,
        repr=False,
        description="In Python only: an async function that returns the key; wins over `api_key_env`.",
        json_schema_extra=CHANGEABLE,
    )
    mode: Literal["auto", "json_schema", "tools", "json_object_with_schema", "json"] = Field(
        "auto",
        description="How typed replies are asked for; `auto` settles on the first the endpoint accepts.",
    )
    stream: bool = Field(
        True,
        description="Have typed replies streamed where somebody watches, so that drafts of them can be "
        "shown. An endpoint that refuses, or does not count what it streams, is asked for whole answers from "
        "then on.",
        json_schema_extra=CHANGEABLE,
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="Sampling temperature; null leaves it out."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling; null leaves it out.")
    seed: int | Literal["per_call"] | None = Field(
        None,
        description="Sampling seed to send; `per_call` derives one from each call's place in the plan.",
    )
    max_tokens: int | None = Field(None, ge=1, description="Cap on a reply's tokens; null leaves it out.")
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="The request field that carries the cap."
    )
    reasoning_effort: str | None = Field(None, description="Sent as `reasoning_effort`; null leaves it out.")
    extra_body: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further fields of the request body, sent as they are."
    )
    call_id_header: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9-]+$",
        description="Header in which to send the call's logical sample id, for tracing at a proxy.",
        json_schema_extra=CHANGEABLE,
    )
    timeout: float = Field(120.0, gt=0, description="Seconds for one request.", json_schema_extra=CHANGEABLE)
    concurrency: int = Field(
        8,
        ge=1,
        description="Requests in flight at most; of all roles that use one endpoint, the strictest counts "
        "for all of them, here and in the next three keys.",
        json_schema_extra=CHANGEABLE,
    )
    requests_per_minute: int | None = Field(
        None,
        ge=1,
        description="Requests in a minute at most, evenly spaced; null: no limit.",
        json_schema_extra=CHANGEABLE,
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens in a minute at most, estimated before a request and corrected after; null: no "
        "limit.",
        json_schema_extra=CHANGEABLE,
    )
    adaptive: bool = Field(
        True,
        description="Find the rate that the endpoint sustains once it answers 429 or 503.",
        json_schema_extra=CHANGEABLE,
    )
    max_retries: int = Field(
        5,
        ge=0,
        description="Repeats after connection errors, time-outs, 408, 409, 429, 5xx and garbled answers.",
        json_schema_extra=CHANGEABLE,
    )
    price: Price | None = Field(
        None,
        description="`input`, `output` and, if it differs, `cached_input`, in dollars for a million tokens; "
        "null: the list price of this model at this `base_url`, where there is one.",
        json_schema_extra=CHANGEABLE,
    )
    unpriced: bool = Field(
        False,
        description="Let calls without a known price cost nothing against `budget.max_usd`.",
        json_schema_extra=CHANGEABLE,
    )
    reasks: int = Field(2, ge=0, description="Times an invalid reply is sent back with the reason.")

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, value: str) -> str:
        try:
            address = urlsplit(value)
            bare = address.hostname and not (address.query or address.fragment or "@" in address.netloc)
            sound = address.scheme in {"http", "https"} and address.port != 0
        except ValueError:
            bare = sound = False
        if not bare or not sound or set("?#") & set(value):
            raise ValueError(
                "an address is http or https, host, port (1 to 65535) and path alone; a key belongs in the "
                "variable that api_key_env names, and Azure's version in api_version"
            )
        return value

    @field_validator("call_id_header")
    @classmethod
    def _check_call_id_header(cls, value: str | None) -> str | None:
        if value is not None and is_secret_name(value):
            raise ValueError("this header is for keys, which come from the variable that api_key_env names")
        return value

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        secrets = sorted(find_secret_names(value))
        if secrets:
            raise ValueError(
                f"{', '.join(secrets)} looks like the name of a secret, and settings are stored with the "
                "run: keys come from the variable that api_key_env names"
            )
        return value


def is_secret_name(name: str) -> bool:
    """Whether a name is one that secrets go by."""
    return SECRET_NAME.search(re.sub("[-_]", "", name.lower())) is not None


def find_secret_names(value: JsonValue) -> set[str]:
    """Return the names of secrets in a value, at any depth."""
    if isinstance(value, list):
        return {name for part in value for name in find_secret_names(part)}
    if not isinstance(value, dict):
        return set()
    return {name for name in value if is_secret_name(name)} | find_secret_names(list(value.values()))


CONNECTION_KEYS = ("model", "base_url", "api", "api_version", "api_key_env", "key", "mode")
PRICING_KEYS = ("price", "unpriced")
"""Shared by roles that ask the same model at the same place."""
LIMIT_KEYS = ("concurrency", "requests_per_minute", "tokens_per_minute", "adaptive")
"""Shared by roles that ask at the same place: the strictest of each would count for both anyway."""


class ModelsConfig(ConfigSection):
    """The models by role; optimizer and critic take the target's connection where they name none.

    At the target's endpoint they take its limits too, and for the target's model its prices. Only the
    critic's model is its own to name: nobody should judge himself by default.
    """

    target: ModelConfig = Field(default_factory=ModelConfig, description="The frozen agent's model.")
    optimizer: ModelConfig = Field(
        default_factory=ModelConfig, description="The model that analyses and edits."
    )

    critic: ModelConfig = Field(
        default_factory=ModelConfig, description="The model that scores, where a critic is used."
    )

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("target"), Mapping):
            return value
        target, heirs = value["target"], {}
        for role, names in (("optimizer", CONNECTION_KEYS), ("critic", CONNECTION_KEYS[1:])):
            own = value.get(role)
            if own is None or isinstance(own, Mapping):
                heirs[role] = {**_select_inherited(target, own or {}, names), **(own or {})}
        return {**value, **heirs}


def _select_inherited(
    target: Mapping[str, Any], own: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Return what a role takes from the target beside what is its own."""
    there, same = (own.get(key, target.get(key)) == target.get(key) for key in ("base_url", "model"))
    names = (*names, *(LIMIT_KEYS if there else ()), *(PRICING_KEYS if there and same else ()))
    return {key: value for key, value in target.items() if key in names}
