"""``preset: skillopt``: a whole run decides as the older tool did, where a switch exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reflact.skills.document import read_guidance
from reflact.types import Skill, Split
from toy_runs import IDLE, Actor, list_messages, playing, right, run

OLDER: dict[str, Any] = {
    "preset": "skillopt",
    "slow_update": {"enabled": True},
    "meta_skill": {"enabled": True},
    "search": {"sources": ["edits"]},
    "train": {"batch_size": 4, "num_epochs": 2},
}
VAL = list_messages(Split.val)


async def test_one_pass_decides(tmp_path: Path) -> None:
    def lucky(skill: Skill, message: str, times: int) -> str | None:
        return right(message) if "nonsense" in skill.text and message == "double 18" else None

    done = await run(tmp_path, actor=Actor(lucky), script=playing(IDLE), **OLDER)
    first = done.records[0].verdict
    assert first.action == "accept_new_best"
    assert (first.candidate.n, first.ranked) == (4, None)
    asked = [(text, message) for text, message in done.actor.asked if message in VAL]
    assert len(asked) == len(set(asked))


async def test_guidance_is_forced_into_the_current_skill(tmp_path: Path) -> None:
    done = await run(tmp_path, script=playing(IDLE), **OLDER)
    assert [e.slow_update.action for e in done.epochs if e.slow_update] == ["reserved", "forced"]
    assert [e.current.inherited for e in done.epochs] == [True, True]
    assert done.epochs[-1].best.number == 0
    assert done.promotions[0].verdict.ranked is None
    assert read_guidance(done.best) != ""
