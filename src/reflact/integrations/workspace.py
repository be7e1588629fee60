"""Tasks on files for an agent that is a command, from an ``evals.json`` of Agent Skills.

WorkspaceEnvironment("my_skill/evals/evals.json", train=10, val=20, test=20)
WorkspaceTarget(["my-agent", "{task}"], skill_file="SKILL.md")
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, JsonValue, ValidationError, model_validator

from reflact.agents.command import CommandSession, CommandTarget, is_inside, read_file
from reflact.data import shuffle
from reflact.errors import ConfigError, DataError, EnvironmentFailure
from reflact.protocols import Session
from reflact.types import FrozenModel, Grade, Item, Score, Skill, Split, canonical_json

# The metadata of an item: names and contents (base64) of files that an agent gets, and names of
# those it should make.
FILES_IN = "files"
FILES_OUT = "checked_files"


class WorkspaceTarget(CommandTarget):
    """A command for a ``WorkspaceEnvironment``; its arguments are those of ``CommandTarget``.

    The files of an item are written into the rollout's folder, over those of ``workspace``. The
    answer is a JSON object: ``output``, which ``CommandTarget`` would return, and ``files``, the
    text of each file that is checked.
    """

    def session_for(self, item: Item, skill: Skill, *, rollout: str) -> WorkspaceSession:
        """Start a rollout on an item; ``rollout`` is its key. ConfigError if there is no run."""
        return WorkspaceSession(self, skill, rollout, item=item)


class WorkspaceSession(CommandSession):
    """One run of the command on the files of an item."""

    def __init__(self, target: WorkspaceTarget, skill: Skill, rollout: str, *, item: Item) -> None:
        super().__init__(target, skill, rollout)
        self._item = item

    def _write_folder(self, folder: Path) -> None:
        super()._write_folder(folder)
        files = self._item.metadata.get(FILES_IN)
        for name, content in files.items() if isinstance(files, dict) else ():
            path = folder / name
            if not is_inside(path, folder):
                raise EnvironmentFailure(
                    f"the file {name} of item {self._item.id} leaves the folder: rename it"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(str(content)))

    def _read_answer(self, folder: Path, output: str) -> str:
        names = self._item.metadata.get(FILES_OUT)
        files = {}
        for name in map(str, names if isinstance(names, list) else ()):
            text = read_file(folder, name, self._target.all_limits.output_bytes)
            if text is not None:
                files[name] = text
        answer = {"output": super()._read_answer(folder, output), "files": files}
        return json.dumps(answer, ensure_ascii=False)


class FileCheck(FrozenModel):
    """A check on the answer or on a file; without a text, the file has to exist."""

    file: str | None = None
    contains: str | None = None
    equals: str | None = None

    @model_validator(mode="after")
    def _require_content(self) -> FileCheck:
        if self.file is None and self.contains is None and self.equals is None:
            raise ValueError("a check needs file, contains or equals")
        return self

    def explain_failure(self, output: str, files: Mapping[str, str]) -> str | None:
        """Return why the check fails, or None; ``equals`` ignores white space around texts."""
        name = "the answer"
        text: str | None = output
        if self.file is not None:
            name = self.file
            text = files.get(name)
        if text is None:
            return f"{name} does not exist"
        if self.contains is not None and self.contains not in text:
            return f"{name} does not contain {self.contains!r}"
        if self.equals is not None and self.equals.strip() != text.strip():
            return f"{name} is not {self.equals!r}"
        return None


class SkillEval(FrozenModel):
    """A case of an ``evals.json``; ``checks`` are reflact's, and other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    id: int | str
    prompt: str
    expected_output: str = ""
    files: tuple[str, ...] = ()
    assertions: tuple[str, ...] = ()
    checks: tuple[FileCheck, ...] = Field(min_length=1)


class SkillEvals(FrozenModel):
    """An ``evals.json``."""

    model_config = ConfigDict(extra="ignore")

    evals: tuple[SkillEval, ...]


class WorkspaceEnvironment:
    """Tasks on files: an agent gets a prompt and files; checks look at its answer and its files.

    Its target is a ``WorkspaceTarget``. A rollout's soft score is the share of checks that pass.

    Args:
        evals: The ``evals.json``. Each case needs ``checks`` beside the fields of Agent Skills:
            objects with ``file`` (none: the answer), ``contains`` and ``equals``. Paths in
            ``files`` begin at the skill's folder, which is that above the file's own; the agent
            gets the files under their names, without folders.
        train, val, test: The number of cases in each split.
        seed: Deals the cases to the splits.

    Raises:
        ConfigError: There are too few cases.
        DataError: The file or one of its cases cannot be used; names the reason.
    """

    def __init__(
        self, evals: Path | str, *, train: int, val: int, test: int, seed: int = 0
    ) -> None:
        path = Path(evals)
        try:
            cases = SkillEvals.model_validate_json(path.read_text(encoding="utf-8")).evals
        except (OSError, UnicodeError) as error:
            raise DataError(f"{path} cannot be read: {error}; name an evals.json") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DataError(
                f"{path}: {where}: {first['msg']}; each case needs id, prompt and checks"
            ) from error
        sizes = {Split.train: train, Split.val: val, Split.test: test}
        if min(sizes.values()) < 1 or sum(sizes.values()) > len(cases):
            raise ConfigError(
                f"{path} has {len(cases)} cases for splits of {train}, {val}, {test}; each split "
                "needs at least 1, and together they cannot need more"
            )
        self._cases = {str(case.id): case for case in cases}
        if len(self._cases) < len(cases):
            raise DataError(f"{path}: an id is used twice; give each case an id of its own")
        dealt = iter(shuffle(cases, seed, "workspace"))
        root = path.resolve().parent.parent
        self._items = {
            split: tuple(_make_item(next(dealt), root) for _ in range(n))
            for split, n in sizes.items()
        }

    @property
    def identity(self) -> str:
        """Kind and version, as canonical JSON; the items have checks and contents of files."""
        return canonical_json({"environment": "workspace", "version": 1})

    @property
    def description(self) -> str:
        """What the tasks are."""
        return (
            "The agent works on files in its folder. A program checks its answer and the files "
            "that it makes."
        )

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's cases as items."""
        return self._items[split]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Let the agent work on a case, and check its answer and files; the seed is not used."""
        answer = await session.reply(str(item.input))
        output, files = _read_answer(answer)
        case = self._cases[item.id]
        reasons = [check.explain_failure(output, files) for check in case.checks]
        failed = list(filter(None, reasons))
        share = 1 - len(failed) / len(reasons)
        wanted = [f"expected: {case.expected_output}"] if case.expected_output else []
        feedback = "\n".join([*failed, *wanted, *case.assertions]) if failed else None
        return Grade(
            score=Score(hard=float(not failed), soft=share), answer=answer, feedback=feedback
        )


def _make_item(case: SkillEval, root: Path) -> Item:
    files: dict[str, JsonValue] = {}
    for name in case.files:
        path = (root / name).resolve()
        if not (path.is_relative_to(root) and path.is_file()):
            raise DataError(
                f"case {case.id}: there is no file {name} below the skill's folder {root}"
            )
        if path.name in files:
            raise DataError(f"case {case.id}: two files are named {path.name}; rename one of them")
        files[path.name] = base64.b64encode(path.read_bytes()).decode("ascii")
    checked = sorted({check.file for check in case.checks if check.file is not None})
    checks: list[JsonValue] = [check.model_dump(mode="json") for check in case.checks]
    metadata: dict[str, JsonValue] = {"files": files, "checked_files": [*checked], "checks": checks}
    return Item(
        id=str(case.id),
        input=case.prompt,
        reference=case.expected_output or None,
        metadata=metadata,
    )


def _read_answer(answer: str) -> tuple[str, Mapping[str, str]]:
    """Return the output and the files of an answer; that of another target has no files."""
    try:
        read: Any = json.loads(answer)
    except ValueError:
        return answer, {}
    match read:
        case {"output": str(output), "files": dict(files)}:
            return output, {name: str(text) for name, text in files.items()}
    return answer, {}
