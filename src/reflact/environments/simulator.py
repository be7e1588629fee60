"""The environment of a simulator: its items are seeds of worlds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reflact.errors import ConfigError
from reflact.protocols import Session
from reflact.types import Grade, Item, Split, canonical_json

PlayWorld = Callable[[int, Session], Awaitable[Grade]]
"""Plays the world of a seed with a session until it ends, and grades the result."""


class SimulatorEnvironment:
    """Worlds that are built from seeds; a run deals the seeds like the items of a data set.

    A seed's world is the same in every trial and under every skill, so scores can be compared by world. The
    splits take consecutive seeds, so no world is in two of them.

    Args:
        play: Plays one world. It must not catch a ``ModelError``; any other exception leaves the world
            unmeasured.
        name: The environment's name; part of its identity.
        train: Worlds in the train split.
        val: Worlds in the validation split.
        test: Worlds in the test split.
        version: Raise it whenever the worlds or their scores change, so that older scores are not reused.

    Raises:
        ConfigError: A split has no worlds.
    """

    def __init__(
        self, play: PlayWorld, *, name: str, train: int, val: int, test: int, version: int = 1
    ) -> None:
        self._play = play
        self._identity = canonical_json({"environment": name, "version": version, "kind": "simulator"})
        self._items: dict[Split, tuple[Item, ...]] = {}
        first = 0
        for split, size in ((Split.train, train), (Split.val, val), (Split.test, test)):
            if size < 1:
                raise ConfigError(
                    f"simulator {name}: the {split.value} split needs at least one world; give it a number above 0"
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
                f"item {item.id} is no seed of this simulator: {item.input!r}; use the items of its `items` method"
            )
        return await self._play(item.input, session)
