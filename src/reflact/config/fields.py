"""The fields of items, and the columns of data files that fill them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from reflact.config.models import ConfigSection, changeable_field
from reflact.jsonutil import flatten_fields

# The fields of an item that a column can fill.
FIELD_NAMES = ("id", "input", "reference", "task_type")

# The columns that fill each field without a line in the configuration; the first one counts.
DEFAULT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": ("id",),
    "input": ("input", "question"),
    "reference": ("reference", "answers", "answer"),
    "task_type": ("task_type",),
}


class FieldsConfig(ConfigSection):
    """Which columns fill the fields of an item; all others are kept as metadata."""

    id: str | None = changeable_field(None, min_length=1)
    """Column of the id; null: `id`, or a digest of the content if there is no such column."""

    input: str | None = changeable_field(None, min_length=1)
    """Column of the task; null: `input`, or `question` after its `context`, if there is one."""

    reference: str | None = changeable_field(None, min_length=1)
    """Column of the right answer, or of a list of them; null: `reference`, `answers` or `answer`.
    """

    task_type: str | None = changeable_field(None, min_length=1)
    """Column of the kind of task, within which a single file is split; null: `task_type`."""


def unfold_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of Alpaca or SQuAD, or a chat, as a row of a task and its right answer."""
    match row:
        case {"messages": [*messages], **rest} if _is_chat(messages):
            return {**_unfold_chat(messages), **rest}
        case {"instruction": str(instruction), "input": str(text), "output": str(output), **rest}:
            task = "\n\n".join(filter(None, (instruction, text)))
            return {"input": task, "reference": output, **rest}
        case {"answers": {"text": [*texts], "answer_start": _}}:
            pass
        case {"answers": [{"text": _}, *_] as answers}:
            texts = [one.get("text") if isinstance(one, dict) else None for one in answers]
        case _:
            return row
    if not all(isinstance(text, str) for text in texts):
        return row
    return {**row, "answers": [*dict.fromkeys(texts)]}


def _is_chat(messages: Any) -> bool:
    """Whether a value is a chat of texts alone, with a message of the user."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return False
    is_text = all(isinstance(one.get("content"), str) for one in messages)
    return is_text and any(one.get("role") == "user" for one in messages)


def _unfold_chat(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a chat as a row: the assistant's last message is the right answer.

    The system prompt is metadata. A chat of several turns is one text, with the roles.
    """
    system = [one["content"] for one in messages if one.get("role") in {"system", "developer"}]
    turns = [one for one in messages if one.get("role") not in {"system", "developer"}]
    row: dict[str, Any] = {}
    if turns[-1].get("role") == "assistant":
        row["reference"] = turns.pop()["content"]
    texts = [f"{one.get('role')}: {one['content']}" for one in turns]
    row["input"] = turns[0]["content"] if len(turns) == 1 else "\n\n".join(texts)
    if system:
        row["system"] = "\n\n".join(system)
    return row


def unfold_articles(rows: Sequence[Any]) -> Sequence[Any]:
    """Return the questions of articles in SQuAD's own form, each with its context."""
    questions: list[Any] = []
    for row in rows:
        match row:
            case {"paragraphs": [*paragraphs]}:
                for paragraph in paragraphs:
                    if isinstance(paragraph, dict):
                        questions += _list_questions(paragraph)
            case _:
                return rows
    return questions


def _list_questions(paragraph: Mapping[str, Any]) -> list[Any]:
    context = {"context": paragraph.get("context")}
    asked = paragraph.get("qas") or ()
    return [{**context, **question} for question in asked if isinstance(question, dict)]


def unfold_columns(row: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Return a row whose objects are columns, ``outer.inner``, if a name is in one of them."""
    outer = {name.partition(".")[0] for name in names if name not in row}
    result: dict[str, JsonValue] = {}
    for name, value in row.items():
        if name in outer and isinstance(value, dict):
            result |= flatten_fields({name: value})
        else:
            result[name] = value
    return result


def read_result(reference: JsonValue) -> JsonValue:
    """Return the result of an answer that ends in a line such as ``#### 42``, as GSM8K's."""
    if not isinstance(reference, str):
        return reference
    result = re.match(r"####(?!#)\s*(\S.*)", reference.rstrip().rpartition("\n")[2])
    return reference if result is None else result[1]
