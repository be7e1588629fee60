"""The end of a run: promotion, fresh trials, the sealed split, and what is said of what could not be had."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reflact.errors import ProviderDown
from reflact.protocols import Session
from reflact.stages.reply_models import AnalystReply
from reflact.stages.slow_update import GuidanceReply
from reflact.store.runs import open_store
from reflact.testing import ScriptedLLM, ToyEnvironment, append_reply, toy_optimizer
from reflact.trainer import Trainer
from reflact.training.rollouts import FIRST_REPORT_TRIAL, REPORT_TRIALS
from reflact.types import Grade, Item, Rollout, Score, Skill, Split
from toy_runs import LINES, WORLD, Actor, Part, playing, right, run, settings

TEST: dict[str, Any] = {"test": {"enabled": True}}
IDLE: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense"))
HARM: Part = (GuidanceReply, {"reasoning": "r", "helped": "unclear", "guidance": "HARM"})
HELP: Part = (GuidanceReply, {"reasoning": "r", "helped": "none", "guidance": LINES["double"]})
DIVIDED: dict[str, Any] = {
    "environment": ToyEnvironment(train=4, val=4, test=4),
    "search": {"sources": ["edits"]},
    "train": {"num_epochs": 2},
    "slow_update": {"enabled": True, "gated": False},
    **TEST,
}
"""A run whose last skill is not its best one, where the guidance does harm."""


def inputs(split: Split, world: ToyEnvironment = WORLD) -> set[str]:
    return {str(item.input) for item in world.items(split)}


def harmed(skill: Skill, message: str, times: int) -> str | None:
    return "unknown" if "HARM" in skill.text else None


async def rollouts_in(folder: Path) -> list[Rollout]:
    async with open_store(folder / "run.db") as store:
        rows = await store._database.fetch_rows("SELECT value FROM outcomes WHERE kind = 'rollout'", ())
    return [Rollout.model_validate_json(text) for (text,) in rows]


async def test_the_last_skill_is_promoted_by_the_gates_own_rule(tmp_path: Path) -> None:
    script = playing(IDLE, HELP)
    done = await run(tmp_path / "a", script=script, **{**DIVIDED, "test": {"enabled": False}})
    (promotion,) = done.promotions
    assert promotion.verdict.action == "accept_new_best"
    assert done.summary.best == done.summary.final == promotion.current
    assert (promotion.current.score, promotion.current.inherited) == (0.25, False)

    done = await run(tmp_path / "b", actor=Actor(harmed), script=playing(HARM), **DIVIDED)
    (promotion,) = done.promotions
    assert promotion.verdict.action == "reject"
    assert done.summary.best != done.summary.final
    assert (tmp_path / "b" / "best_skill.md").read_text("utf-8") == done.best


async def test_a_promotion_is_tried_once_more(tmp_path: Path) -> None:
    val, lost = inputs(Split.val, DIVIDED["environment"]), Counter[str]()

    def down(skill: Skill, message: str, times: int) -> str | None:
        if "HARM" in skill.text and message in val and lost[message] < 2:
            lost[message] += 1
            raise ProviderDown("models.target: no answer")
        return harmed(skill, message, times)

    done = await run(tmp_path / "a", actor=Actor(down), script=playing(HARM), **DIVIDED)
    whole = await run(tmp_path / "b", actor=Actor(harmed), script=playing(HARM), **DIVIDED)
    assert set(lost.values()) == {2}
    assert done.summary.status == "completed"
    assert done.promotions == whole.promotions


async def test_reported_validation_scores_come_from_trials_that_no_gate_saw(tmp_path: Path) -> None:
    def lucky(skill: Skill, message: str, times: int) -> str | None:
        return right(message) if skill.text and times < 1 else "unknown"

    done = await run(tmp_path, actor=Actor(lucky), target={"deterministic": False}, gate={"worth": 1})
    assert done.summary.best.number > 0
    for name in ("baseline", "best", "final"):
        score = done.summary.score(name, Split.val)
        assert (score.trials, score.n, score.selected_on, score.hard) == (4, 16, False, 0.0)
    val = {item.id for item in WORLD.items(Split.val)}
    trials = {r.trial for r in await rollouts_in(tmp_path) if r.item_id in val}
    fresh = range(FIRST_REPORT_TRIAL, FIRST_REPORT_TRIAL + REPORT_TRIALS)
    assert trials == {0, 1, *fresh}


@pytest.mark.parametrize(
    ("gate", "selected"),
    [
        ({"policy": "strict"}, {"best", "final"}),
        ({"enabled": False}, {"best"}),
        ({}, {"best", "final"}),
    ],
)
async def test_scores_that_chose_the_skill_are_marked(
    tmp_path: Path, gate: dict[str, Any], selected: set[str]
) -> None:
    done = await run(tmp_path, gate=gate, **TEST)
    marked = {(s.name, s.split) for s in done.summary.scores if s.selected_on}
    assert marked == {(name, Split.val) for name in selected}


async def test_scores_have_buckets_intervals_and_improvements(tmp_path: Path) -> None:
    done = await run(tmp_path, environment=ToyEnvironment(train=4, val=4, test=8), **TEST)
    names = ("baseline", "best", "final")
    scores = done.summary.scores
    assert [(s.name, s.split.value) for s in scores] == [(n, s) for s in ("val", "test") for n in names]
    test = done.summary.score("best", Split.test)
    learned = next(name for name, line in LINES.items() if line in done.best)
    assert (test.n, test.hard, test.successes, test.unmeasured) == (8, 0.25, 2.0, 0)
    assert test.low < 0.25 < test.high
    types = ("double", "square", "negate", "parity")
    assert {b.task_type: (b.n, b.hard) for b in test.buckets} == {
        name: (2, float(name == learned)) for name in types
    }
    gains = {(g.name, g.split.value): g for g in done.summary.improvements}
    assert set(gains) == {(name, split) for split in ("val", "test") for name in names[1:]}
    gain = gains["best", "test"]
    assert (gain.n, gain.mean) == (8, 0.25)
    assert gain.low < gain.mean < gain.high
    told = [e.improvement for e in done.events if e.kind == "improvement_measured"]
    assert told == list(done.summary.improvements)
    assert {a.action: a.count for a in done.summary.actions} == Counter(done.actions)
    assert (done.summary.best, done.summary.final) == (done.state.best, done.state.current)


class Partial(ToyEnvironment):
    """The toy world, in which a right answer is worth 0.8 of the soft score, a wrong one 0.1, and no item is solved."""

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        grade = await super().run(item, session, seed=seed)
        score = Score(hard=0, soft=0.8 if grade.score.hard else 0.1)
        return grade.model_copy(update={"score": score})


@pytest.mark.parametrize(
    ("metric", "gain", "words"),
    [
        ("soft", 0.7, "Better: mean soft score 0.80 on 8 test items instead of 0.10 (+70 points;"),
        ("mixed", 0.35, "Better: mean mixed score 0.40 on 8 test items instead of 0.05 (+35 points;"),
    ],
)
async def test_the_claim_is_in_the_metric_of_the_gate(
    tmp_path: Path, metric: str, gain: float, words: str
) -> None:
    world = Partial(train=8, val=4, test=8, rules=2)
    test = {"enabled": True, "placebo": True}
    trains = {"num_epochs": 2}
    done = await run(tmp_path, environment=world, gate={"metric": metric}, train=trains, test=test)
    assert done.summary.verdict.startswith(words)
    assert "does as well" not in done.summary.verdict
    claim = done.summary.claim
    assert (claim.confirmed, claim.improvement.mean) == (True, pytest.approx(gain))
    assert {round(g.mean, 9) for g in done.summary.improvements} == {gain}


async def test_a_placebo_has_the_length_of_the_best(tmp_path: Path) -> None:
    done = await run(tmp_path, test={"enabled": True, "placebo": True})
    shown = {text for text, message in done.actor.asked if message in inputs(Split.test)}
    (other,) = shown - {"", done.best}
    assert len(other) == len(done.best) > 0
    names = ["baseline", "placebo", "best", "final"]
    assert [s.name for s in done.summary.scores if s.split is Split.test] == names
    assert [s.name for s in done.summary.scores if s.split is Split.val] == ["baseline", "best", "final"]
    assert {g.name for g in done.summary.improvements} == {"best", "final"}


async def test_a_failure_at_the_end_leaves_out_what_it_hits_alone(tmp_path: Path) -> None:
    test = inputs(Split.test, DIVIDED["environment"])

    def down(skill: Skill, message: str, times: int) -> str | None:
        if message in test and skill.text and "HARM" not in skill.text:
            raise ProviderDown("models.target: no answer")
        return harmed(skill, message, times)

    done = await run(tmp_path, actor=Actor(down), script=playing(HARM), **DIVIDED)
    assert done.summary.status == "completed"
    measured = {(s.name, s.split.value) for s in done.summary.scores}
    assert measured == {
        *((name, "val") for name in ("baseline", "best", "final")),
        *((name, "test") for name in ("baseline", "final")),
    }
    (missing,) = done.summary.missing
    assert missing.startswith("best on test: only 0 of 4 rollouts could be measured")
    assert "no answer" in missing
    healthy = await run(tmp_path, actor=Actor(harmed), script=playing(HARM), **DIVIDED)
    assert healthy.summary.missing == ()
    assert len(healthy.summary.scores) == 6
    assert healthy.summary.test_openings == 1
    assert healthy.records == done.records


async def test_every_opening_is_counted(tmp_path: Path) -> None:
    """An extension that learned nothing opens the split again; the same end, started again, does not.

    A placebo that is not measured opens nothing.
    """
    counts = []
    for epochs in (1, 1, 2, 2):
        done = await run(tmp_path, script=playing(IDLE), train={"num_epochs": epochs}, **TEST)
        counts.append(done.summary.test_openings)
    assert counts == [1, 1, 2, 2]
    assert [e.count for e in done.events if e.kind == "test_split_opened"] == [1, 2]
    for test, count in (({"placebo": True}, 2), ({"null_answers": True}, 3)):
        more: dict[str, Any] = {"test": {"enabled": True, **test}}
        done = await run(tmp_path, script=playing(IDLE), train={"num_epochs": 2}, **more)
        assert done.summary.test_openings == count


async def test_a_measurement_by_hand_is_an_opening_too(tmp_path: Path) -> None:
    first = await run(tmp_path, **TEST)
    assert first.summary.test_openings == 1
    models: dict[str, Any] = {"target": Actor(), "optimizer": ScriptedLLM(toy_optimizer())}
    trainer = Trainer(settings(tmp_path, **TEST), environment=WORLD, **models)
    await trainer.evaluate(Skill(text="x"), Split.test)
    assert (await run(tmp_path, **TEST)).summary.test_openings == 2


async def test_a_run_that_fails_leaves_the_split_sealed(tmp_path: Path) -> None:
    train = inputs(Split.train)

    def down(skill: Skill, message: str, times: int) -> None:
        if message in train and skill.text:
            raise ProviderDown("models.target: no answer")

    done = await run(tmp_path, actor=Actor(down), **TEST)
    assert (done.summary.status, done.summary.steps) == ("failed", 1)
    assert done.summary.test_openings == 0
    assert not inputs(Split.test) & {message for _, message in done.actor.asked}
