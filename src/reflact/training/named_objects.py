"""Targets, environments, proposers and executors that the configuration names by an import path or an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pydantic import JsonValue

from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError, ReflactError
from reflact.protocols import Environment, Proposer, Target


def load_named_target(config: TrainerConfig) -> Target | None:
    """Return the target that ``target.kind`` names; None for a chat model.

    An agent of pydantic-ai becomes a ``PydanticAITarget``; its options are those of that class, and a text with a
    colon among them is an import path again.

    Raises:
        ConfigError: There is no such object, it raises an error, or it is no target.
    """
    if config.target.kind == "chat":
        return None
    found = _load("target.kind", config.target.kind, "reflact.targets")
    options: Mapping[str, Any] = config.target.options
    if _is_agent(found):
        from reflact.targets.pydantic_ai import PydanticAITarget

        options = {"agent": found, **{name: _load_option(name, value) for name, value in options.items()}}
        found = PydanticAITarget
    made = _call("target", config.target.kind, found, options, needs="session")
    if _is_agent(made):
        from reflact.targets.pydantic_ai import PydanticAITarget

        return PydanticAITarget(made)
    target: Target = made
    return target


def load_named_environment(config: TrainerConfig) -> Environment | None:
    """Return the environment that ``environment.name`` names; None for a data set.

    Raises:
        ConfigError: There is no such object, it raises an error, or it is no environment.
    """
    name = config.environment.name
    if name == "dataset":
        return None
    found = _load("environment.name", name, "reflact.environments")
    environment: Environment = _call("environment", name, found, config.environment.options, needs="run")
    return environment


def load_named_proposer(config: TrainerConfig) -> Proposer | None:
    """Return the proposer that ``proposer.name`` names; None for one of reflact.

    Raises:
        ConfigError: There is no such object, it raises an error, or it is no proposer.
    """
    name = config.proposer.name
    if not config.proposer.is_own:
        return None
    found = _load("proposer.name", name, "reflact.proposers")
    proposer: Proposer = _call("proposer", name, found, config.proposer.options, needs="propose")
    return proposer


def load_named_executor(config: TrainerConfig) -> AbstractAsyncContextManager[Any]:
    """Return the executor that ``executor.name`` names, to be opened.

    Raises:
        ConfigError: There is no such function, it raises an error, or it opens nothing.
    """
    name = config.executor.name
    try:
        found = _load("executor.name", name, "reflact.executors")
    except ConfigError as error:
        raise ConfigError(f"{error}; reflact's own executors are local, processes and ray") from error
    try:
        opening = found(**config.executor.options)
    except Exception as error:  # named code may raise anything
        raise ConfigError(
            f"executor.options: {name} failed with them: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(opening, AbstractAsyncContextManager):
        raise ConfigError(
            f"executor.name: {name} must return an async context manager, which yields an executor"
        )
    return opening


def _load(key: str, name: str, group: str) -> Any:
    """Return the object behind ``module:name`` or the entry point of a group."""
    module, colon, attribute = name.partition(":")
    entries = {} if colon else {entry.name: entry for entry in entry_points(group=group)}
    if not colon and name not in entries:
        raise ConfigError(
            f"{key}: no installed package offers {name!r} as an entry point of {group} (there are: "
            f"{', '.join(sorted(entries)) or 'none'}); write module:name to import an object"
        )
    try:
        return reduce(getattr, attribute.split("."), import_module(module)) if colon else entries[name].load()
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(f"{key}: {name} cannot be imported: {type(error).__name__}: {error}") from error


def _load_option(name: str, value: JsonValue) -> Any:
    return _load(f"target.options.{name}", value, "") if isinstance(value, str) and ":" in value else value


def _call(section: str, name: str, found: Any, options: Mapping[str, Any], *, needs: str) -> Any:
    """Return an object as it is, or what a class or function makes from the options."""
    if callable(found) and not (hasattr(found, needs) and not isinstance(found, type)):
        try:
            found = found(**options)
        except ReflactError:
            raise
        except Exception as error:  # named code may raise anything
            raise ConfigError(
                f"{section}.options: {name} failed with them: {type(error).__name__}: {error}"
            ) from error
    elif options:
        raise ConfigError(f"{section}.options has no effect: {name} is an object, and no class or function")
    if not (hasattr(found, "identity") and hasattr(found, needs)) and not _is_agent(found):
        raise ConfigError(
            f"{section}: {name}, of type {type(found).__name__}, lacks `identity` or `{needs}`, so it is no {section}"
        )
    return found


def _is_agent(value: object) -> bool:
    """Whether an object is an agent of pydantic-ai."""
    return any(
        base.__module__.startswith("pydantic_ai.") and base.__name__ == "AbstractAgent"
        for base in type(value).__mro__
    )
