"""What is said if the packages of an extra are not installed."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from reflact import Trainer
from reflact.errors import ConfigError
from reflact.integrations.inspect_ai import InspectEnvironment
from reflact.testing import ScriptedLLM, ToyTarget, toy_optimizer
from served import reflact

SIZES = {"train": 1, "val": 1, "test": 1}
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def import_pages() -> None:
    """Import the pages of runs as a server's author does."""
    from reflact.reporting import create_run_pages  # noqa: F401


def serve() -> None:
    """Start the command that serves pages."""
    result = reflact("serve", ".")
    assert result.exit_code == 2
    raise ConfigError(result.stderr)


def start_on_ray() -> None:
    """Make a trainer whose rollouts are to run on a cluster."""
    optimizer = ScriptedLLM(toy_optimizer())
    Trainer({"executor": {"name": "ray"}}, target=ToyTarget(), optimizer=optimizer)


MISSING: dict[str, tuple[tuple[str, ...], tuple[Callable[[], object], ...]]] = {
    "inspect": (("inspect_ai",), (lambda: InspectEnvironment("a:b", **SIZES),)),
    "ray": (("ray",), (start_on_ray,)),
    "serve": (("starlette", "starlette.applications", "uvicorn"), (import_pages, serve)),
}
"""The packages of each extra, and what needs them."""


def test_every_extra_is_known_here() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == set(MISSING)


@pytest.mark.parametrize("extra", MISSING)
def test_a_missing_extra_is_named(extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    packages, uses = MISSING[extra]
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)  # so that its import fails
    monkeypatch.delitem(sys.modules, "reflact.reporting.html.serve", raising=False)
    for use in uses:
        with pytest.raises((ConfigError, ImportError)) as caught:
            use()
        assert f"pip install 'reflact[{extra}]'" in str(caught.value)
        assert "\n" not in str(caught.value).strip()
