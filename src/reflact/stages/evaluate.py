"""Stage 6: the candidate and the current skill on the validation split, then the gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from reflact.config import GateConfig
from reflact.gate import decide
from reflact.types import Candidate, Merged, Rollout, Skill, Verdict

Roll = Callable[[Skill], Awaitable[tuple[Rollout, ...]]]


async def evaluate(
    candidate: Candidate,
    current: Skill,
    *,
    merged: Merged,
    known: Collection[str],
    best_score: float | None,
    roll: Roll,
    config: GateConfig,
) -> Verdict:
    """Return the gate's verdict on a candidate.

    A step without proposals and a candidate that this run already holds or has rejected cost nothing.

    Args:
        candidate: The new document.
        current: The document it would replace.
        merged: The pool of proposals that it came from.
        known: Hashes of all documents that this run holds or has rejected.
        best_score: The best skill's gate score; None before one is measured.
        roll: Rolls a skill out on the validation split; stored rollouts are reused.
        config: The gate.
    """
    if not merged.patch.edits:
        return Verdict(action="no_patches", reason="No analyst proposed an edit.")
    if candidate.skill.hash == current.hash:
        return Verdict(action="no_change", reason="The edits leave the document as it is.")
    if candidate.skill.hash in known:
        return Verdict(action="no_change", reason="This run has held or rejected the same document before.")
    theirs = await roll(candidate.skill)
    ours = await roll(current)
    return decide(theirs, ours, best_score, config)
