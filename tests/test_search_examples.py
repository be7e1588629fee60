"""Worked examples: which sets are drawn, how they are rendered, and their region of the document."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from profiles import cases
from reflact.search.examples import (
    apply_examples,
    shuffle_answers,
)
from reflact.skills.document import (
    apply_edits,
    editable_text,
    find_regions,
)
from reflact.types import Edit, Skill, WorkedExample
from skill_documents import documents

texts = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=12)
pools = st.lists(st.tuples(texts, texts), max_size=12).map(
    lambda pairs: tuple(
        WorkedExample(item_id=f"train-{n}", task=task, answer=answer)
        for n, (task, answer) in enumerate(pairs)
    )
)


@cases(200)
@given(pools, st.integers(0, 20))
def test_shuffled_answers_keep_the_items_and_permute_the_answers(
    pool: tuple[WorkedExample, ...], seed: int
) -> None:
    """Items and tasks stay, the answers are the same ones, and no item keeps its own.

    If one answer serves more than half of the items, that cannot be, and there is no control.
    """
    shuffled = shuffle_answers(pool, seed)
    most = max(Counter(e.answer for e in pool).values(), default=0)
    if 2 * most > len(pool):
        assert shuffled == ()
        return
    assert not any(one.answer == other.answer for one, other in zip(shuffled, pool, strict=True))
    assert [(e.item_id, e.task) for e in shuffled] == [(e.item_id, e.task) for e in pool]
    assert Counter(e.answer for e in shuffled) == Counter(e.answer for e in pool)
    assert shuffled == shuffle_answers(pool, seed)


@cases(300)
@given(documents(), pools)
def test_examples_change_nothing_else_in_a_document(text: str, pool: tuple[WorkedExample, ...]) -> None:
    assume(pool)
    assume(not any("<!--" in e.task + e.answer for e in pool))
    after = apply_examples(Skill(text=text), pool).skill.text
    assert list_regions(after, but="examples") == list_regions(text, but="examples")
    assert editable_text(after).split() == editable_text(text).split()
    assert [region.name for region in find_regions(after)].count("examples") == 1


def list_regions(text: str, *, but: str) -> list[str]:
    return [text[region.start : region.end] for region in find_regions(text) if region.name != but]


RULES = "# Rules\n\n- double: twice the number\n- square: the number times itself\n"


@pytest.mark.parametrize("op", ["append", "insert_after"])
def test_only_the_new_lines_of_an_edit_are_added(op: Any) -> None:
    content = "- square: the number times itself\n- negate: a minus before it\n* negate: a minus before it\n"
    target = "" if op == "append" else "- double: twice the number"
    candidate = apply_edits(Skill(text=RULES), [Edit(op=op, target=target, content=content)])
    text = candidate.skill.text
    assert candidate.results[0].status == "applied"
    assert text.count("negate: a minus before it") == text.count("the number times itself") == 1
