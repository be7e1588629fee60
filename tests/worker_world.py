"""Environments that worker processes import, and runs in them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import httpx

from reflact.data import load_dataset
from reflact.environments import DatasetEnvironment, ExactGrader
from reflact.errors import ModelError
from reflact.protocols import Session
from reflact.targets import AgentRollout, FunctionTarget
from reflact.testing import ToyEnvironment
from reflact.types import Grade, Item, Score


class WorkerWorld(ToyEnvironment):
    """The toy environment, which notes the processes that run it.

    Args:
        folder: Where each rollout leaves a file that is named by its process. A rollout of an item takes away a file
            ``kill-ITEM-N`` that it finds there, and ends its process.
        broken: What fails: ``set_up``, ``code``, ``exit`` (the code ends its process), or nothing.
        busy: Seconds of processor time of a rollout.
    """

    def __init__(self, folder: str, broken: str = "", busy: float = 0.0) -> None:
        super().__init__(train=8, val=4, test=4)
        self._folder = Path(folder)
        self._broken, self._busy = broken, busy

    async def set_up(self) -> None:
        if self._broken == "set_up":
            raise OSError("the port is taken")
        self.note("set-up")

    async def close(self) -> None:
        self.note("closed")

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        self.note("ran")
        os.write(1, b"what an environment prints is no result\n")
        if (orders := list(self._folder.glob(f"kill-{item.id}-*"))) != []:
            orders[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._broken == "code" and item.id == "val-001":
            raise ZeroDivisionError("no world has this number")
        if self._broken == "exit" and item.id == "val-001":
            sys.exit("no world has this number")
        if self._broken == "model":
            try:
                await session.reply(str(item.input))
            except ModelError as error:
                return Grade(score=Score.of(0), answer=f"{type(error).__name__}: {error}")
        if self._busy:
            work_for(self._busy)
        return await super().run(item, session, seed=seed)

    def note(self, what: str) -> None:
        (self._folder / f"{what}-{os.getpid()}-{time.monotonic_ns()}").touch()


def work_for(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        sum(range(1000))


class Searching(DatasetEnvironment):
    """A data set whose rollouts write all that a worker can read into a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__(load_dataset(Path(folder), None), grade=ExactGrader(), name="searching")
        self._folder = Path(folder)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        self.search(item, session)
        return await super().run(item, session, seed=seed)

    def search(self, item: Item, session: Session) -> None:
        """Write what this process was started with and what it got."""
        seen = [repr(dict(os.environ)), Path("/proc/self/environ").read_text(encoding="utf-8")]
        seen += [repr(sys.argv), repr(item), "base_url", repr(vars(session))]
        (self._folder / f"searched-{os.getpid()}").write_text("\n".join(seen), encoding="utf-8")


def make_agent(folder: str) -> FunctionTarget:
    """Return an agent that asks its model once, and leaves a file that is named by its process."""

    async def run_agent(rollout: AgentRollout) -> str:
        (Path(folder) / f"agent-{os.getpid()}-{time.monotonic_ns()}").touch()
        messages = [{"role": "system", "content": rollout.skill}, {"role": "user", "content": rollout.task}]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {rollout.token}"}) as http:
            answer = await http.post(f"{rollout.base_url}/chat/completions", json={"messages": messages})
        return str(answer.json()["choices"][0]["message"]["content"])

    return FunctionTarget(run_agent, preflight=False)
