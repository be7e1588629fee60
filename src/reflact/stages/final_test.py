"""The end of a run: documents measured side by side, and the placebo among them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reflact.gate import interval_of, measure
from reflact.results import Scored
from reflact.types import Frozen, Rollout, Skill, Split

Roll = Callable[[Skill], Awaitable[tuple[Rollout, ...]]]


class Contender(Frozen):
    """A document under the name it is reported by."""

    name: str
    skill: Skill


def placebo(text: str, like: Skill) -> Skill:
    """Return a document about something else, cut or repeated to the length of ``like`` in characters."""
    size = len(like.text)
    repeats = size // max(len(text), 1) + 1
    return Skill(text=(text * repeats)[:size])


async def final_test(contenders: Sequence[Contender], split: Split, *, roll: Roll) -> tuple[Scored, ...]:
    """Measure all contenders on a split, one after the other; equal texts are rolled out once."""
    scores = []
    for contender in contenders:
        rollouts = await roll(contender.skill)
        scores.append(scored(contender, split, rollouts))
    return tuple(scores)


def scored(contender: Contender, split: Split, rollouts: Sequence[Rollout]) -> Scored:
    """Return the mean, count and 95% interval of one contender's rollouts."""
    measured = measure(contender.skill.hash, split, rollouts)
    hard = [r.score.hard for r in rollouts if r.score is not None]
    low, high = interval_of(hard) if hard else (None, None)
    return Scored(
        name=contender.name,
        skill_hash=contender.skill.hash,
        split=split,
        n=measured.n,
        unmeasured=len(measured.unmeasured),
        successes=sum(hard),
        hard=measured.hard,
        soft=measured.soft,
        low=low,
        high=high,
    )
