"""The optimizer's memory: what it is written from, who is told, and what it survives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact.messages import ReplyModel
from reflact.stages.reply_models import AnalystReply
from reflact.stages.slow_update import MemoryReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.testing.llm import ScriptedAnswer
from toy_runs import LINES, Actor, Part, Ran, playing, run

META: Mapping[str, Any] = {"enabled": True}
IDLE: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense"))


def remembering(*memories: str) -> Part:
    """Play a keeper of memory that writes these one after the other, and the last one from then on."""
    left = list(memories)

    def give(*_: object) -> ScriptedAnswer:
        return {"reasoning": "r", "memory": left.pop(0) if len(left) > 1 else left[0]}

    return MemoryReply, give


def told(done: Ran, purpose: str) -> dict[int, set[str]]:
    """Return, by epoch of two steps, which memories the calls for a purpose were shown."""
    seen: dict[int, set[str]] = {}
    for call, shown in zip(done.asked(purpose), done.shown(purpose), strict=True):
        epoch = (call.call_id.step + 1) // 2
        seen.setdefault(epoch, set()).update(m for m in ("Alpha.", "Beta.") if m in shown)
    return seen


async def test_memory_begins_after_the_second_epoch(tmp_path: Path) -> None:
    script = playing(IDLE, remembering("Alpha.", "Beta."))
    done = await run(tmp_path, script=script, train={"num_epochs": 3}, meta_skill=META)
    assert [epoch.meta_skill for epoch in done.epochs] == [None, "Alpha.", "Beta."]
    assert done.state.meta_skill == "Beta."
    shown = done.shown("meta_skill")
    assert len(shown) == 2
    assert "<advice>" not in shown[0]
    assert "<advice>\nAlpha.\n</advice>" in shown[1]


async def test_everybody_who_decides_on_edits_is_told(tmp_path: Path) -> None:
    def proposing(wanted: type[ReplyModel], shown: str) -> ScriptedAnswer:
        return append_reply(wanted, f"- nonsense {len(shown)}", "- more nonsense")

    script = playing((AnalystReply, proposing), remembering("Alpha."))
    done = await run(
        tmp_path,
        script=script,
        train={"num_epochs": 3},
        reflect={"minibatch_size": 2},
        select={"max_edits": 2, "min_edits": 1, "scheduler": "linear", "lr_control": "autonomous"},
        meta_skill=META,
    )
    for purpose in ("analyst_failure", "merge", "step_size"):
        assert told(done, purpose) == {1: set(), 2: set(), 3: {"Alpha."}}, purpose


async def test_an_epoch_without_a_memory_keeps_the_old_one(tmp_path: Path) -> None:
    left: list[ScriptedAnswer] = [{"reasoning": "r", "memory": "Alpha."}, "no", "no", "no"]

    def give(*_: object) -> ScriptedAnswer:
        return left.pop(0) if left else {"reasoning": "r", "memory": "Beta."}

    script = playing(IDLE, (MemoryReply, give))
    done = await run(tmp_path, script=script, train={"num_epochs": 5}, meta_skill=META)
    assert [epoch.meta_skill for epoch in done.epochs] == [None, "Alpha.", None, "Beta.", "Beta."]
    assert [[f.label for f in epoch.fallbacks] for epoch in done.epochs] == [[], [], ["meta_skill"], [], []]
    assert told(done, "analyst_failure")[4] == {"Alpha."}
    assert told(done, "analyst_failure")[5] == {"Beta."}


async def test_without_slow_updates_the_comparison_is_its_own(tmp_path: Path) -> None:
    with_slow = await run(
        tmp_path / "a", train={"num_epochs": 2}, meta_skill=META, slow_update={"enabled": True}
    )
    alone = await run(tmp_path / "b", train={"num_epochs": 2}, meta_skill=META)
    assert alone.epochs[-1].comparisons == with_slow.epochs[-1].comparisons != ()
    assert alone.shown("meta_skill") == with_slow.shown("meta_skill")
    assert (alone.asked("slow_update"), alone.epochs[-1].slow_update) == ([], None)


async def test_the_epochs_attempts_are_shown(tmp_path: Path) -> None:
    script = playing(IDLE, remembering("Alpha."))
    (shown,) = (await run(tmp_path, script=script, train={"num_epochs": 2}, meta_skill=META)).shown(
        "meta_skill"
    )
    assert "step 3:" in shown
    assert "step 4:" in shown
    assert "step 1:" not in shown


def under(shown: str) -> list[str]:
    """Return the documents that a prompt shows, in order."""
    return [part.partition("\n</document>")[0] for part in shown.split("<document>\n")[1:]]


@pytest.mark.parametrize("after", [None, 30, 52])
async def test_skills_are_compared_as_they_stood_at_the_last_steps(tmp_path: Path, after: int | None) -> None:
    sections: dict[str, Any] = {
        "environment": ToyEnvironment(train=8, val=4, test=4, rules=4),
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 3},
        "meta_skill": META,
        "slow_update": {"enabled": True, "gated": False},
    }
    if after is not None:
        with anyio.CancelScope() as scope:
            asked = 0

            def stop(*_: object) -> None:
                nonlocal asked
                asked += 1
                if asked == after:
                    scope.cancel()

            await run(tmp_path, actor=Actor(stop), **sections)
        assert scope.cancelled_caught
    done = await run(tmp_path, **sections)
    whole = await run(tmp_path / "whole", **sections)
    assert done.epochs == whole.epochs
    last = {record.epoch: record.current.skill_hash for record in whole.records}
    assert [epoch.last_hash for epoch in whole.epochs] == [last[1], last[2], last[3]]
    for call, shown in zip(whole.asked("meta_skill"), whole.shown("meta_skill"), strict=True):
        assert call.call_id.step in {4, 6}
        epoch = call.call_id.step // 2
        bodies = [whole.texts[last[n]].partition("<!--")[0].strip("\n") for n in (epoch - 1, epoch)]
        assert under(shown) == [text for text in bodies if text]
    guided = [e.slow_update.guidance for e in whole.epochs if e.slow_update and e.slow_update.guidance]
    assert any(line in str(guided) for line in [*LINES.values(), "Answer every task."])
