"""Questions for a person about the answers of two documents, and what the person said.

A question shows an item with both answers, and nothing tells which document an answer is from. The
scores of the items are the judge's votes on all pairs; ``gate.corrected_claim`` corrects them by
what persons said about some.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Literal

from filelock import FileLock
from pydantic import JsonValue, ValidationError

from reflact.errors import UsageError
from reflact.gate.corrected_claim import (
    CorrectedClaim,
    JudgedPair,
    correct_claim,
    list_looks,
    order_pairs,
)
from reflact.reporting.items import ItemMatrix, MatrixRow
from reflact.text import escape_controls, format_value, name_count
from reflact.types import FrozenModel

# What a person says of two answers: which is better, that they are equal, or nothing.
Choice = Literal["a", "b", "equal", "skip"]

CSV_HEADING = ("rater", "item", "input", "answer a", "answer b", "better")


class ChoiceRow(FrozenModel):
    """A filled row of a file of questions."""

    rater: str
    item_id: str
    answer_a: str
    answer_b: str
    choice: Choice


class Question(FrozenModel):
    """An item and the answers of two documents, a and b; which is which is drawn for each rater."""

    item_id: str
    input: JsonValue
    a: str
    b: str
    is_a_new: bool

    def weigh(self, choice: Choice) -> float | None:
        """Return a choice from the new document's side: 1 better, 0 equal, -1 worse, None none."""
        if choice == "skip":
            return None
        if choice == "equal":
            return 0.0
        return 1.0 if (choice == "a") is self.is_a_new else -1.0

    def weigh_row(self, row: ChoiceRow) -> float | None:
        """Return the choice of a row, whose answers may stand the other way round.

        Raises:
            UsageError: The row has other answers.
        """
        shown = tuple(escape_controls(answer).split() for answer in (self.a, self.b))
        found = (row.answer_a.split(), row.answer_b.split())
        if found == shown:
            return self.weigh(row.choice)
        if found == shown[::-1]:
            turned: dict[Choice, Choice] = {"a": "b", "b": "a"}
            return self.weigh(turned.get(row.choice, row.choice))
        raise UsageError(
            f"the answers to {row.item_id} are not those of this run; fill in the file that "
            "reflact ask --export writes"
        )


class GivenAnswer(FrozenModel):
    """What a rater said of an item, and when; a later one of the same rater replaces it.

    ``preference`` is 1 if the new document's answer is better, 0, -1, or None: skipped or undone.
    """

    time: datetime
    rater: str
    item_id: str
    preference: float | None
    is_undone: bool = False


class AnswerFile:
    """A file of answers, a line each; lines are only added, so that a kill loses none.

    Raises:
        UsageError: A line of the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers: dict[tuple[str, str], GivenAnswer] = {}
        for number, line in enumerate(self._read_lines(), 1):
            try:
                self._take(GivenAnswer.model_validate_json(line))
            except ValidationError:
                raise UsageError(
                    f"{path}: line {number} is no answer; correct it, or remove it"
                ) from None

    def add(
        self, rater: str, item_id: str, preference: float | None, *, undo: bool = False
    ) -> None:
        """Store an answer on the disk."""
        answer = GivenAnswer(
            time=datetime.now(UTC),
            rater=rater,
            item_id=item_id,
            preference=preference,
            is_undone=undo,
        )
        line = f"{answer.model_dump_json()}\n".encode()
        # Two persons may answer at one time, and what a kill cut off must not stay between lines.
        with FileLock(f"{self.path}.lock"):
            length = sum(len(each) for each in self._read_lines())
            with self.path.open("ab") as file:
                file.truncate(length)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._take(answer)

    def list_raters(self) -> tuple[str, ...]:
        """Return who answered."""
        return tuple(sorted({rater for rater, _ in self._answers}))

    def list_answers(self, rater: str | None = None) -> dict[str, float | None]:
        """Return the preferences by item, in the order in which they were first given.

        Without a rater, the preference is the mean of all raters who did not skip the item.
        """
        said: dict[str, list[float]] = {}
        for answer in self._answers.values():
            if rater in {None, answer.rater}:
                given = said.setdefault(answer.item_id, [])
                if answer.preference is not None:
                    given.append(answer.preference)
        return {item_id: fmean(given) if given else None for item_id, given in said.items()}

    def _read_lines(self) -> list[bytes]:
        """Return the whole lines of the file; after them there may be one that a kill cut off."""
        stored = self.path.read_bytes() if self.path.exists() else b""
        return [line for line in stored.splitlines(keepends=True) if line.endswith(b"\n")]

    def _take(self, answer: GivenAnswer) -> None:
        key = (answer.rater, answer.item_id)
        if answer.is_undone:
            self._answers.pop(key, None)
        else:
            self._answers[key] = answer


def find_answer_file(path: Path, run_id: str) -> AnswerFile:
    """Return the answers about a run, by its folder, its database, or an id behind one."""
    while not path.exists():
        path = path.parent
    folder = path if path.is_dir() else path.parent
    return AnswerFile(folder / f"answers-{run_id}.jsonl")


def list_pairs(matrix: ItemMatrix) -> tuple[JudgedPair, ...]:
    """Return the items with an answer under both documents, and the gain of each trial's score."""
    pairs = []
    for row in matrix.rows:
        before, after = (row.results[place].rollouts for place in (0, -1))
        votes = []
        for old, new in zip(before, after, strict=False):
            if old.score is not None and new.score is not None:
                votes.append(new.score.soft - old.score.soft)
        answers = _find_answers(row)
        if votes and answers is not None:
            is_same = answers[0].split() == answers[1].split()
            pairs.append(JudgedPair(pair_id=row.item_id, votes=tuple(votes), is_same=is_same))
    return tuple(pairs)


def list_questions(matrix: ItemMatrix, run_id: str, rater: str) -> tuple[Question, ...]:
    """Return what a rater can be asked about two documents of a run, in order."""
    rows = {row.item_id: row for row in matrix.rows}
    questions = []
    for item_id in _order(list_pairs(matrix), run_id):
        answers = _find_answers(rows[item_id])
        if answers is None:
            continue
        is_a_new = int(_digest(run_id, item_id, rater)[0], 16) % 2 == 0
        a, b = reversed(answers) if is_a_new else answers
        questions.append(
            Question(item_id=item_id, input=rows[item_id].input, a=a, b=b, is_a_new=is_a_new)
        )
    return tuple(questions)


def choose_claim(claims: Sequence[CorrectedClaim]) -> CorrectedClaim | None:
    """Return the first claim that is proven, since each look has its error probability; else the
    last one, if any.
    """
    last = claims[-1] if claims else None
    return next((claim for claim in claims if claim.proven is not None), last)


def list_claims(
    matrix: ItemMatrix, run_id: str, answers: Mapping[str, float | None]
) -> tuple[CorrectedClaim, ...]:
    """Return the claims at each number of answers that has been reached.

    A claim uses the first answers in the order of the questions, up to the first question that is
    open: somebody who answers only some of them chooses the sample. Items that all skipped are left
    out.
    """
    pairs = list_pairs(matrix)
    order = _order(pairs, run_id)
    given = {}
    for item_id in order:
        if item_id not in answers:
            break
        preference = answers[item_id]
        if preference is not None:
            given[item_id] = preference
    n_askable = len(order) - sum(answers.get(item_id, 0.0) is None for item_id in order)
    claims = []
    for number, look in enumerate(list_looks(len(given), n_askable), 1):
        first = dict(list(given.items())[:look])
        claims.append(correct_claim(pairs, first, look=number))
    return tuple(claims)


def format_questions(questions: Sequence[Question], rater: str) -> str:
    """Return questions as a CSV file in which a rater fills the last column: a, b or equal."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADING)
    for question in questions:
        cells = (rater, question.item_id, format_value(question.input), question.a, question.b, "")
        writer.writerow([escape_controls(cell) for cell in cells])
    return text.getvalue()


def read_choices(path: Path) -> Iterator[ChoiceRow]:
    """Yield each filled row of a CSV file.

    Raises:
        UsageError: The file cannot be read or lacks a column, or a choice is another word.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not in UTF-8; save it as CSV in UTF-8") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    rows = csv.DictReader(io.StringIO(text, newline=""))
    for name in CSV_HEADING:
        if name not in (rows.fieldnames or ()):
            raise UsageError(f"{path} has no column {name}; reflact ask --export writes them")
    for number, row in enumerate(rows, 2):
        word = (row["better"] or "").strip().lower()
        if not word:
            continue
        if word not in {"a", "b", "equal", "skip"}:
            raise UsageError(
                f"{path}: line {number} says {json.dumps(word)}; write a, b, equal or skip"
            )
        yield ChoiceRow.model_validate(
            {
                "rater": row["rater"],
                "item_id": row["item"],
                "answer_a": row["answer a"] or "",
                "answer_b": row["answer b"] or "",
                "choice": word,
            }
        )


def measure_raters(file: AnswerFile, one: str, other: str) -> tuple[int, int]:
    """Return how many items two raters answered both, and on how many they agree."""
    mine = file.list_answers(one)
    theirs = file.list_answers(other)
    common = []
    for item_id, preference in mine.items():
        if preference is not None and theirs.get(item_id) is not None:
            common.append(preference == theirs[item_id])
    return len(common), sum(common)


def describe_claim(claim: CorrectedClaim) -> Iterator[str]:
    """Yield what a claim shows, a sentence each."""
    gain = claim.gain
    verdict = {
        "better": "The new document is proven better.",
        "worse": "The new document is proven worse.",
        None: "Neither document is proven better.",
    }[claim.proven]
    yield (
        f"{verdict} Pairs in which its answer is better, less those in which it is worse: "
        f"{100 * gain.value:+.0f} points, 95% interval {100 * gain.low:+.0f} to "
        f"{100 * gain.high:+.0f} ({name_count(claim.n_answers, 'answer')} of persons, scores of "
        f"{name_count(claim.n_pairs, 'pair')})."
    )
    if claim.n_same:
        yield f"In {name_count(claim.n_same, 'pair')} both answers are one text."
    kappa = "" if claim.kappa is None else f" (kappa {claim.kappa:.2f})"
    yield (
        f"Scores and persons agree in {claim.agreement:.0%} of these pairs{kappa}; the scores "
        f"alone say {100 * claim.judged:+.0f} points."
    )
    if claim.is_judge_used:
        yield f"The scores saved {name_count(claim.n_saved, 'answer')}."
    else:
        yield "The scores do not narrow the interval: it is that of the answers alone."
    if claim.n_answers < claim.n_pairs - claim.n_same:
        width = 100 * (gain.high - gain.low)
        yield (
            f"30 more answers would narrow the interval from {width:.0f} to "
            f"{100 * claim.width_with_more:.0f} points."
        )


def _find_answers(row: MatrixRow) -> tuple[str, str] | None:
    """Return the first answers to an item; None if one is missing."""
    before, after = (row.results[place].answer for place in (0, -1))
    return None if before is None or after is None else (before, after)


def _order(pairs: Sequence[JudgedPair], run_id: str) -> tuple[str, ...]:
    """Return the ids of a run's pairs in the order of its questions, the same for all raters."""
    return order_pairs(pairs, seed=int(_digest(run_id)[:12], 16))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
