"""Bases of layers around a model or an environment, and the functions that compose and remove layers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from reflact.errors import InterfaceError
from reflact.messages import ReplyModel
from reflact.protocols import LLM, Environment, ManagedEnvironment, Session, describe_not_async
from reflact.types import Grade, Item, Score, Split

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


class CheckedEnvironment(EnvironmentMiddleware):
    """An environment of the caller, of which each result is checked."""

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Run an item.

        Raises:
            InterfaceError: ``run`` is not async, or returned no grade.
        """
        running: object = self.inner.run(item, session, seed=seed)
        if not isinstance(running, Awaitable):
            raise describe_not_async(self.inner, Environment.run, running)
        grade: object = await running
        if not (isinstance(grade, Grade) and isinstance(grade.score, Score)):
            found = type(grade.score if isinstance(grade, Grade) else grade).__name__
            raise InterfaceError(
                f"`run` of {type(self.inner).__name__} returned a value of type {found} for item {item.id} in place of "
                "a Grade with a Score; write return Grade(score=Score.of(right), answer=answer)"
            )
        return grade


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
