"""The run's error probability: how it is divided, and what an extension adds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflact.records import AlphaBudget
from reflact.stages.reply_models import AnalystReply
from reflact.testing import ToyEnvironment, append_reply
from reflact.training.state import add_alpha, find_alpha_budget
from reflact.types import Evidence, Skill, Split
from toy_runs import Actor, Part, Ran, playing, right, run

pytestmark = pytest.mark.anyio

NOISY: dict[str, Any] = {
    "target": {"deterministic": False},
    "gate": {"max_trials": 2, "alpha": 0.2, "early_stop": False},
}


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "slow_gated", "decisions"),
    [(1, 4, True, 5), (1, 4, False, 5), (4, 2, True, 12), (4, 2, False, 9), (2, 3, True, 8)],
)
def test_a_run_plans_its_decisions(epochs: int, per_epoch: int, slow_gated: bool, decisions: int) -> None:
    """Each step, each gated slow update from the second epoch on, and the promotion at the end."""
    total = epochs * per_epoch
    alpha = find_alpha_budget(1, (), alpha=0.1, total=total, per_epoch=per_epoch, slow_gated=slow_gated)
    assert alpha == AlphaBudget(alpha=0.1, decisions=decisions, until_step=total)
    assert alpha.level == pytest.approx(0.1 / decisions)


@given(
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
)
def test_no_more_decisions_are_taken_than_were_planned(
    per_epoch: int, slow_gated: bool, starts: list[tuple[int, bool]]
) -> None:
    """However often a run is extended, before its end or after it, each alpha is enough."""
    alphas: tuple[AlphaBudget, ...] = ()
    taken: Counter[AlphaBudget] = Counter()
    step = epochs = 0
    for more, is_cut in starts:
        epochs += more
        total = epochs * per_epoch

        def decide(at: int, total: int = total) -> None:
            nonlocal alphas
            alpha = find_alpha_budget(
                at, alphas, alpha=0.1, total=total, per_epoch=per_epoch, slow_gated=slow_gated
            )
            alphas = add_alpha(alphas, alpha)
            taken[alpha] += 1

        last = total - per_epoch // 2 - 1 if is_cut else total
        while step < last:
            step += 1
            decide(step)
            if slow_gated and step % per_epoch == 0 and step > per_epoch:
                decide(step)
        if step == total:
            decide(step)
    assert all(count <= alpha.decisions for alpha, count in taken.items())
    assert [a.until_step for a in alphas] == sorted({a.until_step for a in alphas})


def evidence(done: Ran) -> list[Evidence]:
    """Return what the steps' verdicts rested on."""
    return [r.verdict.evidence for r in done.records if r.verdict.evidence is not None]


async def test_an_extension_opens_another_one_and_states_it(tmp_path: Path) -> None:
    """Earlier decisions keep their share, the added ones share a further alpha, and both are told."""
    number = iter(range(1000))
    script = playing((AnalystReply, lambda wanted, _: append_reply(wanted, f"- nonsense {next(number)}")))
    short = await run(tmp_path, script=script, **NOISY)
    assert short.state.alphas == (AlphaBudget(alpha=0.2, decisions=3, until_step=2),)
    assert [e.level for e in evidence(short)] == [pytest.approx(0.2 / 3)] * 2
    longer = await run(tmp_path, script=script, train={"num_epochs": 3}, **NOISY)
    assert longer.state.alphas == (*short.state.alphas, AlphaBudget(alpha=0.2, decisions=5, until_step=6))
    assert [e.level for e in evidence(longer)] == [pytest.approx(x) for x in [0.2 / 3] * 2 + [0.2 / 5] * 4]
    assert longer.records[:2] == short.records
    assert len([e for e in longer.events if e.kind == "gate_power_estimated"]) == 2
    again = await run(tmp_path, script=script, train={"num_epochs": 3}, **NOISY)
    assert again.state.alphas == longer.state.alphas


async def test_guidance_and_promotion_have_their_share(tmp_path: Path) -> None:
    """Gated slow updates are decided at the same level as the steps; ungated ones take no share."""
    idle: Part = (AnalystReply, lambda wanted, _: append_reply(wanted, "- nonsense"))
    gated = await run(
        tmp_path / "a", script=playing(idle), train={"num_epochs": 3}, slow_update={"enabled": True}, **NOISY
    )
    assert [a.decisions for a in gated.state.alphas] == [6 + 2 + 1]
    slow = [e.slow_update.verdict.evidence for e in gated.epochs if e.slow_update and e.slow_update.verdict]
    assert [e.level for e in slow if e] == [pytest.approx(0.2 / 9)] * len(slow)
    assert slow
    forced = {"enabled": True, "gated": False}
    ungated = await run(
        tmp_path / "b", script=playing(idle), train={"num_epochs": 3}, slow_update=forced, **NOISY
    )
    assert [a.decisions for a in ungated.state.alphas] == [6 + 1]
    (promotion,) = ungated.promotions
    assert promotion.verdict.evidence is not None
    assert promotion.verdict.evidence.level == pytest.approx(0.2 / 7)


async def test_the_second_comparison_takes_no_share(tmp_path: Path) -> None:
    """A candidate that must beat the best skill, too, is tested against both at its step's level."""
    environment = ToyEnvironment(train=8, val=8, test=4)
    places = {str(item.input): n for n, item in enumerate(environment.items(Split.val))}

    def better(skill: Skill, message: str, times: int) -> str | None:
        solved = 2 * skill.text.count("nonsense")
        return right(message) if places.get(message, 99) < solved else "unknown"

    number = iter(range(1000))
    done = await run(
        tmp_path,
        environment=environment,
        actor=Actor(better),
        script=playing((AnalystReply, lambda wanted, _: append_reply(wanted, f"- nonsense {next(number)}"))),
        train={"num_epochs": 2},
        slow_update={"enabled": True, "gated": False},
        target={"deterministic": False},
        gate={"max_trials": 4, "alpha": 0.9, "early_stop": False},
    )
    assert done.actions == ["accept_new_best"] * 4
    twice = [r.verdict for r in done.records if r.verdict.against_best is not None]
    assert len(twice) == 1
    for verdict in twice:
        assert verdict.evidence is not None
        assert verdict.against_best is not None
        assert verdict.against_best.level == verdict.evidence.level
