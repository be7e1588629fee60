"""Order of completion influences nothing that a run keeps."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Sequence
from itertools import product
from pathlib import Path

import pytest
from anyio.lowlevel import checkpoint

from reflact import events
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.store.runs import open_store
from reflact.testing import ToyEnvironment, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from toy_runs import Actor, build_trainer

LONGEST_WAIT = 40


class Waits:
    """Draws how many turns of the event loop each call takes."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    async def some(self) -> None:
        for _ in range(self._draw.randrange(LONGEST_WAIT)):
            await checkpoint()


def slow(script: Script, waits: Waits) -> Script:
    """Return a script whose answers come in random order; those of some merges and rewrites are of no use.

    The rewrites of a step differ: each leaves out another line.
    """

    async def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await waits.some()
        is_rewrite = call_id.purpose == "write_document"
        if call_id.step == 2 and (call_id.purpose == "merge" or (is_rewrite and call_id.part == "0")):
            return "" if is_rewrite else "no list at all"
        said = script(prompt, reply_type, call_id)
        said = await said if isinstance(said, Awaitable) else said
        if is_rewrite and isinstance(said, dict):
            lines = str(said["text"]).splitlines()
            left_out = 1 + int(call_id.part)
            said["text"] = "\n".join(lines[:left_out] + lines[left_out + 1 :] if len(lines) > 3 else lines)
        return said

    return answer


async def history(
    folder: Path, policy: str, sources: Sequence[str], *, concurrency: int, seed: int, overlap: bool
) -> tuple[str, ...]:
    waits = Waits(seed)
    config = {
        "out_dir": folder,
        "report": False,
        "seed": 1,
        "search": {"sources": sources},
        "train": {
            "batch_size": 6,
            "accumulation": 2,
            "num_epochs": 3,
            "rollout_concurrency": concurrency,
        },
        "reflect": {"minibatch_size": 2, "concurrency": concurrency, "overlap": overlap},
        "aggregate": {"merge_batch_size": 2},
        "select": {"max_edits": 2, "min_edits": 1},
        "gate": {"policy": policy},
    }
    trainer = build_trainer(
        config,
        environment=ToyEnvironment(train=24, val=6, test=6, rules=6),
        target=Actor(lambda *_: waits.some(), noise=0.2),
        script=slow(toy_optimizer(), waits),
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


@pytest.mark.parametrize(
    ("policy", "sources"),
    [
        ("ranked", ("edits",)),
        pytest.param("strict", ("edits",), marks=pytest.mark.slow),
        pytest.param("ranked", ("rewrite",), marks=pytest.mark.slow),
    ],
)
async def test_order_of_completion_influences_nothing(
    tmp_path: Path, policy: str, sources: Sequence[str], thorough: bool
) -> None:
    """Events, records and skills are the same bytes at any concurrency, in any order of answers.

    They do not depend on whether analysts wait for all rollouts of their step, either.
    """
    some = ((1, 0, False), (8, 1, True), (64, 2, True))
    cases = tuple((c, seed, (c + seed) % 2 == 0) for c, seed in product((1, 8, 64), range(3)))
    histories = [
        await history(tmp_path / f"{n}", policy, sources, concurrency=concurrency, seed=seed, overlap=overlap)
        for n, (concurrency, seed, overlap) in enumerate(cases if thorough else some)
    ]
    assert len(set(histories)) == 1
