"""Rejected-edit memory and the step buffer: collecting, selecting and showing edits, alone and in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact.records import CandidateReview
from reflact.stages.reply_models import AnalystReply
from reflact.testing import ToyEnvironment, append_reply
from toy_runs import LINES, Actor, Part, Ran, playing, run, shown_to

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
    (call,) = [call for call in done.asked("analyst_failure") if call.call_id.step == step]
    return shown_to(call)


def shown_edits(shown: str) -> str:
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
    @property
    def identity(self) -> str:
        return "elsewhere"


def first_step(done: Ran) -> str:
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
