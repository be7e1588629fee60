"""The models of the older trainer, by role, in this library's terms."""

from __future__ import annotations

from pydantic import JsonValue

from reflact.importing.older_config import OlderConfig

ROLES = ("target", "optimizer")
OPENAI = "https://api.openai.com/v1"
CHAT = {"openai_chat", "azure_openai"}
THINKING = {"enabled": True, "disabled": False}


class Reading:
    """An older configuration under conversion: what was looked at, and what has come of it."""

    def __init__(self, older: OlderConfig) -> None:
        self._older = older
        self.used: set[str] = set()
        self.settings: dict[str, JsonValue] = {}
        self.origins: dict[str, str] = {}
        self.remarks: list[str] = []

    def value(self, name: str) -> JsonValue:
        """Return the value of a key by its flat name; None where it is absent."""
        key = self._older.keys.get(name)
        return None if key is None else key.value

    def text(self, name: str) -> str:
        """Return the text of a key; empty where it is absent or no text."""
        value = self.value(name)
        return value if isinstance(value, str) else ""

    def use(self, name: str) -> None:
        """Note that a key was looked at."""
        self.used.add(name)

    def set(self, new: str, value: JsonValue, name: str | None = None) -> None:
        """Set a key of this library, from a key of the older tool."""
        if value is None:
            return
        self.settings[new] = value
        if name is not None and name in self._older.keys:
            self.origins[new] = self._older.keys[name].shown

    def copy(self, name: str, new: str) -> None:
        """Take a key over as it is; empty text stands for nothing."""
        self.use(name)
        value = self.value(name)
        if value != "":
            self.set(new, value, name)

    def say(self, sentence: str) -> None:
        """Add a remark."""
        self.remarks.append(sentence)

    def first(self, *names: str) -> str | None:
        """Return the first of the keys that holds something, all of them being looked at."""
        self.used.update(names)
        return next((name for name in names if self.value(name) is not None and self.value(name) != ""), None)


def role_settings(reading: Reading) -> None:
    """Convert what says which models play the roles and how to reach them."""
    reading.use("backend")
    reading.use("reasoning_effort")
    for role in ROLES:
        reading.copy(f"{role}_model", f"models.{role}.model")
        effort = reading.text("reasoning_effort")
        if effort:
            reading.set(f"models.{role}.reasoning_effort", effort, "reasoning_effort")
        backend = reading.first(f"{role}_backend", "backend")
        named = "openai_chat" if backend is None else reading.text(backend)
        if named in CHAT:
            _azure(reading, role)
        elif named == "qwen_chat":
            _qwen(reading, role)
        elif named == "minimax_chat":
            _minimax(reading, role)
        elif named == "openai_compatible":
            reading.say(f"Set models.{role}.base_url: the older tool had it in an environment variable.")
        else:
            reading.say(f"The backend of the {role} has no counterpart; set models.{role} to an endpoint.")
    _apart(reading)
    unnamed = [role for role in ROLES if f"models.{role}.model" not in reading.settings]
    if len(unnamed) == 1:
        reading.say(
            f"The {unnamed[0]} had the older tool's default model; name it in models.{unnamed[0]}.model."
        )


def _azure(reading: Reading, role: str) -> None:
    endpoint = reading.first(f"{role}_azure_openai_endpoint", "azure_openai_endpoint")
    if endpoint is None:
        return
    reading.set(f"models.{role}.base_url", reading.value(endpoint), endpoint)
    mode = reading.first(f"{role}_azure_openai_auth_mode", "azure_openai_auth_mode")
    version = reading.first(f"{role}_azure_openai_api_version", "azure_openai_api_version")
    if mode is not None and reading.text(mode) == "openai_compatible":
        return
    reading.set(f"models.{role}.api", "azure")
    if version is not None:
        reading.set(f"models.{role}.api_version", reading.value(version), version)
    if mode is not None and reading.text(mode) in {"azure_cli", "managed_identity"}:
        reading.say(f"The {role} signed in without a key; in Python, models.{role}.key can fetch its token.")


def _qwen(reading: Reading, role: str) -> None:
    for name, new in (
        ("base_url", "base_url"),
        ("temperature", "temperature"),
        ("timeout_seconds", "timeout"),
        ("max_tokens", "max_tokens"),
    ):
        found = reading.first(f"{role}_qwen_chat_{name}", f"qwen_chat_{name}")
        if found is not None:
            reading.set(f"models.{role}.{new}", reading.value(found), found)
    mode = reading.first(f"{role}_qwen_chat_thinking_mode", "qwen_chat_thinking_mode")
    switch = reading.first(f"{role}_qwen_chat_enable_thinking", "qwen_chat_enable_thinking")
    thinks = None if mode is None else THINKING.get(reading.text(mode))
    if mode is None and switch is not None and isinstance(reading.value(switch), bool):
        thinks = reading.value(switch) is True
    if thinks is not None:
        body: JsonValue = {"chat_template_kwargs": {"enable_thinking": thinks}}
        reading.set(f"models.{role}.extra_body", body, mode or switch)


def _minimax(reading: Reading, role: str) -> None:
    for name in ("base_url", "model", "temperature", "max_tokens"):
        found = reading.first(f"minimax_{name}")
        if found is not None:
            reading.set(f"models.{role}.{name}", reading.value(found), found)


def _apart(reading: Reading) -> None:
    """Keep the optimizer from taking over a connection of the target that it never had."""
    if "models.target.base_url" in reading.settings:
        reading.settings.setdefault("models.optimizer.base_url", OPENAI)
    if "models.target.api" in reading.settings:
        reading.settings.setdefault("models.optimizer.api", "openai")
