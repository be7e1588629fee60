"""Models by role, executors and telemetry, the base of all sections, and names of secrets."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

KeyProvider = Callable[[], Awaitable[str] | str]
ModelOpener = Callable[[], object]
CHANGEABLE: dict[str, JsonValue] = {"changeable": True}

# A name, or an import path: module, colon, name.
OBJECT_NAME = r"^[A-Za-z_][\w.-]*(:[A-Za-z_][\w.]*)?$"

# Pattern of the names of secrets, in lower case without dashes and underscores.
SECRET_NAME = re.compile(
    r"(api|access|auth|private|secret|subscription)key$|secret|passw|credential|authorization"
    r"|cookie"
    r"|^(api|access|auth|bearer|hf|id|refresh|session)?token$"
)


# Names of this machine, also as a container sees it.
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "host.docker.internal"})  # noqa: S104


def is_local_address(url: str) -> bool:
    """Whether a root of an API is on this machine; False if it is no address."""
    with suppress(ValueError):
        return urlsplit(url).hostname in LOCAL_HOSTS
    return False


def expand_home(path: Path) -> Path:
    """Return a path with a home folder in place of a leading ``~``, if it is known."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def changeable_field(default: Any, **arguments: Any) -> Any:
    """Return a pydantic field that may differ between two starts of the same run."""
    return option(default, json_schema_extra=CHANGEABLE, **arguments)


def option(default: Any, **arguments: Any) -> Any:
    """Return a pydantic field with a default, which type checkers see only in this form."""
    return Field(default, **arguments)


class ConfigSection(BaseModel):
    """Base of all sections: immutable, without unknown keys, true and false are no numbers.

    The text below a key describes it in the reference, docs/configuration.md. ``outputs`` are paths
    that a run writes, which count from the current folder.
    """

    outputs: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        hide_input_in_errors=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_wrong_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a truth value as number, as which YAML reads ``off``, and a NUL."""
        if isinstance(value, str | Path) and "\0" in str(value):
            raise ValueError("it has a NUL character; remove it")
        values = value.values() if isinstance(value, Mapping) else (value,)
        if found := [each for each in values if isinstance(each, bool)]:
            kinds = list_kinds(cls.model_fields[str(info.field_name)].annotation)
            if (int in kinds or float in kinds) and bool not in kinds:
                numbers = "a number or null" if NoneType in kinds else "a number"
                raise ValueError(f"expected {numbers}, not {str(found[0]).lower()}")
        return value


def list_kinds(kind: Any) -> list[Any]:
    """Return a type and all types in it."""
    return [kind, *(each for part in get_args(kind) for each in list_kinds(part))]


class Price(ConfigSection):
    """The price of a model's tokens, in dollars per million."""

    input: float = Field(ge=0)
    """Input tokens."""

    cached_input: float | None = option(None, ge=0)
    """Cached input tokens; null: the same as `input`."""

    output: float = Field(ge=0)
    """Output tokens."""


class ModelConfig(ConfigSection):
    """The model of a role, its endpoint and its request settings."""

    model: str = ""
    """Model name of the endpoint; required unless the role is passed in Python. With `api:
    pydantic_ai`: `provider:name`, such as `anthropic:claude-sonnet-4-5`."""

    base_url: str = option("https://api.openai.com/v1", pattern=r"^https?://\S+$")
    """Root of an OpenAI-compatible API."""

    api: Literal["openai", "azure", "pydantic_ai"] = "openai"
    """The kind of API. `pydantic_ai` calls other providers; the key then comes from the provider's
    own environment variable unless `api_key_env` names one."""

    api_version: str | None = None
    """Azure's API version; used by `api: azure` only."""

    api_key_env: str | None = changeable_field(
        "OPENAI_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"
    )
    """Name of the environment variable that holds the key; null for endpoints without keys."""

    open_model: ModelOpener | None = changeable_field(None, exclude=True, repr=False)
    """In Python only, with `api: pydantic_ai`: a function that returns the model object."""

    key: KeyProvider | None = changeable_field(None, exclude=True, repr=False)
    """In Python only: a function, async or not, that returns the key in place of `api_key_env`. It
    is called again if the endpoint refuses the key (401)."""

    auth: Literal["key", "token"] = changeable_field("key")
    """`token`: the function passed as `key` returns a bearer token, as Azure takes it."""

    mode: Literal["auto", "json_schema", "tools", "json_object_with_schema", "json"] = "auto"
    """How typed replies are requested; `auto` uses the first mode that the endpoint follows."""

    temperature: float | None = option(None, ge=0, le=2)
    """Sampling temperature; null omits it."""

    seed: int | Literal["per_call"] | None = None
    """Sampling seed to send; `per_call` derives one from each call's id."""

    max_tokens: int | None = option(None, ge=1)
    """Maximum of a reply's tokens; null omits it."""

    reasoning_effort: str | None = None
    """Sent as `reasoning_effort`; null omits it."""

    extra_body: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request body, sent as they are."""

    call_id_header: str | None = changeable_field(None, pattern=r"^[A-Za-z0-9-]+$")
    """Header for the call id, for tracing at a proxy."""

    timeout: float = changeable_field(120.0, gt=0)
    """Seconds for one request."""

    concurrency: int = changeable_field(8, ge=1)
    """Maximum of requests at the same time. Of roles with the same endpoint and key, the strictest
    value holds for all together, here and in the next three keys."""

    requests_per_minute: int | None = changeable_field(None, ge=1)
    """Maximum of requests per minute, evenly spaced; null: no limit."""

    tokens_per_minute: int | None = changeable_field(None, ge=1)
    """Maximum of tokens per minute, estimated first and corrected afterwards; null: no limit."""

    limits_group: str | None = changeable_field(None, min_length=1)
    """Roles and trainers with the same endpoint and group share these limits; null: same key."""

    max_retries: int = changeable_field(5, ge=0)
    """Maximum of retries after connection errors, 408, 409, 429, 5xx and garbled responses."""

    price: Price | None = changeable_field(None)
    """`input`, `output` and, if it differs, `cached_input`, in dollars per million tokens; null:
    the known list price of this model at this `base_url`."""

    reasks: int = option(2, ge=0)
    """Maximum number of times that an invalid reply is sent back with the reason."""

    @property
    def title(self) -> str:
        """The model and where it is asked, for messages."""
        if self.api == "pydantic_ai":
            return f"{self.model} through pydantic-ai"
        return f"{self.model} at {self.base_url}"

    @model_validator(mode="before")
    @classmethod
    def _fill_provider(cls, value: Any) -> Any:
        """Give a model of pydantic-ai an endpoint of its own, and no key of OpenAI."""
        if not isinstance(value, Mapping) or value.get("api") != "pydantic_ai":
            return value
        name = str(value.get("model", "")).partition(":")[0].lower()
        host = re.sub("[^a-z0-9]+", "-", name).strip("-") or "provider"
        return {"base_url": f"https://{host}.invalid", "api_key_env": None, **value}

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, value: str) -> str:
        try:
            address = urlsplit(value)
            sound = bool(address.hostname) and "@" not in address.netloc and address.port != 0
        except ValueError:
            sound = False
        if not sound or set("?#") & set(value):
            raise ValueError(
                "an address may have only http or https, a host, a port (1 to 65535) and a path; "
                "use api_key_env for a key, and api_version for Azure's version"
            )
        return value

    @field_validator("call_id_header")
    @classmethod
    def _check_call_id_header(cls, value: str | None) -> str | None:
        if value is not None and is_secret_name(value):
            raise ValueError("a header with this name would hold a key; use api_key_env for keys")
        return value

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return refuse_secrets(value)


# Stands for the token of a rollout, which an agent gets in place of a key.
TOKEN = "{token}"  # noqa: S105 - a placeholder


def is_secret_name(name: str) -> bool:
    """Whether a name looks like that of a secret."""
    return SECRET_NAME.search(re.sub("[-_]", "", name.lower())) is not None


def find_secret_names(value: JsonValue) -> set[str]:
    """Return the names of secrets in a JSON value, at any depth; the token of a rollout is none."""
    if isinstance(value, list):
        return {name for part in value for name in find_secret_names(part)}
    if not isinstance(value, dict):
        return set()
    own = {name for name, part in value.items() if is_secret_name(name) and part != TOKEN}
    return own | find_secret_names(list(value.values()))


def refuse_secrets(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return settings; raise ValueError if one looks like a secret."""
    if secrets := sorted(find_secret_names(value)):
        raise ValueError(
            f"{', '.join(secrets)} looks like the name of a secret, and settings are stored with "
            "the run: pass keys in environment variables"
        )
    return value


CONNECTION_KEYS = ("model", "base_url", "api", "api_version", "api_key_env", "key", "auth", "mode")

# Keys that roles with the same model and endpoint share.
PRICING_KEYS = ("price",)

# Keys that roles with the same endpoint share; the strictest value counts for all of them anyway.
LIMIT_KEYS = ("concurrency", "requests_per_minute", "tokens_per_minute", "limits_group")


class ModelsConfig(ConfigSection):
    """The models by role; optimizer and critic inherit the target's connection.

    With the target's endpoint they also inherit its limits, and with its model its prices. The
    critic does not inherit the model, because by default no model should judge itself.
    """

    target: ModelConfig = ModelConfig()
    optimizer: ModelConfig = ModelConfig()
    critic: ModelConfig = ModelConfig()

    @property
    def is_optimizer_separate(self) -> bool:
        """Whether the optimizer has another model, address or key than the target."""
        keys = [key for key in CONNECTION_KEYS if key != "mode"]
        return any(getattr(self.optimizer, key) != getattr(self.target, key) for key in keys)

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("target"), Mapping):
            return value
        target = value["target"]
        heirs: dict[str, Any] = {}
        for role, names in (("optimizer", CONNECTION_KEYS), ("critic", CONNECTION_KEYS[1:])):
            own = value.get(role)
            if own is None:
                own = {}
            if isinstance(own, Mapping):
                heirs[role] = {**_select_inherited(target, own, names), **own}
        return {**value, **heirs}


class TelemetryConfig(ConfigSection):
    """The content of spans."""

    content: bool = changeable_field(False)
    """Include prompts, replies and error messages in spans; keys are removed."""


class ExecutorConfig(ConfigSection):
    """Where the environment of a rollout runs; no result depends on it."""

    name: Literal["local", "ray"] = changeable_field("local")
    """`local`: in the event loop; `ray`: in workers of Ray, on this machine or a cluster."""

    workers: int | None = changeable_field(None, ge=1)
    """Maximum of workers (`ray`); null: one for each processor of this machine."""

    address: str | None = changeable_field(None, min_length=1)
    """Address of a running cluster, or `auto` (`ray`); null: a new one on this machine."""

    host: str = changeable_field("127.0.0.1", min_length=1)
    """Address at which workers reach the trainer; those of other machines need another one."""

    variables: tuple[str, ...] = changeable_field(())
    """Environment variables that workers get although they look like secrets; never a model's key.
    """


def _select_inherited(
    target: Mapping[str, Any], own: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Return the settings that a role inherits from the target."""

    def is_same(key: str) -> bool:
        return bool(own.get(key, target.get(key)) == target.get(key))

    if not is_same("api"):
        return {}
    inherited = [*names]
    if is_same("base_url"):
        inherited += LIMIT_KEYS
    if is_same("base_url") and is_same("model"):
        inherited += PRICING_KEYS
    return {key: value for key, value in target.items() if key in inherited}
