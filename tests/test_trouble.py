"""Trouble of a run: exceptions of the caller's own code keep their tracebacks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact import Trainer, read_run
from reflact.events import Event, WarningIssued
from reflact.protocols import Proposer, StepBudget, StepEvidence
from reflact.stages.reply_models import AnalystReply
from reflact.testing import ScriptedLLM, ToyTarget, append_reply
from reflact.training.trouble import MAX_TRACEBACK_CHARS, format_exception
from reflact.types import Item, Rewrite, Skill
from served import reflact
from toy_runs import LINES, playing

LEARNING = playing((AnalystReply, lambda kind, _: append_reply(kind, LINES["double"])))
KEY = "sk-1234567890abcdefgh"


def solve(item: Item, answer: str) -> bool:
    """Grade an answer, and fail on some items with a message that holds a key."""
    if str(item.input) in {"v3", "v7"}:
        raise KeyError(f"no column of {KEY}\x1b[2J")
    return answer == item.reference


def build_trainer(folder: Path, *, proposer: Proposer | None = None, **settings: Any) -> Trainer:
    """Return a short run on lists of items, whose grader fails on two validation items."""
    lists = {name: [(f"{name[0]}{n}", "x") for n in range(20)] for name in ("train", "val")}
    if proposer is not None:
        lists["val"] = [(f"w{n}", "x") for n in range(20)]
    trainer = Trainer.from_items(
        **lists,  # type: ignore[arg-type]
        grade=solve,
        target=ToyTarget(),
        optimizer=ScriptedLLM(LEARNING),
        out_dir=folder,
        train__num_epochs=1,
        train__batch_size=20,
        **settings,
    )
    if proposer is None:
        return trainer
    return Trainer(
        trainer.config,
        environment=trainer._overrides.environment,
        target=ToyTarget(),
        optimizer=ScriptedLLM(LEARNING),
        proposer=proposer,
    )


async def list_events(trainer: Trainer) -> list[Event]:
    """Return all events of a run."""
    async with trainer.stream() as stream:
        return [event async for event in stream]


def test_an_exception_of_a_grader_keeps_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored and shown for each item, logged and told once, without keys; the run goes on without the items."""
    monkeypatch.setenv("MY_API_KEY", KEY)
    with caplog.at_level(logging.ERROR, "reflact"):
        heard = anyio.run(list_events, build_trainer(tmp_path))
    (warning,) = [event.message for event in heard if isinstance(event, WarningIssued)]
    assert "KeyError: 'no column of [key]" in warning
    assert f"reflact show {tmp_path} --item " in warning
    (logged,) = [record.getMessage() for record in caplog.records]
    assert 'raise KeyError(f"no column of' in logged
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


def test_an_exception_on_every_item_can_be_looked_at(tmp_path: Path) -> None:
    """If nothing could be measured, `show` prints the traceback of a run that has no version yet."""
    trainer = build_trainer(tmp_path, gate__coverage=1.0)
    assert anyio.run(trainer.train).status == "failed"
    assert "2 exceptions in your own code" in reflact("show", tmp_path).stdout
    item_id = anyio.run(read_run, tmp_path).failures[0].item_id
    assert "KeyError" in reflact("show", tmp_path, "--item", str(item_id)).stdout


def test_an_exception_is_raised_on_request(tmp_path: Path) -> None:
    """`raise_on_exception` raises the exception itself, ends the run as failed, and does not change its id."""
    trainer = build_trainer(tmp_path, train__raise_on_exception=True)
    with pytest.raises(KeyError, match="no column") as caught:
        anyio.run(trainer.train)
    assert "solve" in [entry.name for entry in caught.traceback]
    assert trainer.run_id == build_trainer(tmp_path).run_id
    history = anyio.run(read_run, tmp_path)
    assert (history.status, history.reason) == ("failed", "KeyError was raised")
    assert anyio.run(build_trainer(tmp_path).train).status == "completed"


class BrokenProposer:
    """A proposer that raises."""

    identity = "broken"

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> Sequence[Rewrite]:
        """Raise."""
        raise ZeroDivisionError("by nothing")


def test_an_exception_of_a_proposer_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    """The run fails with a reason that names the step, and keeps the traceback."""
    summary = anyio.run(build_trainer(tmp_path, proposer=BrokenProposer()).train)
    assert (summary.status, summary.reason) == (
        "failed",
        "the proposer failed in step 1: ZeroDivisionError: by nothing",
    )
    (failure,) = anyio.run(read_run, tmp_path).failures
    assert (failure.step, failure.item_id) == (1, None)
    assert "in propose" in failure.traceback
    assert 'ZeroDivisionError("by nothing")' in reflact("show", tmp_path).stdout


def test_a_traceback_is_bounded() -> None:
    """A long message loses its middle, and keeps the frames and its end."""
    try:
        raise ValueError("x" * 100_000 + "the end")
    except ValueError as error:
        text = format_exception(error)
    assert len(text) <= MAX_TRACEBACK_CHARS + 5
    assert "test_a_traceback_is_bounded" in text
    assert text.endswith("the end")
