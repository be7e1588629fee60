"""Trouble of a run is told once while it happens, and exceptions of the caller's own code keep their tracebacks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from reflact import Trainer, read_run
from reflact.adapters import CatchExits
from reflact.config.loading import load_config
from reflact.events import Event, ModelCallFinished, RunFinished, WarningIssued
from reflact.messages import CUT_OFF, CallReservation, ReplyModel
from reflact.protocols import Session, StepBudget, StepEvidence
from reflact.records import FaultKind, RunSummary, Usage
from reflact.stages.reply_models import AnalystReply
from reflact.testing import ScriptedLLM, ToyTarget, append_reply
from reflact.testing.llm import ScriptedAnswer
from reflact.training.trouble import RunWatch
from reflact.types import Item, Rewrite, Skill, Turn
from served import asked_of, completion, configured, fill, reflact, send, serving
from toy_runs import LEARNING, LINES, build_trainer, playing, run, settings

KEY = "sk-1234567890abcdefgh"


def solve(item: Item, answer: str) -> bool:
    if str(item.input) in {"v3", "v7"}:
        raise KeyError(f"no column of {KEY}\x1b[2J")
    return answer == item.reference


def build_list_trainer(folder: Path, **options: Any) -> Trainer:
    lists = {name: [(f"{name[0]}{n}", "x") for n in range(20)] for name in ("train", "val")}
    plain: dict[str, Any] = {"grade": solve, "target": ToyTarget(), "optimizer": ScriptedLLM(LEARNING)}
    return Trainer.from_items(**{**lists, **plain, "out_dir": folder, "train__num_epochs": 1, **options})


def build_model_trainer(folder: Path, finish_reason: str = "stop", **options: Any) -> Trainer:
    (choice,) = completion("4")["choices"]
    body = completion("4") | {"choices": [{**choice, "finish_reason": finish_reason}]}
    models = {"target": "small", "optimizer": "large", "grade": lambda item, answer: False}
    keys = {"models__target__api_key_env": None, "models__optimizer__reasks": 0}
    trainer = build_list_trainer(folder, search__sources=["edits"], **models, **keys, **options)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=body))
    environment = trainer._overrides.environment
    return Trainer(trainer.config, environment=environment, transport=transport, label="customer\x1b-7")


async def list_events(trainer: Trainer) -> list[Event]:
    async with trainer.stream() as stream:
        return [event async for event in stream]


def test_an_exception_of_a_grader_keeps_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored and shown for each item, logged and told once, without keys; the run goes on without the items."""
    monkeypatch.setenv("MY_API_KEY", KEY)
    with caplog.at_level(logging.ERROR, "reflact"):
        heard = anyio.run(list_events, build_list_trainer(tmp_path))
    (warning,) = [event.message for event in heard if isinstance(event, WarningIssued)]
    assert "KeyError: 'no column of [key]" in warning
    assert f"reflact show {tmp_path} --item " in warning
    (logged,) = [record.getMessage() for record in caplog.records]
    assert 'raise KeyError(f"no column of' in logged
    assert f"({tmp_path}): " in logged
    history = anyio.run(read_run, tmp_path)
    assert history.status == "completed"
    items = {failure.item_id for failure in history.failures}
    assert len(items) == 2
    assert KEY not in "".join(f.traceback + f.reason for f in history.failures) + logged + warning
    assert KEY.encode() not in (tmp_path / "run.db").read_bytes()
    item_id = next(iter(items)) or ""
    shown = reflact("show", tmp_path, "--item", item_id).stdout
    assert "not measured: the environment failed on item" in shown
    assert 'raise KeyError(f"no column of' in shown
    assert "reflact/stages" not in shown
    assert "\x1b" not in shown + logged
    line = reflact("show", tmp_path, "--item", item_id, "--json").stdout.splitlines()[-1]
    assert "Traceback" in json.loads(line)["traceback"]


def test_an_exception_is_raised_on_request(tmp_path: Path) -> None:
    trainer = build_list_trainer(tmp_path, train__raise_on_exception=True)
    with pytest.raises(KeyError, match="no column") as caught:
        anyio.run(trainer.train)
    assert "solve" in [entry.name for entry in caught.traceback]
    assert trainer.run_id == build_list_trainer(tmp_path).run_id
    history = anyio.run(read_run, tmp_path)
    assert (history.status, history.reason) == ("failed", "KeyError was raised")
    assert anyio.run(build_list_trainer(tmp_path).train).status == "completed"


class Leave(BaseException):
    """An exception that no ``except Exception`` catches."""


class Exiting:
    """Raises an exception in place of a grade, a reply, or a reply in a worker thread, for two items."""

    identity = "exiting"

    def __init__(self, error: BaseException, where: str) -> None:
        self._error, self._where = error, where
        self.turns: tuple[Turn, ...] = ()

    def grade(self, item: Item, answer: str) -> bool:
        return bool(self._leave("grader", str(item.input)) or True)

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return Exiting(self._error, self._where)

    async def reply(self, message: str) -> str:
        self._leave("reply", message)
        await anyio.to_thread.run_sync(self._leave, "thread", message)
        return "x"

    def _leave(self, where: str, text: str) -> None:
        if where == self._where and text in {"v3", "v7"}:
            raise self._error


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("grader", SystemExit(3)),
        ("reply", Leave("now")),
        ("thread", SystemExit()),
        ("thread", BaseExceptionGroup("", [SystemExit(4)])),
    ],
    ids=repr,
)
def test_an_exit_in_a_rollout_leaves_its_item_unmeasured(
    tmp_path: Path, where: str, error: BaseException
) -> None:
    exiting = Exiting(error, where)
    trainer = build_list_trainer(tmp_path, grade=exiting.grade, target=exiting)
    heard = anyio.run(list_events, trainer)
    assert isinstance(heard[-1], RunFinished)
    assert heard[-1].summary.status == "completed"
    (warning,) = [
        event.message
        for event in heard
        if isinstance(event, WarningIssued) and "which would end" in event.message
    ]
    who = "environment" if where == "grader" else "agent"
    assert f"the {who} failed on item" in warning
    shown = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
    assert f"the code raised {shown!r}" in warning
    failures = anyio.run(read_run, tmp_path).failures
    assert len({failure.item_id for failure in failures}) == 2
    assert all("raise self._error" in failure.traceback for failure in failures)


def test_a_real_interrupt_passes() -> None:
    """Ctrl-C, cancellations and the ends of generators are no exits, also inside a group."""
    for error in (KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), ValueError()):
        with pytest.raises(type(error)), CatchExits():
            raise error
    with pytest.raises(BaseExceptionGroup), CatchExits():
        raise BaseExceptionGroup("both", [SystemExit(1), KeyboardInterrupt()])


def test_trouble_of_calls_is_told_once_while_it_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build_model_trainer(tmp_path, train__batch_size=5)
    with caplog.at_level(logging.WARNING, "reflact"):
        heard = anyio.run(list_events, trainer)
    (mute,) = [event.message for event in heard if isinstance(event, WarningIssued)]
    reason, _, advice = mute.partition(". To mend it, ")
    assert reason == (
        "models.optimizer gave no valid reply in its first 3 calls; the last reason: Input should be an object"
    )
    assert advice == "choose a larger models.optimizer.model than large"
    (record,) = caplog.records
    assert record.getMessage() == f"run {trainer.run_id} (customer\\x1b-7): {mute}"
    assert vars(record) | {"run_id": trainer.run_id, "label": "customer\x1b-7"} == vars(record)


def test_a_summary_tells_what_is_wrong_with_answers(tmp_path: Path) -> None:
    """It counts those of all starts, so that a start that finds all in the store says the same."""

    def start() -> RunSummary:
        return anyio.run(build_model_trainer(tmp_path, "length", models__target__max_tokens=9).train)

    first = start()
    counts = {fault.kind: fault.count for fault in first.faults}
    answers = sum(part.usage.calls for part in first.spend if part.role == "target")
    (told,) = (words for words in first.warnings if "answers of the target" in words)
    assert f"of {answers:,} answers of the target, {counts['cut answer']:,} were cut off" in told
    assert counts["cut answer"] == answers >= 20
    assert start().warnings == first.warnings


class FailingProposer:
    identity = "failing"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> Sequence[Rewrite]:
        raise self._error


@pytest.mark.parametrize("error", [ZeroDivisionError("by nothing"), SystemExit(5)], ids=repr)
def test_an_exception_of_a_proposer_ends_the_run_with_its_traceback(
    tmp_path: Path, error: BaseException
) -> None:
    summary = anyio.run(build_trainer(settings(tmp_path), proposer=FailingProposer(error)).train)
    assert summary.status == "failed"
    (failure,) = anyio.run(read_run, tmp_path).failures
    assert str(summary.reason).startswith(f"the proposer failed in step {failure.step}: ")
    assert failure.item_id is None
    assert "raise self._error" in failure.traceback
    assert failure.traceback.rstrip() in reflact("show", tmp_path).stdout.replace("\n    ", "\n")


@pytest.mark.parametrize(
    ("role", "faults", "parts"),
    [
        ("target", [None] * 30 + ["cut answer"] * 3, []),
        ("target", ["cut answer"] * 19, []),
        (
            "target",
            [None] * 10 + ["cut answer"] * 8 + ["empty answer"] * 30,
            ["8 were cut off at models.target.max_tokens (300)", "raise models.target.max_tokens"],
        ),
        ("optimizer", ["cut prompt"] * 3, ["num_ctx"]),
        ("target", ["5xx"] * 50, []),
    ],
)
def test_answers_that_are_cut_are_told_once(
    role: str, faults: Sequence[FaultKind | None], parts: Sequence[str]
) -> None:
    told: list[Event] = []
    watch = RunWatch("r", told.append, load_config({"models": {"target": {"max_tokens": 300}}}))
    names = ("key", "run_id", "call_id", "purpose", "model")
    call = CallReservation(**dict.fromkeys(names, "x"), role=role, endpoint="https://a/v1")
    for fault in faults:
        watch.observe_attempt(call, Usage(calls=1), fault)
    messages = [event.message for event in told if isinstance(event, WarningIssued)]
    assert len(messages) == bool(parts)
    assert all(part in messages[0] for part in parts)


@pytest.mark.parametrize(
    ("optimizer", "purpose", "answered", "reason", "advice"),
    [
        ({"max_tokens": 600}, "merge", 1, CUT_OFF, "set models.optimizer.max_tokens higher than 600"),
        (
            {},
            "merge",
            1,
            "no JSON",
            "choose a larger models.optimizer.model than tiny, the model of the target",
        ),
        ({}, "merge", 0, "unreachable", None),
        ({}, "preflight", 1, "no JSON", None),
    ],
)
def test_a_role_without_valid_replies_has_one_advice(
    optimizer: Any, purpose: str, answered: int, reason: str, advice: str | None
) -> None:
    told: list[Event] = []
    models = {"target": {"model": "tiny", "api_key_env": None}, "optimizer": optimizer}
    watch = RunWatch("r", told.append, load_config({"models": models}))
    call = {"role": "optimizer", "call_id": "c", "attempts": 1, "seconds": 1.0, "purpose": purpose}
    for _ in range(5):
        end = {"outcome": "failed", "reason": reason, "usage": Usage(calls=answered)}
        watch.observe_call(ModelCallFinished(run_id="r", **call, **end))
    assert [event.message.rpartition(", ")[2] for event in told if isinstance(event, WarningIssued)] == (
        [] if advice is None else [advice.rpartition(", ")[2]]
    )


def count_by_kind(summary: RunSummary) -> dict[str, tuple[int, int | None]]:
    return {loss.kind: (loss.count, loss.total) for loss in summary.losses}


def test_invalid_replies_are_counted_at_the_end(tmp_path: Path) -> None:
    """Each first reply of the optimizer is invalid: the summary and the verdict say so, and the same after a resume."""
    sent_back = 0

    def stumble(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent_back
        body = asked_of(handler)
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        is_first = all(message["role"] != "assistant" for message in body["messages"])
        sent_back += is_first and schema is not None
        text = "4" if schema is None or is_first else json.dumps(fill(schema, schema.get("$defs", {})))
        send(handler, completion(text))

    with serving(stumble) as url:
        path = configured(tmp_path, url)
        command = ("train", path, "--set", "search.sources=[edits]", "--set", "train.num_epochs=1")
        stopped = reflact(*command, "--set", "budget.max_calls=12", "--show", "quiet")
        shown = reflact(*command, "--set", "budget.max_calls=9999", "--show", "quiet")
    assert (stopped.exit_code, shown.exit_code) == (1, 0), shown.output
    summary = RunSummary.model_validate_json((tmp_path / "run" / "summary.json").read_text("utf-8"))
    (kind,) = count_by_kind(summary).items()
    replies = sum(spend.usage.calls for spend in summary.spend if spend.role == "optimizer")
    assert kind == ("invalid reply", (sent_back, replies))
    assert f"On the way: {sent_back} of {replies} replies of the optimizer invalid." in summary.verdict
    assert summary.verdict in " ".join(shown.stdout.split())


def test_dropped_analysts_and_lost_rollouts_are_counted_at_the_end(tmp_path: Path) -> None:
    """An analyst without a valid reply, a merge that a rule replaces, and items that cannot be graded."""
    answers = iter(range(100))

    def analyze(kind: type[ReplyModel], shown: str) -> ScriptedAnswer:
        return "no report" if next(answers) < 3 else append_reply(kind, LINES["double"])

    trainer = build_list_trainer(tmp_path / "lost", optimizer=ScriptedLLM(LEARNING))
    summary = anyio.run(trainer.train)
    losses = count_by_kind(summary)
    assert losses["lost rollout"][0] == len(anyio.run(read_run, tmp_path / "lost").failures)
    ended = anyio.run(partial(run, tmp_path / "run", script=playing((AnalystReply, analyze))))
    reports = [report for record in ended.records for report in record.reports]
    assert count_by_kind(ended.summary) == {"dropped analyst": (1, len(reports))}
    assert f"On the way: 1 of {len(reports)} analysts without a report." in ended.summary.verdict
    whole = anyio.run(partial(run, tmp_path / "whole", script=LEARNING))
    assert whole.summary.losses == ()
    assert "On the way" not in whole.summary.verdict
