"""Contrast pairs: for scored steps, a right evaluation beside a plausible one that is wrong.

Labels, or the agreement of independent critic samples, say what is right. Every candidate ends as a pair or as a
drop with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import anyio
from pydantic import JsonValue

from reflact.calibration.call_policies import LimitedCritic, LimitedLLM
from reflact.calibration.critic import Scorer
from reflact.calibration.judges import compare_sides, plan_sides
from reflact.calibration.mistakes import (
    DEFAULT_CONTRAST_SETTINGS,
    AskedMistakePlan,
    CandidateCallback,
    CandidatePlan,
    ContrastSettings,
    DroppedCandidate,
    DropReason,
    GenerationResult,
    ImpossiblePlan,
    OtherPurposePlan,
    PurposeReply,
    make_mistake_check,
    make_purpose_check,
    mistake_reply_type,
)
from reflact.calibration.perturbations import build_other_purpose_pair
from reflact.calibration.planning import (
    EventJob,
    GenerationTask,
    TracePlan,
    collect_mistakes,
    plan_jobs,
    plan_ways,
)
from reflact.calibration.transition_view import TransitionView, show_state, show_transition
from reflact.concurrency import fan_out, run_in_thread
from reflact.errors import CallError, ConfigError, ContextOverflow
from reflact.memory.models import ContrastPair, Evaluation, ScoreEvent, Transition
from reflact.messages import CallId, RenderedPrompt
from reflact.prompts import PromptBook, fence, load_prompts
from reflact.protocols import LLM
from reflact.types import digest_json


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
    plan = await plan_jobs(events, task, settings)
    return await generate_planned_pairs(
        plan, task, models, settings=settings, prompts=prompts, on_result=on_result
    )


async def generate_planned_pairs(
    plan: TracePlan,
    task: GenerationTask,
    models: PairModels,
    *,
    settings: ContrastSettings,
    prompts: PromptBook | None = None,
    on_result: CandidateCallback | None = None,
) -> GenerationResult:
    """Generate the planned pairs of a trace; see ``generate_contrast_pairs``."""
    if settings.n_judges and models.judge is None:
        raise ConfigError("contrast.n_judges asks for comparisons; pass a judge, or set it to 0")
    collect_mistakes(task.round_plan, settings)  # before any call
    generator = _PairGenerator(task, models, settings, prompts or load_prompts(), on_result)
    results = await fan_out(generator.generate, plan.jobs, limit=settings.concurrency)
    return _build_result([one for each in results for one in each], n_skipped=plan.n_skipped)


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
        self._writer = LimitedLLM(models.writer, limit)
        self._judge = None if models.judge is None else LimitedLLM(models.judge, limit)
        self._critic = None if models.critic is None else LimitedCritic(models.critic, limit)
        self._settings = settings
        self._prompts = prompts
        self._on_result = on_result
        self._reported_ids: set[str] = set()

    async def generate(self, job: EventJob) -> tuple[ContrastPair | DroppedCandidate, ...]:
        """Return what became of an event's candidates, in their order."""
        ways = await self._plan_ways(job) if None in job.plans else ()
        plans = [ways[n] if plan is None else plan for n, plan in enumerate(job.plans)]
        return await fan_out(lambda n: self._generate_candidate(job, n, plans[n]), range(len(plans)))

    async def _plan_ways(self, job: EventJob) -> tuple[CandidatePlan, ...]:
        event, can_sample, agreed = job.event, self._critic is not None, None
        if event.label is None:
            try:
                agreed = await self._find_agreement(event, self._task.purpose)
            except _CandidateFailed as failed:
                return (ImpossiblePlan(failed.reason, str(failed)),) * len(job.mistakes)
        work = partial(plan_ways, job, self._task, self._settings, can_sample=can_sample, agreed=agreed)
        return await run_in_thread(work, *event.transition.payloads)

    async def _generate_candidate(
        self, job: EventJob, number: int, plan: CandidatePlan
    ) -> ContrastPair | DroppedCandidate:
        result: ContrastPair | DroppedCandidate
        try:
            pair = await self._build_pair(plan)
            result = await self._judge_pair(pair, job.first_candidate + number)
        except (_CandidateFailed, CallError) as error:
            reason: DropReason = "too_long" if isinstance(error, ContextOverflow) else "bad_reply"
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
            except CallError as error:
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
        if "before" in self._prompts.prompts["contrast"].header.variables:  # from version 2 on
            variables["before"] = f"{right.progress_before:g}"
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
