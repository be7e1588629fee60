"""The source ``rewrite``: how a document is read from a reply, and steps that ask for several documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.search.rewrite import DOCUMENTS, PURPOSE, read_document
from reflact.testing import ToyEnvironment, toy_optimizer
from reflact.testing.llm import Script, ScriptedAnswer
from toy_runs import LINES, Ran, document, run

NO_DOCUMENT = "the document is empty; write it between two fences"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("```markdown\n# Rules\n- a rule\n```", "# Rules\n- a rule"),
        ("Here it is:\n\n```\n# Rules\n- a rule\n```\nIt says all.", "# Rules\n- a rule"),
        ("~~~md\n# Rules\n\n```\nSELECT 1\n```\n~~~\n", "# Rules\n\n```\nSELECT 1\n```"),
        ("```Markdown\r\n# Rules\r\n- a rule\r\n```\r\n", "# Rules\r\n- a rule"),
        ("# Rules\n- a rule\n", "# Rules\n- a rule"),
        ("Sure:\n```markdown\n# Rules\n- a rule", "# Rules\n- a rule"),
        (
            "```markdown\n# Rules\n```sql\nSELECT 1\n```\n- a\n```\nDone.",
            "# Rules\n```sql\nSELECT 1\n```\n- a",
        ),
    ],
)
def test_the_document_stands_between_fences(reply: str, text: str) -> None:
    assert read_document(reply) == text


lines = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=8)


def writing(*replies: str | Exception, later: str | None = None) -> Script:
    """Return a script whose n-th document of a step is the n-th reply; ``later``: what a second attempt gets."""
    usual = toy_optimizer()

    def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        if call_id.purpose != PURPOSE:
            return usual(prompt, reply_type, call_id)
        if call_id.attempt and later is not None:
            return later
        return replies[int(call_id.part) % len(replies)]

    return answer


async def rewrite(folder: Path, script: Script | None = None, **options: Any) -> Ran:
    sections: dict[str, Any] = {
        "environment": ToyEnvironment(train=8, val=8, test=4),
        "train": {"batch_size": 8},
        "search": {"sources": ["rewrite"]},
    }
    return await run(folder, script=script, **{**sections, **options})


def fenced(*names: str) -> str:
    return f"```markdown\n{document(*names)}```"


async def test_a_step_asks_for_several_documents_and_the_race_chooses(tmp_path: Path) -> None:
    done = await rewrite(
        tmp_path,
        writing(fenced("double"), fenced(*list(LINES)[:4]), fenced("square"), "```\nBe brief, always.\n```"),
    )
    (record,) = done.records
    assert sorted(call.call_id.part for call in done.asked(PURPOSE)) == [str(n) for n in range(DOCUMENTS)]
    assert record.source == "rewrite"
    assert [entry.label for entry in record.race] == ["rewrite 1", "rewrite 2", "rewrite 3", "rewrite 4"]
    assert [entry.judged for entry in record.race] == [False, True, False, False]
    assert record.verdict.action == "accept_new_best"
    assert done.best.strip() == document(*list(LINES)[:4]).strip()
    assert [rewrite.number for rewrite in record.rewrites] == [0, 1, 2, 3]


async def test_cases_show_what_is_right_and_never_a_validation_or_test_item(tmp_path: Path) -> None:
    world = ToyEnvironment(train=8, val=8, test=4)
    done = await rewrite(tmp_path, environment=world, initial=document("double"), train={"batch_size": 4})
    texts = done.shown(PURPOSE)
    assert all("Further tasks with their right answers" in text for text in texts)
    for name in ("val", "test"):
        assert not any(str(item.input) in text for item in world.items(name) for text in texts)


async def test_a_document_that_never_comes_is_one_document_less(tmp_path: Path) -> None:
    done = await rewrite(
        tmp_path, writing("```markdown\n```", fenced(*list(LINES)[:4]), "", fenced("double"))
    )
    (record,) = done.records
    assert [entry.label for entry in record.race] == ["rewrite 2", "rewrite 4"]
    assert [fallback.label for fallback in record.merged.fallbacks] == ["document/0", "document/2"]
    assert NO_DOCUMENT in record.merged.fallbacks[0].reason
    assert record.rewrites[0].document is None
    assert NO_DOCUMENT in str(record.rewrites[0].reason)


@pytest.mark.parametrize(
    "reply",
    [
        fenced("double", "square"),
        f"Sure:\n\n{fenced('double', 'square')}",
        f"```\n* {LINES['double'][2:]}\n\n\n1. {LINES['square'][2:]}\n```",
    ],
)
async def test_a_reply_that_repeats_the_document_is_not_measured(tmp_path: Path, reply: str) -> None:
    done = await rewrite(tmp_path, writing(reply), initial=document("double", "square"))
    (record,) = done.records
    assert (record.verdict.action, record.verdict.repeats) == ("no_change", "v0")
    assert record.race == ()
    assert {skill for skill, _ in done.actor.asked} == {document("double", "square")}
