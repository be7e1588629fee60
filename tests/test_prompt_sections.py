"""Trajectories in a limit of bytes: short ones stay whole, long ones are cut where it matters least."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from reflact.prompts import fence
from reflact.stages.prompt_sections import (
    BYTES_PER_TOKEN,
    count_bytes,
    fit_conversation,
    show_cases,
)
from reflact.types import Item, Rollout, Score, Turn

MARK = re.compile(
    r"\[\.\.\. (?:(?P<turns>[0-9,]+) turns? of )?(?P<size>[0-9,]+) characters (?:cut|left out) \.\.\.\]"
)

Role = Literal["system", "user", "assistant", "tool"]
roles: st.SearchStrategy[Role] = st.sampled_from(("system", "user", "assistant", "tool"))
letters = st.text("ab é规👩\n", max_size=1500)
texts = letters | st.text("ab", max_size=30) | st.just("error: no such table")
talks = st.lists(st.builds(Turn, role=roles, content=texts), max_size=14)


def turn(role: Role, content: str) -> Turn:
    return Turn(role=role, content=content)


def rollout(turns: Sequence[Turn], *, answer: str = "", feedback: str | None = None) -> Rollout:
    return Rollout(
        key="k",
        item_id="i",
        skill_hash="s",
        turns=tuple(turns),
        answer=answer,
        feedback=feedback,
        score=Score.of(0),
    )


def shown(rollouts: Sequence[Rollout], *, tokens: int, failed: bool = True, reference: str = "right") -> str:
    items = [Item(id=f"i{n}", input="q", reference=reference) for n in range(len(rollouts))]
    return show_cases(rollouts, items, failed=failed, tokens=tokens)


def sizes(text: str) -> list[int]:
    """Return the sizes that the marks of a text name."""
    return [int(mark["size"].replace(",", "")) for mark in MARK.finditer(text)]


@given(talks.filter(bool), st.integers(1000, 9000))
def test_a_conversation_fits_and_accounts_for_every_character(turns: list[Turn], room: int) -> None:
    lines = [f"{t.role}: {t.content}" for t in turns]
    after = fit_conversation(turns, room)
    assert count_bytes(after) <= room
    for mark in MARK.finditer(after):
        assert mark["turns"] != "0"
    gaps = [m for m in MARK.finditer(after) if m["turns"]]
    cuts = [m for m in MARK.finditer(after) if not m["turns"]]
    left_out = sum(int(m["turns"].replace(",", "")) for m in gaps)
    kept = len(MARK.sub("", after)) - (len(lines) - left_out + len(gaps) - 1) - 2 * len(cuts)
    assert kept + sum(sizes(after)) == sum(map(len, lines))


@given(st.lists(st.tuples(talks, texts), min_size=1, max_size=6), st.integers(500, 3000))
def test_a_minibatch_keeps_its_budget(cases: list[tuple[list[Turn], str]], each: int) -> None:
    rollouts = [rollout(turns, answer=answer) for turns, answer in cases]
    tokens = each * len(rollouts)
    text = shown(rollouts, tokens=tokens)
    inside = re.sub(r"(?m)^</?case_\d+>$", "", text)
    assert count_bytes(inside) - 4 * len(rollouts) <= tokens * BYTES_PER_TOKEN
    assert text == shown(rollouts, tokens=tokens)


def test_a_question_and_its_answer_are_shown_without_roles() -> None:
    one = rollout([turn("user", "2+2?"), turn("assistant", "5")], feedback="Too much.")
    assert shown([one], tokens=500) == fence(
        "case_1", "task: 2+2?\nwrong answer: 5\nremark: Too much.\nright answer: right"
    )
    assert shown([one], tokens=500, failed=False) == fence("case_1", "task: 2+2?\nanswer: 5")


def test_key_turns_stay_and_the_others_are_counted() -> None:
    filler = [turn("assistant", f"step {n} " + "." * 300) for n in range(20)]
    turns = [
        turn("system", "You are careful."),
        turn("user", "Find the sum."),
        *filler[:8],
        turn("tool", "Error: no such column"),
        *filler[8:14],
        turn("tool", "2 rows"),
        turn("assistant", "I will try the other table instead."),
        *filler[14:],
        turn("tool", "7 rows"),
        turn("assistant", "The sum is 7."),
    ]
    after = fit_conversation(turns, 760)
    assert after == "\n".join(
        [
            "system: You are careful.",
            "user: Find the sum.",
            "[... 8 turns of 2,544 characters left out ...]",
            "tool: Error: no such column",
            "[... 6 turns of 1,912 characters left out ...]",
            "tool: 2 rows",
            "assistant: I will try the other table instead.",
            "[... 6 turns of 1,914 characters left out ...]",
            "tool: 7 rows",
            "assistant: The sum is 7.",
        ]
    )
