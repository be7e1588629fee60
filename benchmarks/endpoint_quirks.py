"""Quirks of endpoints, each played through a short training in one process; prints what happens.

    python benchmarks/endpoint_quirks.py                       all of them, in about a minute
    python benchmarks/endpoint_quirks.py --only flagged_prompt
    python benchmarks/endpoint_quirks.py --write               into docs/reliability.md

The world: an item names a town, and the right answer is its name in capitals. The target gives it if its prompt holds
the rule, which the optimizer always proposes. A quirk replaces the answers to one role. ``tests/test_endpoint_quirks.py``
states what has to happen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import selectors
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx

from reflact import Trainer
from reflact.events import RunFinished, WarningIssued
from reflact.records import RunSummary
from reflact.types import Split

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
RULE = "RULE: write the name of the town in capitals."
TOWNS = {
    "train": ["aarau", "bern", "chur", "davos", "elm", "fribourg", "glarus", "horgen"],
    "val": [
        "ilanz",
        "jona",
        "kloten",
        "locarno",
        "murten",
        "nyon",
        "olten",
        "pully",
        "quarten",
        "rolle",
    ],
    "test": [
        "sion",
        "thun",
        "uster",
        "vevey",
        "wil",
        "yverdon",
        "zermatt",
        "arosa",
        "baden",
        "cham",
    ],
}
TRAIN, FLAGGED = TOWNS["train"][3], TOWNS["val"][3]
"""The towns that some providers refuse to hear of, from an analyst and from the target."""

HURRY = 20
"""How much faster time passes."""

URL = "http://endpoint.test/v1"
"""The most characters of a message in the table."""


@dataclass(frozen=True)
class Call:
    """One request: its body, its number in its role, and the answer of an endpoint without quirks.

    ``is_again`` says that the last one with these messages failed, so that no call fails in all attempts.
    """

    role: str
    number: int
    is_again: bool
    body: dict[str, Any]
    right: str

    @property
    def text(self) -> str:
        """All messages."""
        return json.dumps(self.body["messages"])

    @property
    def kind(self) -> str:
        """The format that is asked for."""
        return str((self.body.get("response_format") or {}).get("type", "none"))


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop on which waits are short."""

    def __init__(self) -> None:
        super().__init__(_Hurried())

    def time(self) -> float:
        """Return a time that passes faster."""
        return super().time() * HURRY


class _Hurried(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else timeout / HURRY)


class Held(httpx.AsyncByteStream):
    """Pieces of a stream that stays open."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._text.encode()
        await anyio.sleep(600)


Quirk = Callable[[Call], httpx.Response | None]
"""Answers a call, or leaves it to the endpoint without quirks; its docstring says what the endpoint does."""

QUIRKS: list[tuple[str, Quirk, dict[str, Any]]] = []


def quirk(*roles: str, **settings: Any) -> Callable[[Quirk], Quirk]:
    """Return a decorator that plays a quirk for each of these roles, with settings of the role."""

    def add(play: Quirk) -> Quirk:
        QUIRKS.extend((role, play, settings) for role in roles)
        return play

    return add


# ------------------------------------------------------------------------------------------- the endpoint


def say(
    content: str | None, finish: str = "stop", *, usage: Any = (50, 20), **more: Any
) -> httpx.Response:
    """Return a chat completion."""
    message = {"role": "assistant", "content": content, **more}
    body: dict[str, Any] = {"model": "m", "object": "chat.completion", "id": "x", "created": 1}
    body["choices"] = [{"index": 0, "finish_reason": finish, "message": message}]
    if isinstance(usage, tuple):
        usage = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        }
    return httpx.Response(200, json=body if usage is None else {**body, "usage": usage})


def refuse(status: int, message: str, code: str | None = None, **more: Any) -> httpx.Response:
    """Return an error as most providers write it."""
    return httpx.Response(status, json={"error": {"message": message, "code": code, **more}})


def call_tool(call: Call, arguments: str) -> httpx.Response:
    """Return a reply as a call of the first tool."""
    function = {"name": call.body["tools"][0]["function"]["name"], "arguments": arguments}
    return say(
        None, "tool_calls", tool_calls=[{"id": "c", "type": "function", "function": function}]
    )


def answer_rightly(call: Call) -> httpx.Response:
    """Return the answer of an endpoint without quirks."""
    return call_tool(call, call.right) if call.body.get("tools") else say(call.right)


def write_events(
    response: httpx.Response, *, before: str = "", after: str = "data: [DONE]\n\n"
) -> str:
    """Return a completion as a stream of events."""
    body = response.json()
    choice = body["choices"][0]
    message = choice["message"]
    content = message.pop("content") or ""
    calls = [{"index": number, **each} for number, each in enumerate(message.pop("tool_calls", ()))]
    deltas: list[dict[str, Any]] = [{**message, "tool_calls": calls} if calls else message]
    deltas += [{"content": content[at : at + 40]} for at in range(0, len(content), 40)]
    events = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    events.append(
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    )
    if "usage" in body:
        events.append({"choices": [], "usage": body["usage"]})
    return before + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + after


def stream(text: str) -> httpx.Response:
    """Return events as an answer."""
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)


def fill(schema: dict[str, Any], name: str = "") -> Any:
    """Return a value of a reply's schema that proposes the rule."""
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return fill(next(part for part in schema[key] if part.get("type") != "null"), name)
    value: Any = {"target": "", "content": RULE, "document": RULE}.get(
        name, "towns are written small"
    )
    match schema:
        case {"const": const}:
            value = const
        case {"enum": values}:
            value = "append" if "append" in values else values[0]
        case {"properties": parts}:
            value = {key: fill(part, key) for key, part in parts.items()}
        case {"items": items}:
            value = [fill(items, name)]
        case {"type": "integer" | "number"}:
            value = max(1, schema.get("minimum", 1))
        case {"type": "boolean"}:
            value = True
    return value


def find_schema(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the reply that is asked for; None if a text is."""
    asked = body.get("response_format") or {}
    schema = (asked.get("json_schema") or {}).get("schema") or asked.get("schema")
    if schema is None and body.get("tools"):
        schema = body["tools"][0]["function"]["parameters"]
    if schema is None and asked:
        text = "\n".join(message["content"] for message in body["messages"])
        found = re.search(r"\{.*\"properties\".*\}", text, re.DOTALL)
        schema = None if found is None else json.loads(found[0])
    return schema


@dataclass
class QuirkyEndpoint(httpx.AsyncBaseTransport):
    """An endpoint with one quirk for one role; counts requests by role."""

    role: str = ""
    quirk: Quirk | None = None
    requests: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        await anyio.lowlevel.checkpoint()
        body = json.loads(await request.aread())
        schema = find_schema(body)
        role = "target" if schema is None else "optimizer"
        town = body["messages"][-1]["content"].removeprefix("Town: ")
        right = town.upper() if RULE in json.dumps(body["messages"]) else town
        self.requests[role] += 1
        messages = json.dumps(body["messages"])
        answer = right if schema is None else json.dumps(fill(schema))
        call = Call(role, self.requests[role], messages in self.failed, body, answer)
        self.failed.discard(messages)
        response = self.quirk(call) if self.quirk is not None and self.role == role else None
        if response is not None:
            self.failed.add(messages)
        response = response or answer_rightly(call)
        is_whole = (
            response.headers.get("content-type") == "application/json"
            and b'"role":' in response.content
        )
        is_whole = is_whole and response.is_success
        return stream(write_events(response)) if body.get("stream") and is_whole else response


# --------------------------------------------------------------------------------------------- the quirks


@quirk("none")
def no_quirk(call: Call) -> httpx.Response | None:
    """Nothing unusual."""
    return None


@quirk("target", "optimizer")
def thoughts_before_the_answer(call: Call) -> httpx.Response:
    """Thoughts between think tags, with a draft, stand before the answer."""
    draft = call.right.lower() if call.role == "target" else call.right.replace("RULE", "DRAFT")
    return say(f"<think>\nPerhaps {draft}?\n</think>\n\n{call.right}")


@quirk("target", "optimizer")
def thoughts_without_their_start(call: Call) -> httpx.Response:
    """Only the end of the thoughts has a tag; the template wrote the other."""
    return say(f"Let me see what the user wants.\n</think>\n\n{call.right}")


@quirk("target", "optimizer")
def thoughts_take_the_whole_reply(call: Call) -> httpx.Response:
    """All tokens go into `reasoning_content`, and no answer is left."""
    return say(None, "length", reasoning_content="Let me think. " * 5)


@quirk("target", "optimizer")
def thoughts_and_an_empty_answer(call: Call) -> httpx.Response:
    """The answer is the empty text, cut at the limit."""
    return say("", "length", reasoning="Let me think.")


@quirk("target", "optimizer")
def harmony_channels(call: Call) -> httpx.Response:
    """The answer has its channel markers, with thoughts in another channel."""
    thoughts = "<|channel|>analysis<|message|>A town.<|end|>"
    return say(f"{thoughts}<|start|>assistant<|channel|>final<|message|>{call.right}")


@quirk("target")
def every_answer_cut(call: Call) -> httpx.Response:
    """Every answer is cut at the limit of tokens."""
    return say("First, let me explain what a town is, and then", "length")


@quirk("target", "optimizer")
def other_word_for_cut(call: Call) -> httpx.Response:
    """A cut answer has the finish reason `max_tokens`."""
    return say(call.right[: len(call.right) // 2], "max_tokens")


@quirk("optimizer")
def cut_at_the_models_limit(call: Call) -> httpx.Response:
    """A cut answer has the finish reason `model_length`."""
    return say(call.right[: len(call.right) // 2], "model_length")


@quirk("optimizer")
def cut_and_called_whole(call: Call) -> httpx.Response:
    """A cut answer has the finish reason `stop`."""
    return say(call.right[: len(call.right) * 2 // 3])


@quirk("optimizer")
def json_in_a_fence(call: Call) -> httpx.Response:
    """The JSON stands in a fence, between two sentences."""
    return say(f"Here it is:\n```json\n{call.right}\n```\nDoes {{anything}} lack?")


@quirk("optimizer")
def json_twice(call: Call) -> httpx.Response:
    """The JSON is written twice."""
    return say(f"{call.right}\n{call.right}")


@quirk("optimizer")
def json_in_a_string(call: Call) -> httpx.Response:
    """The JSON is a string that holds the JSON."""
    return say(json.dumps(call.right))


@quirk("optimizer")
def prose_in_place_of_json(call: Call) -> httpx.Response:
    """Every format is accepted, and the answer is prose."""
    return say("I would add a rule about capitals.")


@quirk("optimizer")
def only_tools_are_heeded(call: Call) -> httpx.Response | None:
    """Formats are ignored with a success; tools work."""
    return None if call.body.get("tools") else say(f"I suggest:\n\n```json\n{call.right}\n```")


@quirk("optimizer")
def formats_refused_with_404(call: Call) -> httpx.Response | None:
    """Every `response_format` is refused with 404."""
    if not call.body.get("response_format"):
        return None
    return refuse(404, "No endpoints found that can handle the requested parameters.")


@quirk("optimizer")
def formats_refused_with_500(call: Call) -> httpx.Response | None:
    """The format `json_schema` is refused with 500 and a list of problems."""
    if call.kind != "json_schema":
        return None
    problems = [
        {"loc": ["body", "messages", n, "role"], "msg": "Input should be 'system'"}
        for n in range(3)
    ]
    problems += [{"loc": ["body", "response_format", "type"], "msg": "Input should be 'text'"}]
    return refuse(500, json.dumps(problems))


@quirk("target", "optimizer")
def other_name_of_the_cap(call: Call) -> httpx.Response | None:
    """`max_tokens` is refused in favour of `max_completion_tokens`."""
    if "max_tokens" not in call.body:
        return None
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    return refuse(400, message, "unsupported_parameter", param="max_tokens")


@quirk("target")
def tool_call_for_text(call: Call) -> httpx.Response:
    """A tool call stands in place of the answer."""
    function = {"name": "answer", "arguments": json.dumps({"text": call.right})}
    return say(
        None, "tool_calls", tool_calls=[{"id": "c", "type": "function", "function": function}]
    )


@quirk("optimizer")
def stream_without_end_mark(call: Call) -> httpx.Response | None:
    """A stream ends after its finish reason, without `[DONE]`."""
    return stream(write_events(answer_rightly(call), after="")) if call.body.get("stream") else None


@quirk("optimizer")
def stream_held_open(call: Call) -> httpx.Response | None:
    """A stream has its finish reason, and the connection stays open."""
    if not call.body.get("stream"):
        return None
    pieces = Held(write_events(answer_rightly(call), after=""))
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=pieces)


@quirk("optimizer")
def stream_with_comments(call: Call) -> httpx.Response | None:
    """Comments stand before the events of a stream."""
    if not call.body.get("stream"):
        return None
    return stream(write_events(answer_rightly(call), before=": WORKING ON IT\n\n" * 3))


@quirk("optimizer")
def stream_with_pings(call: Call) -> httpx.Response | None:
    """Events of another kind stand before those of a stream."""
    if not call.body.get("stream"):
        return None
    ping = 'event: ping\ndata: {"type": "ping"}\n\n'
    return stream(write_events(answer_rightly(call), before=ping))


@quirk("target", "optimizer")
def no_usage(call: Call) -> httpx.Response:
    """The usage is left out."""
    return say(call.right, usage=None)


@quirk("target")
def usage_in_fractions(call: Call) -> httpx.Response:
    """Counts of tokens are written as 50.0."""
    return say(
        call.right, usage={"prompt_tokens": 50.0, "completion_tokens": 20.0, "total_tokens": 70.0}
    )


@quirk("target")
def prompt_cut_by_the_server(call: Call) -> httpx.Response:
    """Long prompts lose their beginning; only the usage shows it."""
    return say(call.right, usage=(5, 20))


@quirk("target")
def empty_while_loading(call: Call) -> httpx.Response | None:
    """The first answers are empty, while the model loads."""
    return say("", "load") if call.number <= 6 else None


@quirk("target")
def compressed_unasked(call: Call) -> httpx.Response:
    """Answers are compressed in a way that was not asked for."""
    return httpx.Response(
        200, headers={"content-encoding": "br"}, stream=httpx.ByteStream(b"\x0b\x02\x80{}\x03")
    )


@quirk("target")
def busy_in_an_array(call: Call) -> httpx.Response | None:
    """Some calls are refused with 429 and an array that names the delay."""
    delay = {"@type": "RetryInfo", "retryDelay": "1s"}
    busy = httpx.Response(
        429, json=[{"error": {"code": 429, "message": "exhausted", "details": [delay]}}]
    )
    return busy if call.number % 9 == 3 and not call.is_again else None


@quirk("target")
def delay_with_its_unit(call: Call) -> httpx.Response | None:
    """Some calls are refused with 429 and `Retry-After: 1s`."""
    busy = httpx.Response(429, headers={"retry-after": "1s"})
    return busy if call.number % 9 == 3 and not call.is_again else None


@quirk("target", "optimizer")
def failed_dependency(call: Call) -> httpx.Response | None:
    """Some calls fail with 424."""
    failed = httpx.Response(424, json={"error": "Request failed during generation"})
    return failed if call.number % 4 == 2 and not call.is_again else None


@quirk("target", "optimizer")
def error_with_success(call: Call) -> httpx.Response | None:
    """Some errors have the status 200."""
    error = {"choices": None, "error": {"message": "Provider returned error", "code": 429}}
    failed = httpx.Response(200, json=error)
    return failed if call.number % 4 == 2 and not call.is_again else None


@quirk("optimizer")
def refused_sample(call: Call) -> httpx.Response | None:
    """The provider refuses some replies of its model: 400 `json_validate_failed`."""
    failed = refuse(
        400, "Failed to generate JSON.", "json_validate_failed", failed_generation='{"p": ['
    )
    return failed if call.number % 3 == 2 else None


@quirk("optimizer")
def refused_first_sample(call: Call) -> httpx.Response | None:
    """The provider refuses the first reply of its model: 400 `json_validate_failed`."""
    return (
        refuse(400, "Failed to generate JSON.", "json_validate_failed")
        if call.number == 1
        else None
    )


@quirk("optimizer", mode="tools")
def refused_tool_call(call: Call) -> httpx.Response | None:
    """The provider refuses some calls of a tool: 400 `tool_use_failed`."""
    return (
        refuse(400, "Failed to call a function.", "tool_use_failed")
        if call.number % 3 == 2
        else None
    )


@quirk("target", "optimizer")
def filtered_prompt(call: Call) -> httpx.Response | None:
    """Each prompt with one town is refused for ever: 400 `content_filter`."""
    town = FLAGGED if call.role == "target" else TRAIN
    return refuse(400, "The prompt was filtered.", "content_filter") if town in call.text else None


@quirk("target", "optimizer")
def flagged_prompt(call: Call) -> httpx.Response | None:
    """Each prompt with one town is refused for ever: 403, flagged input."""
    town = FLAGGED if call.role == "target" else TRAIN
    return (
        refuse(403, "This prompt was flagged.", metadata={"reasons": ["x"]})
        if town in call.text
        else None
    )


@quirk("target")
def firewall_page(call: Call) -> httpx.Response | None:
    """A firewall answers one prompt with 403 and an HTML page."""
    page = httpx.Response(403, html="<html><title>Attention</title>You have been blocked</html>")
    return page if FLAGGED in call.text else None


@quirk("target")
def words_of_an_unknown_model(call: Call) -> httpx.Response | None:
    """A 400 about one item has the words of an unknown model."""
    return (
        refuse(400, "The model could not read the file: not found")
        if FLAGGED in call.text
        else None
    )


@quirk("target")
def not_found_for_one_item(call: Call) -> httpx.Response | None:
    """One item is refused with 404."""
    return refuse(404, "image not found") if FLAGGED in call.text else None


@quirk("target", concurrency=1)
def first_prompt_flagged(call: Call) -> httpx.Response | None:
    """The first item of all is refused with 403, before any call was answered."""
    return refuse(403, "This prompt was flagged.") if TOWNS["val"][0] in call.text else None


@quirk("target")
def two_test_items_refused(call: Call) -> httpx.Response | None:
    """Two of ten test items are refused for ever."""
    is_refused = any(town in call.text for town in TOWNS["test"][:2])
    return refuse(400, "filtered", "content_filter") if is_refused else None


@quirk("target")
def filtered_skill(call: Call) -> httpx.Response | None:
    """Each prompt that holds the new rule is refused for ever."""
    return refuse(400, "The prompt was filtered.", "content_filter") if RULE in call.text else None


@quirk("target", "optimizer", model="o")
def wrong_key(call: Call) -> httpx.Response:
    """Every call is refused with 401."""
    return refuse(401, "Incorrect API key provided.")


@quirk("target", "optimizer", model="o")
def forbidden_model(call: Call) -> httpx.Response:
    """Every call is refused with 403."""
    return refuse(403, "You have no permission for this model.")


@quirk("target", "optimizer", model="o")
def unknown_model(call: Call) -> httpx.Response:
    """Every call is refused with 404: the model does not exist."""
    return refuse(404, "The model m does not exist.", "model_not_found")


@quirk("target")
def key_revoked_in_the_run(call: Call) -> httpx.Response | None:
    """After some answers, every call is refused with 401."""
    return refuse(401, "This key was revoked.") if call.number > 12 else None


@quirk("target")
def permission_revoked_in_the_run(call: Call) -> httpx.Response | None:
    """After some answers, every call is refused with 403."""
    return refuse(403, "You have no permission any more.") if call.number > 12 else None


@quirk("target")
def credit_spent_in_the_run(call: Call) -> httpx.Response | None:
    """After some answers, every call is refused with 402."""
    return refuse(402, "Insufficient balance.") if call.number > 12 else None


@quirk("optimizer")
def context_too_small(call: Call) -> httpx.Response | None:
    """No analyst's prompt fits into the context."""
    return refuse(400, "The maximum context length is 1024 tokens.", "context_length_exceeded")


@quirk("target")
def no_message(call: Call) -> httpx.Response | None:
    """The choice for one item has no message."""
    choice = {"index": 0, "finish_reason": "content_filter: PROHIBITED"}
    return httpx.Response(200, json={"choices": [choice]}) if FLAGGED in call.text else None


@quirk("target")
def no_choice(call: Call) -> httpx.Response | None:
    """There is no choice for one item."""
    return httpx.Response(200, json={"choices": []}) if FLAGGED in call.text else None


@quirk("target")
def no_content(call: Call) -> httpx.Response | None:
    """The content for one item is null, with the finish reason `content_filter`."""
    return say(None, "content_filter") if FLAGGED in call.text else None


# ----------------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Outcome:
    """What a run under a quirk did: its end, its test, what it said, and the requests of each role."""

    name: str
    role: str
    does: str
    summary: RunSummary
    warnings: tuple[str, ...]
    requests: Counter[str]

    @property
    def solved(self) -> tuple[int, int, int] | None:
        """The test items that the initial and the best skill solve, and how many have a score; None without a test."""
        scores = [self.summary.score(name, Split.test) for name in ("baseline", "best")]
        if None in scores:
            return None
        before, after = (score for score in scores if score is not None)
        return round(before.successes), round(after.successes), after.n

    @property
    def said(self) -> str:
        """The reason of the run's end, its warnings, and what it names as unmeasured."""
        said = (self.summary.reason, *self.warnings, *self.summary.missing)
        return "; ".join(dict.fromkeys(filter(None, said))).replace(f" at {URL}", "")

    @property
    def cell(self) -> str:
        """The run's end, or the test items that the best skill solves; a star where the run says more."""
        end = self.summary.status
        if self.solved is not None:
            end = f"{self.solved[1]} of {self.solved[2]}"
        return f"{end} *" if self.said else end


def write_data(folder: Path) -> Path:
    """Write the towns as a data set with its splits."""
    for split, towns in TOWNS.items():
        (folder / split).mkdir(parents=True)
        items = (
            {"id": town, "input": f"Town: {town}", "reference": town.upper()} for town in towns
        )
        (folder / split / "items.jsonl").write_text(
            "".join(f"{json.dumps(item)}\n" for item in items)
        )
    return folder


def configure(folder: Path, role: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a short training by edits."""
    usual = {"max_retries": 2, "timeout": 20}
    models: dict[str, dict[str, Any]] = {
        "target": {"model": "m", "base_url": URL, "api_key_env": None, "max_tokens": 300, **usual},
        "optimizer": {"max_tokens": 2000, **usual},
    }
    models.get(role, {}).update(settings)
    return {
        "out_dir": folder,
        "data": {"path": folder.parent / "data"},
        "environment": {"grader": "exact", "description": "Write the name of the town as asked."},
        "models": models,
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1, "batch_size": len(TOWNS["train"])},
        "reflect": {"minibatch_size": 4},
        "slow_update": {"enabled": False},
        "meta_skill": {"enabled": False},
        "test": {"placebo": False, "null_answers": False},
        "report": False,
    }


async def play(role: str, quirk: Quirk, settings: dict[str, Any], folder: Path) -> Outcome:
    """Train under a quirk in a folder, whose neighbour ``data`` holds the items."""
    endpoint = QuirkyEndpoint(role, quirk)
    warnings = list[str]()
    async for event in Trainer(configure(folder, role, settings), transport=endpoint).stream():
        if isinstance(event, WarningIssued):
            warnings.append(event.message)
        if isinstance(event, RunFinished):
            summary = event.summary
    warnings += summary.warnings
    does = " ".join((quirk.__doc__ or "").split())
    return Outcome(quirk.__name__, role, does, summary, tuple(warnings), endpoint.requests)


def play_all(names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Play all quirks, or those with these names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        chosen = [each for each in QUIRKS if not names or each[1].__name__ in names]
        for number, each in enumerate(chosen):
            options = {"loop_factory": HurriedLoop}
            yield anyio.run(play, *each, folder / str(number), backend_options=options)


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of the page: a row for each quirk, a column for the role whose answers it changes."""
    rows = dict[str, dict[str, str]]()
    for outcome in outcomes:
        rows.setdefault(outcome.does, {})[outcome.role] = outcome.cell
    lines = ["| what the endpoint does | to the target | to the optimizer |", "|---|---|---|"]
    for does, cells in rows.items():
        target = cells.get("target", cells.get("none", ""))
        lines.append(f"| {does} | {target} | {cells.get('optimizer', '')} |")
    return "\n".join(lines)


def main() -> None:
    """Play quirks and print the table, or write it into its page."""
    parser = argparse.ArgumentParser(
        description="Play quirks of endpoints through short trainings."
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="play these alone")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args()
    started = time.perf_counter()
    outcomes = list[Outcome]()
    for outcome in play_all(options.only):
        outcomes.append(outcome)
        print(f"{outcome.name} ({outcome.role}): {outcome.cell} {outcome.said}", flush=True)
    print(f"{len(outcomes)} runs in {time.perf_counter() - started:.0f} seconds")
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        text = f"{before}{BEGIN}\n\n{format_table(outcomes)}\n\n{END}{after}"
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
