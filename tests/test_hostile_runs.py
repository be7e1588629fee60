"""Whole runs and processes against hostile replies: to each role, always and one in six, and huge ones at once.

Every third reply of the corpus is played to runs; ``--hostile 1`` plays all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import pytest

import pure_server
from hostile import Case, HostileNetwork, load_cases
from pure_world import Ended, differences, left_by, settings, write_world
from reflact import Trainer
from reflact.errors import ReflactError
from reflact.llm.errors import REQUEST_STATUSES
from reflact.records import RunSummary
from served import asked_of, assert_one_message, serving, trained
from test_run_critic import criticised
from virtual_time import NEVER, HurriedLoop

pytestmark = pytest.mark.slow

ROLES = ("target", "optimizer", "critic")
PARTS = 8
PATIENCE = {"max_retries": 1, "timeout": NEVER, "max_tokens": 500, "concurrency": 1}

SELDOM = 6
"""One in so many replies is hostile."""

MEMORY = (sys.executable, str(Path(__file__).with_name("hostile_memory.py")))
BOOKS = ("spend", "replies", "costs")
"""What hostile replies may change in a run that ends like a calm one: the counts of tokens and calls, and replies that
no decision used.
"""

MUTE = "no analyst gave a valid reply"
"""How a run ends whose optimizer answered, and never with a valid reply: for good, since its steps are decided."""


class Provider:
    """Answers as the pure server and a critic do, or with a hostile reply.

    Attributes:
        hostile: The roles that get hostile replies.
        every: One in so many of their replies is hostile.
        charged: By role, the answers that a provider may charge for.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self.hostile: Collection[str] = ()
        self.every = 1
        self.requests: Counter[str] = Counter()
        self.charged: Counter[str] = Counter()

    def answer(self, request: httpx.Request) -> list[bytes]:
        body, sample = json.loads(request.content), request.headers["x-sample"]
        role = sample.partition("/")[0]
        try:
            said = (
                criticised("\n".join(message["content"] for message in body["messages"]))
                if role == "critic"
                else pure_server.answer(body, sample)
            )
        except IndexError:
            said = "There is no task to read in a prompt that was shortened."
        self.requests[role] += 1
        if role in self.hostile and self.requests[role] % self.every == 0:
            self.charged[role] += self._case.charged
            return self._case.render(said)
        self.charged[role] += 1
        text = json.dumps(pure_server.completion(body, said))
        return [f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()]


class End(NamedTuple):
    status: str
    words: str


def start(world: Path, folder: Path, provider: Provider) -> End:
    config = settings(
        world,
        folder,
        environment={"grader": "critic"},
        train={"num_epochs": 1, "accumulation": 1, "batch_size": 2},
        gate={"policy": "strict"},
        **{name: {"enabled": False} for name in ("slow_update", "meta_skill", "appendix", "test")},
    )
    config["models"]["critic"] = {"model": "judge", "call_id_header": "x-sample"}
    for model in config["models"].values():
        model |= {**PATIENCE, "mode": "json_schema"}
    trainer = Trainer(config, transport=HostileNetwork(provider.answer))
    try:
        summary = anyio.run(trainer.train, backend_options={"loop_factory": HurriedLoop})
    except ReflactError as error:
        return End("error", str(error))
    return End(summary.status, summary.reason or "")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"), train=2, val=2, test=2)


@pytest.fixture(scope="module")
def calm(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("calm")
    assert start(world, folder, Provider(load_cases()[0])).status == "completed"
    return left_by(folder)


def read_summary(folder: Path) -> RunSummary:
    return RunSummary.model_validate_json((folder / "summary.json").read_text("utf-8"))


class Campaign:
    """Plays one case to runs, and collects what is wrong."""

    def __init__(self, case: Case, world: Path, folder: Path, calm: Ended) -> None:
        self._case = case
        self._world = world
        self._folder = folder
        self._calm = calm
        self.wrong: list[str] = []

    def play(self) -> None:
        if self._case.delivers:
            for every in (1, SELDOM):
                self._resume(f"all-{every}", [(ROLES, every)], calm=True)
        elif self._case.reads is not None:
            for role in ROLES:
                self._resume(f"{role}-1", [((role,), 1)], calm=role == "critic")
            self._resume(f"all-{SELDOM}", [(ROLES, SELDOM)], calm=False)
        else:
            trials = [*(((role,), 1) for role in ROLES), (ROLES, SELDOM)]
            is_kept = self._case.refused == "ContextOverflow" or self._case.status in REQUEST_STATUSES
            self._resume("all", trials, calm=not is_kept)

    def _resume(self, name: str, trials: list[tuple[Collection[str], int]], *, calm: bool) -> None:
        folder, provider = self._folder / name, Provider(self._case)
        for provider.hostile, provider.every in trials:
            end = start(self._world, folder, provider)
            if bool(end.words) == (end.status == "completed") or "\n" in end.words:
                self._note(name, f"it ended as {end}")
        if end.status != "completed" or read_summary(folder).missing:
            provider.hostile = ()
            end = start(self._world, folder, provider)
        is_mute = not calm and end.status == "failed" and end.words.startswith(MUTE)
        if end.status != "completed" and not is_mute:
            self._note(name, f"mended, it ended as {end}")
            return
        but = BOOKS if self._case.fails is not None else (*BOOKS, "events")  # a step may have been retried
        if calm and (unlike := differences(left_by(folder), self._calm, but=but)):
            self._note(name, f"unlike a calm run in {unlike}")
        summary = read_summary(folder)
        booked: Counter[str] = Counter()
        for spend in summary.spend:
            booked[spend.role] += spend.usage.calls + spend.unsettled
        if +booked != +provider.charged:
            self._note(name, f"{dict(provider.charged)} may be charged, {dict(booked)} are booked")

    def _note(self, name: str, what: str) -> None:
        self.wrong.append(f"{self._case.name}, {name}: {what}")


@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_survives_hostile_replies(
    part: int, world: Path, calm: Ended, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wrong: list[str] = []
    every: int = request.config.getoption("--hostile")
    for number, case in enumerate(load_cases()[part::PARTS][::every]):
        campaign = Campaign(case, world, tmp_path / str(number), calm)
        campaign.play()
        wrong += campaign.wrong
    assert wrong == []


def choose_cases() -> dict[str, Case]:
    """Return one case for each kind of fault and each error; a prompt that is too long is answered wrongly."""
    cases = [case for case in load_cases() if case.reads is None and case.refused != "ContextOverflow"]
    return {f"{case.fails or case.refused} {case.ends}": case for case in cases}


@pytest.mark.parametrize("case", choose_cases().values(), ids=choose_cases())
def test_a_command_ends_with_one_sentence(case: Case, tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked_of(handler)
        handler.close_connection = True
        for piece in case.render("4"):
            handler.wfile.write(piece)

    with serving(answer) as url:
        assert_one_message(trained(tmp_path, url), "models.target")


MOST_MEGABYTES = 400
HUGE = (("bomb",), ("text",), ("events",), ("text", "bomb", "event", "error", "objects", "escapes", "tokens"))


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    with subprocess.Popen([*MEMORY, "serve"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize("kinds", HUGE, ids="-".join)
def test_huge_answers_take_little_memory(kinds: tuple[str, ...], port: str) -> None:
    ended = subprocess.run(
        [*MEMORY, "ask", port, *kinds], stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    told = json.loads(ended.stdout)
    assert len(told["outcomes"]) == 8
    assert set(told["outcomes"]) <= {"reply", "ReplyError", "ProviderDown", "BadRequest"}
    assert told["peak"] < MOST_MEGABYTES
