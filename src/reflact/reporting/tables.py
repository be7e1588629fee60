"""Tables of runs, steps, scores and items: their columns, which pages show too, and their form at a terminal."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from reflact.jsonutil import list_field_differences
from reflact.llm.pricing import CostEstimate
from reflact.records import (
    CodeFailure,
    ComparisonCategory,
    SkillScore,
    StageCost,
    StepRecord,
    Usage,
    sum_step_costs,
)
from reflact.reporting.lines import (
    describe_decision,
    escape_controls,
    escape_line,
    format_change,
    format_count,
    format_duration,
    format_score,
    shorten_middle,
)
from reflact.reporting.verdict import SCORE_NAMES, describe_gain, format_cost, format_usd
from reflact.stages.final_test import average_metrics
from reflact.training.history import RunComparison, RunListing, SettingDifference
from reflact.training.items import DocumentResult, ItemResult
from reflact.types import Score, Split

Columns = Mapping[str, Sequence[str]]
"""The cells of a table by the headings of its columns."""

UNMEASURED_NOTE = "* Not all items are measured."

CATEGORY_WORDS: dict[ComparisonCategory, str] = {
    "improved": "better",
    "regressed": "worse",
    "persistent_failure": "still wrong",
    "stable_success": "right under both",
}
TEXTS = ("input", "expected", "baseline", "best")
ID_CELLS, SCORE_CELLS, COST_CELLS, SEPARATOR_CELLS, INDENT_CELLS = 12, 12, 7, 8, 2
MIN_TEXT_CELLS, TEXT_LINES = 8, 2
"""The least width of a column of text, and the most lines of one of its cells."""

MAX_PIPED_CHARS = 400
"""The most characters of a text of an item in a file or a pipe."""


MAX_SETTING_CHARS = 80
"""The most characters of a setting's value in a comparison."""

IDENTITY_NAMES = {"data": "data (content)", "environment": "environment (identity)"}
"""Parts of a run's identity that are no settings, in words."""

CONTENT_HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,56}\b")
"""A hash; its first characters are enough to see that two differ."""

PROMPT_IDENTITY = re.compile(r"v\d+ [0-9a-f]{16}")
"""The version of a prompt and its hash."""

STEP_LEGEND = (
    "val: estimated score before the step -> that of its candidate;\n"
    "solved: train items of the step; edits: applied of chosen;\n"
    "skill: the version after the step"
)
"""What the columns of a table of steps mean, for people who see one for the first time."""

FULL_WIDTH = 1_000
"""The cells in which every table has room."""

MIN_FOLDED_CELLS = 8
"""The least width of a column whose cells may take several lines."""

MAX_WHOLE_CELLS = 20
"""The greatest width of such a column for which other columns are left out, so that its cells stay whole."""

LEFT_COLUMNS = ("step", "epoch", "decision", "document", "split", "sha-256", "folder", "run", "status")
"""Columns of words, and those that lead a row."""


@dataclass(frozen=True)
class FittedTable:
    """A table that leaves out columns on a narrow terminal, so that names and numbers stay whole.

    Args:
        columns: The heading and the cells of each column; those of the first are left-aligned.
        optional: Headings of columns that may be left out, the first one first.
        caption: A line below the table.
        folded: The heading of a column whose cells may take several lines; the table then has narrow gaps.
    """

    columns: Mapping[str, Sequence[str]]
    optional: Sequence[str]
    caption: str | None = None
    folded: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=FULL_WIDTH)
        names = self.columns.get(self.folded or "", ())
        least = max(MIN_FOLDED_CELLS, min(MAX_WHOLE_CELLS, max(map(cell_len, names), default=0)))
        for count in range(len(self.optional) + 1):
            hidden = self.optional[:count]
            width = Measurement.get(console, wide, self._build(hidden, folded_width=least)).maximum
            if width <= options.max_width:
                break
        yield self._build(hidden)

    def _build(self, hidden: Sequence[str], folded_width: int | None = None) -> Table:
        caption = None if self.caption is None else Text(self.caption)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption)
        table.caption_justify = "left"
        if self.folded is not None:
            table.padding, table.show_edge = 0, False
        shown = {heading: cells for heading, cells in self.columns.items() if heading not in hidden}
        for heading in shown:
            justify: Literal["left", "right"] = "left" if heading in LEFT_COLUMNS else "right"
            is_folded = heading == self.folded
            width = folded_width if is_folded else None
            table.add_column(
                Text(heading), justify=justify, no_wrap=not is_folded, overflow="fold", max_width=width
            )
        for row in zip(*shown.values(), strict=True):
            table.add_row(*map(Text, row))
        return table


def merge_equal_scores(scores: Sequence[SkillScore]) -> list[tuple[str, SkillScore]]:
    """Return scores with the names of their documents; best and final skill have one entry if they are the same."""
    best = {(score.split, score.skill_hash) for score in scores if score.name == "best"}
    final = {(score.split, score.skill_hash) for score in scores if score.name == "final"}
    named = []
    for score in scores:
        is_both = (score.split, score.skill_hash) in best & final
        name = "best, final" if is_both and score.name == "best" else SCORE_NAMES.get(score.name, score.name)
        if not (is_both and score.name == "final"):
            named.append((escape_line(name), score))
    return named


def list_score_columns(scores: Sequence[SkillScore], *, with_hash: bool = False) -> Columns:
    """Return the scores of documents on splits, each with its count and 95% interval."""
    named = merge_equal_scores(scores)

    def format_interval(score: SkillScore) -> str:
        return "-" if score.low is None else f"{format_score(score.low)} to {format_score(score.high)}"

    columns = {
        "document": [name for name, _ in named],
        "split": [score.split.value for _, score in named],
        "answers": [f"{score.n:,}" for _, score in named],
        "unmeasured": [f"{score.unmeasured:,}" for _, score in named],
        "solved": [f"{score.successes:g}" if score.n else "-" for _, score in named],
        "score": [format_score(score.hard) for _, score in named],
        "95% interval": [format_interval(score) for _, score in named],
        "soft score": [format_score(score.soft) for _, score in named],
        "sha-256": [score.skill_hash[:8] for _, score in named],
    }
    for metric in _list_metrics(scores):
        columns[f"mean {escape_line(metric)}"] = [_format_metric(score.metrics, metric) for _, score in named]
    if not any(score.unmeasured for score in scores):
        del columns["unmeasured"]
    if all(score.soft == score.hard for score in scores):
        del columns["soft score"]
    if not with_hash:
        del columns["sha-256"]
    return columns


def build_score_table(scores: Sequence[SkillScore], *, with_hash: bool = False) -> FittedTable:
    """Return the scores of documents as a table."""
    metrics = [f"mean {escape_line(metric)}" for metric in _list_metrics(scores)]
    optional = ("soft score", *metrics, "sha-256", "solved", "95% interval", "unmeasured")
    return FittedTable(list_score_columns(scores, with_hash=with_hash), optional)


def _list_metrics(scores: Sequence[SkillScore]) -> list[str]:
    return sorted({name for score in scores for name in score.metrics})


def _format_metric(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else "-"


def list_run_columns(runs: Sequence[RunListing], root: Path) -> Columns:
    """Return a list of runs; their folders are shown as below ``root``."""
    states = [run.status or ("measured" if run.measured and not run.steps else "open") for run in runs]
    return {
        "folder": [escape_line(shorten_path(run.folder, root)) for run in runs],
        "run": [escape_line(run.run_id) for run in runs],
        "status": [*states],
        "steps": [f"{run.steps:,}" for run in runs],
        "val": [format_score(run.val) for run in runs],
        "baseline": [format_score(run.baseline) for run in runs],
        "test": [format_score(run.test) for run in runs],
        "cost": [format_cost(run.calls, run.usd) for run in runs],
        "date": [f"{run.created:%Y-%m-%d}" for run in runs],
    }


def build_run_table(runs: Sequence[RunListing], root: Path) -> FittedTable:
    """Return a list of runs as a table."""
    optional = ("date", "cost", "steps", "status", "baseline")
    return FittedTable(list_run_columns(runs, root), optional, folded="folder")


def shorten_path(folder: str, root: Path) -> str:
    """Return the path of a folder as below ``root``, if it is there; ``root`` itself is shown by its name."""
    path = Path(folder)
    if path == root:
        return path.resolve().name or folder
    return str(path.relative_to(root)) if path.is_relative_to(root) else folder


def list_comparison_columns(comparison: RunComparison) -> Columns:
    """Return the runs of a comparison with the scores of their best skills, cost and time."""
    runs = comparison.runs
    return {
        "run": [escape_line(run.name) for run in runs],
        "status": [run.status or "open" for run in runs],
        "steps": [f"{run.steps:,}" for run in runs],
        "val": [_format_compared(run.val) for run in runs],
        "test": [_format_compared(run.test) for run in runs],
        "calls": [format_count(run.usage.calls) for run in runs],
        "cost": [format_cost(run.usage.calls, run.usage.usd) for run in runs],
        "time": ["-" if run.seconds is None else format_duration(run.seconds) for run in runs],
        "characters": [format_count(len(run.best.skill.text)) for run in runs],
    }


def _format_compared(score: SkillScore | None) -> str:
    return "-" if score is None else format_score(score.hard) + ("*" if score.unmeasured else "")


def build_comparison_table(comparison: RunComparison) -> FittedTable:
    """Return the runs of a comparison as a table."""
    scores = [score for run in comparison.runs for score in (run.val, run.test)]
    note = UNMEASURED_NOTE if any(score is not None and score.unmeasured for score in scores) else None
    optional = ("characters", "calls", "steps")
    return FittedTable(list_comparison_columns(comparison), optional, caption=note, folded="run")


def build_settings_table(comparison: RunComparison) -> Table:
    """Return the settings that differ, one line each, with the value of each run."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("setting", no_wrap=True)
    for run in comparison.runs:
        table.add_column(Text(escape_line(run.name)), overflow="fold")
    for key, values in list_setting_rows(comparison):
        cells = (Text(shorten_middle(escape_line(value), MAX_SETTING_CHARS)) for value in values)
        table.add_row(Text(escape_line(key)), *cells)
    return table


def list_setting_rows(comparison: RunComparison) -> list[tuple[str, tuple[str, ...]]]:
    """Return the settings that differ, each with the value of each run; hashes of contents are shortened.

    The identity of an environment that reflact made has a row for each of its fields that differs. It says nothing more
    than a setting of the environment that differs. Prompts have no rows; see ``describe_prompts``.
    """
    keys = [setting.key for setting in comparison.settings]
    explained = {"environment"} if any(key.startswith("environment.") for key in keys) else set()
    rows: list[tuple[str, tuple[JsonValue, ...]]] = []
    for setting in comparison.settings:
        if _is_prompt(setting):
            continue
        fields = list_field_differences(setting.values)
        if not fields:
            rows.append((IDENTITY_NAMES.get(setting.key, setting.key), setting.values))
        elif setting.key not in explained:
            rows += [(f"{setting.key} ({name})", values) for name, values in fields.items()]
    return [
        (key, tuple(CONTENT_HASH.sub(r"\1", format_setting(value)) for value in values))
        for key, values in rows
    ]


def describe_prompts(comparison: RunComparison) -> str | None:
    """Return which prompts differ between runs that use them, with their versions; None if none does."""
    names = []
    for setting in comparison.settings:
        texts = list(dict.fromkeys(str(value) for value in setting.values if value is not None))
        if _is_prompt(setting) and len(texts) > 1:
            versions = list(dict.fromkeys(text.partition(" ")[0] for text in texts))
            how = "another text" if len(versions) == 1 else " and ".join(versions)
            names.append(f"{setting.key.removeprefix('prompts.')} ({how})")
    return f"prompts differ: {', '.join(names)}" if names else None


def _is_prompt(setting: SettingDifference) -> bool:
    """Whether a difference is one of a prompt, and so of hashes."""
    return setting.key.startswith("prompts.") and any(
        PROMPT_IDENTITY.fullmatch(str(value)) for value in setting.values
    )


def format_setting(value: JsonValue) -> str:
    """Return a setting's value: a text as it is, a list of texts with commas, anything else as JSON; a dash if there is none."""
    if value is None:
        return "-"
    texts = [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
    return ", ".join(texts) if texts and texts == value else format_value(value)


def list_gain_lines(comparison: RunComparison) -> Iterator[str]:
    """Yield the gain of each further run over the first one, and why scores cannot be compared, if so."""
    first, *others = (run.name for run in comparison.runs)
    yield from (describe_gain(gain.name, first, gain, "common item") for gain in comparison.gains)
    identities = next((setting.values for setting in comparison.settings if setting.key == "environment"), ())
    graders = [_read_grader(identity) for identity in identities] or [None] * len(comparison.runs)
    for name, grader in zip(others, graders[1:], strict=True):
        if all(gain.name != name for gain in comparison.gains):
            yield (
                f"{name} and {first} have no measured items in common; the usual reason is other data, another "
                "split (data.ratio) or other ids (data.fields.id)"
            )
        elif grader != graders[0]:
            noun = "environments" if grader in identities or graders[0] in identities else "graders"
            yield f"{name} and {first} have different {noun}, so their difference may come from the {noun}"


def _read_grader(identity: JsonValue) -> JsonValue:
    """Return the grader in the identity of an environment; the identity of an environment that names none."""
    with suppress(ValueError):
        found = json.loads(str(identity))
        return found["grader"] if isinstance(found, dict) and "grader" in found else identity
    return identity


def list_step_columns(records: Sequence[StepRecord]) -> Columns:
    """Return the columns of a run's committed steps."""
    verdicts = [record.verdict for record in records]
    return {
        "step": [f"{record.step:,}" for record in records],
        "epoch": [f"{record.epoch}" for record in records],
        "decision": [describe_decision(verdict) for verdict in verdicts],
        "val": [format_change(verdict.current_score, verdict.candidate_score) for verdict in verdicts],
        "solved": [f"{r.rollout.n - r.n_failures}/{r.rollout.n}" for r in records],
        "edits": [f"{sum(e.status == 'applied' for e in r.edits)}/{len(r.edits)}" for r in records],
        "skill": [f"v{record.current.number}" for record in records],
    }


def build_step_table(records: Sequence[StepRecord]) -> FittedTable:
    """Return a run's committed steps as a table."""
    optional = ("epoch", "edits", "solved", "skill")
    return FittedTable(list_step_columns(records), optional, caption=STEP_LEGEND)


def build_cost_table(costs: Sequence[StageCost]) -> Table:
    """Return the calls, tokens, dollars and time of each step, one line each; step 0 is the baseline."""
    steps = sum_step_costs(costs)
    priced, cut = any(cost.usage.usd is not None for cost in steps), any(cost.unsettled for cost in steps)
    table = Table("step", box=box.SIMPLE_HEAD, pad_edge=False)
    optional = (*(("interrupted",) if cut else ()), *(("dollars",) if priced else ()))
    for heading in ("calls", "tokens in", "tokens out", *optional, "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in steps:
        usage = cost.usage
        table.add_row(
            str(cost.step) if cost.step else "baseline",
            f"{usage.calls:,}",
            f"{usage.input_tokens:,}",
            f"{usage.output_tokens:,}",
            *((f"{cost.unsettled:,}",) if cut else ()),
            *(("-" if usage.usd is None else format_usd(usage.usd),) if priced else ()),
            format_duration(cost.seconds),
        )
    return table


def build_estimate_table(estimate: CostEstimate) -> Table:
    """Return a table of the likely calls and tokens and, if priced, US dollars."""
    priced = any(row.usd is not None for row in estimate.rows)
    table = Table("role", "calls for", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("calls", "tokens", *(("dollars",) if priced else ())):
        table.add_column(heading, justify="right", no_wrap=True)

    def add_row(role: str, purpose: str, calls: float, tokens: float, usd: float | None) -> None:
        price = "-" if usd is None else format_usd(usd)
        counts = (format_count(round(calls)), format_count(round(tokens)))
        table.add_row(role, purpose.replace("_", " "), *counts, *((price,) if priced else ()))

    for row in estimate.rows:
        add_row(row.role, row.purpose, row.calls, row.input_tokens + row.output_tokens, row.usd)
    calls = math.fsum(row.calls for row in estimate.rows)
    tokens = math.fsum(row.input_tokens + row.output_tokens for row in estimate.rows)
    table.add_section()
    add_row("all", "", calls, tokens, estimate.usd)
    return table


# ----------------------------------------------------------------------------------------------- items


def choose_items(
    items: Sequence[ItemResult], *, wrong: bool = False, changed: bool = False
) -> tuple[ItemResult, ...]:
    """Return the items that the best document gets wrong, or whose score it changed, or both."""
    return tuple(
        item
        for item in items
        if not (wrong and not item.wrong) and not (changed and item.category not in {"improved", "regressed"})
    )


def build_item_table(items: Sequence[ItemResult], *, width: int, is_terminal: bool = True) -> RenderableType:
    """Return a table of items for a width in cells.

    Each item has a row if its texts fit into it, otherwise a row for each text. At a terminal, a text that needs more
    than ``TEXT_LINES`` lines loses its middle. In a file or a pipe, no row is folded: each text has one line of at most
    ``MAX_PIPED_CHARS`` characters, however wide that is.
    """
    priced = any(_find_price(item) is not None for item in items)
    free = (width - ID_CELLS - SCORE_CELLS - COST_CELLS - SEPARATOR_CELLS) // len(TEXTS)
    cells = max(free, MIN_TEXT_CELLS)
    rows = [(item, [escape_line(text) for text in _list_texts(item)]) for item in items]
    metrics = [format_metrics(item) for item in items]
    longest = max((cell_len(text) for _, texts in rows for text in texts), default=0)
    is_wide = any(metrics) or any(cell_len(escape_line(item.item_id)) > ID_CELLS for item in items)
    if longest > (TEXT_LINES * cells if is_terminal else free) or (is_wide and not is_terminal):
        return _build_stacked_table(rows, width=width if is_terminal else None, priced=priced)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("item", max_width=ID_CELLS, overflow="fold")
    for name in TEXTS:
        table.add_column(name, max_width=cells, overflow="fold")
    table.add_column("score", justify="right", max_width=SCORE_CELLS)
    if any(metrics):
        table.add_column("metrics", overflow="fold")
    table.add_column("cost" if priced else "tokens", justify="right", max_width=COST_CELLS)
    for (item, texts), measured in zip(rows, metrics, strict=True):
        shown = (Text(text) for text in (escape_line(item.item_id), *texts))
        between = [Text(measured)] if any(metrics) else []
        table.add_row(*shown, format_scores(item), *between, _format_cost(item, priced=priced))
    return table


def _build_stacked_table(
    rows: Sequence[tuple[ItemResult, Sequence[str]]], *, width: int | None, priced: bool
) -> RenderableType:
    """Return a line for each text, in a table of a width, or without one as lines that nothing wraps."""
    labels = max(map(len, TEXTS)) + INDENT_CELLS + 2
    longest = MAX_PIPED_CHARS if width is None else TEXT_LINES * max(width - labels, MIN_TEXT_CELLS)
    lines: list[tuple[str, Text]] = []
    for item, texts in rows:
        cost = f"{_format_cost(item, priced=priced)}{'' if priced else ' tokens'}"
        word = "not measured under both" if item.category is None else CATEGORY_WORDS[item.category]
        heading = f"{escape_line(item.item_id)}  {format_scores(item)}, {word}, {cost}"
        measured = format_metrics(item).replace("\n", ", ")
        named = (*zip(TEXTS, texts, strict=True), *([("metrics", measured)] if measured else []))
        lines.append(("item", Text(heading, style="bold")))
        lines += [
            (f"{' ' * INDENT_CELLS}{name}", Text(shorten_middle(text, longest))) for name, text in named
        ]
    if width is None:
        return Group(*(Text(f"{label:<{labels}}").append_text(text) for label, text in lines))
    table = Table.grid()
    table.add_column(no_wrap=True, width=labels)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(Text(label), text)
    return table


def _list_texts(item: ItemResult) -> tuple[str, ...]:
    answers = (_format_answer(item.baseline), _format_answer(item.best))
    return (format_value(item.input), format_value(item.expected), *answers)


def list_item_lines(item: ItemResult) -> Iterator[str]:
    """Yield an item in full: input, expected answer, and each document's conversations, scores and costs."""
    kind = "" if item.task_type is None else f", {item.task_type}"
    words = "" if item.category is None else f": {CATEGORY_WORDS[item.category]}"
    yield escape_controls(f"{item.item_id} ({item.split.value}{kind}){words}")
    yield from _list_block("input", format_value(item.input))
    if item.expected is not None:
        yield from _list_block("expected", format_value(item.expected))
    for name, result in (("baseline", item.baseline), ("best", item.best)):
        usage = "" if result.usage is None else f", {_format_usage(result.usage)}"
        if not result.rollouts:
            yield from _list_block(name, f"not measured: {result.error or 'no stored rollout'}")
        for number, rollout in enumerate(result.rollouts, start=1):
            trial = f", trial {number}" if len(result.rollouts) > 1 else ""
            heading = f"{name}{trial}, score {describe_score(rollout.score)}{usage if number == 1 else ''}"
            yield from _list_block(heading, rollout.answer)
            if len(rollout.turns) > 2:
                for turn in rollout.turns:
                    yield from _list_block(f"  {turn.role}", turn.content)


def list_failure_lines(failure: CodeFailure) -> Iterator[str]:
    """Yield an exception of the caller's own code with its traceback."""
    where = f"step {failure.step}" + ("" if failure.item_id is None else f", item {failure.item_id}")
    yield from _list_block(escape_line(f"exception in {where}"), failure.traceback)


def summarize_items(items: Sequence[ItemResult], split: Split) -> str:
    """Return how many items of a split are better, worse, still wrong, and right under both documents."""
    counts = Counter(item.category for item in items)
    words = [f"{counts[category]} {word}" for category, word in CATEGORY_WORDS.items()]
    words += [f"{counts[None]} not measured under both"] if counts[None] else []
    return f"{len(items)} {split.value} items: {', '.join(words)}"


def format_value(value: JsonValue) -> str:
    """Return a text as it is, nothing for None, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def format_scores(item: ItemResult) -> str:
    """Return the hard scores under both documents, such as ``0 -> 1``."""
    before, after = ("-" if r.hard is None else f"{r.hard:.2g}" for r in (item.baseline, item.best))
    return f"{before} -> {after}"


def describe_score(score: Score | None) -> str:
    """Return a score with all that is not its hard part in brackets, such as ``1 (soft 0.5, seconds 3.2)``."""
    if score is None:
        return "-"
    soft = [("soft", score.soft)] if score.soft != score.hard else []
    further = ", ".join(f"{escape_line(name)} {value:.4g}" for name, value in [*soft, *score.metrics.items()])
    return f"{score.hard:.3g} ({further})" if further else f"{score.hard:.3g}"


def format_metrics(item: ItemResult) -> str:
    """Return the further numbers under both documents, a line for each, such as ``seconds 3.2 -> 1.5``."""
    before, after = (average_metrics(result.rollouts) for result in (item.baseline, item.best))
    names = sorted({*before, *after})
    return "\n".join(
        f"{escape_line(name)} {_format_metric(before, name)} -> {_format_metric(after, name)}"
        for name in names
    )


def _list_block(heading: str, text: str) -> Iterator[str]:
    yield f"{heading}:"
    yield from (f"    {line}" for line in escape_controls(text).split("\n"))


def _format_answer(result: DocumentResult) -> str:
    return result.answer if result.answer is not None else f"({result.error or 'not measured'})"


def _find_price(item: ItemResult) -> float | None:
    usages = [result.usage for result in (item.baseline, item.best) if result.usage is not None]
    prices = [usage.usd for usage in usages if usage.usd is not None]
    return sum(prices) if prices else None


def _format_cost(item: ItemResult, *, priced: bool) -> str:
    if priced:
        price = _find_price(item)
        return "-" if price is None else f"${price:.4f}"
    usages = [result.usage for result in (item.baseline, item.best) if result.usage is not None]
    return format_count(sum(u.input_tokens + u.output_tokens for u in usages)) if usages else "-"


def _format_usage(usage: Usage) -> str:
    price = "" if usage.usd is None else f", ${usage.usd:.4f}"
    return f"{usage.input_tokens:,} tokens in, {usage.output_tokens:,} out{price}"
