"""The gateway of agents: three dialects, one kind of request to the run's model."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseCompletedEvent, ResponseStreamEvent
from pydantic import TypeAdapter

from doubles import Endpoint, completion, connected
from reflact.agents.gateway import INLINE_BYTES, MAX_PARTS, MAX_REQUEST_BYTES, GatewayAddress, open_gateway
from reflact.agents.gateway_session import GatewaySession, GatewayTarget
from reflact.config.models import ModelConfig
from reflact.errors import EnvironmentFailure, ModelError
from reflact.types import Skill


class Run:
    """A run behind a gateway: notes the requests and answers each with the same completion."""

    def __init__(self, *calls: dict[str, Any], content: str | None = "Wait.") -> None:
        self.asked: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self._message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    async def answer(self, body: dict[str, Any]) -> str:
        self.asked.append(body)
        usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
        choice = {"finish_reason": "stop", "message": self._message}
        return json.dumps({"id": "1", "model": "m", "choices": [choice], "usage": usage})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[httpx.AsyncClient]:
        async with (
            open_gateway(self.answer, model="m", on_refusal=self.refused.append) as address,
            httpx.AsyncClient(
                base_url=address.base_url, headers={"Authorization": f"Bearer {address.token}"}
            ) as client,
        ):
            yield client


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c2", "type": "function", "function": {"name": name, "arguments": arguments}}


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def ask_as_codex(session: str) -> dict[str, Any]:
    """Return the second request of Codex 0.169 in a session, with its texts cut."""
    tool = {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}}
    texts = [
        "# AGENTS.md instructions\nBe brief.",
        f"<cwd>/w</cwd>\n  <current_date>{session}</current_date>\n",
    ]
    output = f"Chunk ID: {session}\nWall time: 0.0{len(session)} seconds\nOutput:\n42\n"
    message = {"type": "message", "id": f"a{session}"}
    return {
        "model": "m",
        "stream": True,
        "input": [
            {**message, "role": "developer", "content": [input_text("You code.")]},
            {**message, "role": "user", "content": [*map(input_text, texts)]},
            {"type": "reasoning", "id": session, "summary": [], "encrypted_content": session},
            {"type": "function_call", "name": "exec_command", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call_output", "id": session, "call_id": "c1", "output": output},
        ],
        "tools": [tool, {"type": "namespace", "name": "n", "description": "N", "tools": []}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": session,
        "client_metadata": {"turn_id": session},
    }


def input_text(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


async def test_the_gateway_speaks_the_responses_api() -> None:
    """Requests of two sessions become one chat completion's request; its answer is a response, whole or as events."""
    run = Run(call("exec_command", '{"cmd": "ls"}'))
    async with run.open() as client:
        streamed = await client.post("/responses", json=ask_as_codex("01a"))
        whole = await client.post("/responses", json={**ask_as_codex("9f02"), "stream": False})
    asked = run.asked
    assert asked[0] == asked[1]
    assert asked[0]["messages"] == [
        {"role": "system", "content": "You code."},
        {"role": "user", "content": "# AGENTS.md instructions\nBe brief.\n<cwd>/w</cwd>\n"},
        {"role": "assistant", "content": None, "tool_calls": [{**call("exec_command", "{}"), "id": "c1"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Output:\n42\n"},
    ]
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["exec_command"]
    response = Response.model_validate(whole.json())
    assert (response.output_text, response.output[1].type) == ("Wait.", "function_call")
    assert response.usage is not None
    assert response.usage.total_tokens == 22
    read = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent).validate_json
    events = [read(json.dumps(event)) for event in read_events(streamed)]
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert events[-1].response == response


async def test_the_gateway_answers_nobody_without_its_token() -> None:
    run = Run()
    async with run.open() as client:
        token = client.headers.pop("Authorization").removeprefix("Bearer ")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            for path in ("/chat/completions", "/responses", "/messages", "/messages/count_tokens"):
                assert (await client.post(path, json={}, headers=headers)).status_code == 401
            assert (await client.get("/models", headers=headers)).status_code == 401
            assert (await client.head("/", headers=headers)).status_code == 401
        listed = (await client.get("/models", headers={"x-api-key": token})).json()
        assert listed["data"][0]["id"] == "m"
        assert (await client.head("/", headers={"x-api-key": token})).status_code == 200
    assert (run.asked, run.refused) == ([], [])


SEARCH = {"type": "web_search_20250305", "name": "w"}
REFUSED: list[tuple[str, Any, str]] = [
    ("/chat/completions", [], "no request of a chat completion"),
    ("/responses", {}, "input is neither a text nor a list"),
    ("/responses", {"input": [{"type": "computer_call"}]}, "an item of type computer_call"),
    ("/responses", {"input": "a", "previous_response_id": "r"}, "stores no responses"),
    ("/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "type web_search runs at its provider"),
    ("/messages", {}, "no request of the Messages API"),
    ("/messages", {"messages": [], "container": "c"}, "cannot pass on container"),
    ("/messages", {"messages": [], "tools": [SEARCH]}, "the tool w of type"),
    ("/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type document"),
    ("/embeddings", {"input": "a"}, "the gateway has no /v1/embeddings"),
]


async def test_a_refused_request_is_reported_with_its_reason() -> None:
    """The agent gets an error status with a sentence, and so does the rollout; no model is asked."""
    for path, body, reason in REFUSED:
        run = Run()
        async with run.open() as client:
            response = await client.post(path, json=body)
        assert response.status_code in {400, 404}
        assert reason in response.json()["error"]["message"]
        assert run.refused == [response.json()["error"]["message"]]
        assert run.asked == []
    async with run.open() as client:
        headers = {"content-encoding": "zstd"}
        response = await client.post("/responses", content=b"\x28\xb5\x2f\xfd", headers=headers)
    assert response.status_code == 400
    assert "compressed" in run.refused[-1]


async def test_freeform_and_namespaced_tools_are_functions_of_a_completion() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: BEGIN"}
    send = {"type": "function", "name": "send"}
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar},
        {"type": "namespace", "name": "mail", "description": "Mail.", "tools": [send]},
    ]
    items = [
        {"role": "user", "content": "Go on."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "BEGIN"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
    ]
    patches = [call("apply_patch", text) for text in ('{"input": "BEGIN 2"}', "BEGIN 3")]
    calls = [*patches, call("mail__send", "{}")]
    run = Run(*calls, content=None)
    body = {"model": "m", "input": items, "tools": tools}
    async with run.open() as client:
        response = Response.model_validate((await client.post("/responses", json=body)).json())
        streamed = await client.post("/responses", json={**body, "stream": True})
    functions = [tool["function"] for tool in run.asked[0]["tools"]]
    assert [function["name"] for function in functions] == ["apply_patch", "mail__send"]
    assert functions[0]["description"] == "Edits files.\n\nThe input follows this grammar:\nstart: BEGIN"
    assert run.asked[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"input": "BEGIN"}'
    assert run.asked[0]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "Done."}
    first, second, third = response.output
    assert (first.type, second.type, third.type) == ("custom_tool_call", "custom_tool_call", "function_call")
    assert (first.input, second.input, third.name, third.namespace) == ("BEGIN 2", "BEGIN 3", "send", "mail")
    adapter = TypeAdapter[list[ResponseStreamEvent]](list[ResponseStreamEvent])
    events = adapter.validate_python(read_events(streamed))
    inputs = [event.input for event in events if event.type.endswith("custom_tool_call_input.done")]
    assert inputs == ["BEGIN 2", "BEGIN 3"]


def ask_as_claude_code(session: str) -> dict[str, Any]:
    """Return the second request of Claude Code 2.1 in a session, with its texts cut."""
    reminder = f"# claudeMd\nBe brief.\n# currentDate\nToday's date is {session}.\n\n"
    mark = {"cache_control": {"type": "ephemeral"}}
    billing = f"x-anthropic-billing-header: cc_version={session}; cc_entrypoint=sdk-cli;"
    use = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a.txt", "is_error": False, **mark}
    thinking = {"type": "thinking", "thinking": session, "signature": session}
    return {
        "model": "m",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": billing}, {"type": "text", "text": "You code.", **mark}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text} for text in (reminder, "Say hello")]},
            {"role": "system", "content": "Available agent types: none"},
            {"role": "assistant", "content": [thinking, use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}}],
        "metadata": {"user_id": session},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
    }


async def test_the_gateway_speaks_the_messages_api() -> None:
    """Requests of two sessions become one chat completion's request; its answer is a message, whole or as events."""
    run = Run(call("Bash", '{"command": "ls -a"}'))
    async with run.open() as client:
        streamed = await client.post("/messages?beta=true", json=ask_as_claude_code("2026-11-25"))
        body = {**ask_as_claude_code("2026-11-26"), "stream": False}
        message = (await client.post("/messages", json=body)).json()
        counted = (await client.post("/messages/count_tokens", json=body)).json()
    first, second = run.asked
    assert first == second
    calls = [{**call("Bash", '{"command": "ls"}'), "id": "c1"}]
    bash = {"name": "Bash", "description": "Runs.", "parameters": {"type": "object"}}
    assert first == {
        "messages": [
            {"role": "system", "content": "You code."},
            {"role": "user", "content": "# claudeMd\nBe brief.\n\n\nSay hello"},
            {"role": "system", "content": "Available agent types: none"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ],
        "max_tokens": 32000,
        "tools": [{"type": "function", "function": bash}],
        "tool_choice": "auto",
    }
    use = {"type": "tool_use", "id": "c2", "name": "Bash", "input": {"command": "ls -a"}}
    assert message["content"] == [{"type": "text", "text": "Wait."}, use]
    usage = message["usage"]
    assert (message["stop_reason"], usage["input_tokens"], usage["output_tokens"]) == ("tool_use", 20, 2)
    assert counted["input_tokens"] > 50
    assert collect(read_events(streamed)) == message


def collect(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's events build up, as clients of the Messages API do."""
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][-1]["text"] += event["delta"]["text"]
            case "content_block_delta":
                message["content"][-1]["input"] = json.loads(event["delta"]["partial_json"])
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_text_that_is_none_is_replaced_or_refused(path: str) -> None:
    """Half of a surrogate pair in a request becomes U+FFFD; a number that JSON does not have is refused, with a reason."""
    run, name = Run(), "input" if path == "/responses" else "messages"
    body = {"model": "m", "max_tokens": 9, name: [{"role": "user", "content": "\ud83d"}]}
    async with run.open() as client:
        assert (await client.post(path, content=json.dumps(body))).status_code == 200
        assert (await client.post(path, content=json.dumps({**body, "top_p": math.nan}))).status_code == 400
        assert (await client.post(path, content=b"[" * 100_000)).status_code == 400
    assert "\ufffd" in json.dumps(run.asked, ensure_ascii=False).encode().decode()
    assert [reason.partition(" of ")[0] for reason in run.refused] == ["the body is no request"] * 2


CALL = call("ls", "{}")
SOUND = {
    "/chat/completions": {
        "model": "m",
        "max_tokens": 9,
        "stream": False,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c2", "content": "a.txt"},
        ],
        "tools": [{"type": "function", "function": {"name": "ls", "parameters": {}}}],
    },
    "/responses": ask_as_codex("01a"),
    "/messages": ask_as_claude_code("2026-11-25"),
}
"""A sound request of each dialect."""

DEEP: Any = "x"
for _ in range(150):
    DEEP = [DEEP]

SIMPLE = (None, True, 0, -1, 10**30, 1e308, "", "x", "\ud83d", [], {})
ODD = (*SIMPLE, [[]], [None], {"a": {}}, {"role": ["x"]}, DEEP)
"""Values in place of others."""

Change = tuple[str, int, Any, bool]
"""A request's path, the number of one of its values, what is in its place, and whether the value is removed instead."""


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all places in a value, each with what it is in."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield value, name
        yield from list_places(part)


def change_body(change: Change) -> tuple[str, bytes]:
    path, number, odd, is_removed = change
    body = copy.deepcopy(SOUND[path])
    places = [*list_places(body)]
    inside, name = places[number % len(places)]
    inside[name] = copy.deepcopy(odd)
    if is_removed:
        del inside[name]
    return path, json.dumps(body).encode()


@given(
    st.lists(
        st.tuples(st.sampled_from([*SOUND]), st.integers(0, 999), st.sampled_from(ODD), st.booleans()),
        min_size=120,
        max_size=120,
    )
)
@settings(max_examples=5)
def test_no_message_of_an_agent_ends_a_run(changes: Sequence[Change]) -> None:
    """Each of 600 requests of a wrong shape is answered, in the form of an error or with what the model said.

    The rollout has turns or a failure that names no exception of Python.
    """

    async def play() -> None:
        async with connected(Endpoint(completion("Wait."))) as client:
            target = GatewayTarget().connect(client, ModelConfig(model="m"))
            session = GatewaySession(target, Skill(text="Be brief."), "r")
            async with (
                open_gateway(session._answer, model="m", on_refusal=session._refuse) as address,
                httpx.AsyncClient(base_url=address.base_url, headers={"x-api-key": address.token}) as agent,
            ):
                for path, content in map(change_body, changes):
                    answer = await agent.post(path, content=content)
                    assert answer.status_code in {200, 400, 500}
                    if answer.status_code != 200:
                        error = answer.json()["error"]
                        assert error["type"] in {"invalid_request_error", "api_error"}
                        assert error["message"]
                        assert isinstance(session._failure, EnvironmentFailure | ModelError)
            assert all(turn.content for turn in session.turns)

    anyio.run(play)


@pytest.mark.parametrize("choices", [[], ["odd"], None])
async def test_a_model_that_answers_without_a_choice_is_a_failure_of_the_rollout(choices: Any) -> None:
    run = Run()

    async def answer(body: dict[str, Any]) -> str:
        return json.dumps({"id": "1", "model": "m", "choices": choices})

    run.answer = answer  # type: ignore[method-assign]
    async with run.open() as client:
        for path in ("/responses", "/messages"):
            response = await client.post(path, json=SOUND[path])
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "api_error"
    assert len(run.refused) == 2


async def send_raw(address: GatewayAddress, *parts: bytes) -> bytes:
    """Send bytes to a gateway, and return all that it sends until it closes the connection."""
    host, port = address.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    received = b""
    async with await anyio.connect_tcp(host, int(port)) as stream:
        try:
            for part in parts:
                await stream.send(part)
            while True:
                received += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return received


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {}\r\n{}\r\n\r\n"


async def test_a_token_and_a_size_are_checked_before_a_body_is_read() -> None:
    run = Run()
    too_much = f"Content-Length: {MAX_REQUEST_BYTES + 1}"
    async with open_gateway(run.answer, model="m", on_refusal=run.refused.append) as address:
        nobody = await send_raw(address, HEAD.format("x", too_much).encode())
        assert nobody.startswith(b"HTTP/1.1 401 ")
        assert run.refused == []
        announced = await send_raw(address, HEAD.format(address.token, too_much).encode())
        assert announced.startswith(b"HTTP/1.1 413 ")
        assert len(run.refused) == 1
        lies = HEAD.format(address.token, "Content-Length: 5\r\nTransfer-Encoding: chunked").encode()
        chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        chunked = await send_raw(address, lies, *[chunk] * (MAX_REQUEST_BYTES // 2**20), chunk)
        assert chunked.startswith(b"HTTP/1.1 413 ")
        assert (await send_raw(address, HEAD.format(address.token, "Connection: close").encode())).startswith(
            b"HTTP/1.1 400"
        )
    assert run.asked == []


async def test_the_bodies_of_all_connections_count_together() -> None:
    run = Run()
    half = MAX_REQUEST_BYTES // 2 + 1
    async with open_gateway(run.answer, model="m", on_refusal=run.refused.append) as address:
        begun = HEAD.format(address.token, f"Content-Length: {half + 1}").encode()
        host, port = address.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        async with await anyio.connect_tcp(host, int(port)) as first:
            await first.send(begun + b"x" * half)
            answer = await send_raw(address, begun, b"x" * half)
            assert answer.startswith(b"HTTP/1.1 413 ")
        body = json.dumps(SOUND["/chat/completions"]).encode() + b" " * half
        whole = HEAD.format(address.token, f"Content-Length: {len(body)}\r\nConnection: close").encode()
        with anyio.fail_after(10):
            while not (await send_raw(address, whole, body)).startswith(b"HTTP/1.1 200 "):
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("content", [b"[],", b'"\\"', b'{"a":"\\', b"0,"])
async def test_a_body_of_many_values_takes_little_memory(content: bytes) -> None:
    run = Run()
    body = b'{"messages":[' + content * (6 * 2**20 // len(content)) + b"0]}"
    async with run.open() as client:
        tracemalloc.start()
        response = await client.post("/chat/completions", content=body, timeout=60)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert response.status_code == 400
    assert most < 60 * 2**20
    assert len(body) > INLINE_BYTES
    assert body.count(b",") > MAX_PARTS or body.count(b'"') > MAX_PARTS
