"""Items side by side: what the target answered to each under several documents.

The documents are the versions of a run, the best skills of several runs, or those of an ``eval``.
Terminal, pages, CSV and JSON only lay this out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pydantic import JsonValue

from reflact.records import ComparisonCategory, DocumentResult
from reflact.text import escape_controls, escape_line, format_score, format_value, name_count
from reflact.training.items import ItemAnswers
from reflact.types import FrozenModel, Split

# How an item did under two documents, the most telling outcome first.
OUTCOME_WORDS: dict[ComparisonCategory | None, str] = {
    "improved": "better",
    "regressed": "worse",
    "persistent_failure": "still wrong",
    "stable_success": "right under both",
    None: "not measured under both",
}

# An item under a document: it counts as solved, has a score in between, has none of it, or has not
# been measured.
CellState = Literal["right", "partly", "wrong", "unmeasured"]

# The states by shape, because not everyone sees colours; the most telling one first.
CELL_MARKS: dict[CellState, str] = {"wrong": "✕", "partly": "◐", "right": "●", "unmeasured": "–"}

CELL_WORDS: dict[CellState, str] = {
    "wrong": "wrong",
    "partly": "partly right",
    "right": "right",
    "unmeasured": "not measured",
}

# Answers that share less have no parts that differ; they are different answers.
LEAST_COMMON = 0.3

# The most words of answers whose difference is looked for, which takes quadratic time.
MAX_COMPARED_WORDS = 2_000

WORDS = re.compile(r"\s+|\w+|[^\w\s]")


class MatrixColumn(FrozenModel):
    """A document of a matrix.

    ``name`` is its heading, such as ``v3`` or a file's name; ``note`` says what it is. Failures
    are those under the documents in ``in_focus``.
    """

    name: str
    skill_hash: str
    note: str = ""
    in_focus: bool = True


class MatrixRow(FrozenModel):
    """An item of a matrix, with a result for each column.

    The rollouts of a result have the answers; their ``key`` is that of the store.
    """

    item_id: str
    task_type: str | None = None
    input: JsonValue = None
    expected: JsonValue = None
    results: tuple[DocumentResult, ...]

    @property
    def is_different(self) -> bool:
        """Whether two documents have different scores."""
        return len({result.hard for result in self.results if result.hard is not None}) > 1

    @property
    def scores(self) -> str:
        """The mean hard scores, such as ``0 -> 1``."""
        scores = [result.hard for result in self.results]
        return " -> ".join("-" if score is None else f"{score:.2g}" for score in scores)

    @property
    def outcome(self) -> str:
        """How the score of the last document differs from that of the first one, in words."""
        before = self.results[0].hard
        after = self.results[-1].hard
        if before is None or after is None or len(self.results) == 1:
            return ""
        if after == before:
            return "same score"
        return OUTCOME_WORDS["improved" if after > before else "regressed"]

    @property
    def title(self) -> str:
        """The item in one line."""
        parts = [escape_line(self.item_id)]
        if self.task_type is not None:
            parts.append(f"({escape_line(self.task_type)})")
        words = f"{self.outcome}, {self.scores}" if self.outcome else self.scores
        return f"{' '.join(parts)}: {words}"

    def list_answers(self) -> tuple[str, ...]:
        """Return the first answer under each document, or why there is none."""
        answers = []
        for result in self.results:
            answer = result.answer
            if answer is None:
                answer = f"({result.error or 'not measured'})"
            answers.append(answer)
        return tuple(answers)


class ItemMatrix(FrozenModel):
    """The items of a split by documents; an item is solved from the score ``threshold`` on, 0..1.

    The first column is what the others are compared with: the initial skill, the first run, or the
    first document of ``--against``.
    """

    split: Split
    threshold: float = 1.0
    columns: tuple[MatrixColumn, ...]
    rows: tuple[MatrixRow, ...]

    def find_state(self, result: DocumentResult) -> CellState:
        """Return how an item did under a document."""
        if result.hard is None:
            return "unmeasured"
        if result.hard >= self.threshold:
            return "right"
        return "partly" if result.hard > 0 else "wrong"

    def list_states(self, row: MatrixRow) -> tuple[CellState, ...]:
        """Return the state of each cell of a row."""
        return tuple(self.find_state(result) for result in row.results)

    def select(
        self, *, changed: bool = False, wrong: bool = False, task_type: str | None = None
    ) -> ItemMatrix:
        """Return the items that differ, fail under a document in focus, or have a task type."""
        focus = [place for place, column in enumerate(self.columns) if column.in_focus]
        rows = []
        for row in self.rows:
            states = self.list_states(row)
            fails = any(states[place] in {"wrong", "partly"} for place in focus)
            if changed and not row.is_different:
                continue
            if wrong and not fails:
                continue
            if task_type is not None and row.task_type != task_type:
                continue
            rows.append(row)
        return self.model_copy(update={"rows": tuple(rows)})

    def sort(self) -> ItemMatrix:
        """Return the items that are still wrong first, those with equal cells together."""
        order = list(CELL_MARKS)

        def rank(row: MatrixRow) -> tuple[int, ...]:
            return tuple(order.index(state) for state in reversed(self.list_states(row)))

        return self.model_copy(update={"rows": tuple(sorted(self.rows, key=rank))})

    def choose_columns(self, room: int) -> ItemMatrix:
        """Return the matrix with at most ``room`` columns, or two if there are so many.

        The first column and those in focus stay, then the last one, then those in which most items
        differ from the column before. Columns without any result go first.
        """
        n_columns = len(self.columns)
        if n_columns <= room:
            return self
        changes = []
        for place in range(n_columns):
            cells = [(row.results[place].hard, row.results[place - 1].hard) for row in self.rows]
            measured = [cell for cell in cells if cell[0] is not None]
            is_kept = place == 0 or self.columns[place].in_focus
            rank = (is_kept, bool(measured), place == n_columns - 1)
            changes.append((*rank, sum(now != before for now, before in measured), -place))
        ranked = sorted(range(n_columns), key=lambda place: changes[place], reverse=True)
        return self._take_columns(sorted(ranked[: max(room, 2)]))

    def _take_columns(self, places: Sequence[int]) -> ItemMatrix:
        rows = []
        for row in self.rows:
            results = tuple(row.results[place] for place in places)
            rows.append(row.model_copy(update={"results": results}))
        columns = tuple(self.columns[place] for place in places)
        return self.model_copy(update={"columns": columns, "rows": tuple(rows)})

    def summarize(self) -> list[dict[str, str]]:
        """Return what each document solves, in a table; better and worse are against the first."""
        summaries = []
        for place, column in enumerate(self.columns):
            states = [self.find_state(row.results[place]) for row in self.rows]
            n_measured = len(states) - states.count("unmeasured")
            row = {
                "document": escape_line(column.name),
                "what": escape_line(column.note),
                "solved": f"{states.count('right'):,}" if n_measured else "-",
                "measured": f"{n_measured:,}",
                "score": format_score(self._average(place)),
                "better": "-",
                "worse": "-",
            }
            pairs = [(each.results[0].hard, each.results[place].hard) for each in self.rows]
            common = [(old, new) for old, new in pairs if old is not None and new is not None]
            if place and common:
                row["better"] = f"{sum(new > old for old, new in common):,}"
                row["worse"] = f"{sum(new < old for old, new in common):,}"
            summaries.append(row)
        return summaries

    def _average(self, place: int) -> float | None:
        """Return the mean score of a column; each item counts the same."""
        scores = [row.results[place].hard for row in self.rows]
        measured = [score for score in scores if score is not None]
        return sum(measured) / len(measured) if measured else None

    def describe_rows(self, n_all: int) -> str:
        """Return how many items are shown, of all on their split."""
        if n_all == len(self.rows):
            return name_count(n_all, f"{self.split.value} item")
        return f"{len(self.rows):,} of {name_count(n_all, f'{self.split.value} item')}"

    def list_csv_rows(self) -> Iterator[list[str]]:
        """Yield the cells of a CSV file: a heading, then a line for each item."""
        names = [column.name for column in self.columns]
        heading = ["item", "task type", "input", "expected"]
        heading += [f"{what} {name}" for what in ("score", "answer") for name in names]
        yield [escape_controls(cell) for cell in heading]
        for row in self.rows:
            cells = [row.item_id, row.task_type or ""]
            cells += [format_value(row.input), format_value(row.expected)]
            cells += ["" if r.hard is None else f"{r.hard:.6g}" for r in row.results]
            yield [escape_controls(cell) for cell in (*cells, *row.list_answers())]


def build_row(answers: ItemAnswers) -> MatrixRow:
    """Return an item with its results as a row."""
    item = answers.item
    return MatrixRow(
        item_id=item.id,
        task_type=item.task_type,
        input=item.input,
        expected=item.reference,
        results=answers.results,
    )


class TextPart(NamedTuple):
    """A part of an answer, and whether another answer lacks it."""

    text: str
    is_different: bool = False


def mark_differences(answer: str, other: str) -> list[TextPart]:
    """Return an answer in parts that another one has, and parts that it lacks.

    Answers that share little, or are very long, are one part without a mark.
    """
    mine = WORDS.findall(answer)
    theirs = WORDS.findall(other)
    if answer == other or len(mine) + len(theirs) > MAX_COMPARED_WORDS:
        return [TextPart(answer)]
    matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    if matcher.ratio() < LEAST_COMMON:
        return [TextPart(answer)]
    parts = []
    for kind, start, end, _, _ in matcher.get_opcodes():
        if start < end:
            parts.append(TextPart("".join(mine[start:end]), kind != "equal"))
    return parts
