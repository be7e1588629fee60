"""What analysts are told of earlier attempts: the epoch's step buffer, and cards of rejected edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from reflact.records import CandidateReview
from reflact.stages.reply_models import AnalystReply
from reflact.testing import ToyEnvironment, append_reply
from toy_runs import LINES, Actor, Part, Ran, playing, run, shown_to

pytestmark = pytest.mark.anyio

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


def cards(shown: str) -> str:
    """Return the cards that a prompt shows."""
    _, _, after = shown.partition(f"{CARDS}\n<rejected>\n")
    return after.partition("\n</rejected>")[0]


TWO: dict[str, Any] = {"train": {"num_epochs": 2}}

# ------------------------------------------------------------------------------------- the step buffer


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
    assert pattern.item_ids == done.records[2].reports[0].item_ids


async def test_an_accepted_step_leaves_no_rejected_edits(tmp_path: Path) -> None:
    """What was accepted is not among the edits that did not help."""
    done = await run(tmp_path, **TWO)
    assert done.actions[0] == "accept_new_best"
    assert "outcome accept_new_best" in analysed(done, 2)
    assert "did not help" not in analysed(done, 2)


async def test_the_step_buffer_may_be_off(tmp_path: Path) -> None:
    """Neither analysts nor the decision on the step size are told of the epoch's attempts."""
    done = await run(
        tmp_path,
        script=playing(trying(TRIED, f"{TRIED} 2")),
        reflect={"step_buffer": False},
        select={"lr_control": "autonomous"},
    )
    assert not any(ATTEMPTS in shown_to(call) for call in done.calls)


# --------------------------------------------------------------------------------------------- cards


async def test_rejected_edits_are_remembered_across_epochs(tmp_path: Path) -> None:
    """Those of earlier epochs that bear on the cases are shown, with the scores before and after."""
    done = await run(tmp_path, script=playing(trying(TRIED, FAR, f"{TRIED} 3")), **TWO)
    assert done.actions == ["reject", "reject", "reject", "no_change"]
    assert [CARDS in analysed(done, step) for step in (1, 2, 3, 4)] == [False, False, True, True]
    third = cards(analysed(done, 3))
    assert third == f"append: {TRIED}\n  validation score 0.000 before, 0.000 after"
    assert f"{TRIED} 3" not in cards(analysed(done, 4))


async def test_an_edit_is_one_card(tmp_path: Path) -> None:
    """The same words, rejected twice in other white space, are shown once."""
    spaced = TRIED.replace(" ", "  ")
    done = await run(tmp_path, script=playing(trying(TRIED, spaced, FAR)), **TWO)
    assert done.actions[:2] == ["reject", "reject"]
    assert cards(analysed(done, 3)).count("nonsense") == 1


async def test_a_vetoed_edit_is_a_card(tmp_path: Path) -> None:
    """What an approver turned down is remembered like what the gate turned down."""

    async def veto(review: CandidateReview) -> bool:
        return False

    line = f"{LINES['double']}\n- the missing rule"
    done = await run(tmp_path, script=playing(trying(line)), approve=veto, **TWO)
    assert done.actions[0] == "reject"
    assert "the missing rule" in cards(analysed(done, 3))


async def test_memory_may_be_off(tmp_path: Path) -> None:
    """Without memory no card is shown in any epoch."""
    done = await run(tmp_path, script=playing(trying(TRIED, FAR)), reflect={"memory": "off"}, **TWO)
    assert not any(CARDS in shown_to(call) for call in done.calls)


# ---------------------------------------------------------------------------------- across several runs


class Elsewhere(ToyEnvironment):
    """The toy world under another name."""

    @property
    def identity(self) -> str:
        return "elsewhere"


def first_step(done: Ran) -> str:
    """Return the cards that the first analyst was shown."""
    return cards(shown_to(done.asked("analyst_failure")[0]))


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
    """In a store that runs share, a new run sees earlier runs' cards only if it asks for them."""
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
    assert [cards(analysed(done, step)).count("nonsense") for step in (1, 3)] == [1, 1]


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
    assert all(TRIED in cards(analysed(done, step)) for step in (3, 4))
    fresh = await run(tmp_path / "d", script=playing(trying(FAR)), store=shared, seed=3, **sections)
    assert "something late" in first_step(fresh)
