"""Worked examples: which sets are drawn, how they are rendered, and their region of the document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from profiles import cases
from reflact.search.examples import (
    apply_examples,
    draw_first_sets,
    draw_variants,
    render_examples,
    shuffle_answers,
)
from reflact.skills.document import (
    apply_edits,
    editable_text,
    find_regions,
)
from reflact.types import Edit, Skill, WorkedExample
from skill_documents import documents

AMPLE = 10**6


def make_pool(size: int, answer: str | None = None) -> tuple[WorkedExample, ...]:
    """Return so many examples, each with its own task, and with its own answer unless one is named."""
    return tuple(
        WorkedExample(item_id=f"train-{n}", task=f"double {n}", answer=answer or str(2 * n))
        for n in range(size)
    )


def list_ids(examples: Sequence[WorkedExample]) -> list[str]:
    return [example.item_id for example in examples]


texts = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=12)
pools = st.lists(st.tuples(texts, texts), max_size=12).map(
    lambda pairs: tuple(
        WorkedExample(item_id=f"train-{n}", task=task, answer=answer)
        for n, (task, answer) in enumerate(pairs)
    )
)


def draw_first(pool: Sequence[WorkedExample], **changed: Any) -> tuple[tuple[WorkedExample, ...], ...]:
    options: dict[str, Any] = {"seed": 7, "label": "examples/1", "most": 6, "max_bytes": AMPLE}
    return draw_first_sets(pool, [""] * len(pool), **options | changed)


def draw_next(
    current: Sequence[WorkedExample], pool: Sequence[WorkedExample], failed: set[str], **changed: Any
) -> tuple[tuple[WorkedExample, ...], ...]:
    options: dict[str, Any] = {"seed": 7, "label": "examples/2", "most": 6, "max_bytes": AMPLE}
    return draw_variants(current, pool, [""] * len(pool), failed, **options | changed)


@cases(200)
@given(st.integers(0, 20), st.integers(0, 9), st.integers(1, 12), st.integers(20, 400))
def test_sets_are_distinct_fit_and_come_from_the_pool(size: int, seed: int, most: int, room: int) -> None:
    pool = make_pool(size)
    first = draw_first(pool, seed=seed, most=most, max_bytes=room)
    current = first[0] if first else ()
    for sets in (first, draw_next(current, pool, {"train-1"}, seed=seed, most=most, max_bytes=room)):
        assert len(sets) <= most
        assert len({frozenset(list_ids(drawn)) for drawn in sets}) == len(sets)
        for drawn in sets:
            assert drawn
            assert len(set(list_ids(drawn))) == len(drawn)
            assert set(drawn) <= set(pool)
            assert len(render_examples(drawn).encode()) <= room


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
    """Return the protected regions of a document, without one of them."""
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
