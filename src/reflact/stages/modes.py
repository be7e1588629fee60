"""What analysts are asked for in each update mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reflact.config import UpdateConfig
from reflact.skill import same_body
from reflact.stages.material import show_skill
from reflact.stages.reflect import Analysis, Minibatch, found_patterns, patching
from reflact.stages.replies import (
    DraftReply,
    SuccessDraftReply,
    draft_check,
    drafting,
    whole_document,
)
from reflact.types import Edit, EditKind, Patch, Report, Skill


def kinds_of(config: UpdateConfig) -> tuple[EditKind, ...]:
    """Return the kinds of edit that a step's patches are made of."""
    match config.mode:
        case "patch":
            return config.operations
        case "rewrite":
            return ("suggest",)
        case "full_rewrite":
            return ("rewrite",)


def analyses(config: UpdateConfig, skill: Skill, *, max_edits: int) -> Callable[[Minibatch], Analysis[Any]]:
    """Return how to ask about a minibatch: for edits, for suggestions, or for a whole new document."""
    if config.mode == "full_rewrite":
        return _drafts(skill)
    asked = patching(skill, max_edits=max_edits, operations=kinds_of(config))
    if config.mode == "patch":
        return asked

    def analysis(batch: Minibatch) -> Analysis[Any]:
        return asked(batch)._replace(prompt=f"suggest_{batch.source}")

    return analysis


def _drafts(skill: Skill) -> Callable[[Minibatch], Analysis[Any]]:
    holes = {"document": show_skill(skill)}

    def analysis(batch: Minibatch) -> Analysis[Any]:
        if batch.source == "success":
            return Analysis(
                prompt="draft_success",
                holes=holes,
                reply_type=SuccessDraftReply,
                check=lambda reply: whole_document(skill, reply.document),
                report=lambda blank, reply: _drafted(blank, skill, reply.strengths, reply.document),
            )
        cases = len(batch.items)
        return Analysis(
            prompt="draft_failure",
            holes=holes,
            reply_type=drafting(cases=cases),
            check=draft_check(skill, cases=cases),
            report=lambda blank, reply: _failure_draft(blank, skill, reply),
        )

    return analysis


def _failure_draft(blank: Report, skill: Skill, reply: DraftReply) -> Report:
    patterns = found_patterns(blank, reply.patterns)
    reasoning = "; ".join(p.description for p in patterns)
    return _drafted(blank, skill, reasoning, reply.document).model_copy(update={"patterns": patterns})


def _drafted(blank: Report, skill: Skill, reasoning: str, document: str) -> Report:
    """A draft that leaves the text as it is proposes nothing."""
    draft = Edit(
        op="rewrite",
        content=document,
        source_type=blank.source_type,
        support_count=len(blank.item_ids),
    )
    edits = () if same_body(skill.text, document) else (draft,)
    return blank.model_copy(update={"patch": Patch(reasoning=reasoning, edits=edits)})
