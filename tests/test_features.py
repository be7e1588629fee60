"""The pages on SkillOpt: no key is left out, none is invented, and every test that they name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from reflact.config.loading import list_config_keys

ROOT = Path(__file__).parent.parent
COMING = ROOT / "docs" / "coming-from-skillopt.md"
FEATURES = ROOT / "docs" / "features.md"
OLDER_KEYS = (ROOT / "tests" / "skillopt_keys.txt").read_text(encoding="utf-8").split()
QUOTED = re.compile(r"`([^`]+)`")
KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*")
KNOWN = {key for key, *_ in list_config_keys()}


def read_rows(page: Path, heading: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a page's tables that have a heading as their second column."""
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) < 2 or set(cells[0]) <= {"-"}:
            inside = inside and bool(cells)
        elif cells[1] == heading:
            inside = True
        elif inside:
            yield cells[0], cells[1], cells[2]


def test_every_older_key_is_mapped() -> None:
    """Each key of the older tool is in one row of the table, and no other key is."""
    mapped = [key for older, _, _ in read_rows(COMING, "key here") for key in QUOTED.findall(older)]
    assert sorted(mapped) == sorted(OLDER_KEYS)


def test_mapped_keys_exist() -> None:
    """A row names keys that the configuration has, or says that the key is gone, and why."""
    wrong = [
        (older, here)
        for older, here, note in read_rows(COMING, "key here")
        if not set(QUOTED.findall(here)) <= KNOWN or not (QUOTED.findall(here) or (here == "gone" and note))
    ]
    assert wrong == []


def test_keys_in_sentences_exist() -> None:
    """A quoted word that begins like a section of the configuration is one of its keys."""
    sections = {key.partition(".")[0] for key in KNOWN if "." in key}
    unknown = []
    for page in (COMING, FEATURES):
        lines = page.read_text(encoding="utf-8").splitlines()
        for quoted in QUOTED.findall("\n".join(line for line in lines if not line.startswith("| `"))):
            key = " ".join(quoted.split()).partition(":")[0]
            if key.partition(".")[0] in sections and "." in key and KEY.fullmatch(key):
                found = key in KNOWN or any(known.startswith(f"{key}.") for known in KNOWN)
                unknown += [] if found else [f"{page.name}: {quoted}"]
    assert unknown == []


def test_every_feature_has_a_key_and_a_test_or_a_reason() -> None:
    """A feature that is here names existing keys and a test; one that is gone says why."""
    wrong = [
        feature
        for feature, here, test in read_rows(FEATURES, "here")
        if not (test.startswith("`tests/") or here.startswith("gone: "))
        or not all(key in KNOWN or key.startswith(("reflact ", "--")) for key in QUOTED.findall(here))
    ]
    assert wrong == []
