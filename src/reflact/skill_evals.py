"""Cases of tests of skills: prompts with files, sentences that a judge reads, checks by a program.

An ``evals.json`` of Agent Skills has them, and so may any row with a list of sentences about an
answer. See https://agentskills.io/skill-creation/evaluating-skills.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError, model_validator

from reflact.config.fields import DEFAULT_COLUMNS
from reflact.errors import DataError
from reflact.jsonutil import describe_problems
from reflact.prompts import fence
from reflact.types import FrozenModel, Item

# The metadata of an item: names of the files that an agent gets, with their contents in base64.
FILES = "files"

# The folder of the cases of a skill.
EVALS_FOLDER = "evals"

# Columns of sentences about a good answer, and columns of the prompt that such a row may have.
SENTENCE_COLUMNS = (
    *("assertions", "expectations", "expected_behavior", "expected_behaviors"),
    *("criteria", "rubric", "rubrics"),
)
PROMPT_COLUMNS = ("prompt", "query", "input", "question")

# Larger files would make the store slow, which keeps the items of each run.
MAX_FILE_BYTES = 10 << 20

# Stands for a file in a text.
NO_TEXT = "(no text)"

# Stands for the sentences of a case that has a description of its result alone.
DESCRIPTION = "The answer fits this description of the result: "


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

    def explain_failure(self, answer: CaseAnswer) -> str | None:
        """Return why the check fails, or None; ``equals`` ignores white space around texts."""
        name = "the answer" if self.file is None else self.file
        text = answer.output if self.file is None else answer.files.get(self.file)
        if text is None:
            return f"{name} does not exist"
        if self.contains is not None and self.contains not in text:
            return f"{name} does not contain {self.contains!r}"
        if self.equals is not None and self.equals.strip() != text.strip():
            return f"{name} is not {self.equals!r}"
        return None


class Rubric(FrozenModel):
    """What an answer should fulfil: sentences for a judge, and checks for a program."""

    sentences: tuple[str, ...] = ()
    checks: tuple[FileCheck, ...] = ()

    @model_validator(mode="after")
    def _require_content(self) -> Rubric:
        if not self.sentences and not self.checks:
            raise ValueError("it has no sentences and no checks")
        if not all(sentence.strip() for sentence in self.sentences):
            raise ValueError("a sentence is empty")
        return self


class CaseAnswer(FrozenModel):
    """An answer of an agent, and the texts of the files that it made or changed."""

    output: str
    files: Mapping[str, str]

    @classmethod
    def read(cls, answer: str) -> CaseAnswer:
        """Return an answer with its files; that of a chat model has none."""
        try:
            return cls.model_validate_json(answer, strict=True)
        except ValidationError:
            return cls(output=answer, files={})

    @property
    def text(self) -> str:
        """The answer and its files for a reader."""
        parts = [f"File {name}:\n{text}" for name, text in self.files.items()]
        return "\n\n".join([self.output, *parts])


def hide_forged_files(answer: str) -> str:
    """Return the answer of a chat model, which made no file even if it writes that it did."""
    if not CaseAnswer.read(answer).files:
        return answer
    return CaseAnswer(output=answer, files={}).model_dump_json()


def unfold_case(row: Any, path: Path, where: str, *, is_eval: bool) -> Any:
    """Return a case as a row with ``input``, ``reference`` and ``files``; other rows as they are.

    A row with a right answer is no case.

    Args:
        row: A row of a data file.
        path: The data file. The names of files begin at the file's own folder, or at the skill's,
            which is the one above a folder ``evals``. No other folder is read.
        where: The row in words.
        is_eval: Whether the row is of an ``evals.json``, where a description of the result alone
            makes a case too.

    Raises:
        DataError: A field of a case is wrong, or a file cannot be read.
    """
    if not isinstance(row, dict):
        return row
    prompt = next((name for name in PROMPT_COLUMNS if name in row), None)
    has_answer = any(row.get(name) not in (None, "") for name in DEFAULT_COLUMNS["reference"])
    names = [name for name in SENTENCE_COLUMNS if _is_list(row.get(name))]
    is_described = is_eval and bool(row.get("expected_output"))
    is_case = bool(names) or _is_list(row.get("checks")) or is_described
    if prompt is None or has_answer or not is_case:
        return row
    sentences = [sentence for name in names for sentence in row[name]]
    checks = row.get("checks") or ()
    if not sentences and not checks:
        sentences = [f"{DESCRIPTION}{row['expected_output']}"]
    try:
        rubric = Rubric.model_validate({"sentences": sentences, "checks": checks})
    except ValidationError as error:
        raise DataError(f"{where}: {describe_problems(error)}") from None
    rest = {name: row[name] for name in row if name not in {*names, prompt, "checks"}}
    reference = rubric.model_dump(mode="json")
    files = _read_files(row.get(FILES) or [], path, where)
    return {**rest, "input": row[prompt], "reference": reference, FILES: files}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _read_files(names: Any, path: Path, where: str) -> dict[str, JsonValue]:
    """Return the contents of a case's files in base64, by their names without folders."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: files is no list of names; write a list of texts")
    roots = [path.resolve().parent]
    if roots[0].name == EVALS_FOLDER:
        roots.insert(0, roots[0].parent)
    files: dict[str, JsonValue] = {}
    for name in names:
        file = next((root / name for root in roots if _has_file(root, name)), None)
        if file is None:
            raise DataError(
                f"{where}: there is no file {name} below {roots[0]}; name one of the skill's folder"
            )
        if file.name in files:
            raise DataError(f"{where}: two files are named {file.name}; rename one of them")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise DataError(
                f"{where}: {name} is larger than {MAX_FILE_BYTES >> 20} MiB; give the case a "
                "smaller one, or put the file into the agent's workspace"
            )
        files[file.name] = base64.b64encode(file.read_bytes()).decode("ascii")
    return files


def _has_file(root: Path, name: str) -> bool:
    file = (root / name).resolve()
    return file.is_relative_to(root) and file.is_file()


def read_case_files(item: Item) -> dict[str, bytes] | None:
    """Return the contents of an item's files by name; None if the item is no case."""
    files = item.metadata.get(FILES)
    if not isinstance(files, dict):
        return None
    return {name: base64.b64decode(str(content)) for name, content in files.items()}


def show_case_files(item: Item) -> str:
    """Return an item's files as text for a model that has no folder; empty if there are none."""
    files = read_case_files(item) or {}
    parts = [f"File {name}:\n{fence('file', _decode(files[name]) or NO_TEXT)}" for name in files]
    return "\n\n".join(parts)


def refuse_other_files(items: Iterable[Item]) -> None:
    """Raise DataError if an item has a file that is no text."""
    for item in items:
        for name, content in (read_case_files(item) or {}).items():
            if _decode(content) is None:
                raise DataError(
                    f"item {item.id!r} needs {name}, which is no text, and a chat model gets files "
                    "as text: train an agent that has a folder (target.kind: command), or leave "
                    "the item out"
                )


def _decode(content: bytes) -> str | None:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None
