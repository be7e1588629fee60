"""A task of several turns: an agent looks up a record in a table and answers a question about it.

A record's key is the first two letters of the city in capitals, the surname, and the initial of the first name:
``TU-Berg-A``. Nobody tells the agent so. ``LIST`` shows half of a city's keys, so that an agent without this rule
solves some items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from reflact.protocols import Session
from reflact.types import Grade, Item, Score, Split, canonical_json

TURNS = 4
COMMANDS = (
    "Send one command and nothing else: GET KEY (shows a record), LIST CITY (shows some keys of a city), "
    f"or ANSWER VALUE. You have {TURNS} commands."
)
NAMES = (
    "Anna Berg",
    "Omar Haddad",
    "Li Wen",
    "Petra Novak",
    "Tom Hale",
    "Ines Costa",
    "Jon Dahl",
    "Maya Roth",
)
COMMAND = re.compile(r"\s*(GET|LIST|ANSWER)\b[:\s]*(.*)", re.IGNORECASE)


def build_key(person: str, city: str) -> str:
    """Return the key of a person's record."""
    first, last = person.split()
    return f"{city[:2].upper()}-{last}-{first[0]}"


class Desk:
    """The environment of reflact for this task; it has no right answers in text, and a program grades.

    Args:
        path: A folder with ``SPLIT/items.jsonl`` or ``SPLIT/items.json``; a split without a file has no items.
    """

    identity = canonical_json({"environment": "desk", "version": 1})

    def __init__(self, path: str) -> None:
        self._items = {split: _read_items(Path(path) / str(split)) for split in Split}

    def items(self, split: Split) -> Sequence[Item]:
        """Return the items of a split."""
        return self._items[split]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Answer the agent's commands until it gives its own answer."""
        message, answer = f"{item.input}\n{COMMANDS}", ""
        for _ in range(TURNS):
            answer = await session.reply(message)
            match = COMMAND.match(answer)
            name, value = (match[1].upper(), match[2].strip()) if match else ("", "")
            if name == "ANSWER":
                return grade_answer(item, value)
            message = show_reply(item, name, value)
        return _fail(item, answer, "No ANSWER came within the commands.")


def show_reply(item: Item, name: str, value: str) -> str:
    """Return what the table shows for a command."""
    city = str(item.metadata["city"])
    keys = {person: build_key(person, city) for person in NAMES}
    if name == "LIST" and value.lower() == city.lower():
        shown = [keys[person] for person in NAMES[::2]]
        return f"Some of the keys of {city}: {', '.join(shown)}"
    if name == "GET" and value == keys[str(item.metadata["person"])]:
        return ", ".join(f"{field} {item.metadata[field]}" for field in ("phone", "room", "badge"))
    if name == "GET" and value in keys.values():
        return "That is the record of another person."
    return (
        "No such key."
        if name == "GET"
        else "Nothing found."
        if name
        else f"Not a command. {COMMANDS}"
    )


def grade_answer(item: Item, value: str) -> Grade:
    """Grade the value of ``ANSWER``."""
    right = str(item.metadata[str(item.metadata["field"])])
    if value.strip(" .") == right:
        return Grade(score=Score.of(1), answer=value)
    return _fail(item, value, f"The answer {value!r} is not {right!r}.")


def _fail(item: Item, answer: str, reason: str) -> Grade:
    key = build_key(str(item.metadata["person"]), str(item.metadata["city"]))
    return Grade(
        score=Score.of(0), answer=answer, feedback=f"{reason} The record has the key {key}."
    )


def _read_items(folder: Path) -> tuple[Item, ...]:
    lines, whole = folder / "items.jsonl", folder / "items.json"
    if whole.exists():
        rows = json.loads(whole.read_text(encoding="utf-8"))
    elif lines.exists():
        rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    else:
        rows = []
    fields = Item.model_fields.keys() - {"metadata"}
    return tuple(
        Item(
            **{name: row[name] for name in row.keys() & fields},
            metadata={name: row[name] for name in row.keys() - fields},
        )
        for row in rows
    )
