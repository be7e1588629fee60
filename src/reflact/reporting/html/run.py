"""The page of a run: what it achieved, which edits did it, and what the target answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import htpy as h
from pydantic import JsonValue

from reflact import events
from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.gate.intervals import wilson_interval
from reflact.jsonutil import flatten_fields
from reflact.records import SkillScore, Spend, Usage
from reflact.reporting import facts
from reflact.reporting.history import RunHistory, VersionText, open_run, read_run, read_versions
from reflact.reporting.html import page
from reflact.reporting.html.details import (
    SCRIPT,
    build_changes_section,
    build_items_section,
    build_memory_section,
)
from reflact.text import escape_line, format_value, name_count, shorten
from reflact.types import FrozenModel, Split, Verdict

# The room for texts in a section without one of its own.
OTHER_BYTES = 300_000

MAX_STEPS = 1_000
MAX_ROWS = 60
MAX_NAME_CHARS = 200


class RunReport(FrozenModel):
    """What the page of a run shows: its history with items, its initial and best document if any.

    ``config`` is its configuration, as it is stored at the start.
    """

    history: RunHistory
    config: JsonValue = None
    baseline: VersionText | None = None
    best: VersionText | None = None


async def read_report(path: Path | str, run_id: str | None = None) -> RunReport:
    """Read the report of a run, which may be under way; arguments and errors are those of
    ``read_run``.
    """
    try:
        history = await read_run(path, run_id, items=True)
    except UsageError as error:  # nothing is measured yet; another reason is raised again
        history = await read_run(path, run_id)
        history = history.model_copy(update={"items_note": str(error)})
    async with open_run(path, history.run_id) as (_, row):
        report = RunReport(history=history, config=row.config)
    if not history.versions:
        return report
    baseline, best = await read_versions(path, ("baseline", "best"), history.run_id)
    return report.model_copy(update={"baseline": baseline, "best": best})


def render_run_page(report: RunReport, *, live: page.LiveBar | None = None) -> str:
    """Return a run as one HTML document that needs no network and can be read without a script.

    Equal reports are equal documents. The page stays below 10 MB: it says what it leaves out. With
    ``live``, a server tells the page when there is something new.
    """
    history = report.history
    stored = report.config if history.summary is None else history.summary.config
    config = stored if isinstance(stored, dict) else {}
    name = shorten(escape_line(Path(str(config.get("out_dir", ""))).name), MAX_NAME_CHARS)
    suffix = f" · {name}" if name else ""
    sections = [
        _build_scores_section(history),
        _build_test_section(history),
        build_changes_section(history, report.baseline, report.best),
        build_items_section(history.items, history.items_note),
        _build_cost_section(history),
        _build_settings_section(history, config),
    ]
    if history.epochs:
        sections.insert(4, build_memory_section(history.epochs))
    return page.build_document(
        f"Run {escape_line(history.run_id)}{suffix}",
        [h.h1[f"Training of a skill{suffix}"], _build_verdict(history)],
        sections,
        script=SCRIPT,
        live=live,
    )


def _build_verdict(history: RunHistory) -> h.Element:
    summary = history.summary
    note = f"Run {escape_line(history.run_id)}, started {history.created:%Y-%m-%d %H:%M} UTC"
    if summary is None or history.is_open:
        steps = name_count(len(history.steps), "step")
        headline = h.p(".headline")[f"The run is under way: {steps} so far."]
        return h.div(".verdict")[headline, h.p[f"{note}."]]
    fact = facts.ResultFact(summary=summary)
    limit = page.TextLimit(OTHER_BYTES)
    return h.div(class_=["verdict", fact.tone])[
        h.p(".headline")[limit.fit(summary.verdict or fact.verdict, 2_000)],
        h.p[f"Cost: {fact.cost}."],
        h.p[f"{note}, {summary.status}: {fact.decisions}."],
        [h.p[f"Warning: {limit.fit(warning, 1_000)}."] for warning in summary.warnings[:MAX_ROWS]],
    ]


# ----------------------------------------------------------------------------------- score by step


def _build_scores_section(history: RunHistory) -> page.PageSection:
    points = list(_list_points(history))
    if not points:
        return page.PageSection("scores", "Score by step", (h.p["Nothing is measured yet."],))
    chart = page.draw_series(
        "scores-chart",
        "Validation score",
        points[-MAX_STEPS:],
        [(0, points[0].value), *((r.step, r.current.score) for r in history.steps)][-MAX_STEPS:],
        unit="step",
    )
    caption = (
        "Filled diamonds are accepted documents, hollow circles others; vertical lines are 95% "
        "intervals. The line is the current document. Best and final were selected by these scores."
    )
    left_out = len(history.steps) - MAX_STEPS
    content = (
        page.build_figure(caption, chart),
        left_out > 0 and h.p(".note")[f"The first {left_out:,} steps are left out."],
        bool(history.steps) and _build_steps(history),
    )
    return page.PageSection("scores", "Score by step", content)


def _build_steps(history: RunHistory) -> h.Element:
    limit = page.TextLimit(OTHER_BYTES)
    rows = []
    for record in history.steps[-MAX_STEPS:]:
        reason = limit.fit(record.verdict.veto or record.verdict.reason, 300)
        rows.append({**facts.StepFact.of(record).row, "reason": reason})
    return h.details[
        h.summary[f"All {name_count(len(history.steps), 'step')} as a table"],
        page.build_row_table("Steps", rows, prose=("decision", "val", "reason")),
        h.p(".note")[f"{facts.STEP_LEGEND.replace('val:', 'validation:')}."],
    ]


def _list_points(history: RunHistory) -> Iterator[page.ScorePoint]:
    """Yield the measured documents: the initial one first, then those of steps, then of epochs."""
    for event in history.events:
        if isinstance(event, events.BaselineMeasured):
            yield _build_point(0, "initial document", event.score, event.n, is_accepted=True)
    judged: list[tuple[float, str, Verdict | None]] = [
        *((record.step, f"step {record.step}", record.verdict) for record in history.steps),
        *((e.step + 0.5, f"slow update of epoch {e.epoch}", e.verdict) for e in history.epochs),
    ]
    for at, label, verdict in judged:
        if verdict is not None and verdict.candidate_score is not None:
            words = f"{label}, {facts.ACTION_WORDS[verdict.action]}"
            n = _count_items(verdict)
            score = verdict.candidate_score
            yield _build_point(at, words, score, n, is_accepted=verdict.accepted)


def _count_items(verdict: Verdict) -> int:
    """Return how many items a candidate's score covers; several trials of an item count once."""
    measured = verdict.candidate
    if measured is None:
        return 0
    passes = () if verdict.ranked is None else verdict.ranked.passes
    trials = [each.trial for each in passes if each.skill_hash == measured.skill_hash]
    return measured.n // (max(trials, default=0) + 1)


def _build_point(
    at: float, label: str, score: float, n: int, *, is_accepted: bool
) -> page.ScorePoint:
    label = f"{label}: {score:.2f}"
    look: page.MarkStyle = "after" if is_accepted else "before"
    if not n:
        return page.ScorePoint(at, label, score, None, look)
    low, high = wilson_interval(min(max(score, 0.0), 1.0) * n, n)
    return page.ScorePoint(at, f"{label} [{low:.2f}, {high:.2f}]", score, (low, high), look)


# --------------------------------------------------------------------- the test, cost and settings


def _build_test_section(history: RunHistory) -> page.PageSection:
    summary = history.summary
    heading = "The sealed test"
    if summary is None:
        sealed = h.p["The test split stays sealed until the run ends."]
        return page.PageSection("test", heading, (sealed,))
    limit = page.TextLimit(OTHER_BYTES)
    tables = []
    for split in (Split.test, Split.val):
        scores = [score for score in summary.scores if score.split is split]
        if scores:
            tables.append(_build_scores(scores))
    has_test = any(score.split is Split.test for score in summary.scores)
    notes = list(facts.ResultFact(summary=summary).list_notes())[:MAX_ROWS]
    content = (
        not summary.scores and h.p["Nothing was measured at the end."],
        bool(tables)
        and not has_test
        and h.p["There was no sealed test, so these scores are those of the validation items."],
        tables,
        bool(notes) and h.ul[(h.li[limit.fit(note, 1_000)] for note in notes)],
    )
    return page.PageSection("test", heading, content)


def _build_scores(scores: Sequence[SkillScore]) -> h.Node:
    rows: list[dict[str, h.Node]] = []
    named = facts.name_scores(scores)
    for (name, score), row in zip(named, facts.list_score_rows(scores), strict=True):
        del row["split"]
        words = h.small[escape_line(facts.describe_document(score))]
        rows.append({**row, "document": [shorten(name, MAX_NAME_CHARS), words]})
    split = facts.SPLIT_WORDS[scores[0].split].capitalize()
    return page.build_row_table(f"{split} scores", rows)


def _build_cost_section(history: RunHistory) -> page.PageSection:
    summary = history.summary
    if summary is None:
        state = "The run has not ended yet; these are its calls so far."
        spend = [entry for cost in history.costs for entry in cost.spend]
    else:
        state = f"In total: {facts.ResultFact(summary=summary).cost}."
        spend = [*summary.spend]
    return page.PageSection("cost", "Cost and time", (h.p[state], _build_spend(spend)))


def _build_spend(spend: Sequence[Spend]) -> h.Node:
    usage: dict[str, Usage] = {}
    for entry in spend:
        if entry.usage.calls or entry.unsettled:
            name = escape_line(f"{entry.role}: {entry.purpose}").replace("_", " ")
            name = shorten(name, MAX_NAME_CHARS)
            usage[name] = usage[name] + entry.usage if name in usage else entry.usage
    if not usage:
        return h.p(".note")["Calls of models that were passed as objects are not counted."]
    usage["total"] = sum(usage.values(), Usage())
    rows = [{"role and purpose": n, **facts.build_usage_row(used)} for n, used in usage.items()]
    return page.build_row_table("Calls by role", rows)


def _build_settings_section(
    history: RunHistory, config: Mapping[str, JsonValue]
) -> page.PageSection:
    usual = dict(flatten_fields(TrainerConfig().model_dump(mode="json")))
    limit = page.TextLimit(OTHER_BYTES)
    rows: list[list[h.Node]] = []
    for key, value in flatten_fields(dict(config)):
        if key not in usual or usual[key] != value:
            text = limit.fit(format_value(value), 1_000)
            rows.append([page.break_key(limit.fit(key, 200)), text])
    caption = "Settings that differ from the defaults"
    content: list[h.Node] = []
    if history.summary is not None:
        content.append(h.p[f"Trained with reflact {escape_line(history.summary.version or '')}."])
    if rows:
        content.append(page.build_table(caption, ("setting", "value"), rows, prose={1}))
    return page.PageSection("settings", "Settings", tuple(content))
