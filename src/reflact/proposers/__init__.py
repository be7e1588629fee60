"""Own proposers: what they get in a step, what they may spend, and what they return."""

from __future__ import annotations

from reflact.messages import NoReply
from reflact.protocols import Proposer, StepBudget, StepEvidence
from reflact.skills.rejected_edits import RejectedEdit
from reflact.types import Case, Rewrite

__all__ = [
    "Case",
    "NoReply",
    "Proposer",
    "RejectedEdit",
    "Rewrite",
    "StepBudget",
    "StepEvidence",
]
