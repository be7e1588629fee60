"""Files: a run writes into its folder and nowhere else, whatever its data, and whatever stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generate_docs import list_config_keys

from pure_world import PureNetwork, settings, write_world
from reflact import Trainer
from reflact.config.loading import load_config
from reflact.errors import StoreError
from reflact.store.artifacts import export_best, export_version, remove_versions
from reflact.types import Skill

SKILL = Skill(text="Rule.\n")
ELSEWHERE = "Not yours.\n"


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("best_skill.md", "v0007.md", "run.lock", "run.db"):
        (folder / name).write_text(ELSEWHERE, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["best_skill.md", ".best_skill.md.part"])
def test_a_planted_link_is_replaced(name: str, tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(outside / "best_skill.md")
    export_best(run, SKILL)
    assert files(run) == {"best_skill.md": SKILL.text}
    assert set(files(outside).values()) == {ELSEWHERE}


@pytest.mark.parametrize(
    "act",
    [lambda run: export_version(run, 8, SKILL), lambda run: remove_versions(run, beyond=())],
    ids=["write", "remove"],
)
def test_a_linked_folder_of_versions_is_refused(
    act: Callable[[Path], object], tmp_path: Path, outside: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "skills").symlink_to(outside, target_is_directory=True)
    before = files(outside)
    with pytest.raises(StoreError, match=r"skills is a link"):
        act(run)
    assert files(outside) == before


@pytest.mark.parametrize("name", ["run.lock", "run.db"])
async def test_a_run_opens_nothing_through_a_link(name: str, tmp_path: Path, outside: Path) -> None:
    world = write_world(tmp_path / "world")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside / name)
    with pytest.raises(StoreError, match=f"{name} is a link"):
        await Trainer(settings(world, tmp_path / "run"), transport=PureNetwork()).train()
    assert set(files(outside).values()) == {ELSEWHERE}


ODD = (
    "../../escaped",
    "/etc/escaped",
    "a/b",
    "..",
    "~",
    "C:\\x",
    "con",
    "x" * 300,
    "a\x00b",
    "$(id)",
    "'; --",
)


async def test_ids_never_become_paths(tmp_path: Path) -> None:
    world = write_world(tmp_path / "world", train=4, val=4, test=3)
    names = iter(ODD)
    for split in ("train", "val", "test"):
        path = world / split / "items.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        named = [json.dumps(row | {"id": next(names)}) + "\n" for row in rows]
        path.write_text("".join(named), encoding="utf-8")
    plain = settings(world, tmp_path / "run", train={"num_epochs": 1, "batch_size": 4}, report=True)
    before = beside_the_run(tmp_path)
    summary = await Trainer(plain, transport=PureNetwork()).train()
    assert summary.status == "completed"
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert beside_the_run(tmp_path) == before
    locks = {"run.lock", f"run.db-{summary.run_id}.lock"}
    assert made == {*locks, "run.db", "summary.json", "report.html", "best_skill.md", "skills"}
    assert all(re.fullmatch(r"v\d{4}\.md", path.name) for path in (tmp_path / "run" / "skills").iterdir())


def beside_the_run(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "run" not in path.relative_to(folder).parts}


def at(key: str, value: Any) -> dict[str, Any]:
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return dict(nested)


PATHS = [key for key, kind, *_ in list_config_keys() if "path" in kind.split()]


@pytest.mark.parametrize("key", PATHS)
def test_paths_count_from_where_the_page_says(key: str, tmp_path: Path) -> None:
    """Paths to inputs count from the configuration's file, those of outputs from the current folder."""
    (tmp_path / "run.yaml").write_text(json.dumps(at(key, "../x")), encoding="utf-8")
    found: Any = load_config(tmp_path / "run.yaml")
    for part in key.split("."):
        found = getattr(found, part)
    expected = Path("../x") if key in {"out_dir", "store"} else tmp_path / "../x"
    assert found == expected
