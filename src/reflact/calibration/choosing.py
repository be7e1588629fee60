"""How each candidate's wrong side is to come about, decided before anything is paid for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from reflact.calibration.constructions import Band, Built, Label, plain
from reflact.calibration.made import DropReason
from reflact.calibration.mistakes import Mistake, Reach, reach
from reflact.memory import ContrastPair

ELSEWHERE_KIND = "inflated_score"
"""The kind of mistake that an evaluation makes which is meant for another purpose."""


class Elsewhere(NamedTuple):
    """Look at the step under another purpose; None: one that a model writes."""

    label: Label
    purpose: str | None


class Asked(NamedTuple):
    """Ask a model for a mistake of the true step; equal ones differ by their variation."""

    label: Label
    mistake: Mistake
    reach: Reach
    variation: int


class Impossible(NamedTuple):
    """Nothing makes such a mistake of this step, and why."""

    reason: DropReason
    words: str


Ready = TypeVar("Ready", Built, ContrastPair)

Choice: TypeAlias = Ready | Elsewhere | Asked | Impossible


def choose(
    hand: Sequence[str],
    label: Label,
    *,
    ready: Sequence[Ready],
    elsewhere: Elsewhere | None,
    band: Band,
    mistakes: Mapping[str, Mistake],
) -> tuple[Choice[Ready], ...]:
    """Return for each kind of mistake in a hand how to make it: each way at most once, the best first.

    Args:
        hand: The kinds that an event was dealt.
        label: What is right.
        ready: Pairs that need no model and are not known yet, the best first.
        elsewhere: Another purpose to look at the step under, if there is one.
        band: How far wrong scores may lie from it.
        mistakes: All kinds, by name.
    """
    ways = {kind: _ways(mistakes[kind], ready, elsewhere, label, band) for kind in hand}
    return tuple(next(ways[kind]) for kind in hand)


def other_than(purpose: str, others: Sequence[str], *, place: int) -> str | None:
    """Return the purpose at a place among those that differ from a given one; None where there is none."""
    different = {plain(other): other for other in sorted(others) if plain(other) not in {plain(purpose), ""}}
    return dict(enumerate(different.values())).get(place)


def _ways(
    mistake: Mistake, ready: Sequence[Ready], elsewhere: Elsewhere | None, label: Label, band: Band
) -> Iterator[Choice[Ready]]:
    yield from (one for one in ready if one.mistake == mistake.name)
    if elsewhere is not None and mistake.name == ELSEWHERE_KIND:
        yield elsewhere
    variation = 0
    while (numbers := reach(mistake, label.right, band=band, variation=variation)) is not None:
        yield Asked(label, mistake, numbers, variation)
        variation += 1
    while True:
        yield Impossible(
            "not_applicable",
            f"no construction makes it, and beside {label.right.phi_after:g} the scale has no room for it",
        )
