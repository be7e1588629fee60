"""Redaction of API keys: keys leave with requests only, and are removed from answers and logs.

Some servers send a key back in headers, error messages or answers. This module removes it on
arrival, in every JSON spelling, so that no other code can store, record, log or show it.
"""

from __future__ import annotations

import logging
import os
import traceback
import zlib
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
import regex

from reflact.adapters import CatchExits
from reflact.config.models import KeyProvider, ModelConfig
from reflact.errors import ConfigError
from reflact.llm.completions import AnswerFault

# The replacement for a key.
KEY_MARK = "[key]"
# Headers that carry keys.
KEY_HEADERS = ("authorization", "api-key")
# A text with fewer characters, or without a digit, is a placeholder and no key.
MIN_KEY_CHARACTERS = 12
# The extension of a request that holds the most bytes of its answer.
MAX_BYTES = "reflact_max_bytes"
# The bound of a request that states none.
DEFAULT_MAX_BYTES = 12 * 2**20
# The most bytes that are decoded at once.
DECODED_BYTES = 2**16
CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
DETECTS_FORMAT = zlib.MAX_WBITS | 32
# The first byte of each member of a gzip body; any other text after a member is ignored.
GZIP_START = b"\x1f"
# Loggers of httpcore, which log raw answers at their lowest level.
HTTP_LOGGERS = ("connection", "http11", "http2", "proxy", "socks")


async def resolve_key(config: ModelConfig, role: str) -> str | None:
    """Return a role's key from its configured source; None for an endpoint without keys."""
    if config.key is not None:
        source = "the function passed as `key`"
        key = await _call_provider(config.key, role)
    elif config.api_key_env is not None:
        source = f"the environment variable {config.api_key_env}"
        key = os.environ.get(config.api_key_env, "")
    else:
        return None
    if not key:
        raise ConfigError(
            f"models.{role}: {source} has no key; set it, "
            f"name another in api_key_env, or set api_key_env to null for an endpoint without keys"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"models.{role}: {source} contains a space, a line break or another "
            f"character that no key has; remove it"
        )
    return key


@dataclass
class KeySource:
    """The key of a role; ``known`` are all keys so far, of which the last one counts."""

    config: ModelConfig
    role: str
    known: list[str] = field(default_factory=list)
    _lock: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))

    async def fetch(self, refused: str | None = None) -> str | None:
        """Return the key; the caller's function is asked again for one that was refused.

        Raises:
            ConfigError: The source has no key, or a text that cannot be a key.
        """
        async with self._lock:
            is_refused = refused is not None and self.config.key is not None
            if not self.known or (is_refused and refused == self.known[-1]):
                key = await resolve_key(self.config, self.role)
                if key is not None and key not in self.known[-1:]:
                    self.known.append(key)
        return self.known[-1] if self.known else None


async def _call_provider(source: KeyProvider, role: str) -> str:
    """Return the key of the caller's function, async or not; no error quotes its words."""
    try:
        with CatchExits():
            key = source()
            key = await key if isinstance(key, Awaitable) else key
        what = f"returned {type(key).__name__} instead of a text"
        if isinstance(key, str):
            return key
    except Exception as error:  # noqa: BLE001 - foreign code
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = error.__cause__ or error.__context__
        after = "" if cause is None else f", after {type(cause).__name__}"
        what = (
            f"failed with {type(error).__name__}{after}, at "
            f"{Path(frame.filename).name}:{frame.lineno}"
        )
    raise ConfigError(
        f"models.{role}: the function passed as `key` {what}; its words are not repeated, since "
        "they may hold the key"
    )


class RedactingTransport(httpx.AsyncBaseTransport):
    """Reads answers within their bound, decodes them, and removes the key of the request."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return its answer without the key."""
        response = await self._inner.handle_async_request(request)
        keys = find_keys(request)
        most = request.extensions.get(MAX_BYTES, DEFAULT_MAX_BYTES)
        framing = {"content-encoding", "content-length", "transfer-encoding"}
        headers = [
            (name.encode("utf-8"), remove_keys(keys, value).encode("utf-8"))
            for name, value in response.headers.items()
            if name not in framing
        ]
        return httpx.Response(
            response.status_code, headers=headers, stream=_ScrubbedStream(response, keys, most)
        )


class _ScrubbedStream(httpx.AsyncByteStream):
    """The decoded pieces of a body, without keys.

    A body of more than ``most`` bytes is an error, before or after decoding.
    """

    def __init__(self, response: httpx.Response, keys: Sequence[str], most: int) -> None:
        self._response = response
        self._most = most
        self._scrubber = Scrubber(keys)
        self._coding = response.headers.get("content-encoding", "identity").strip().lower()
        self._zlib = zlib.decompressobj(DETECTS_FORMAT) if self._coding in CODINGS else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._coding not in {"", "identity", *CODINGS}:
            coding = self._coding[:40]
            raise AnswerFault(f"the content encoding {coding!r}, which was not asked for")
        announced = self._response.headers.get("content-length", "")
        self._check_size(int(announced) if announced.isdecimal() else 0)
        received = 0
        decoded = 0
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        async for raw in self._response.stream:
            received += len(raw)
            for piece in self._decode(raw):
                decoded += len(piece)
                self._check_size(max(received, decoded))
                if ready := self._scrubber.feed(piece):
                    yield ready
        if received and self._zlib is not None and not self._zlib.eof:
            raise AnswerFault("the compressed body broke off", "truncated")
        if self._scrubber.delayed:
            yield self._scrubber.delayed

    def _check_size(self, size: int) -> None:
        if size > self._most:
            raise AnswerFault(f"with more than {self._most:,} bytes", "oversized")

    def _decode(self, raw: bytes) -> Iterator[bytes]:
        if self._zlib is None:
            yield raw
            return
        while raw:
            if self._zlib.eof:
                if not raw.startswith(GZIP_START):
                    return
                self._zlib = zlib.decompressobj(DETECTS_FORMAT)
            try:
                yield self._zlib.decompress(raw, DECODED_BYTES)
            except zlib.error as error:
                raise AnswerFault(f"a body that cannot be decoded: {error}") from None
            raw = self._zlib.unconsumed_tail or self._zlib.unused_data

    async def aclose(self) -> None:
        await self._response.aclose()


class Scrubber:
    """Removes keys from a text in pieces; ``delayed`` is an end that may begin a key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [regex.compile(build_key_pattern(key).encode()) for key in keys]
        self.delayed = b""

    def feed(self, piece: bytes) -> bytes:
        """Take a piece and return the text that is free of keys so far."""
        text = self.delayed + piece
        for key in self._keys:
            text = key.sub(KEY_MARK.encode(), text)
        found = [match.start() for key in self._keys if (match := key.search(text, partial=True))]
        ready = min(found, default=len(text))
        self.delayed = text[ready:]
        return text[:ready]


def build_key_pattern(key: str) -> str:
    """Return a pattern for a key in all spellings: plain, and in up to three levels of JSON."""
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
    """Return the keys in a request's headers."""
    values = [request.headers[name] for name in KEY_HEADERS if name in request.headers]
    return tuple(key for key in (value.removeprefix("Bearer ") for value in values) if is_key(key))


def is_key(text: str) -> bool:
    """Whether a text is a key rather than a placeholder, which may be a word of an answer."""
    return len(text) >= MIN_KEY_CHARACTERS and any(character.isdigit() for character in text)


def remove_keys(keys: Sequence[str], text: str) -> str:
    """Return a text with ``KEY_MARK`` in place of each key, in any spelling."""
    for key in keys:
        text = regex.sub(build_key_pattern(key), KEY_MARK, text)
    return text


def refuse_key_in(config: ModelConfig, role: str, key: str) -> None:
    """Raise ConfigError if settings contain the key; it names them."""
    if not is_key(key):
        return
    plain = {name: config.model_dump_json(include={name}) for name in type(config).model_fields}
    leaking = [
        f"models.{role}.{name}" for name, text in plain.items() if remove_keys([key], text) != text
    ]
    if leaking:
        raise ConfigError(
            f"{', '.join(leaking)} contains the key, and settings are stored with the run: remove "
            "it there; put the key into the environment variable that api_key_env names, or pass a "
            "function"
        )


@contextmanager
def redact_logs(keys: Sequence[str]) -> Iterator[None]:
    """Remove keys, which may grow in number, from the records of the HTTP loggers."""

    def redact(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        redacted = remove_keys([key for key in keys if is_key(key)], message)
        if redacted != message:
            record.msg = redacted
            record.args = ()
        return True

    with ExitStack() as stack:
        for name in HTTP_LOGGERS:
            logger = logging.getLogger(f"httpcore.{name}")
            logger.addFilter(redact)
            stack.callback(logger.removeFilter, redact)
        yield
