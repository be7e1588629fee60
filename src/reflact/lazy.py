"""Imports at the first use, so that a package loads no slow library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

# What a first model call imports; some of the libraries import half of themselves only then.
CLIENT_MODULES = (
    "reflact.llm.client",
    "reflact.store.runs",
    "instructor.v2.providers.openai.handlers",
    "httpcore",
    "openai.resources.chat.completions",
    "genai_prices.data",
)


def import_all(modules: Sequence[str]) -> None:
    """Import slow modules; call it on a worker thread, since it takes a second or more."""
    for name in modules:
        import_module(name)


def load_exports(
    package: str, modules: Mapping[str, Sequence[str]], extras: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    ``modules`` are the names that each module provides, ``extras`` the extra that a module needs.
    """
    where = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"reflact.{where[name]}"), name)
        except ModuleNotFoundError as error:
            extra = (extras or {}).get(where[name])
            if extra is None or (error.name or "reflact").startswith("reflact"):
                raise
            advice = f"{name} needs {error.name}; run pip install 'reflact[{extra}]'"
            raise ModuleNotFoundError(advice, name=error.name) from None

    return get
