"""Keys never land: no file, log, event, message or traceback holds one, whatever a server does with it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import httpx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import pure_server
from doubles import PROMPT, RUN, Endpoint, ask, call_id, completion, config, connected
from pure_world import settings, write_world
from reflact import Trainer
from reflact.cli.app import app
from reflact.config.loading import load_config
from reflact.config.models import ModelConfig
from reflact.errors import BadRequest, ConfigError, ReflactError
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.llm.redaction import KEY_MARK, RedactingTransport, Scrubber, remove_keys
from reflact.messages import Text
from reflact.testing import InMemoryRunStore
from served import asked_of, send, serving

KEY = "sk-canary-9c41e07ab3d25f68"
ENVIRONMENT = {
    "CANARY_KEY": "sk-canary-variable-31d9a7",
    "OPENAI_API_KEY": "sk-canary-unused-88b1f4",
    "AZURE_OPENAI_AD_TOKEN": "canary-directory-50e6c2",
    "OPENAI_ORG_ID": "canary-organisation-7ab0d3",
    "OPENAI_CUSTOM_HEADERS": "X-Gateway: canary-gateway-2f9be8",
    "HTTP_PROXY": "http://user:canary-proxy-64f2aa@127.0.0.1:9",
}
CANARIES = ("canary-", "anary-9c41e07ab3d25f6")
"""What all of them have in common; no name of a variable, and nothing else that a run writes, holds it."""
Behaviour = Literal["answers", "refuses", "fails", "babbles"]
"""Answers as the pure server; answers 401; answers 500; answers with no chat completion."""


class Echoing(NamedTuple):
    """A running server that sends back every key: the root of its API, and all headers that it was sent."""

    url: str
    heard: set[str]


@contextmanager
def echoing(behaviour: Behaviour) -> Iterator[Echoing]:
    """Run such a server for the length of the block."""
    heard: set[str] = set()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        headers, body = dict(handler.headers), asked_of(handler)
        heard.update(headers.values())
        keys = [value for name, value in headers.items() if name.lower() in {"authorization", "api-key"}]
        words = {"error": {"message": f"Incorrect API key provided: {', '.join(keys)}.", "sent": headers}}
        status = {"refuses": 401, "fails": 500}.get(behaviour, 200)
        said: object = keys if behaviour == "babbles" else words
        if behaviour == "answers":
            good = pure_server.completion(body, pure_server.answer(body, headers["x-sample"]))
            said = {**good, "system_fingerprint": " ".join(keys), "sent": headers}
        send(
            handler,
            said,
            status,
            **dict.fromkeys(("X-Echo", "Set-Cookie", "WWW-Authenticate"), json.dumps(keys)),
        )

    with serving(answer) as url:
        yield Echoing(url, heard)


async def give_key() -> str:
    return KEY


def texts(error: BaseException) -> Iterable[str]:
    yield from (str(error), repr(error), repr(vars(error)))
    yield from traceback.format_exception(error)


def assert_clean(*words: str) -> None:
    for text in words:
        for canary in CANARIES:
            place = text.find(canary)
            assert place < 0, text[max(0, place - 200) : place + 100]


def assert_clean_files(folder: Path) -> int:
    """Check that no byte of a folder belongs to a canary, and return how many bytes there were."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path, content in files.items():
        for canary in CANARIES:
            place = content.find(canary.encode())
            assert place < 0, (path, content[max(0, place - 200) : place + 100])
    return sum(map(len, files.values()))


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return environment()


def environment() -> dict[str, str]:
    """Return this process's variables, but for the one in which pytest counts."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def canaries(server: Echoing) -> set[str]:
    return {value for value in server.heard if any(canary in value for canary in CANARIES)}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


def written(folder: Path, server: Echoing, **target: Any) -> Path:
    world = write_world(folder / "world", train=3, val=3, test=2)
    plain = settings(world, folder / "run", url=server.url.removesuffix("/v1"))
    plain["models"]["target"] |= {"api_key_env": "CANARY_KEY", "max_retries": 0, **target}
    plain["train"] = {"num_epochs": 1, "batch_size": 3}
    (folder / "run.yaml").write_text(json.dumps(plain), encoding="utf-8")
    return folder / "run.yaml"


def reflact(*arguments: object) -> tuple[int, str]:
    """Run a command and return its exit code and all that it printed, or all that its defect says."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="reflact")
    crash = result.exception if not isinstance(result.exception, SystemExit) else None
    return result.exit_code, "\n".join([result.output, *(texts(crash) if crash else ())])


@pytest.mark.parametrize(
    "behaviour",
    ["answers", *(pytest.param(b, marks=pytest.mark.slow) for b in get_args(Behaviour) if b != "answers")],
)
def test_commands_leave_no_key_anywhere(
    behaviour: Behaviour, tmp_path: Path, variables: dict[str, str], logged: pytest.LogCaptureFixture
) -> None:
    """Training, measuring and looking, whether or not the server serves: no file, output or log has it."""
    with echoing(behaviour) as server:
        path = written(tmp_path, server)
        ended, output = reflact("train", path)
        assert (ended == 0) == (behaviour == "answers"), output
        assert_clean(output)
        (tmp_path / "skill.md").write_text("- rule alpha.\n", encoding="utf-8")
        folder = tmp_path / "run"
        commands: list[tuple[object, ...]] = [
            ("train", path, "--show", "json"),
            ("eval", path, "--skill", tmp_path / "skill.md"),
            ("show", folder),
            ("show", folder, 1),
            ("runs", tmp_path),
        ]
        for command in commands:
            assert_clean(reflact(*command)[1])
        assert canaries(server) == {f"Bearer {ENVIRONMENT['CANARY_KEY']}"}
    assert_clean(logged.text)
    assert "receive_response_headers.complete" in logged.text
    assert assert_clean_files(tmp_path) > 50_000
    assert environment() == variables


@pytest.mark.slow
def test_a_recording_holds_no_key(
    tmp_path: Path, variables: dict[str, str], logged: pytest.LogCaptureFixture
) -> None:
    with echoing("answers") as server:
        path = written(tmp_path, server)
        ended, output = reflact("train", path, "--record", tmp_path / "c.jsonl")
        assert ended == 0, output
        assert canaries(server)
    again = reflact("train", path, "--replay", tmp_path / "c.jsonl", "--set", f"out_dir={tmp_path / 'again'}")
    assert again[0] == 0, again[1]
    assert_clean(output, again[1], logged.text)
    assert_clean_files(tmp_path)


AZURE = {"api": "azure", "api_version": "2025-01-01"}


@pytest.mark.parametrize(
    ("flavour", "behaviour"),
    [
        ({}, "answers"),
        (AZURE, "refuses"),
        pytest.param({}, "refuses", marks=pytest.mark.slow),
        pytest.param(AZURE, "answers", marks=pytest.mark.slow),
    ],
)
async def test_a_run_in_python_leaves_no_key_anywhere(
    flavour: dict[str, str],
    behaviour: Behaviour,
    tmp_path: Path,
    variables: dict[str, str],
    logged: pytest.LogCaptureFixture,
) -> None:
    """With a key from a function: events, summary, and the open database with its log file are clean."""
    with echoing(behaviour) as server:
        plain = json.loads(written(tmp_path, server).read_text(encoding="utf-8"))
        plain["models"]["target"] |= {"key": give_key, **flavour}
        trainer = Trainer(plain)
        sizes = []
        async with trainer.stream() as happenings:
            async for event in happenings:
                assert_clean(event.model_dump_json(), repr(event))
                sizes.append(assert_clean_files(tmp_path))
        assert canaries(server) == {KEY if flavour else f"Bearer {KEY}"}
    assert len(sizes) > 1
    assert_clean(logged.text, repr(trainer), repr(load_config(plain)))
    assert_clean_files(tmp_path)
    assert environment() == variables


async def test_data_that_looks_like_a_key_is_left_alone(tmp_path: Path) -> None:
    store = InMemoryRunStore()
    lookalike = "sk-proj-51aZ0000000000000000"
    endpoint = Endpoint(completion(f"{lookalike} {KEY}"))
    reply = await ask(Text, endpoint, config(key=give_key), store=store)
    assert reply.value.text == f"{lookalike} [key]"


def echo(body: bytes, **headers: str) -> httpx.Response:
    return httpx.Response(200, headers={"x-echo": f"Bearer {KEY}", **headers}, content=body)


async def through(response: httpx.Response, key: str = KEY, header: str = "Authorization") -> httpx.Response:
    transport = RedactingTransport(Endpoint(response))
    request = httpx.Request("POST", "http://endpoint.test", headers={header: f"Bearer {key}"}, json={})
    received = await transport.handle_async_request(request)
    await received.aread()
    return received


@pytest.mark.parametrize("header", ["Authorization", "api-key"])
async def test_keys_are_taken_out_of_answers(header: str) -> None:
    received = await through(echo(f'{{"a": "{KEY}", "b": "Bearer {KEY}"}}'.encode()), header=header)
    assert received.headers["x-echo"] == "Bearer [key]"
    assert received.json() == {"a": "[key]", "b": "Bearer [key]"}


def in_json(text: str, deep: int, *, ascii_only: bool = True) -> str:
    for _ in range(deep):
        text = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
    return text


ODD_KEYS = ('sk-"9c41/07ab\\\\3d25', "\\sk-9c41e07ab3d", "sk-9c41é07ab😀3d25")
"""Keys that JSON spells in another way."""


def test_keys_are_known_in_the_spelling_of_json() -> None:
    """A key that JSON escapes is removed from a text in any pieces, and a text that only begins like it stays."""
    wrong = []
    for key, deep, ascii_only in itertools.product(ODD_KEYS, range(4), (True, False)):
        quoted = in_json(key, deep, ascii_only=ascii_only)
        other = in_json(f"{key[:-1]}x", deep, ascii_only=ascii_only)
        text = f"a {quoted}{quoted} b {other} c"
        expected = f"a {KEY_MARK}{KEY_MARK} b {other} c"
        found = {0: remove_keys([key], text)}
        for size in range(1, 12):
            scrubber = Scrubber([key])
            data = text.encode()
            pieces = [scrubber.feed(data[start : start + size]) for start in range(0, len(data), size)]
            found[size] = b"".join(pieces).decode()
        wrong += [(key, deep, ascii_only, size) for size, result in found.items() if result != expected]
    assert wrong == []


def test_keys_are_known_by_the_numbers_of_their_characters() -> None:
    numbered = "".join(f"\\u{ord(character):04X}" for character in KEY)
    assert remove_keys([KEY], f"{numbered} {numbered.lower()}") == f"{KEY_MARK} {KEY_MARK}"
    assert remove_keys(["sk-9c41/07ab3d25"], "sk-9c41\\/07ab3d25") == KEY_MARK


@pytest.mark.parametrize("placeholder", ["none", "EMPTY", "not-needed", "no-key-required"])
async def test_placeholders_are_words(placeholder: str) -> None:
    received = await through(httpx.Response(200, text=f"There are none: {placeholder}."), placeholder)
    assert received.text == f"There are none: {placeholder}."


@pytest.mark.parametrize("api", ["openai", "azure"])
async def test_a_redirect_takes_no_key_elsewhere(api: str) -> None:
    away = httpx.Response(307, headers={"location": f"http://elsewhere.test/v1/{KEY}/chat/completions"})
    endpoint = Endpoint(away, completion("x"))
    with pytest.raises(BadRequest, match="no redirect is followed") as failure:
        await ask(Text, endpoint, config(key=give_key, api=api, api_version="1"))
    (request,) = endpoint.requests
    assert request.url.host != "elsewhere.test"
    assert_clean(*texts(failure.value))


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(401, json={"error": {"message": f"Incorrect API key provided: {KEY}"}}),
        httpx.Response(400, text=f"{'x' * 290}{KEY}"),
        httpx.Response(200, text=KEY),
        httpx.Response(200, json={"headers": {"authorization": KEY}}),
        httpx.ConnectError(f"cannot connect with {KEY}"),
    ],
    ids=lambda answer: str(getattr(answer, "status_code", type(answer).__name__)),
)
async def test_no_error_has_a_key_in_or_behind_it(answer: httpx.Response | Exception) -> None:
    with pytest.raises(ReflactError) as failure:
        await ask(Text, Endpoint(answer), config(key=give_key, max_retries=0))
    assert_clean(*texts(failure.value))


def raise_error() -> str:
    try:
        raise TimeoutError(KEY)
    except TimeoutError as error:
        raise LookupError(KEY) from error


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (raise_error, r"failed with LookupError, after TimeoutError, at test_redaction.py:\d+;"),
        (KEY.encode, "returned bytes instead of a text;"),
        (lambda: "", "has no key"),
    ],
)
async def test_a_function_that_gives_no_key_says_why(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as failure:
        async with connected(Endpoint(completion("x")), config(key=source)):
            pass
    assert_clean(*texts(failure.value))


def in_turn(*keys: str) -> Callable[[], str]:
    remaining = list(keys)
    return lambda: remaining.pop(0)


OLD, NEW = "sk-old-0123456789", "sk-new-0123456789"
REFUSED = httpx.Response(401, json={"error": {"message": "expired"}})


async def test_a_refused_key_is_replaced_by_a_new_one() -> None:
    endpoint = Endpoint(completion("one"), REFUSED, completion("two"), completion(f"it is {NEW}"))
    async with connected(endpoint, config(key=in_turn(OLD, NEW), max_retries=0)) as client:
        replies = [await client.ask(PROMPT, Text, call_id=call_id(str(n))) for n in range(3)]
    sent = [request.headers["authorization"] for request in endpoint.requests]
    assert [reply.value.text for reply in replies] == ["one", "two", f"it is {KEY_MARK}"]
    assert sent == [f"Bearer {key}" for key in (OLD, OLD, NEW, NEW)]


@pytest.mark.parametrize(
    "given",
    [
        {"base_url": f"https://user:{KEY}@endpoint.test/v1"},
        {"base_url": f"https://endpoint.test/v1?api_key={KEY}"},
        {"base_url": f"https://[{KEY}/v1"},
        {"api_key_env": KEY},
        {"api_key": KEY},
        {"key": KEY},
        {"call_id_header": f"Authorization: {KEY}"},
        {"extra_body": {"api_key": KEY}},
        {"extra_body": {"options": [{"headers": {"X-Api-Key": KEY}}]}},
        {"temperature": KEY},
    ],
    ids=lambda given: next(iter(given)),
)
def test_keys_are_refused_where_settings_are_stored(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.target") as failure:
        load_config({"models": {"target": given}})
    assert_clean(*texts(failure.value))
    with pytest.raises(ValidationError) as invalid:
        ModelConfig(**given)
    assert_clean(str(invalid.value), repr(invalid.value))
    (tmp_path / "run.yaml").write_text(json.dumps({"models": {"target": given}}), encoding="utf-8")
    code, output = reflact("train", tmp_path / "run.yaml")
    assert code == 2
    assert_clean(output)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("call_id_header", KEY),
        ("base_url", f"http://endpoint.test/{KEY}/v1"),
        ("extra_body", {"user": [f"it is {KEY}"]}),
    ],
)
async def test_settings_that_hold_the_key_itself_are_refused(field: str, value: Any) -> None:
    store = InMemoryRunStore()
    account = Account(RUN, store, store.decision_log(RUN))
    client = Client(config(key=give_key, **{field: value}), "target", account)
    with pytest.raises(ConfigError, match=rf"models\.target\.{field} contains the key") as failure:
        async with client:
            pass
    assert_clean(*texts(failure.value))
