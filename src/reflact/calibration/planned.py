"""What the candidates of a round will be made by, as far as it is known before any call. Pure.

Selecting steps, dealing kinds and choosing constructions ask no model, so they are done here as a round does
them. Where samples have still to agree on what is right, they are taken to say what the critic said before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from reflact.calibration.choosing import Asked, Choice, Elsewhere, choose, other_than
from reflact.calibration.constructions import Band, Built, Label, built, label_of
from reflact.calibration.contrast import repeated, selected
from reflact.calibration.curriculum import CurriculumSettings, Measured, Round, deal, next_round
from reflact.calibration.made import ContrastSettings
from reflact.calibration.making import described, proven
from reflact.calibration.trace import Trace
from reflact.memory import ContrastPair, Evaluation, Origin, ScoreEvent
from reflact.memory_cards import Anchored, subject, subject_of
from reflact.types import Frozen


class Planned(Frozen):
    """The candidates of a round; equal ones count once, but in ``candidates`` and ``events``.

    Args:
        candidates: All of them.
        events: Steps that they are made of, those left out that equal an earlier one of their trace.
        agreed: Steps of which samples have to say what is right.
        certain: Candidates that are pairs by construction, before any comparison.
        compared: Those of them that judges compare, where there are judges.
        asked: Candidates for which a mistake is asked for.
        elsewhere: Candidates whose step is looked at under another purpose.
        near: Purposes that a model has to write another one for.
        subjects: Different steps, true or perturbed, that ``certain`` and ``asked`` speak of.
        pair_ids: The pairs of ``certain``.
    """

    candidates: int = 0
    events: int = 0
    agreed: int = 0
    certain: int = 0
    compared: int = 0
    asked: int = 0
    elsewhere: int = 0
    near: int = 0
    subjects: int = 0
    pair_ids: frozenset[str] = frozenset()


class _Candidate(NamedTuple):
    """A candidate that may become a pair: how, of which trace's purpose, and what it speaks of."""

    choice: Built | Asked | Elsewhere
    purpose: str
    about: str
    pair: ContrastPair | None = None

    @property
    def key(self) -> str:
        """Equal for those that ask the same."""
        match self.choice:
            case Asked(mistake=mistake, variation=variation):
                return f"{self.about}/{mistake.name}/{variation}"
            case Elsewhere(purpose=purpose):
                return f"{self.about}/{purpose}"
        return self.about if self.pair is None else self.pair.id


def planned(
    traces: Sequence[Trace],
    plan: Round,
    settings: ContrastSettings,
    *,
    known: Collection[str],
    anchored: Anchored,
) -> Planned:
    """Return what a round's candidates will be made by.

    Args:
        traces: What it learns from.
        plan: What it asks for.
        settings: How pairs are made.
        known: Ids of pairs that are not made again.
        anchored: Which steps are anchors; they teach nothing.

    Raises:
        ConfigError: It asks for a kind of mistake that nobody described.
    """
    band, mistakes = Band(plan.nearest, plan.farthest), described(plan, settings)
    others = sorted({trace.purpose for trace in traces})
    found: dict[str, _Candidate] = {}
    agreed: set[str] = set()
    selections = events = 0
    for trace in traces:
        chosen = selected([event for event in trace.events if _free(event, trace, anchored)], settings)
        jobs = _jobs(trace, chosen, plan, settings)
        selections, events = selections + len(chosen), events + len(jobs)
        other = other_than(trace.purpose, others, place=plan.number - 1)
        away = other is not None or settings.near_misses
        for event, hand in jobs:
            label, about = _label(event), subject_of(trace.purpose, event.transition)
            if label is None:
                continue
            if event.gold is None:
                agreed.add(about)
            elsewhere = Elsewhere(label, other) if away else None
            possible = built(event, label, purpose=trace.purpose, band=band)
            ready = [one for one in possible if _pair(one).id not in known]
            for choice in choose(hand, label, ready=ready, elsewhere=elsewhere, band=band, mistakes=mistakes):
                candidate = _candidate(choice, trace.purpose, about)
                if candidate is not None:
                    found.setdefault(candidate.key, candidate)
    return _counted(
        list(found.values()),
        Planned(candidates=selections * settings.per_event, events=events, agreed=len(agreed)),
        every=settings.judged == "all",
    )


def _counted(found: Sequence[_Candidate], plan: Planned, *, every: bool) -> Planned:
    pairs = [one.pair for one in found if one.pair is not None]
    asked = [one for one in found if isinstance(one.choice, Asked)]
    away = [one for one in found if isinstance(one.choice, Elsewhere)]
    near = [one for one in away if isinstance(one.choice, Elsewhere) and one.choice.purpose is None]
    return plan.model_copy(
        update={
            "certain": len(pairs),
            "compared": sum(every or not proven(pair) for pair in pairs),
            "asked": len(asked),
            "elsewhere": len(away),
            "near": len({one.purpose for one in near}),
            "subjects": len({subject(pair) for pair in pairs} | {one.about for one in asked}),
            "pair_ids": frozenset(pair.id for pair in pairs),
        }
    )


def round_of(number: int, settings: CurriculumSettings) -> Round:
    """Return what a round asks for where no kind of mistake is known to be weak."""
    endless = settings.model_copy(update={"patience": number + 1, "rounds": number})
    plan = next_round([Measured(accuracy=0)] * number, endless)
    assert plan is not None
    return plan


def _free(event: ScoreEvent, trace: Trace, anchored: Anchored) -> bool:
    origin = Origin(trace_id=trace.id, step=event.step)
    return not anchored.holds(trace.purpose, event.transition, origin)


def _jobs(
    trace: Trace, chosen: Sequence[ScoreEvent], plan: Round, settings: ContrastSettings
) -> list[tuple[ScoreEvent, tuple[str, ...]]]:
    """Return the steps that candidates are made of, each with the kinds that it is dealt."""
    hands = deal(plan, trace_id=trace.id, events=len(chosen), each=settings.per_event, seed=settings.seed)
    dealt = zip(chosen, hands, repeated(chosen), strict=True)
    return [(event, hand) for event, hand, again in dealt if not again]


def _label(event: ScoreEvent) -> Label | None:
    if event.gold is not None:
        return label_of(event, event.gold)
    middle = Evaluation(phi_before=4, phi_after=6 if event.transition.changed else 4, reasoning="Unknown.")
    return Label(right=event.evaluation or middle, source="agreement")


def _candidate(choice: Choice[Built], purpose: str, about: str) -> _Candidate | None:
    if isinstance(choice, Built):
        return _Candidate(choice, purpose, about, _pair(choice))
    return _Candidate(choice, purpose, about) if isinstance(choice, Asked | Elsewhere) else None


def _pair(one: Built) -> ContrastPair:
    return ContrastPair(
        purpose=one.purpose,
        transition=one.transition,
        right=one.right,
        wrong=one.wrong,
        why=one.why,
        mistake=one.mistake,
        construction=one.construction,
        label=one.source,
    )
