"""Rejected-edit memory and the step buffer: collecting, selecting and showing edits, alone and in runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.records import CandidateReview, SkillVersion, StepRecord
from reflact.skills.rejected_edits import (
    RejectedEdit,
    collect_rejected_edits,
    content_words,
    deduplicate_edits,
    select_relevant_edits,
)
from reflact.stages.prompt_sections import show_memory, show_meta
from reflact.stages.reply_models import AnalystReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.types import (
    AggregateResult,
    Edit,
    EditKind,
    EditResult,
    GateAction,
    Measurement,
    SelectResult,
    Split,
    Verdict,
)
from toy_runs import LINES, Actor, Part, Ran, playing, run, shown_to

VERSION = SkillVersion(number=0, skill_hash="h", origin="initial")
WORDS = ("weather", "wind", "rain", "August", "the", "7", "温度最高", "ラーメン", "temp_max", "Straße")

texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
some_cards = st.lists(
    st.builds(RejectedEdit, op=st.just("append"), content=texts, origin=st.just("s")), max_size=8
)


def applied(content: str, op: EditKind = "append", target: str = "") -> EditResult:
    """Return the result of an edit that was applied."""
    return EditResult(edit=Edit(op=op, target=target, content=content), status="applied")


def record(
    step: int, action: GateAction, *edits: EditResult, before: float = 0.5, after: float = 0.25
) -> StepRecord:
    """Return a committed step that tried these edits."""
    verdict = Verdict(action=action, reason="r", current_score=before, candidate_score=after)
    return StepRecord(
        step=step,
        epoch=1,
        skill_before="h",
        item_ids=("a",),
        rollout=Measurement(skill_hash="h", split=Split.train, n=1),
        n_failures=1,
        reports=(),
        merged=AggregateResult(),
        chosen=SelectResult(),
        edits=edits,
        candidate_hash="c",
        verdict=verdict,
        current=VERSION,
        best=VERSION,
    )


def card(content: str, *, target: str = "", op: EditKind = "append", origin: str = "step 1") -> RejectedEdit:
    """Return a card."""
    return RejectedEdit(op=op, target=target, content=content, origin=origin)


def contents(found: Sequence[RejectedEdit]) -> list[str]:
    """Return what cards would have put in."""
    return [each.content for each in found]


def test_applied_edits_of_rejected_steps_are_cards() -> None:
    unfit = EditResult(edit=Edit(op="append", content="unfit"), status="rejected", reason="r")
    steps = [
        record(1, "accept", applied("a")),
        record(2, "reject", applied("b"), unfit, applied("", "delete", "c")),
        record(3, "set_aside", applied("d")),
        record(4, "no_change", applied("e")),
    ]
    assert collect_rejected_edits(steps) == (
        RejectedEdit(op="append", content="b", score_before=0.5, score_after=0.25, origin="step 2"),
        RejectedEdit(op="delete", target="c", score_before=0.5, score_after=0.25, origin="step 2"),
    )
    assert {each.origin for each in collect_rejected_edits(steps, run_id="r7")} == {"r7"}


def test_an_edit_is_one_card_until_it_is_accepted() -> None:
    steps = [
        record(1, "reject", applied("a  b"), applied("c")),
        record(2, "reject", applied(" a\nb "), applied("a b", "replace", "x"), after=0.4),
    ]
    cards = collect_rejected_edits(steps)
    assert [(each.op, each.content, each.origin) for each in cards] == [
        ("append", "c", "step 1"),
        ("append", " a\nb ", "step 2"),
        ("replace", "a b", "step 2"),
    ]
    assert deduplicate_edits([*cards, *cards]) == cards
    accepted = [*steps, record(3, "accept_new_best", applied("c "))]
    assert contents(collect_rejected_edits(accepted)) == contents(cards[1:])


def test_a_rewrite_is_remembered_by_its_suggestions() -> None:
    whole = applied("Whole text.", "rewrite")
    suggested = record(1, "reject", applied("say more", "suggest"), whole)
    assert contents(collect_rejected_edits([suggested])) == ["say more"]
    assert contents(collect_rejected_edits([record(1, "reject", whole)])) == ["Whole text."]


@given(some_cards, texts, st.integers(0, 6))
def test_relevant_cards_share_words_with_the_text(cards: list[RejectedEdit], text: str, most: int) -> None:
    taken = select_relevant_edits(cards, text, limit=most)
    assert len(taken) <= most
    assert all(len(each.words & content_words(text)) >= 2 for each in taken)
    assert taken == select_relevant_edits(cards, f"{text}\n{text.upper()}", limit=most)
    for each in cards:
        own = f"{each.content} {text}"
        relevant = select_relevant_edits(cards, own, limit=len(cards))
        assert (each in relevant) == (len(each.words) >= 2)


def test_rare_shared_words_count_more_and_later_cards_come_first() -> None:
    common = [card(f"query weather table column {n}x filler{n}") for n in range(6)]
    rare = card("query weather fog visibility")
    relevant = select_relevant_edits([rare, *common], "query weather table fog visibility column")
    assert relevant == (rare,)
    long = card("fog rain " + " ".join(f"word{n}" for n in range(20)))
    assert select_relevant_edits([long], "fog rain wind") == ()
    equal = [card("fog rain", origin=f"step {n}") for n in range(7)]
    origins = [each.origin for each in select_relevant_edits(equal, "rain and fog")]
    assert origins == [f"step {n}" for n in range(6, 1, -1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The highest temp_max, in 2013!", {"highest", "temp_max"}),
        ("STRASSE Straße ﬁne", {"strasse", "fine"}),
        ("café cafe\u0301", {"café"}),
        ("a I 7 ... 12,5", set()),
        ("用SQL查询", {"用", "sql", "查询"}),
        ("最高温度 x 日", {"最高", "高温", "温度", "日"}),
    ],
)
def test_content_words_say_what_a_text_is_about(text: str, words: set[str]) -> None:
    assert content_words(text) == words


def test_cards_are_shown_with_their_scores() -> None:
    cards = [
        RejectedEdit(op="append", content="- Use MAX.", score_before=0.0, score_after=0.125, origin="step 1"),
        card("new", op="replace", target="old"),
        card("", op="delete", target="gone"),
        card("x" * 5000, op="rewrite", origin="r7"),
    ]
    shown = show_memory(cards)
    assert shown.startswith(
        "Edits tried before that did not help:\n<rejected>\n"
        "append: - Use MAX.\n  validation score 0.000 before, 0.125 after\n"
        "replace: old\n  content: new\ndelete: gone\nrewrite: xxx"
    )
    assert "characters cut" in shown
    assert "r7" not in shown
    assert show_memory([]) == show_meta(" \n") == ""


TRIED = "- nonsense about the missing rule"
"""An edit that bears on cases of the toy world: it shares their words."""

FAR = "- bake bread on Sundays"
CARDS = "Edits tried before that did not help:"
ATTEMPTS = "Earlier attempts in this round:"


def trying(*lines: str) -> Part:
    """Play an analyst that proposes these lines one after the other, and the last one from then on."""
    left = list(lines)
    return AnalystReply, lambda wanted, _: append_reply(wanted, left.pop(0) if len(left) > 1 else left[0])


def analysed(done: Ran, step: int) -> str:
    """Return what the failure analyst of a step was shown."""
    (call,) = [call for call in done.asked("analyst_failure") if call.call_id.step == step]
    return shown_to(call)


def shown_edits(shown: str) -> str:
    """Return the rejected edits that a prompt shows."""
    _, _, after = shown.partition(f"{CARDS}\n<rejected>\n")
    return after.partition("\n</rejected>")[0]


TWO: dict[str, Any] = {"train": {"num_epochs": 2}}


async def test_the_step_buffer_is_of_the_epoch(tmp_path: Path) -> None:
    done = await run(tmp_path, script=playing(trying(TRIED, f"{TRIED} 2")), **TWO)
    assert [ATTEMPTS in analysed(done, step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    second = analysed(done, 2)
    assert "step 1: 4 of 4 cases failed; outcome reject" in second
    assert "validation score 0.000 before, 0.000 after" in second
    assert "pattern (1): missing rule: The document lacks a rule." in second
    assert f"did not help: append {TRIED}" in second
    assert [entry.step for entry in done.state.step_buffer] == [3, 4]
    (pattern,) = done.state.step_buffer[0].patterns
    assert pattern.item_ids == done.records[2].reports[0].item_ids[:1]


async def test_rejected_edits_are_remembered_across_epochs(tmp_path: Path) -> None:
    done = await run(tmp_path, script=playing(trying(TRIED, FAR, f"{TRIED} 3")), **TWO)
    assert done.actions == ["reject", "reject", "reject", "no_change"]
    assert [CARDS in analysed(done, step) for step in (1, 2, 3, 4)] == [False, False, True, True]
    third = shown_edits(analysed(done, 3))
    assert third == f"append: {TRIED}\n  validation score 0.000 before, 0.000 after"
    assert f"{TRIED} 3" not in shown_edits(analysed(done, 4))


async def test_a_vetoed_edit_is_a_card(tmp_path: Path) -> None:
    async def veto(review: CandidateReview) -> bool:
        return False

    line = f"{LINES['double']}\n- the missing rule"
    done = await run(tmp_path, script=playing(trying(line)), approve=veto, **TWO)
    assert done.actions[0] == "reject"
    assert "the missing rule" in shown_edits(analysed(done, 3))


class Elsewhere(ToyEnvironment):
    """The toy world under another name."""

    @property
    def identity(self) -> str:
        return "elsewhere"


def first_step(done: Ran) -> str:
    """Return the rejected edits that the first analyst was shown."""
    return shown_edits(shown_to(done.asked("analyst_failure")[0]))


@pytest.mark.parametrize(
    ("memory", "environment", "told"),
    [
        ("environment", None, True),
        ("run", None, False),
        ("off", None, False),
        ("environment", Elsewhere(train=8, val=4, test=4), False),
    ],
)
async def test_memory_reaches_other_runs_of_the_environment(
    tmp_path: Path, memory: str, environment: ToyEnvironment | None, told: bool
) -> None:
    shared = tmp_path / "shared.db"
    await run(tmp_path / "a", script=playing(trying(TRIED)), store=shared)
    done = await run(
        tmp_path / "b",
        script=playing(trying(FAR)),
        store=shared,
        seed=1,
        environment=environment,
        reflect={"memory": memory},
    )
    assert (TRIED in first_step(done)) == told


async def test_a_run_pins_the_cards_of_others_when_it_starts(tmp_path: Path) -> None:
    shared = tmp_path / "shared.db"
    await run(tmp_path / "a", script=playing(trying(TRIED)), store=shared)
    sections: dict[str, Any] = {"reflect": {"memory": "environment"}, **TWO}
    late = f"{TRIED} and something late"

    with anyio.CancelScope() as scope:
        asked = 0

        def stop(*_: object) -> None:
            nonlocal asked
            asked += 1
            if asked == 3:
                scope.cancel()

        await run(
            tmp_path / "b", script=playing(trying(FAR)), store=shared, actor=Actor(stop), seed=1, **sections
        )
    assert scope.cancelled_caught
    await run(tmp_path / "c", script=playing(trying(late)), store=shared, seed=2)
    done = await run(tmp_path / "b", script=playing(trying(FAR)), store=shared, seed=1, **sections)
    assert done.calls
    assert not any("something late" in shown_to(call) for call in done.calls)
    assert all(TRIED in shown_edits(analysed(done, step)) for step in (3, 4))
    fresh = await run(tmp_path / "d", script=playing(trying(FAR)), store=shared, seed=3, **sections)
    assert "something late" in first_step(fresh)
