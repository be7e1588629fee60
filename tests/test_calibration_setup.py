"""A model connected from Python: asked over HTTP, paid once, within its budget, replayed without network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from calibrate_command import MODEL, flattering
from flattered_world import PURPOSE, transition
from reflact import Critic
from reflact.calibration import connect
from reflact.errors import BudgetSpent, ConfigError
from reflact.llm import BudgetConfig, ModelConfig


@contextmanager
def endpoint() -> Iterator[tuple[ModelConfig, list[bytes]]]:
    with flattering() as (url, asked):
        yield ModelConfig.model_validate({**MODEL, "base_url": url}), asked


async def score(
    model: ModelConfig, store: Path, *, claims: bool = False, budget: BudgetConfig | None = None
) -> float:
    step = transition("a", 0, 2, claims=claims)
    async with connect(model, store=store, budget=budget or BudgetConfig()) as llm:
        return (await Critic(llm).score(step, purpose=PURPOSE)).evaluation.progress_after


async def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    """A second connection to the same file finds the reply there."""
    with endpoint() as (model, asked):
        said = [await score(model, tmp_path / "memory.db") for _ in range(2)]
    assert said == [1, 1]
    assert len(asked) == 1


async def test_a_budget_holds_over_all_connections_to_a_file(tmp_path: Path) -> None:
    one = BudgetConfig(max_calls=1)
    with endpoint() as (model, asked):
        await score(model, tmp_path / "memory.db", budget=one)
        with pytest.raises(BudgetSpent, match="max_calls"):
            await score(model, tmp_path / "memory.db", claims=True, budget=one)
        await score(model, tmp_path / "other.db", claims=True, budget=one)
    assert len(asked) == 2


async def test_connections_at_one_time_share_one_budget(tmp_path: Path) -> None:
    limit, ended = BudgetConfig(max_calls=4), list[str]()
    path = tmp_path / "memory.db"
    with endpoint() as (model, asked):

        async def use(name: str) -> None:
            async with connect(model, store=path, budget=limit) as llm:
                for number in range(4):
                    try:
                        step = transition(f"{name}{number}", 0, 2, claims=False)
                        await Critic(llm).score(step, purpose=PURPOSE)
                    except BudgetSpent as error:
                        ended.append(str(error))

        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(use, name)
    assert len(asked) == 4
    assert len(ended) == 8
    assert all("budget.max_calls is 4" in reason for reason in ended)


async def test_the_time_of_a_budget_ends_what_is_under_way(tmp_path: Path) -> None:
    with endpoint() as (model, _), pytest.raises(BudgetSpent, match="max_seconds"):
        async with connect(model, store=tmp_path / "memory.db", budget=BudgetConfig(max_seconds=0.05)):
            await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("model", "budget", "words"),
    [
        (ModelConfig(), BudgetConfig(), "the critic's model has no name"),
        (ModelConfig(model="m"), BudgetConfig(max_tokens=9), r"models\.critic\.max_tokens"),
        (ModelConfig(model="m", api_key_env="REFLACT_NOT_SET"), BudgetConfig(), "REFLACT_NOT_SET"),
    ],
    ids=["no name", "no cap", "no key"],
)
async def test_what_is_missing_is_said_before_a_call(
    tmp_path: Path, model: ModelConfig, budget: BudgetConfig, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await score(model, tmp_path / "memory.db", budget=budget)
