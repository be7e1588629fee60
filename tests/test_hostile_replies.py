"""Hostile replies: each ends as a value, a counted fault or one sentence, and poisons nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest

import virtual_time
from doubles import PROMPT, RUN, URL, Endpoint, Watched, call_id, completion, config, connected, watched
from hostile import REPLY, Case, HostileNetwork, load_cases
from reflact.errors import BadRequest, ProviderDown, ReflactError
from reflact.events import Event
from reflact.messages import ReplyModel, Text
from reflact.records import Usage

PARTS = 8
"""The corpus is divided into so many parts, so that several processes can share it."""

GOOD = Case(
    name="good",
    why="It is what a provider should answer.",
    body='{"choices":[{"message":{"content":"${text}"}}],"usage":{"prompt_tokens":7,"completion_tokens":2}}',
    reads=REPLY,
    counts=[7, 0, 2],
)


class Word(ReplyModel):
    """A typed reply."""

    reasoning: str
    word: str


WORD = Word(reasoning="so", word="yes")


class Kind(NamedTuple):
    """A kind of request."""

    reply_type: type[ReplyModel]
    mode: str = "json_schema"
    streamed: bool = False

    @property
    def reply(self) -> str:
        return "fine" if self.reply_type is Text else WORD.model_dump_json()


PLAIN = Kind(Text)
TYPED = (Kind(Word), Kind(Word, "tools"), Kind(Word, streamed=True))


class Provider:
    """Plays a hostile reply until it is mended, and counts what it may charge for."""

    def __init__(self, case: Case, reply: str) -> None:
        self.playing: Case = case
        self.requests = 0
        self.charged = 0
        self._reply = reply

    def answer(self, request: httpx.Request) -> list[bytes]:
        self.requests += 1
        self.charged += self.playing.charged
        return self.playing.render(self._reply)


class Outcome(NamedTuple):
    """What became of a call: the text of its value, or its error."""

    text: str | None
    error: Exception | None


async def ask(case: Case, kind: Kind, provider: Provider, store: Watched) -> Outcome:
    """Ask once."""

    async def take(event: Event) -> None:
        pass

    settings = config(max_retries=1, mode=kind.mode, max_tokens=100)
    emit = take if kind.streamed else None
    async with connected(HostileNetwork(provider.answer), settings, store=store, emit=emit) as client:
        try:
            reply = await client.ask(PROMPT, kind.reply_type, call_id=call_id())
        except ReflactError as error:
            return Outcome(None, error)
        return Outcome(
            reply.value.text if isinstance(reply.value, Text) else reply.value.model_dump_json(), None
        )


async def check(case: Case, kind: Kind) -> list[str]:
    """Play a case to one call, then mend the provider and ask again; return what is wrong."""
    provider, store = Provider(case, kind.reply), await watched()
    first = await ask(case, kind, provider, store)
    wrong = [*check_outcome(case, kind, first), *await check_books(provider, store)]
    if kind is PLAIN:
        wrong += await check_attempts(case, provider, store)
    provider.playing = GOOD
    second = await ask(case, kind, provider, store)
    if kind is PLAIN and second.text != (kind.reply if case.reads is None else case.text(kind.reply)):
        wrong.append(f"mended, it ends as {second!r:.200}")
    if second.error is not None and first.text is not None:
        wrong.append(f"what was read is lost: {second.error}")
    return [f"{case.name}, {kind.reply_type.__name__}, {kind.mode}: {each}" for each in wrong]


def check_outcome(case: Case, kind: Kind, outcome: Outcome) -> list[str]:
    """Return what is wrong with an outcome: errors are of their type, and one sentence."""
    if outcome.error is not None and ("\n" in str(outcome.error) or "Traceback" in str(outcome.error)):
        return [f"its error has several lines: {outcome.error}"]
    if kind is not PLAIN:
        return []
    if case.reads is not None:
        return [] if outcome.text == case.text(kind.reply) else [f"ends as {outcome!r:.300}"]
    expected = case.refused or case.ends
    return [] if type(outcome.error).__name__ == expected else [f"ends as {outcome!r:.300}"]


async def check_attempts(case: Case, provider: Provider, store: Watched) -> list[str]:
    """Return what is wrong with the attempts of a plain call, their faults, and the tokens of its answer."""
    faults = {count.kind: count.count for count in await store.faults(RUN)}
    if case.reads is None:
        attempts = 1 if case.fails == "oversized" else 2
        right = sum(faults.values()) <= 1 if case.fails is None else faults == {case.fails: attempts}
        return [] if right else [f"counts {faults}"]
    (spend,) = await store.spend(RUN)
    clamped = {"overcounted": 1} if isinstance(case.counts, str) else {}
    wrong = [] if faults == clamped else [f"counts {faults}"]
    return wrong if spend.usage == find_usage(case, store) else [*wrong, f"books {spend.usage}"]


def find_usage(case: Case, store: Watched) -> Usage:
    """Return the usage that must be booked for a case that is read."""
    most = store.reservations[0].worst_case
    counts: Any = case.counts
    match case.counts:
        case None:
            return Usage(calls=1, uncounted=1)
        case "most":
            counts = [most.input_tokens, 0, most.output_tokens]
        case "most written":
            counts = [7, 0, most.output_tokens]
    return Usage(calls=1, input_tokens=counts[0], cached_tokens=counts[1], output_tokens=counts[2])


async def check_books(provider: Provider, store: Watched) -> list[str]:
    booked = sum(spend.usage.calls + spend.unsettled for spend in await store.spend(RUN))
    return [] if booked == provider.charged else [f"{provider.charged} may be charged, {booked} are booked"]


def test_the_corpus_is_sound() -> None:
    cases = load_cases()
    assert len(cases) >= 150
    assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == []
    for case in cases:
        assert [case.reads, case.fails, case.refused].count(None) == 2, case.name


@pytest.mark.parametrize("part", range(PARTS))
def test_each_reply_is_a_value_or_a_fault(part: int) -> None:
    """The outcome of a call is the expected one, it is booked, and a provider that is mended answers the same call."""
    assert play(part, PLAIN) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPED)
def test_typed_replies_survive_them(kind: Kind) -> None:
    assert [wrong for part in range(PARTS) for wrong in play(part, kind)] == []


def play(part: int, kind: Kind) -> list[str]:
    return [wrong for case in load_cases()[part::PARTS] for wrong in virtual_time.run(check, case, kind)]


@pytest.mark.virtual_time
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    ("location", "words"),
    [
        (
            f"{URL}/chat/completions",
            rf"redirects requests to {URL}/chat/completions .*check models\.optimizer\.base_url",
        ),
        (
            "https://elsewhere.test/v1/chat/completions?token=x",
            r"set models\.optimizer\.base_url to https://elsewhere\.test/v1$",
        ),
        ("/login", r"redirects requests to https?://[^ ]*/login "),
        ("file:///etc/passwd", "redirects requests to file:///etc/passwd "),
        ("http://[::1", r"redirects requests to http://\[::1 "),
    ],
    ids=["to itself", "to another host", "to a page", "to a file", "to nowhere"],
)
async def test_no_redirect_is_followed(status: int, location: str, words: str) -> None:
    endpoint = Endpoint(httpx.Response(status, headers={"location": location}), completion("never asked"))
    store = await watched()
    async with connected(endpoint, store=store) as client:
        for part in ("first", "second"):
            with pytest.raises(BadRequest, match=words) as failure:
                await client.ask(PROMPT, Text, call_id=call_id(part))
            assert f"({status})" in str(failure.value)
            assert "token" not in str(failure.value)
    assert len(endpoint.requests) == 1
    assert await store.spend(RUN) == ()


class Endless(httpx.AsyncBaseTransport, httpx.AsyncByteStream):
    """Answers with a body without an end, whose pieces are counted."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers
        self.requests = self.pieces = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        return httpx.Response(200, headers=self._headers, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.pieces += 1
            yield b" " * 1000


@pytest.mark.virtual_time
@pytest.mark.parametrize(("headers", "pieces"), [({"content-length": "50000000"}, 0), ({}, 4195)])
async def test_a_huge_answer_is_read_once_and_no_further_than_its_bound(
    headers: dict[str, str], pieces: int
) -> None:
    endpoint, store = Endless(headers), await watched()
    async with connected(endpoint, config(max_tokens=1), store=store) as client:
        with pytest.raises(ProviderDown, match=r"more than 4,194,816 bytes.*models\.optimizer\.max_tokens"):
            await client.ask(PROMPT, Text, call_id=call_id())
    assert (endpoint.requests, endpoint.pieces) == (1, pieces)
    assert [(each.kind, each.count) for each in await store.faults(RUN)] == [("oversized", 1)]
    assert [spend.unsettled for spend in await store.spend(RUN)] == [1]
