"""Order of completion influences nothing that a run keeps."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from pathlib import Path

import pytest
from anyio.lowlevel import checkpoint

from reflact import Trainer, events
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.protocols import Session
from reflact.store.runs import open_store
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from reflact.types import Skill, Turn

pytestmark = pytest.mark.anyio

LONGEST_WAIT = 40


class Waits:
    """Draws how many turns of the event loop each call takes."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    async def some(self) -> None:
        """Let others run a random number of times."""
        for _ in range(self._draw.randrange(LONGEST_WAIT)):
            await checkpoint()


class SlowTarget:
    """A toy target whose answers come in random order."""

    def __init__(self, waits: Waits) -> None:
        self._toy = ToyTarget(noise=0.2)
        self._waits = waits

    @property
    def identity(self) -> str:
        return self._toy.identity

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return _SlowSession(self._toy.session(skill, rollout=rollout), self._waits)


class _SlowSession:
    def __init__(self, inner: Session, waits: Waits) -> None:
        self._inner = inner
        self._waits = waits

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._inner.turns

    async def reply(self, message: str) -> str:
        await self._waits.some()
        return await self._inner.reply(message)


def slow(script: Script, waits: Waits) -> Script:
    """Return a script whose answers come in random order; those of some merges are of no use."""

    async def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await waits.some()
        if call_id.purpose == "merge" and call_id.step == 2:
            return "no list at all"
        said = script(prompt, reply_type, call_id)
        return await said if isinstance(said, Awaitable) else said

    return answer


async def history(
    folder: Path, *, concurrency: int, seed: int, accumulation: int = 1, overlap: bool = True
) -> tuple[str, ...]:
    """Train in the toy world and return everything durable as text."""
    waits = Waits(seed)
    config = {
        "out_dir": folder,
        "train": {
            "batch_size": 12 // accumulation,
            "accumulation": accumulation,
            "num_epochs": 2,
            "rollout_concurrency": concurrency,
        },
        "reflect": {"minibatch_size": 2, "concurrency": concurrency, "overlap": overlap},
        "aggregate": {"merge_batch_size": 2},
        "select": {"max_edits": 2, "min_edits": 1},
    }
    trainer = Trainer(
        config,
        environment=ToyEnvironment(train=24, val=6, test=6, rules=6),
        target=SlowTarget(waits),
        optimizer=ScriptedLLM(slow(toy_optimizer(), waits)),
    )
    happened = [event async for event in trainer.stream() if event.durable]
    async with open_store(folder / "run.db") as store:
        stored = await store.events(trainer.run_id)
        records = await store.records(trainer.run_id)
    assert tuple(happened) == stored
    assert any(isinstance(event, events.FallbackUsed) for event in stored)
    assert len({r.verdict.action for r in records}) > 1
    skills = [f"{p.name}\n{p.read_text('utf-8')}" for p in sorted((folder / "skills").iterdir())]
    return (
        *(event.canonical_content for event in stored),
        *(record.model_dump_json() for record in records),
        *skills,
        (folder / "best_skill.md").read_text("utf-8"),
    )


async def test_order_of_completion_influences_nothing(tmp_path: Path) -> None:
    """Events, records and skills are the same bytes at concurrency 1, 8 and 64 in any order of answers."""
    histories = [
        await history(tmp_path / f"{concurrency}-{seed}", concurrency=concurrency, seed=seed)
        for concurrency in (1, 8, 64)
        for seed in range(3)
    ]
    assert len(set(histories)) == 1


async def test_overlap_influences_nothing(tmp_path: Path) -> None:
    """A run whose analysts wait for all rollouts of their step leaves the same bytes as one whose do not."""
    histories = [
        await history(
            tmp_path / f"{concurrency}-{overlap}",
            concurrency=concurrency,
            seed=concurrency,
            accumulation=2,
            overlap=overlap,
        )
        for concurrency, overlap in ((1, False), (1, True), (8, True), (64, True))
    ]
    assert len(set(histories)) == 1
