"""The end of an epoch: the comparison, guidance that comes in or stays out, and the optimizer's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.config.training import SlowUpdateConfig
from reflact.data import shuffle
from reflact.errors import ProviderDown, RunFailed
from reflact.messages import ReplyModel
from reflact.skills.document import read_guidance
from reflact.stages.reply_models import AnalystReply
from reflact.stages.slow_update import GuidanceReply, MemoryReply, compare_skills
from reflact.testing import ToyEnvironment, append_reply
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Item, Rollout, Score, Skill, Split
from toy_runs import LINES, Actor, Part, Ran, playing, run

SLOW: dict[str, Any] = {"slow_update": {"enabled": True}}
UNGATED: dict[str, Any] = {"slow_update": {"enabled": True, "gated": False}}
EPOCHS: dict[str, Any] = {"train": {"num_epochs": 2}}
IDLE: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense"))
"""An analyst whose proposals never help."""

EARLIER, LATER = Skill(text="earlier"), Skill(text="later")
ITEMS = tuple(Item(id=f"i{n:02}", input=n) for n in range(12))


def guided(*texts: str) -> Part:
    """Play a writer of guidance that gives these texts one after the other, and the last one from then on."""
    left = list(texts)

    def give(*_: object) -> ScriptedAnswer:
        text = left.pop(0) if len(left) > 1 else left[0]
        return {"reasoning": "r", "helped": "unclear", "guidance": text}

    return GuidanceReply, give


class World:
    """Rolls items out: their hard scores under the earlier and the later skill; None is unmeasured."""

    def __init__(self, scores: dict[str, tuple[float | None, float | None]]) -> None:
        self._scores = scores
        self.rolled: list[tuple[str, list[str]]] = []

    async def roll(self, items: Sequence[Item], skill: Skill) -> Sequence[Rollout]:
        self.rolled.append((skill.text, [item.id for item in items]))
        return [self._one(item, skill) for item in items]

    def _one(self, item: Item, skill: Skill) -> Rollout:
        hard = self._scores[item.id][skill == LATER]
        blank = Rollout(key=f"{skill.text}/{item.id}", item_id=item.id, skill_hash=skill.hash)
        if hard is None:
            return blank.model_copy(update={"error": "lost"})
        return blank.model_copy(update={"score": Score.of(hard)})


async def compared(
    world: World, policy: Any, samples: int, threshold: float | None = None
) -> list[tuple[str, str]]:
    """Return the items that are compared with what became of them."""
    compared = await compare_skills(
        ITEMS,
        EARLIER,
        LATER,
        roll=world.roll,
        config=SlowUpdateConfig(pair_policy=policy, samples=samples),
        threshold=threshold,
        seed=7,
        epoch=2,
    )
    assert not {pair.item.id for pair in compared.chosen} & {pair.item.id for pair in compared.left_out}
    return [(pair.item.id, pair.category) for pair in compared.chosen]


ORDER = [item.id for item in shuffle(ITEMS, 7 + 2000 * 2, "slow")]
outcomes = st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (None, 1.0), (0.0, None)])
NAMES = {
    (0.0, 0.0): "persistent_failure",
    (0.0, 1.0): "improved",
    (1.0, 0.0): "regressed",
    (1.0, 1.0): "stable_success",
}


@given(
    st.lists(outcomes, min_size=12, max_size=12),
    st.sampled_from(["mixed", "changed", "unchanged"]),
    st.integers(1, 13),
)
async def test_pairs_are_taken_along_the_seeded_order(
    scores: list[tuple[float | None, float | None]], policy: str, samples: int
) -> None:
    """Each policy keeps the first pairs of its kind that are measured on both sides, ``samples`` at most.

    A first round without any is no comparison.
    """
    given_scores = dict(zip(ORDER, scores, strict=True))
    world = World(given_scores)
    kinds = {"mixed": set(NAMES.values()), "changed": {"improved", "regressed"}}
    wanted = kinds.get(policy, {"persistent_failure", "stable_success"})
    sampled = ORDER[:samples] if policy == "mixed" else ORDER
    known = [(i, NAMES[given_scores[i]]) for i in sampled if given_scores[i] in NAMES]  # type: ignore[index]
    expected = [(i, kind) for i, kind in known if kind in wanted][:samples]
    if all(None in given_scores[i] for i in ORDER[:samples]):
        with pytest.raises(RunFailed, match="could be measured"):
            await compared(world, policy, samples)
        return
    assert await compared(world, policy, samples) == expected


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
    """Answer wrongly wherever the guidance is harmful."""
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
    first, second = done.shown("meta_skill")
    assert "<advice>" not in first
    assert "<advice>\nAlpha.\n</advice>" in second
    assert [f"step {n}:" in first for n in (1, 3, 4)] == [False, True, True]


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
