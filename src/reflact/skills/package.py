"""Skill packages: folders with a ``SKILL.md``, as the Agent Skills specification describes them.

A package's ``SKILL.md`` is a skill document. It begins with front matter, whose ``name`` is that of
the folder and whose ``description`` says what the skill is for. Both are untrusted text, so they
are written as quoted YAML on one line.

Further Markdown files can be trained too. They and ``SKILL.md`` are then joined to one document,
and split again when the package is written.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import yaml

from reflact.errors import SkillError
from reflact.skills.document import (
    check_document,
    detect_newline,
    find_regions,
    join_files,
    split_files,
)
from reflact.text import suggest_path
from reflact.types import FrozenModel, Skill

MAIN_FILE = "SKILL.md"

MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 1024
MAX_FILES = 1000

# Bounds on the files of a folder; more is no skill but, for example, a whole repository.
MAX_FOLDER_BYTES = 64 * 1024 * 1024

# Names of files and folders that programs make beside a skill; an export leaves them behind, like
# hidden ones.
CACHES = {"__pycache__", "node_modules", "venv", "Thumbs.db", "desktop.ini"}

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_FILE_NAME = re.compile(r"(?:\w[\w.-]*/)*\w[\w.-]*\.md", re.ASCII)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_FRONT_MATTER = re.compile(r"(\ufeff?---[ \t]*\r?\n)(.*?)(---[ \t]*)", re.DOTALL)
_OWN_KEY = re.compile(r"^(name|description)\s*:", re.MULTILINE)
_LATE_FRONT_MATTER = re.compile(
    r"\ufeff?(?>(?:\s|<!--.*?-->|#[^\n]*\n)+)---[ \t]*\r?\n\s*(?:name|description)[ \t]*:",
    re.DOTALL,
)
_REFUSED_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"


class PackageFile(FrozenModel):
    """A file of a package; ``path`` is relative to its folder, with slashes."""

    path: str
    content: bytes
    is_executable: bool = False


class SkillPackage(FrozenModel):
    """A package that can be written; its name and description are checked.

    ``left_out`` are files and folders that no package has: hidden ones, caches and links.
    """

    name: str
    description: str
    files: tuple[PackageFile, ...]
    left_out: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


def load_skill(path: Path, files: Sequence[str] = ()) -> Skill:
    """Return the skill document in a file, or in the ``SKILL.md`` of a folder.

    ``files`` are further Markdown files that belong to the document, relative to the folder.
    """
    if not path.is_dir():
        if files:
            raise SkillError(
                f"skill_files needs the folder of a skill, and {path} is no folder; name it with "
                "skill"
            )
        text = _read_text(path)
    else:
        _check_files(files)
        best = path / "best_skill.md"
        if not (path / MAIN_FILE).exists() and best.is_file():
            raise SkillError(
                f"{path} is the folder of a run and not of a skill; name its document: {best}"
            )
        _read_folder(path)  # says why the folder cannot be exported
        main = _read_text(_resolve_inside(path, MAIN_FILE))
        check_document(main)
        text = join_files(main, [(name, _read_text(_resolve_inside(path, name))) for name in files])
    check_document(text)
    if path.is_dir() or path.name == MAIN_FILE:
        _check_front_matter(path, text)
    return Skill(text=text)


def build_package(
    skill: Skill,
    *,
    name: str | None = None,
    description: str | None = None,
    defaults: tuple[str, str] = ("", ""),
    source: Path | None = None,
    files: Sequence[str] = (),
) -> SkillPackage:
    """Return the package of a skill document.

    Its front matter stays byte for byte, unless a value is missing or replaced by ``name`` and
    ``description``; both together also replace front matter that cannot be read. ``defaults`` are
    the name and the description if neither the front matter nor the caller has them. ``source`` is
    a folder whose other files belong to the skill, ``files`` are those that the document joins.

    Raises:
        SkillError: A name, a description or the front matter breaks the rules, or ``source`` cannot
            be read.
    """
    _check_files(files)
    text, further = split_files(skill.text) if files else (skill.text, ())
    if [path for path, _ in further] != [*files]:
        raise SkillError("the document does not join the files that skill_files names")
    hints: tuple[str, ...] = ()
    try:
        known = read_front_matter(text)
    except SkillError as error:
        if name is None or description is None:
            raise SkillError(
                f"{error}, or export it with --name and --description, which replace it"
            ) from None
        known = {}
        end = _front_matter_end(text)
        if _OWN_KEY.search(text[:end]) is None:  # text between two rules, which the target has read
            text = f"\n{text}"
        else:
            text = text[end:].lstrip("\r\n")
            hints = (
                "the front matter cannot be read, so only the new name and description are in it",
            )
    if name is None:
        name = str(known.get("name", defaults[0]))
    if description is None:
        description = str(known.get("description", defaults[1]))
    else:
        description = " ".join(description.split())
    check_name(name)
    check_description(description)
    for key, value in (("description", description), ("name", name)):
        if known.get(key) != value:
            text = _set_front_matter(text, key, value)
    trained = {MAIN_FILE: text, **dict(further)}
    others, left_out = ([], []) if source is None else _read_folder(source)
    executable = {file.path for file in others if file.is_executable}
    package_files = [
        PackageFile(path=path, content=content.encode("utf-8"), is_executable=path in executable)
        for path, content in trained.items()
    ]
    package_files += [file for file in others if file.path not in trained]
    return SkillPackage(
        name=name,
        description=description,
        files=tuple(package_files),
        left_out=tuple(left_out),
        hints=hints,
    )


def suggest_name(text: str) -> str:
    """Return a name of a text's letters and digits, in lowercase with hyphens; may be empty."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:MAX_NAME_CHARS].rstrip("-")


def check_name(name: str) -> None:
    """Raise SkillError if a name is not allowed."""
    if len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        raise SkillError(
            f"the name {name[:100]!r} breaks the rules of skills: 1 to {MAX_NAME_CHARS} lowercase "
            "letters, digits and single hyphens between them; choose another with --name"
        )


def check_description(description: str) -> None:
    """Raise SkillError if a description is not allowed."""
    if not description.strip():
        raise SkillError(
            "the skill has no description; say what it does and when to use it with --description"
        )
    problem = None
    if len(description) > MAX_DESCRIPTION_CHARS:
        problem = f"has {len(description):,} characters, and {MAX_DESCRIPTION_CHARS:,} are allowed"
    elif (tag := _TAG.search(description)) is not None:
        problem = f"contains the tag {tag[0][:100]!r}, and tags are not allowed"
    elif any(
        unicodedata.category(char) in _REFUSED_CATEGORIES and char not in f"{_JOINERS}\n"
        for char in description
    ):
        problem = "contains control characters"
    if problem is not None:
        raise SkillError(f"the description {problem}; write another with --description")


def read_front_matter(text: str) -> dict[str, object]:
    """Return the values of a document's front matter; empty if it has none."""
    inside = _FRONT_MATTER.fullmatch(text[: _front_matter_end(text)])
    if inside is None:
        return {}
    try:
        values = yaml.safe_load(inside[2]) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 2}"
        raise SkillError(
            f"the front matter of the skill is not valid YAML{where}; put the value between quotes"
        ) from None
    if not isinstance(values, dict):
        raise SkillError(
            "the front matter of the skill is no mapping of keys to values; correct it"
        )
    for key in ("name", "description"):
        if key in values and not isinstance(values[key], str):
            raise SkillError(
                f"{key} in the front matter of the skill is no text; put it between quotes"
            )
    return values


# ------------------------------------------------------------------------------------------ reading


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():  # a device has no end
        raise SkillError(f"cannot read the skill {path}: it is no regular file")
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        reason = f"{error.strerror or error}{suggest_path(path)}"
        raise SkillError(f"cannot read the skill {path}: {reason}") from None
    except UnicodeDecodeError as error:
        raise SkillError(f"the skill {path} is not UTF-8 text: {error.reason}") from None


def _resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of a file of a folder; SkillError if a link leads to it or it is outside."""
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        raise SkillError(
            f"{path} is no plain path inside {folder}: links and .. are not allowed; name a file "
            "inside the folder"
        )
    return path


def _check_files(files: Sequence[str]) -> None:
    for name in files:
        if _FILE_NAME.fullmatch(name) is None or name == MAIN_FILE or [*files].count(name) > 1:
            raise SkillError(
                f"skill_files: {name[:200]!r} is no further Markdown file; write each path once, "
                "relative to the folder, in letters, digits, dots, hyphens, underscores and slashes"
            )


def _check_front_matter(path: Path, text: str) -> None:
    try:
        if _LATE_FRONT_MATTER.match(text) is not None:
            raise SkillError(
                "agents find front matter only in line 1; remove what stands before it"
            )
        read_front_matter(text)
    except SkillError as error:
        raise SkillError(f"{path}: {error}") from None


def _read_folder(folder: Path) -> tuple[list[PackageFile], list[str]]:
    """Return the files of a skill's folder, and the names of what no package has."""
    if not folder.is_dir():
        raise SkillError(
            f"the folder {folder}, whose other files belong to the skill, is gone; bring it back, "
            "or print the document alone with `reflact show RUN --skill best`"
        )
    files = list[PackageFile]()
    left_out = list[str]()
    size = 0
    for place, folders, names in os.walk(folder):
        for name in sorted([*folders, *names]):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if name.startswith(".") or name in CACHES or path.is_symlink():
                left_out.append(relative)
            elif path.is_file():
                try:
                    size += path.stat().st_size
                    content = path.read_bytes() if size <= MAX_FOLDER_BYTES else b""
                    is_executable = bool(path.stat().st_mode & 0o100)
                except OSError as error:
                    raise SkillError(f"cannot read {path}: {error.strerror or error}") from None
                files.append(
                    PackageFile(path=relative, content=content, is_executable=is_executable)
                )
            if len(files) > MAX_FILES or size > MAX_FOLDER_BYTES:
                raise SkillError(
                    f"{folder} has more than {MAX_FILES:,} files or {MAX_FOLDER_BYTES // 1024**2} "
                    "MiB, so it is no folder of a skill; move SKILL.md and its files to a folder "
                    "of their own"
                )
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in CACHES
        )
    return files, left_out


# ------------------------------------------------------------------------------------------ writing


def _front_matter_end(text: str) -> int:
    return next((region.end for region in find_regions(text) if region.name == "front_matter"), 0)


def _set_front_matter(text: str, key: str, value: str) -> str:
    """Return a document whose front matter has a value; its other bytes stay."""
    newline = detect_newline(text)
    scalar = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=2**31).rstrip("\n")
    scalar = scalar.replace("--", r"-\x2d")  # some readers end front matter at any ---
    parts = _FRONT_MATTER.fullmatch(text[: _front_matter_end(text)])
    if parts is None:
        return f"---{newline}{key}: {scalar}{newline}---{newline * 2}" + text.removeprefix("\ufeff")
    opening, inside, closing = parts.groups()
    node = yaml.compose(inside, Loader=yaml.SafeLoader)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    found = next((item for name, item in pairs if name.value == key), None)
    if found is None:
        changed = f"{key}: {scalar}{newline}{inside}"
    else:
        start = found.start_mark.index
        end = found.end_mark.index
        old = inside[start:end]
        changed = inside[:start] + scalar + old[len(old.rstrip()) :] + inside[end:]
    edited = opening + changed + closing + text[_front_matter_end(text) :]
    before = read_front_matter(text)
    after = read_front_matter(edited)
    if after != {**before, key: value}:
        raise SkillError(
            f"{key} in the front matter of the skill cannot be replaced; change it by hand"
        )
    return edited
