"""How a run is summed up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from reflact.records import EpochRecord, RunState, StepRecord
from reflact.results import ActionCount, EpochStats, RunSummary
from reflact.types import GateAction

ACTIONS: tuple[GateAction, ...] = get_args(GateAction)
UNCHANGED: tuple[GateAction, ...] = ("no_change", "no_patches", "no_rewrite")


def summarize_history(
    summary: RunSummary,
    records: Sequence[StepRecord],
    epochs: Sequence[EpochRecord],
    state: RunState | None,
) -> RunSummary:
    """Return a summary with what the committed history says: counts, epochs, best and final skill.

    A run that ended before its first state has no best and no final skill.
    """
    actions: Counter[str] = Counter(r.verdict.action for r in records)
    ends = {e.epoch: e for e in epochs}
    numbers = sorted({r.epoch for r in records})
    return summary.model_copy(
        update={
            "steps": len(records),
            "accepts": sum(r.verdict.accepted for r in records),
            "rejects": actions["reject"],
            "skips": sum(actions[action] for action in UNCHANGED),
            "actions": tuple(ActionCount(action=a, count=actions[a]) for a in ACTIONS if actions[a]),
            "best": state.best if state is not None else None,
            "final": state.current if state is not None else None,
            "deterministic": state is None or state.deterministic,
            "epochs": tuple(
                _summarize_epoch([r for r in records if r.epoch == n], ends.get(n)) for n in numbers
            ),
        }
    )


def _summarize_epoch(records: Sequence[StepRecord], end: EpochRecord | None) -> EpochStats:
    last = records[-1] if end is None else end
    return EpochStats(
        epoch=records[-1].epoch,
        steps=len(records),
        accepts=sum(r.verdict.accepted for r in records),
        rejects=sum(r.verdict.action == "reject" for r in records),
        skips=sum(r.verdict.action in UNCHANGED for r in records),
        inconclusive=sum(r.verdict.action == "inconclusive" for r in records),
        slow_update=None if end is None or end.slow_update is None else end.slow_update.action,
        current_score=None if last.current.inherited else last.current.score,
        best_score=last.best.score,
    )
