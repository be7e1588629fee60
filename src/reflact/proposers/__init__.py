"""Proposers: how the evidence of a step becomes a candidate, and the values that an own proposer uses."""

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
