"""The identity of a caller's function: its code and what it takes from around it."""

from __future__ import annotations

import dis
import inspect
import logging
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from pydantic import JsonValue

from reflact.types import digest_json

LOGGER = logging.getLogger("reflact")

# Beginnings of file names of code that changes only with a version; its name is enough.
INSTALLED = (
    "<frozen ",
    str(Path(__file__).resolve().parents[1]) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)

PLAIN_TYPES = bool | int | float | str | bytes | Enum | Decimal | Fraction | None

# Methods that change a list, a mapping or a set.
CHANGING_METHODS = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "remove"),
    *("setdefault", "update"),
}

# The numbers of values that were described, by their ids; kept, so that ids stay their own.
Described = dict[int, tuple[int, Any]]


def identify_function(function: Callable[..., Any]) -> str:
    """Return a function's qualified name, and a digest of what it computes.

    The digest covers the function's byte code, which differs between Python versions, its defaults,
    and the values and functions that it takes from around it. A ``partial``, a method and an object
    with ``__call__`` count with their parts. Not covered are the code of installed packages,
    objects that are no plain data, and what the function changes itself, such as a cache.
    """
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    name = _name(inner)
    described = _describe(function, {})
    if not isinstance(described, str):
        return f"{name}#{digest_json(described)[:16]}"
    if not name.startswith("reflact."):
        LOGGER.warning(
            "the code of %s is not read, so no run notices if what it computes changes", name
        )
    return name


def _describe(value: Any, described: Described) -> JsonValue:
    """Return a value as JSON, which is equal for equal values in every process.

    A value that was described before counts by its number, so values may contain each other.
    """
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    if id(value) in described:
        return ["again", described[id(value)][0]]
    described[id(value)] = (len(described), value)
    if isinstance(value, set | frozenset):
        return [*sorted(repr(_describe(part, {})) for part in value)]
    parts = _list_parts(value)
    if parts is not None:
        return [type(value).__name__, *(_describe(part, described) for part in parts)]
    if hasattr(value, "__qualname__") or isinstance(value, ModuleType):
        return _name(value)
    return _name(type(value))


def _list_parts(value: Any) -> Sequence[Any] | None:  # noqa: PLR0911 - one for each kind of value
    """Return the values that a value consists of; None if its name is all that is known of it."""
    match value:
        case list() | tuple():
            return value
        case dict():
            return [part for pair in value.items() for part in pair]
        case re.Pattern():
            return [value.pattern, value.flags]
        case CodeType():
            return [value.co_code, value.co_names, value.co_consts]
        case partial():
            return [value.func, value.args, value.keywords]
        case MethodType():
            return [value.__func__, value.__self__]
        case FunctionType() if _is_own(value):
            return [value.__code__, _list_used_values(value)]
        case type():
            methods = _list_methods(value)
            return [_name(value), methods] if methods else None
    wrapped = inspect.getattr_static(value, "__wrapped__", None)
    if wrapped is not None:
        return [wrapped]
    if isinstance(getattr(value, "__qualname__", None), str):
        return None
    methods = _list_methods(type(value))
    if not methods:
        return None
    changed, _ = _find_changes([method for name, method in methods.items() if name != "__init__"])
    attributes = getattr(value, "__dict__", {})
    return [type(value), {name: attributes[name] for name in attributes if name not in changed}]


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or value.__name__
    return f"{getattr(value, '__module__', None) or 'builtins'}.{name}"


def _is_own(function: FunctionType) -> bool:
    return not function.__code__.co_filename.startswith(INSTALLED)


def _list_methods(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class and its bases that are no part of an installed package."""
    methods = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            method = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if isinstance(method, FunctionType) and _is_own(method):
                methods[name] = method
    return methods


def _list_used_values(function: FunctionType) -> dict[str, Any]:
    """Return what a function takes from around it, except for what it changes itself."""
    names = {name for code in _iter_codes(function.__code__) for name in code.co_names}
    values = {name: value for name, value in function.__globals__.items() if name in names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():
            values[name] = cell.cell_contents
    defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
    values |= {f"default {name}": value for name, value in defaults.items()}
    changed, changes_items = _find_changes([function])
    return {
        name: value
        for name, value in sorted(values.items())
        if name not in changed and not (changes_items and isinstance(value, list | dict | set))
    }


def _find_changes(functions: Sequence[FunctionType]) -> tuple[frozenset[str], bool]:
    """Return the names to which functions assign, and whether they change items of something."""
    assigned = set()
    changes_items = False
    for function in functions:
        for code in _iter_codes(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname in {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"}:
                    assigned.add(step.argval)
                is_item = step.opname in {"STORE_SUBSCR", "DELETE_SUBSCR"}
                changes_items |= is_item or step.argval in CHANGING_METHODS
    return frozenset(assigned), changes_items


def _iter_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _iter_codes(value)
