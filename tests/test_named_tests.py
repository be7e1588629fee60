"""The documents prove what they promise: every test that a page names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMED = re.compile(r"\b(tests/\w+\.py)(?:::(\w+))?")
PROMISES = re.compile(r"^\| .* \|$", re.MULTILINE)


@cache
def named_in(path: Path) -> frozenset[str]:
    """Return the names of a file's tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """Each test file that a page names is there, and holds the test that is named with it."""
    for file, name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), f"{page.name} names {file}"
        assert not name or name in named_in(ROOT / file), f"{page.name} names {file}::{name}"


def test_every_promise_of_reliability_names_its_test() -> None:
    """Each row of the page on reliability names a test."""
    rows = PROMISES.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    promised = [row for row in rows if not row.startswith(("| promise |", "| what happens |"))]
    assert len(promised) > 20
    assert [row for row in promised if not NAMED.search(row)] == []
