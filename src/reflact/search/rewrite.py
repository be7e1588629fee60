"""The source ``rewrite``: one call writes the whole document from cases, as text between fences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from reflact.concurrency import fan_out
from reflact.data import shuffle
from reflact.messages import NoReply, Text
from reflact.skills.document import editable_text
from reflact.stages.context import StageContext
from reflact.stages.prompt_sections import (
    BYTES_PER_TOKEN,
    join_sections,
    list_material,
    show_right_answers,
    show_skill,
    show_step_cases,
)
from reflact.stages.reply_models import check_whole_document
from reflact.types import Case, FrozenModel, Rewrite, Skill, WorkedExample

# The prompt, and the purpose of its calls.
PURPOSE = "write_document"

# Documents that a step asks for at a time.
DOCUMENTS = 4

# Estimated tokens of cases in a prompt, and as many of further right answers.
CASE_TOKENS = 1_000

# A line that opens or closes a block: its marks, and the name of a language if it opens one.
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^`]*?)\s*")

# What stands after the marks that open a document; a block of another language is a part of one.
DOCUMENT_LANGUAGES = frozenset({"", "markdown", "md", "text", "txt", "plaintext"})


class RewriteInput(FrozenModel):
    """What documents are written from: cases, right answers, and notes on what was tried."""

    cases: tuple[Case, ...]
    answers: tuple[WorkedExample, ...] = ()
    notes: str = ""


async def write_documents(
    skill: Skill, material: RewriteInput, *, context: StageContext, n: int, seed: int
) -> tuple[Rewrite, ...]:
    """Return ``n`` new documents, each by a call of its own that sees the cases in another order.

    A call without a valid reply gives a ``Rewrite`` with the reason.
    """
    return tuple(await fan_out(partial(_write, skill, material, context, seed), range(n)))


async def _write(
    skill: Skill, material: RewriteInput, context: StageContext, seed: int, number: int
) -> Rewrite:
    label = f"rewrite/{context.step}/{number}"
    cases = shuffle(material.cases, seed, label)
    answers = shuffle(material.answers, seed, label)

    rollouts = [case.rollout for case in cases]
    texts = list_material([case.item for case in cases], rollouts)
    reply = await context.ask_or_fallback(
        PURPOSE,
        {
            "document": show_skill(skill),
            "attempts": material.notes,
            "cases": _show_material(cases, answers, CASE_TOKENS),
        },
        Text,
        part=str(number),
        check=lambda reply: check_whole_document(skill, read_document(reply.text), texts),
        shorten=lambda: {"cases": _show_material(cases, answers, CASE_TOKENS // 3)},
    )
    if isinstance(reply, NoReply):
        return Rewrite(reason=reply.reason, number=number)
    return Rewrite(document=read_document(reply.text), number=number)


def _show_material(cases: Sequence[Case], answers: Sequence[WorkedExample], tokens: int) -> str:
    failures = [case for case in cases if case.failed]
    successes = [case for case in cases if not case.failed]
    shown = show_step_cases(failures, successes, tokens=tokens) if cases else ""
    return join_sections(shown, show_right_answers(answers, max_bytes=tokens * BYTES_PER_TOKEN))


def read_document(reply: str) -> str:
    """Return the document in a reply: the longest text between fences, or all without any.

    Blocks within the document that name a language belong to it, and so do those with fewer or
    other marks. Small models often leave the closing fence out: then the document ends with the
    reply. One that was cut off is judged as it is.
    """
    blocks = _read_blocks(reply)
    document = editable_text(max(blocks, key=len) if blocks else reply).strip()
    if not document:
        raise ValueError("the document is empty; write it between two fences")
    return document


def _read_blocks(reply: str) -> list[str]:
    """Return the outer blocks that can be documents, the last one even if it is never closed.

    Code alone, in a reply that says something beside it, is part of a document without fences.
    """
    blocks: list[tuple[str, str]] = []
    outside = ""
    inside = ""
    language = ""
    fences = list[str]()
    for line in reply.splitlines(keepends=True):
        match = FENCE.fullmatch(line)
        marks, name = ("", "") if match is None else (match[1], match[2])
        if not fences and not marks:
            outside += line
        elif not fences:
            fences = [marks]
            language = name.casefold()
            inside = ""
        elif marks.startswith(fences[-1]) and not name and len(fences) == 1:
            blocks.append((language, inside))
            fences = []
        else:
            inside += line
            if marks.startswith(fences[-1]):
                fences = [*fences, marks] if name else fences[:-1]
    if fences:
        blocks.append((language, inside))
    documents = [text for name, text in blocks if name in DOCUMENT_LANGUAGES]
    if not documents and not outside.strip():
        documents = [text for _, text in blocks]
    return documents
