"""Labelled steps, and the scores of them that measure a critic and decide a replay test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reflact.calibration.critic import Critic
from reflact.calibration.metrics import ScoredStep
from reflact.calibration.splits import deduplicate_traces
from reflact.calibration.trace import Trace
from reflact.concurrency import fan_out
from reflact.errors import CallError, RunFailed
from reflact.jsonutil import is_same_json
from reflact.memory.cards import TraceIdentity
from reflact.memory.models import ContrastPair, Evaluation, Label, Transition

# A critic may leave so many of its first questions without a valid score before a calibration ends.
MAX_FIRST_FAILURES = 10


class LabeledStep(NamedTuple):
    """A step whose correct score is known, and the contrast pairs that speak of it."""

    trace: TraceIdentity
    number: int
    purpose: str
    transition: Transition
    label: Label
    pairs: tuple[ContrastPair, ...] = ()

    @property
    def trace_id(self) -> str:
        """The trace that it is a step of."""
        return self.trace.id

    def build_scored_step(self, evaluation: Evaluation) -> ScoredStep:
        """Return an evaluation of this step beside what is right."""
        return ScoredStep(
            trace_id=self.trace.id,
            step=self.number,
            label=self.label,
            evaluation=evaluation,
            wrong_progress=tuple(pair.wrong.progress_after for pair in self.pairs),
            mistakes=tuple(sorted({pair.mistake for pair in self.pairs})),
        )

    def is_revealed_by(self, pair: ContrastPair) -> bool:
        """Whether a pair tells the step's score: it shows the state after it, under its purpose."""
        after = self.transition.after
        states = (pair.transition.before, pair.transition.after)
        return pair.purpose == self.purpose and any(is_same_json(one, after) for one in states)


def list_labeled_steps(traces: Iterable[Trace]) -> tuple[LabeledStep, ...]:
    """Return the steps of traces whose correct score is known; copies count once."""
    return tuple(
        LabeledStep(trace.recording, event.step, trace.purpose, event.transition, event.label)
        for trace in deduplicate_traces(traces)
        for event in trace.events
        if event.label is not None
    )


def list_pair_steps(pairs: Iterable[ContrastPair]) -> tuple[LabeledStep, ...]:
    """Return the steps of labelled pairs, each once; the right side is the label."""
    pairs_by_subject: dict[str, list[ContrastPair]] = defaultdict(list)
    for pair in pairs:
        if pair.label_source is not None:
            pairs_by_subject[pair.hashes.subject].append(pair)
    steps = []
    for subject, same in sorted(pairs_by_subject.items()):
        first = same[0]
        assert first.label_source is not None
        label = Label(
            progress_before=first.right.progress_before,
            progress_after=first.right.progress_after,
            source=first.label_source,
            reasoning=first.right.reasoning,
        )
        trace = TraceIdentity(first.provenance.trace_id or subject, (subject,))
        number = first.provenance.step or 0
        step = LabeledStep(trace, number, first.purpose, first.transition, label, tuple(same))
        steps.append(step)
    return tuple(steps)


class StepScorer:
    """Scores labelled steps with one critic.

    Args:
        critic: The critic.
        max_concurrent: Steps at a time.
        max_first_failures: So many of the first scores may be invalid; None: all.
    """

    def __init__(
        self,
        critic: Critic,
        *,
        max_concurrent: int,
        max_first_failures: int | None = MAX_FIRST_FAILURES,
    ) -> None:
        self.critic = critic
        self._max_concurrent = max_concurrent
        self._max_first_failures = max_first_failures
        self._n_failures = 0
        self._has_scored = False

    async def score(
        self, steps: Sequence[LabeledStep], pairs: Sequence[ContrastPair] | None
    ) -> tuple[ScoredStep | None, ...]:
        """Score steps; None stands for a step without a valid score.

        Worked examples are chosen from exactly these pairs, without those that reveal the step's
        score; if pairs is None, the critic chooses as it always does.

        Raises:
            RunFailed: None of the first scores is valid.
        """

        async def score_step(step: LabeledStep) -> ScoredStep | None:
            examples = None
            if pairs is not None:
                examples = [pair for pair in pairs if not step.is_revealed_by(pair)]
            try:
                score = await self.critic.score(
                    step.transition, purpose=step.purpose, pairs=examples
                )
            except CallError as error:
                self._count_failure(error)
                return None
            self._has_scored = True
            return step.build_scored_step(score.evaluation)

        return await fan_out(score_step, steps, limit=self._max_concurrent)

    def _count_failure(self, error: CallError) -> None:
        self._n_failures += 1
        if self._has_scored or self._n_failures != self._max_first_failures:
            return
        raise RunFailed(
            f"the critic gave no valid score of any of the first {self._n_failures} questions, so "
            f"no further call is made; the last error: {error}. Check `model`, `base_url`, `mode` "
            "and `max_tokens` of models.critic; paid replies are stored"
        ) from error
