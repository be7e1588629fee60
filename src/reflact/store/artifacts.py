"""Exported files of a run: each is written atomically and never through a link.

The path of a run's folder may contain links. A link inside the folder may be planted and is
refused.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from reflact.errors import StoreError, UsageError
from reflact.records import RunSummary
from reflact.skills.package import SkillPackage
from reflact.types import Skill


def export_version(folder: Path, number: int, skill: Skill) -> Path:
    """Write ``skills/vNNNN.md`` and return its path."""
    return write_atomically(resolve_inside(folder, "skills") / f"v{number:04d}.md", skill.text)


def export_best(folder: Path, skill: Skill) -> Path:
    """Write ``best_skill.md`` and return its path."""
    return write_atomically(folder / "best_skill.md", skill.text)


def export_summary(folder: Path, summary: RunSummary) -> Path:
    """Write ``summary.json`` and return its path."""
    return write_atomically(folder / "summary.json", summary.model_dump_json(indent=2) + "\n")


def remove_versions(folder: Path, *, beyond: Collection[int]) -> None:
    """Remove exported versions of another run in the same folder; StoreError if one cannot be
    removed.
    """
    for path in sorted(resolve_inside(folder, "skills").glob("v*.md")):
        if path.stem[1:].isdecimal() and int(path.stem[1:]) not in beyond:
            try:
                path.unlink()
            except OSError as error:
                raise StoreError(f"cannot remove {path}: {error.strerror or error}") from None


def find_exports(out_dir: Path, run_id: str) -> Path:
    """Return the folder of a run's exported files: its own below ``out_dir`` if it has one,
    otherwise ``out_dir``.
    """
    own = out_dir / run_id
    return own if own.is_dir() else out_dir


def choose_exports(out_dir: Path, run_id: str, others: Collection[str]) -> Path:
    """Return the folder for a run's exported files.

    It is ``out_dir``, unless the files of another run are there. ``others`` are the other runs of
    the folder that may have exported files.
    """
    own = resolve_inside(out_dir, run_id)
    is_taken = any(not (out_dir / other).is_dir() for other in others)
    return own if own.is_dir() or is_taken else out_dir


def resolve_inside(folder: Path, name: str) -> Path:
    """Return a path in a run's folder; StoreError if it is a link, which may lead out of the
    folder.
    """
    path = folder / name
    if path.is_symlink():
        raise StoreError(
            f"{path} is a link, but a run writes only inside its folder; remove the link or choose "
            "another out_dir"
        )
    return path


def write_atomically(path: Path, text: str) -> Path:
    """Replace a file's content in one step, so that readers see the old or the new text; StoreError
    if it fails.

    A file with the same text stays unchanged; a link is replaced by the file. The next call removes
    a partial file that a crash left. Only one process may write; the run's lock ensures that.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and not path.is_symlink() and path.read_bytes() == text.encode("utf-8"):
            return path
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}; its content is safe in the database. "
            "Remove the cause and start again"
        ) from None
    return path


def write_package(package: SkillPackage, parent: Path) -> Path:
    """Write a skill package as a new folder below ``parent``, all of it or nothing, and return the
    folder.

    Raises:
        UsageError: There is already something under the package's name.
        StoreError: The folder cannot be written.
    """
    folder = parent / package.name
    if os.path.lexists(folder):
        raise UsageError(
            f"{folder} exists already, and nothing is overwritten; choose another folder with "
            "--out or another name with --name"
        )
    part = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(prefix=f".{package.name}.", dir=parent))
        for file in package.files:
            path = part / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            if file.is_executable:
                path.chmod(path.stat().st_mode | 0o111)
        part.chmod(0o755)
        part.rename(folder)
    except OSError as error:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        raise StoreError(f"cannot write {folder}: {error.strerror or error}") from None
    return folder
