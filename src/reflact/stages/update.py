"""Stage 5: the chosen edits become a candidate document."""

from __future__ import annotations

from reflact.skill import apply
from reflact.types import Candidate, Chosen, Skill


def update(skill: Skill, chosen: Chosen) -> Candidate:
    """Apply the chosen edits in order; protected regions come out byte-identical."""
    return apply(skill, chosen.patch.edits)
