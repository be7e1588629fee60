"""The end of an epoch: the comparison, guidance that comes in or stays out, and the optimizer's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact.data import shuffle
from reflact.errors import ProviderDown
from reflact.messages import ReplyModel
from reflact.skills.document import read_guidance
from reflact.stages.reply_models import AnalystReply
from reflact.stages.slow_update import GuidanceReply, MemoryReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Skill, Split
from toy_runs import IDLE, LINES, Actor, Part, Ran, in_turn, playing, run

SLOW: dict[str, Any] = {"slow_update": {"enabled": True}}
UNGATED: dict[str, Any] = {"slow_update": {"enabled": True, "gated": False}}
EPOCHS: dict[str, Any] = {"train": {"num_epochs": 2}}


def guided(*texts: str) -> Part:
    replies = ({"reasoning": "r", "helped": "unclear", "guidance": text} for text in texts)
    return in_turn(GuidanceReply, *replies)


async def test_an_unmeasured_top_up_is_no_end_of_the_run(tmp_path: Path) -> None:
    environment = ToyEnvironment(train=9, val=4, test=4)
    last = shuffle(environment.items(Split.train), 42 + 4000, "slow")[-1]
    steps: dict[str, Any] = {"train": {"num_epochs": 2, "batch_size": 9}, "reflect": {"minibatch_size": 9}}

    def lose_one(skill: Skill, message: str, times: int) -> None:
        if message == last.input:
            raise ProviderDown("models.target: no answer")

    policy = {"enabled": True, "pair_policy": "changed", "samples": 8}
    done = await run(
        tmp_path,
        environment=environment,
        actor=Actor(lose_one),
        script=playing(IDLE),
        slow_update=policy,
        **steps,
    )
    assert done.summary.status == "completed", done.summary.reason
    assert done.epochs[-1].comparisons == ()


@pytest.mark.parametrize("policy", ["unchanged", "mixed"])
async def test_a_policy_keeps_pairs_of_its_kind(tmp_path: Path, policy: str) -> None:
    """All items fail under both skills: pairs that did not change, ``samples`` at most."""
    slow = {"enabled": True, "pair_policy": policy, "samples": 4}
    done = await run(
        tmp_path, script=playing(IDLE), train={"num_epochs": 2, "batch_size": 8}, slow_update=slow
    )
    assert [pair.category for pair in done.epochs[-1].comparisons] == ["persistent_failure"] * 4


async def test_nothing_to_compare_asks_nothing(tmp_path: Path) -> None:
    steps: dict[str, Any] = {"train": {"num_epochs": 2, "batch_size": 8}}
    policy = {"enabled": True, "pair_policy": "changed"}
    done = await run(tmp_path, script=playing(IDLE), slow_update=policy, **steps)
    end = done.epochs[-1]
    assert (end.comparisons, end.meta_skill) == ((), None)
    assert {pair.category for pair in end.left_out} == {"persistent_failure"}
    assert len(end.left_out) == 8
    assert end.slow_update.action == "unchanged"
    assert [f.label for f in end.fallbacks] == ["comparison"]
    assert (done.asked("slow_update"), done.asked("meta_skill")) == ([], [])


async def test_guidance_that_wins_is_accepted_and_measured(tmp_path: Path) -> None:
    done = await run(tmp_path, script=playing(IDLE), **EPOCHS, **SLOW)
    closed = done.epochs[-1]
    assert (closed.slow_update.action, closed.slow_update.verdict.action) == ("accepted", "accept_new_best")
    (made,) = closed.created_versions
    assert (made.score, made.inherited, made.origin) == (1.0, False, "slow update 2")
    assert closed.current == closed.best == made
    assert set(read_guidance(done.texts[made.skill_hash]).splitlines()) == set(list(LINES.values())[:4])


async def test_rejected_or_missing_guidance_leaves_the_old_one_and_is_tried_again(tmp_path: Path) -> None:
    good = LINES["double"]
    wrong = "<!-- SLOW_UPDATE_END -->"
    script = playing(IDLE, guided(good, "Be kind.", wrong, wrong, "", "Be brief."))
    done = await run(tmp_path, script=script, train={"num_epochs": 5}, **SLOW)
    actions = [epoch.slow_update.action for epoch in done.epochs if epoch.slow_update]
    assert actions == ["accepted", "unchanged", "no_reply", "unchanged"]
    missing = done.epochs[3]
    assert [f.label for f in missing.fallbacks] == ["slow_update"]
    assert (missing.created_versions, missing.current) == ((), done.epochs[2].current)
    assert read_guidance(done.current) == good
    shown = done.shown("slow_update")
    assert "There is no guidance yet." in shown[0]
    for later in shown[1:]:
        assert f"<guidance>\n{good}\n</guidance>" in later
        assert "Be kind." not in later


def harmed(skill: Skill, message: str, times: int) -> str | None:
    return "unknown" if "HARM" in skill.text else None


async def test_forced_guidance_never_reaches_best_unmeasured(tmp_path: Path) -> None:
    script = playing(guided("HARM"))
    done = await run(
        tmp_path,
        environment=ToyEnvironment(train=4, val=4, test=4),
        actor=Actor(harmed),
        script=script,
        **EPOCHS,
        **UNGATED,
    )
    first, closed = done.epochs
    assert first.slow_update.action == "reserved"
    (reserved,) = first.created_versions
    assert reserved.inherited
    assert "SLOW_UPDATE_START -->\n<!--" in done.texts[reserved.skill_hash]
    assert (closed.slow_update.action, closed.slow_update.verdict) == ("forced", None)
    assert (closed.current.inherited, closed.current.score) == (True, closed.best.score)
    assert "HARM" in done.texts[closed.current.skill_hash]
    (promotion,) = done.promotions
    assert promotion.verdict.action == "reject"
    assert (promotion.current.inherited, promotion.current.score) == (False, 0.0)
    assert "HARM" in done.current
    assert "HARM" not in done.best
    assert (tmp_path / "best_skill.md").read_text("utf-8") == done.best


META: Mapping[str, Any] = {"enabled": True}


def remembering(*memories: str) -> Part:
    return in_turn(MemoryReply, *({"reasoning": "r", "memory": memory} for memory in memories))


def told(done: Ran, purpose: str) -> dict[int, set[str]]:
    """Return, by epoch of two steps, which memories the calls for a purpose were shown."""
    seen: dict[int, set[str]] = {}
    for call, shown in zip(done.asked(purpose), done.shown(purpose), strict=True):
        epoch = (call.call_id.step + 1) // 2
        seen.setdefault(epoch, set()).update(m for m in ("Alpha.", "Beta.") if m in shown)
    return seen


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


def under(shown: str) -> list[str]:
    """Return the documents that a prompt shows, in order."""
    return [part.partition("\n</document>")[0] for part in shown.split("<document>\n")[1:]]


@pytest.mark.parametrize("after", [30, 52])
async def test_skills_are_compared_as_they_stood_at_the_last_steps(tmp_path: Path, after: int) -> None:
    sections: dict[str, Any] = {
        "environment": ToyEnvironment(train=8, val=4, test=4, rules=4),
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 3},
        "meta_skill": META,
        "slow_update": {"enabled": True, "gated": False},
    }
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
