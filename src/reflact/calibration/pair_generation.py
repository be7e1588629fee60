"""Makes the candidates of one round into pairs or drops; see ``contrast``."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import anyio
from pydantic import JsonValue

from reflact.calibration.call_policies import LimitedCritic, LimitedLLM
from reflact.calibration.critic import Scorer, find_agreement
from reflact.calibration.curriculum import RoundPlan
from reflact.calibration.judges import compare_sides, plan_sides
from reflact.calibration.mistakes import (
    KNOWN_MISTAKES,
    AskedMistakePlan,
    CandidateCallback,
    CandidateChoice,
    ContrastSettings,
    DroppedCandidate,
    DropReason,
    ImpossiblePlan,
    Mistake,
    OtherPurposePlan,
    PurposeReply,
    build_mistake_prompt,
    build_purpose_prompt,
    choose_candidates,
    find_other_purpose,
    make_mistake_check,
    make_purpose_check,
    mistake_reply_type,
)
from reflact.calibration.perturbations import (
    DistanceBand,
    PairCandidate,
    ReferenceEvaluation,
    build_candidates,
    build_other_purpose_candidate,
    find_reference,
)
from reflact.calibration.rendering import show_transition
from reflact.concurrency import fan_out, run_in_thread
from reflact.errors import ConfigError, ContextOverflow, ReplyError
from reflact.memory.models import Construction, ContrastPair, Evaluation, Provenance, ScoreEvent, Transition
from reflact.messages import CallId, RenderedPrompt
from reflact.prompts import PromptBook
from reflact.protocols import LLM
from reflact.types import digest_json

CandidatePlan: TypeAlias = CandidateChoice[ContrastPair]
"""How a candidate comes about; pairs that need no model are there already."""


class EventJob(NamedTuple):
    """An event with the kinds of mistakes that it was dealt.

    Args:
        event: The scored step.
        mistakes: The kinds, one for each candidate.
        first_candidate: The number of its first candidate in the round.
        is_repeated: Whether an earlier event equals it.
    """

    event: ScoreEvent
    mistakes: tuple[str, ...]
    first_candidate: int
    is_repeated: bool


class _CandidateFailed(Exception):
    """A candidate that becomes no pair; never leaves this module."""

    def __init__(self, reason: DropReason, explanation: str) -> None:
        super().__init__(explanation)
        self.reason = reason


class PairGenerator:
    """Makes pairs of a trace's events, for one round; the arguments are those of ``contrast``.

    Raises:
        ConfigError: The round asks for a kind of mistake that nobody described.
    """

    def __init__(
        self,
        purpose: str,
        trace_id: str,
        round_plan: RoundPlan,
        *,
        llm: LLM,
        judge: LLM | None,
        critic: Scorer | None,
        settings: ContrastSettings,
        prompts: PromptBook,
        known_pair_ids: Container[str],
        other_purposes: Sequence[str],
        on_result: CandidateCallback | None,
    ) -> None:
        gate = anyio.Semaphore(settings.concurrency)
        self._purpose = purpose
        self._trace_id = trace_id
        self._round_plan = round_plan
        self._band = DistanceBand(round_plan.nearest, round_plan.farthest)
        self._mistakes = collect_mistakes(round_plan, settings)
        self._llm = LimitedLLM(llm, gate)
        self._judge = None if judge is None else LimitedLLM(judge, gate)
        self._critic = None if critic is None else LimitedCritic(critic, gate)
        self._settings = settings
        self._prompts = prompts
        self._known_pair_ids = known_pair_ids
        self._other_purposes = other_purposes
        self._on_result = on_result
        self._reported_ids: set[str] = set()

    async def generate(self, job: EventJob) -> tuple[ContrastPair | DroppedCandidate, ...]:
        """Return what became of an event's candidates, in their order."""
        choices = await self._plan_candidates(job)
        return await fan_out(lambda n: self._generate_candidate(job, n, choices), range(len(job.mistakes)))

    async def _plan_candidates(self, job: EventJob) -> tuple[CandidatePlan, ...]:
        if job.is_repeated:
            return (ImpossiblePlan("duplicate", "an earlier step of this trace is equal"),) * len(
                job.mistakes
            )
        try:
            agreed_on = (
                None if job.event.label is not None else await self._find_agreement(job.event, self._purpose)
            )
            return await run_in_thread(
                partial(self._choose_ways, job, agreed_on), *job.event.transition.payloads
            )
        except _CandidateFailed as failed:
            return (ImpossiblePlan(failed.reason, str(failed)),) * len(job.mistakes)

    def _choose_ways(self, job: EventJob, agreed_evaluation: Evaluation | None) -> tuple[CandidatePlan, ...]:
        label = _choose_reference(job.event, agreed_evaluation)
        possible = build_candidates(job.event, label, purpose=self._purpose, band=self._band)
        pairs = [self._to_contrast_pair(job.event, one) for one in possible]
        return choose_candidates(
            job.mistakes,
            label,
            ready_candidates=[pair for pair in pairs if pair.id not in self._known_pair_ids],
            other_purpose=self._choose_other_purpose(label),
            band=self._band,
            mistakes=self._mistakes,
        )

    async def _generate_candidate(
        self, job: EventJob, number: int, choices: Sequence[CandidatePlan]
    ) -> ContrastPair | DroppedCandidate:
        choice = choices[number]

        def lost(reason: DropReason, error: Exception) -> DroppedCandidate:
            return DroppedCandidate(
                reason=reason,
                explanation=str(error),
                step=job.event.step,
                mistake=job.mistakes[number],
                construction=_find_construction(choice),
            )

        result: ContrastPair | DroppedCandidate
        try:
            pair = await self._build_pair(job.event, choice)
            result = await self._judge_pair(pair, job.first_candidate + number)
        except _CandidateFailed as failed:
            result = lost(failed.reason, failed)
        except ReplyError as error:
            result = lost("bad_reply", error)
        except ContextOverflow as error:
            result = lost("too_long", error)
        await self._report_result(result)
        return result

    # ------------------------------------------------------------------------------------ what is right

    async def _find_agreement(self, event: ScoreEvent, purpose: str) -> Evaluation:
        if self._critic is None:
            raise _CandidateFailed(
                "unverified", "there is neither gold nor a critic whose samples could agree"
            )
        found = await find_agreement(
            self._critic,
            event.transition,
            purpose=purpose,
            n_samples=self._settings.n_samples,
            max_spread=self._settings.max_spread,
        )
        if isinstance(found, str):
            raise _CandidateFailed("disagreement", found)
        return found

    # ------------------------------------------------------------------------------------ what is wrong

    def _choose_other_purpose(self, reference: ReferenceEvaluation) -> OtherPurposePlan | None:
        """Return the round's look at a step under another purpose, each purpose in one round only."""
        if self._critic is None:
            return None
        purpose = find_other_purpose(self._purpose, self._other_purposes, index=self._round_plan.number - 1)
        return (
            OtherPurposePlan(reference, purpose)
            if purpose is not None or self._settings.write_other_purposes
            else None
        )

    async def _build_pair(self, event: ScoreEvent, choice: CandidatePlan) -> ContrastPair:
        if isinstance(choice, ImpossiblePlan):
            raise _CandidateFailed(choice.reason, choice.explanation)
        if isinstance(choice, ContrastPair):
            return choice
        if isinstance(choice, OtherPurposePlan):
            made = await self._score_under_other_purpose(event, choice)
        else:
            made = await self._ask_for_mistake(event, choice)
        return await run_in_thread(partial(self._build_and_hash, event, made), *event.transition.payloads)

    def _build_and_hash(self, event: ScoreEvent, candidate: PairCandidate) -> ContrastPair:
        pair = self._to_contrast_pair(event, candidate)
        _ = pair.id
        return pair

    async def _score_under_other_purpose(self, event: ScoreEvent, choice: OtherPurposePlan) -> PairCandidate:
        purpose = choice.purpose
        if purpose is None:
            prompt = build_purpose_prompt(self._prompts, purpose=self._purpose)
            place = CallId(
                role="contrast",
                purpose="other_purpose",
                part=digest_json(self._purpose)[:32],
                trial=self._round_plan.number,
            )
            check = make_purpose_check(self._purpose)
            purpose = (await self._llm.ask(prompt, PurposeReply, call_id=place, check=check)).value.purpose
        right = await self._find_agreement(event, purpose)
        found = build_other_purpose_candidate(
            event, choice.reference, purpose=purpose, right=right, band=self._band
        )
        if found is None:
            raise _CandidateFailed(
                "not_confirmed",
                f"samples agree on {right.progress_after:g} for another purpose, which does not make the "
                "evaluation wrong for it by a distance of this round",
            )
        return found

    async def _ask_for_mistake(self, event: ScoreEvent, choice: AskedMistakePlan) -> PairCandidate:
        right, kind = choice.reference.evaluation, choice.mistake.name
        prompt, place = await run_in_thread(
            partial(self._build_question, event, choice), *event.transition.payloads
        )
        check = make_mistake_check(right, choice.reach)
        said = (await self._llm.ask(prompt, mistake_reply_type(kind), call_id=place, check=check)).value
        wrong = right.model_copy(
            update={"progress_after": said.phi_after, "reasoning": said.reasoning, "evidence": ()}
        )
        return PairCandidate(
            construction="asked",
            mistake=kind,
            purpose=self._purpose,
            transition=event.transition,
            right=right,
            wrong=wrong,
            source=choice.reference.source,
            why=said.why,
        )

    def _build_question(self, event: ScoreEvent, choice: AskedMistakePlan) -> tuple[RenderedPrompt, CallId]:
        right = choice.reference.evaluation
        prompt = build_mistake_prompt(
            self._prompts,
            step=self._format_step(self._purpose, event.transition),
            right=right,
            mistake=choice.mistake,
            reach=choice.reach,
            subtle=self._round_plan.number > 1,
        )
        about: JsonValue = {
            "purpose": self._purpose,
            "transition": event.transition.json_object,
            "right": right.hashed_fields,
            "mistake": choice.mistake.model_dump(mode="json"),
            "reach": choice.reach.model_dump(mode="json"),
            "round": self._round_plan.number,
        }
        part = digest_json(about)[:32]
        return prompt, CallId(role="contrast", purpose="mistake", part=part, trial=choice.variant)

    # ----------------------------------------------------------------------------------- what is kept

    async def _judge_pair(self, pair: ContrastPair, candidate_index: int) -> ContrastPair:
        if pair.id in self._known_pair_ids:
            raise _CandidateFailed("known", "the pair was there before")
        judges = self._settings.n_judges
        if (
            self._judge is None
            or judges == 0
            or (self._settings.judged_pairs == "unproven" and is_proven(pair))
        ):
            return pair
        outcome, found = await compare_sides(
            pair,
            plan_sides(candidate_index, judges, seed=self._settings.seed),
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
        return pair.model_copy(update={"n_judgements": judges, "agreement": sum(found) / judges})

    def _to_contrast_pair(self, event: ScoreEvent, candidate: PairCandidate) -> ContrastPair:
        asked = candidate.construction == "asked"
        version = self._prompts.prompts["contrast"].header.version
        return ContrastPair(
            purpose=candidate.purpose,
            transition=candidate.transition,
            right=candidate.right,
            wrong=candidate.wrong,
            reason=candidate.why,
            mistake=candidate.mistake,
            construction=candidate.construction,
            label_source=candidate.source,
            provenance=Provenance(
                trace_id=self._trace_id,
                step=event.step,
                prompt=f"contrast@{version}" if asked else None,
                model=self._llm.identity if asked else None,
            ),
        )

    async def _report_result(self, result: ContrastPair | DroppedCandidate) -> None:
        """Report a result; of equal pairs the one that finished first, the others as drops."""
        if self._on_result is None:
            return
        if isinstance(result, ContrastPair):
            if result.id in self._reported_ids:
                result = build_duplicate(result)
            else:
                self._reported_ids.add(result.id)
        await self._on_result(result)

    def _format_step(self, purpose: str, transition: Transition) -> str:
        return show_transition(purpose, transition, max_tokens=self._settings.state_tokens)


def is_proven(pair: ContrastPair) -> bool:
    """Whether a pair's sides are right and wrong by gold and construction, whatever a model thinks."""
    return pair.label_source != "agreement" and pair.construction not in {"asked", "other_purpose"}


def build_duplicate(pair: ContrastPair) -> DroppedCandidate:
    """Return what becomes of a pair that equals an earlier one of its round."""
    return DroppedCandidate(
        reason="duplicate",
        explanation="an earlier candidate of this round gave the same pair",
        step=pair.provenance.step or 0,
        mistake=pair.mistake,
        construction=pair.construction,
    )


def collect_mistakes(round_plan: RoundPlan, settings: ContrastSettings) -> Mapping[str, Mistake]:
    """Return all kinds of mistakes by name.

    Raises:
        ConfigError: The round asks for one that nobody described.
    """
    known = {mistake.name: mistake for mistake in (*KNOWN_MISTAKES, *settings.mistakes)}
    missing = sorted(kind.mistake for kind in round_plan.shares if kind.mistake not in known)
    if missing:
        raise ConfigError(
            f"contrast.mistakes: the round asks for {', '.join(missing)}, which nobody has described; add "
            "name and description"
        )
    return known


def _choose_reference(event: ScoreEvent, agreed_evaluation: Evaluation | None) -> ReferenceEvaluation:
    if agreed_evaluation is not None:
        return ReferenceEvaluation(evaluation=agreed_evaluation, source="agreement")
    label = None if event.label is None else find_reference(event, event.label)
    if label is None:
        raise _CandidateFailed(
            "unverified", "gold says what the state after is worth, and not the state before"
        )
    return label


def _find_construction(choice: CandidatePlan) -> Construction | None:
    if isinstance(choice, ContrastPair):
        return choice.construction
    if isinstance(choice, OtherPurposePlan):
        return "other_purpose"
    return "asked" if isinstance(choice, AskedMistakePlan) else None
