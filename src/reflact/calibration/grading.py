"""The critic as a grader, for tasks whose answers no program can judge; and rollouts as steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from pydantic import JsonValue

from reflact.calibration.critic import Critic
from reflact.calibration.guards import split_words
from reflact.calibration.labeled_steps import LabeledStep, StepScorer, list_labeled_steps
from reflact.calibration.metrics import CriticMetrics, compute_metrics
from reflact.calibration.trace import Trace
from reflact.concurrency import fan_out
from reflact.environments.function_identity import identify_function
from reflact.errors import CallError, ConfigError, EnvironmentFailure
from reflact.memory.models import Action, Label, Transition
from reflact.records import CriticAccuracy, CriticDescription
from reflact.types import Grade, Item, Rollout, Score, Turn, canonical_json

# What is said instead of an answer, in words with spaces around them, and nothing else beside it.
NON_ANSWER: Final = re.compile(
    r" ((i m )?sorry )?(i )?(do not|don t) know( the answer)? | (i have )?no idea "
    r"| ((i am|i m) )?not sure "
    r"| i (cannot|can t|am unable to|m unable to) answer( this question)? "
)

# The largest progress.
MAX_PROGRESS = 10.0

# The progress of a question that is not answered yet.
BASE_PROGRESS = 0.0

# The action of a conversation's transitions; its argument is what was said.
REPLY_ACTION = "reply"

# Guards after which what the critic says is not what counts.
NO_CREDIT_GUARDS = frozenset({"no_change", "invented_evidence", "no_evidence", "vanished_evidence"})


def explain_empty_answer(answer: str, *, question: str, purpose: str) -> str | None:
    """Return in words why an answer says nothing, or None if it says something.

    It is empty, or the question again, or says only that it does not know, unless question or
    purpose have these words. If the purpose is the question, capitals and spaces make no other text
    of it.
    """
    if not answer.strip():
        return "the answer is empty"
    folded = [" ".join(text.split()).casefold() for text in (answer, question)]
    if answer.strip() == question.strip() or (purpose == question and folded[0] == folded[1]):
        return "the answer is the question again"
    said, *asked = (f" {' '.join(split_words(text))} " for text in (answer, question, purpose))
    if NON_ANSWER.fullmatch(said) and not any(said in text for text in asked):
        return "the answer says that it does not know"
    return None


def item_input(item: Item) -> str:
    """Return an item's input as a purpose: text as it is, anything else as canonical JSON."""
    return item.input if isinstance(item.input, str) else canonical_json(item.input)


def last_messages(turns: Sequence[Turn]) -> str:
    """Return the messages that the agent has not answered yet, or else its last words."""
    answered = max((n for n, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    unanswered = turns[answered + 1 :] or turns[answered:]
    return "\n\n".join(turn.content for turn in unanswered)


def list_transitions(
    rollout: Rollout, *, state: Callable[[Sequence[Turn]], JsonValue] = last_messages
) -> tuple[Transition, ...]:
    """Return one transition for each reply of the agent.

    Args:
        rollout: A conversation, without the skill.
        state: Renders the state from the turns so far: before a reply, and before the next one or
            at the end.
    """
    turns = rollout.turns
    places = [n for n, turn in enumerate(turns) if turn.role == "assistant"]
    return tuple(
        Transition(
            before=state(turns[:place]),
            action=Action(name=REPLY_ACTION, arguments=turns[place].content),
            after=state(turns[:following]),
        )
        for place, following in pairwise([*places, len(turns)])
    )


def label_replies(rollout: Rollout) -> tuple[Label | None, ...]:
    """Return what a program found of each reply, in the order of ``list_transitions``.

    The score is of what came out, so the last reply has it: ten times the soft score is progress
    after. Of an only reply progress before is 0, since nothing was answered; of several nobody
    knows it.
    """
    replies = sum(turn.role == "assistant" for turn in rollout.turns)
    if rollout.score is None or replies == 0:
        return (None,) * replies
    last = Label(
        progress_before=0 if replies == 1 else None,
        progress_after=10 * rollout.score.soft,
        source="program",
        reasoning=rollout.feedback or "",
    )
    return (*(None,) * (replies - 1), last)


class CriticGrader:
    """Grades answers by the opinion of a pinned critic; pass it to
    ``DatasetEnvironment(grade=...)``.

    An answer is a transition from the item's input, which counts 0, to the answer. Soft is progress
    after the answer over ten; hard is 1 if that progress reaches ``pass_threshold``. The critic's
    words are the feedback of an answer without full marks. An answer that says nothing is worth 0,
    and the critic is not asked. No reference is looked at.

    Args:
        critic: A critic that cannot change under a run: ``await critic.pin()`` or
            ``critic.pin_to(pairs)``.
        pass_threshold: The least progress of an answer that counts as a success, above 0 and at
            most 10.
        purpose: Says what an answer to an item is to achieve.
        measurements: What the critic's scores are worth, for the summary (see ``measure_critic``).

    Raises:
        ConfigError: The critic is not pinned, or ``pass_threshold`` is off the scale.
    """

    def __init__(
        self,
        critic: Critic,
        *,
        pass_threshold: float = 8.0,
        purpose: Callable[[Item], str] = item_input,
        measurements: CriticMetrics | None = None,
    ) -> None:
        if not 0 < pass_threshold <= MAX_PROGRESS:
            raise ConfigError(
                f"pass_threshold is {pass_threshold:g}; give a number above 0 and at most "
                f"{MAX_PROGRESS:g}"
            )
        self._critic = critic
        self._pass_threshold = pass_threshold
        self._purpose = purpose
        self.scored_by = describe_critic(critic, measurements)
        """The critic, as a run's summary names it."""
        self.identity: JsonValue = {
            "grader": "critic",
            "critic": self.scored_by.identity,
            "passes_at": float(pass_threshold),
            "progress_before": BASE_PROGRESS,
            "purpose": identify_function(purpose),
        }
        """The critic with its snapshot, the threshold and the purpose."""

    async def __call__(self, item: Item, answer: str) -> Grade:
        """Score an answer.

        Raises:
            EnvironmentFailure: The critic's replies were invalid, or the answer exceeds its
                context: a fault of the judge, which says nothing of the answer, so that the item
                stays unmeasured.
            ProviderError, BudgetSpent: The critic's endpoint or budget failed.
        """
        purpose = self._purpose(item)
        needed = f"{self._pass_threshold:g} needed"
        nothing = explain_empty_answer(answer, question=item_input(item), purpose=purpose)
        if nothing is not None:
            feedback = f"worth 0 of {MAX_PROGRESS:g}, {needed}: {nothing}"
            return Grade(score=Score.of(0), answer=answer, feedback=feedback)
        action = Action(name=REPLY_ACTION, arguments=answer)
        transition = Transition(before=item.input, action=action, after=answer)
        try:
            score = await self._critic.score(
                transition, purpose=purpose, progress_before=BASE_PROGRESS
            )
        except CallError as error:
            raise EnvironmentFailure(
                f"the critic gave no score for item {item.id!r}: {error}"
            ) from error
        said = score.evaluation
        progress = said.progress_after
        denied = [
            name.replace("_", " ") for name in score.applied_guards if name in NO_CREDIT_GUARDS
        ]
        why = f", no credit for the answer ({', '.join(denied)})" if denied else ""
        feedback = (
            f"a critic scored it {progress:g} of {MAX_PROGRESS:g}, {needed}{why}: {said.reasoning}"
        )
        hard = float(progress >= self._pass_threshold)
        return Grade(
            score=Score(hard=hard, soft=progress / MAX_PROGRESS),
            answer=answer,
            feedback=None if progress == MAX_PROGRESS else feedback,
        )


async def measure_critic(
    critic: Critic, traces: Sequence[Trace], *, max_concurrent: int = 8
) -> CriticMetrics | None:
    """Return what a critic's scores are worth on steps whose correct score is known; None without
    any.

    Measure the pinned critic that grades, on traces that its pairs were not made from. Steps that
    the model gave no valid score of are left out.

    Raises:
        ProviderError: The endpoint refused, failed or could not be reached.
        StoreError: The memory cannot be read.
    """
    steps = list_labeled_steps(traces)
    return await measure_critic_on_steps(critic, steps, max_concurrent=max_concurrent)


async def measure_critic_on_steps(
    critic: Critic, steps: Sequence[LabeledStep], *, max_concurrent: int
) -> CriticMetrics | None:
    """Return what a critic's scores are worth on steps; see ``measure_critic``."""
    scorer = StepScorer(critic, max_concurrent=max_concurrent, max_first_failures=None)
    scored = await scorer.score(steps, None)
    return compute_metrics([step for step in scored if step is not None])


def describe_critic(critic: Critic, measurements: CriticMetrics | None) -> CriticDescription:
    """Return a critic as a run's summary names it, with what it was measured to be worth.

    Raises:
        ConfigError: It is not pinned.
    """
    if critic.snapshot is None or critic.pairs is None:
        raise ConfigError(
            "the scores of a critic that reads a memory may change during a run: pass "
            "`await critic.pin()` or `critic.pin_to(pairs)`"
        )
    accuracy = None
    if measurements is not None:
        accuracy = CriticAccuracy(
            traces=measurements.n_traces,
            transitions=measurements.n_transitions,
            error=measurements.error,
            accuracy=measurements.accuracy,
        )
    return CriticDescription(
        identity=critic.identity,
        snapshot=critic.snapshot,
        prompt=critic.prompt,
        pairs=len(critic.pairs),
        accuracy=accuracy,
    )


class CriticAnnotator:
    """Notes progress before and after each reply of a trajectory; pass it to
    ``Trainer(annotator=...)``.

    Args:
        critic: A critic that cannot change under a run: ``await critic.pin()`` or
            ``critic.pin_to(pairs)``.
        purpose: Says what an item asks for.
        state: Renders the state from the turns so far (see ``list_transitions``).
        measurements: What the critic's scores are worth, for the summary.

    Raises:
        ConfigError: The critic is not pinned.
    """

    def __init__(
        self,
        critic: Critic,
        *,
        purpose: Callable[[Item], str] = item_input,
        state: Callable[[Sequence[Turn]], JsonValue] = last_messages,
        measurements: CriticMetrics | None = None,
    ) -> None:
        self._critic = critic
        self._purpose = purpose
        self._state = state
        self.scored_by = describe_critic(critic, measurements)
        """The critic, as a run's summary names it."""
        functions = {"purpose": identify_function(purpose), "state": identify_function(state)}
        self.identity = canonical_json({"notes": "critic", "critic": critic.identity, **functions})
        """The critic with its snapshot and the functions with their code, as canonical JSON."""

    async def annotate(self, item: Item, rollout: Rollout) -> tuple[str, ...]:
        """Return a line on each reply; one that the critic gave no valid score of is named as such.

        Raises:
            ProviderError, BudgetSpent: The critic's endpoint or budget failed.
        """
        purpose = self._purpose(item)

        async def describe_reply(numbered: tuple[int, Transition]) -> str:
            number, transition = numbered
            try:
                said = (await self._critic.score(transition, purpose=purpose)).evaluation
            except CallError:
                return f"reply {number}: a critic gave no score"
            progress = f"{said.progress_before:g} before and {said.progress_after:g} after"
            return (
                f"reply {number}: a critic gave {progress}, of {MAX_PROGRESS:g}: {said.reasoning}"
            )

        transitions = list_transitions(rollout, state=self._state)
        return await fan_out(describe_reply, list(enumerate(transitions, 1)))
