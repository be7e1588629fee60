"""What the rounds of a calibration made, measured and tested, and what follows from it for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reflact.calibration.curriculum import KindMeasured, Measured
from reflact.calibration.curriculum import measured as kinds_measured
from reflact.calibration.holding import Split
from reflact.calibration.made import Drop, Made
from reflact.calibration.metrics import Measures, Scored, measure_accuracy
from reflact.calibration.reviewing import measured
from reflact.memory import ContrastPair, Promotion
from reflact.memory_ports import CardStore, Submission


class Stored(Made):
    """What became of a trace's candidates.

    Args:
        held: Kept pairs that the scan holds back.
        new: Kept pairs that are new.
        full: Nothing was made, since the memory has no room for a pair.
    """

    held: int = 0
    new: int = 0
    full: bool = False


@dataclass
class Tally:
    """What the rounds of one call made."""

    rounds: int = 0
    pairs: list[ContrastPair] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    held: int = 0
    archived: int = 0
    left_out: int = 0
    tests: list[Promotion] = field(default_factory=list)
    not_tested: str | None = None
    by_round: list[Measures] = field(default_factory=list)


async def measures_of(scored: Sequence[Scored | None]) -> list[Measures]:
    """Return what scores measure, as a list; empty where nothing was scored."""
    found = await measured([one for one in scored if one is not None])
    return [] if found is None else [found]


def held(one: Submission) -> bool:
    """Whether a pair is in no test until somebody has looked at it, or ever."""
    return one.status == "rejected" or (one.status == "quarantined" and one.reason is not None)


async def put_away(store: CardStore, pairs: Sequence[ContrastPair]) -> int:
    """Return how many of the pairs the memory's bound has archived."""
    found = await store.pairs([pair.id for pair in pairs])
    return sum(one.status == "archived" and one.reason == "bound" for one in found)


def no_batch(parts: Split, tally: Tally) -> str:
    """Return in a sentence why there is nothing to test."""
    if not parts.learn:
        return (
            "there was no trace to learn from: all that were given are held out; pass others, or more of them"
        )
    if not tally.pairs and tally.left_out:
        return (
            f"the memory is full, so that nothing was made of {tally.left_out} traces: reject pairs that are "
            "not needed, or open it with larger active_cards"
        )
    if not tally.pairs:
        return f"none of {len(tally.drops)} candidates became a pair: the drops say why"
    if tally.held == len(tally.pairs):
        return f"the scan holds back all {tally.held} pairs: look at them, and release those that are sound"
    if tally.archived and tally.held + tally.archived == len(tally.pairs):
        return (
            f"the memory is full, and its bound put {tally.archived} of {len(tally.pairs)} pairs away at "
            "once: reject pairs that are not needed, or open it with larger active_cards"
        )
    return "all pairs were tested before, or wait for somebody to look at them"


def history_of(held_out: Sequence[Scored | None], invited: Sequence[Scored | None]) -> list[Measured]:
    """Return what a curriculum may know: accuracy on held-out steps, kinds on those that are learned from.

    Which kinds the critic is weak on is never read off the held-out steps, whose tests have to stay blind
    to how their batches came about.
    """
    accuracy = measure_accuracy([one for one in held_out if one is not None])
    if accuracy is None:
        return []
    learned = kinds_measured([one for one in invited if one is not None])
    kinds: tuple[KindMeasured, ...] = () if learned is None else learned.kinds
    return [Measured(accuracy=accuracy, kinds=kinds)]
