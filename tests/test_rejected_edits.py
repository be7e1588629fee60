"""Rejected-edit memory and the step buffer: collecting, selecting and showing edits, alone and in runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.prompts import fence
from reflact.records import CandidateReview, SkillVersion, StepRecord
from reflact.skills.rejected_edits import (
    MIN_RELEVANCE,
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
    """A rejected step leaves a card for each edit it applied, with the step's scores; others leave none."""
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


def test_an_edit_is_one_card() -> None:
    """White space makes no new card; the last attempt is the one that is kept."""
    steps = [
        record(1, "reject", applied("a  b"), applied("c")),
        record(2, "reject", applied(" a\nb "), applied("a b", "replace", "x"), after=0.4),
    ]
    found = collect_rejected_edits(steps)
    assert [(each.op, each.content, each.origin) for each in found] == [
        ("append", "c", "step 1"),
        ("append", " a\nb ", "step 2"),
        ("replace", "a b", "step 2"),
    ]
    assert deduplicate_edits([*found, *found]) == found


def test_an_edit_that_was_accepted_later_is_forgotten() -> None:
    """What helped in the end is not held against itself, until it is rejected again."""
    steps = [record(1, "reject", applied("a")), record(2, "accept_new_best", applied("a "))]
    assert collect_rejected_edits(steps) == ()
    assert contents(collect_rejected_edits([*steps, record(3, "reject", applied("a"))])) == ["a"]


def test_a_rewrite_is_remembered_by_its_suggestions() -> None:
    """Where suggestions led to a whole text they are the cards; a draft without any is one itself."""
    suggested = record(1, "reject", applied("say more", "suggest"), applied("Whole text.", "rewrite"))
    assert contents(collect_rejected_edits([suggested])) == ["say more"]
    assert contents(collect_rejected_edits([record(1, "reject", applied("Whole text.", "rewrite"))])) == [
        "Whole text."
    ]


def test_cards_for_other_runs_name_their_run() -> None:
    """The origin is the step, or the run where one is given."""
    steps = [record(3, "reject", applied("a"))]
    assert [each.origin for each in collect_rejected_edits(steps)] == ["step 3"]
    assert [each.origin for each in collect_rejected_edits(steps, run_id="r7")] == ["r7"]


@given(some_cards, texts, st.integers(0, 6))
def test_relevant_cards_share_words_with_the_text(found: list[RejectedEdit], text: str, most: int) -> None:
    """At most so many are taken, all of them given ones that share two words with the text at least."""
    taken = select_relevant_edits(found, text, limit=most)
    assert len(taken) <= most
    assert all(any(each is given for given in found) for each in taken)
    assert all(len(content_words(each.text) & content_words(text)) >= 2 for each in taken)
    assert taken == select_relevant_edits(found, f"{text}\n{text.upper()}", limit=most)
    assert taken == select_relevant_edits(found, text)[:most] or most > 5


@given(some_cards, texts)
def test_a_card_whose_words_are_all_at_hand_is_relevant(found: list[RejectedEdit], text: str) -> None:
    """A text that holds a card's own words finds it, unless it has but one."""
    for each in found:
        own = f"{each.text} {text}"
        assert (each in select_relevant_edits(found, own, limit=len(found))) == (
            len(content_words(each.text)) >= 2
        )


def test_rare_shared_words_count_more_than_common_ones() -> None:
    """A word that many cards hold says little; cards are ranked by the weight of what they share."""
    common = [card(f"query weather table column {n}x filler{n}") for n in range(6)]
    rare = card("query weather fog visibility")
    found = select_relevant_edits([rare, *common], "query weather table fog visibility column")
    assert found == (rare,)
    assert len(select_relevant_edits(common, "query weather table column 3x")) == 1


def test_cards_below_the_floor_are_left_out() -> None:
    """Two words of many make no card relevant."""
    long = card("fog rain " + " ".join(f"word{n}" for n in range(20)))
    assert select_relevant_edits([long], "fog rain wind") == ()
    assert select_relevant_edits([card("fog rain wind hail")], "fog rain") != ()
    assert 0 < MIN_RELEVANCE < 0.5


def test_of_equal_cards_the_later_comes_first() -> None:
    """Age breaks ties, in favour of what was tried last."""
    found = [card("fog rain", origin=f"step {n}") for n in range(7)]
    assert [each.origin for each in select_relevant_edits(found, "rain and fog")] == [
        f"step {n}" for n in range(6, 1, -1)
    ]


def test_scripts_without_spaces_are_compared_by_character_pairs() -> None:
    """Chinese, Japanese and Thai texts share pairs of neighbouring characters; a lone one is itself."""
    assert content_words("最高温度 x 日") == {"最高", "高温", "温度", "日"}
    found = [card("计算最高温度时使用最大值"), card("分组统计用户数量")]
    assert select_relevant_edits(found, "八月的最高温度是多少？") == (found[0],)
    assert select_relevant_edits(found, "八月有多少个雾天？") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The highest temp_max, in 2013!", {"highest", "temp_max"}),
        ("STRASSE Straße ﬁne", {"strasse", "fine"}),
        ("café cafe\u0301", {"café"}),
        ("a I 7 ... 12,5", set()),
        ("用SQL查询", {"用", "sql", "查询"}),
    ],
)
def test_content_words_say_what_a_text_is_about(text: str, words: set[str]) -> None:
    """Function words, numbers and single letters are none; letters are compared without their case."""
    assert content_words(text) == words


def test_cards_are_shown_with_their_scores() -> None:
    """Each card has its edit, cut where it is long, and the scores where there are any."""
    found = [
        RejectedEdit(op="append", content="- Use MAX.", score_before=0.0, score_after=0.125, origin="step 1"),
        card("new", op="replace", target="old"),
        card("", op="delete", target="gone"),
        card("x" * 5000, op="rewrite", origin="r7"),
    ]
    shown = show_memory(found)
    assert shown.startswith(
        "Edits tried before that did not help:\n<rejected>\n"
        "append: - Use MAX.\n  validation score 0.000 before, 0.125 after\n"
        "replace: old\n  content: new\ndelete: gone\nrewrite: xxx"
    )
    assert "characters cut" in shown
    assert "r7" not in shown
    assert show_memory([]) == ""


def test_the_optimizers_memory_is_fenced() -> None:
    """The memory stands between tags that it cannot close, and without one nothing is said."""
    assert show_meta(" Prefer examples.\n").endswith(f":\n{fence('advice', 'Prefer examples.')}")
    assert "</advice_>" in show_meta("</advice>")
    assert show_meta(" \n") == ""


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
    """Each step is told of the epoch's earlier ones: action, failures, patterns, and edits with scores."""
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


async def test_an_accepted_step_leaves_no_rejected_edits(tmp_path: Path) -> None:
    """What was accepted is not among the edits that did not help."""
    done = await run(tmp_path, **TWO)
    assert done.actions[0] == "accept_new_best"
    assert "outcome accept_new_best" in analysed(done, 2)
    assert "did not help" not in analysed(done, 2)


async def test_rejected_edits_are_remembered_across_epochs(tmp_path: Path) -> None:
    """Those of earlier epochs that bear on the cases are shown, with the scores before and after."""
    done = await run(tmp_path, script=playing(trying(TRIED, FAR, f"{TRIED} 3")), **TWO)
    assert done.actions == ["reject", "reject", "reject", "no_change"]
    assert [CARDS in analysed(done, step) for step in (1, 2, 3, 4)] == [False, False, True, True]
    third = shown_edits(analysed(done, 3))
    assert third == f"append: {TRIED}\n  validation score 0.000 before, 0.000 after"
    assert f"{TRIED} 3" not in shown_edits(analysed(done, 4))


async def test_a_vetoed_edit_is_a_card(tmp_path: Path) -> None:
    """What an approver turned down is remembered like what the gate turned down."""

    async def veto(review: CandidateReview) -> bool:
        return False

    line = f"{LINES['double']}\n- the missing rule"
    done = await run(tmp_path, script=playing(trying(line)), approve=veto, **TWO)
    assert done.actions[0] == "reject"
    assert "the missing rule" in shown_edits(analysed(done, 3))


async def test_the_memory_may_be_off(tmp_path: Path) -> None:
    """Neither analysts nor the decision on the step size are told of rejected edits of earlier epochs."""
    done = await run(
        tmp_path,
        script=playing(trying(TRIED, FAR)),
        reflect={"memory": "off"},
        select={"lr_control": "autonomous"},
        **TWO,
    )
    assert not any(CARDS in shown_to(call) for call in done.calls)


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
    """In a store that runs share, a new run sees earlier runs' rejected edits only if it asks for them."""
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


async def test_an_edit_that_several_runs_tried_is_one_card(tmp_path: Path) -> None:
    """A run's own rejection takes the place of the pinned card of the same edit."""
    shared = tmp_path / "shared.db"
    await run(tmp_path / "a", script=playing(trying(TRIED)), store=shared)
    sections: dict[str, Any] = {"reflect": {"memory": "environment"}, **TWO}
    done = await run(tmp_path / "b", script=playing(trying(TRIED)), store=shared, seed=1, **sections)
    assert [shown_edits(analysed(done, step)).count("nonsense") for step in (1, 3)] == [1, 1]


async def test_a_run_pins_the_cards_of_others_when_it_starts(tmp_path: Path) -> None:
    """What other runs reject while it is stopped does not reach it; it goes on as if never stopped."""
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
