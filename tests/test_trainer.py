"""The trainer: what a run promises, whatever happens on the way; lists of items, and steps of several batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import toy_runs
from reflact import Item, Trainer, events, read_run
from reflact.config.training import TrainerConfig
from reflact.data import plan_epoch
from reflact.environments import Grader
from reflact.errors import ProviderDown, RunConflict
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import RunSummary
from reflact.stages.reply_models import AnalystReply
from reflact.store.runs import open_store
from reflact.testing import TOY_RULES, ScriptedLLM, ToyTarget, append_reply, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Skill, Split
from toy_runs import LINES, WORLD, Actor, build_trainer, list_messages, playing, run


def settings(folder: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a short toy run with its ends, with sections replaced in part."""
    ends: dict[str, Any] = {
        "slow_update": {"enabled": True},
        "meta_skill": {"enabled": True},
        "test": {"enabled": True},
    }
    for name, values in {"train": {"num_epochs": 2}, "reflect": {"minibatch_size": 2}, **ends}.items():
        sections[name] = {**values, **sections.get(name, {})}
    return toy_runs.settings(folder, **sections)


def losing(*messages: str) -> Actor:
    def act(_: Skill, message: str, __: int) -> None:
        if message in messages:
            raise ProviderDown(f"models.target: no answer to {message}")

    return Actor(act)


def turning(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Add a line in the first step, and replace it by another one, and back, in each further one."""
    if not issubclass(reply_type, AnalystReply):
        return toy_optimizer()(prompt, reply_type, call_id)
    reply = append_reply(reply_type, LINES["double"])
    if call_id.step > 1:
        old, new = (LINES["double"], "- A line.")[:: 1 if call_id.step % 2 == 0 else -1]
        edits = reply["edits"]
        assert isinstance(edits, list)
        reply["edits"] = [{**dict(edit), "op": "replace", "target": old, "content": new} for edit in edits]
    return reply


@pytest.mark.parametrize("is_gated", [True, False], ids=["gate", "no gate"])
async def test_a_document_that_comes_back(tmp_path: Path, is_gated: bool) -> None:
    config = toy_runs.settings(
        tmp_path,
        gate={"enabled": is_gated, "policy": "strict"},
        train={"num_epochs": 4, "batch_size": 8},
        reflect={"minibatch_size": 2},
    )
    actor = Actor()
    await build_trainer(config, target=actor, script=turning).train()
    records = (await read_run(tmp_path)).steps
    actions = [record.verdict.action for record in records]
    assert len(set(actor.asked)) == len(actor.asked), "no rollout is made twice"
    if is_gated:
        assert "force_accept" not in actions
        assert actions.count("no_change") >= 1
        return
    assert actions == ["force_accept"] * 4
    assert records[0].candidate_hash == records[2].candidate_hash != records[1].candidate_hash
    scores = [record.verdict.candidate_score for record in records]
    assert (scores[2], scores[3]) == (scores[0], scores[1])
    assert scores[0] != scores[1]
    assert [record.current.number for record in records] == [1, 2, 3, 4]
    assert [record.best.number for record in records] == [1] * 4, "an equal score is not better"
    assert [record.n_rollouts for record in records] == [12, 12, 8, 0], "later ones are of train items only"


async def test_unmeasured_items_are_no_zeros(tmp_path: Path) -> None:
    train = WORLD.items(Split.train)
    target = losing(str(train[0].input), str(train[1].input))
    summary = await build_trainer(settings(tmp_path, train={"batch_size": 8}), target=target).train()
    assert summary.status == "completed"
    for record in (await read_run(tmp_path)).steps:
        assert record.rollout.unmeasured == (train[0].id, train[1].id)
        assert record.rollout.n == 6
        assert not {train[0].id, train[1].id} & {i for report in record.reports for i in report.item_ids}


@pytest.mark.parametrize("lost", [1, 4])
async def test_too_few_measured_items_decide_nothing(tmp_path: Path, lost: int) -> None:
    val = WORLD.items(Split.val)
    target = losing(*(str(item.input) for item in val[:lost]))
    summary = await build_trainer(settings(tmp_path), target=target).train()
    assert (summary.status, summary.steps, summary.best) == ("failed", 0, None)
    assert f"only {4 - lost} of 4 rollouts could be measured" in str(summary.reason)
    assert "no answer to" in str(summary.reason)
    assert (await build_trainer(settings(tmp_path)).train()).status == "completed"


async def test_exports_match_the_database(tmp_path: Path) -> None:
    config = settings(tmp_path)
    summary = await build_trainer(config).train()
    async with open_store(tmp_path / "run.db") as store:
        versions = await store.versions(summary.run_id)
        texts = {v.number: (await store.skill(v.skill_hash)).text for v in versions}
        stored = await store.summary(summary.run_id)
    files = {f"v{n:04}.md": text for n, text in texts.items()}
    assert len(files) > 2
    assert {p.name: p.read_text("utf-8") for p in (tmp_path / "skills").iterdir()} == files
    assert (tmp_path / "best_skill.md").read_text("utf-8") == texts[summary.best.number]
    assert RunSummary.model_validate_json((tmp_path / "summary.json").read_text("utf-8")) == stored == summary

    for path in [*(tmp_path / "skills").iterdir(), tmp_path / "best_skill.md"]:
        path.unlink()
    (tmp_path / "skills" / ".v0001.md.part").write_text("half", encoding="utf-8")
    await build_trainer(config).train()
    assert {p.name: p.read_text("utf-8") for p in (tmp_path / "skills").iterdir()} == files
    assert (tmp_path / "best_skill.md").is_file()


async def test_the_test_split_is_sealed(tmp_path: Path) -> None:
    config = settings(tmp_path)
    test = list_messages(Split.test)
    target = Actor()
    summary = await build_trainer(config, target=target).train()
    opened = [message in test for _, message in target.asked]
    assert any(opened)
    first = opened.index(True)
    train_or_val = [n for n, is_test in enumerate(opened) if not is_test]
    assert max(train_or_val) < first
    assert summary.test_openings == 1
    assert (await build_trainer(config).train()).test_openings == 1
    opened_at = [
        event for event in (await read_run(tmp_path)).events if isinstance(event, events.TestSplitOpened)
    ]
    assert len(opened_at) == 1


async def test_measuring_a_document_leaves_the_run_as_it_ended(tmp_path: Path) -> None:
    config = settings(tmp_path)
    await build_trainer(config).train()
    changed = {**config, "train": {**config["train"], "num_epochs": 3}}
    await build_trainer(changed).evaluate(Skill(text="- another"))
    async with open_store(tmp_path / "run.db") as store:
        row, measured = await store.runs()
    assert row.status == "completed"
    assert TrainerConfig.model_validate(row.config).train.num_epochs == 2
    assert (measured.status, measured.evaluation.run_id) == ("completed", row.run_id)


def pairs(first: int, count: int) -> list[tuple[str, str]]:
    names = list(TOY_RULES)[:2]
    return [(f"{names[n % 2]} {n}", TOY_RULES[names[n % 2]].answer(n)) for n in range(first, first + count)]


def is_equal(item: Item, answer: str) -> bool:
    return answer == item.reference


SAMENESS = playing((AnalystReply, lambda kind, _: append_reply(kind, "Answer.")))
"""An optimizer whose edits help nobody."""


def train_on_items(out: Path, grade: Grader) -> Trainer:
    return Trainer.from_items(
        train=pairs(10, 4),
        val=pairs(20, 4),
        test=[Item(id="t", input="double 40", reference="80")],
        grade=grade,
        target=ToyTarget(),
        optimizer=ScriptedLLM(SAMENESS),
        out_dir=out,
        train__num_epochs=1,
    )


def give_points(points: float) -> Grader:
    return lambda item, answer: points


async def test_points_of_a_hundred_end_the_run_at_the_first_of_them(tmp_path: Path) -> None:
    summary = await train_on_items(tmp_path, give_points(100)).train()
    assert (summary.status, summary.steps) == ("failed", 0)
    assert "the grader returned 100 for item" in str(summary.reason)


async def test_a_corrected_function_does_not_find_the_scores_of_the_one_before(tmp_path: Path) -> None:
    first = await train_on_items(tmp_path, give_points(1)).train()
    again = await train_on_items(tmp_path, give_points(1)).train()
    assert (first.status, again.run_id) == ("completed", first.run_id)
    with pytest.raises(RunConflict, match=r"grader\.grader.*choose another out_dir"):
        await train_on_items(tmp_path, give_points(0)).train()


async def test_patience_ends_a_run_that_no_edit_helps(tmp_path: Path) -> None:
    done = await run(tmp_path, script=SAMENESS, train={"num_epochs": 3, "patience": 2})
    reason = "train.patience is 2, and the last 2 steps accepted no edit"
    assert (done.summary.status, done.summary.reason, done.summary.steps) == ("completed", reason, 2)
    assert [e.reason for e in done.events if isinstance(e, events.TrainingStopped)] == [reason]
    again = await run(tmp_path, script=SAMENESS, train={"num_epochs": 3, "patience": 2})
    assert (again.events, again.summary.reason, again.calls) == (done.events, reason, [])
    more = await run(tmp_path, script=SAMENESS, train={"num_epochs": 3, "patience": 4})
    assert (more.summary.run_id, more.summary.steps) == (done.summary.run_id, 4)
    none = await run(tmp_path, script=SAMENESS, train={"num_epochs": 3})
    assert (none.summary.run_id, none.summary.steps, none.summary.reason) == (done.summary.run_id, 6, None)


async def test_a_step_takes_several_batches(tmp_path: Path) -> None:
    done = await run(
        tmp_path,
        train={"batch_size": 2, "accumulation": 2},
        reflect={"minibatch_size": 1},
        select={"max_edits": 4, "min_edits": 4},
    )
    train = [i.id for i in WORLD.items(Split.train)]
    plan = plan_epoch(train, epoch=1, seed=42, batch_size=2, accumulation=2)
    assert len(done.records) == len(plan) == 2
    for record, batches in zip(done.records, plan, strict=True):
        assert record.item_ids == tuple(i for batch in batches for i in batch)
        for n, batch in enumerate(batches):
            read = [i for r in record.reports if r.batch == n for i in r.item_ids]
            assert sorted(read) == sorted(batch)
        assert record.rollout.n == 4
        assert record.n_failures == sum(r.source_type == "failure" for r in record.reports)
    first = done.records[0]
    types = {i.id: i.task_type for i in WORLD.items(Split.train)}
    assert len(first.merged.patch.edits) == len({types[i] for i in first.item_ids})
    assert {e.merge_level for e in first.merged.patch.edits} == {1}
    assert done.actions[0] == "accept_new_best"
