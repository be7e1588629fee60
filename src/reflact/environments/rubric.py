"""Graders of cases: checks by a program, and sentences that a model judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict, Field, JsonValue, PrivateAttr, ValidationError

from reflact.concurrency import fan_out
from reflact.config.loading import is_changeable
from reflact.config.models import ModelConfig
from reflact.config.training import TrainerConfig
from reflact.data import DataSet, read_rows
from reflact.environments.comparison import normalize, quote_json
from reflact.environments.graders import CheckedGrader
from reflact.errors import CallError, ConfigError, DataError, EnvironmentFailure
from reflact.jsonutil import describe_problems
from reflact.messages import CallId, ReplyModel
from reflact.prompts import Prompt, PromptBook, fence, load_prompts
from reflact.protocols import LLM
from reflact.records import JudgeError
from reflact.skill_evals import CaseAnswer, Rubric
from reflact.types import FrozenModel, Grade, Item, Score, Split, canonical_json, digest_json

RUBRIC_PROMPT = "rubric"


class ChecksGrader(CheckedGrader[Rubric]):
    """The checks of a case on the answer and on the files that an agent makes.

    Soft is the share of checks that pass; hard is 1 if all do. References are objects with
    ``checks``. The sentences of a case are for the optimizer.
    """

    name: ClassVar[str] = "checks"
    meaning: ClassVar[str] = "A program checks the answer, and the files that the agent makes."

    async def __call__(self, item: Item, answer: str) -> Grade:
        """Check an answer."""
        (rubric,) = self._list_accepted(item)
        failures = [c.explain_failure(CaseAnswer.read(answer)) for c in rubric.checks]
        return build_grade(item, answer, failures, rubric.sentences)

    def _list_accepted(self, item: Item) -> list[Rubric]:
        try:
            rubric = self._read(item.reference)
        except ValueError as error:
            raise DataError(f"item {item.id!r} cannot be graded by {self.name}: {error}") from None
        return [rubric]

    def _read(self, reference: JsonValue) -> Rubric:
        rubric = read_rubric(reference)
        if not rubric.checks:
            raise ValueError("it has no checks; give it some, or set environment.grader: rubric")
        return rubric

    def _write(self, accepted: Rubric) -> None:
        return None


class SentenceReply(ReplyModel):
    """What the judge is asked to fill in."""

    reasoning: str = Field(
        max_length=2000, description="What the sentence asks for, and what the answer shows of it."
    )
    evidence: str = Field(description="Text copied from the answer, word for word, that decides.")
    met: bool = Field(description="Whether the sentence is true of the answer.")


class RubricGrader(ChecksGrader):
    """The sentences of a case, which a model judges one by one, and its checks.

    The model sees the task, the answer and the sentence alone. Soft is the share of sentences and
    checks that are met; hard is 1 if all are. References are objects with ``sentences``, ``checks``
    or both, a list of sentences, or one sentence. An empty answer meets no sentence, and the judge
    is not asked.

    Args:
        votes: How often each sentence is judged; it is met if more than half of the votes say so.
        judge: The judge's model and prompt, for the identity.
    """

    name: ClassVar[str] = "rubric"
    meaning: ClassVar[str] = (
        "A model reads which of the sentences about a good answer are true of the answer. Some may "
        "be checked by a program."
    )
    votes: int = Field(default=1, ge=1)
    judge: str
    _llm: LLM | None = PrivateAttr(default=None)
    _prompt: Prompt | None = PrivateAttr(default=None)

    def connect(self, llm: LLM, prompts: PromptBook) -> Self:
        """Return the grader with the model that judges."""
        connected = self.model_copy()
        connected._llm = llm
        connected._prompt = prompts.prompts[RUBRIC_PROMPT]
        return connected

    async def __call__(self, item: Item, answer: str) -> Grade:
        """Judge an answer.

        Raises:
            EnvironmentFailure: The judge's replies were invalid, or the answer exceeds its context:
                a fault of the judge, so that the item stays unmeasured.
            ProviderError, BudgetSpent: The judge's endpoint or budget failed.
        """
        (rubric,) = self._list_accepted(item)
        result = CaseAnswer.read(answer)
        ask = partial(self.explain_failure, item.input, result.text)
        try:
            failures = list(await fan_out(ask, rubric.sentences))
        except CallError as error:
            raise EnvironmentFailure(f"the judge failed on item {item.id!r}: {error}") from error
        failures += [check.explain_failure(result) for check in rubric.checks]
        return build_grade(item, answer, failures, ())

    async def explain_failure(self, task: JsonValue, answer: str, sentence: str) -> str | None:
        """Return why a sentence is not true of an answer, or None if it is.

        Raises:
            CallError: The model gave no valid vote.
            ProviderError, BudgetSpent: The endpoint or the budget failed.
        """
        if not answer.strip():
            return f"not met: {sentence} (the answer is empty)"
        ask = partial(self._vote, task, answer, sentence)
        votes = await fan_out(ask, range(self.votes))
        against = [vote for vote in votes if not vote.met]
        if 2 * len(against) < len(votes):
            return None
        return f"not met: {sentence} ({against[0].reasoning.strip()})"

    async def _vote(self, task: JsonValue, answer: str, sentence: str, trial: int) -> SentenceReply:
        if self._llm is None or self._prompt is None:
            raise ConfigError("the judge of a rubric is connected by a run: train or evaluate")
        question = task if isinstance(task, str) else canonical_json(task)
        texts = {"task": question, "answer": answer, "sentence": sentence}
        prompt = self._prompt.render({name: fence(name, text) for name, text in texts.items()})
        text = normalize(answer)

        def check(reply: SentenceReply) -> None:
            quote = normalize(reply.evidence)
            if reply.met and not quote:
                raise ValueError("evidence is empty: copy the part of the answer that decides")
            if quote not in text:
                raise ValueError(
                    "evidence is not in the answer: copy a part of it, word for word, without "
                    "leaving anything out"
                )

        part = digest_json([task, answer, sentence])[:16]
        call_id = CallId(role="critic", purpose="rubric", part=part, trial=trial)
        reply = await self._llm.ask(prompt, SentenceReply, call_id=call_id, check=check)
        return reply.value

    def _read(self, reference: JsonValue) -> Rubric:
        return read_rubric(reference)


def read_rubric(reference: JsonValue) -> Rubric:
    """Return the rubric of a reference; ValueError if it is none."""
    value = reference
    if isinstance(reference, str | list):
        value = {"sentences": [reference] if isinstance(reference, str) else reference}
    try:
        return Rubric.model_validate(value)
    except ValidationError as error:
        raise ValueError(
            f"the reference {quote_json(reference)} is no rubric: {describe_problems(error)}"
        ) from None


def build_grade(
    item: Item, answer: str, failures: Sequence[str | None], remarks: Sequence[str]
) -> Grade:
    """Return the grade of an answer from what each part of a rubric says of it, None if it is met.

    ``remarks`` are added to the feedback of an answer that fails.
    """
    wrong = [failure for failure in failures if failure is not None]
    expected = item.metadata.get("expected_output")
    wanted = [f"expected: {expected}"] if expected else []
    score = Score(hard=float(not wrong), soft=1 - len(wrong) / len(failures))
    feedback = "\n".join([*wrong, *wanted, *remarks]) if wrong else None
    return Grade(score=score, answer=answer, feedback=feedback)


def build_rubric_grader(config: TrainerConfig) -> RubricGrader:
    """Return a configuration's grader of sentences, whose judge is not connected yet."""
    model = config.models.critic
    settings = {
        name: value
        for name, value in model.model_dump(mode="json").items()
        if not is_changeable(ModelConfig.model_fields[name])
    }
    prompt = load_prompts(config.prompts).prompts[RUBRIC_PROMPT]
    identity: dict[str, JsonValue] = {
        "llm": settings,
        "prompt": [prompt.header.version, prompt.checksum[:16]],
    }
    votes = config.environment.rubric_votes
    return RubricGrader(votes=votes, judge=canonical_json(identity))


# ------------------------------------------------------------------------ the judge's own error


class Mark(FrozenModel):
    """What a person says of a sentence about an answer to a task, by its input or its item's id."""

    model_config = ConfigDict(extra="ignore")

    id: int | str | None = None
    input: JsonValue = None
    answer: str
    sentence: str
    met: bool


def read_marks(path: Path, data: DataSet) -> tuple[Mark, ...]:
    """Return the marks of a file, each with its input.

    Raises:
        DataError: The file cannot be read, or a row is wrong; names the row.
    """
    tasks = {item.id: item.input for split in Split for item in data.items(split)}
    marks = []
    try:
        rows = read_rows(path)
    except OSError as error:
        raise DataError(f"environment.rubric_marks: cannot read {path}: {error.strerror}") from None
    for value, where in rows:
        try:
            mark = Mark.model_validate(value)
        except ValidationError as error:
            raise DataError(f"{where}: {describe_problems(error)}") from None
        if mark.input is None:
            mark = mark.model_copy(update={"input": tasks.get(str(mark.id))})
        if mark.input is None:
            raise DataError(f"{where}: give the mark an `input`, or the `id` of an item")
        marks.append(mark)
    return tuple(marks)


async def measure_judge(
    grader: RubricGrader, marks: Sequence[Mark], *, limit: int
) -> JudgeError | None:
    """Return how often a judge errs on sentences that a person marked; None without any.

    Raises:
        ProviderError, BudgetSpent: The judge's endpoint or budget failed.
    """

    async def ask(mark: Mark) -> bool | None:
        answer = CaseAnswer.read(mark.answer).text
        try:
            return await grader.explain_failure(mark.input, answer, mark.sentence) is None
        except CallError:
            return None

    replies = await fan_out(ask, marks, limit=limit)
    pairs = Counter((mark.met, reply) for mark, reply in zip(marks, replies, strict=True))
    if not pairs:
        return None
    return JudgeError(
        met=pairs[True, True] + pairs[True, False],
        unmet=pairs[False, True] + pairs[False, False],
        false_unmet=pairs[True, False],
        false_met=pairs[False, True],
        unjudged=pairs[True, None] + pairs[False, None],
    )
