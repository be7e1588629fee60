"""What analysts are asked for in each update mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reflact.config import UpdateConfig
from reflact.skill import is_same_body
from reflact.stages.material import show_skill
from reflact.stages.reflect import Analysis, Minibatch, build_patterns, make_edit_analysis
from reflact.stages.replies import (
    DraftReply,
    SuccessDraftReply,
    check_whole_document,
    draft_reply_type,
    make_draft_check,
)
from reflact.types import AnalystReport, Edit, EditKind, Patch, Skill


def list_edit_kinds(config: UpdateConfig) -> tuple[EditKind, ...]:
    """Return the kinds of edit that a step's patches are made of."""
    match config.mode:
        case "patch":
            return config.operations
        case "rewrite":
            return ("suggest",)
        case "full_rewrite":
            return ("rewrite",)


def choose_analysis(
    config: UpdateConfig, skill: Skill, *, max_edits: int
) -> Callable[[Minibatch], Analysis[Any]]:
    """Return how to ask about a minibatch: for edits, for suggestions, or for a whole new document."""
    if config.mode == "full_rewrite":
        return _make_draft_analysis(skill)
    asked = make_edit_analysis(skill, max_edits=max_edits, operations=list_edit_kinds(config))
    if config.mode == "patch":
        return asked

    def analysis(batch: Minibatch) -> Analysis[Any]:
        return asked(batch)._replace(prompt=f"suggest_{batch.source}")

    return analysis


def _make_draft_analysis(skill: Skill) -> Callable[[Minibatch], Analysis[Any]]:
    holes = {"document": show_skill(skill)}

    def analysis(batch: Minibatch) -> Analysis[Any]:
        if batch.source == "success":
            return Analysis(
                prompt="draft_success",
                variables=holes,
                reply_type=SuccessDraftReply,
                check=lambda reply: check_whole_document(skill, reply.document),
                report=lambda blank, reply: _build_draft_report(
                    blank, skill, reply.strengths, reply.document
                ),
            )
        cases = len(batch.items)
        return Analysis(
            prompt="draft_failure",
            variables=holes,
            reply_type=draft_reply_type(cases=cases),
            check=make_draft_check(skill, cases=cases),
            report=lambda blank, reply: _build_failure_draft(blank, skill, reply),
        )

    return analysis


def _build_failure_draft(blank: AnalystReport, skill: Skill, reply: DraftReply) -> AnalystReport:
    patterns = build_patterns(blank, reply.patterns)
    reasoning = "; ".join(p.description for p in patterns)
    return _build_draft_report(blank, skill, reasoning, reply.document).model_copy(
        update={"patterns": patterns}
    )


def _build_draft_report(blank: AnalystReport, skill: Skill, reasoning: str, document: str) -> AnalystReport:
    """A draft that leaves the text as it is proposes nothing."""
    draft = Edit(
        op="rewrite",
        content=document,
        source_type=blank.source_type,
        support_count=len(blank.item_ids),
    )
    edits = () if is_same_body(skill.text, document) else (draft,)
    return blank.model_copy(update={"patch": Patch(reasoning=reasoning, edits=edits)})
