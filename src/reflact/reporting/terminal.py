"""Runs, steps, items and comparisons on a terminal, in a file or in a pipe."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from reflact.llm.pricing import CostEstimate
from reflact.records import (
    CodeFailure,
    RunSummary,
    SkillEvaluation,
    SkillScore,
    StageCost,
    sum_step_costs,
)
from reflact.reporting import facts
from reflact.reporting.history import RunComparison, RunHistory, RunListing, StepDetails
from reflact.reporting.items import (
    CELL_MARKS,
    CELL_WORDS,
    CellState,
    ItemMatrix,
    mark_differences,
)
from reflact.text import (
    escape_controls,
    escape_line,
    format_count,
    format_duration,
    format_usd,
    format_value,
    name_count,
    shorten,
)

# Cells of the label at the beginning of a line; the rest of a long line is indented by as many.
INDENT = 10

# Cells between two columns of a table.
GAP = 2

# A column whose cells may wrap keeps this width as long as other columns can be left out.
MAX_WRAPPED_CELLS = 20

# The most lines of a text of an item at a terminal.
TEXT_LINES = 2

# The most characters of a text of an item in a file or a pipe.
MAX_PIPED_CHARS = 400

# The most characters of a setting's value in a comparison.
MAX_SETTING_CHARS = 80

# The most steps in the table of a run; a table of 10,000 takes ten seconds.
MAX_SHOWN_STEPS = 500

# Columns of words, and those that lead a row.
LEFT_COLUMNS = {"step", "epoch", "decision", "document", "split", "sha-256", "folder", "run"}
LEFT_COLUMNS |= {"status", "role", "calls for", "setting", "item", "task type", "what", "input"}

# The most characters of an item's id, and of a document's name, in a table.
ID_CHARS = 28

# Cells for the task type in a matrix, and the fewest for the input of its items.
TYPE_CELLS = 14
INPUT_CELLS = 24

# Answers stand beside each other if each has so many cells.
ANSWER_CELLS = 40

# Marks for terminals that cannot show those of pages.
ASCII_MARKS: dict[CellState, str] = {"wrong": "x", "partly": "~", "right": "o", "unmeasured": "-"}

CELL_STYLES = {"wrong": "red", "partly": "yellow", "right": "green", "unmeasured": "dim"}

# What the first answer has and another one lacks, and the reverse; also told apart without colours.
DIFFERENT_STYLES = ("red strike", "green underline")

RUN_FILES = (
    ("skills", "every version"),
    ("summary.json", "this summary"),
    ("report.html", "a page on the run"),
    ("run.db", "everything"),
)

# The line of a unified diff that says where a part of it stands.
POSITIONS = re.compile(r"^@@ .*\n", re.MULTILINE)


def build_table(
    rows: Sequence[facts.Row],
    width: int,
    *,
    optional: Sequence[str] = (),
    wrapped: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> Table:
    """Return a table of rows of plain text that have the same headings.

    Args:
        rows: The cells of each row by their headings.
        width: The cells of a line of the console.
        optional: Columns that are left out if the table is too wide, the first one first.
        wrapped: Columns whose cells may take several lines; all others stay whole.
        styles: The styles of cells with these texts.
    """
    widths = {name: cell_len(name) for row in rows[:1] for name in row}
    for row in rows:
        for name, cell in row.items():
            widths[name] = max(widths[name], cell_len(cell))
    for name in wrapped:
        widths[name] = min(widths.get(name, 0), MAX_WRAPPED_CELLS)
    for name in optional:
        if sum(widths.values()) + GAP * (len(widths) - 1) > width:
            widths.pop(name, None)
    shown = [name for row in rows[:1] for name in row if name in widths]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for name in shown:
        justify: Literal["left", "right"] = "right"
        if name in LEFT_COLUMNS or name in wrapped:
            justify = "left"
        table.add_column(Text(name), justify=justify, no_wrap=name not in wrapped, overflow="fold")
    known_styles = styles or {}
    for row in rows:
        table.add_row(*(Text(row[name], style=known_styles.get(row[name], "")) for name in shown))
    return table


def print_line(console: Console, line: str) -> None:
    """Print a line of text that may come from a model; at a terminal it is wrapped and indented."""
    line = escape_controls(line)
    if console.is_terminal:
        console.print(wrap_line(line, console))
    else:
        console.print(Text(line), soft_wrap=True)


def wrap_line(line: str, console: Console) -> Text:
    """Return a line that is wrapped at words if it is too wide, with the rest indented."""
    width = console.width
    if cell_len(line) <= width or width < 3 * INDENT:
        return Text(line)
    first = Text(line).wrap(console, width)[0]
    rest = Text(line[len(first.plain) :].lstrip()).wrap(console, width - INDENT)
    return Text("\n").join([first, *(Text(" " * INDENT) + part for part in rest)])


# ------------------------------------------------------------------------------------------- a run


def print_summary(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print how a run ended: result, scores, notes, spend and files."""
    fact = facts.ResultFact(summary=summary)
    for line in fact.list_lines(folder):
        print_line(console, line)
    if fact.is_complete or summary.steps:
        print_line(console, f"{summary.status}: {fact.decisions}")
    if fact.is_complete and summary.reason is not None:
        print_line(console, f"ended early: {summary.reason}")
    for line in fact.list_versions():
        print_line(console, line)
    if summary.scores:
        console.print(build_score_table(summary.scores, console.width))
    lines = [f"warning: {warning}" for warning in summary.warnings]
    lines += [*fact.list_controls(), *fact.list_notes(), *facts.format_spend(summary.spend)]
    for line in lines:
        print_line(console, line)
    for name, what in RUN_FILES:
        if (folder / name).exists():
            print_line(console, f"{folder / name}  {what}")


def print_run(console: Console, history: RunHistory, folder: Path) -> None:
    """Print a run: its steps, its epochs, measurements outside its training, and how it ended."""
    if history.evaluation is not None:
        print_evaluation(console, history, history.evaluation)
        return
    print_line(console, f"run {history.run_id}, started {history.created:%Y-%m-%d %H:%M}")
    hidden = len(history.steps[:-MAX_SHOWN_STEPS])
    if hidden:
        print_line(console, f"{name_count(hidden, 'earlier step')} left out; --json lists all")
    if history.steps:
        shown = [facts.StepFact.of(record) for record in history.steps[-MAX_SHOWN_STEPS:]]
        _print_steps(console, shown)
    for end in history.epochs[-MAX_SHOWN_STEPS:]:
        print_line(console, facts.describe_epoch(end))
    if history.evaluations:
        print_line(console, "documents that were measured with `reflact eval`:")
        scores = [compared.skill for compared in history.evaluations]
        console.print(build_score_table(scores, console.width, with_hash=True))
    if history.summary is None or history.is_open:
        steps = name_count(len(history.steps), "committed step")
        print_line(console, f"{history.status or 'open'}: {steps}, not ended")
    else:
        print_summary(console, history.summary, folder)
    if history.failures:
        count = name_count(len(history.failures), "exception")
        print_line(console, f"{count} in your own code; the last one:")
        print_failure(console, history.failures[-1])


def print_evaluation(console: Console, history: RunHistory, evaluation: SkillEvaluation) -> None:
    """Print an ``eval``: its documents with their scores, the gains, and its cost."""
    state = history.status or "not ended"
    started = f"started {history.created:%Y-%m-%d %H:%M}"
    print_line(console, f"{evaluation.title}, {history.run_id}, {started}: {state}")
    for compared in history.evaluations:
        console.print(build_score_table((compared.skill, *compared.others), console.width))
        for line in facts.list_evaluation_gains(compared):
            print_line(console, line)
    print_line(console, f"Cost: {facts.SpendFact(usage=history.usage).words}.")


def print_failure(console: Console, failure: CodeFailure) -> None:
    """Print an exception of the caller's own code with its traceback."""
    item = "" if failure.item_id is None else f", item {failure.item_id}"
    _print_block(console, f"exception in step {failure.step}{item}", failure.traceback)


def _print_block(console: Console, heading: str, text: str) -> None:
    """Print a text as it is, indented below its heading."""
    lines = [f"    {line}" for line in escape_controls(text).split("\n")]
    console.print(Text("\n".join((f"{escape_line(heading)}:", *lines))), soft_wrap=True)


def print_step(console: Console, details: StepDetails) -> None:
    """Print a step in full, with the memory that its prompts showed, and the end of its epoch."""
    _print_steps(console, [facts.StepFact.of(details.record)])
    lines = [f"{label}: {text}" for label, text in facts.list_step_details(details.record)]
    edits = facts.list_edit_facts(details.record)
    lines += [f"edit {number} {fact.words}" for number, fact in enumerate(edits, start=1)]
    if details.memory:
        lines.append(f"memory of the optimizer: {details.memory}")
    if details.epoch_end is not None:
        lines.append(facts.describe_epoch(details.epoch_end))
        lines += [f"{label}: {text}" for label, text in facts.list_epoch_details(details.epoch_end)]
    for line in (*lines, *facts.format_stage_costs(details.costs)):
        console.print(Text(escape_controls(line)), soft_wrap=True)
    if details.diff:
        print_diff(console, details.diff)


def print_diff(console: Console, diff: str) -> None:
    """Print a unified diff; a terminal gets colours, and dots in place of positions of lines."""
    if console.is_terminal:
        text = escape_controls(hide_positions(diff))
        console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        console.print(Text(escape_controls(diff)), soft_wrap=True)


def hide_positions(diff: str) -> str:
    """Return a unified diff with three dots between its parts, instead of positions of lines."""
    first, *others = POSITIONS.split(diff)
    return first + "...\n".join(others)


# ------------------------------------------------------------------------------------------- tables


def build_score_table(
    scores: Sequence[SkillScore], width: int, *, with_hash: bool = False
) -> Table:
    """Return the scores of documents as a table."""
    metrics = [f"mean {escape_line(metric)}" for metric in facts.list_metrics(scores)]
    optional = ("soft score", *metrics, "sha-256", "solved", "95% interval", "unmeasured")
    return build_table(facts.list_score_rows(scores, with_hash=with_hash), width, optional=optional)


def _print_steps(console: Console, steps: Sequence[facts.StepFact]) -> None:
    optional = ("epoch", "edits", "solved", "skill")
    console.print(build_table([step.row for step in steps], console.width, optional=optional))
    print_line(console, facts.STEP_LEGEND)


def build_run_table(runs: Sequence[RunListing], root: Path, width: int) -> Table:
    """Return a list of runs as a table; their folders are shown as below ``root``."""
    optional = ("grader", "model", "date", "cost", "steps", "status", "baseline")
    rows = [facts.build_run_row(run, root) for run in runs]
    return build_table(rows, width, optional=optional, wrapped=("folder",))


def build_cost_table(costs: Sequence[StageCost], width: int) -> Table:
    """Return the calls, tokens, price and time of each step; step 0 is the baseline."""
    rows = []
    for cost in sum_step_costs(costs):
        row = {"step": str(cost.step) if cost.step else "baseline"}
        rows.append(
            {**row, **facts.build_usage_row(cost.usage), "time": format_duration(cost.seconds)}
        )
    return build_table(rows, width)


def build_estimate_table(estimate: CostEstimate, width: int) -> Table:
    """Return a table of the likely calls, tokens and price."""
    likely = [
        (row.role, row.purpose, row.calls, row.input_tokens + row.output_tokens, row.usd)
        for row in estimate.rows
    ]
    calls = math.fsum(row.calls for row in estimate.rows)
    likely.append(("all", "", calls, math.fsum(row[3] for row in likely), estimate.usd))
    rows = []
    for role, purpose, calls, tokens, usd in likely:
        row = {"role": role, "calls for": purpose.replace("_", " ")}
        row |= {"calls": format_count(round(calls)), "tokens": format_count(round(tokens))}
        rows.append({**row, "cost": "unknown" if usd is None else format_usd(usd)})
    return build_table(rows, width)


def print_comparison(console: Console, comparison: RunComparison) -> None:
    """Print the runs of a comparison, their gains, the settings that differ, and their skills."""
    rows = [facts.build_compared_row(run) for run in comparison.runs]
    optional = ("characters", "calls", "steps")
    console.print(build_table(rows, console.width, optional=optional, wrapped=("run",)))
    if any(row[split].endswith("*") for row in rows for split in ("val", "test")):
        print_line(console, facts.UNMEASURED_NOTE)
    for line in facts.list_gain_lines(comparison):
        print_line(console, line)
    names = [escape_line(run.name) for run in comparison.runs]
    settings = []
    for setting in comparison.settings:
        values = [escape_line(facts.format_setting(value)) for value in setting.values]
        cells = [shorten(value, MAX_SETTING_CHARS) for value in values]
        row = dict(zip(names, cells, strict=True))
        settings.append({"setting": escape_line(setting.key), **row})
    if settings:
        console.print()
        console.print(build_table(settings, console.width, wrapped=names))
    first, *others = comparison.runs
    for run, diff in zip(others, comparison.diffs, strict=True):
        if diff:
            console.print()
            print_line(console, f"best skill of {first.name} (---) and of {run.name} (+++):")
            print_diff(console, diff)
        else:
            print_line(console, f"{run.name} has the same best skill")


# -------------------------------------------------------------------------------------------- items


def print_matrix(console: Console, matrix: ItemMatrix, n_items: int) -> None:
    """Print what each document solves, and the chosen ones of ``n_items`` items by document.

    A narrow terminal gets the documents that changed most.
    """
    marks = CELL_MARKS if console.encoding.startswith("utf") else ASCII_MARKS
    ids = {row.item_id: shorten(escape_line(row.item_id), ID_CHARS) for row in matrix.rows}
    id_cells = max(map(cell_len, ids.values()), default=0)
    cells = GAP + max(cell_len(column.name) for column in matrix.columns)
    shown = matrix.choose_columns((console.width - id_cells) // cells).sort()
    has_types = any(row.task_type for row in shown.rows)
    room = console.width - id_cells - cells * len(shown.columns) - TYPE_CELLS * has_types
    rows = []
    for row in shown.rows:
        line = {"item": ids[row.item_id]}
        if has_types:
            line["task type"] = shorten(escape_line(row.task_type or ""), TYPE_CELLS - GAP)
        for column, state in zip(shown.columns, shown.list_states(row), strict=True):
            line[escape_line(column.name)] = marks[state]
        if room > INPUT_CELLS:
            line["input"] = shorten(escape_line(format_value(row.input)), room - GAP)
        rows.append(line)

    if rows:
        styles = {mark: CELL_STYLES[state] for state, mark in marks.items()}
        optional = ("input", "task type")
        console.print(build_table(rows, console.width, optional=optional, styles=styles))
        legend = [f"{mark} {CELL_WORDS[state]}" for state, mark in marks.items()]
        print_line(console, "   ".join(legend))
    n_left_out = len(matrix.columns) - len(shown.columns)
    if n_left_out:
        documents = name_count(n_left_out, "document")
        print_line(console, f"no room for {documents} that changed less; --csv and --json have all")
    console.print()
    optional = ("measured", "what")
    console.print(build_table(matrix.summarize(), console.width, optional=optional))
    count = name_count(n_items, f"{facts.SPLIT_WORDS[matrix.split]} item")
    print_line(console, f"{len(rows):,} of {count}; better and worse are against the first row")


def print_items(console: Console, matrix: ItemMatrix) -> None:
    """Print items with their texts; what an answer has and the first one lacks is marked.

    At a terminal, a text that needs more than ``TEXT_LINES`` lines loses its middle, and answers
    stand beside each other if there is room. In a file or a pipe, each text has one line of at most
    ``MAX_PIPED_CHARS`` characters, however wide that is.
    """
    names = [shorten(escape_line(column.name), ID_CHARS) for column in matrix.columns]
    label_cells = max(INDENT, *map(cell_len, names))
    answer_cells = (console.width - label_cells) // len(names) - GAP
    is_wide = len(names) > 1 and answer_cells >= ANSWER_CELLS
    room = max(console.width - label_cells - GAP, INDENT)
    longest = MAX_PIPED_CHARS
    if console.is_terminal:
        longest = TEXT_LINES * room
    for row in matrix.rows:
        title = f"{matrix.describe_row(row)}, {facts.describe_cost(row.usage)}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        texts = {"input": row.input, "expected": row.expected, "metrics": row.metrics or None}
        lines = []
        for name, value in texts.items():
            if value is not None:
                lines.append((name, Text(shorten(escape_line(format_value(value)), longest))))
        answers = _mark_answers(row.list_answers(), longest, with_signs=not console.is_terminal)
        if not console.is_terminal:
            for name, text in (*lines, *zip(names, answers, strict=True)):
                line = Text(f"{name:<{label_cells}}  ").append_text(text)
                console.print(line, soft_wrap=True)
            continue
        if not is_wide:
            lines += zip(names, answers, strict=True)
        _print_grid(console, [label_cells, room], lines)
        if is_wide:
            heads = [Text(name, style="bold") for name in names]
            widths = [label_cells, *(answer_cells for _ in names)]
            _print_grid(console, widths, [("", *heads), ("answer", *answers)])


def _mark_answers(answers: Sequence[str], longest: int, *, with_signs: bool) -> list[Text]:
    """Return answers with their differences marked: the first from the last, others from the first.

    ``with_signs``: in text, for a reader without styles.
    """
    marked = []
    for place, answer in enumerate(answers):
        other = answers[0] if place else answers[-1]
        text = Text()
        for part in mark_differences(answer, other, longest):
            shown = escape_line(part.text)
            style = ""
            if part.is_different and with_signs:
                shown = f"{{+{shown}+}}" if place else f"[-{shown}-]"
            elif part.is_different:
                style = DIFFERENT_STYLES[bool(place)]
            text.append(shown, style=style)
        marked.append(text)
    return marked


def _print_grid(
    console: Console, widths: Sequence[int], lines: Sequence[tuple[str | Text, ...]]
) -> None:
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for width in widths:
        grid.add_column(overflow="fold", width=width)
    for line in lines:
        grid.add_row(*line)
    console.print(grid)


def print_item(console: Console, matrix: ItemMatrix) -> None:
    """Print items in full."""
    names = [column.name for column in matrix.columns]
    for row in matrix.rows:
        console.print(Text(matrix.describe_row(row)), soft_wrap=True)
        for name, text in facts.list_row_parts(row, names):
            _print_block(console, name, text)
