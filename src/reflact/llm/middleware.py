"""Bases of layers around a model or an environment, and the functions that compose and remove layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from reflact.messages import ReplyModel
from reflact.protocols import LLM, Environment, ManagedEnvironment, Session
from reflact.types import Grade, Item, Split

R = TypeVar("R", bound=ReplyModel)
T = TypeVar("T")


class LLMMiddleware:
    """A model around another one; implements ``protocols.LLM``. A subclass adds ``ask``."""

    def __init__(self, inner: LLM) -> None:
        self.inner = inner

    @property
    def identity(self) -> str:
        """The identity of the inner model: middleware never changes a reply."""
        return self.inner.identity


class EnvironmentMiddleware:
    """An environment around another one; implements ``protocols.Environment``. A subclass overrides ``run``."""

    def __init__(self, inner: Environment) -> None:
        self.inner = inner

    @property
    def identity(self) -> str:
        """The identity of the inner environment: middleware never changes a score."""
        return self.inner.identity

    def items(self, split: Split) -> Sequence[Item]:
        """Return the items of a split, in a fixed order."""
        return self.inner.items(split)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Run an item in the inner environment; see ``protocols.Environment.run``."""
        return await self.inner.run(item, session, seed=seed)


def unwrap_environment(environment: Environment) -> Environment:
    """Return the environment inside all layers; layers hide what it offers beside ``protocols.Environment``."""
    while isinstance(environment, EnvironmentMiddleware):
        environment = environment.inner
    return environment


def find_managed(environment: Environment) -> ManagedEnvironment | None:
    """Return the outermost layer that has something to start and to end, or the environment inside; else None."""
    while isinstance(environment, EnvironmentMiddleware) and not isinstance(environment, ManagedEnvironment):
        environment = environment.inner
    return environment if isinstance(environment, ManagedEnvironment) else None


def compose(inner: T, layers: Sequence[Callable[[T], T]]) -> T:
    """Return ``inner`` inside all layers; the first layer is the outermost one."""
    for layer in reversed(layers):
        inner = layer(inner)
    return inner
