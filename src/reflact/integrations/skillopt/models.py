"""Converts what a SkillOpt configuration says of its models."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from reflact.integrations.skillopt.files import SkillOptConfig

ROLES = ("target", "optimizer")
OPENAI_URL = "https://api.openai.com/v1"
CHAT_BACKENDS = {"openai_chat", "azure_openai"}
SHARED_BACKENDS = {"openai_compatible", "claude_chat", "copilot_chat", "codex_exec"}
"""Common backends that serve both roles; any other one serves the target alone."""

BACKENDS: Mapping[str, tuple[str, ...]] = {
    "azure_openai": ("azure", "azure-openai"),
    "openai_chat": (),
    "openai_compatible": ("openai_compatible_chat", "openai-compatible", "compat"),
    "qwen_chat": ("qwen",),
    "minimax_chat": ("minimax",),
    "claude_chat": ("claude", "anthropic"),
    "copilot_chat": ("copilot", "copilot_cli", "github_copilot"),
    "codex_exec": ("codex", "openai"),
}
NON_AZURE_MODES = {"openai_compatible", "compat", "openai"}
TOKEN_AUTH_MODES = {"azure_cli", "managed_identity", "azure_ad", "aad"}
THINKING: Mapping[str, tuple[str, ...]] = {
    "enabled": ("enable", "true", "yes", "on", "1"),
    "disabled": ("disable", "false", "no", "off", "0"),
    "server_default": ("server-default", "unset", "auto", "none", "null"),
}
NO_TEMPERATURE: Mapping[str, tuple[str, ...]] = {"": ("none", "off", "null")}


class Conversion:
    """A configuration under conversion: the keys that were used, the new settings, and remarks."""

    def __init__(self, older: SkillOptConfig) -> None:
        self._older = older
        self.used_keys: set[str] = set()
        self.settings: dict[str, JsonValue] = {}
        self.origins: dict[str, str] = {}
        self.remarks: list[str] = []

    def value(self, name: str) -> JsonValue:
        """Return the value of a key by its flat name; None if it is absent."""
        key = self._older.keys.get(name)
        return None if key is None else key.value

    def text(self, name: str) -> str:
        """Return the text of a key; empty if it is absent or no text."""
        value = self.value(name)
        return value if isinstance(value, str) else ""

    def resolve(self, name: str, spellings: Mapping[str, tuple[str, ...]]) -> JsonValue:
        """Return the value that the spelling of a key stands for; an unknown spelling as it is.

        Args:
            name: The key's flat name.
            spellings: The other spellings of each value; case and spaces around do not matter.
        """
        value = self.value(name)
        if value is None:
            return None
        spelling = str(value).strip().lower()
        return next((known for known, more in spellings.items() if spelling in {known, *more}), value)

    def mark_used(self, *names: str) -> None:
        """Mark keys as used."""
        self.used_keys.update(names)

    def set(self, new: str, value: JsonValue, name: str | None = None) -> None:
        """Set a key of this library, from a key of SkillOpt."""
        if value is None:
            return
        self.settings[new] = value
        if name is not None and name in self._older.keys:
            self.origins[new] = self._older.keys[name].spelling

    def copy(self, name: str, new: str, spellings: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """Set a key to the value of an older one, unless that is empty."""
        self.mark_used(name)
        value = self.resolve(name, spellings or {})
        if value != "":
            self.set(new, value, name)

    def add_remark(self, sentence: str) -> None:
        """Add a remark."""
        self.remarks.append(sentence)

    def find_first(self, *names: str) -> str | None:
        """Return the first of the keys that has a value, and mark all of them as used."""
        self.mark_used(*names)
        return next((name for name in names if self.value(name) is not None and self.value(name) != ""), None)


def convert_roles(conversion: Conversion) -> None:
    """Convert the models of both roles, and how to reach them."""
    conversion.mark_used("reasoning_effort")
    for role in ROLES:
        conversion.copy(f"{role}_model", f"models.{role}.model")
        effort = conversion.text("reasoning_effort")
        if effort:
            conversion.set(f"models.{role}.reasoning_effort", effort, "reasoning_effort")
        backend = _find_backend(conversion, role)
        if backend in CHAT_BACKENDS:
            _convert_azure(conversion, role)
        elif backend == "qwen_chat":
            _convert_qwen(conversion, role)
        elif backend == "minimax_chat":
            _convert_minimax(conversion, role)
        elif backend == "openai_compatible":
            conversion.add_remark(
                f"Set models.{role}.base_url: SkillOpt read the address from an environment variable."
            )
        else:
            conversion.add_remark(
                f"The backend of the {role} has no counterpart; set models.{role} to an endpoint."
            )
    _separate_optimizer(conversion)
    unnamed = [role for role in ROLES if f"models.{role}.model" not in conversion.settings]
    if len(unnamed) == 1:
        conversion.add_remark(
            f"The {unnamed[0]} had SkillOpt's default model; name it in models.{unnamed[0]}.model."
        )


def _find_backend(conversion: Conversion, role: str) -> str:
    """Return the backend of a role: its own one, or the common one if its own is the default."""
    conversion.mark_used(f"{role}_backend", "backend")
    own = str(conversion.resolve(f"{role}_backend", BACKENDS) or "openai_chat")
    common = str(conversion.resolve("backend", BACKENDS) or "openai_chat")
    return common if own == "openai_chat" and (role == "target" or common in SHARED_BACKENDS) else own


def _convert_azure(conversion: Conversion, role: str) -> None:
    endpoint = conversion.find_first(
        f"{role}_azure_openai_endpoint", "azure_openai_endpoint", "azure_endpoint"
    )
    if endpoint is None:
        return
    conversion.set(f"models.{role}.base_url", conversion.value(endpoint), endpoint)
    mode = conversion.find_first(f"{role}_azure_openai_auth_mode", "azure_openai_auth_mode")
    version = conversion.find_first(
        f"{role}_azure_openai_api_version", "azure_openai_api_version", "azure_api_version"
    )
    named = "" if mode is None else conversion.text(mode).strip().lower()
    if named in NON_AZURE_MODES:
        return
    conversion.set(f"models.{role}.api", "azure")
    if version is not None:
        conversion.set(f"models.{role}.api_version", conversion.value(version), version)
    if named in TOKEN_AUTH_MODES:
        conversion.add_remark(
            f"The {role} signed in without a key; in Python, models.{role}.key can fetch its token."
        )


def _convert_qwen(conversion: Conversion, role: str) -> None:
    for name, new in (("base_url", "base_url"), ("timeout_seconds", "timeout"), ("max_tokens", "max_tokens")):
        found = conversion.find_first(f"{role}_qwen_chat_{name}", f"qwen_chat_{name}")
        if found is not None:
            conversion.set(f"models.{role}.{new}", conversion.value(found), found)
    temperature = conversion.find_first(f"{role}_qwen_chat_temperature", "qwen_chat_temperature")
    if temperature is not None:
        conversion.copy(temperature, f"models.{role}.temperature", NO_TEMPERATURE)
    mode = conversion.find_first(f"{role}_qwen_chat_thinking_mode", "qwen_chat_thinking_mode")
    switch = conversion.find_first(f"{role}_qwen_chat_enable_thinking", "qwen_chat_enable_thinking")
    named = mode or switch
    if named is None:
        return
    chosen = str(conversion.resolve(named, THINKING))
    if chosen not in THINKING:
        conversion.add_remark(f"{named} has a value that SkillOpt does not know; it was left out.")
    elif chosen == "enabled" or (chosen == "disabled" and mode is not None):  # switched off, it sends nothing
        body: JsonValue = {"chat_template_kwargs": {"enable_thinking": chosen == "enabled"}}
        conversion.set(f"models.{role}.extra_body", body, named)


def _convert_minimax(conversion: Conversion, role: str) -> None:
    for name in ("base_url", "model", "temperature", "max_tokens"):
        found = conversion.find_first(f"minimax_{name}")
        if found is not None:
            conversion.set(f"models.{role}.{name}", conversion.value(found), found)


def _separate_optimizer(conversion: Conversion) -> None:
    """Prevent that the optimizer inherits a connection of the target that it never had."""
    if "models.target.base_url" in conversion.settings:
        conversion.settings.setdefault("models.optimizer.base_url", OPENAI_URL)
    if "models.target.api" in conversion.settings:
        conversion.settings.setdefault("models.optimizer.api", "openai")
