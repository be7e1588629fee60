"""The fields of items: which columns of a data file fill them, as a configuration says or as the file lets one guess.

Columns are known by their names. If the names tell nothing, the contents may. Two known forms of rows, chats and
reading comprehension (SQuAD), are read as rows of a task and its answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from reflact.config.models import ConfigSection, changeable_field
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


def _list_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LIKELY_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": _list_words("id uid uuid qid question_id item_id task_id key nr no number"),
    "input": _list_words(
        "input question prompt problem instruction query task text sentence request message content document article "
        "passage review email tweet comment utterance body source q"
    ),
    "reference": _list_words(
        "reference references answers answer expected expected_output gold label target solution output completion "
        "response ground_truth correct_answer result class sentiment intent decision verdict outcome queue department "
        "summary translation a"
    ),
    "task_type": _list_words("task_type type category topic subject kind domain"),
}
"""Usual names of the columns of each field, the likeliest first."""

TELLING_WORDS: Mapping[str, frozenset[str]] = {
    "input": frozenset(
        _list_words("question prompt problem instruction query message request task text ticket")
    ),
    "reference": frozenset(_list_words("answer answers correct expected gold label solution truth")),
}
"""Words that tell a field also in a longer name, such as "right answer" or "customer_message"."""

ID_WORDS = frozenset(_list_words("id uid nr no number"))
"""Last words of a longer name that tell an id, such as "Ticket No."."""

COUNTING_WORDS = frozenset(_list_words("id is nr no number count length type date url"))
"""Words of a name that is no task and no answer, whatever its other words are."""

OTHER_WORDS = (COUNTING_WORDS - {"is"}) | frozenset(
    _list_words(
        "source split dataset author language lang difficulty level model version note notes time timestamp"
    )
)
"""The same, and words of names whose contents may look like answers."""

LONG_TASK_CHARS, LONG_TASK_WORDS = 15, 3
"""The mean length from which on the texts of a column may be tasks, in characters or in words."""

VARIED_SHARE = 0.8
"""The share of different texts from which on those of a column may be tasks."""

SHORT_SHARE = 0.5
"""The highest mean length of answers whose column has no telling name, as a share of the length of the tasks."""

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


def guess_column(name: str, columns: Sequence[str]) -> str | None:
    """Return the column that probably fills a field of an item; None if none has a usual name."""
    by_name = {"_".join(_split_name(column)): column for column in columns}
    usual = next((by_name[likely] for likely in LIKELY_COLUMNS[name] if likely in by_name), None)
    if usual is None and name == "id":
        found = [column for short, column in by_name.items() if short.rpartition("_")[2] in ID_WORDS]
        return found[0] if len(found) == 1 else None
    if usual is not None or name not in TELLING_WORDS:
        return usual
    other = TELLING_WORDS["reference"] if name == "input" else TELLING_WORDS["input"] - {"text"}
    found = [
        column
        for column, parts in ((column, set(_split_name(column))) for column in by_name.values())
        if parts & TELLING_WORDS[name] and not parts & (other | COUNTING_WORDS)
    ]
    return found[0] if len(found) == 1 else None


def guess_task(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str | None:
    """Return the only column of long texts that differ from row to row; None if there is none, or several."""
    found = []
    for column in columns:
        texts = list_texts(rows, column)
        is_long = _mean_length(texts) >= LONG_TASK_CHARS or (
            _mean_length(text.split() for text in texts) >= LONG_TASK_WORDS
        )
        if is_long and len(set(texts)) >= VARIED_SHARE * len(rows):
            found.append(column)
    return found[0] if len(found) == 1 else None


def list_answer_columns(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], task: str
) -> tuple[str, ...]:
    """Return those of the columns whose contents may answer the column of the tasks, labels first.

    These are labels, or texts that are short beside the tasks. Numbers that never repeat may be ids and are no answers.
    """
    longest = SHORT_SHARE * _mean_length(list_texts(rows, task))
    found = []
    for column in columns:
        texts = list_texts(rows, column)
        is_number = all(re.fullmatch(r"[+-]?\d+", text) for text in texts) and len(set(texts)) == len(texts)
        is_short = is_labels(texts) or _mean_length(texts) <= longest
        if texts and is_short and not is_number and not OTHER_WORDS & {*_split_name(column)}:
            found.append(column)
    return tuple(sorted(found, key=lambda column: not is_labels(list_texts(rows, column))))


def is_labels(texts: Sequence[str]) -> bool:
    """Whether the texts are a few ones that repeat, such as the names of classes."""
    return 2 <= len(set(texts)) <= min(MAX_LABELS, len(texts) / LABEL_USES)


def is_quoted(rows: Sequence[Mapping[str, Any]], column: str, task: str) -> bool:
    """Whether most tasks hold the value of a column, apart from case and punctuation, so that it may be extracted."""

    def flatten(row: Mapping[str, Any], name: str) -> str:
        return re.sub(r"[\W_]+", "", str(row.get(name, "")).casefold())

    found = sum(
        len(value) > 2 and value in flatten(row, task) for row in rows if (value := flatten(row, column))
    )
    return 2 * found > len(rows)


def are_ids(values: Sequence[Any]) -> bool:
    """Whether all values of a column are words or whole numbers, and no two are equal."""
    are_names = all(isinstance(value, str | int) and not isinstance(value, bool) for value in values)
    return are_names and len(set(map(str, values))) == len(values)


def _split_name(column: str) -> list[str]:
    return re.findall(r"[^\W_]+", column.lower())


def list_texts(rows: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    """Return the texts and numbers of a column; empty if it holds anything else."""
    values = [value for row in rows if (value := row.get(column)) is not None]
    if not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
        return []
    return [str(value).strip() for value in values]


def _mean_length(values: Sequence[str] | Iterator[list[str]]) -> float:
    lengths = [len(value) for value in values]
    return math.fsum(lengths) / len(lengths) if lengths else 0.0


# ------------------------------------------------------------------------------------------- forms of rows


def unfold_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row in one of the known forms as a row of a task and its right answer; any other as it is.

    A row that holds only a chat as in files for fine-tuning: a list ``messages`` of texts with roles, ``conversations``
    with other names of the same, or the messages of a ``prompt`` and its ``completion``. The answer of its end is the
    ``reference``. The user's message is the ``input``; if there are several turns before the end, all of them are. System
    messages become the column ``system``. A row whose ``answers`` are those of SQuAD, texts with their positions: the
    texts are the ``answers``. A row of Alpaca, with ``instruction``, ``input`` and ``output``: the instruction, with the
    input after it, is the ``input``, and the output is the ``reference``. A row of GSM8K, whose ``answer`` ends in a line
    such as ``#### 42``: this result is the ``answer``.
    """
    if all(isinstance(row.get(name), str) for name in ALPACA_COLUMNS):
        task = "\n\n".join(filter(None, (row["instruction"], row["input"])))
        rest = {name: value for name, value in row.items() if name not in ALPACA_COLUMNS}
        return {"input": task, "reference": row["output"], **rest}
    if isinstance(answer := row.get("answer"), str) and (result := re.search(r"\n#### *(\S.*?)\s*$", answer)):
        return {**row, "answer": result[1]}
    if (answers := _list_squad_answers(row.get("answers"))) is not None:
        return {**row, "answers": answers}
    messages = _list_messages(row)
    system = [content for role, content in messages if role in SYSTEM_ROLES]
    turns = [(role, content) for role, content in messages if role not in SYSTEM_ROLES]
    if CHAT_FIELDS & row.keys() or len(turns) < 2 or (turns[0][0], turns[-1][0]) != ("user", "assistant"):
        return row
    *before, (_, reference) = turns
    texts = [f"{role}: {content}" for role, content in before]
    found = {"input": before[0][1] if len(before) == 1 else "\n\n".join(texts), "reference": reference}
    if system:
        found["system"] = "\n\n".join(system)
    return {name: value for name, value in row.items() if name not in CHAT_COLUMNS} | found


def _list_messages(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the roles and the texts of a row's chat; empty if it has none."""
    parts = [row.get(name) for name in ("prompt", "completion")]
    if not all(isinstance(part, list) for part in parts):
        parts = [row.get("messages", row.get("conversations"))]
    messages = [message for part in parts if isinstance(part, list) for message in part]
    if not all(isinstance(message, dict) for message in messages):
        return []
    pairs = [
        (message.get("role", message.get("from")), message.get("content", message.get("value")))
        for message in messages
    ]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        return []
    return [(OTHER_ROLES.get(role, role), content) for role, content in pairs]


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


def _list_squad_answers(value: Any) -> list[str] | None:
    """Return the texts of answers with positions, each once; None if the value is something else."""
    if isinstance(value, dict) and {"text", "answer_start"} <= value.keys():
        texts = value["text"]
    elif isinstance(value, list) and value and all(isinstance(one, dict) and "text" in one for one in value):
        texts = [one["text"] for one in value]
    else:
        return None
    return list(dict.fromkeys(texts)) if isinstance(texts, list) and all(map(_is_text, texts)) else None


def _is_text(value: object) -> bool:
    return isinstance(value, str)
