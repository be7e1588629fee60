"""The environment of a simulator: its items are seeds of worlds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from reflact.errors import ConfigError
from reflact.protocols import Session
from reflact.types import Grade, Item, Split, canonical_json

PlayWorld = Callable[[int, Session], Awaitable[Grade]]
"""Plays the world of a seed with a session until it ends, and grades the result."""


class SimulatorEnvironment:
    """Worlds that are built from seeds; a run deals the seeds like the items of a data set.

    A seed's world is the same in every trial and under every skill, so scores can be compared by world.

    Args:
        play: Plays one world. It must not catch a ``ModelError``; any other exception leaves the world
            unmeasured.
        name: The environment's name; part of its identity.
        train: Worlds in the train split.
        val: Worlds in the validation split.
        test: Worlds in the test split.
        first_seed: The first seed; the splits take consecutive ones, so no world is in two of them.
        version: Raise it whenever the worlds or their scores change, so that older scores are not reused.
        task_type: Returns the group of a seed for reporting; None: no groups.

    Raises:
        ConfigError: A split has no worlds.
    """

    def __init__(
        self,
        play: PlayWorld,
        *,
        name: str,
        train: int,
        val: int,
        test: int,
        first_seed: int = 0,
        version: int = 1,
        task_type: Callable[[int], str] | None = None,
    ) -> None:
        sizes = {Split.train: train, Split.val: val, Split.test: test}
        for split, size in sizes.items():
            if size < 1:
                raise ConfigError(f"simulator {name}: the {split.value} split needs at least one world")
        self._play = play
        self._identity = canonical_json({"environment": name, "version": version, "kind": "simulator"})
        self._items: Mapping[Split, tuple[Item, ...]] = MappingProxyType(
            {
                split: tuple(_item(seed, task_type) for seed in seeds)
                for split, seeds in _assign_seeds(sizes, first_seed).items()
            }
        )

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
            raise ConfigError(f"item {item.id} is no seed of this simulator: {item.input!r}")
        return await self._play(item.input, session)


def _assign_seeds(sizes: Mapping[Split, int], first: int) -> dict[Split, range]:
    dealt = {}
    for split, size in sizes.items():
        dealt[split] = range(first, first + size)
        first += size
    return dealt


def _item(seed: int, task_type: Callable[[int], str] | None) -> Item:
    return Item(id=f"seed-{seed}", input=seed, task_type=None if task_type is None else task_type(seed))
