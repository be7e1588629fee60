"""Contrast pairs: for scored steps, a right evaluation beside a plausible one that is wrong.

``generate_contrast_pairs`` awaits a whole round, ``stream_contrast_pairs`` yields pairs as they finish. What is right comes from
gold or from the agreement of independent critic samples, never from one unchecked opinion; what is wrong
comes from a perturbed input, from the critic's own observed mistake, or from a model that was asked for a
mistake of a named kind. Every candidate ends as a pair or as a drop with its reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import anyio
from pydantic import JsonValue

from reflact.calibration.call_policies import LimitedCritic, LimitedLLM
from reflact.calibration.critic import Scorer, find_agreement
from reflact.calibration.curriculum import RoundPlan, deal_mistakes
from reflact.calibration.judges import compare_sides, plan_sides
from reflact.calibration.mistakes import (
    DEFAULT_CONTRAST_SETTINGS,
    KNOWN_MISTAKES,
    AskedMistakePlan,
    CandidateCallback,
    CandidateChoice,
    ContrastSettings,
    DroppedCandidate,
    DropReason,
    GenerationResult,
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
from reflact.concurrency import Stream, fan_out, run_in_thread
from reflact.errors import ConfigError, ContextOverflow, ReplyError
from reflact.memory.models import Construction, ContrastPair, Evaluation, Provenance, ScoreEvent, Transition
from reflact.messages import CallId, RenderedPrompt
from reflact.prompts import PromptBook, load_prompts
from reflact.protocols import LLM
from reflact.types import digest_json


async def generate_contrast_pairs(
    events: Sequence[ScoreEvent],
    *,
    purpose: str,
    trace_id: str,
    round_plan: RoundPlan,
    llm: LLM,
    judge: LLM | None = None,
    critic: Scorer | None = None,
    settings: ContrastSettings = DEFAULT_CONTRAST_SETTINGS,
    prompts: PromptBook | None = None,
    known_pair_ids: Container[str] = (),
    other_purposes: Sequence[str] = (),
    on_result: CandidateCallback | None = None,
) -> GenerationResult:
    """Make the contrast pairs of a trace, for one round.

    The outcome follows from what models say, never from when they say it; calls are named by what they are
    about, so that a round that is made again over a store repeats none.

    Args:
        events: The scored steps of the trace.
        purpose: What the agent was to achieve.
        trace_id: The trace that the pairs come from.
        round_plan: Which mistakes are asked for, and how near to right; see ``curriculum.plan_next_round``.
        llm: Writes mistaken evaluations and other purposes.
        judge: Compares blindly; needed where ``settings.n_judges`` is above 0.
        critic: Gives the samples that have to agree; None: gold alone says what is right.
        settings: How pairs are made.
        prompts: If the prompts are; None: the newest versions that are packaged.
        known_pair_ids: Ids of pairs that are not to be made again: those that were there before the round. A round
            that is made again needs those of its first time; with its own pairs among them it goes past
            these to others.
        other_purposes: The purposes of other traces.
        on_result: Gets each pair and each dropped candidate when it is ready.

    Raises:
        ConfigError: The round asks for a kind that nobody described, or there is no judge.
        ProviderError: An endpoint refused, failed or could not be reached.
        BudgetSpent: The budget has no room for a call.
    """
    if settings.n_judges and judge is None:
        raise ConfigError("contrast.n_judges asks for comparisons; pass a judge, or set it to 0")
    maker = PairGenerator(
        purpose,
        trace_id,
        round_plan,
        llm=llm,
        judge=judge,
        critic=critic,
        settings=settings,
        prompts=prompts or load_prompts(),
        known_pair_ids=known_pair_ids,
        other_purposes=other_purposes,
        on_result=on_result,
    )
    states = [state for event in events for state in event.transition.payloads]
    chosen, again = await run_in_thread(partial(_select_with_repeats, events, settings), *states)
    hands = deal_mistakes(
        round_plan,
        trace_id=trace_id,
        n_events=len(chosen),
        per_event=settings.candidates_per_event,
        seed=settings.seed,
    )
    places = range(0, len(chosen) * settings.candidates_per_event, settings.candidates_per_event)
    jobs = [EventJob(*job) for job in zip(chosen, hands, places, again, strict=True)]
    results = await fan_out(maker.generate, jobs, limit=settings.concurrency)
    return _build_result([one for each in results for one in each], n_skipped=len(events) - len(chosen))


def stream_contrast_pairs(
    generate: Callable[[CandidateCallback], Awaitable[GenerationResult]],
) -> Stream[ContrastPair | DroppedCandidate]:
    """Hand out the pairs and drops of a round as they come about.

    ``generate`` calls ``generate_contrast_pairs`` with a callback: ``lambda send: generate_contrast_pairs(...,
    on_result=send)``.
    """

    async def produce(send: CandidateCallback) -> None:
        await generate(send)

    return Stream(produce)


def select_events(events: Sequence[ScoreEvent], settings: ContrastSettings) -> tuple[ScoreEvent, ...]:
    """Return the events to learn from: those that moved enough, by critic or gold, and still ones.

    If neither spoke, it counts whether the state changed: agreement has still to say by how much.
    """
    return tuple(event for event in events if _has_moved(event, settings) or _has_no_change(event, settings))


def _select_with_repeats(
    events: Sequence[ScoreEvent], settings: ContrastSettings
) -> tuple[tuple[ScoreEvent, ...], tuple[bool, ...]]:
    chosen = select_events(events, settings)
    return chosen, find_repeated(chosen)


def _has_moved(event: ScoreEvent, settings: ContrastSettings) -> bool:
    deltas = _list_deltas(event)
    if not deltas:
        return event.transition.changes_state
    return any(delta != 0 and abs(delta) >= settings.min_delta for delta in deltas)


def _has_no_change(event: ScoreEvent, settings: ContrastSettings) -> bool:
    unmoved = _list_deltas(event)[:1] == [0] or not event.transition.changes_state
    return settings.include_no_change and unmoved


def _list_deltas(event: ScoreEvent) -> list[float]:
    """Return by how much a step moved, by critic and by gold, as far as these are known."""
    judged = (event.evaluation, event.label)
    return [one.delta for one in judged if one is not None and one.delta is not None]


def find_repeated(events: Sequence[ScoreEvent]) -> tuple[bool, ...]:
    """Say for each event whether an earlier one equals it but for its place in the trace."""
    hashes = [_event_content(event) for event in events]
    first = {one: n for n, one in reversed(list(enumerate(hashes)))}
    return tuple(first[one] != n for n, one in enumerate(hashes))


def _event_content(event: ScoreEvent) -> str:
    rest = event.model_dump(mode="json", exclude={"step", "transition"})
    return digest_json({**rest, "transition": event.transition.json_object})


def _build_result(results: Sequence[ContrastPair | DroppedCandidate], *, n_skipped: int) -> GenerationResult:
    pairs: dict[str, ContrastPair] = {}
    drops: list[DroppedCandidate] = []
    for one in results:
        if isinstance(one, DroppedCandidate):
            drops.append(one)
        elif one.id in pairs:
            drops.append(build_duplicate(one))
        else:
            pairs[one.id] = one
    return GenerationResult(
        pairs=tuple(pairs.values()), dropped=tuple(drops), n_candidates=len(results), n_skipped=n_skipped
    )


CandidatePlan: TypeAlias = CandidateChoice[ContrastPair]
"""How a candidate is made; pairs that need no model are there already."""


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
            call_id = CallId(
                role="contrast",
                purpose="other_purpose",
                part=digest_json(self._purpose)[:32],
                trial=self._round_plan.number,
            )
            check = make_purpose_check(self._purpose)
            purpose = (await self._llm.ask(prompt, PurposeReply, call_id=call_id, check=check)).value.purpose
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
        prompt, call_id = await run_in_thread(
            partial(self._build_question, event, choice), *event.transition.payloads
        )
        check = make_mistake_check(right, choice.reach)
        reply = (await self._llm.ask(prompt, mistake_reply_type(kind), call_id=call_id, check=check)).value
        wrong = right.model_copy(
            update={"progress_after": reply.phi_after, "reasoning": reply.reasoning, "evidence": ()}
        )
        return PairCandidate(
            construction="asked",
            mistake=kind,
            purpose=self._purpose,
            transition=event.transition,
            right=right,
            wrong=wrong,
            source=choice.reference.source,
            why=reply.why,
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
