"""Simulators: an environment whose items are seeds of worlds, and steps of many rollouts that are
computed together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import anyio

from reflact.adapters import CatchExits
from reflact.concurrency import SharedTask
from reflact.errors import ConfigError, EnvironmentFailure
from reflact.protocols import Session
from reflact.types import Grade, Item, Split, canonical_json

# Plays the world of a seed with a session until it ends, and grades the result.
PlayWorld = Callable[[int, Session], Awaitable[Grade]]


class SimulatorEnvironment:
    """Worlds that are built from seeds; a run deals the seeds like the items of a data set.

    A seed's world is the same in every trial and under every skill, so scores can be compared by
    world. The splits take consecutive seeds, so no world is in two of them.

    Args:
        play: Plays one world. It must not catch a ``ModelError``; any other exception leaves the
            world unmeasured.
        name: The environment's name; part of its identity.
        train: Worlds in the train split.
        val: Worlds in the validation split.
        test: Worlds in the test split.
        version: Raise it whenever the worlds or their scores change, so that older scores are not
            reused.

    Raises:
        ConfigError: A split has no worlds.
    """

    def __init__(
        self, play: PlayWorld, *, name: str, train: int, val: int, test: int, version: int = 1
    ) -> None:
        self._play = play
        self._identity = canonical_json(
            {"environment": name, "version": version, "kind": "simulator"}
        )
        self._items: dict[Split, tuple[Item, ...]] = {}
        first = 0
        for split, size in ((Split.train, train), (Split.val, val), (Split.test, test)):
            if size < 1:
                raise ConfigError(
                    f"simulator {name}: the {split.value} split needs at least one world; give it "
                    "a number above 0"
                )
            seeds = range(first, first + size)
            self._items[split] = tuple(Item(id=f"seed-{seed}", input=seed) for seed in seeds)
            first += size

    @property
    def identity(self) -> str:
        """Name and version, as canonical JSON."""
        return self._identity

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's seeds as items, in rising order."""
        return self._items[split]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Play the item's world; the trial's seed is not used."""
        if not isinstance(item.input, int):
            raise ConfigError(
                f"item {item.id} is no seed of this simulator: {item.input!r}; use the items of "
                "its `items` method"
            )
        return await self._play(item.input, session)


T = TypeVar("T")
U = TypeVar("U")


class CallBatcher(Generic[T, U]):
    """Joins calls that happen at the same time: ``compute`` gets the values of many callers.

    For a simulator, a grader or a model whose step costs about as much for many worlds as for one.
    The callers stay rollouts of their own: each is stored, cancelled and resumed by itself, also
    while its batch is computed. A batch goes on as long as one of its callers waits. Batches are
    computed one after the other, and the next one collects values meanwhile.

    Args:
        compute: Returns one result for each value, in order. An exception in the place of a result
            is raised to the caller of that value alone. Results must not depend on which values
            share a batch.
        size: The most values of a batch.
        seconds: How long the first value of a batch waits for others.

    Raises:
        ConfigError: ``size`` is below 1.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[T]], Awaitable[Sequence[U | Exception]]],
        *,
        size: int,
        seconds: float = 0.01,
    ) -> None:
        if size < 1:
            raise ConfigError(f"the size of a batch must be at least 1, and is {size}")
        self._compute = compute
        self._size = size
        self._seconds = seconds
        self._open: _Batch[T, U] | None = None
        self._last_ended: anyio.Event | None = None

    async def __call__(self, value: T) -> U:
        """Return the result of a value; raises what ``compute`` raises or returns in its place."""
        batch = self._open
        if batch is None or batch.task.is_cancelled:
            batch = self._open = _Batch(self._last_ended)
            batch.task = SharedTask(partial(self._run, batch))
            self._last_ended = batch.ended
        number = len(batch.values)
        batch.values.append(value)
        if len(batch.values) == self._size:
            batch.full.set()
            self._open = None
        await batch.task.wait()
        if not batch.results:
            raise EnvironmentFailure(
                "the computation of a batch was cancelled from inside; let it raise another "
                "exception"
            )
        result = batch.results[number]
        if isinstance(result, Exception):
            raise result
        return result

    async def _run(self, batch: _Batch[T, U]) -> None:
        """Collect and compute a batch."""
        try:
            with anyio.move_on_after(self._seconds):
                await batch.full.wait()
            if batch.after is not None:
                await batch.after.wait()
            if self._open is batch:
                self._open = None
            try:
                with CatchExits():
                    results = await self._compute(tuple(batch.values))
                if len(results) != len(batch.values):
                    raise ValueError(f"{len(results)} results for {len(batch.values)} values")
                batch.results = results
            except Exception as error:  # noqa: BLE001 - raised to each caller
                batch.results = [error] * len(batch.values)
        finally:
            if self._open is batch:  # it was cancelled
                self._open = None
            batch.ended.set()


class _Batch(Generic[T, U]):
    """Values that are computed together; ``after`` is the end of the batch before."""

    task: SharedTask

    def __init__(self, after: anyio.Event | None) -> None:
        self.after = after
        self.values: list[T] = []
        self.results: Sequence[U | Exception] = ()
        self.full = anyio.Event()
        self.ended = anyio.Event()
