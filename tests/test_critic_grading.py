"""A critic as an environment's grader: what a score is, what identifies it, and what a run says of it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from doubles import RUN, open_context
from flattered_world import flattered, trace_of
from memory_pairs import make_pair
from reflact import Critic, Item, Rollout, Score, Trainer
from reflact.calibration.grading import (
    CriticAnnotator,
    CriticGrader,
    explain_empty_answer,
    item_input,
    measure_critic,
)
from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment
from reflact.environments.graders import apply_grader
from reflact.errors import (
    BudgetSpent,
    ConfigError,
    ContextOverflow,
    EnvironmentFailure,
    ProviderDown,
    ReflactError,
    ReplyError,
)
from reflact.memory.models import Action, ContrastPair, Transition
from reflact.records import CriticAccuracy, CriticDescription, IntervalEstimate, RunSummary
from reflact.reporting.terminal import print_summary
from reflact.stages.reflect import Minibatch, annotate_failures
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyTarget
from reflact.types import Grade, RolloutSource, Turn
from toy_runs import WORLD, settings

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
    """Return a model that scores every answer alike."""
    numbers = {"phi_before": before, "phi_after": after, "confidence": 0.9}
    return ScriptedLLM(lambda *_: {"reasoning": "It is polite.", "evidence": [*evidence], **numbers}, **more)


def saying(phi: float, *, evidence: str = "Majesty") -> ScriptedLLM:
    """Return a model that gives every answer credit for words that stand in it."""
    return answering([evidence], 0, phi)


async def graded(llm: ScriptedLLM, answer: str = "Your Majesty!") -> Grade:
    """Return what a critic without worked examples makes of an answer."""
    return await apply_grader(CriticGrader(Critic(llm).pin_to(())), ITEM, answer)


@pytest.mark.parametrize(("phi", "hard", "soft"), [(0, 0, 0), (7.9, 0, 0.79), (8, 1, 0.8), (10, 1, 1)])
async def test_phi_after_the_answer_is_the_score(phi: float, hard: float, soft: float) -> None:
    """Soft is a tenth of phi, hard is whether phi reaches the threshold; the bare question counts nothing."""
    for before in (0, 5, 10):
        llm = answering(["Majesty"], before, phi)
        found = (await graded(llm)).score
        assert (found.hard, found.soft) == (hard, pytest.approx(soft))
        assert len(llm.calls) == 1


async def test_what_the_critic_says_is_the_feedback() -> None:
    """The failure analyst reads reasoning, number and threshold; full marks need no words."""
    assert (await graded(saying(4))).feedback == "a critic scored it 4 of 10, 8 needed: It is polite."
    assert (await graded(saying(10))).feedback is None


@pytest.mark.parametrize(
    ("evidence", "before", "after", "guard"),
    [
        (["a proof that stands nowhere"], 9, 10, "invented evidence"),
        (["a proof that stands nowhere"], 9, 9, "invented evidence"),
        (["nowhere at all"], 0, 10, "invented evidence"),
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
        (" \n", "the answer is empty"),
        ("Greet the queen.", "the answer is the question again"),
        (" greet\n the QUEEN. ", "the answer is the question again"),
        ("I do not know.", "the answer says that it does not know"),
        ("I don\u2019t know!", "the answer says that it does not know"),
        ("No idea...", "the answer says that it does not know"),
    ],
)
async def test_an_answer_that_says_nothing_earns_nothing(answer: str, words: str) -> None:
    """Empty answers, the question again and words of not knowing are worth 0; no critic is asked."""
    llm = saying(10, evidence=answer)
    found = await graded(llm, answer)
    assert found.score == Score.of(0)
    assert found.feedback == f"worth 0 of 10, 8 needed: {words}"
    assert llm.calls == []


@pytest.mark.parametrize(
    ("question", "purpose", "answer"),
    [
        ("alpha 100", None, "alpha:100"),
        ("anna met bob", "Set the capitals.", "Anna met Bob"),
        ("Who won in 2090? Say 'I do not know' where nobody can.", None, "I do not know."),
        ("Who won in 2090?", "Answer, or say: I don't know.", "I don't know."),
        ("Who won in 2090?", None, "I do not know who, but it was in May."),
        ("Which word is missing?", None, "unknown"),
    ],
)
def test_what_says_something_is_put_to_the_critic(question: str, purpose: str | None, answer: str) -> None:
    """Another form of the question may be the answer, and so may not knowing where that is asked for."""
    assert explain_empty_answer(answer, question=question, purpose=purpose or question) is None


async def test_the_same_transition_is_scored_apart_from_its_grade() -> None:
    """A critic that grades and also scores steps keeps the two apart."""
    critic = Critic(saying(9)).pin_to(())
    step = Transition(before="q", action=Action(name="reply", arguments="Majesty"), after="Majesty")
    plain = await critic.score(step, purpose="q", progress_before=None)
    graded_at_zero = await critic.score(step, purpose="q", progress_before=4)
    assert (plain.evaluation.progress_before, graded_at_zero.evaluation.progress_before) == (0, 4)
    assert graded_at_zero.raw.progress_before == 0


async def test_the_critic_sees_input_answer_and_purpose() -> None:
    """The item's input is the state before and, unless said otherwise, the purpose; never the reference."""
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


@pytest.mark.parametrize("error", [ProviderDown("down"), BudgetSpent("spent")])
async def test_errors_of_the_endpoint_pass(error: Exception) -> None:
    """What an endpoint or a budget refuses is an error as it is: it decides no score, and not what analysts read."""
    llm = ScriptedLLM(lambda *_: error)
    with pytest.raises(type(error)):
        await graded(llm)
    with pytest.raises(ReflactError, match=str(error)):
        await CriticAnnotator(Critic(llm).pin_to(())).annotate(ITEM, ROLLOUT)


def test_what_has_no_identity_is_refused() -> None:
    """A critic that may change cannot be part of a run's identity or keys."""
    critic = Critic(saying(1))
    for build in (CriticGrader, CriticAnnotator):
        with pytest.raises(ConfigError, match=re.escape("await critic.pin()")):
            build(critic)


@pytest.mark.parametrize("passes_at", [0, -1, 10.5, float("nan")])
def test_a_threshold_is_a_phi(passes_at: float) -> None:
    """A threshold off the scale would pass all answers, or none."""
    with pytest.raises(ConfigError, match="pass_threshold"):
        CriticGrader(Critic(saying(1)).pin_to(()), pass_threshold=passes_at)


def key(grader: CriticGrader) -> str:
    """Return the identity, in keys of rollouts, of an environment that grades so."""
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


async def test_the_summary_says_what_the_critic_is_worth(tmp_path: Path) -> None:
    """A pinned critic is measured on traces with gold, and the figures stand in the summary's line."""
    critic = Critic(flattered()).pin_to(())
    traces = [await trace_of(critic, f"t{n}", n, count=2, claims=[n % 2 == 0, False]) for n in range(20)]
    measured = await measure_critic(critic, traces)
    assert measured.error.value == pytest.approx(0.75)
    used = CriticGrader(critic, measurements=measured).scored_by.accuracy
    assert (used.traces, used.transitions) == (20, 40)
    assert (used.error, used.accuracy) == (measured.error, measured.accuracy)
    assert await measure_critic(critic, []) is None


def test_a_summary_prints_what_the_critic_is_worth(tmp_path: Path) -> None:
    """One line names the critic, error, accuracy, intervals and traces, or says that nobody measured it."""

    def show(accuracy: CriticAccuracy | None) -> str:
        used = CriticDescription(
            identity="{}", snapshot="a" * 64, prompt="critic@1", pairs=3, accuracy=accuracy
        )
        text = io.StringIO()
        summary = RunSummary(run_id="r1", status="completed", critic=used)
        print_summary(Console(file=text, width=80), summary, tmp_path)
        return text.getvalue()

    error = IntervalEstimate(value=0.75, low=0.5, high=1)
    order = IntervalEstimate(value=0.9, low=0.8, high=0.95)
    line = "scores come from critic@1 pinned to 3 pairs (aaaaaaaaaaaa): "
    assert f"{line}its accuracy was not measured\n" in show(None)
    assert (
        "mean absolute error 0.75 (95% interval 0.50 to 1.00) of 10, "
        "pairwise accuracy 0.90 (95% interval 0.80 to 0.95), on 40 traces\n"
    ) in show(CriticAccuracy(traces=40, transitions=80, error=error, accuracy=order))


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
    noted = await annotate_failures(batch, annotator, await open_context(UNMOVED, store))
    return [rollout.feedback for rollout in noted.rollouts]


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


async def test_each_reply_has_a_line() -> None:
    """A line gives phi before and after one reply, and why."""
    notes = await CriticAnnotator(Critic(UNMOVED).pin_to(())).annotate(ITEM, ROLLOUT)
    assert notes == (
        "reply 1: a critic gave 1 before and 1 after, of 10: No bow in it.",
        "reply 2: a critic gave 1 before and 1 after, of 10: No bow in it.",
    )


def test_the_snapshot_is_part_of_the_run(tmp_path: Path) -> None:
    """Runs with other notes, or without, are other runs."""
    critic = Critic(UNMOVED)
    environment, target = WORLD, ToyTarget()

    def run_id(*pairs: ContrastPair) -> str:
        notes = CriticAnnotator(critic.pin_to(pairs))
        return Trainer(
            settings(tmp_path), environment=environment, target=target, optimizer=UNMOVED, annotator=notes
        ).run_id

    plain = Trainer(settings(tmp_path), environment=environment, target=target, optimizer=UNMOVED).run_id
    assert len({plain, run_id(), run_id(make_pair())}) == 3
    assert run_id() == run_id()
