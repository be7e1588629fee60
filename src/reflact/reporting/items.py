"""Items side by side: what the target answered to each under several documents.

The documents are the versions of a run, the best skills of several runs, or those of an ``eval``.
Terminal, pages, CSV and JSON only lay this out.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pydantic import JsonValue

from reflact.errors import UsageError
from reflact.records import ComparisonCategory, DocumentResult, ItemResult, Usage, average_metrics
from reflact.text import (
    escape_controls,
    escape_line,
    format_score,
    format_value,
    name_count,
    shorten,
)
from reflact.training.items import ItemAnswers, categorize
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

# The most task types that a message lists.
MAX_TYPES = 10

# Answers that share less have no parts that differ; they are different answers.
LEAST_COMMON = 0.3

# A part of an answer keeps so many characters.
LEAST_SHOWN = 12

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
    def usage(self) -> Usage | None:
        """What the calls behind its answers took; None if they were not seen."""
        usages = [result.usage for result in self.results if result.usage is not None]
        return sum(usages, Usage()) if usages else None

    @property
    def metrics(self) -> str:
        """The means of the environment's further numbers, such as ``seconds 3 -> 2.5``."""
        metrics = [average_metrics(result.rollouts) for result in self.results]
        words = []
        for name in sorted({name for each in metrics for name in each}):
            values = [f"{each[name]:.4g}" if name in each else "-" for each in metrics]
            words.append(f"{escape_line(name)} {' -> '.join(values)}")
        return ", ".join(words)

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

    def find_outcome(self, row: MatrixRow) -> ComparisonCategory | None:
        """Return how an item's score differs from the first document to the last one in focus."""
        place = max(place for place, column in enumerate(self.columns) if column.in_focus)
        return categorize(row.results[0], row.results[place], self.threshold)

    def describe_row(self, row: MatrixRow) -> str:
        """Return an item in one line: id, split, task type, outcome, scores."""
        kind = "" if row.task_type is None else f", {escape_line(row.task_type)}"
        words = f"{escape_line(row.item_id)} ({self.split.value}{kind}): "
        if len(row.results) > 1:
            words += f"{OUTCOME_WORDS[self.find_outcome(row)]}, "
        return words + row.scores

    def select(
        self, *, changed: bool = False, wrong: bool = False, task_type: str | None = None
    ) -> ItemMatrix:
        """Return the items that differ, that fail under a document in focus, or of a task type.

        Raises:
            UsageError: No item has the task type.
        """
        types = sorted({row.task_type for row in self.rows if row.task_type is not None})
        if task_type is not None and task_type not in types:
            choices = ", ".join(types[:MAX_TYPES]) or "none"
            raise UsageError(f"no item has the task type {task_type}; there are: {choices}")
        focus = [place for place, column in enumerate(self.columns) if column.in_focus]
        rows = []
        for row in self.rows:
            states = self.list_states(row)
            fails = any(states[place] in {"wrong", "partly"} for place in focus)
            is_asked = task_type is None or row.task_type == task_type
            if is_asked and (fails or not wrong) and (row.is_different or not changed):
                rows.append(row)
        return self.model_copy(update={"rows": tuple(rows)})

    def sort(self) -> ItemMatrix:
        """Return the items that are still wrong first, those with equal cells together."""
        order = list(CELL_MARKS)
        focus = [place for place, column in enumerate(self.columns) if column.in_focus]

        def rank(row: MatrixRow) -> list[int]:
            ranks = [order.index(state) for state in self.list_states(row)]
            return [*(ranks[place] for place in focus), *reversed(ranks)]

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

    def describe_outcomes(self) -> str:
        """Return how many items are better, worse and so on, as ``find_outcome`` says."""
        counts = Counter(self.find_outcome(row) for row in self.rows)
        words = []
        for outcome, word in OUTCOME_WORDS.items():
            if outcome is not None or counts[None]:
                words.append(f"{counts[outcome]:,} {word}")
        return f"{name_count(len(self.rows), f'{self.split.value} item')}: {', '.join(words)}"

    def list_results(self) -> Iterator[ItemResult]:
        """Yield the items under the first document and the last one."""
        for row in self.rows:
            before = row.results[0]
            after = row.results[-1]
            yield ItemResult(
                item_id=row.item_id,
                split=self.split,
                task_type=row.task_type,
                input=row.input,
                expected=row.expected,
                baseline=before,
                best=after,
                category=categorize(before, after, self.threshold),
                wrong=self.find_state(after) in {"wrong", "partly"},
            )

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


def mark_differences(answer: str, other: str, longest: int | None = None) -> list[TextPart]:
    """Return an answer in parts that another one has, and parts that it lacks.

    Answers that share little, or are very long, are one part without a mark. A result with more
    than ``longest`` characters loses the middles of parts, those that both answers have first.
    """
    parts = [TextPart(answer)]
    mine = WORDS.findall(answer)
    theirs = WORDS.findall(other)
    if answer != other and len(mine) + len(theirs) <= MAX_COMPARED_WORDS:
        matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
        if matcher.ratio() >= LEAST_COMMON:
            parts = []
            for kind, start, end, _, _ in matcher.get_opcodes():
                if start < end:
                    parts.append(TextPart("".join(mine[start:end]), kind != "equal"))
    n_different = sum(len(part.text) for part in parts if part.is_different)
    n_equal = sum(len(part.text) for part in parts) - n_different
    if longest is None or n_equal + n_different <= longest:
        return parts
    room = max(longest - n_different, longest // 3)
    fitted = []
    for part in parts:
        share = len(part.text) / (n_different if part.is_different else n_equal)
        size = (longest - room if part.is_different else room) * share
        fitted.append(TextPart(shorten(part.text, max(int(size), LEAST_SHOWN)), part.is_different))
    return fitted
