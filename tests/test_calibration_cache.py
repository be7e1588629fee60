"""Work that equal callers share."""

from __future__ import annotations

import anyio
import pytest

from reflact.calibration.cache import ResultCache

pytestmark = pytest.mark.anyio


async def test_an_error_goes_to_all_who_wait_and_is_not_kept() -> None:
    """Those who share the work share its error; whoever comes later tries again."""
    memo, gate, outcomes, begun = ResultCache[int](4), anyio.Event(), list[str](), list[str]()

    async def fail() -> int:
        begun.append("work")
        await gate.wait()
        raise OSError("broken")

    async def succeed() -> int:
        return 7

    async def ask() -> None:
        try:
            await memo.get_or_compute("key", fail)
        except OSError as error:
            outcomes.append(str(error))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert outcomes == ["broken"] * 3
    assert begun == ["work"]
    assert await memo.get_or_compute("key", succeed) == 7


async def test_keys_do_not_wait_for_each_other() -> None:
    """Different work is done at the same time."""
    memo, gate = ResultCache[str](4), anyio.Event()

    async def slow() -> str:
        await gate.wait()
        return "slow"

    async def quick() -> str:
        gate.set()
        return "quick"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(memo.get_or_compute, "a", slow)
        await anyio.wait_all_tasks_blocked()
        assert await memo.get_or_compute("b", quick) == "quick"
    assert await memo.get_or_compute("a", quick) == "slow"
