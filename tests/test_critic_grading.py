"""A critic as an environment's grader: what a score is, what identifies it, and what a run says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from doubles import RUN, open_context
from memory_pairs import make_pair
from reflact import Critic, Item, Rollout, Score
from reflact.calibration.grading import CriticAnnotator, CriticGrader, item_input
from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment
from reflact.environments.graders import apply_grader
from reflact.errors import ConfigError, ContextOverflow, EnvironmentFailure, ReplyError
from reflact.stages.reflect import Minibatch, annotate_failures
from reflact.testing import InMemoryRunStore, ScriptedLLM
from reflact.types import Grade, Turn

ITEM = Item(id="greet", input="Greet the queen.")
ROLLOUT = Rollout(
    key="k",
    item_id="greet",
    skill_hash="s",
    turns=tuple(
        Turn(role="assistant" if n % 2 else "user", content=text)
        for n, text in enumerate(("Greet the queen.", "Who?", "The queen.", "Hello."))
    ),
    score=Score.of(0),
    feedback="No bow.",
)


def answering(evidence: Sequence[str], before: float, after: float, **more: Any) -> ScriptedLLM:
    numbers = {"phi_before": before, "phi_after": after, "confidence": 0.9}
    return ScriptedLLM(lambda *_: {"reasoning": "It is polite.", "evidence": [*evidence], **numbers}, **more)


def saying(phi: float, *, evidence: str = "Majesty") -> ScriptedLLM:
    return answering([evidence], 0, phi)


async def graded(llm: ScriptedLLM, answer: str = "Your Majesty!") -> Grade:
    return await apply_grader(CriticGrader(Critic(llm).pin_to(())), ITEM, answer)


@pytest.mark.parametrize(("phi", "hard", "soft"), [(0, 0, 0), (7.9, 0, 0.79), (8, 1, 0.8), (10, 1, 1)])
async def test_phi_after_the_answer_is_the_score(phi: float, hard: float, soft: float) -> None:
    """Soft is a tenth of phi, hard is whether phi reaches the threshold; the bare question counts nothing."""
    for before in (0, 5, 10):
        llm = answering(["Majesty"], before, phi)
        found = (await graded(llm)).score
        assert (found.hard, found.soft) == (hard, pytest.approx(soft))
        assert len(llm.calls) == 1


@pytest.mark.parametrize(
    ("evidence", "before", "after", "guard"),
    [
        (["a proof that stands nowhere"], 9, 10, "invented evidence"),
        ([], 9, 9, "no evidence"),
        (["the queen"], 0, 9, "vanished evidence"),
        ([], 10, 8, "no evidence"),
    ],
)
async def test_praise_without_grounds_is_asked_again_and_then_counts_nothing(
    evidence: list[str], before: float, after: float, guard: str
) -> None:
    """Whatever number the model gives the bare question, credit that a guard takes away leaves 0."""
    llm = answering(evidence, before, after, reasks=1)
    found = await graded(llm, "Good day.")
    assert found.score == Score.of(0)
    assert f"0 of 10, 8 needed, no credit for the answer ({guard})" in str(found.feedback)
    assert len(llm.calls) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("", "the answer is empty"),
        (" greet\n the QUEEN. ", "the answer is the question again"),
        ("I don\u2019t know!", "the answer says that it does not know"),
        ("No idea...", "the answer says that it does not know"),
    ],
)
async def test_an_answer_that_says_nothing_earns_nothing(answer: str, words: str) -> None:
    llm = saying(10, evidence=answer)
    found = await graded(llm, answer)
    assert found.score == Score.of(0)
    assert found.feedback == f"worth 0 of 10, 8 needed: {words}"
    assert llm.calls == []


async def test_the_critic_sees_input_answer_and_purpose() -> None:
    llm = saying(9)
    item = ITEM.model_copy(update={"reference": "sealed"})
    await apply_grader(CriticGrader(Critic(llm).pin_to(()), purpose=_courtesy), item, "Your Majesty!")
    await apply_grader(CriticGrader(Critic(llm).pin_to(())), item, "Your Majesty!")
    with_function, with_input = ("\n".join(m.content for m in call.prompt.messages) for call in llm.calls)
    assert "Courtesy to Greet the queen." in with_function
    assert "Courtesy" not in with_input
    for shown in (with_function, with_input):
        assert ("Your Majesty!" in shown, "sealed" in shown) == (True, False)
    assert item_input(Item(id="i", input={"b": 1, "a": [2]})) == '{"a":[2],"b":1}'


def _courtesy(item: Item) -> str:
    return f"Courtesy to {item.input}"


@pytest.mark.parametrize("error", [ContextOverflow("too long"), ReplyError("no JSON")])
async def test_a_judge_without_a_verdict_is_no_zero(error: Exception) -> None:
    """Replies that are no scores, and answers too long for the critic, are its failure, and no help to analysts."""
    llm = ScriptedLLM(lambda *_: error)
    with pytest.raises(EnvironmentFailure, match="the critic gave no score for item 'greet'"):
        await graded(llm)
    notes = await CriticAnnotator(Critic(llm).pin_to(())).annotate(ITEM, ROLLOUT)
    assert notes == ("reply 1: a critic gave no score", "reply 2: a critic gave no score")


def test_what_has_no_identity_is_refused() -> None:
    critic = Critic(saying(1))
    for build in (CriticGrader, CriticAnnotator):
        with pytest.raises(ConfigError, match=re.escape("await critic.pin()")):
            build(critic)


def key(grader: CriticGrader) -> str:
    return DatasetEnvironment(DataSet(train=(ITEM,), val=(), test=()), grade=grader).identity


def test_all_that_a_score_depends_on_is_in_the_environments_identity() -> None:
    """Another snapshot, model, threshold or purpose gives other keys of rollouts; the same ones give the same."""
    critic = Critic(saying(1))
    plain = critic.pin_to(())
    graders = (
        CriticGrader(plain),
        CriticGrader(critic.pin_to((make_pair(),))),
        CriticGrader(Critic(ScriptedLLM(lambda *_: "", identity="other")).pin_to(())),
        CriticGrader(plain, pass_threshold=9),
        CriticGrader(plain, purpose=_courtesy),
    )
    assert len({key(grader) for grader in graders}) == len(graders)
    assert key(CriticGrader(critic.pin_to(()), pass_threshold=8)) == key(graders[0])


NUMBERS = {"phi_before": 1, "phi_after": 1, "confidence": 0.9}
UNMOVED = ScriptedLLM(lambda *_: {"reasoning": "No bow in it.", "evidence": [], **NUMBERS})
"""A critic whom nothing moves."""


class Noting:
    """An annotator that counts how often it is asked."""

    identity = "noting"

    def __init__(self, *notes: str) -> None:
        self._notes = notes
        self.asked: list[tuple[str, str]] = []

    async def annotate(self, item: Item, rollout: Rollout) -> Sequence[str]:
        self.asked.append((item.id, rollout.key))
        return self._notes


async def fed_back(annotator: Noting, store: InMemoryRunStore) -> list[str | None]:
    batch = Minibatch(source="failure", index=0, items=(ITEM,), rollouts=(ROLLOUT,))
    await store.open_run(RUN, {}, None)
    noted = await annotate_failures(batch, annotator, await open_context(UNMOVED, store))
    return [rollout.feedback for rollout in noted.rollouts]


async def test_a_restart_reads_the_same_notes() -> None:
    for first in (("one",), ()):
        store, again = InMemoryRunStore(), Noting("other")
        shown = await fed_back(Noting(*first), store)
        assert await fed_back(again, store) == shown
        assert again.asked == []
