"""A critic's view of each step of a failed trajectory, as failure analysts are shown it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from doubles import RUN, open_context
from reflact import Critic, Item, Rollout, Trainer
from reflact.calibration.grading import CriticAnnotator
from reflact.errors import ConfigError, ContextOverflow, ProviderDown, ReflactError
from reflact.memory.models import Action, ContrastPair, Evaluation, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import CriticDescription, RunSummary
from reflact.stages.reflect import Minibatch, annotate_failures
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.types import RolloutSource, Score, Turn
from toy_runs import settings, shown_to

pytestmark = pytest.mark.anyio

ITEM = Item(id="greet", input="Greet the queen.")
ROLLOUT = Rollout(
    key="k",
    item_id="greet",
    skill_hash="s",
    turns=(
        Turn(role="user", content="Greet the queen."),
        Turn(role="assistant", content="Who?"),
        Turn(role="user", content="The queen."),
        Turn(role="assistant", content="Hello."),
    ),
    answer="Hello.",
    score=Score.of(0),
    feedback="No bow.",
)
PAIR = ContrastPair(
    purpose="Greet the king.",
    transition=Transition(before="Greet the king.", action=Action(name="reply"), after="I greeted him."),
    right=Evaluation(progress_before=0, progress_after=0, reasoning="No greeting stands there."),
    wrong=Evaluation(progress_before=0, progress_after=9, reasoning="He was greeted."),
    reason="To say so is no greeting.",
    mistake="credit_for_intention",
    construction="asked",
    label_source="human",
)


def unmoved(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Play a critic whom nothing moves."""
    return {"reasoning": "No bow in it.", "evidence": [], "phi_before": 1, "phi_after": 1, "confidence": 0.9}


class Noting:
    """An annotator that counts how often it is asked."""

    identity = "noting"

    def __init__(self, *notes: str) -> None:
        self._notes = notes
        self.asked: list[tuple[str, str]] = []

    async def annotate(self, item: Item, rollout: Rollout) -> Sequence[str]:
        self.asked.append((item.id, rollout.key))
        return self._notes


async def fed_back(
    annotator: Noting,
    store: InMemoryRunStore,
    *,
    source: RolloutSource = "failure",
    feedback: str | None = "No bow.",
) -> list[str | None]:
    """Return the feedback that an analyst is shown of one rollout."""
    rollout = ROLLOUT.model_copy(update={"feedback": feedback})
    batch = Minibatch(source=source, index=0, items=(ITEM,), rollouts=(rollout,))
    await store.open_run(RUN, {}, None)
    noted = await annotate_failures(batch, annotator, await open_context(ScriptedLLM(unmoved), store))
    return [rollout.feedback for rollout in noted.rollouts]


# ------------------------------------------------------------------------------------------- annotating


async def test_notes_stand_below_the_feedback_of_failures() -> None:
    """A failure's analyst reads the environment's words first and then the notes, line by line."""
    assert await fed_back(Noting("one", "two"), InMemoryRunStore()) == ["No bow.\none\ntwo"]
    assert await fed_back(Noting("one"), InMemoryRunStore(), feedback=None) == ["one"]
    assert await fed_back(Noting(), InMemoryRunStore(), feedback=None) == [None]


async def test_successes_are_not_annotated() -> None:
    """Nobody is asked about what went well."""
    noting = Noting("one")
    assert await fed_back(noting, InMemoryRunStore(), source="success") == ["No bow."]
    assert noting.asked == []


async def test_a_restart_reads_the_same_notes() -> None:
    """Notes that were read once are in the journal, also where there were none."""
    for first in (("one",), ()):
        store, again = InMemoryRunStore(), Noting("other")
        shown = await fed_back(Noting(*first), store)
        assert await fed_back(again, store) == shown
        assert again.asked == []


# --------------------------------------------------------------------------------------------- the critic


async def test_each_reply_has_a_line() -> None:
    """A line gives phi before and after one reply, and why."""
    notes = await CriticAnnotator(Critic(ScriptedLLM(unmoved)).pin_to(())).annotate(ITEM, ROLLOUT)
    assert notes == (
        "reply 1: a critic gave 1 before and 1 after, of 10: No bow in it.",
        "reply 2: a critic gave 1 before and 1 after, of 10: No bow in it.",
    )


async def test_a_reply_without_a_score_is_named() -> None:
    """What the critic cannot read is one line less of help, and no error."""
    llm = ScriptedLLM(lambda *_: ContextOverflow("too long"))
    notes = await CriticAnnotator(Critic(llm).pin_to(())).annotate(ITEM, ROLLOUT)
    assert notes == ("reply 1: a critic gave no score", "reply 2: a critic gave no score")


async def test_an_endpoint_that_is_down_is_told() -> None:
    """An outage must not decide what analysts read."""
    llm = ScriptedLLM(lambda *_: ProviderDown("down"))
    with pytest.raises(ReflactError, match="down"):
        await CriticAnnotator(Critic(llm).pin_to(())).annotate(ITEM, ROLLOUT)


def test_what_has_no_identity_is_refused() -> None:
    """A critic that may change, or a function without a name, cannot be part of a run's identity."""
    critic = Critic(ScriptedLLM(unmoved))
    with pytest.raises(ConfigError, match="pin"):
        CriticAnnotator(critic)
    with pytest.raises(ConfigError, match="has no name"):
        CriticAnnotator(critic.pin_to(()), purpose=functools.partial(str))


# -------------------------------------------------------------------------------------------------- a run


def trainer(folder: Path, annotate: CriticAnnotator | None, optimizer: ScriptedLLM) -> Trainer:
    """Return a trainer in the toy world."""
    return Trainer(
        settings(folder),
        environment=ToyEnvironment(train=8, val=4, test=4),
        target=ToyTarget(),
        optimizer=optimizer,
        annotate=annotate,
    )


async def trained(folder: Path, annotate: CriticAnnotator | None) -> tuple[RunSummary, list[str]]:
    """Train and return the summary and what failure analysts were shown."""
    optimizer = ScriptedLLM(toy_optimizer())
    summary = await trainer(folder, annotate, optimizer).train()
    asked = [call for call in optimizer.calls if call.call_id.purpose == "analyst_failure"]
    return summary, [shown_to(call) for call in asked]


async def test_failure_analysts_of_a_run_read_the_critic(tmp_path: Path) -> None:
    """Each failed case carries its note, and the summary says so; scores stay the environment's."""
    critic = Critic(ScriptedLLM(unmoved)).pin_to(())
    plain, without = await trained(tmp_path / "plain", None)
    noted, shown = await trained(tmp_path / "noted", CriticAnnotator(critic))
    assert shown
    assert all("No bow in it." in text for text in shown)
    assert not any("No bow in it." in text for text in without)
    assert critic.snapshot is not None
    used = CriticDescription(identity=critic.identity, snapshot=critic.snapshot, prompt="critic@1", pairs=0)
    assert (noted.noted_by, noted.critic) == (used, None)
    assert plain.noted_by is None
    assert "noted_by" not in json.loads((tmp_path / "plain" / "summary.json").read_text("utf-8"))
    assert [score.hard for score in noted.scores] == [score.hard for score in plain.scores]


def test_the_snapshot_is_part_of_the_run(tmp_path: Path) -> None:
    """Runs with other notes, or without, are other runs."""
    critic = Critic(ScriptedLLM(unmoved))
    notes = (None, CriticAnnotator(critic.pin_to(())), CriticAnnotator(critic.pin_to((PAIR,))))
    ids = [trainer(tmp_path, each, ScriptedLLM(toy_optimizer())).run_id for each in notes]
    assert len(set(ids)) == 3
    again = CriticAnnotator(critic.pin_to(()))
    assert trainer(tmp_path, again, ScriptedLLM(toy_optimizer())).run_id == ids[1]
