"""Cassettes: answers found by content, misses that explain themselves, nothing secret on disk."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from doubles import PROMPT, Endpoint, call_id, completion, config, connected
from pure_world import PureNetwork, settings, write_world
from reflact import Trainer
from reflact.concurrency import fan_out
from reflact.config.models import ModelConfig
from reflact.errors import CassetteError, CassetteMiss, ConfigError
from reflact.llm.cassettes import open_cassette, read_cassette
from reflact.llm.client import Client
from reflact.llm.completions import JSON
from reflact.messages import Message, RenderedPrompt, ReplyModel, Text
from reflact.testing import InMemoryRunStore

SECRET = "sk-very-secret-key"


class Word(ReplyModel):
    """One word."""

    word: str


def asked(text: str) -> RenderedPrompt:
    """Return a prompt with a user message."""
    return RenderedPrompt(name="word", version=1, messages=(Message(role="user", content=text),))


def echo(body: Any) -> httpx.Response:
    return completion(json.dumps({"word": body["messages"][-1]["content"]}))


@asynccontextmanager
async def taped(
    path: Path,
    mode: Literal["record", "replay"],
    inner: httpx.AsyncBaseTransport | None = None,
    *,
    settings: ModelConfig | None = None,
    store: InMemoryRunStore | None = None,
) -> AsyncIterator[Client]:
    """Enter a client in front of a cassette."""
    async with (
        open_cassette(path, mode=mode, inner=inner) as transport,
        connected(transport, settings, store=store) as llm,
    ):
        yield llm


async def recorded(path: Path, *texts: str) -> None:
    async with taped(path, "record", Endpoint(echo)) as llm:
        for text in texts:
            await llm.ask(asked(text), Word, call_id=call_id(text))


async def test_a_recording_is_replayed_in_any_order(tmp_path: Path) -> None:
    texts = [f"text {n}" for n in range(40)]
    await recorded(tmp_path / "c.jsonl", *texts)
    random.Random(7).shuffle(texts)
    async with taped(tmp_path / "c.jsonl", "replay") as llm:
        replies = await fan_out(lambda t: llm.ask(asked(t), Word, call_id=call_id(t)), texts)
    assert [reply.value.word for reply in replies] == texts


async def test_equal_prompts_are_told_apart_by_their_sample(tmp_path: Path) -> None:
    answers = Endpoint(completion("heads"), completion("tails"))
    async with taped(tmp_path / "c.jsonl", "record", answers) as llm:
        for part in ("a", "b"):
            await llm.ask(PROMPT, Text, call_id=call_id(part))
    async with taped(tmp_path / "c.jsonl", "replay") as llm:
        said = {part: await llm.ask(PROMPT, Text, call_id=call_id(part)) for part in ("b", "a")}
    assert (said["a"].value.text, said["b"].value.text) == ("heads", "tails")


async def test_nothing_secret_and_no_host_is_written(tmp_path: Path) -> None:
    answer = completion('{"word": "yes"}')
    answer.headers.update(
        {"x-request-id": "req-17", "set-cookie": "session=1", "openai-organization": "acme"}
    )

    async def key() -> str:
        return SECRET

    settings = config(key=key, base_url="http://private-host.test:8443/v1")
    endpoint = Endpoint(answer)
    async with taped(tmp_path / "c.jsonl", "record", endpoint, settings=settings) as llm:
        await llm.ask(PROMPT, Word, call_id=call_id())
    assert SECRET in endpoint.requests[0].headers["authorization"]
    written = (tmp_path / "c.jsonl").read_text()
    for secret in (SECRET, "private-host", "req-17", "session", "acme", "8443"):
        assert secret not in written


async def test_passing_failures_and_refused_keys_are_not_recorded(tmp_path: Path) -> None:
    """What a later attempt may mend is no answer; what refuses a request for good is one."""
    statuses = [500, 429, 401, 403, 307, 400]
    for status in statuses:
        answer = httpx.Response(status, json={"error": {"message": f"bad {SECRET}"}})
        async with open_cassette(
            tmp_path / f"{status}.jsonl", mode="record", inner=Endpoint(answer)
        ) as transport:
            await transport.handle_async_request(raw())
    kept = [status for status in statuses if (tmp_path / f"{status}.jsonl").exists()]
    assert kept == [400]


async def test_what_is_recorded_is_not_asked_again(tmp_path: Path) -> None:
    await recorded(tmp_path / "c.jsonl", "a", "b")
    endpoint = Endpoint(echo)
    async with taped(tmp_path / "c.jsonl", "record", endpoint) as llm:
        for text in ("a", "b", "c"):
            await llm.ask(asked(text), Word, call_id=call_id(text))
    assert [body["messages"][-1]["content"] for body in endpoint.bodies] == ["c"]
    assert len(read_cassette(tmp_path / "c.jsonl")) == 3


async def test_garbled_answers_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client repeats does not become permanent: the recording has the answer that was used."""
    monkeypatch.setattr("reflact.llm.rate_limit.jitter", lambda *_: 0.0)
    garbled = (
        b"<html>busy</html>",
        b'{"choices": [',
        b'data: {"choices": []}\n\n',
        b'{"error": {"message": "x"}}',
    )
    answers = [httpx.Response(200, headers={"content-type": JSON}, content=text) for text in garbled]
    endpoint = Endpoint(*answers, completion('{"word": "yes"}'))
    settings = config(max_retries=5)
    async with taped(tmp_path / "c.jsonl", "record", endpoint, settings=settings) as llm:
        live = await llm.ask(PROMPT, Word, call_id=call_id())
    assert len(endpoint.requests) == len(garbled) + 1
    assert len(read_cassette(tmp_path / "c.jsonl")) == 1
    async with taped(tmp_path / "c.jsonl", "replay") as llm:
        assert await llm.ask(PROMPT, Word, call_id=call_id()) == live


@pytest.mark.parametrize("left", [0, 5, 40, -1])
async def test_a_line_that_was_cut_off_is_mended(tmp_path: Path, left: int) -> None:
    path = tmp_path / "c.jsonl"
    await recorded(path, "a", "b")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + left] if left >= 0 else whole[:left])
    await recorded(path, "a", "b")
    assert path.read_bytes() == whole


@pytest.mark.slow
async def test_a_run_with_replies_that_the_recording_lacks_is_refused(tmp_path: Path) -> None:
    """A recording has all that its run uses: a run with other stored replies is refused before any call."""
    plain = settings(
        write_world(tmp_path / "world", train=3), tmp_path / "run", train={"num_epochs": 1, "accumulation": 1}
    )
    recording = {**plain, "replay": {"cassette": str(tmp_path / "c.jsonl"), "mode": "record"}}
    for _ in range(2):
        network = PureNetwork()
        assert (await Trainer(recording, transport=network).train()).status == "completed"
    assert network.samples == []
    lines = (tmp_path / "c.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "c.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"has 1 replies that the cassette .*c\.jsonl lacks.* another out_dir"
    ):
        await Trainer(recording, transport=network).train()
    assert network.samples == []
    other = {**recording, "out_dir": str(tmp_path / "other")}
    assert (await Trainer(other, transport=network).train()).status == "completed"
    assert len(network.samples) == 1


# ------------------------------------------------------------------------------------------------ misses


async def test_a_miss_shows_what_changed(tmp_path: Path) -> None:
    await recorded(tmp_path / "c.jsonl", "the old wording", "something else")
    async with taped(tmp_path / "c.jsonl", "replay") as llm:
        with pytest.raises(CassetteMiss) as miss:
            await llm.ask(asked("the new wording"), Word, call_id=call_id("the old wording"))
    message, difference = str(miss.value), miss.value.difference
    assert "merge" in message
    assert call_id("the old wording").label in message
    assert "\n" not in message
    assert '-   "content": "the old wording",' in difference
    assert '+   "content": "the new wording",' in difference
    assert not any("something else" in line for line in difference)
    assert difference[-1] in "".join(traceback.format_exception(miss.value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no recorded answer"),
        ("{\n", "malformed in line 1"),
        ("GOOD\nnot json\n", "malformed in line 2"),
        ('GOOD\n\n{"sample": "x"}\n', "malformed in line 3"),
        ('GOOD\n{"sample": "x", "method"', "malformed in line 2"),
        ("GOOD\n[]\n", "malformed in line 2"),
    ],
)
async def test_a_damaged_cassette_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    await recorded(tmp_path / "good.jsonl", "a")
    good = (tmp_path / "good.jsonl").read_text().strip()
    (tmp_path / "c.jsonl").write_text(text.replace("GOOD", good))
    with pytest.raises(CassetteError, match=message) as damaged:
        async with open_cassette(tmp_path / "c.jsonl", mode="replay"):
            pass
    assert "c.jsonl" in str(damaged.value)
    assert "\n" not in str(damaged.value)


# --------------------------------------------------------------------------------------------- streaming


async def test_streams_replay_piece_by_piece(tmp_path: Path) -> None:
    pieces = [text.encode() for text in ("data: {}\n\n", "data: zwölf 🌍", "\n\ndata: [DONE]\n\n")]
    for mode, inner in (("record", Endpoint(pieces)), ("replay", None)):
        async with open_cassette(tmp_path / "c.jsonl", mode=mode, inner=inner) as transport:
            response = await transport.handle_async_request(raw())
            assert response.headers["content-type"] == "text/event-stream"
            assert [piece async for piece in response.aiter_raw()] == pieces


def raw() -> httpx.Request:
    return httpx.Request("POST", "http://endpoint.test/v1/chat/completions", json={"model": "m"})
