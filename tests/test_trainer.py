"""The trainer: what a run promises, whatever happens on the way; lists of items, and steps of several batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

import toy_runs
from reflact import Item, Trainer, __version__, events, read_run
from reflact.config.training import TrainerConfig
from reflact.data import plan_epoch
from reflact.environments import Grader
from reflact.errors import (
    ConfigError,
    DataError,
    ProviderDown,
    RunConflict,
)
from reflact.messages import CallId, CallReservation, RenderedPrompt, ReplyModel, StoredResponse
from reflact.proposers import Rewrite, StepBudget, StepEvidence
from reflact.records import RunSummary, Usage
from reflact.stages.reply_models import AnalystReply
from reflact.store.runs import open_store
from reflact.testing import TOY_RULES, ScriptedLLM, ToyEnvironment, ToyTarget, append_reply, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from reflact.types import Skill, Split
from toy_runs import LINES, WORLD, Actor, build_trainer, playing, run


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
    """Return a toy target whose provider fails for some messages."""

    def act(_: Skill, message: str, __: int) -> None:
        if message in messages:
            raise ProviderDown(f"models.target: no answer to {message}")

    return Actor(act)


async def broken_off(config: Mapping[str, Any], *, after: int, script: Script | None = None) -> int:
    """Train until the target has answered ``after`` times, cancel, and return the steps committed."""
    with anyio.CancelScope() as scope:

        def cancel(*_: object) -> None:
            if len(target.asked) == after:
                scope.cancel()

        target = Actor(cancel)
        await build_trainer(config, target=target, script=script).train()
    assert scope.cancelled_caught
    return len((await read_run(config["out_dir"])).steps)


NONSENSE = playing((AnalystReply, lambda kind, _: append_reply(kind, "- nonsense")))
"""An optimizer that proposes one line, whatever the feedback."""


async def test_the_step_buffer_survives(tmp_path: Path) -> None:
    """An analyst that is asked after a restart within the epoch is told of the epoch's earlier steps.

    Neither the restart nor steps without a candidate shift the schedule of the edit budget.
    """
    sizes = {"max_edits": 4, "min_edits": 1, "scheduler": "linear"}
    config = settings(tmp_path, train={"batch_size": 2, "num_epochs": 1}, select=sizes)
    steps = await broken_off(config, after=14, script=NONSENSE)
    assert 0 < steps < 4
    optimizer = ScriptedLLM(NONSENSE)
    await Trainer(config, environment=WORLD, target=ToyTarget(), optimizer=optimizer).train()
    first = optimizer.calls[0]
    assert first.call_id.step == steps + 1
    assert f"step {steps}: 2 of 2 cases failed" in first.prompt.messages[1].content
    records = (await read_run(tmp_path)).steps
    assert [r.chosen.budget for r in records] == [4, 3, 2, 1]
    assert "no_change" in {r.verdict.action for r in records}


async def test_without_a_gate_everything_is_accepted(tmp_path: Path) -> None:
    """Where the gate is off candidates are measured and accepted, and the best is still the best measured."""
    summary = await build_trainer(settings(tmp_path, gate={"enabled": False})).train()
    records = (await read_run(tmp_path)).steps
    assert {r.verdict.action for r in records} <= {"force_accept", "no_change", "no_patches"}
    assert summary.final is not None
    assert summary.best.score == max(r.verdict.candidate_score or 0 for r in records)
    assert summary.best.number > 0


def turning(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Add a line in the first step, and replace it by another one, and back, in each further one."""
    if not issubclass(reply_type, AnalystReply):
        return toy_optimizer()(prompt, reply_type, call_id)  # type: ignore[return-value]
    reply = append_reply(reply_type, LINES["double"])
    if call_id.step > 1:
        old, new = (LINES["double"], "- A line.")[:: 1 if call_id.step % 2 == 0 else -1]
        edits = reply["edits"]
        assert isinstance(edits, list)
        reply["edits"] = [{**dict(edit), "op": "replace", "target": old, "content": new} for edit in edits]
    return reply


class Turning:
    """Proposes one of two documents after the other."""

    identity = "turning/1"

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> Sequence[Rewrite]:
        """Return the other document."""
        line = LINES["double"]
        return [Rewrite(document=f"- A line.\n\n{'' if line in skill.text else line}\n")]


@pytest.mark.parametrize("proposer", [None, Turning()], ids=["edits", "documents"])
@pytest.mark.parametrize("is_gated", [True, False], ids=["gate", "no gate"])
async def test_a_document_that_comes_back(tmp_path: Path, is_gated: bool, proposer: Turning | None) -> None:
    """Without a gate it is accepted with the score that it had, and is not measured again; a gate drops it."""
    config = settings(
        tmp_path,
        gate={"enabled": is_gated, "policy": "strict"},
        train={"num_epochs": 4, "batch_size": 8},
        slow_update={"enabled": False},
        meta_skill={"enabled": False},
        test={"enabled": False},
    )
    actor = Actor()
    await build_trainer(config, target=actor, script=turning, proposer=proposer).train()
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
    """Items that the provider failed are left out of means, failures and minibatches, and are noted."""
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
    """An initial skill whose measurement is below the coverage ends the run as failed, never as a decision."""
    val = WORLD.items(Split.val)
    target = losing(*(str(item.input) for item in val[:lost]))
    summary = await build_trainer(settings(tmp_path), target=target).train()
    assert (summary.status, summary.steps, summary.best) == ("failed", 0, None)
    assert f"only {4 - lost} of 4 rollouts could be measured" in str(summary.reason)
    assert "no answer to" in str(summary.reason)
    assert (await build_trainer(settings(tmp_path)).train()).status == "completed"


async def test_exports_match_the_database(tmp_path: Path) -> None:
    """best_skill.md, the versions and summary.json hold what the database holds, and come back if lost."""
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


async def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    """Another configuration in a run's folder is refused before any call, naming the keys that differ."""
    first = await build_trainer(settings(tmp_path)).train()
    target = Actor()
    with pytest.raises(RunConflict, match=r"train\.batch_size was 4 and is now 2"):
        await build_trainer(settings(tmp_path, train={"batch_size": 2}), target=target).train()
    assert target.asked == []
    again = await build_trainer(settings(tmp_path)).train()
    assert again.run_id == first.run_id


async def test_the_test_split_is_sealed(tmp_path: Path) -> None:
    """No test item is rolled out before the last step is committed, and the opening is counted once."""
    config = settings(tmp_path)
    test = {str(i.input) for i in WORLD.items(Split.test)}
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


async def test_the_test_split_may_stay_closed(tmp_path: Path) -> None:
    """With test.enabled false no test item is rolled out and no opening counted."""
    test = {str(i.input) for i in WORLD.items(Split.test)}
    target = Actor()
    summary = await build_trainer(settings(tmp_path, test={"enabled": False}), target=target).train()
    assert not [message for _, message in target.asked if message in test]
    assert summary.test_openings == 0
    assert {s.split for s in summary.scores} == {Split.val}


async def test_a_run_needs_no_test_split(tmp_path: Path) -> None:
    """Without test items a run closes with a claim on validation items, and measuring on test is an error."""
    environment = ToyEnvironment(train=8, val=4, test=0)
    models: dict[str, Any] = {"target": ToyTarget(), "optimizer": ScriptedLLM(toy_optimizer())}
    trainer = Trainer(settings(tmp_path), environment=environment, **models)
    summary = await trainer.train()
    assert summary.status == "completed"
    assert summary.test_openings == 0
    assert {s.split for s in summary.scores} == {Split.val}
    with pytest.raises(DataError, match="no test split"):
        await trainer.evaluate(Skill(text=""), Split.test)


async def test_measuring_a_document_leaves_the_run_as_it_ended(tmp_path: Path) -> None:
    """An evaluation in a completed run's folder changes neither its status nor its configuration."""
    config = settings(tmp_path)
    await build_trainer(config).train()
    changed = {**config, "train": {**config["train"], "num_epochs": 3}}
    await build_trainer(changed).evaluate(Skill(text="- another"))
    async with open_store(tmp_path / "run.db") as store:
        (row,) = await store.runs()
    assert row.status == "completed"
    assert TrainerConfig.model_validate(row.config).train.num_epochs == 2


async def test_a_measurement_begins_with_what_the_run_used_before(tmp_path: Path) -> None:
    """The first event of a measurement in a run's folder has the usage of that run, before any call."""
    config = settings(tmp_path)
    await build_trainer(config).train()
    spent = Usage(calls=7, input_tokens=5)
    async with open_store(tmp_path / "run.db") as store:
        (row,) = await store.runs()
        call = CallReservation(
            key="k", run_id=row.run_id, call_id="c", role="target", purpose="rollout", endpoint="e", model="m"
        )
        await store.reserve(call)
        await store.store_response(StoredResponse(key="k", text="", usage=spent), call)
    told: list[events.Event] = []

    async def listen(event: events.Event) -> None:
        told.append(event)

    await build_trainer(config).evaluate(Skill(text="- another"), on_event=listen)
    first = next(event for event in told if isinstance(event, events.BudgetUpdated))
    assert first.usage == spent
    progressed = next(event for event in told if isinstance(event, events.StageProgressed))
    assert told.index(first) < told.index(progressed)


def pairs(first: int, count: int) -> list[tuple[str, str]]:
    """Return questions and answers of the toy world."""
    names = list(TOY_RULES)[:2]
    return [(f"{names[n % 2]} {n}", TOY_RULES[names[n % 2]].answer(n)) for n in range(first, first + count)]


def is_equal(item: Item, answer: str) -> bool:
    """Grade to the letter."""
    return answer == item.reference


def train_on_items(
    out: Path, train: list[Any] | None = None, grade: Grader = is_equal, **config: object
) -> Trainer:
    """Return a trainer on lists, with stand-ins for both models."""
    return Trainer.from_items(
        train=train or pairs(10, 4),
        val=pairs(20, 4),
        test=[Item(id="t", input="double 40", reference="80")],
        grade=grade,
        target=ToyTarget(),
        optimizer=ScriptedLLM(playing((AnalystReply, lambda kind, _: append_reply(kind, "Answer.")))),
        out_dir=out,
        **config,
    )


async def test_lists_and_a_function_are_enough(tmp_path: Path) -> None:
    """A run on pairs, items and a function completes, and its summary names the version."""
    summary = await train_on_items(tmp_path, train__num_epochs=2, train__batch_size=4).train()
    assert (summary.status, summary.version) == ("completed", __version__)
    assert (summary.steps, summary.reason) == (1, "the document solves all 4 validation items")


def give_points(points: float) -> Grader:
    """Return a function that gives so many points for any answer."""

    def grade(item: Item, answer: str) -> float:
        return points

    return grade


async def test_a_corrected_function_does_not_find_the_scores_of_the_one_before(tmp_path: Path) -> None:
    """Two functions of one name and place are told apart by their values, so a start with the second is refused."""
    first = await train_on_items(tmp_path, grade=give_points(1), train__num_epochs=1).train()
    again = await train_on_items(tmp_path, grade=give_points(1), train__num_epochs=1).train()
    assert (first.status, again.run_id) == ("completed", first.run_id)
    with pytest.raises(RunConflict, match=r"grader\.grader.*choose another out_dir"):
        await train_on_items(tmp_path, grade=give_points(0), train__num_epochs=1).train()


async def test_points_of_a_hundred_end_the_run_at_the_first_of_them(tmp_path: Path) -> None:
    """The reason names what the function returned, before a step is paid."""
    trainer = train_on_items(tmp_path, grade=give_points(100))
    summary = await trainer.train()
    assert (summary.status, summary.steps) == ("failed", 0)
    assert "the grader returned 100 for item" in str(summary.reason)


async def test_a_score_that_is_not_a_number_is_told_while_the_run_goes_on(tmp_path: Path) -> None:
    """NaN is no fault of the whole function, so one item is unmeasured, with a warning that names it."""

    def grade(item: Item, answer: str) -> float:
        return math.nan if item.reference == "80" else 1.0

    trainer = train_on_items(tmp_path, grade=grade, train__num_epochs=1)
    warnings = [event.message async for event in trainer.stream() if isinstance(event, events.WarningIssued)]
    assert len([text for text in warnings if "the grader returned NaN for item 't'" in text]) == 1


async def test_a_pair_given_twice_is_refused(tmp_path: Path) -> None:
    """An item that occurs twice is refused when the run starts."""
    with pytest.raises(DataError, match="used 2 times"):
        await train_on_items(tmp_path, pairs(10, 2) * 2).train()


async def test_what_is_no_item_is_refused(tmp_path: Path) -> None:
    """A mapping is neither an item nor a pair, so its keys are not taken for a question and an answer."""
    with pytest.raises(
        DataError, match="an item is an Item or a pair of an input and its right answer, not "
    ):
        await train_on_items(tmp_path, [{"input": "double 10", "reference": "20"}]).train()


def test_an_unknown_key_is_refused_at_once(tmp_path: Path) -> None:
    """Constructing a trainer checks the names of configuration keys."""
    with pytest.raises(ConfigError, match="num_epoch"):
        train_on_items(tmp_path, train__num_epoch=2)


def test_models_are_named_by_text(tmp_path: Path) -> None:
    """Text in place of a target or an optimizer names a model of the configuration."""
    named = Trainer.from_items(
        train=pairs(10, 2),
        val=pairs(20, 2),
        test=pairs(30, 2),
        grade=lambda item, answer: answer == item.reference,
        target="small",
        optimizer="large",
        out_dir=tmp_path,
    )
    models = named.config.models
    assert (models.target.model, models.optimizer.model) == ("small", "large")


SAMENESS = playing((AnalystReply, lambda kind, _: append_reply(kind, "Answer.")))
"""An optimizer whose edits help nobody."""


async def test_patience_ends_a_run_that_no_edit_helps(tmp_path: Path) -> None:
    """After so many steps without an accepted edit the run completes with a reason; more patience goes on."""
    done = await toy_runs.run(tmp_path, script=SAMENESS, train={"num_epochs": 3, "patience": 2})
    reason = "train.patience is 2, and the last 2 steps accepted no edit"
    assert (done.summary.status, done.summary.reason, done.summary.steps) == ("completed", reason, 2)
    assert [e.reason for e in done.events if isinstance(e, events.TrainingStopped)] == [reason]
    again = await toy_runs.run(tmp_path, script=SAMENESS, train={"num_epochs": 3, "patience": 2})
    assert (again.events, again.summary.reason, again.calls) == (done.events, reason, [])
    more = await toy_runs.run(tmp_path, script=SAMENESS, train={"num_epochs": 3, "patience": 4})
    assert (more.summary.run_id, more.summary.steps) == (done.summary.run_id, 4)
    none = await toy_runs.run(tmp_path, script=SAMENESS, train={"num_epochs": 3})
    assert (none.summary.run_id, none.summary.steps, none.summary.reason) == (done.summary.run_id, 6, None)


ENDS = (events.BaselineMeasured, events.StepCommitted, events.EpochCommitted, events.PromotionJudged)


async def test_patience_ends_a_run_at_the_same_step_after_any_stop(tmp_path: Path) -> None:
    """The run completes with a reason, also if it was stopped after each of its commits."""

    async def train(folder: Path, *, stops: bool) -> RunSummary:
        config = toy_runs.settings(
            folder,
            train={"num_epochs": 9, "batch_size": 2, "patience": 3},
            slow_update={"enabled": True, "samples": 4},
            test={"enabled": True},
        )
        while True:
            trainer = build_trainer(config)
            async with trainer.stream() as stream:
                async for event in stream:
                    if stops and isinstance(event, (*ENDS, events.TrainingStopped)):
                        break
                    if isinstance(event, events.RunFinished):
                        return event.summary

    whole = await train(tmp_path / "whole", stops=False)
    assert whole.status == "completed"
    assert (whole.reason or "").startswith("train.patience is 3, and the last 3 steps")
    assert 0 < whole.steps < 36
    assert whole.score("best", Split.test) is not None
    pieces = await train(tmp_path / "pieces", stops=True)
    assert (pieces.reason, pieces.steps, pieces.scores) == (whole.reason, whole.steps, whole.scores)
    async with (
        open_store(tmp_path / "whole" / "run.db") as one,
        open_store(tmp_path / "pieces" / "run.db") as two,
    ):
        assert await one.events(whole.run_id) == await two.events(pieces.run_id)


async def test_a_step_takes_several_batches(tmp_path: Path) -> None:
    """Two batches of two make steps of four: all are rolled out, read apart and merged into one candidate."""
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


async def test_an_epoch_deals_every_item_and_refills_the_last_step(tmp_path: Path) -> None:
    """Six items in steps of two batches of two: the fourth batch is dealt from a fresh shuffle."""
    environment = ToyEnvironment(train=6, val=4, test=4)
    done = await run(tmp_path, environment=environment, train={"batch_size": 2, "accumulation": 2})
    assert len(done.records) == 2
    dealt = Counter(i for record in done.records for i in record.item_ids)
    assert set(dealt) == {item.id for item in environment.items(Split.train)}
    assert sum(dealt.values()) == 8
