"""Which mistakes the next round of contrast pairs asks for, how near to right, and when rounds end. Pure.

A round asks for each kind of mistake in proportion to how weak the critic is known to be there, and for
wrong scores that lie nearer to the right one than those of the round before.
"""

from __future__ import annotations

from pydantic import Field

from reflact.types import Frozen


class KindShare(Frozen):
    """The part of a round that goes to one kind of mistake."""

    mistake: str
    share: float = Field(ge=0, le=1)


class Round(Frozen):
    """What one round asks for.

    Args:
        number: From 1.
        shares: The kinds of mistakes and their parts, which add up to 1.
        nearest: The least distance of a wrong phi after from the right one.
        farthest: The largest one.
    """

    number: int = Field(ge=1)
    shares: tuple[KindShare, ...]
    nearest: float = Field(gt=0, le=10)
    farthest: float = Field(gt=0, le=10)


class KindMeasured(Frozen):
    """How often the critic told right from wrong on held-out pairs of one kind of mistake."""

    mistake: str
    right: int = Field(ge=0)
    pairs: int = Field(ge=0)


class Measured(Frozen):
    """The critic's pairwise accuracy on held-out pairs, over all and by kind of mistake."""

    accuracy: float = Field(ge=0, le=1)
    kinds: tuple[KindMeasured, ...] = ()
