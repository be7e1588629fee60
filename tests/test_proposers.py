"""Proposers: one rewrite from all evidence, the best of several, and objects of the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pure_world import PureNetwork, differences, left_by, write_world
from pure_world import settings as world_settings
from reflact import Trainer, read_run
from reflact.config.loading import config_identity, load_config
from reflact.config.training import PromptsConfig
from reflact.errors import ConfigError, ContextOverflow
from reflact.llm import CallId, Message, RenderedPrompt, ReplyModel, Text
from reflact.prompts import load_prompts
from reflact.proposers import NoReply, Rewrite, StepBudget, StepEvidence
from reflact.reporting.summary import format_step
from reflact.stages.reply_models import check_document_rules, one_shot_reply_type
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from reflact.types import Item, Skill
from toy_runs import LINES, WORLD, Actor, build_trainer, document, run, settings, shown_to

STRICT = {"policy": "strict"}
GUARDED = "Heed the rules.\n\n<!-- SLOW_UPDATE_START -->\nTake your time.\n<!-- SLOW_UPDATE_END -->\n"


def writing(*documents: str | Exception | None) -> Script:
    """Return a script whose n-th rewrite of each step is the n-th document; None is an invalid reply."""
    usual = toy_optimizer()

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        said = usual(prompt, reply_type, call_id)
        if call_id.purpose != "one_shot" or not isinstance(said, dict):
            return said  # type: ignore[return-value]
        text = documents[int(call_id.part)]
        return {**said, "document": text} if isinstance(text, str) else text or "no document"

    return answer


# ------------------------------------------------------------------------------------------- one rewrite


async def test_one_call_rewrites_the_document_from_all_cases_of_the_step(tmp_path: Path) -> None:
    """A step asks once, shows failures and successes, and its record holds reasoning, patterns and text."""
    done = await run(
        tmp_path,
        initial=document("double"),
        proposer={"name": "one_shot"},
        train={"batch_size": 4, "num_epochs": 2},
        reflect={"minibatch_size": 1},
        gate=STRICT,
    )
    assert {call.call_id.purpose for call in done.calls} == {"one_shot"}
    assert len(done.calls) == len(done.records) == 4
    first, shown = done.records[0], done.shown("one_shot")
    assert "Cases in which the agent failed:\n\n<case_1>" in shown[0]
    assert "Cases in which the agent succeeded:\n\n<case_4>" in shown[0]
    assert "missing rule: square" in shown[0]
    assert "Earlier attempts in this round" in shown[1]
    assert first.verdict.action == "accept_new_best"
    assert done.texts[first.candidate_hash].strip() == document(*LINES).split("\n- reverse")[0].strip()
    (rewrite,) = first.rewrites
    assert rewrite.reasoning == "As seen."
    assert rewrite.document is not None
    assert first.patterns == rewrite.patterns
    assert [p.item_ids for p in first.patterns] == [(first.patterns[0].item_ids[0],)] * 3
    assert done.summary.best is not None
    assert done.summary.best.score == 1


async def test_the_stages_are_the_default_and_leave_the_identity_as_it_was(tmp_path: Path) -> None:
    """Without a proposer the identity has no key of one; another proposer or number is another run."""
    keys = [
        {k: v for k, v in config_identity(load_config({"proposer": p})).items() if k.startswith("proposer")}
        for p in ({}, {"name": "reflact", "n": 9}, {"name": "one_shot"}, {"name": "best_of_n", "n": 2})
    ]
    assert keys[:2] == [{}, {}]
    assert keys[2:] == [
        {"proposer.name": "one_shot", "proposer.options": {}, "proposer.n": 4},
        {"proposer.name": "best_of_n", "proposer.options": {}, "proposer.n": 2},
    ]
    done = await run(tmp_path, gate=STRICT)
    assert "rewrites" not in done.records[0].model_dump_json()


async def test_a_rewrite_sees_the_memory_and_no_successes_if_they_are_left_out(tmp_path: Path) -> None:
    """The optimizer's memory of earlier epochs is shown; ``failure_only`` leaves out cases that succeeded."""
    done = await run(
        tmp_path,
        initial=document("double"),
        proposer={"name": "one_shot"},
        train={"num_epochs": 3},
        reflect={"failure_only": True},
        meta_skill={"enabled": True},
        script=writing("Nothing of use."),
        gate={"enabled": False},
    )
    shown = done.shown("one_shot")
    assert "What earlier epochs taught" in shown[-1]
    assert not any("the agent succeeded" in text for text in shown)
    assert all("the agent failed" in text for text in shown)


async def test_without_a_valid_reply_the_step_changes_nothing(tmp_path: Path) -> None:
    """The verdict says ``no_rewrite`` and why, and the fallback is recorded."""
    done = await run(tmp_path, proposer={"name": "one_shot"}, script=writing(None))
    assert set(done.actions) == {"no_rewrite"}
    record = done.records[0]
    assert "The proposer wrote no document" in record.verdict.reason
    assert record.rewrites[0].reason in record.verdict.reason
    assert [fallback.label for fallback in record.merged.fallbacks] == ["proposer/0"]


async def test_cases_that_do_not_fit_the_context_are_shortened_once(tmp_path: Path) -> None:
    """All cases get the tokens of their minibatches; if they do not fit, those of one analyst at most."""
    lengths: list[int] = []
    usual = toy_optimizer()

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        lengths.append(len(prompt.messages[-1].content))
        return ContextOverflow("too long") if lengths[-1] > 9000 else usual(prompt, reply_type, call_id)  # type: ignore[return-value]

    done = await run(
        tmp_path,
        actor=Actor(lambda *_: "word " * 1000),
        proposer={"name": "one_shot"},
        reflect={"trajectory_tokens": 1500, "minibatch_size": 1},
        script=answer,
    )
    assert lengths[0] > 4 * 4000
    assert lengths[1] < 9000
    assert done.records[0].rewrites[0].document is not None


REFERENCE = "SELECT COUNT(*) FROM airports WHERE state = 'OH'"
ITEMS = (
    Item(id="ohio", input="How many airports are in Ohio?", reference=REFERENCE),
    Item(id="iowa", input="How many airports are in Iowa?", reference=REFERENCE.replace("OH", "IA")),
)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (f"Heed the rules.\n\nIn Ohio: {REFERENCE}\n\nIn Iowa: {ITEMS[1].reference}", True),
        (f"How many airports are in Ohio? {REFERENCE}", True),
        (
            f"Write a name as two capital letters, never in full, as the column holds codes: {REFERENCE}",
            False,
        ),
        ("Write states as two letters.", False),
        ("Heed the rules.", False),
    ],
)
def test_a_document_that_only_records_answers_is_sent_back(text: str, refused: bool) -> None:
    """New lines that quote references need rules beside them; old lines count for nothing."""
    skill = Skill(text="Heed the rules.\n")
    if not refused:
        check_document_rules(text, skill, ITEMS)
        return
    with pytest.raises(ValueError, match="records the answers of cases 1"):
        check_document_rules(text, skill, ITEMS)


async def test_a_small_model_rewrites_without_reasoning(tmp_path: Path) -> None:
    """The small profile asks for patterns with counts and the document alone, of failures and successes alike."""
    done = await run(
        tmp_path,
        initial=document("double"),
        proposer={"name": "one_shot"},
        prompts={"profile": "small"},
        train={"batch_size": 4},
        gate=STRICT,
    )
    first, call = done.records[0], done.asked("one_shot")[0]
    assert (
        call.prompt.version == load_prompts(PromptsConfig(profile="small")).prompts["one_shot"].header.version
    )
    assert "Cases in which the agent succeeded:" in shown_to(call)
    assert first.verdict.action == "accept_new_best"
    (rewrite,) = first.rewrites
    assert rewrite.reasoning == ""
    assert rewrite.patterns
    assert (
        one_shot_reply_type(failures=0).model_validate({"patterns": [], "document": "Heed."}).document
        == "Heed."
    )


# ---------------------------------------------------------------------------------------- several rewrites


async def test_the_best_of_several_rewrites_goes_to_the_gate(tmp_path: Path) -> None:
    """Each is rolled out on the step's items once, and the record ranks them with their means."""
    texts = ("- nothing.\n", document("double"), document("double", "square"), document("square", "double"))
    done = await run(
        tmp_path,
        proposer={"name": "best_of_n", "n": 5},
        train={"batch_size": 8},
        script=writing(*texts, None),
        gate=STRICT,
    )
    (record,) = done.records
    assert [rewrite.number for rewrite in record.rewrites] == [2, 3, 1, 0, 4]
    assert [r.measurement.hard for r in record.rewrites if r.measurement] == [0.5, 0.5, 0.25, 0.0]
    assert done.texts[record.candidate_hash] == texts[2]
    shown = [line for line in format_step(record) if line.startswith("rewrite")]
    assert shown[:2] == [
        "rewrite 3: chosen, 0.500 on the items of the step",
        "rewrite 4: not chosen, 0.500 on the items of the step",
    ]
    assert shown[-1].startswith("rewrite 5: none, because ")
    assert record.chosen.pool_size == 4
    assert [fallback.label for fallback in record.merged.fallbacks] == ["proposer/4"]
    train = [skill for skill, message in done.actor.asked if message in _messages("train")]
    assert {text: train.count(text) for text in {"", *texts}} == dict.fromkeys({"", *texts}, 8)


def _messages(split: Any) -> set[str]:
    return {str(item.input) for item in WORLD.items(split)}


@pytest.mark.slow
async def test_a_budget_that_ends_within_a_step_is_continued(tmp_path: Path) -> None:
    """Calls and rollouts of rewrites are reserved; a larger budget resumes the step and repeats no call."""
    world = write_world(tmp_path / "world")
    sections: dict[str, Any] = {"proposer": {"name": "best_of_n", "n": 3}, "appendix": {"enabled": False}}
    whole = tmp_path / "whole"
    await Trainer(world_settings(world, whole, **sections), transport=PureNetwork()).train()
    out, asked, status = tmp_path / "out", Counter[str](), "budget"
    for most in (12, 16, 22, 40, None):
        assert status == "budget"
        network = PureNetwork()
        config = world_settings(world, out, **sections, budget={"max_calls": most})
        status = (await Trainer(config, transport=network).train()).status
        asked.update(network.samples)
    assert status == "completed"
    assert differences(left_by(out), left_by(whole)) == []
    assert max(asked.values()) == 1


async def test_equal_rewrites_are_rolled_out_once(tmp_path: Path) -> None:
    """The same text twice costs no second rollout, and a copy of the current document costs none."""
    done = await run(
        tmp_path,
        initial=document("double"),
        proposer={"name": "best_of_n", "n": 3},
        train={"batch_size": 8},
        script=writing(document("double"), "- nothing.", "- nothing."),
    )
    assert done.actions == ["no_change"]
    train = [skill for skill, message in done.actor.asked if message in _messages("train")]
    assert len(train) == 16


async def test_a_rewrite_uses_the_seed_and_the_reply_of_its_own_number(tmp_path: Path) -> None:
    """The calls of a step differ in their part alone, so that per-call seeds and stored replies differ."""
    done = await run(tmp_path, proposer={"name": "best_of_n", "n": 3})
    ids = [call.call_id for call in done.asked("one_shot") if call.call_id.step == 1]
    assert sorted(call_id.part for call_id in ids) == ["0", "1", "2"]
    assert len({call.prompt for call in done.asked("one_shot") if call.call_id.step == 1}) == 1


# ------------------------------------------------------------------------------------------ an own proposer


class LineProposer:
    """Adds the answer to one question about the failed cases; tries it on the step's items."""

    def __init__(self, identity: str = "lines/1") -> None:
        self.identity = identity
        self.seen: list[StepEvidence] = []
        self.rolled: list[int] = []

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> Sequence[Rewrite]:
        self.seen.append(evidence)
        failed = [str(case.item.task_type) for case in evidence.cases if case.failed]
        if not failed:
            return ()
        prompt = RenderedPrompt(
            name="line", version=1, messages=(Message(role="user", content=f"Which line for {failed[0]}?"),)
        )
        reply = await budget.ask(prompt, Text)
        if isinstance(reply, NoReply):
            return [Rewrite(reason=reply.reason)]
        text = f"{skill.text}\n{reply.text}\n"
        (rollouts,) = await budget.roll_out([text])
        self.rolled.append(len(rollouts))
        return [Rewrite(document=text, reasoning="By name.")]


def naming(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Answer with the line of the rule that is asked for."""
    return LINES[prompt.messages[-1].content.split()[-1].strip("?")]


async def test_an_own_proposer_takes_the_place_of_the_stages(tmp_path: Path) -> None:
    """It sees the evidence, asks and rolls out under the run's budget, and protected regions stay."""
    initial = tmp_path / "initial.md"
    initial.write_text(GUARDED, encoding="utf-8")
    proposer, llm = LineProposer(), ScriptedLLM(naming)
    config = settings(tmp_path / "run", train={"num_epochs": 2}, gate=STRICT) | {"skill": initial}
    collaborators: dict[str, Any] = {
        "environment": WORLD,
        "target": ToyTarget(),
        "optimizer": llm,
    }
    trainer = Trainer(config, proposer=proposer, **collaborators)
    summary = await trainer.train()
    assert (summary.status, summary.accepts) == ("completed", 4)
    assert {call.call_id.purpose for call in llm.calls} == {"proposal"}
    history = await read_run(tmp_path / "run")
    assert all(step.rewrites[0].reasoning == "By name." for step in history.steps)
    best = (tmp_path / "run" / "best_skill.md").read_text(encoding="utf-8")
    assert best.count(GUARDED.partition("\n\n")[2].strip()) == best.count("<!--") - 1 == 1
    assert all(line in best for line in list(LINES.values())[:4])
    assert proposer.rolled == [4] * 4
    assert proposer.seen[1].attempts[0].action == "accept_new_best"

    again = Trainer(config, proposer=proposer, **collaborators)
    other = Trainer(config, proposer=LineProposer("lines/2"), **collaborators)
    assert len({trainer.run_id, again.run_id, other.run_id, Trainer(config, **collaborators).run_id}) == 3


async def test_a_configuration_names_an_own_proposer(tmp_path: Path) -> None:
    """An import path with options stands for the object; the estimate says that its calls are unknown."""
    named = {"name": f"{__name__}:LineProposer", "options": {"identity": "lines/3"}}
    config = load_config(settings(tmp_path, proposer=named, gate=STRICT))
    trainer = build_trainer(config, script=naming)
    plan = trainer._prepare()
    assert plan.identity["proposer"] == "lines/3"
    assert "prompts.one_shot" not in plan.identity
    foreseen = plan.estimate_cost(done=0, skill=None, spent=())
    assert {row.purpose for row in foreseen.rows} == {"rollout"}
    assert any("own proposer" in assumption for assumption in foreseen.assumptions)
    assert (await trainer.train()).accepts == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_shott", "entry point of reflact.proposers"),
        (f"{__name__}:LINES", "has no `identity`; add identity ="),
    ],
)
def test_a_name_that_is_no_proposer_is_refused(tmp_path: Path, name: str, words: str) -> None:
    """A misspelt name, or another object, is named before anything is asked."""
    trainer = build_trainer(settings(tmp_path, proposer={"name": name}), script=naming)
    with pytest.raises(ConfigError, match=words):
        trainer._prepare()


async def test_an_own_proposer_may_propose_nothing(tmp_path: Path) -> None:
    """A step without a document changes nothing and says so."""

    class Silent:
        identity = "silent"

        async def propose(
            self, skill: Skill, evidence: StepEvidence, budget: StepBudget
        ) -> Sequence[Rewrite]:
            return ()

    trainer = build_trainer(
        settings(tmp_path), environment=ToyEnvironment(), script=naming, proposer=Silent()
    )
    summary = await trainer.train()
    assert {action.action for action in summary.actions} == {"no_rewrite"}


@pytest.mark.parametrize("sections", [{"proposer": {"name": "one_shot"}}, {"appendix": {"enabled": True}}])
def test_two_proposers_or_lapses_without_analysts_are_refused(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    """A proposer in Python goes with no other one, and reminders need the stages."""
    config = settings(tmp_path, **sections)
    with pytest.raises(ConfigError, match="a proposer is passed in Python"):
        build_trainer(config, environment=ToyEnvironment(), script=naming, proposer=LineProposer())
    with pytest.raises(ConfigError, match="proposer"):
        load_config({"proposer": {"name": "one_shot"}, "appendix": {"enabled": True}})
