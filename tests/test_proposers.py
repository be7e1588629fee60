"""Proposers of the user's own: what they see, what they may spend, and how they stand beside the other sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reflact import Trainer, read_run
from reflact.config.loading import load_config
from reflact.errors import ConfigError
from reflact.llm import CallId, Message, RenderedPrompt, ReplyModel, Text
from reflact.proposers import NoReply, Rewrite, StepBudget, StepEvidence
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget
from reflact.testing.llm import ScriptedAnswer
from reflact.training.cost_estimate import estimate_run
from reflact.types import Skill
from toy_runs import LINES, WORLD, build_trainer, settings

STRICT = {"policy": "strict"}
GUARDED = "Heed the rules.\n\n<!-- SLOW_UPDATE_START -->\nTake your time.\n<!-- SLOW_UPDATE_END -->\n"


def configure(folder: Path, *sources: str, **sections: Any) -> dict[str, Any]:
    """Return the configuration of a short run; without sources, those of the defaults."""
    config = settings(folder, gate=STRICT, **sections)
    del config["search"]
    if sources:
        config["search"] = {"sources": [*sources]}
    return config


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
    return LINES[prompt.messages[-1].content.split()[-1].strip("?")]


async def test_an_own_proposer_takes_the_place_of_the_default_sources(tmp_path: Path) -> None:
    initial = tmp_path / "initial.md"
    initial.write_text(GUARDED, encoding="utf-8")
    proposer, llm = LineProposer(), ScriptedLLM(naming)
    config = configure(tmp_path / "run", train={"num_epochs": 3}) | {"skill": initial}
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
    assert {step.source for step in history.steps} == {"proposer"}
    assert all(step.rewrites[0].reasoning == "By name." for step in history.steps)
    assert [len(step.race) for step in history.steps] == [1] * 4
    best = (tmp_path / "run" / "best_skill.md").read_text(encoding="utf-8")
    assert best.count(GUARDED.partition("\n\n")[2].strip()) == best.count("<!--") - 1 == 1
    assert all(line in best for line in list(LINES.values())[:4])
    assert proposer.rolled == [4] * 4
    assert proposer.seen[1].attempts[0].action == "accept_new_best"

    again = Trainer(config, proposer=proposer, **collaborators)
    other = Trainer(config, proposer=LineProposer("lines/2"), **collaborators)
    assert len({trainer.run_id, again.run_id, other.run_id, Trainer(config, **collaborators).run_id}) == 3


class FailingProposer:
    """Gives a reason instead of a document, or nothing at all."""

    identity = "failing"

    def __init__(self, *reasons: str) -> None:
        self._reasons = reasons

    async def propose(self, skill: Skill, evidence: StepEvidence, budget: StepBudget) -> Sequence[Rewrite]:
        return [Rewrite(reason=reason) for reason in self._reasons]


async def test_a_configuration_names_an_own_proposer(tmp_path: Path) -> None:
    name = f"{__name__}:LineProposer"
    config = load_config(configure(tmp_path, name))
    trainer = build_trainer(config, script=naming)
    plan = trainer._prepare()
    assert plan.identity["proposer"] == "lines/1"
    foreseen = estimate_run(plan)
    assert {row.purpose for row in foreseen.rows} == {"rollout"}
    assert any("own proposer" in assumption for assumption in foreseen.assumptions)
    assert (await trainer.train()).accepts == 2
    assert {step.source for step in (await read_run(tmp_path)).steps} == {name}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_shott", "entry point of reflact.proposers"),
        ("best_of_n", "entry point of reflact.proposers"),
        (f"{__name__}:LINES", "is missing; write identity ="),
    ],
)
def test_a_name_that_is_no_proposer_is_refused(tmp_path: Path, name: str, words: str) -> None:
    trainer = build_trainer(configure(tmp_path, name), script=naming)
    with pytest.raises(ConfigError, match=words):
        trainer._prepare()


@pytest.mark.parametrize("reasons", [(), ("the moon is not full",)])
async def test_a_proposer_may_propose_nothing(tmp_path: Path, reasons: tuple[str, ...]) -> None:
    trainer = build_trainer(
        configure(tmp_path), environment=ToyEnvironment(), script=naming, proposer=FailingProposer(*reasons)
    )
    summary = await trainer.train()
    assert {action.action for action in summary.actions} == {"no_rewrite"}
    step = (await read_run(tmp_path)).steps[0]
    assert all(reason in step.verdict.reason for reason in reasons)
    assert tuple(fallback.reason for fallback in step.merged.fallbacks) == reasons
