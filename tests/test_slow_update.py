"""Slow guidance: what two epochs are compared on, and how guidance comes into the document or stays out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.config.training import SlowUpdateConfig
from reflact.data import shuffle
from reflact.errors import ProviderDown, RunFailed
from reflact.skills.document import read_guidance
from reflact.stages.reply_models import AnalystReply
from reflact.stages.slow_update import GuidanceReply, compare_skills
from reflact.testing import ToyEnvironment, append_reply
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Item, Rollout, Score, Skill, Split
from toy_runs import LINES, WORLD, Actor, Part, playing, run

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


async def test_changed_pairs_are_topped_up_until_there_are_enough() -> None:
    scores = dict.fromkeys(ORDER, (0.0, 0.0)) | {ORDER[1]: (0.0, 1.0), ORDER[4]: (1.0, 0.0)}
    world = World(dict(scores))
    assert await compared(world, "changed", 2) == [(ORDER[1], "improved"), (ORDER[4], "regressed")]
    rolled = [ids for text, ids in world.rolled if text == "later"]
    assert rolled == [ORDER[0:2], ORDER[2:4], ORDER[4:6]]
    assert [ids for text, ids in world.rolled if text == "earlier"] == rolled


async def test_the_threshold_says_what_failed() -> None:
    world = World(dict.fromkeys(ORDER, (0.5, 1.0)))
    assert {kind for _, kind in await compared(world, "mixed", 4)} == {"stable_success"}
    assert {kind for _, kind in await compared(world, "mixed", 4, 0.8)} == {"improved"}


async def test_a_run_compares_its_sample(tmp_path: Path) -> None:
    done = await run(tmp_path, **EPOCHS, slow_update={"enabled": True, "samples": 3})
    (closed,) = [epoch for epoch in done.epochs if epoch.epoch == 2]
    train = WORLD.items(Split.train)
    assert [c.item_id for c in closed.comparisons] == [i.id for i in shuffle(train, 42 + 4000, "slow")[:3]]
    (shown,) = done.shown("slow_update")
    last = {record.epoch: record for record in done.records}
    before, now = (done.texts[last[epoch].current.skill_hash].strip() for epoch in (1, 2))
    assert before != now
    assert shown.index(before) < shown.rindex(now)
    assert "3 tasks" in shown


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


async def test_without_slow_updates_nothing_happens_at_an_epochs_end(tmp_path: Path) -> None:
    done = await run(tmp_path, **EPOCHS)
    assert (done.epochs, done.asked("slow_update")) == ((), [])
    assert not any("SLOW_UPDATE" in text for text in done.texts.values())


async def test_the_first_epoch_reserves_the_region_of_ungated_guidance(tmp_path: Path) -> None:
    done = await run(tmp_path, script=playing(IDLE), **EPOCHS, **UNGATED)
    first = done.epochs[0]
    assert first.slow_update.action == "reserved"
    (made,) = first.created_versions
    assert (made.inherited, made.score) == (True, 0.0)
    assert read_guidance(done.texts[made.skill_hash]) == ""
    assert "SLOW_UPDATE" in done.texts[made.skill_hash]
    assert first.best.number == 0


async def test_gated_guidance_brings_its_region_along(tmp_path: Path) -> None:
    done = await run(tmp_path, script=playing(IDLE, guided("Be kind.")), **EPOCHS, **SLOW)
    assert [epoch.created_versions for epoch in done.epochs] == [(), ()]
    assert done.epochs[0].slow_update is None
    assert "SLOW_UPDATE" not in done.current


async def test_guidance_that_wins_is_accepted_and_measured(tmp_path: Path) -> None:
    done = await run(tmp_path, script=playing(IDLE), **EPOCHS, **SLOW)
    closed = done.epochs[-1]
    assert (closed.slow_update.action, closed.slow_update.verdict.action) == ("accepted", "accept_new_best")
    (made,) = closed.created_versions
    assert (made.score, made.inherited, made.origin) == (1.0, False, "slow update 2")
    assert closed.current == closed.best == made
    assert set(read_guidance(done.texts[made.skill_hash]).splitlines()) == set(list(LINES.values())[:4])


async def test_rejected_guidance_leaves_the_old_one_and_is_tried_again(tmp_path: Path) -> None:
    good = LINES["double"]
    script = playing(IDLE, guided(good, "Be kind.", "Be brief."))
    done = await run(tmp_path, script=script, train={"num_epochs": 4}, **SLOW)
    actions = [epoch.slow_update.action for epoch in done.epochs if epoch.slow_update]
    assert actions == ["accepted", "unchanged", "unchanged"]
    assert read_guidance(done.current) == good
    shown = done.shown("slow_update")
    assert "There is no guidance yet." in shown[0]
    for later in shown[1:]:
        assert f"<guidance>\n{good}\n</guidance>" in later
        assert "Be kind." not in later


async def test_a_reply_that_cannot_be_had_is_not_done(tmp_path: Path) -> None:
    good = LINES["double"]
    script = playing(IDLE, guided(good, "<!-- SLOW_UPDATE_END -->", "<!-- SLOW_UPDATE_END -->", "", good))
    done = await run(tmp_path, script=script, train={"num_epochs": 4}, **SLOW)
    refused = done.epochs[2]
    assert refused.slow_update.action == "no_reply"
    assert [f.label for f in refused.fallbacks] == ["slow_update"]
    assert (refused.created_versions, refused.current) == ((), done.epochs[1].current)
    assert {call.call_id.step for call in done.asked("slow_update")} == {4, 6, 8}
    closed = [e for e in done.events if e.kind == "epoch_committed"]
    assert closed[2].fallbacks == refused.fallbacks


async def test_a_document_may_bring_guidance(tmp_path: Path) -> None:
    initial = (
        "---\nname: toy\n---\n# Toy\n\n"
        "<!-- SLOW_UPDATE_START -->\nOld words.\n<!-- SLOW_UPDATE_END -->\n\nAfterword.\n"
    )
    good = LINES["square"]
    script = playing(IDLE, guided(good))
    done = await run(tmp_path, initial=initial, script=script, **EPOCHS, **SLOW)
    assert "<guidance>\nOld words.\n</guidance>" in done.shown("slow_update")[0]
    assert done.current == initial.replace("Old words.", good)


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
    closed = done.epochs[-1]
    assert (closed.slow_update.action, closed.slow_update.verdict) == ("forced", None)
    assert (closed.current.inherited, closed.current.score) == (True, closed.best.score)
    assert "HARM" in done.texts[closed.current.skill_hash]
    (promotion,) = done.promotions
    assert promotion.verdict.action == "reject"
    assert (promotion.current.inherited, promotion.current.score) == (False, 0.0)
    assert "HARM" in done.current
    assert "HARM" not in done.best
    assert (tmp_path / "best_skill.md").read_text("utf-8") == done.best


async def test_forced_guidance_may_return_to_an_earlier_document(tmp_path: Path) -> None:
    script = playing(IDLE, guided("One.", "Two.", "One."))
    done = await run(tmp_path, script=script, train={"num_epochs": 4}, **UNGATED)
    assert [e.slow_update.action for e in done.epochs if e.slow_update] == [
        "reserved",
        "forced",
        "forced",
        "forced",
    ]
    assert read_guidance(done.current) == "One."
