"""The one door to a model: modes, settings, keys, plain replies, and errors under the house's names."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import respx
from pydantic import Field

from doubles import PROMPT, RUN, Endpoint, ask, call_id, completion, config, connected, opened
from reflact.concurrency import fan_out
from reflact.errors import AccessDenied, BadRequest, ConfigError, ModelError, ProviderDown, RequestRefused
from reflact.llm.budget import Account
from reflact.llm.client import Client, identify_model
from reflact.llm.structured import build_schema
from reflact.messages import Message, RenderedPrompt, ReplyModel, Text
from reflact.types import FrozenModel

pytestmark = pytest.mark.virtual_time

SECRET = "sk-very-secret-key"


class Part(FrozenModel):
    """A nested value."""

    title: str = Field(description="What it is called.")
    size: int | None = Field(None, ge=0, description="How large it is.")


class Pick(ReplyModel):
    """A reply with nested values."""

    reasoning: str = Field(max_length=4000, description="Why, in a sentence.")
    parts: list[Part] = Field(min_length=1, max_length=3, description="The parts, best first.")


VALUE = Pick(reasoning="so", parts=[Part(title="a", size=1)])
TEXT = VALUE.model_dump_json()
GOOD = completion(TEXT)


def refused(status: int, message: str, code: str | None = None) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "x", "code": code}})


HOSTILE = 'Use {braces}, {{ jinja }}, {% raw %}, {# note #}, $dollars, ${shell}, %s and "quotes"\\n.'


@pytest.mark.parametrize("mode", ["json_schema", "tools", "json_object_with_schema", "json"])
async def test_prompts_are_never_templates(mode: str) -> None:
    prompt = RenderedPrompt(
        name="p",
        version=1,
        messages=(Message(role="system", content=HOSTILE), Message(role="user", content=HOSTILE)),
    )
    endpoint = Endpoint(completion(TEXT, arguments=TEXT))
    async with connected(endpoint, config(mode=mode)) as client:
        await client.ask(prompt, Pick, call_id=call_id())
    system, user = endpoint.bodies[0]["messages"]
    assert user == {"role": "user", "content": HOSTILE}
    assert system["content"].startswith(HOSTILE)
    assert (system == {"role": "system", "content": HOSTILE}) is (mode != "json")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (completion(None), ""),
        (completion("cut o", finish="length"), "cut o"),
        (completion(None, refusal="I would rather not."), "I would rather not."),
    ],
)
async def test_plain_replies_are_taken_as_they_are(answer: httpx.Response, text: str) -> None:
    endpoint = Endpoint(answer)
    reply = await ask(Text, endpoint, config(mode="auto"))
    assert (reply.value, reply.attempts) == (Text(text=text), 1)
    assert endpoint.bodies == [{"model": "m", "messages": [m.model_dump() for m in PROMPT.messages]}]


async def test_settings_are_sent_and_absent_ones_left_out() -> None:
    """Only what is configured is on the wire, extra fields included; each place has its own seed in every run."""
    seeds = []
    for part in "aba":
        endpoint = Endpoint(GOOD)
        extra = {"top_p": 0.5, "nested": {"a": [1.5]}}
        settings = config(temperature=0.0, seed="per_call", max_tokens=100, extra_body=extra)
        await ask(Text, endpoint, settings, part=part)
        (body,) = endpoint.bodies
        del body["messages"]
        seeds.append(body.pop("seed"))
        assert body == {"model": "m", "temperature": 0.0, "max_tokens": 100, **extra}
    assert seeds[0] == seeds[2] != seeds[1]


def test_the_identity_holds_what_influences_replies() -> None:
    changes: list[dict[str, Any]] = [
        {"model": "other"},
        {"base_url": "http://elsewhere.test/v1"},
        {"temperature": 0.5},
        {"seed": "per_call"},
        {"max_tokens": 5},
        {"extra_body": {"top_k": 1}},
        {"mode": "tools"},
        {"reasks": 5},
    ]
    identities = {identify_model(config(**change)) for change in ({}, *changes)}
    assert len(identities) == len(changes) + 1
    same: list[dict[str, Any]] = [{"key": give_key}, {"timeout": 5}, {"concurrency": 1}, {"max_retries": 0}]
    assert {identify_model(config(**change)) for change in same} == {identify_model(config())}


async def give_key() -> str:
    return SECRET


AZURE = {"api": "azure", "api_version": "2024-10-21", "base_url": "https://acme.test"}
AZURE_URL = "https://acme.test/openai/deployments/m/chat/completions?api-version=2024-10-21"
BEARER = f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("settings", "url", "header", "value"),
    [
        ({}, "http://endpoint.test/v1/chat/completions", "authorization", "Bearer from-variable"),
        ({"key": give_key}, "http://endpoint.test/v1/chat/completions", "authorization", BEARER),
        ({**AZURE, "key": give_key}, AZURE_URL, "api-key", SECRET),
        ({**AZURE, "key": give_key, "auth": "token"}, AZURE_URL, "authorization", BEARER),
    ],
)
async def test_where_a_request_goes_and_with_which_key(
    settings: dict[str, Any], url: str, header: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function wins over the variable; Azure has its own address and header; no body has a key."""
    monkeypatch.setenv("REFLACT_TEST_KEY", "from-variable")
    endpoint = Endpoint(GOOD)
    await ask(Pick, endpoint, config(api_key_env="REFLACT_TEST_KEY", **settings))
    (request,) = endpoint.requests
    assert str(request.url) == url
    assert request.headers[header] == value
    assert ("api-key" in request.headers) is (header == "api-key")
    assert value.removeprefix("Bearer ").encode() not in request.content


@pytest.mark.parametrize("key", ["", f"{SECRET}\n", f"{SECRET}\u2026", "two words"])
async def test_what_is_no_key_is_refused_before_any_call(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line break or a space that came along is said at once, without quoting what it came along with."""
    monkeypatch.setenv("REFLACT_TEST_KEY", key)

    async def given() -> str:
        return key

    for settings in (config(api_key_env="REFLACT_TEST_KEY"), config(key=given)):
        endpoint = Endpoint(GOOD)
        with pytest.raises(ConfigError, match=r"models\.optimizer: the (environment|function)") as refused:
            async with connected(endpoint, settings):
                pass
        assert SECRET not in str(refused.value)
        assert endpoint.requests == []


async def test_each_mode_has_its_own_field() -> None:
    schema = build_schema(Pick)
    parameters = {k: v for k, v in schema.items() if k != "description"}
    parameters["required"] = sorted(parameters["required"])
    function = {"name": "Pick", "description": "A reply with nested values.", "parameters": parameters}
    expected: dict[str, Any] = {
        "json_schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "Pick", "schema": schema}}
        },
        "tools": {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "Pick"}},
        },
        "json_object_with_schema": {"response_format": {"type": "json_object", "schema": schema}},
        "json": {"response_format": {"type": "json_object"}},
    }
    for mode, fields in expected.items():
        endpoint = Endpoint(completion(TEXT, arguments=TEXT))
        await ask(Pick, endpoint, config(mode=mode))
        (body,) = endpoint.bodies
        messages = body.pop("messages")
        assert body == {"model": "m", **fields}
        written = json.dumps(schema, indent=2, ensure_ascii=False)
        assert (written in messages[0]["content"]) is (mode == "json")


def only(mode: str, status: int = 400) -> Endpoint:
    """Return an endpoint that knows one mode."""

    def answer(body: Any) -> httpx.Response:
        form = body.get("response_format", {})
        kind = "tools" if "tools" in body else form["type"]
        kind = "json_object_with_schema" if kind == "json_object" and "schema" in form else kind
        kind = "json" if kind == "json_object" else kind
        return completion(TEXT, arguments=TEXT) if kind == mode else refused(status, "unknown format")

    return Endpoint(answer)


@pytest.mark.parametrize("status", [400, 404, 422, 501])
@pytest.mark.parametrize(
    ("mode", "tried"), [("json_schema", 1), ("tools", 2), ("json_object_with_schema", 3), ("json", 4)]
)
async def test_auto_settles_on_the_first_mode_the_endpoint_accepts(
    mode: str, tried: int, status: int
) -> None:
    endpoint = only(mode, status)
    store = await opened()
    async with connected(endpoint, config(mode="auto"), store=store) as client:
        for part in ("a", "b"):
            assert (await client.ask(PROMPT, Pick, call_id=call_id(part))).value == VALUE
    assert len(endpoint.requests) == tried + 1
    assert await store.decision_log(RUN).get(0, "mode/optimizer") == mode
    (spent,) = await store.spend(RUN)
    assert spent.usage.calls == 2
    await ask(Pick, endpoint, config(mode="auto"), store=store, part="c")
    assert len(endpoint.requests) == tried + 2


async def test_concurrent_calls_settle_the_mode_once() -> None:
    endpoint = only("json_object_with_schema")
    async with connected(endpoint, config(mode="auto")) as client:
        await fan_out(lambda n: client.ask(PROMPT, Pick, call_id=call_id(str(n))), range(10))
    assert len(endpoint.requests) == 2 + 10


async def test_one_exchange_on_the_wire() -> None:
    store = await opened()
    account = Account(RUN, store, store.decision_log(RUN))
    with respx.mock(assert_all_called=True) as router:
        route = router.post("http://endpoint.test/v1/chat/completions").mock(return_value=GOOD)
        async with Client(config(key=give_key, temperature=0.5), "optimizer", account) as client:
            reply = await client.ask(PROMPT, Pick, call_id=call_id())
    assert reply.value == VALUE
    (call,) = route.calls
    assert call.request.headers["authorization"] == BEARER
    assert json.loads(call.request.content)["temperature"] == 0.5


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (refused(401, "bad key"), AccessDenied, "REFLACT_TEST_KEY"),
        (refused(403, "not allowed"), RequestRefused, r"\(403\); set REFLACT_TEST_KEY"),
        (refused(404, "no such model"), RequestRefused, r"set models\.optimizer\.model .*no such model"),
        (refused(422, "bad value"), BadRequest, "422"),
        (refused(429, "busy"), ProviderDown, "429"),
        (httpx.ConnectError("no route"), ProviderDown, r"check models\.optimizer\.base_url: no route"),
        (httpx.ReadTimeout("slow"), ProviderDown, "120 seconds"),
    ],
)
async def test_failures_have_the_names_of_the_house(
    answer: httpx.Response | Exception, error: type[ModelError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFLACT_TEST_KEY", SECRET)
    settings = config(max_retries=0, api_key_env="REFLACT_TEST_KEY")
    with pytest.raises(error, match=words) as failure:
        await ask(Text, Endpoint(answer), settings)
    assert type(failure.value) is error
    assert "models.optimizer: m at http://endpoint.test/v1" in str(failure.value)
