"""A critic as an environment's grader: what a score is, what identifies it, and what a run says of it."""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flattered_world import flattered, trace_of
from reflact import Critic, Item, Score, Skill, Trainer
from reflact.calibration.grading import CriticGrader, explain_empty_answer, item_input, measure_critic
from reflact.data import DataSet
from reflact.environments.dataset import DatasetEnvironment
from reflact.environments.graders import apply_grader
from reflact.errors import (
    BudgetSpent,
    ConfigError,
    ContextOverflow,
    EnvironmentFailure,
    ModelError,
    ProviderDown,
)
from reflact.memory.models import Action, ContrastPair, Evaluation, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import CriticAccuracy, CriticDescription, IntervalEstimate, RunSummary
from reflact.reporting.summary import print_summary
from reflact.stages.rollout import RolloutRunner
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Grade, Split
from toy_runs import document, settings, written

pytestmark = pytest.mark.anyio

ITEM = Item(id="greet", input="Greet the queen.")
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


def saying(phi: float, *, evidence: str = "Majesty") -> ScriptedLLM:
    """Return a model that scores every answer alike."""
    return ScriptedLLM(
        lambda *_: {
            "reasoning": "It is polite.",
            "evidence": [evidence],
            "phi_before": 0,
            "phi_after": phi,
            "confidence": 0.9,
        }
    )


def failing(error: Exception) -> ScriptedLLM:
    """Return a model whose calls all fail."""
    return ScriptedLLM(lambda *_: error)


async def graded(llm: ScriptedLLM, answer: str = "Your Majesty!", *, passes_at: float = 8.0) -> Grade:
    """Return what a critic without worked examples makes of an answer."""
    return await apply_grader(CriticGrader(Critic(llm).pin_to(()), pass_threshold=passes_at), ITEM, answer)


# --------------------------------------------------------------------------------------------- one score


@pytest.mark.parametrize(
    ("phi", "score"),
    [
        (0, Score(hard=0, soft=0)),
        (7.9, Score(hard=0, soft=0.79)),
        (8, Score(hard=1, soft=0.8)),
        (10, Score(hard=1, soft=1)),
    ],
)
async def test_phi_after_the_answer_is_the_score(phi: float, score: Score) -> None:
    """Soft is a tenth of phi, hard is whether phi reaches the threshold."""
    found = (await graded(saying(phi))).score
    assert found.hard == score.hard
    assert found.soft == pytest.approx(score.soft)


async def test_what_the_critic_says_is_the_feedback() -> None:
    """The failure analyst reads reasoning, number and threshold; full marks need no words."""
    assert (await graded(saying(4))).feedback == "a critic scored it 4 of 10, 8 needed: It is polite."
    assert (await graded(saying(10))).feedback is None


async def test_feedback_says_where_praise_was_not_believed() -> None:
    """Praise for what does not stand in the answer gets no credit, and the feedback says why."""
    found = await graded(saying(10, evidence="a deep bow"))
    assert found.score == Score.of(0)
    assert "0 of 10, 8 needed, no credit for the answer (invented evidence)" in str(found.feedback)


@pytest.mark.parametrize(
    ("reply", "guard"),
    [
        (
            {"evidence": ["a proof that stands nowhere"], "phi_before": 9, "phi_after": 10},
            "invented evidence",
        ),
        (
            {"evidence": ["a proof that stands nowhere"], "phi_before": 9, "phi_after": 9},
            "invented evidence",
        ),
        ({"evidence": ["nowhere at all"], "phi_before": 0, "phi_after": 10}, "invented evidence"),
        ({"evidence": [], "phi_before": 9, "phi_after": 9}, "no evidence"),
        ({"evidence": ["the queen"], "phi_before": 0, "phi_after": 9}, "vanished evidence"),
        ({"evidence": [], "phi_before": 10, "phi_after": 8}, "no evidence"),
    ],
)
async def test_praise_without_grounds_is_asked_again_and_then_counts_nothing(
    reply: dict[str, Any], guard: str
) -> None:
    """Whatever number the model gives the bare question, credit that a guard takes away leaves 0."""
    llm = ScriptedLLM(lambda *_: {"reasoning": "Brilliant.", "confidence": 1, **reply}, reasks=1)
    found = await graded(llm, "Good day.")
    assert found.score == Score.of(0)
    assert f"0 of 10, 8 needed, no credit for the answer ({guard})" in str(found.feedback)
    assert len(llm.calls) == 2


async def test_a_bare_question_counts_nothing() -> None:
    """The model's number for it neither adds to the score nor takes from it."""
    for before in (0, 5, 10):
        llm = ScriptedLLM(
            lambda *_, before=before: {
                "reasoning": "Polite.",
                "evidence": ["Majesty"],
                "phi_before": before,
                "phi_after": 7,
                "confidence": 1,
            }
        )
        assert (await graded(llm)).score == Score(hard=0, soft=0.7)
        assert len(llm.calls) == 1


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


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("error", [ContextOverflow("too long"), ValueError("no JSON")])
async def test_a_judge_without_a_verdict_is_no_zero(error: Exception) -> None:
    """Replies that are no scores, and answers too long for the critic, are the critic's failure."""
    llm = failing(error) if isinstance(error, ModelError) else ScriptedLLM(lambda *_: "no JSON")
    with pytest.raises(EnvironmentFailure, match="the critic gave no score for item 'greet'"):
        await graded(llm)


@pytest.mark.parametrize("error", [ProviderDown("down"), BudgetSpent("spent")])
async def test_errors_of_the_endpoint_pass(error: Exception) -> None:
    """What an endpoint or a budget refuses is told as it is."""
    with pytest.raises(type(error)):
        await graded(failing(error))


def test_a_critic_that_can_change_is_refused() -> None:
    """Scores of one run come from one critic: who reads a memory has to be pinned."""
    with pytest.raises(ConfigError, match=re.escape("await critic.pin()")):
        CriticGrader(Critic(saying(1)))


@pytest.mark.parametrize("passes_at", [0, -1, 10.5, float("nan")])
def test_a_threshold_is_a_phi(passes_at: float) -> None:
    """A threshold off the scale would pass all answers, or none."""
    with pytest.raises(ConfigError, match="passes_at"):
        CriticGrader(Critic(saying(1)).pin_to(()), pass_threshold=passes_at)


def test_a_purpose_has_a_name() -> None:
    """A function without a name cannot be told from others in the keys of rollouts."""
    with pytest.raises(ConfigError, match="has no name"):
        CriticGrader(Critic(saying(1)).pin_to(()), purpose=functools.partial(_courtesy))


# ---------------------------------------------------------------------------------------------- identity


def key(grader: CriticGrader) -> str:
    """Return the key of a rollout that is graded so."""
    environment = DatasetEnvironment(DataSet(train=(ITEM,), val=(), test=()), grade=grader)
    store = InMemoryRunStore()
    runner = RolloutRunner(
        target=ToyTarget(),
        environment=environment,
        store=store,
        decision_log=store.decision_log("r"),
        step=1,
        feedback=True,
        limit=1,
    )
    return runner.make_job(ITEM, Skill(text=""), 0).key


def test_all_that_a_score_depends_on_is_in_the_key_of_a_rollout() -> None:
    """Another snapshot, model, threshold or purpose gives other keys; the same ones give the same key."""
    critic = Critic(saying(1))
    plain = critic.pin_to(())
    graders = (
        CriticGrader(plain),
        CriticGrader(critic.pin_to((PAIR,))),
        CriticGrader(Critic(ScriptedLLM(lambda *_: "", identity="other")).pin_to(())),
        CriticGrader(plain, pass_threshold=9),
        CriticGrader(plain, purpose=_courtesy),
    )
    assert len({key(grader) for grader in graders}) == len(graders)
    assert key(CriticGrader(critic.pin_to(()), pass_threshold=8)) == key(graders[0])


# ------------------------------------------------------------------------------------------------- a run


def toy_critic(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    """Play a critic who knows the toy world: an answer that is not unknown is right."""
    shown = prompt.messages[-1].content
    knows = "unknown" not in shown
    return {
        "reasoning": "It is answered." if knows else "It says that it does not know.",
        "evidence": [re.findall(r"<after>\n(.*?)\n</after>", shown, re.DOTALL)[0]],
        "phi_before": 0,
        "phi_after": 9 if knows else 0,
        "confidence": 0.9,
    }


def toy_world(grader: CriticGrader) -> DatasetEnvironment:
    """Return the toy world, graded by a critic who is shown no reference."""
    toy = ToyEnvironment(train=8, val=4, test=4)
    train, val, test = (
        tuple(item.model_copy(update={"reference": None}) for item in toy.items(split))
        for split in (Split.train, Split.val, Split.test)
    )
    return DatasetEnvironment(DataSet(train=train, val=val, test=test), grade=grader)


async def trained(folder: Path, grader: CriticGrader | None) -> RunSummary:
    """Train in the toy world, graded by a critic or by the world itself."""
    return await Trainer(
        settings(folder),
        environment=ToyEnvironment(train=8, val=4, test=4) if grader is None else toy_world(grader),
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
    ).train()


def printed(summary: RunSummary, folder: Path) -> str:
    """Return a summary as the terminal shows it."""
    text = io.StringIO()
    print_summary(Console(file=text, width=80), summary, folder)
    return text.getvalue()


async def test_a_run_that_a_critic_graded_says_so(tmp_path: Path) -> None:
    """The summary, its file and its print name the critic, its snapshot, and that nobody measured it."""
    critic = Critic(ScriptedLLM(toy_critic)).pin_to((PAIR,))
    summary = await trained(tmp_path, CriticGrader(critic))
    assert summary.status == "completed"
    assert critic.snapshot is not None
    used = CriticDescription(identity=critic.identity, snapshot=critic.snapshot, prompt="critic@1", pairs=1)
    assert summary.critic == used
    stored = RunSummary.model_validate_json((tmp_path / "summary.json").read_text("utf-8"))
    assert stored.critic == used
    line = f"scores come from critic@1 pinned to 1 pairs ({critic.snapshot[:12]}): "
    assert f"{line}its accuracy was not measured\n" in printed(summary, tmp_path)


async def test_a_run_without_a_critic_has_no_note(tmp_path: Path) -> None:
    """Neither the summary's file nor its print mentions a critic."""
    summary = await trained(tmp_path, None)
    assert summary.critic is None
    assert "critic" not in json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert "opinion" not in printed(summary, tmp_path)


@pytest.mark.parametrize("error", [ContextOverflow("too long"), ProviderDown("no answer")])
async def test_items_that_the_critic_could_not_score_stay_unmeasured(
    tmp_path: Path, error: ModelError
) -> None:
    """One item of four is lost to a critic's failure: it lacks in the count and does not lower the score."""

    def broken(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        lost = "double 18" in prompt.messages[-1].content
        return error if lost else toy_critic(prompt, reply_type, call_id)

    config = settings(tmp_path, gate={"coverage": 0.5})
    summary = await Trainer(
        {**config, "skill": _knowing(tmp_path)},
        environment=toy_world(CriticGrader(Critic(ScriptedLLM(broken)).pin_to(()))),
        target=ToyTarget(),
        optimizer=ScriptedLLM(toy_optimizer()),
    ).train()
    baseline = summary.score("baseline", Split.val)
    assert baseline is not None
    assert (baseline.n, baseline.unmeasured, baseline.hard) == (3, 1, 1.0)


def _knowing(folder: Path) -> Path:
    return written(folder / "initial.md", document("double", "square", "negate", "parity"))


# ---------------------------------------------------------------------------------------------- accuracy


async def test_the_summary_says_what_the_critic_is_worth(tmp_path: Path) -> None:
    """A pinned critic is measured on traces with gold, and the figures stand in the summary's line."""
    critic = Critic(flattered()).pin_to(())
    traces = [await trace_of(critic, f"t{n}", n, count=2, claims=[n % 2 == 0, False]) for n in range(20)]
    measured = await measure_critic(critic, traces)
    assert measured is not None
    assert measured.error.value == pytest.approx(0.75)
    used = CriticGrader(critic, measurements=measured).scored_by.accuracy
    assert used is not None
    assert (used.traces, used.transitions) == (20, 40)
    assert (used.error, used.accuracy) == (measured.error, measured.accuracy)
    assert await measure_critic(critic, []) is None


def test_the_printed_accuracy_has_its_intervals(tmp_path: Path) -> None:
    """One line holds error, accuracy, intervals and the number of traces."""
    accuracy = CriticAccuracy(
        traces=40,
        transitions=80,
        error=IntervalEstimate(value=0.75, low=0.5, high=1),
        accuracy=IntervalEstimate(value=0.9, low=0.8, high=0.95),
    )
    used = CriticDescription(identity="{}", snapshot="a" * 64, prompt="critic@1", pairs=3, accuracy=accuracy)
    shown = printed(RunSummary(run_id="r1", status="completed", critic=used), tmp_path)
    assert (
        "mean absolute error 0.75 (95% interval 0.50 to 1.00) of 10, "
        "pairwise accuracy 0.90 (95% interval 0.80 to 0.95), on 40 traces\n"
    ) in shown
