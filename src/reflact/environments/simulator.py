"""The environment of a simulator: it has no data set, so its items are seeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from reflact.errors import ConfigError
from reflact.protocols import Session
from reflact.types import Grade, Item, Split, canonical_json

PlayWorld = Callable[[int, Session], Awaitable[Grade]]
"""Plays the world of a seed with a session until it ends, and says how well that went."""


class SimulatorEnvironment:
    """Worlds that are made from seeds; a run's plan deals the seeds as it would deal a data set's items.

    A seed's world is the same in every trial and under every skill, so that scores can be compared world
    by world; what differs between trials is the target's doing.

    Args:
        play: Plays one world. A model error must be passed on as it is; any other exception leaves the
            world unmeasured.
        name: What the environment is called; part of its identity.
        train: Worlds in the train split.
        val: Worlds in the validation split.
        test: Worlds in the test split.
        first_seed: The first seed; the splits take consecutive ones, so no world is in two of them.
        version: Raise it whenever the worlds or their scores change, so that older scores are not reused.
        task_type: Groups seeds for reporting; None: they are all of one kind.

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
        """Name and version, as canonical JSON; the seeds are part of the items."""
        return self._identity

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's seeds as items, in rising order."""
        return self._items[split]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Play the item's world; the trial's seed has no use here."""
        world = item.input
        if not isinstance(world, int):
            raise ConfigError(f"item {item.id} is no seed of this simulator: {world!r}")
        return await self._play(world, session)


def _assign_seeds(sizes: Mapping[Split, int], first: int) -> dict[Split, range]:
    dealt = {}
    for split, size in sizes.items():
        dealt[split] = range(first, first + size)
        first += size
    return dealt


def _item(seed: int, task_type: Callable[[int], str] | None) -> Item:
    return Item(id=f"seed-{seed}", input=seed, task_type=None if task_type is None else task_type(seed))
