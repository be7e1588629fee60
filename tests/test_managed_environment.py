"""Environments that start and end something: set up once, closed whatever happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from reflact import Trainer
from reflact.config.training import TrainerConfig
from reflact.errors import RunFailed
from reflact.protocols import Environment, Session
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.training.check import check_setup
from reflact.training.plan import Overrides
from reflact.types import Grade, Item
from toy_runs import build_trainer, settings


class Server(ToyEnvironment):
    """The toy environment behind something that must run; ``broken`` names what fails."""

    def __init__(self, broken: str = "") -> None:
        super().__init__(train=8, val=4, test=4)
        self.broken = broken
        self.happened: list[str] = []
        self.started = anyio.Event()

    async def set_up(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.broken == "set_up":
            raise OSError("the port is taken")
        self.happened.append("set up")

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.happened.append("closed")
        if self.broken == "close":
            raise OSError("it hangs")

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        if self.happened[-1:] != ["rollout"]:
            self.happened.append("rollout")
        self.started.set()
        if self.broken == "hangs":
            await anyio.sleep_forever()
        return await super().run(item, session, seed=seed)


def trainer(folder: Path, environment: Environment) -> Trainer:
    return build_trainer(settings(folder, train={"num_epochs": 1}), environment=environment)


@pytest.mark.parametrize(
    ("broken", "happened", "reason"),
    [
        ("", ["set up", "rollout", "closed"], None),
        ("set_up", [], "the environment could not be set up: OSError: the port is taken"),
        ("close", ["set up", "rollout", "closed"], "the environment could not be closed: OSError: it hangs"),
    ],
)
async def test_an_environment_is_set_up_once_and_closed_after_the_last_rollout(
    tmp_path: Path, broken: str, happened: list[str], reason: str | None
) -> None:
    """If one of both fails, the run fails with a reason, and goes on with its next start."""
    summary = await trainer(tmp_path, server := Server(broken)).train()
    assert server.happened == happened
    if reason is None:
        assert summary.status == "completed"
    else:
        assert (summary.status, summary.reason) == ("failed", reason)
        assert (await trainer(tmp_path, Server()).train()).status == "completed"


async def test_an_environment_is_closed_if_the_run_is_cancelled(tmp_path: Path) -> None:
    server = Server("hangs")
    async with anyio.create_task_group() as group:
        group.start_soon(trainer(tmp_path, server).train)
        await server.started.wait()
        group.cancel_scope.cancel()
    assert server.happened == ["set up", "rollout", "closed"]


async def test_a_check_sets_the_environment_up_and_closes_it(tmp_path: Path) -> None:
    server = Server()
    overrides = Overrides(environment=server, target=ToyTarget(), optimizer=ScriptedLLM(toy_optimizer()))
    config = TrainerConfig.model_validate(settings(tmp_path))
    await check_setup(config, overrides)
    assert server.happened == ["set up", "rollout", "closed"]
    with pytest.raises(RunFailed, match="could not be set up: OSError: the port is taken"):
        await check_setup(config, replace(overrides, environment=Server("set_up")))
