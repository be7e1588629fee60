"""Slips in Python: what is handed in as something else is told where it is handed in, with what to give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reflact import Calibrator, Critic, ModelConfig, Trace, connect
from reflact.errors import ConfigError, DataError
from reflact.memory import Action, Evaluation, Gold, Transition
from reflact.memory_store import MemoryStore
from reflact.testing import ScriptedLLM

pytestmark = pytest.mark.anyio

WRONG: Any = None
STEP = Transition(before="open", action=Action(name="pay"), after="paid")
SAID = Evaluation(phi_before=0, phi_after=1, reasoning="It is paid.")


def huge(text: str) -> Transition:
    """Return a step whose state holds a number that no JSON text can."""
    return STEP.model_copy(update={"after": {text: 10**5000}})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Trace(WRONG), "the purpose of a trace is None; give text"),
        (lambda: Trace([{"role": "user"}]), "the purpose of a trace is a list; give text"),  # type: ignore[arg-type]
        (lambda: Trace("p", id=7), "the id of a trace is an int; give text"),  # type: ignore[arg-type]
        (lambda: Trace("p", id=" "), "the id of a trace is ' '; give it letters"),
        (lambda: Trace("p", id="a\nb"), "on one line"),
        (lambda: Trace("p", id="\ud800"), "on one line"),
        (lambda: Trace("p").record("text"), "what is recorded is a str; give a Transition("),  # type: ignore[arg-type]
        (lambda: Trace("p").record(STEP, 0.5), "the score of a step is a float; give what"),  # type: ignore[arg-type]
        (lambda: Trace("p").record(STEP, Gold(phi_after=1, source="human")), "record(step, gold=...)"),  # type: ignore[arg-type]
        (lambda: Trace("p").record(STEP, gold=4.0), "the gold of a step is a float; give a Gold("),  # type: ignore[arg-type]
        (lambda: Trace("p", id="t").record(huge("n")), "step 0 of trace t cannot be written: "),
    ],
)
def test_a_trace_says_what_it_needs(make: Callable[[], object], said: str) -> None:
    """Whatever is no purpose, id, step, score or gold is refused in a sentence that says what is."""
    with pytest.raises(DataError) as refused:
        make()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_refused_is_not_recorded(tmp_path: Path) -> None:
    """The trace goes on as if nothing had been tried, in its file too."""
    trace = Trace("p", path=tmp_path / "t.jsonl")
    for wrong in (WRONG, huge("n")):
        with pytest.raises(DataError):
            trace.record(wrong)
    trace.record(STEP, SAID)
    assert Trace.load(tmp_path / "t.jsonl").events == trace.events
    assert len(trace.events) == 1


@pytest.mark.parametrize("who", ["a critic", "a calibrator"])
@pytest.mark.parametrize("model", [None, "gpt", ModelConfig(model="m")])
async def test_a_model_has_to_be_connected(tmp_path: Path, who: str, model: Any) -> None:
    """A name or a configuration answers nothing; the message shows how to connect one."""
    async with MemoryStore(tmp_path / "memory.db") as memory:
        with pytest.raises(
            ConfigError, match=rf"{who} needs a connected model and got .*: `async with connect"
        ):
            Critic(model) if who == "a critic" else Calibrator(model, memory)


def test_a_connection_has_to_be_opened(tmp_path: Path) -> None:
    """``connect`` without ``async with`` is a common slip of its own."""
    unopened: Any = connect(ModelConfig(model="m"), store=tmp_path / "calls.db")
    with pytest.raises(ConfigError, match="the model of a critic is not connected yet"):
        Critic(unopened)


def test_a_path_is_no_memory(tmp_path: Path) -> None:
    """The file has to be opened as a memory."""
    path: Any = tmp_path / "memory.db"
    with pytest.raises(ConfigError, match="a critic needs an open memory and got a PosixPath"):
        Critic(ScriptedLLM(lambda *_: None), memory=path)
    with pytest.raises(ConfigError, match="a calibrator needs an open memory"):
        Calibrator(ScriptedLLM(lambda *_: None), path)


async def test_what_is_scored_and_learned_from_is_looked_at(tmp_path: Path) -> None:
    """A text is no step, a trace no list of traces, a path no trace."""
    llm, wrong = ScriptedLLM(lambda *_: None), WRONG
    async with MemoryStore(tmp_path / "memory.db") as memory:
        calibrator = Calibrator(llm, memory)
        with pytest.raises(DataError, match="what is scored is None; give a Transition"):
            await calibrator.critic.score(wrong, purpose="p")
        with pytest.raises(DataError, match="the purpose is None; give text"):
            await calibrator.critic.score(STEP, purpose=wrong)
        one: Any = Trace("p")
        with pytest.raises(DataError, match=r"what is learned from is a Trace; give a list of traces"):
            await calibrator.calibrate(one)
        with pytest.raises(DataError, match="what is held out, number 1, is a str; give a Trace"):
            await calibrator.calibrate([], heldout=[one, "run.jsonl"])  # type: ignore[list-item]
        with pytest.raises(DataError, match="what is submitted is a str"):
            calibrator.submit("run.jsonl")  # type: ignore[arg-type]
        with pytest.raises(DataError, match="what is handed over is None"):
            await calibrator.hand_over(wrong)
        with pytest.raises(ConfigError, match="judges: one comparison shows one order only"):
            Calibrator(llm, memory, judges=1)
    assert not llm.calls
