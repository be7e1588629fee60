"""The skill documents of an older run, and the paths that it recorded for them."""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath, PureWindowsPath

from reflact.errors import UsageError
from reflact.importing.reading import Folder
from reflact.types import Skill

SKILLS = "skills"
BEST = "best_skill.md"


class Documents:
    """All documents that were read from a run's folder, by hash."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._known: dict[str, Skill] = {}

    @property
    def all(self) -> tuple[Skill, ...]:
        """Every document, in the order in which they were read."""
        return tuple(self._known.values())

    def read(self, name: str) -> Skill | None:
        """Return a document; None where it is missing or cannot be read."""
        text = self.folder.text(name)
        return None if text is None else self._keep(text)

    def need(self, name: str) -> Skill:
        """Return a document.

        Raises:
            UsageError: It is missing or cannot be read; names the file.
        """
        return self._keep(self.folder.need_text(name))

    def _keep(self, text: str) -> Skill:
        skill = Skill(text=text)
        return self._known.setdefault(skill.hash, skill)


def snapshot(step: int) -> str:
    """Return the name of the current document after a step; step 0 is the initial one."""
    return f"{SKILLS}/skill_v{step:04d}.md"


def fits(skill: Skill, recorded: str) -> bool:
    """Whether a document has the hash that the older tool recorded: the first 16 digits of its SHA-256.

    Line breaks do not matter, since the older tool writes those of the system it runs on.
    """
    unix = skill.text.replace("\r\n", "\n")
    return any(hashlib.sha256(text.encode()).hexdigest()[:16] == recorded for text in (skill.text, unix))


def below(path: str, out_root: str) -> str:
    """Return the part of a recorded path that lies below the run's folder.

    Absolute paths are those of the machine that the run was made on, so that only what follows the
    recorded folder counts; where that folder is not known, what the run's own layout says.

    Raises:
        UsageError: The path leaves the run's folder.
    """
    parts, root = _parts(path), _parts(out_root)
    absolute = path.startswith(("/", "\\")) or PureWindowsPath(path).drive != ""
    if ".." in parts or not parts:
        raise UsageError(f"the recorded path {path!r} leaves the run's folder; it was changed by hand")
    if root and parts[: len(root)] == root and len(parts) > len(root):
        return "/".join(parts[len(root) :])
    if SKILLS in parts[:-1]:
        place = len(parts) - 1 - parts[::-1].index(SKILLS)
        return "/".join(parts[place:])
    if parts[-1] == BEST or not absolute:
        return BEST if parts[-1] == BEST else "/".join(parts)
    raise UsageError(f"the recorded path {path!r} is not below the run's folder; it was changed by hand")


def _parts(path: str) -> tuple[str, ...]:
    pure = PureWindowsPath(path) if "\\" in path or PureWindowsPath(path).drive else PurePosixPath(path)
    return tuple(part for part in pure.parts if part != pure.anchor)
