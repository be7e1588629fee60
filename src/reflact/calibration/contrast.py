"""Contrast pairs: for scored steps, a right evaluation beside a plausible one that is wrong.

Labels, or the agreement of independent critic samples, say what is right. Every candidate ends as a pair or as a
drop with its reason.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import anyio
from pydantic import JsonValue

from reflact.calibration.call_policies import LimitedCritic, LimitedLLM
from reflact.calibration.critic import Scorer
from reflact.calibration.curriculum import RoundPlan, deal_mistakes
from reflact.calibration.judges import compare_sides, plan_sides
from reflact.calibration.mistakes import (
    DEFAULT_CONTRAST_SETTINGS,
    KNOWN_MISTAKES,
    AskedMistakePlan,
    CandidateCallback,
    CandidatePlan,
    ContrastSettings,
    DroppedCandidate,
    DropReason,
    GenerationResult,
    ImpossiblePlan,
    Mistake,
    OtherPurposePlan,
    PurposeReply,
    find_other_purpose,
    make_mistake_check,
    make_purpose_check,
    mistake_reply_type,
    plan_candidates,
)
from reflact.calibration.perturbations import (
    DistanceBand,
    StepToContrast,
    build_other_purpose_pair,
    build_pairs,
    find_reference,
)
from reflact.calibration.rendering import show_transition
from reflact.calibration.state_diff import TransitionView, show_state
from reflact.concurrency import fan_out, run_in_thread
from reflact.errors import ConfigError, ContextOverflow, ReplyError
from reflact.memory.models import ContrastPair, Evaluation, ScoreEvent, Transition
from reflact.messages import CallId, RenderedPrompt
from reflact.prompts import PromptBook, fence, load_prompts
from reflact.protocols import LLM
from reflact.types import digest_json


class GenerationTask(NamedTuple):
    """What the pairs of a trace are to be in one round.

    Args:
        round_plan: Which mistakes are asked for, and how near to right; see ``curriculum.plan_next_round``.
        known_pair_ids: Ids of pairs that were there before the round, which are not generated again.
        other_purposes: The purposes of other traces.
    """

    purpose: str
    trace_id: str
    round_plan: RoundPlan
    known_pair_ids: Container[str] = ()
    other_purposes: Sequence[str] = ()


class PairModels(NamedTuple):
    """Who writes mistakes and other purposes, who compares blindly, and whose samples have to agree.

    Without a judge, ``settings.n_judges`` must be 0. Without a critic, labels alone say what is right.
    """

    writer: LLM
    judge: LLM | None = None
    critic: Scorer | None = None


async def generate_contrast_pairs(
    events: Sequence[ScoreEvent],
    task: GenerationTask,
    models: PairModels,
    *,
    settings: ContrastSettings = DEFAULT_CONTRAST_SETTINGS,
    prompts: PromptBook | None = None,
    on_result: CandidateCallback | None = None,
) -> GenerationResult:
    """Generate the contrast pairs of a trace, for one round.

    The outcome follows from what models say, never from when they say it. A round that is repeated over the same
    store repeats no call.

    Args:
        events: The scored steps of the trace.
        task: What the pairs are to be.
        models: The models that are asked.
        settings: How pairs are made.
        prompts: The prompts; None: the newest versions that are packaged.
        on_result: Gets each pair and each dropped candidate when it is ready.

    Raises:
        ConfigError: The round asks for a kind that nobody described, or there is no judge.
        ProviderError: An endpoint refused, failed or could not be reached.
        BudgetSpent: The budget has no room for a call.
    """
    if settings.n_judges and models.judge is None:
        raise ConfigError("contrast.n_judges asks for comparisons; pass a judge, or set it to 0")
    generator = _PairGenerator(task, models, settings, prompts or load_prompts(), on_result)
    states = [state for event in events for state in event.transition.payloads]
    chosen, repeated = await run_in_thread(partial(_select_with_repeats, events, settings), *states)
    n_each = settings.candidates_per_event
    n_events, seed = len(chosen), settings.seed
    hands = deal_mistakes(
        task.round_plan, trace_id=task.trace_id, n_events=n_events, per_event=n_each, seed=seed
    )
    starts = range(0, n_events * n_each, n_each)
    jobs = [_EventJob(*job) for job in zip(chosen, hands, starts, repeated, strict=True)]
    results = await fan_out(generator.generate, jobs, limit=settings.concurrency)
    return _build_result([one for each in results for one in each], n_skipped=len(events) - n_events)


def select_events(events: Sequence[ScoreEvent], settings: ContrastSettings) -> tuple[ScoreEvent, ...]:
    """Return the events to learn from: those that moved enough, by critic or label, and still ones.

    If neither spoke, it counts whether the state changed: agreement has still to say by how much.
    """
    return tuple(event for event in events if _is_selected(event, settings))


def _is_selected(event: ScoreEvent, settings: ContrastSettings) -> bool:
    judged = (event.evaluation, event.label)
    deltas = [one.delta for one in judged if one is not None and one.delta is not None]
    changed = event.transition.changes_state
    if settings.include_no_change and (deltas[:1] == [0] or not changed):
        return True
    return any(delta != 0 and abs(delta) >= settings.min_delta for delta in deltas) if deltas else changed


def _select_with_repeats(
    events: Sequence[ScoreEvent], settings: ContrastSettings
) -> tuple[tuple[ScoreEvent, ...], tuple[bool, ...]]:
    """Return the selected events, and for each whether an earlier one equals it but for its number."""
    chosen = select_events(events, settings)
    contents = [
        digest_json(
            {
                **event.model_dump(mode="json", exclude={"step", "transition"}),
                "transition": event.transition.json_object,
            }
        )
        for event in chosen
    ]
    first = {content: n for n, content in reversed(list(enumerate(contents)))}
    return chosen, tuple(first[content] != n for n, content in enumerate(contents))


def _build_result(results: Sequence[ContrastPair | DroppedCandidate], *, n_skipped: int) -> GenerationResult:
    pairs: dict[str, ContrastPair] = {}
    drops: list[DroppedCandidate] = []
    for one in results:
        if isinstance(one, DroppedCandidate):
            drops.append(one)
        elif one.id in pairs:
            drops.append(_build_duplicate(one))
        else:
            pairs[one.id] = one
    return GenerationResult(pairs=tuple(pairs.values()), dropped=tuple(drops), n_skipped=n_skipped)


class _EventJob(NamedTuple):
    """An event, the mistakes it was dealt, the number of its first candidate, whether an earlier event equals it."""

    event: ScoreEvent
    mistakes: tuple[str, ...]
    first_candidate: int
    is_repeated: bool


class _CandidateFailed(Exception):
    """A candidate that becomes no pair; never leaves this module."""

    def __init__(self, reason: DropReason, explanation: str) -> None:
        super().__init__(explanation)
        self.reason = reason


class _PairGenerator:
    """Generates pairs of a trace's events, for one round."""

    def __init__(
        self,
        task: GenerationTask,
        models: PairModels,
        settings: ContrastSettings,
        prompts: PromptBook,
        on_result: CandidateCallback | None,
    ) -> None:
        limit = anyio.Semaphore(settings.concurrency)
        self._task = task
        self._band = DistanceBand(task.round_plan.nearest, task.round_plan.farthest)
        self._mistakes = _collect_mistakes(task.round_plan, settings)
        self._writer = LimitedLLM(models.writer, limit)
        self._judge = None if models.judge is None else LimitedLLM(models.judge, limit)
        self._critic = None if models.critic is None else LimitedCritic(models.critic, limit)
        self._settings = settings
        self._prompts = prompts
        self._on_result = on_result
        self._reported_ids: set[str] = set()

    async def generate(self, job: _EventJob) -> tuple[ContrastPair | DroppedCandidate, ...]:
        """Return what became of an event's candidates, in their order."""
        event, plans = job.event, tuple[CandidatePlan, ...]()
        try:
            if job.is_repeated:
                raise _CandidateFailed("duplicate", "an earlier step of this trace is equal")
            agreed = (
                None if event.label is not None else await self._find_agreement(event, self._task.purpose)
            )
            plans = await run_in_thread(
                partial(self._plan_candidates, job, agreed), *event.transition.payloads
            )
        except _CandidateFailed as failed:
            plans = (ImpossiblePlan(failed.reason, str(failed)),) * len(job.mistakes)
        return await fan_out(lambda n: self._generate_candidate(job, n, plans[n]), range(len(plans)))

    def _plan_candidates(self, job: _EventJob, agreed: Evaluation | None) -> tuple[CandidatePlan, ...]:
        right = agreed or find_reference(job.event)
        if right is None:
            raise _CandidateFailed(
                "unverified", "the label has the progress after, and not the progress before"
            )
        step = StepToContrast(job.event, right, self._task.purpose, self._task.trace_id, self._band)
        return plan_candidates(
            [self._mistakes[name] for name in job.mistakes],
            step,
            ready_pairs=[pair for pair in build_pairs(step) if pair.id not in self._task.known_pair_ids],
            other_purpose=self._plan_other_purpose(step),
        )

    def _plan_other_purpose(self, step: StepToContrast) -> OtherPurposePlan | None:
        """Return the round's look at a step under another purpose, each purpose in one round only."""
        index = self._task.round_plan.number - 1
        purpose = find_other_purpose(step.purpose, self._task.other_purposes, index=index)
        is_possible = purpose is not None or self._settings.write_other_purposes
        return OtherPurposePlan(step, purpose) if self._critic is not None and is_possible else None

    async def _generate_candidate(
        self, job: _EventJob, number: int, plan: CandidatePlan
    ) -> ContrastPair | DroppedCandidate:
        result: ContrastPair | DroppedCandidate
        try:
            pair = await self._build_pair(plan)
            result = await self._judge_pair(pair, job.first_candidate + number)
        except (_CandidateFailed, ReplyError, ContextOverflow) as error:
            reason: DropReason = "bad_reply" if isinstance(error, ReplyError) else "too_long"
            result = DroppedCandidate(
                reason=error.reason if isinstance(error, _CandidateFailed) else reason,
                explanation=str(error),
                step=job.event.step,
                mistake=job.mistakes[number],
                construction=plan.construction,
            )
        await self._report_result(result)
        return result

    async def _report_result(self, result: ContrastPair | DroppedCandidate) -> None:
        """Report a result; of equal pairs the one that finished first, the others as drops."""
        if self._on_result is None:
            return
        if isinstance(result, ContrastPair):
            if result.id in self._reported_ids:
                result = _build_duplicate(result)
            else:
                self._reported_ids.add(result.id)
        await self._on_result(result)

    async def _find_agreement(self, event: ScoreEvent, purpose: str) -> Evaluation:
        """Return the middle one of several samples; asking ends as soon as they cannot agree any more.

        They agree if their progress before and after each lie within ``max_spread``. A sample from which a guard
        took credit for a change is no opinion, and neither is a missing one.
        """
        if self._critic is None:
            raise _CandidateFailed(
                "unverified", "there is neither a label nor a critic whose samples could agree"
            )
        found: list[Evaluation] = []
        for trial in range(1, self._settings.n_samples + 1):  # trial 0 is the score of the agent's own loop
            try:
                score = await self._critic.score(event.transition, purpose=purpose, trial=trial)
            except (ReplyError, ContextOverflow) as error:
                raise _CandidateFailed("disagreement", f"a sample gave no score: {error}") from error
            if event.transition.changes_state and score.raw.progress_after != score.evaluation.progress_after:
                raise _CandidateFailed("disagreement", "a sample rests on no evidence")
            found.append(score.evaluation)
            sides = ([one.progress_before for one in found], [one.progress_after for one in found])
            spread, limit = max(max(phis) - min(phis) for phis in sides), self._settings.max_spread
            if spread > limit:
                explanation = f"samples lie {spread:g} apart, more than {limit:g}"
                raise _CandidateFailed("disagreement", explanation)
        found.sort(key=lambda one: (one.progress_after, one.progress_before, one.reasoning))
        return found[(len(found) - 1) // 2]

    async def _build_pair(self, plan: CandidatePlan) -> ContrastPair:
        match plan:
            case ImpossiblePlan():
                raise _CandidateFailed(plan.reason, plan.explanation)
            case OtherPurposePlan():
                pair = await self._score_under_other_purpose(plan)
            case AskedMistakePlan():
                pair = await self._ask_for_mistake(plan)
            case _:
                return plan
        await run_in_thread(lambda: pair.id, *pair.transition.payloads)
        return pair

    async def _score_under_other_purpose(self, plan: OtherPurposePlan) -> ContrastPair:
        step, purpose = plan.step, plan.purpose
        if purpose is None:
            shown = fence("purpose", show_state(step.purpose))
            prompt = self._prompts.render("other_purpose", {"purpose": shown})
            part, trial = digest_json(step.purpose)[:32], self._task.round_plan.number
            call_id = CallId(role="contrast", purpose="other_purpose", part=part, trial=trial)
            check = make_purpose_check(step.purpose)
            reply = await self._writer.ask(prompt, PurposeReply, call_id=call_id, check=check)
            purpose = reply.value.purpose
        right = await self._find_agreement(step.event, purpose)
        found = build_other_purpose_pair(step, purpose=purpose, right=right)
        if found is None:
            raise _CandidateFailed(
                "not_confirmed",
                f"samples agree on {right.progress_after:g} for another purpose, which does not make the "
                "evaluation wrong for it by a distance of this round",
            )
        return found

    async def _ask_for_mistake(self, plan: AskedMistakePlan) -> ContrastPair:
        step, kind = plan.step, plan.mistake.name
        prompt, call_id = await run_in_thread(
            partial(self._build_question, plan), *step.event.transition.payloads
        )
        check = make_mistake_check(step.right, plan.reach)
        reply = (await self._writer.ask(prompt, mistake_reply_type(kind), call_id=call_id, check=check)).value
        wrong = step.right.model_copy(
            update={"progress_after": reply.phi_after, "reasoning": reply.reasoning, "evidence": ()}
        )
        version = self._prompts.prompts["contrast"].header.version
        pair = step.build_pair(wrong, construction="asked", mistake=kind, reason=reply.why)
        asked = {"prompt": f"contrast@{version}", "model": self._writer.identity}
        return pair.model_copy(update={"provenance": pair.provenance.model_copy(update=asked)})

    def _build_question(self, plan: AskedMistakePlan) -> tuple[RenderedPrompt, CallId]:
        step, number = plan.step, self._task.round_plan.number
        right, mistake, reach = step.right, plan.mistake, plan.reach
        hints = "It must be hard to notice: the judge sounds careful and names real details."
        variables = {
            "step": self._format_step(step.purpose, step.event.transition),
            "right": fence("right", show_state(f"{right.progress_after:g}: {right.reasoning}")),
            "mistake": mistake.name,
            "description": mistake.description,
            "low": f"{reach.low:g}",
            "high": f"{reach.high:g}",
            "hints": hints if number > 1 else "",
        }
        about: JsonValue = {
            "purpose": step.purpose,
            "transition": step.event.transition.json_object,
            "right": right.hashed_fields,
            "mistake": mistake.model_dump(mode="json"),
            "reach": reach.model_dump(mode="json"),
            "round": number,
        }
        part = digest_json(about)[:32]
        call_id = CallId(role="contrast", purpose="mistake", part=part, trial=plan.variant)
        return self._prompts.render("contrast", variables), call_id

    async def _judge_pair(self, pair: ContrastPair, candidate_index: int) -> ContrastPair:
        if pair.id in self._task.known_pair_ids:
            raise _CandidateFailed("known", "the pair was there before")
        n_judges, seed = self._settings.n_judges, self._settings.seed
        skips = self._settings.judged_pairs == "unproven" and _is_proven(pair)
        if self._judge is None or n_judges == 0 or skips:
            return pair
        outcome, found = await compare_sides(
            pair,
            plan_sides(candidate_index, n_judges, seed=seed),
            step=await run_in_thread(
                partial(self._format_step, pair.purpose, pair.transition), *pair.transition.payloads
            ),
            judge=self._judge,
            prompts=self._prompts,
            min_agreement=self._settings.min_agreement,
        )
        if outcome != "kept":
            raise _CandidateFailed(
                outcome, f"{sum(found)} of the first {len(found)} comparisons found the right side"
            )
        return pair.model_copy(update={"n_judgements": n_judges, "agreement": sum(found) / n_judges})

    def _format_step(self, purpose: str, transition: Transition) -> str:
        return show_transition(purpose, TransitionView(transition), max_tokens=self._settings.state_tokens)


def _is_proven(pair: ContrastPair) -> bool:
    """Whether a pair's sides are right and wrong by label and construction, whatever a model thinks."""
    return pair.label_source != "agreement" and pair.construction not in {"asked", "other_purpose"}


def _build_duplicate(pair: ContrastPair) -> DroppedCandidate:
    return DroppedCandidate(
        reason="duplicate",
        explanation="an earlier candidate of this round gave the same pair",
        step=pair.provenance.step or 0,
        mistake=pair.mistake,
        construction=pair.construction,
    )


def _collect_mistakes(round_plan: RoundPlan, settings: ContrastSettings) -> Mapping[str, Mistake]:
    """Return all kinds of mistakes by name."""
    known = {mistake.name: mistake for mistake in (*KNOWN_MISTAKES, *settings.mistakes)}
    missing = sorted(kind.mistake for kind in round_plan.shares if kind.mistake not in known)
    if missing:
        raise ConfigError(
            f"contrast.mistakes: the round asks for {', '.join(missing)}, which have no description; add "
            "their names and descriptions"
        )
    return known
