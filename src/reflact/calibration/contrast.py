"""Contrast pairs: for scored steps, a right evaluation beside a plausible one that is wrong.

``contrast`` awaits a whole round, ``contrasting`` hands out pairs as they finish. What is right comes from
gold or from the agreement of independent critic samples, never from one unchecked opinion; what is wrong
comes from a perturbed input, from the critic's own observed mistake, or from a model that was asked for a
mistake of a named kind. Every candidate ends as a pair or as a drop with its reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial

from reflact.calibration.critic import Scorer
from reflact.calibration.curriculum import RoundPlan, deal_mistakes
from reflact.calibration.mistakes import (
    DEFAULT_CONTRAST_SETTINGS,
    CandidateCallback,
    ContrastSettings,
    DroppedCandidate,
    DropReason,
    GenerationResult,
)
from reflact.calibration.pair_generation import EventJob, PairGenerator, build_duplicate
from reflact.concurrency import Stream, fan_out, run_in_thread
from reflact.errors import ConfigError
from reflact.memory.models import ContrastPair, ScoreEvent
from reflact.prompts import PromptBook, load_prompts
from reflact.protocols import LLM
from reflact.types import digest_json

__all__ = [
    "CandidateCallback",
    "ContrastSettings",
    "DropReason",
    "DroppedCandidate",
    "GenerationResult",
    "Scorer",
    "generate_contrast_pairs",
    "select_events",
    "stream_contrast_pairs",
]


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
        trace_id: The trace, for where pairs come from.
        round_plan: Which mistakes are asked for, and how near to right; see ``curriculum.next_round``.
        llm: Writes mistaken evaluations and other purposes.
        judge: Compares blindly; needed where ``settings.judges`` is above 0.
        critic: Gives the samples that have to agree; None: gold alone says what is right.
        settings: How pairs are made.
        prompts: Where the prompts are; None: the newest versions that are packaged.
        known_pair_ids: Ids of pairs that are not to be made again: those that were there before the round. A round
            that is made again needs those of its first time; with its own pairs among them it goes past
            these to others.
        other_purposes: The purposes of other traces.
        on_result: Is told of each pair and each drop as it comes about.

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

    ``generate`` is a ``contrast`` that lacks only its report: ``lambda report: contrast(..., report=report)``.
    """

    async def produce(send: CandidateCallback) -> None:
        await generate(send)

    return Stream(produce)


def select_events(events: Sequence[ScoreEvent], settings: ContrastSettings) -> tuple[ScoreEvent, ...]:
    """Return the events to learn from: those that moved enough, by critic or gold, and still ones.

    Where neither spoke, it counts whether the state changed: agreement has still to say by how much.
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
