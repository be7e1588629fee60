"""What a caller's function computes, as a part of identities: its name, and a digest of its code and its values."""

from __future__ import annotations

import ast
import dis
import linecache
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
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from pydantic import JsonValue

from reflact.types import digest_json

LOGGER = logging.getLogger("reflact")

INSTALLED = (
    "<frozen ",
    str(Path(__file__).resolve().parents[1]) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Beginnings of the file names of code that changes only with a version, so that its name is enough."""

CHANGING = frozenset(
    ["add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"]
)
"""Methods that change a list, a mapping or a set."""


def identify_function(function: Callable[..., Any]) -> str:
    """Return a function's qualified name, and a digest of what it computes.

    The digest covers the function's source without comments and layout, its defaults, and the values and functions that it
    takes from around it. A ``partial``, a method and an object with ``__call__`` count with their parts. Not covered are
    the code of installed packages, objects that are no plain data, and what the function changes itself, such as a cache.
    A function without source counts by its byte code, which differs between Python versions.
    """
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    name = _name(inner if hasattr(inner, "__qualname__") else type(inner))
    described = _describe(function, {})
    if not isinstance(described, str):
        return f"{name}#{digest_json(described)[:16]}"
    if not name.startswith("reflact."):
        LOGGER.warning("the code of %s is not read, so no run notices if what it computes changes", name)
    return name


Known = dict[int, tuple[int, Any]]
"""The values that were described before, and the number of each, by their ids."""


def _describe(value: Any, known: Known) -> JsonValue:  # noqa: PLR0911, PLR0912 - one for each kind of value
    """Return a value as JSON, which is equal for equal values in every process; a known one by its number."""
    if value is None or isinstance(
        value, bool | int | float | str | bytes | complex | Enum | Decimal | Fraction
    ):
        return repr(value)
    if isinstance(value, re.Pattern):
        return ["pattern", repr(value.pattern), value.flags]
    if id(value) in known:
        return ["again", known[id(value)][0]]
    known[id(value)] = len(known), value
    if isinstance(value, dict):
        return [[_describe(key, known), _describe(each, known)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_describe(each, known) for each in value]
    if isinstance(value, set | frozenset):
        return [*sorted(repr(_describe(each, {})) for each in value)]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), *value.co_names, _describe(value.co_consts, known)]
    if isinstance(value, partial):
        return _describe([value.func, value.args, value.keywords], known)
    if isinstance(value, MethodType):
        return _describe([value.__func__, value.__self__], known)
    if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(INSTALLED):
        return _describe_function(value, known)
    if hasattr(value, "__wrapped__"):
        return ["wrapped", _describe(value.__wrapped__, known)]
    if isinstance(value, type):
        own = _list_methods(value)
        return [_name(value), _describe(own, known)] if own else _name(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if hasattr(value, "__qualname__"):
        return _name(value)
    methods = _list_methods(type(value))
    if not methods:
        return _name(type(value))
    stored, _ = _find_changes([method for name, method in methods.items() if name != "__init__"])
    state = {name: each for name, each in vars(value).items() if name not in stored}
    return [_describe(type(value), known), _describe(state, known)]


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or 'builtins'}.{value.__qualname__}"


def _list_methods(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class and its bases that are no part of an installed package."""
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    plain = {n: getattr(m, "__func__", None) or getattr(m, "fget", None) or m for n, m in members.items()}
    return {
        name: method
        for name, method in plain.items()
        if isinstance(method, FunctionType) and not method.__code__.co_filename.startswith(INSTALLED)
    }


def _describe_function(function: FunctionType, known: Known) -> JsonValue:
    names = {name for code in _iter_codes(function.__code__) for name in code.co_names}
    around = {name: value for name, value in function.__globals__.items() if name in names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            around[name] = cell.cell_contents
        except ValueError:  # it is not filled yet
            continue
    around |= {f"default {number}": value for number, value in enumerate(function.__defaults__ or ())}
    around |= {f"default {name}": value for name, value in (function.__kwdefaults__ or {}).items()}
    stored, changes_items = _find_changes([function])
    kept = {
        name: _describe(value, known)
        for name, value in sorted(around.items())
        if name not in stored and not (changes_items and isinstance(value, list | dict | set))
    }
    return [_read_source(function) or _describe(function.__code__, known), kept]


def _find_changes(functions: Sequence[FunctionType]) -> tuple[frozenset[str], bool]:
    """Return the names outside of functions to which they assign, and whether they change items of something."""
    codes = [code for function in functions for code in _iter_codes(function.__code__)]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    stored = (s.argval for s in steps if s.opname in {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"})
    changes_items = any(s.argval in CHANGING or s.opname in {"STORE_SUBSCR", "DELETE_SUBSCR"} for s in steps)
    return frozenset(stored), changes_items


def _iter_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _iter_codes(value)


def _read_source(function: FunctionType) -> str | None:
    """Return the source of a function without comments and layout; None if it is not that of its code."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, function.__globals__)))
        is_current = code in _iter_codes(compile(tree, code.co_filename, "exec", dont_inherit=True))
    except (SyntaxError, ValueError):
        return None
    if not is_current:  # the file was edited after it was imported
        return None
    places = [(p[0], p[2]) for p in code.co_positions() if None not in p and (p[0], p[2]) != (p[1], p[3])]
    found = [
        node
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Lambda)
            and (node.body.lineno, node.body.col_offset) == min(places, default=None)
        )
        or (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == code.co_name
            and min(part.lineno for part in (node, *node.decorator_list)) == code.co_firstlineno
        )
    ]
    return ast.unparse(found[0]) if len(found) == 1 else None
