"""The fields of items: which columns of a data file fill them, as a configuration or the names of the columns say.

Rows of well-known sets are read as rows of a task and its right answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from reflact.config.models import ConfigSection, changeable_field
from reflact.errors import DataError
from reflact.jsonutil import flatten_fields

FIELD_NAMES = ("id", "input", "reference", "task_type")
"""The fields of an item that a column can fill."""

SYSTEM_ROLES = frozenset({"system", "developer"})

OTHER_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""Roles of chats under other names."""

CHAT_COLUMNS = frozenset({"messages", "conversations", "prompt", "completion"})
"""Columns that hold a chat."""

ALPACA_COLUMNS = ("instruction", "input", "output")
"""The columns of a row of Alpaca; its input may be empty."""

CHAT_FIELDS = frozenset({"input", "question", "reference", "answers", "answer"})
"""Columns that say what a row's task or answer is, so that its chat is something else."""


DEFAULT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": ("id",),
    "input": ("input", "question"),
    "reference": ("reference", "answers", "answer"),
    "task_type": ("task_type",),
}
"""The columns that fill each field without a line in the configuration; the first one in a row counts."""


def _list_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TELLING_NAMES: Mapping[str, frozenset[str]] = {
    "id": _list_words("uid uuid qid key nr no number"),
    "input": _list_words(
        "sentence content document article passage review email tweet comment utterance body q"
    ),
    "reference": _list_words(
        "expected_output target output completion response ground_truth result class sentiment intent decision verdict "
        "outcome queue department summary translation highlights chosen ideal answerkey canonical_solution a"
    ),
    "task_type": _list_words("type category topic subject kind domain"),
}
"""Names of columns that tell their field."""

TELLING_WORDS: Mapping[str, frozenset[str]] = {
    "id": frozenset(),
    "input": _list_words("input question prompt problem instruction query message request task text ticket"),
    "reference": _list_words(
        "reference references answer answers correct expected gold label solution truth"
    ),
    "task_type": frozenset(),
}
"""Words that tell a field also in a longer name, such as "right answer" or "customer_message"."""

ID_WORDS = _list_words("id uid nr no number")
"""Last words of a longer name that tell an id, such as "Ticket No."."""

OTHER_WORDS = _list_words("id is nr no number count length type date url incorrect wrong rejected")
"""Words of a name that is no task and no answer, whatever its other words are."""

MAX_NAME_WORDS = 4
"""A name of more words is probably a text, because the file has no header."""

MAX_LABELS, LABEL_USES = 20, 5
"""Answers are labels if there are at most so many, each used so often on average."""


class FieldsConfig(ConfigSection):
    """The columns of a data file that fill the fields of its items; all others are kept as metadata."""

    id: str | None = changeable_field(
        None,
        min_length=1,
        description="Column of the id; null: `id`, or a digest of the content if there is no such column.",
    )
    input: str | None = changeable_field(
        None,
        min_length=1,
        description="Column of the task; null: `input`, or `question` after its `context`, if there is one.",
    )
    reference: str | None = changeable_field(
        None,
        min_length=1,
        description="Column of the right answer, or of a list of them; null: `reference`, `answers` or `answer`.",
    )
    task_type: str | None = changeable_field(
        None,
        min_length=1,
        description="Column of the kind of task; a single file is split by `ratio` within each kind. null: `task_type`.",
    )


def list_telling_columns(field: str, columns: Sequence[str]) -> list[str]:
    """Return the columns whose names tell a field of an item; the default one comes first."""
    default = [name for name in DEFAULT_COLUMNS[field] if name in columns]
    return [*default, *(name for name in columns if name not in default and _is_telling(field, name))]


def _is_telling(field: str, column: str) -> bool:
    inner = re.split(r"\.(?=\S)", column)[-1]
    words = re.findall(r"[^\W_]+", inner.lower())
    if not 0 < len(words) <= MAX_NAME_WORDS:
        return False
    if "_".join(words) in TELLING_NAMES[field] or (field == "id" and words[-1] in ID_WORDS):
        return True
    other = TELLING_WORDS["reference" if field == "input" else "input"] - {"text"}
    return bool(TELLING_WORDS[field].intersection(words)) and not (other | OTHER_WORDS).intersection(words)


def is_labels(texts: Sequence[str]) -> bool:
    """Whether the texts are a few ones that repeat, such as the names of classes."""
    return 2 <= len(set(texts)) <= min(MAX_LABELS, len(texts) / LABEL_USES)


def are_ids(values: Sequence[Any]) -> bool:
    """Whether all values of a column are words or whole numbers, and no two are equal."""
    are_names = all(isinstance(value, str | int) and not isinstance(value, bool) for value in values)
    return are_names and len(set(map(str, values))) == len(values)


# ------------------------------------------------------------------------------------------- forms of rows


def unfold_row(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a row in one of the known forms as a row of a task and its right answer; any other as it is.

    A row that holds only a chat as in files for fine-tuning: a list ``messages`` of texts with roles, ``conversations``
    with other names of the same, or the messages of a ``prompt`` and its ``completion``. The answer of its end is the
    ``reference``. The user's message is the ``input``; if there are several turns before the end, all of them are. System
    messages become the column ``system``. Rows of Alpaca, SQuAD, TriviaQA, TruthfulQA, MBPP and HumanEval.

    Raises:
        DataError: A chat has something else than text; it begins with ``where``.
    """
    if all(isinstance(row.get(name), str) for name in ALPACA_COLUMNS):
        task = "\n\n".join(filter(None, (row["instruction"], row["input"])))
        return _replace_columns(row, ALPACA_COLUMNS, task, row["output"])
    name = "text" if "text" in row else "prompt"
    if {"test_list", "code", name} <= row.keys():
        shown = _join_lines(row["test_list"])
        tests = _join_lines(row.get("test_setup_code"), row.get("test_imports"), shown)
        return _replace_columns(row, (name, "code", "test_list"), f"{row[name]}\n\n{shown}", {"tests": tests})
    if {"prompt", "test", "entry_point"} <= row.keys():
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        return _replace_columns(
            row, ("prompt", "test", "canonical_solution"), row["prompt"], {"tests": tests}
        )
    truthful = ("question", "best_answer", "correct_answers")
    if all(name in row for name in truthful) and (texts := _list_texts(row["correct_answers"])):
        return _replace_columns(
            row, truthful, row["question"], [*dict.fromkeys([row["best_answer"], *texts])]
        )
    for name in ("answers", "answer"):
        if (texts := _list_answer_texts(row.get(name))) is not None:
            return {**row, name: texts}
    return row if CHAT_FIELDS & row.keys() else _unfold_chat(row, where)


def _unfold_chat(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    messages = _list_messages(row, where)
    system = [content for role, content in messages if role in SYSTEM_ROLES]
    turns = [(role, content) for role, content in messages if role not in SYSTEM_ROLES]
    if len(turns) < 2 or (turns[0][0], turns[-1][0]) != ("user", "assistant"):
        return row
    *before, (_, reference) = turns
    texts = [f"{role}: {content}" for role, content in before]
    task = before[0][1] if len(before) == 1 else "\n\n".join(texts)
    row = {**row, "system": "\n\n".join(system)} if system else row
    return _replace_columns(row, CHAT_COLUMNS, task, reference)


def _replace_columns(
    row: Mapping[str, Any], names: Collection[str], task: Any, reference: Any
) -> Mapping[str, Any]:
    rest = {name: value for name, value in row.items() if name not in names}
    return {"input": task, "reference": reference, **rest}


def _join_lines(*parts: Any) -> str:
    lines = [line for part in parts for line in (part if isinstance(part, list) else [part])]
    return "\n".join(str(line) for line in lines if line)


def read_result(reference: JsonValue) -> JsonValue:
    """Return the result of an answer that ends in a line such as ``#### 42``, as GSM8K's; others as they are."""
    if not isinstance(reference, str):
        return reference
    result = re.match(r"####(?!#)\s*(\S.*)", reference.rstrip().rpartition("\n")[2])
    return reference if result is None else result[1]


def _list_messages(row: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Return the roles and the texts of a row's chat; empty if it has none."""
    parts = [row.get(name) for name in ("prompt", "completion")]
    if not all(isinstance(part, list) for part in parts):
        parts = [row.get("messages", row.get("conversations"))]
    messages = [message for part in parts if isinstance(part, list) for message in part]
    if not all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages):
        return []
    roles = [str(message.get("role", message.get("from"))) for message in messages]
    return [
        (OTHER_ROLES.get(role, role), _read_text(each, where))
        for role, each in zip(roles, messages, strict=True)
    ]


def _read_text(message: Mapping[str, Any], where: str) -> str:
    """Return the text of a message; parts of text become one.

    Raises:
        DataError: It has something else, such as an image or a call of a tool.
    """
    if message.get("tool_calls") or message.get("function_call"):
        raise DataError(
            f"{where}: a message of the chat calls a tool, and only text is supported; remove the row"
        )
    content = message.get("content", message.get("value"))
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) and kind == "text" else part
        if not isinstance(text, str):
            raise DataError(
                f"{where}: a message of the chat has content of type {kind}, and only text is supported; remove the row"
            )
        texts.append(text)
    return "\n".join(texts)


def unfold_articles(rows: Sequence[Any]) -> Sequence[Any]:
    """Return the questions of articles in SQuAD's own form, each with its context; other rows as they are."""
    if not rows or not all(isinstance(row, dict) and isinstance(row.get("paragraphs"), list) for row in rows):
        return rows
    paragraphs = [part for row in rows for part in row["paragraphs"] if isinstance(part, dict)]
    return [
        {"context": part.get("context"), **question}
        for part in paragraphs
        for question in part.get("qas") or ()
        if isinstance(question, dict)
    ]


def unfold_columns(row: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Return a row whose objects are columns of their own, ``outer.inner``, if one of the names is in them."""
    outer = {name.partition(".")[0] for name in names if name not in row}
    inside: dict[str, JsonValue] = {
        name: value for name, value in row.items() if name in outer and isinstance(value, dict)
    }
    if not inside:
        return row
    return {name: value for name, value in row.items() if name not in inside} | dict(flatten_fields(inside))


def _list_answer_texts(value: Any) -> list[str] | None:
    """Return the texts of answers with positions or aliases, each once; None if the value is something else."""
    if isinstance(value, dict) and {"text", "answer_start"} <= value.keys():
        return _list_texts(value["text"])
    if isinstance(value, dict) and isinstance(value.get("aliases"), list) and "value" in value:
        return _list_texts([value["value"], *value["aliases"]])
    if isinstance(value, list) and value and all(isinstance(one, dict) and "text" in one for one in value):
        return _list_texts([one["text"] for one in value])
    return None


def _list_texts(values: Any) -> list[str] | None:
    """Return the texts of a list, each once; None if it is no list, or has anything else."""
    is_plain = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return [*dict.fromkeys(values)] if is_plain else None
