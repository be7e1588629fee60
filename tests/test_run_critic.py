"""A critic that a configuration names: in the run's budget and books, pinned when the run first starts."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio
import pytest

import pure_server
from memory_pairs import HELD_OUT, evidence_for, make_pair
from pure_world import differences, left_by, rows, settings, write_world
from reflact import MemoryStore
from reflact.records import RunSummary
from served import HANGS, asked_of, reflact, reflact_process, send, serving

AFTER = re.compile(r"<after>\n(.*?)\n</after>", re.DOTALL)


class Model:
    """Plays all roles as the pure server does, and a critic who believes whatever is not unknown.

    Each worked example that the critic is shown makes it a tenth of a point stricter.

    Attributes:
        asked: Sample and text of each request, in order.
        hold: The number of the critic's call that is answered only once ``go_on`` is set; None: no call.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.hold: int | None = None

    @property
    def scored(self) -> list[str]:
        return [text for call_id, text in self.asked if call_id.startswith("critic/")]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body, call_id = asked_of(handler), handler.headers["x-sample"]
        text = "\n".join(m["content"] for m in body["messages"])
        self.asked.append((call_id, text))
        waits = call_id.startswith("critic/") and len(self.scored) == self.hold
        if waits:
            self.held.set()
            self.go_on.wait(HANGS)
        said = criticised(text) if call_id.startswith("critic/") else pure_server.answer(body, call_id)
        try:
            send(handler, pure_server.completion(body, said))
        except OSError:
            assert waits, "only who is kept waiting hangs up"


def criticised(text: str) -> str:
    after = AFTER.findall(text)[-1]
    strict = text.count("<example") / 10
    return json.dumps(
        {
            "reasoning": "It is answered." if after != "unknown" else "It says that it does not know.",
            "evidence": re.findall(r"[\w:]+", after)[:1],
            "phi_before": 0,
            "phi_after": 0 if after == "unknown" else 9 - strict,
            "confidence": 0.9,
        }
    )


@contextmanager
def playing() -> Iterator[tuple[Model, str]]:
    model = Model()
    with serving(model.answer) as url:
        try:
            yield model, url.removesuffix("/v1")
        finally:
            model.go_on.set()


@pytest.fixture
def world(tmp_path: Path) -> Path:
    remember(tmp_path / "memory.db", 1, anchors=2)
    return write_world(tmp_path / "world", train=3, val=3, test=2)


def remember(path: Path, number: int, *, anchors: int = 0) -> None:
    async def promoted() -> None:
        async with MemoryStore(path) as memory:
            pair = make_pair(number, trace=f"t{number}")
            await memory.submit(pair)
            test = await memory.open_test([pair.id], traces=HELD_OUT)
            await memory.close_test(test.number, evidence_for(test))
            await memory.add_anchors([make_pair(100 + n, trace=f"a{n}") for n in range(anchors)])

    anyio.run(promoted)


def configured(
    world: Path,
    url: str,
    *,
    name: str = "run",
    environment: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    folder = world.parent
    plain = settings(
        world,
        folder / name,
        url=url,
        environment=environment or {"grader": "critic"},
        train={"num_epochs": 1, "accumulation": 1, "rollout_concurrency": 1},
        reflect={"concurrency": 1, "overlap": False},
        appendix={"enabled": False},
        gate={"policy": "strict"},
        test={"placebo": False},
    )
    plain["models"]["critic"] = {"model": "judge", "call_id_header": "x-sample"}
    plain["critic"] = {"memory": str(folder / "memory.db"), **(critic or {})}
    plain |= sections
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(plain), encoding="utf-8")
    return path


def summary_of(folder: Path) -> RunSummary:
    return RunSummary.model_validate_json((folder / "summary.json").read_text("utf-8"))


def test_a_critic_grades_and_the_summary_says_what_that_is_worth(world: Path) -> None:
    """Scores are its opinion, its calls are in the run's books by role, its accuracy on anchors is told."""
    with playing() as (model, url):
        result = reflact("train", configured(world, url), "--show", "lines")
    assert result.exit_code == 0, result.output
    summary = summary_of(world.parent / "run")
    assert (summary.critic.prompt, summary.critic.pairs) == ("critic@1", 1)
    assert (summary.critic.accuracy.traces, summary.critic.accuracy.transitions) == (2, 2)
    assert summary.critic.accuracy.error.value == pytest.approx(5.9)
    assert summary.annotated_by is None
    spend = {entry.role: entry.usage.calls for entry in summary.spend if entry.role == "critic"}
    assert spend == {"critic": len(model.scored)}
    assert len(set(model.scored)) == len(model.scored) > 5
    assert "scores come from critic@1 pinned to 1 pair" in result.stdout
    assert "mean absolute error 5.90" in result.stdout
    assert re.search(rf"^critic: {len(model.scored)} calls, ", result.stdout, re.MULTILINE)
    rolled = [
        json.loads(text)
        for (text,) in rows(world.parent / "run", "SELECT value FROM outcomes WHERE kind = 'rollout'")
    ]
    assert {r["score"]["soft"] for r in rolled} == {0.0, 0.89}
    assert any("a critic scored it 0 of 10, 8 needed" in (r["feedback"] or "") for r in rolled)


def test_failure_analysts_are_shown_what_it_makes_of_each_reply(world: Path) -> None:
    """With notes on, only they see it: no score changes, and the summary names who advised them."""
    with playing() as (model, url):
        path = configured(world, url, environment={"grader": "exact"}, critic={"annotate": True})
        result = reflact("train", path)
    assert result.exit_code == 0, result.output
    summary = summary_of(world.parent / "run")
    assert summary.critic is None
    assert summary.annotated_by.accuracy is not None
    shown = [text for call_id, text in model.asked if "/analyst_failure/" in call_id]
    assert shown
    assert all("reply 1: a critic gave 0 before and 0 after, of 10" in text for text in shown)
    assert "failure analysts saw the scores of critic@1 pinned to 1 pair" in result.stdout


def test_a_recorded_run_is_replayed_with_its_critic(world: Path) -> None:
    cassette = world.parent / "cassette.jsonl"
    options = ("--set", f"replay.cassette={cassette}", "--set")
    with playing() as (model, url):
        live = configured(world, url, name="live")
        assert reflact("train", live, *options, "replay.mode=record").exit_code == 0
        asked = len(model.asked)
        result = reflact("train", configured(world, url, name="again"), *options, "replay.mode=replay")
        assert result.exit_code == 0, result.output
        assert len(model.asked) == asked
    live, again = (left_by(world.parent / name) for name in ("live", "again"))
    assert differences(again, live) == []


@pytest.mark.slow
def test_a_budget_that_is_reached_while_grading_ends_the_run_and_more_goes_on(world: Path) -> None:
    with playing() as (model, url):
        whole = configured(world, url, name="whole", critic={"max_anchors": 0})
        assert reflact("train", whole).exit_code == 0
        every, unbroken = Counter(model.asked), left_by(world.parent / "whole")
        model.asked.clear()
        path = configured(world, url, critic={"max_anchors": 0})
        for limit in (3, 6):
            result = reflact("train", path, "--set", f"budget.max_calls={limit}")
            assert result.exit_code == 1, result.output
            assert f"the run ended as budget: budget.max_calls is {limit}" in result.stderr
            assert len(model.asked) <= limit
        assert model.asked[2][0].startswith("target/")
        assert reflact("train", path).exit_code == 0
        assert Counter(model.asked) == every
    assert differences(left_by(world.parent / "run"), unbroken) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("call", [1, 4, 6])
def test_a_killed_run_repeats_no_call_of_its_critic(world: Path, call: int) -> None:
    with playing() as (model, url):
        assert reflact("train", configured(world, url, name="whole")).exit_code == 0
        every, unbroken = Counter(model.asked), left_by(world.parent / "whole")
        model.asked.clear()
        model.hold = call
        path = configured(world, url)
        with reflact_process("train", path) as process:
            assert model.held.wait(HANGS)
            process.send_signal(signal.SIGKILL)
        in_flight = model.asked[-1]
        model.hold = None
        model.go_on.set()
        assert reflact("train", path).exit_code == 0
        assert Counter(model.asked) - every == Counter([in_flight])
    assert differences(left_by(world.parent / "run"), unbroken, but=("spend",)) == []


@pytest.mark.slow
def test_what_is_promoted_after_the_start_does_not_change_the_run(world: Path) -> None:
    """A run keeps the pairs that it began with, its memory there or not; a new run takes the new ones."""
    memory = world.parent / "memory.db"
    with playing() as (_, url):
        assert reflact("train", configured(world, url, name="whole")).exit_code == 0
        unbroken, path = left_by(world.parent / "whole"), configured(world, url)
        assert reflact("train", path, "--set", "budget.max_calls=6").exit_code == 1
        remember(memory, 2)
        assert reflact("train", path, "--set", "budget.max_calls=9").exit_code == 1
        memory.rename(world.parent / "moved.db")
        assert reflact("train", path).exit_code == 0
        assert differences(left_by(world.parent / "run"), unbroken) == []
        (world.parent / "moved.db").rename(memory)
        assert reflact("train", configured(world, url, name="new")).exit_code == 0
    before, after = (summary_of(world.parent / name).critic for name in ("run", "new"))
    assert (before.pairs, after.pairs) == (1, 2)
    assert before.snapshot != after.snapshot
    keys = [
        set(rows(world.parent / name, "SELECT key FROM outcomes WHERE kind = 'rollout'"))
        for name in ("run", "new")
    ]
    assert not keys[0] & keys[1]
