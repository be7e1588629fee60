"""Keys go out with requests, and nowhere else: what comes back, and what is logged of it, is freed of them.

Some servers send back what they were sent, in headers, in the words of an error, or in an answer. A key is
taken out of all that where it comes in, so that nothing further up can store, record, log or show it.

A key is known in every spelling that JSON has for it, also within JSON within JSON: an answer that quotes a
key with a quotation mark in it does not hold the key letter by letter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import regex

from reflact.config.models import KeyProvider, ModelConfig
from reflact.errors import ConfigError
from reflact.llm.cache_keys import strip_to_endpoint

KEY_MARK = "[key]"
"""What stands where a key was."""

KEY_HEADERS = ("authorization", "api-key")
"""The headers that carry keys."""

STANDARD_HEADERS = {
    "host",
    "connection",
    "accept",
    "accept-encoding",
    "content-type",
    "content-length",
    "user-agent",
}
"""The headers that every request has."""

MIN_KEY_CHARACTERS = 12
"""A key has at least so many characters, and a digit; what has not is a placeholder and may be a word."""

HTTP_LOGGERS = ("connection", "http11", "http2", "proxy", "socks")
"""The loggers of httpcore; at their lowest level they write down what a server sent, as it came."""


async def resolve_key(config: ModelConfig, role: str) -> str | None:
    """Return a role's key from where its settings say, None for an endpoint without keys.

    Raises:
        ConfigError: There is none, or what is there is no key.
    """
    if config.key is not None:
        source, key = "the function passed as `key`", await _call_provider(config.key, role)
    elif config.api_key_env is not None:
        source = f"the environment variable {config.api_key_env}"
        key = os.environ.get(config.api_key_env, "")
    else:
        return None
    if not key:
        raise ConfigError(
            f"models.{role}: {source} holds no key; set it, "
            f"name another in api_key_env, or set api_key_env to null for an endpoint without keys"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"models.{role}: {source} holds more than a key: a space, a line break or another "
            f"character that no key has; remove it"
        )
    return key


async def _call_provider(source: KeyProvider, role: str) -> str:
    try:
        return await source()
    except Exception as error:  # noqa: BLE001 - foreign code, whose words may hold the key
        kind = type(error).__name__
    raise ConfigError(
        f"models.{role}: the function passed as `key` failed with {kind}; its words are not "
        "repeated, since they may hold the key"
    )


class RedactingTransport(httpx.AsyncBaseTransport):
    """Takes the key that a request carries out of the answer's headers and body.

    Args:
        inner: Sends a request.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return its answer without the key, decoded."""
        response = await self._inner.handle_async_request(request)
        keys = find_keys(request)
        if not keys:
            return response
        coded = {"content-encoding", "content-length", "transfer-encoding"}
        headers = [
            (name, remove_keys(keys, value)) for name, value in response.headers.items() if name not in coded
        ]
        return httpx.Response(
            response.status_code,
            headers=headers,
            stream=_ScrubbedStream(response, keys),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        """Close what sends."""
        await self._inner.aclose()


class _ScrubbedStream(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, keys: Sequence[str]) -> None:
        self._response = response
        self._keys = [regex.compile(build_key_pattern(key).encode()) for key in keys]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        held = b""
        async for piece in self._response.aiter_bytes():
            text = held + piece
            for key in self._keys:
                text = key.sub(KEY_MARK.encode(), text)
            ready = min(_partial_start(key.search(text, partial=True), len(text)) for key in self._keys)
            held = text[ready:]
            if ready:
                yield text[:ready]
        if held:
            yield held

    async def aclose(self) -> None:
        await self._response.aclose()


class Scrubber:
    """Takes keys out of a text that comes in pieces, and holds back what may be the beginning of one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [regex.compile(build_key_pattern(key)) for key in keys]
        self._held = ""

    def feed(self, piece: str) -> str:
        """Take in a piece and return what is ready."""
        text = self._held + piece
        for key in self._keys:
            text = key.sub(KEY_MARK, text)
        starts = (_partial_start(key.search(text, partial=True), len(text)) for key in self._keys)
        ready = min(starts, default=len(text))
        self._held = text[ready:]
        return text[:ready]


def _partial_start(found: regex.Match[Any] | None, end: int) -> int:
    """Return where the end of a text begins that may be the beginning of a key."""
    return end if found is None else found.start()


def build_key_pattern(key: str) -> str:
    """Return the pattern of a key in all its spellings: as it is, and as JSON in JSON, three deep, has it.

    JSON puts a backslash before a quotation mark, a slash and a backslash, and may write any character as its
    number; put in JSON again, every backslash becomes two.
    """
    parts = []
    for run in regex.findall(r"\\+|[^\\]", key):
        units = run.encode("utf-16-be").hex()
        numbers = "".join(rf"\\{{1,8}}u(?i:{units[at : at + 4]})" for at in range(0, len(units), 4))
        plain = regex.escape(run)
        if run in {'"', "/"}:
            plain = rf"\\{{0,7}}{plain}"
        elif run.startswith("\\"):
            plain = rf"\\{{{len(run)},{8 * len(run)}}}"
        parts.append(f"(?:{plain}|{numbers})")
    return "".join(parts)


def find_keys(request: httpx.Request) -> tuple[str, ...]:
    """Return the keys that a request carries."""
    values = [request.headers[name] for name in KEY_HEADERS if name in request.headers]
    return tuple(key for key in (value.removeprefix("Bearer ") for value in values) if is_key(key))


def is_key(text: str) -> bool:
    """Whether a text is a real key, and not a placeholder that an answer may hold as a word of its own."""
    return len(text) >= MIN_KEY_CHARACTERS and any(character.isdigit() for character in text)


def remove_keys(keys: Sequence[str], text: str) -> str:
    """Return a text with a mark in the place of each key, however it is spelled."""
    for key in keys:
        text = regex.sub(build_key_pattern(key), KEY_MARK, text)
    return text


def refuse_key_in(config: ModelConfig, role: str, key: str) -> None:
    """Refuse settings that hold the key itself.

    Raises:
        ConfigError: Names the settings, and where the key belongs.
    """
    if not is_key(key):
        return
    plain = {name: config.model_dump_json(include={name}) for name in type(config).model_fields}
    held = [f"models.{role}.{name}" for name, text in plain.items() if remove_keys([key], text) != text]
    if held:
        raise ConfigError(
            f"the key itself stands in {', '.join(held)}, and settings are stored with the run: take it out "
            "there; keys come from the variable that api_key_env names, or from a function"
        )


def build_header_hook(config: ModelConfig, key: str | None) -> Callable[[httpx.Request], Awaitable[None]]:
    """Return a hook that sends the configured key, and nothing that a client library found elsewhere.

    The openai client adds what it finds in variables such as AZURE_OPENAI_AD_TOKEN, which would take the
    key's place, or OPENAI_CUSTOM_HEADERS. The key goes to the configured host alone, wherever an answer may
    redirect a request.
    """
    home = strip_to_endpoint(config.base_url)
    name, value = ("api-key", key) if config.api == "azure" else ("authorization", f"Bearer {key}")

    async def check(request: httpx.Request) -> None:
        headers = {
            n: v for n, v in request.headers.items() if n in STANDARD_HEADERS or n.startswith("x-reflact-")
        }
        if key is not None and value is not None and strip_to_endpoint(str(request.url)) == home:
            headers[name] = value
        request.headers = httpx.Headers(headers)

    return check


@contextmanager
def redact_logs(key: str) -> Iterator[None]:
    """Keep a key out of what the network's own loggers write, as long as the block lasts."""

    def free(record: logging.LogRecord) -> bool:
        words = record.getMessage()
        freed = remove_keys([key], words)
        if freed != words:
            record.msg, record.args = freed, ()
        return True

    with ExitStack() as stack:
        for name in HTTP_LOGGERS if is_key(key) else ():
            logger = logging.getLogger(f"httpcore.{name}")
            logger.addFilter(free)
            stack.callback(logger.removeFilter, free)
        yield
