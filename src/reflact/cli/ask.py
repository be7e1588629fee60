"""The command ``ask``: a person says which of two answers is better, blind."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from reflact.cli.runs import RunArgument
from reflact.errors import UsageError
from reflact.text import escape_controls, format_value, name_count

if TYPE_CHECKING:
    from rich.console import Console

    from reflact.reporting.asking import AnswerFile, Choice, Question
    from reflact.reporting.items import ItemMatrix

# What a person types, and what it means; anything else is asked again.
KEYS: dict[str, Choice] = {
    "a": "a",
    "b": "b",
    "e": "equal",
    "equal": "equal",
    "=": "equal",
    "s": "skip",
    "skip": "skip",
}

KEYS_HELP = "a, b, e (equal), s (skip), u (undo), q (stop)"

# From this width on, answers stand beside each other.
WIDE = 100


def ask(
    folder: RunArgument,
    rater: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Who answers. Default: your login name.", show_default=False
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the questions as CSV instead.", show_default=False
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Read the answers of such a file instead.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> None:
    """Ask you which of two answers is better.

    What you say corrects the run's claim, if its grader may be wrong.
    The answers are those of the initial and the best skill to the test items, or those of the two
    documents of an eval. You do not see which is which. A claim is made after 30, 60, 120 and 240
    answers, and after all of them. You can stop at any time: the next start goes on.
    """
    from rich.console import Console

    from reflact.reporting.asking import (
        find_answer_file,
        format_questions,
        list_questions,
        read_choices,
    )
    from reflact.reporting.history import find_run
    from reflact.types import Split

    run_id = anyio.run(find_run, folder).run_id
    matrix = anyio.run(_read_ends, folder, run_id)
    rater = rater or os.environ.get("USER") or getpass.getuser()
    questions = list_questions(matrix, run_id, rater)
    if not questions:
        raise UsageError(
            f"run {run_id} has no two different answers to a {Split.test.value} item; nothing can "
            "be asked"
        )
    file = find_answer_file(folder, run_id)
    if export is not None:
        export.write_text(format_questions(questions, rater), encoding="utf-8")
        typer.echo(f"{name_count(len(questions), 'question')} in {export}")
        return
    if answers is not None:
        by_id = {question.item_id: question for question in questions}
        given = []
        for row in read_choices(answers):
            if row.item_id not in by_id:
                raise UsageError(
                    f"{answers} names {row.item_id}, which is no question of run {run_id}"
                )
            given.append((row, by_id[row.item_id].weigh_row(row)))
        for row, preference in given:
            file.add(row.rater, row.item_id, preference)
    elif not as_json:
        if not sys.stdin.isatty():
            raise UsageError(
                "ask needs a terminal; reflact ask RUN --export FILE writes the questions as CSV, "
                "and --answers FILE reads them when they are answered"
            )
        _ask_questions(Console(), questions, file, rater)
    _print_claims(matrix, run_id, file, as_json=as_json)


async def _read_ends(folder: Path, run_id: str) -> ItemMatrix:
    from reflact.reporting.history import read_matrix
    from reflact.types import Split

    return await read_matrix(folder, run_id, split=Split.test, ends_only=True)


def _ask_questions(
    console: Console, questions: tuple[Question, ...], file: AnswerFile, rater: str
) -> None:
    """Ask until the questions or the person's patience end."""
    from reflact.gate.corrected_claim import list_looks

    done = [each for each in questions if each.item_id in file.list_answers(rater)]
    left = [each for each in questions if each not in done]
    while left:
        question = left[0]
        n_answers = sum(each is not None for each in file.list_answers().values())
        n_looks = len(list_looks(n_answers, len(questions)))
        _show_question(console, question, len(done) + 1, len(questions))
        said = typer.prompt(f"Which is better? {KEYS_HELP}", prompt_suffix=" ").strip().lower()
        if said in {"q", "quit", "stop", "exit"}:
            return
        if said in {"u", "undo"} and done:
            left.insert(0, done.pop())
            file.add(rater, left[0].item_id, None, undo=True)
        elif said not in KEYS:
            typer.echo(f"type one of these: {KEYS_HELP}")
        else:
            file.add(rater, question.item_id, question.weigh(KEYS[said]))
            done.append(left.pop(0))
            n_answers = sum(each is not None for each in file.list_answers().values())
            if len(list_looks(n_answers, len(questions))) > n_looks:
                return


def _show_question(console: Console, question: Question, number: int, n_questions: int) -> None:
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.text import Text

    console.rule(f"{number} of {n_questions}")
    console.print(Text(escape_controls(format_value(question.input))))
    panels = []
    for title, answer in (("a", question.a), ("b", question.b)):
        width = console.width if console.width < WIDE else console.width // 2 - 1
        panels.append(Panel(Text(escape_controls(answer)), title=title, width=width))
    console.print(Columns(panels))


def _print_claims(matrix: ItemMatrix, run_id: str, file: AnswerFile, *, as_json: bool) -> None:
    from reflact.gate.corrected_claim import LOOKS, order_pairs
    from reflact.reporting.asking import (
        choose_claim,
        describe_claim,
        list_claims,
        list_pairs,
        measure_raters,
    )

    claims = list_claims(matrix, run_id, file.list_answers())
    if as_json:
        for claim in claims:
            typer.echo(claim.model_dump_json())
        return
    n_answers = sum(each is not None for each in file.list_answers().values())
    raters = file.list_raters()
    for place, one in enumerate(raters):
        for other in raters[place + 1 :]:
            n_common, n_agreed = measure_raters(file, one, other)
            if n_common:
                typer.echo(f"{one} and {other} agree in {n_agreed} of {n_common} items.")
    shown = choose_claim(claims)
    if shown is None:
        n_needed = min(LOOKS[0], len(order_pairs(list_pairs(matrix), seed=0)))
        typer.echo(
            f"{name_count(n_answers, 'answer')}; a claim is made after {n_needed}. The same "
            "command goes on."
        )
        return
    for sentence in describe_claim(shown):
        typer.echo(sentence)
