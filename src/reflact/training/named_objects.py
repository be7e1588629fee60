"""Objects of the caller, such as targets and environments: found by the names of a configuration, and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from reflact.config.training import ALL_SOURCES, TrainerConfig
from reflact.data import DataSet
from reflact.errors import ConfigError, ReflactError
from reflact.protocols import (
    LLM,
    Annotator,
    Answerable,
    CatchExits,
    Environment,
    ItemTarget,
    ManagedEnvironment,
    Proposer,
    Target,
    find_wrong_arguments,
    locate_method,
    write_definition,
)
from reflact.types import Split

ObjectRole = Literal["target", "environment", "optimizer", "annotator", "proposer"]

PROTOCOLS: Mapping[ObjectRole, tuple[type, ...]] = {
    "target": (Target, ItemTarget),
    "environment": (Environment, ManagedEnvironment, Answerable),
    "optimizer": (LLM,),
    "annotator": (Annotator,),
    "proposer": (Proposer,),
}
"""What an object must be, and then what it may be in addition."""

NAMING_KEYS: Mapping[ObjectRole, str] = {
    "target": "models.target.model, or an agent by its import path as target.kind",
    "environment": "environment.name",
    "optimizer": "models.optimizer.model",
    "proposer": "search.sources",
}
"""The keys of the configuration that take a text."""
ITEM_LINE = 'Item(id="1", input="2 + 2", reference="4")'


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
    if is_pydantic_agent(found):
        from reflact.targets.pydantic_ai import PydanticAITarget

        options = {"agent": found, **{name: _load_option(name, value) for name, value in options.items()}}
        found = PydanticAITarget
    made = _call("target", config.target.kind, found, options, needs="session")
    if is_pydantic_agent(made):
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
    """Return the proposer among ``search.sources``; None without one.

    Raises:
        ConfigError: There is no such object, it raises an error, or it is no proposer.
    """
    name = config.search.own
    if name is None:
        return None
    try:
        found = _load("search.sources", name, "reflact.proposers")
    except ConfigError as error:
        raise ConfigError(f"{error}; reflact's own sources are {', '.join(ALL_SOURCES)}") from error
    proposer: Proposer = _call("proposer", name, found, {}, needs="propose")
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
        raise ConfigError(f"{error}; reflact's own executors are local and ray") from error
    try:
        with CatchExits():
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
        with CatchExits():
            return (
                reduce(getattr, attribute.split("."), import_module(module))
                if colon
                else entries[name].load()
            )
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(f"{key}: {name} cannot be imported: {type(error).__name__}: {error}") from error


def _load_option(name: str, value: JsonValue) -> Any:
    return _load(f"target.options.{name}", value, "") if isinstance(value, str) and ":" in value else value


def _call(section: ObjectRole, name: str, found: Any, options: Mapping[str, Any], *, needs: str) -> Any:
    """Return an object as it is, or what a class or function makes from the options."""
    if callable(found) and not (hasattr(found, needs) and not isinstance(found, type)):
        try:
            with CatchExits():
                found = found(**options)
        except ReflactError:
            raise
        except Exception as error:  # named code may raise anything
            raise ConfigError(
                f"{section}.options: {name} failed with them: {type(error).__name__}: {error}"
            ) from error
    elif options:
        raise ConfigError(
            f"{section}.options has no effect: {name} is an object, not a class or function; leave the options out"
        )
    try:
        if not is_pydantic_agent(found):
            check_object(section, found)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be used: {error}") from None
    return found


def check_object(role: ObjectRole, value: object) -> None:
    """Check that an object has the methods of its role; none is called, and no property is read.

    Raises:
        ConfigError: Something is missing, or cannot be called as reflact calls it; names the line to write.
    """
    _refuse_other_things(role, value)
    required, *optional = PROTOCOLS[role]
    if not (hasattr(type(value), "identity") or hasattr(value, "identity")):
        raise ConfigError(f"{_describe(role, value)} has no `identity`; add {_write_identity(value)}")
    for method in _list_methods(required):
        _check_method(role, value, method)
    for method in (method for protocol in optional for method in _list_methods(protocol)):
        if hasattr(value, method.__name__):
            _check_method(role, value, method)
    if role == "environment" and hasattr(value, "set_up"):
        _check_method(role, value, ManagedEnvironment.close)


def check_texts(role: ObjectRole, value: Any) -> None:
    """Check that an object's identity, and its description if it has one, are texts.

    Raises:
        ConfigError: One of them is something else.
    """
    for name in ("identity", "description"):
        text = getattr(value, name) if name == "identity" or hasattr(value, name) else ""
        if isinstance(text, str):
            continue
        if callable(text):
            line = f"@property above def {name}(self)"
        else:
            line = _write_identity(value) if name == "identity" else 'description = "..."'
        raise ConfigError(
            f"`{name}` of {_describe(role, value)} is of type {type(text).__name__}, and no text; write {line}"
        )


def read_dataset(environment: Environment) -> DataSet:
    """Return the items of all splits.

    Raises:
        ConfigError: ``items`` returned no items.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for split in Split:
        returned: Any = environment.items(split)
        if not hasattr(returned, "__iter__") or isinstance(returned, str | Mapping):
            raise ConfigError(
                f"`items` of {_describe('environment', environment)} returned a value of type "
                f"{type(returned).__name__} for the {split.value} split; return a list of items, such as [{ITEM_LINE}]"
            )
        found[split.value] = tuple(returned)
    try:
        return DataSet.model_validate(found)
    except ValidationError as error:
        split_name, number = error.errors()[0]["loc"][:2]
        value = found[str(split_name)][int(number)]
        raise ConfigError(
            f"`items` of {_describe('environment', environment)} returned no Item at place {number} of the "
            f"{split_name} split, but {value!r:.100}, of type {type(value).__name__}; write {ITEM_LINE}"
        ) from error


@contextmanager
def explain_exceptions(what: str, *, pass_on: bool) -> Iterator[None]:
    """Turn an exception of the caller's code in the block into one sentence, unless it is to be passed on.

    Raises:
        ConfigError: The code raised an exception that is none of reflact's, which is its cause.
    """
    try:
        with CatchExits():
            yield
    except ReflactError:
        raise
    except Exception as error:  # callers' code raises anything
        if pass_on:
            raise
        frames = inspect.getinnerframes(error.__traceback__, context=0) if error.__traceback__ else []
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(
            f"{what} failed: {type(error).__name__}: {error}{place}; set train.raise_on_exception to see the traceback"
        ) from error


def _refuse_other_things(role: ObjectRole, value: object) -> None:
    """Raise ConfigError for a class, a text, a function or an agent of pydantic-ai, which have ways of their own."""
    if isinstance(value, type):
        raise ConfigError(
            f"the {role} is the class {value.__name__}; pass an object: {role}={value.__name__}()"
        )
    if isinstance(value, str) and role in NAMING_KEYS:
        raise ConfigError(
            f"the {role} is the text {value!r:.80}; in Trainer, pass an object, or name it in the configuration: "
            f"{NAMING_KEYS[role]}"
        )
    if role == "target" and is_pydantic_agent(value):
        raise ConfigError(
            "the target is an agent of pydantic-ai; wrap it with the class from reflact.targets: "
            "target=PydanticAITarget(agent)"
        )
    if role == "target" and inspect.isroutine(value):
        name = value.__name__
        raise ConfigError(
            f"the target is the function {name}; if it calls your agent, wrap it with the class from reflact.targets: "
            f"target=FunctionTarget({name})"
        )


def is_pydantic_agent(value: object) -> bool:
    """Whether an object is an agent of pydantic-ai."""
    return any(
        base.__module__.startswith("pydantic_ai.") and base.__name__ == "AbstractAgent"
        for base in type(value).__mro__
    )


def _check_method(role: ObjectRole, value: object, method: Callable[..., Any]) -> None:
    """Raise ConfigError if an object has no such method, or one that cannot be called as reflact does."""
    name, own = method.__name__, getattr(value, method.__name__, None)
    described = _describe(role, value)
    if own is None:
        raise ConfigError(f"{described} has no `{name}`; add {write_definition(method)}")
    if not callable(own):
        raise ConfigError(
            f"`{name}` of {described} is a {type(own).__name__}, and no method; write {write_definition(method)}"
        )
    is_async = inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own)
    if is_async and not inspect.iscoroutinefunction(method):
        raise ConfigError(
            f"`{name}` of {described} is async{locate_method(own)}, and reflact does not wait for it; write {write_definition(method)}"
        )
    if (problem := find_wrong_arguments(own, method)) is not None:
        raise ConfigError(f"`{name}` of {described} {problem}")


def _list_methods(protocol: type) -> list[Callable[..., Any]]:
    return [
        value
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]


def _describe(role: ObjectRole, value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ in {"__main__", "builtins"} else f"{kind.__module__}."
    return f"the {role}, of type {module}{kind.__qualname__},"


def _write_identity(value: object) -> str:
    return f'identity = "{type(value).__name__}, version 1"'
