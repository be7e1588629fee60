"""A critic as an environment's grader: what a score is, what identifies it, and what a run says of it."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from doubles import RUN, open_context
from flattered_world import flattered, trace_of
from reflact import Critic, Item, Rollout, Score, Skill, Trainer
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
    ModelError,
    ProviderDown,
    ReflactError,
)
from reflact.memory.models import Action, ContrastPair, Evaluation, Transition
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import CriticAccuracy, CriticDescription, IntervalEstimate, RunSummary
from reflact.reporting.summary import print_summary
from reflact.stages.reflect import Minibatch, annotate_failures
from reflact.stages.rollout import RolloutRunner
from reflact.testing import InMemoryRunStore, ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.types import Grade, RolloutSource, Split, Turn
from toy_runs import document, settings, shown_to, written

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


def answering(evidence: Sequence[str], before: float, after: float, **more: Any) -> ScriptedLLM:
    """Return a model that scores every answer alike."""
    numbers = {"phi_before": before, "phi_after": after, "confidence": 0.9}
    return ScriptedLLM(lambda *_: {"reasoning": "It is polite.", "evidence": [*evidence], **numbers}, **more)


def saying(phi: float, *, evidence: str = "Majesty") -> ScriptedLLM:
    """Return a model that gives every answer credit for words that stand in it."""
    return answering([evidence], 0, phi)


def failing(error: Exception) -> ScriptedLLM:
    """Return a model whose calls all fail."""
    return ScriptedLLM(lambda *_: error)


async def graded(llm: ScriptedLLM, answer: str = "Your Majesty!") -> Grade:
    """Return what a critic without worked examples makes of an answer."""
    return await apply_grader(CriticGrader(Critic(llm).pin_to(())), ITEM, answer)


# --------------------------------------------------------------------------------------------- one score


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


def test_what_has_no_identity_is_refused() -> None:
    """A critic that may change, or a function without a name, cannot be part of a run's identity or keys."""
    critic = Critic(saying(1))
    for build in (CriticGrader, CriticAnnotator):
        with pytest.raises(ConfigError, match=re.escape("await critic.pin()")):
            build(critic)
        with pytest.raises(ConfigError, match="has no name"):
            build(critic.pin_to(()), purpose=functools.partial(_courtesy))


@pytest.mark.parametrize("passes_at", [0, -1, 10.5, float("nan")])
def test_a_threshold_is_a_phi(passes_at: float) -> None:
    """A threshold off the scale would pass all answers, or none."""
    with pytest.raises(ConfigError, match="pass_threshold"):
        CriticGrader(Critic(saying(1)).pin_to(()), pass_threshold=passes_at)


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


def trainer(
    folder: Path,
    *,
    grader: CriticGrader | None = None,
    annotate: CriticAnnotator | None = None,
    optimizer: ScriptedLLM | None = None,
) -> Trainer:
    """Return a trainer in the toy world, graded by a critic or by the world itself."""
    return Trainer(
        settings(folder),
        environment=ToyEnvironment(train=8, val=4, test=4) if grader is None else toy_world(grader),
        target=ToyTarget(),
        optimizer=optimizer or ScriptedLLM(toy_optimizer()),
        annotate=annotate,
    )


def printed(summary: RunSummary, folder: Path) -> str:
    """Return a summary as the terminal shows it."""
    text = io.StringIO()
    print_summary(Console(file=text, width=80), summary, folder)
    return text.getvalue()


async def test_a_run_that_a_critic_graded_says_so(tmp_path: Path) -> None:
    """The summary, its file and its print name the critic, its snapshot, and that nobody measured it."""
    critic = Critic(ScriptedLLM(toy_critic)).pin_to((PAIR,))
    summary = await trainer(tmp_path, grader=CriticGrader(critic)).train()
    assert summary.status == "completed"
    assert critic.snapshot is not None
    used = CriticDescription(identity=critic.identity, snapshot=critic.snapshot, prompt="critic@1", pairs=1)
    assert summary.critic == used
    stored = RunSummary.model_validate_json((tmp_path / "summary.json").read_text("utf-8"))
    assert stored.critic == used
    line = f"scores come from critic@1 pinned to 1 pairs ({critic.snapshot[:12]}): "
    assert f"{line}its accuracy was not measured\n" in printed(summary, tmp_path)


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


# ------------------------------------------------------------------------- notes for the failure analyst

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


async def test_failure_analysts_of_a_run_read_the_critic(tmp_path: Path) -> None:
    """Each failed case carries its note, and the summary says so; a run without a critic mentions none."""
    critic = Critic(UNMOVED).pin_to(())
    plain_optimizer, noted_optimizer = ScriptedLLM(toy_optimizer()), ScriptedLLM(toy_optimizer())
    plain = await trainer(tmp_path / "plain", optimizer=plain_optimizer).train()
    annotate = CriticAnnotator(critic)
    noted = await trainer(tmp_path / "noted", annotate=annotate, optimizer=noted_optimizer).train()
    without, shown = (
        [shown_to(call) for call in optimizer.calls if call.call_id.purpose == "analyst_failure"]
        for optimizer in (plain_optimizer, noted_optimizer)
    )
    assert shown
    assert all("No bow in it." in text for text in shown)
    assert not any("No bow in it." in text for text in without)
    assert critic.snapshot is not None
    used = CriticDescription(identity=critic.identity, snapshot=critic.snapshot, prompt="critic@1", pairs=0)
    assert (noted.noted_by, noted.critic, plain.noted_by, plain.critic) == (used, None, None, None)
    stored = json.loads((tmp_path / "plain" / "summary.json").read_text("utf-8"))
    assert not {"critic", "noted_by"} & stored.keys()
    assert "opinion" not in printed(plain, tmp_path)
    assert [score.hard for score in noted.scores] == [score.hard for score in plain.scores]


def test_the_snapshot_is_part_of_the_run(tmp_path: Path) -> None:
    """Runs with other notes, or without, are other runs."""
    critic = Critic(UNMOVED)
    notes = (None, CriticAnnotator(critic.pin_to(())), CriticAnnotator(critic.pin_to((PAIR,))))
    ids = [trainer(tmp_path, annotate=each).run_id for each in notes]
    assert len(set(ids)) == 3
    assert trainer(tmp_path, annotate=CriticAnnotator(critic.pin_to(()))).run_id == ids[1]
