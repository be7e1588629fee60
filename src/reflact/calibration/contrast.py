"""Contrast pairs: for scored steps, a right evaluation beside a plausible one that is wrong.

``contrast`` awaits a whole round, ``contrasting`` hands out pairs as they finish. What is right comes from
gold or from the agreement of independent critic samples, never from one unchecked opinion; what is wrong
comes from a perturbed input, from the critic's own observed mistake, or from a model that was asked for a
mistake of a named kind. Every candidate ends as a pair or as a drop with its reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial

from reflact.aside import run_in_thread
from reflact.calibration.critic import Scorer
from reflact.calibration.curriculum import Round, deal
from reflact.calibration.making import Job, Maker, duplicate
from reflact.calibration.mistakes import DEFAULTS, ContrastSettings, Drop, DropReason, Made, Report
from reflact.errors import ConfigError
from reflact.memory import ContrastPair, ScoreEvent
from reflact.ports import LLM
from reflact.prompts import PromptBook, load_prompts
from reflact.tasks import Stream, fan_out
from reflact.types import digest_json

__all__ = [
    "ContrastSettings",
    "Drop",
    "DropReason",
    "Made",
    "Report",
    "Scorer",
    "contrast",
    "contrasting",
    "selected",
]


async def contrast(
    events: Sequence[ScoreEvent],
    *,
    purpose: str,
    trace_id: str,
    plan: Round,
    llm: LLM,
    judge: LLM | None = None,
    critic: Scorer | None = None,
    settings: ContrastSettings = DEFAULTS,
    prompts: PromptBook | None = None,
    known: Container[str] = (),
    others: Sequence[str] = (),
    report: Report | None = None,
) -> Made:
    """Make the contrast pairs of a trace, for one round.

    The outcome follows from what models say, never from when they say it; calls are named by what they are
    about, so that a round that is made again over a store repeats none.

    Args:
        events: The scored steps of the trace.
        purpose: What the agent was to achieve.
        trace_id: The trace, for where pairs come from.
        plan: Which mistakes are asked for, and how near to right; see ``curriculum.next_round``.
        llm: Writes mistaken evaluations and other purposes.
        judge: Compares blindly; needed where ``settings.judges`` is above 0.
        critic: Gives the samples that have to agree; None: gold alone says what is right.
        settings: How pairs are made.
        prompts: Where the prompts are; None: the newest versions that are packaged.
        known: Ids of pairs that are not to be made again: those that were there before the round. A round
            that is made again needs those of its first time; with its own pairs among them it goes past
            these to others.
        others: The purposes of other traces.
        report: Is told of each pair and each drop as it comes about.

    Raises:
        ConfigError: The round asks for a kind that nobody described, or there is no judge.
        ProviderError: An endpoint refused, failed or could not be reached.
        BudgetSpent: The budget has no room for a call.
    """
    if settings.judges and judge is None:
        raise ConfigError("contrast.judges asks for comparisons; pass a judge, or set it to 0")
    maker = Maker(
        purpose,
        trace_id,
        plan,
        llm=llm,
        judge=judge,
        critic=critic,
        settings=settings,
        prompts=prompts or load_prompts(),
        known=known,
        others=others,
        report=report,
    )
    states = [state for event in events for state in event.transition.states]
    chosen, again = await run_in_thread(partial(_selected, events, settings), *states)
    hands = deal(plan, trace_id=trace_id, events=len(chosen), each=settings.per_event, seed=settings.seed)
    places = range(0, len(chosen) * settings.per_event, settings.per_event)
    jobs = [Job(*job) for job in zip(chosen, hands, places, again, strict=True)]
    results = await fan_out(maker.make, jobs, limit=settings.concurrency)
    return _folded([one for each in results for one in each], skipped=len(events) - len(chosen))


def contrasting(make: Callable[[Report], Awaitable[Made]]) -> Stream[ContrastPair | Drop]:
    """Hand out the pairs and drops of a round as they come about.

    ``make`` is a ``contrast`` that lacks only its report: ``lambda report: contrast(..., report=report)``.
    """

    async def produce(send: Report) -> None:
        await make(send)

    return Stream(produce)


def selected(events: Sequence[ScoreEvent], settings: ContrastSettings) -> tuple[ScoreEvent, ...]:
    """Return the events to learn from: those that moved enough, by critic or gold, and still ones.

    Where neither spoke, it counts whether the state changed: agreement has still to say by how much.
    """
    return tuple(event for event in events if _moved(event, settings) or _still(event, settings))


def _selected(
    events: Sequence[ScoreEvent], settings: ContrastSettings
) -> tuple[tuple[ScoreEvent, ...], tuple[bool, ...]]:
    chosen = selected(events, settings)
    return chosen, repeated(chosen)


def _moved(event: ScoreEvent, settings: ContrastSettings) -> bool:
    deltas = _deltas(event)
    if not deltas:
        return event.transition.changed
    return any(delta != 0 and abs(delta) >= settings.min_delta for delta in deltas)


def _still(event: ScoreEvent, settings: ContrastSettings) -> bool:
    unmoved = _deltas(event)[:1] == [0] or not event.transition.changed
    return settings.include_no_change and unmoved


def _deltas(event: ScoreEvent) -> list[float]:
    """Return by how much a step moved, by critic and by gold, as far as these are known."""
    judged = (event.evaluation, event.gold)
    return [one.delta for one in judged if one is not None and one.delta is not None]


def repeated(events: Sequence[ScoreEvent]) -> tuple[bool, ...]:
    """Say for each event whether an earlier one equals it but for its place in the trace."""
    hashes = [_content(event) for event in events]
    first = {one: n for n, one in reversed(list(enumerate(hashes)))}
    return tuple(first[one] != n for n, one in enumerate(hashes))


def _content(event: ScoreEvent) -> str:
    rest = event.model_dump(mode="json", exclude={"step", "transition"})
    return digest_json({**rest, "transition": event.transition.plain})


def _folded(results: Sequence[ContrastPair | Drop], *, skipped: int) -> Made:
    pairs: dict[str, ContrastPair] = {}
    drops: list[Drop] = []
    for one in results:
        if isinstance(one, Drop):
            drops.append(one)
        elif one.id in pairs:
            drops.append(duplicate(one))
        else:
            pairs[one.id] = one
    return Made(pairs=tuple(pairs.values()), drops=tuple(drops), candidates=len(results), skipped=skipped)
