"""Drafts: a reply is seen while it is written, only ever grows, and ends as what was validated."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any, cast

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict

from doubles import (
    PROMPT,
    RUN,
    Body,
    Endpoint,
    Kept,
    call_id,
    chunk,
    completion,
    config,
    connected,
    opened,
    stream,
)
from draft_example import CASSETTE, MODEL, SAMPLE, Handbook
from draft_example import PROMPT as LONG_PROMPT
from reflact.concurrency import open_task_group
from reflact.errors import ProviderDown, ReplyError
from reflact.events import DraftDiscarded, DraftUpdated, Event, ModelCallFinished
from reflact.llm.cassettes import Interaction, ReplayTransport, read_cassette
from reflact.llm.client import Client
from reflact.llm.drafts import DraftStream, extends, read_partial
from reflact.llm.sse import parse_chunk, read_events
from reflact.messages import Draft, Reply, ReplyModel, Text
from reflact.types import FrozenModel

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


class Part(FrozenModel):
    """A part of a reply."""

    title: str
    size: int


class Plan(ReplyModel):
    """A reply with parts."""

    why: str
    parts: tuple[Part, ...]
    more: list[int] | None = None


VALUE = Plan(
    why="Because. " * 20, parts=tuple(Part(title=f"part {n}" * 5, size=n) for n in range(8)), more=[1]
)
TEXT = VALUE.model_dump_json()
GOOD = stream(TEXT)
LONG = TEXT.replace('"size":7', '"size":"seven"')


class Told(list[Event]):
    """Keeps what it is told of drafts and calls."""

    async def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def attempts(self) -> list[list[Any]]:
        """What was drafted between resets."""
        attempts: list[list[Any]] = [[]]
        for event in self:
            if isinstance(event, DraftDiscarded):
                attempts.append([])
            elif isinstance(event, DraftUpdated):
                attempts[-1].append(event.draft)
        return attempts


def only_grow(drafts: list[Any]) -> bool:
    """Whether each draft is a beginning of the next one."""
    return all(extends(after, before) for before, after in pairwise(drafts))


# ------------------------------------------------------------------------------------------- a recorded reply


def with_tools(recorded: Interaction) -> list[str]:
    """Return the recorded stream as it would have come in the arguments of a function."""
    chunks = []
    for data in read_events("".join(recorded.chunks)):
        found = cast("Any", parse_chunk(data))
        for choice in found["choices"] if found else []:
            if choice["delta"].get("content"):
                function = {"name": "Handbook", "arguments": choice["delta"].pop("content")}
                choice["delta"]["tool_calls"] = [
                    {"index": 0, "id": "c1", "type": "function", "function": function}
                ]
        chunks.append(f"data: {json.dumps(found) if found else data}\n\n")
    return chunks


@pytest.mark.parametrize("mode", ["json_schema", "tools"])
async def test_a_recorded_reply_grows_to_what_was_validated(mode: str) -> None:
    """Ten kilobytes of a real model: texts grow, rules appear one by one, the last draft is the reply."""
    told, (recorded,) = Told(), read_cassette(CASSETTE)
    transport: httpx.AsyncBaseTransport = ReplayTransport(CASSETTE, (recorded,))
    if mode == "tools":
        transport = Endpoint([piece.encode() for piece in with_tools(recorded)])
    async with connected(transport, MODEL.model_copy(update={"mode": mode}), emit=told) as client:
        reply = await client.ask(LONG_PROMPT, Handbook, call_id=SAMPLE)
    assert len(reply.value.model_dump_json()) >= 10_000
    (drafts,) = told.attempts
    assert only_grow(drafts)
    assert drafts[-1] == reply.value.model_dump(mode="json")
    rules = [len(draft["rules"]) for draft in drafts if "rules" in draft]
    assert list(dict.fromkeys(rules)) == list(range(1, len(reply.value.rules) + 1))
    texts = {len(draft["introduction"]) for draft in drafts if "introduction" in draft}
    assert len(texts) > 3
    assert (reply.usage.calls, reply.usage.uncounted) == (1, 0)
    assert reply.usage.output_tokens > 1000


# ---------------------------------------------------------------------------------------------------- growth


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("size", [1, 5, 64])
async def test_elements_appear_one_by_one(tools: bool, size: int) -> None:
    """Each element is seen as it closes, whole and of its type; the last draft is the reply."""
    told = Told()
    settings = config(mode="tools" if tools else "json_schema")
    async with connected(Endpoint(stream(TEXT, tools=tools, size=size)), settings, emit=told) as client:
        reply = await client.ask(PROMPT, Plan, call_id=call_id())
    (drafts,) = told.attempts
    assert only_grow(drafts)
    assert drafts[-1] == reply.value.model_dump(mode="json")
    seen = [len(draft["parts"]) for draft in drafts if "parts" in draft]
    assert sorted(set(seen)) == list(range(1, 9)) or size == 64
    for draft in drafts:
        for part in draft.get("parts", []):
            Part.model_validate(part)


async def test_drafts_are_told_before_the_answer_is_whole() -> None:
    """A provider that goes on only once a draft was seen is answered."""
    told, seen = Told(), anyio.Event()

    class Patient(Body):
        async def __aiter__(self) -> Any:
            async for piece in Body(GOOD[:30]):
                yield piece
            await seen.wait()
            async for piece in Body(GOOD[30:]):
                yield piece

    async def emit(event: Event) -> None:
        await told(event)
        seen.set()

    def answer(_: Any) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Patient([]))

    async with connected(Endpoint(answer), emit=emit) as client:
        assert (await client.ask(PROMPT, Plan, call_id=call_id())).value == VALUE
    assert len(told.attempts[0]) > 1


async def test_who_watches_slowly_holds_up_no_answer() -> None:
    """An answer is read to its end while somebody still looks at its first draft; nothing is left out."""
    told, store = Told(), await opened()

    async def emit(event: Event) -> None:
        while not await store.spend(RUN) or (await store.spend(RUN))[0].usage.calls == 0:
            await anyio.lowlevel.checkpoint()
        await told(event)

    async with connected(Endpoint(GOOD), config(timeout=5), store=store, emit=emit) as client:
        await client.ask(PROMPT, Plan, call_id=call_id())
    assert len(told.attempts[0]) > 8
    assert isinstance(told[-1], ModelCallFinished)


async def test_an_element_that_does_not_fit_is_never_shown() -> None:
    """Drafts end before it, as the attempt will."""
    told = Told()
    async with connected(Endpoint(stream(LONG), GOOD), emit=told) as client:
        reply = await client.ask(PROMPT, Plan, call_id=call_id())
    first, second = told.attempts
    assert (len(first[-1]["parts"]), len(second[-1]["parts"]), reply.attempts) == (7, 8, 2)


async def test_garbage_is_not_drafted() -> None:
    """What is no JSON leaves no drafts, and no reset."""
    told = Told()
    async with connected(Endpoint(stream("I would rather not. " * 20), GOOD), emit=told) as client:
        reply = await client.ask(PROMPT, Plan, call_id=call_id())
    assert (reply.attempts, len(told.attempts)) == (2, 1)
    assert told.attempts[0][-1] == VALUE.model_dump(mode="json")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3))
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)


class Anything(ReplyModel):
    """A reply that may hold anything."""

    model_config = ConfigDict(extra="ignore")


@given(OBJECTS, st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}]), st.booleans())
def test_a_text_is_seen_as_it_grows(value: Any, spacing: Any, ascii_only: bool) -> None:
    """However a text is spaced and escaped, each draft is a beginning of the whole, and the last is it."""
    text = json.dumps(value, ensure_ascii=ascii_only, **spacing)
    whole = json.loads(text)
    seen = [read_partial(text[:end], Anything) for end in range(len(text) + 1)]
    assert all(extends(whole, draft) for draft in seen)
    assert seen[-1] == whole


@given(OBJECTS, st.data())
def test_nothing_is_raised_whatever_is_written(value: Any, data: Any) -> None:
    """A text that was damaged in one place is seen or not, and raises nothing."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    damage = data.draw(st.sampled_from(['"', "\\", "{", "}", "[", "]", ",", ":", "x", "\n", "\ud800", ""]))
    for end in (at + 1, len(text)):
        seen = read_partial((text[:at] + damage + text[at + 1 :])[:end], Anything)
        assert seen is None or isinstance(seen, dict)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"a": "x", "n": 12', {"a": "x"}),
        ('{"a": "x", "n": 12,', {"a": "x", "n": 12}),
        ('{"a": "x\\ud83d', {"a": "x"}),
        ('{"a": ["x", "y', {"a": ["x"]}),
        ('{"a": [{"b": 1}', {"a": [{"b": 1}]}),
        ('{"a": [{"b": 1}, {"b": 2', {"a": [{"b": 1}]}),
        ('{"a": {"b": [1, [2, 3], 4', {"a": {"b": [1, [2, 3]]}}),
        ('{"a": [', {}),
        ('{"a": NaN, "b": 1', None),
        ('{"a": "x\ny"', None),
        ('["a", "b"', None),
        ('```json\n{"a": 1', None),
        ("", None),
        ('{"a": ' * 100_000, None),
    ],
)
def test_texts_grow_and_elements_come_whole(text: str, kept: Any) -> None:
    """A text is seen letter by letter; an element of a list, a number and a word once they have closed."""
    assert read_partial(text, Anything) == kept


async def drafts_of(text: str, reply_type: type[ReplyModel]) -> list[Any]:
    """Return the drafts of a reply that arrives in pieces."""
    shown: list[Any] = []

    async def keep(draft: Draft[ReplyModel]) -> None:
        if draft.reply is None:
            shown.append(draft.value)

    drafts = DraftStream(reply_type, {}, None, keep)

    async def answer() -> Reply[ReplyModel]:
        drafts.begin(())
        for piece in stream(text):
            drafts.feed(piece)
        return Reply(value=reply_type.model_construct())

    await drafts.follow(answer)
    return shown


async def test_what_was_shown_is_never_taken_back() -> None:
    """A member that is named twice stops the drafts of its attempt."""
    shown = await drafts_of('{"a": "' + "x " * 50 + '", "a": {"b": "' + "y " * 100 + '"}}', Anything)
    assert shown
    assert only_grow(shown)
    assert all(set(draft["a"]) <= set("x ") for draft in shown)


async def test_drafts_cost_in_proportion_to_the_reply() -> None:
    """All drafts of a reply together are some multiple of its length, however long it is."""

    class Words(ReplyModel):
        """A text and words."""

        text: str = ""
        words: list[str] = []

    per_character = []
    for scale in (1, 32):
        text = json.dumps({"text": "abcd " * 100 * scale, "words": ["efgh"] * 100 * scale})
        shown = await drafts_of(text, Words)
        per_character.append(sum(len(json.dumps(draft)) for draft in shown) / len(text))
    assert 1 < per_character[1] < 80


# ----------------------------------------------------------------------------------------------------- resets


async def test_a_reset_stands_between_attempts() -> None:
    """Drafts of a reply that is sent back count for nothing; those of the next attempt begin anew."""
    told = Told()

    def check(plan: Plan) -> None:
        if not plan.why.startswith("Because"):
            raise ValueError("no reason is given")

    wrong = stream(TEXT.replace("Because", "Whyever"))
    async with connected(Endpoint(wrong, GOOD), emit=told) as client:
        reply = await client.ask(PROMPT, Plan, call_id=call_id(), check=check)
    assert (reply.value, reply.attempts) == (VALUE, 2)
    first, second = told.attempts
    assert only_grow(first)
    assert only_grow(second)
    assert second[-1] == VALUE.model_dump(mode="json")
    (reset,) = [event for event in told if isinstance(event, DraftDiscarded)]
    assert (reset.attempt, reset.reason, reset.call_id) == (1, "no reason is given", call_id().label)
    assert {event.attempt for event in told if isinstance(event, DraftUpdated)} == {1, 2}


@pytest.mark.parametrize("failure", [[*GOOD[:40], httpx.ReadError("gone")], stream(LONG)])
async def test_a_call_that_fails_takes_its_drafts_back(failure: list[bytes | Exception]) -> None:
    """After the last draft of a call that has no reply there is a reset, and then the call's end."""
    told = Told()
    async with connected(Endpoint(failure), config(max_retries=0, reasks=0), emit=told) as client:
        with pytest.raises(ProviderDown if len(failure) == 41 else ReplyError):
            await client.ask(PROMPT, Plan, call_id=call_id())
    assert isinstance(told[-2], DraftDiscarded)
    assert isinstance(told[-1], ModelCallFinished)
    assert told.attempts[0] != []
    assert told.attempts[1:] == [[]]


# ----------------------------------------------------------------------------------------------- Client.draft


async def test_the_last_draft_carries_the_reply() -> None:
    """The iterator gives drafts that grow, and then the reply itself; events tell the same."""
    told = Told()
    async with connected(Endpoint(GOOD), emit=told) as client:
        drafts = [draft async for draft in client.draft(PROMPT, Plan, call_id=call_id())]
        reply = await client.ask(PROMPT, Plan, call_id=call_id())
    *earlier, last = drafts
    assert {draft.reply for draft in earlier} == {None}
    assert last.reply == reply
    assert last.value == VALUE.model_dump(mode="json")
    assert only_grow([draft.value for draft in drafts])
    assert [draft.value for draft in drafts] == told.attempts[0]


async def test_another_attempt_has_another_number() -> None:
    """Who iterates sees by the attempt's number that a reply begins anew."""
    async with connected(Endpoint(stream(LONG), [*GOOD[:40], httpx.ReadError("x")], GOOD)) as client:
        drafts = [draft async for draft in client.draft(PROMPT, Plan, call_id=call_id())]
    assert sorted({draft.attempt for draft in drafts}) == [1, 2, 3]
    for attempt in (1, 2, 3):
        assert only_grow([draft.value for draft in drafts if draft.attempt == attempt])
    assert drafts[-1].reply is not None
    assert (drafts[-1].reply.attempts, drafts[-1].reply.value) == (2, VALUE)


async def test_without_a_stream_the_reply_is_the_only_draft() -> None:
    """Stored replies, plain ones, plain text, and streams that are switched off."""
    store = await opened()

    async def only(client: Client, kind: type[ReplyModel], part: str) -> ReplyModel:
        (draft,) = [draft async for draft in client.draft(PROMPT, kind, call_id=call_id(part))]
        assert draft.reply is not None
        return draft.reply.value

    async with connected(Endpoint(GOOD), store=store) as client:
        await client.ask(PROMPT, Plan, call_id=call_id())
        assert await only(client, Plan, "") == VALUE
    async with connected(Endpoint(completion(TEXT)), store=store) as client:
        assert await only(client, Plan, "plain") == VALUE
        assert await only(client, Text, "text") == Text(text=TEXT)
    async with connected(Endpoint(completion(TEXT)), config(stream=False), store=store) as client:
        assert await only(client, Plan, "off") == VALUE


async def test_errors_of_a_call_end_its_drafts() -> None:
    """An iteration raises what ``ask`` would raise, after what was drafted."""
    seen: list[int] = []

    async def look(client: Client) -> None:
        async for draft in client.draft(PROMPT, Plan, call_id=call_id()):
            seen.append(draft.attempt)  # noqa: PERF401 - what came before the error is kept

    async with connected(Endpoint(stream(LONG)), config(reasks=0)) as client:
        with pytest.raises(ReplyError, match="size"):
            await look(client)
    assert len(seen) > 3


def endless() -> httpx.Response:
    """Return an answer that begins and never goes on."""

    class Endless(Body):
        async def __aiter__(self) -> Any:
            async for piece in super().__aiter__():
                yield piece
            await anyio.sleep_forever()

    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Endless(GOOD[:40]))


async def first_draft(client: Client) -> None:
    """Ask for drafts and leave after the first."""
    async with client.draft(PROMPT, Plan, call_id=call_id()) as drafts:
        async for _ in drafts:
            return


async def cancelled(client: Client) -> None:
    """Ask, and cancel once something was drafted."""
    async with open_task_group() as tasks:
        tasks.start_soon(lambda: client.ask(PROMPT, Plan, call_id=call_id()))
        await anyio.sleep_forever()


@pytest.mark.parametrize("leave", [first_draft, cancelled])
async def test_a_call_that_is_left_stays_booked(leave: Callable[[Client], Awaitable[None]]) -> None:
    """Whoever leaves in the middle of a stream pays its worst case, and the next one asks again."""
    store = await opened()
    scope = anyio.CancelScope()

    async def emit(event: Event) -> None:
        if leave is cancelled:
            scope.cancel()

    settings = config(max_tokens=50)
    async with connected(Endpoint(lambda _: endless()), settings, store=store, emit=emit) as client:
        with scope:
            await leave(client)
    (spent,) = await store.spend(RUN)
    assert (spent.usage.calls, spent.unsettled, spent.worst_case.output_tokens) == (0, 1, 50)
    async with connected(Endpoint(GOOD), store=store) as client:
        reply: Reply[Plan] = await client.ask(PROMPT, Plan, call_id=call_id())
    assert reply.value == VALUE


async def test_an_error_of_who_watches_ends_the_call() -> None:
    """It is raised as it is, and the request is not left alone."""

    async def emit(event: Event) -> None:
        raise LookupError("closed")

    async with connected(Endpoint(lambda _: endless()), emit=emit) as client:
        with pytest.raises(LookupError, match="closed"):
            await client.ask(PROMPT, Plan, call_id=call_id())


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("secret", ["sk-very-secret-key-4711", 'sk-very"secret\\key/4711'])
async def test_a_key_that_a_stream_takes_apart_is_never_seen(secret: str, size: int) -> None:
    """Drafts, the reply and the store hold a mark in its place, however the server sends it back."""
    told = Told()

    async def key() -> str:
        return secret

    said = VALUE.model_copy(update={"why": f"You sent {secret}, did you? " * 4})
    provider = Endpoint(stream(said.model_dump_json(), size=size))
    store = Kept()
    await store.open_run(RUN, {}, {})
    async with connected(provider, config(key=key), store=store, emit=told) as client:
        reply = await client.ask(PROMPT, Plan, call_id=call_id())
    assert reply.value.why == "You sent [key], did you? " * 4
    assert only_grow(told.attempts[0])
    assert len(told.attempts[0]) > 3
    for text in (*(event.model_dump_json() for event in told), *(kept.chunks[0] for kept in store.replies)):
        assert secret[:8] not in text


async def test_texts_before_a_function_are_no_drafts() -> None:
    """What a model says before it calls the function is not the reply."""
    told = Told()
    pieces = [chunk({"content": "Let me see. "}), *stream(TEXT, tools=True)]
    async with connected(Endpoint(pieces), config(mode="tools"), emit=told) as client:
        assert (await client.ask(PROMPT, Plan, call_id=call_id())).value == VALUE
    assert told.attempts == [[]]
