"""Bodies of answers: read piece by piece within a bound, decoded, and kept with the headers that matter."""

from __future__ import annotations

import json
import string
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import NoReturn
from urllib.parse import quote

import httpx

from reflact.config.models import ModelConfig
from reflact.llm.pricing import read_cap
from reflact.llm.sse import JSON
from reflact.records import FaultKind

MAX_BYTES = "reflact_max_bytes"
"""The extension of a request that holds the most bytes of its answer."""

SPARE_BYTES, TOKEN_BYTES, UNCAPPED_TOKENS = 4 * 2**20, 512, 16_384
"""An answer may have 4 MiB and 512 bytes for each token of its cap; without a cap, for each of 16,384 tokens."""

DEFAULT_MAX_BYTES = SPARE_BYTES + TOKEN_BYTES * UNCAPPED_TOKENS

DECODED_BYTES = 2**16
"""The most bytes that are decoded at once."""

CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
DETECTS_FORMAT = zlib.MAX_WBITS | 32

GZIP_START = b"\x1f"
"""The first byte of each member of a gzip body; any other text after a member is ignored."""

ERROR_BYTES = 2**14
"""The most bytes that are read of the answer with an error status."""


QUOTED_CHARACTERS = 1000
"""The most characters of an answer that an error keeps."""


class AnswerFault(httpx.RemoteProtocolError):
    """An answer began and cannot be used; the message is a part of it, or says why."""

    def __init__(self, message: str, fault: FaultKind = "malformed") -> None:
        super().__init__(message[:QUOTED_CHARACTERS])
        self.fault: FaultKind = fault


class BodyStream(httpx.AsyncByteStream):
    """A body in memory that keeps its division into pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def select_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers that other layers need, in ASCII; the content type has no parameters."""
    headers = response.headers
    content_type = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    names = ("retry-after", "date", "location")
    selected = {name: headers[name] for name in names if name in headers}
    return {
        name: quote(value, safe=f"{string.punctuation} ")
        for name, value in {"content-type": content_type, **selected}.items()
    }


def find_max_bytes(config: ModelConfig) -> int:
    """Return the most bytes of an answer, compressed or not."""
    cap = read_cap({config.max_tokens_key: config.max_tokens, **config.extra_body})
    default = DEFAULT_MAX_BYTES if cap is None else SPARE_BYTES + TOKEN_BYTES * cap
    return config.max_response_bytes or default


async def read_pieces(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Yield the decoded pieces of a body as they arrive.

    Raises:
        AnswerFault: The body has more than ``most`` bytes before or after decoding, which its header may say before any
            arrives, or it cannot be decoded.
    """
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise _build_oversized(most)
    decoder = _Decoder(response.headers.get("content-encoding", "identity").strip().lower())
    assert isinstance(response.stream, httpx.AsyncByteStream)
    received = decoded = 0
    async for raw in response.stream:
        received += len(raw)
        for piece in decoder.decode(raw):
            decoded += len(piece)
            if max(received, decoded) > most:
                raise _build_oversized(most)
            yield piece
    if received:
        decoder.end()


def _build_oversized(most: int) -> AnswerFault:
    return AnswerFault(f"with more than {most:,} bytes", "oversized")


class _Decoder:
    def __init__(self, coding: str) -> None:
        self._zlib = zlib.decompressobj(DETECTS_FORMAT) if coding in CODINGS else None
        if self._zlib is None and coding not in {"", "identity"}:
            self._fail(f"the content encoding {coding[:40]!r}, which was not asked for")

    def decode(self, raw: bytes) -> Iterator[bytes]:
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
                self._fail(f"a body that cannot be decoded: {error}")
            raw = self._zlib.unconsumed_tail or self._zlib.unused_data

    def end(self) -> None:
        if self._zlib is not None and not self._zlib.eof:
            raise AnswerFault("the compressed body broke off", "truncated")

    def _fail(self, reason: str) -> NoReturn:
        raise AnswerFault(reason) from None


def decode_text(body: bytes) -> str:
    """Return a body as text: UTF-8, UTF-16 or UTF-32 as its bytes show, whatever its headers say."""
    return body.decode(json.detect_encoding(body), "replace").removeprefix("\ufeff")
