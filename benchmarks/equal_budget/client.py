"""The side of a method in a cell: its job, its calls, and the best document so far. Only the standard library."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SPENT = 402
CONCURRENCY = 4
"""Rollouts at a time, in every method."""


class BudgetSpent(Exception):
    """The cell's budget is spent; the method returns the best document that it has."""


class Job:
    """What a method gets: a seed, its settings, items of two splits, and the address of the meter.

    ``items`` maps ``train`` and ``val`` to objects with ``id``, ``message``, ``input``, ``reference``, ``task_type``.
    ``score`` is the score that counts, ``hard`` or ``soft``.
    """

    def __init__(self, path: Path) -> None:
        values = json.loads(path.read_text(encoding="utf-8"))
        self.folder = path.parent
        self.seed: int = values["seed"]
        self.url: str = values["url"]
        self.rollouts: int = values["rollouts"]
        self.optimizer_tokens: int = values["optimizer_tokens"]
        self.optimizer_max_tokens: int = values["optimizer_max_tokens"]
        self.score: str = values["score"]
        self.settings: dict[str, Any] = values["settings"]
        self.config: dict[str, Any] = values["config"]
        self.items: dict[str, list[dict[str, Any]]] = values["items"]

    @classmethod
    def read(cls) -> Job:
        """Read the job that the command line names."""
        return cls(Path(sys.argv[1]))

    def save(self, skill: str, ended: str = "", **notes: Any) -> None:
        """Write the best document so far; the last one counts."""
        kept = {"skill": skill, "ended": ended, "notes": notes}
        (self.folder / "best.json").write_text(json.dumps(kept), encoding="utf-8")

    def ask(self, role: str, messages: list[dict[str, str]], **fields: Any) -> str:
        """Ask a model and return its text.

        Raises:
            BudgetSpent: The budget of the cell is spent.
        """
        reply = self._post(
            f"{role}/v1/chat/completions", {"model": role, "messages": messages, **fields}
        )
        return str(reply["choices"][0]["message"]["content"])

    def roll_out(self, skill: str, item: dict[str, Any]) -> dict[str, Any]:
        """Let the target work on an item under a document, as reflact's chat target does, and grade the result.

        Returns:
            ``answer``, which is all of the conversation after the first message if it has several turns; ``turns``, its
            messages without the document; ``score``, ``hard`` and ``soft`` (0 to 1), and ``feedback``: the grader's words
            and the right answer, as reflact shows them to its optimizer.
        """
        system = [{"role": "system", "content": skill.strip("\n")}] if skill.strip() else []
        turns = [{"role": "user", "content": item["message"]}]
        answers: list[str] = []
        while True:
            answers.append(self.ask("target", [*system, *turns]))
            turns.append({"role": "assistant", "content": answers[-1]})
            grade = self.grade(item, answers)
            if "message" not in grade:
                return {"answer": show_answer(turns), "turns": turns, **grade}
            turns.append({"role": "user", "content": grade["message"]})

    def roll_out_all(self, skill: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Roll out items, some at a time; see ``roll_out``."""
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(lambda item: self.roll_out(skill, item), items))

    def grade(self, item: dict[str, Any], answers: Sequence[str]) -> dict[str, Any]:
        """Grade the target's answers (see ``roll_out``), or return the next ``message`` to it."""
        return self._post("grade", {"id": item["id"], "answers": list(answers)})

    def is_spent(self) -> bool:
        """Whether the meter refuses calls, because the budget is spent."""
        return bool(self._post("spent", {})["spent"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=3600) as response:
                reply: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == SPENT:
                raise BudgetSpent from None
            raise
        return reply


def show_answer(turns: Sequence[dict[str, str]]) -> str:
    """Return the answer of a conversation; of one with several turns, all that follows the first message."""
    if len(turns) == 2:
        return turns[1]["content"]
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns[1:])
