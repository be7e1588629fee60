"""The edit budget of each step: the counterpart of a learning rate."""

from __future__ import annotations

import math
from typing import Literal

SchedulerName = Literal["constant", "linear", "cosine"]


def edit_budget(step: int, total_steps: int, *, scheduler: SchedulerName, max_edits: int, floor: int) -> int:
    """Return how many edits a step may apply.

    A function of the step alone, so nothing that happened before (a skipped step, a restart) shifts it.
    The first step gets ``max_edits`` and, unless the schedule is ``constant``, the last gets ``floor``;
    a run of one step gets ``max_edits``. Between them the budget falls linearly, or along half a cosine
    wave (Loshchilov and Hutter, SGDR, 2017, without restarts), and is rounded to the nearest integer,
    halves upward.

    Args:
        step: Number of the step, 1 to ``total_steps``.
        total_steps: Steps of the whole run.
        scheduler: How the budget falls.
        max_edits: Budget of the first step, at least 0.
        floor: Budget of the last step, 0 to ``max_edits``.

    Raises:
        ValueError: An argument is out of its range.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step {step} is not within 1..{total_steps}")
    if not 0 <= floor <= max_edits:
        raise ValueError(f"floor {floor} is not within 0..{max_edits}")
    if scheduler == "constant" or total_steps == 1:
        return max_edits
    done = (step - 1) / (total_steps - 1)
    share = 1 - done if scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2
    # Nine decimals: far finer than any half that can occur, far coarser than the cosine's rounding.
    return floor + math.floor(round((max_edits - floor) * share, 9) + 0.5)
