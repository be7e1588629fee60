"""The pages on SkillOpt: no key is left out, none is invented, and every test that is named exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from reflact.config.loading import list_config_keys

ROOT = Path(__file__).parent.parent
COMING = ROOT / "docs" / "coming-from-skillopt.md"
FEATURES = ROOT / "docs" / "features.md"
OLDER_KEYS = (ROOT / "tests" / "skillopt_keys.txt").read_text(encoding="utf-8").split()
QUOTED = re.compile(r"`([^`]+)`")
KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*")


def tables(page: Path, heading: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a page's tables that have a heading as their second column."""
    wanted = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) < 2 or set(cells[0]) <= {"-"}:
            wanted = wanted and bool(cells)
        elif cells[1] == heading:
            wanted = True
        elif wanted:
            yield cells[0], cells[1], cells[2]


@cache
def named_in(path: Path) -> frozenset[str]:
    """Return the names of a file's tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


MAPPED = list(tables(COMING, "key here"))
ROWS = list(tables(FEATURES, "here"))
KNOWN = {key for key, *_ in list_config_keys()}


def test_every_older_key_is_mapped() -> None:
    """Each key of the older tool stands in one row of the table, and no other does."""
    mapped = [key for older, _, _ in MAPPED for key in QUOTED.findall(older)]
    assert sorted(mapped) == sorted(OLDER_KEYS)


@pytest.mark.parametrize(("older", "here", "note"), MAPPED, ids=lambda cell: cell[:40])
def test_mapped_keys_exist(older: str, here: str, note: str) -> None:
    """A row names keys that the configuration has, or says that the key is gone, and why."""
    named = QUOTED.findall(here)
    assert set(named) <= KNOWN
    assert named or (here == "gone" and note)


@pytest.mark.parametrize("page", [COMING, FEATURES], ids=lambda page: page.name)
def test_keys_in_sentences_exist(page: Path) -> None:
    """Whatever is quoted and begins like a section of the configuration is one of its keys."""
    sections = {key.partition(".")[0] for key in KNOWN if "." in key}
    text = "\n".join(
        line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("| `")
    )
    for quoted in QUOTED.findall(text):
        key = " ".join(quoted.split()).partition(":")[0]
        if key.partition(".")[0] in sections and "." in key and KEY.fullmatch(key):
            assert key in KNOWN or any(known.startswith(f"{key}.") for known in KNOWN), quoted


@pytest.mark.parametrize(("feature", "here", "shown"), ROWS, ids=lambda cell: cell[:60])
def test_every_feature_has_a_key_and_a_test_or_a_reason(feature: str, here: str, shown: str) -> None:
    """A feature that is here names a test that exists; one that is gone says why."""
    for key in QUOTED.findall(here):
        assert key in KNOWN or key.startswith(("reflact ", "--")), key
    if here.startswith("gone: ") and not shown:
        return
    name, _, test = shown.strip("`").partition("::")
    assert test in named_in(ROOT / name), f"{feature}: {shown}"
