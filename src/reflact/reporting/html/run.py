"""The page of a training run: what it achieved, which edits did it, and what the target
answered.
"""

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
from reflact.records import IntervalEstimate, SkillScore, Spend, Usage
from reflact.reporting import facts
from reflact.reporting.history import RunHistory, VersionText, open_run, read_run, read_versions
from reflact.reporting.html import page
from reflact.reporting.html.details import (
    SCRIPT,
    build_changes_section,
    build_items_section,
    build_memory_section,
)
from reflact.text import escape_line, format_count, format_duration, name_count, shorten
from reflact.types import FrozenModel, Split, Verdict, canonical_json

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
    return page.build_document(
        f"Run {escape_line(history.run_id)}{suffix}",
        [h.h1[f"Training of a skill{suffix}"], _build_verdict(history)],
        (
            _build_scores_section(history),
            _build_test_section(history),
            build_changes_section(history, report.baseline, report.best),
            build_items_section(history.items, history.items_note),
            *([build_memory_section(history.epochs)] if history.epochs else []),
            _build_cost_section(history),
            _build_settings_section(history, config),
        ),
        script=SCRIPT,
        live=live,
    )


def _build_verdict(history: RunHistory) -> h.Element:
    summary = history.summary
    note = f"Run {escape_line(history.run_id)}, started {history.created:%Y-%m-%d %H:%M} UTC"
    if summary is None or history.is_open:
        steps = name_count(len(history.steps), "step")
        return h.div(".verdict")[
            h.p(".headline")[f"The run is under way: {steps} so far."], h.p[f"{note}."]
        ]
    fact = facts.ResultFact(summary=summary)
    limit = page.TextLimit(OTHER_BYTES)
    return h.div(class_=["verdict", fact.tone])[
        h.p(".headline")[limit.fit(summary.verdict or fact.verdict, 2_000)],
        h.p[f"Cost: {fact.cost}."],
        h.p[f"{note}, {summary.status}: {fact.decisions}."],
        [h.p[f"Warning: {limit.fit(warning, 1_000)}."] for warning in summary.warnings[:MAX_ROWS]],
    ]


def _list_spend(history: RunHistory) -> Sequence[Spend]:
    if history.summary is not None:
        return history.summary.spend
    return [entry for cost in history.costs for entry in cost.spend]


def _find_baseline(history: RunHistory) -> events.BaselineMeasured | None:
    """Return the measurement of the initial skill, if it is done."""
    return next(
        (event for event in history.events if isinstance(event, events.BaselineMeasured)), None
    )


# ---------------------------------------------------------------------------------------- score by
# step


def _build_scores_section(history: RunHistory) -> page.PageSection:
    points = list(_list_points(history))
    if not points:
        return page.PageSection("scores", "Score by step", (h.p["Nothing is measured yet."],))
    chart = page.draw_scores(
        "scores-chart",
        "Validation score",
        points[-MAX_STEPS:],
        _list_current_scores(history)[-MAX_STEPS:],
    )
    caption = (
        "Filled diamonds are accepted documents, hollow circles others; vertical lines are 95% "
        "intervals. The line is the current document. Best and final were selected by these scores."
    )
    left_out = max(len(history.steps) - MAX_STEPS, 0)
    content = (
        h.figure(".wide")[chart, h.figcaption[caption]],
        left_out > 0 and h.p(".note")[f"The first {left_out:,} steps are left out."],
        bool(history.steps) and _build_steps(history),
    )
    return page.PageSection("scores", "Score by step", content)


def _build_steps(history: RunHistory) -> h.Element:
    shown = history.steps[-MAX_STEPS:]
    limit = page.TextLimit(OTHER_BYTES)
    reasons = [limit.fit(record.verdict.veto or record.verdict.reason, 300) for record in shown]
    columns = {
        **facts.list_step_columns([facts.StepFact.of(record) for record in shown]),
        "reason": reasons,
    }
    return h.details[
        h.summary[f"All {name_count(len(history.steps), 'step')} as a table"],
        page.build_column_table("Steps", columns, prose=("decision", "val", "reason")),
        h.p(".note")[f"{facts.STEP_LEGEND.replace('val:', 'validation:')}."],
    ]


def _list_points(history: RunHistory) -> Iterator[page.ScorePoint]:
    baseline = _find_baseline(history)
    if baseline is not None:
        interval = wilson_interval(baseline.score * baseline.n, baseline.n) if baseline.n else None
        yield _build_point(0, "initial document", baseline.score, interval, "after")
    judged: list[tuple[float, str, Verdict]] = [
        (record.step, f"step {record.step}", record.verdict) for record in history.steps
    ]
    judged += [
        (end.step + 0.5, f"slow update of epoch {end.epoch}", end.verdict)
        for end in history.epochs
        if end.verdict is not None
    ]
    for at, label, verdict in sorted(judged, key=lambda entry: entry[0]):
        if verdict.candidate_score is not None:
            words = f"{label}, {facts.ACTION_WORDS[verdict.action]}"
            interval = _estimate_interval(verdict)
            look: page.MarkStyle = "after" if verdict.accepted else "before"
            yield _build_point(at, words, verdict.candidate_score, interval, look)


def _build_point(
    at: float, label: str, value: float, interval: tuple[float, float] | None, look: page.MarkStyle
) -> page.ScorePoint:
    shown = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return page.ScorePoint(at, f"{label}: {value:.2f}{shown}", value, interval, look)


def _estimate_interval(verdict: Verdict) -> tuple[float, float] | None:
    """Return Wilson's interval of a candidate's score for the measured items."""
    measured = verdict.candidate
    if verdict.candidate_score is None or measured is None or not measured.n:
        return None
    n_trials = 1
    if verdict.ranked is not None:
        own = [
            known.trial
            for known in verdict.ranked.passes
            if known.skill_hash == measured.skill_hash
        ]
        n_trials = max(own, default=0) + 1
    n = max(measured.n // n_trials, 1)
    return wilson_interval(min(max(verdict.candidate_score, 0.0), 1.0) * n, n)


def _list_current_scores(history: RunHistory) -> list[tuple[float, float | None]]:
    ends = {end.step: end for end in history.epochs}
    baseline = _find_baseline(history)
    scores: list[tuple[float, float | None]] = [] if baseline is None else [(0, baseline.score)]
    for record in history.steps:
        scores.append((record.step, record.current.score))
        if record.step in ends:
            scores.append((record.step + 0.5, ends[record.step].current.score))
    return scores


# -------------------------------------------------------------------------------------- cost and
# time


def _build_cost_section(history: RunHistory) -> page.PageSection:
    summary = history.summary
    state = "The run has not ended yet; these are its calls so far."
    if summary is not None:
        state = f"In total: {facts.ResultFact(summary=summary).cost}."
    times: dict[str, float] = {}
    for cost in history.costs:
        if cost.stage:
            times[cost.stage] = times.get(cost.stage, 0.0) + cost.seconds
    rows = []
    for stage, seconds in sorted(times.items(), key=lambda item: -item[1]):
        share = 100 * seconds / (sum(times.values()) or 1.0)
        rows.append(
            (escape_line(stage).replace("_", " "), format_duration(seconds), f"{share:.0f}%")
        )
    content = (
        h.p[state],
        _build_spend(_list_spend(history)),
        bool(rows)
        and page.build_table("Time by stage", ("stage", "time", "share of all stages"), rows),
        bool(rows) and h.p(".note")["Stages may overlap."],
    )
    return page.PageSection("cost", "Cost and time", content)


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
    columns = {
        "role and purpose": list(usage),
        "calls": [f"{used.calls:,}" for used in usage.values()],
        "tokens in": [format_count(used.input_tokens) for used in usage.values()],
        "of them cached": [format_count(used.cached_tokens) for used in usage.values()],
        "tokens out": [format_count(used.output_tokens) for used in usage.values()],
        "cost": [facts.SpendFact(usage=used).price for used in usage.values()],
    }
    return page.build_column_table("Calls by role", columns)


# ------------------------------------------------------------------------------------- the sealed
# test


def _build_test_section(history: RunHistory) -> page.PageSection:
    name = "test"
    heading = "The sealed test"
    summary = history.summary
    if summary is None:
        return page.PageSection(
            name, heading, (h.p["The test split stays sealed until the run ends."],)
        )
    if not summary.scores:
        return page.PageSection(name, heading, (h.p["Nothing was measured at the end."],))
    splits = [
        [score for score in summary.scores if score.split is split]
        for split in (Split.test, Split.val)
    ]
    measured = [scores for scores in splits if scores]
    notes = [
        note
        for note in facts.ResultFact(summary=summary).list_notes()
        if not note.startswith("warning")
    ]
    limit = page.TextLimit(OTHER_BYTES)
    content = (
        not splits[0]
        and h.p["There was no sealed test, so these scores are those of the validation items."],
        _build_score_charts(measured),
        [_build_scores(scores) for scores in measured],
        h.ul[(h.li[limit.fit(note, 1_000)] for note in notes[:MAX_ROWS])],
    )
    return page.PageSection(name, heading, content)


def _build_score_charts(splits: Sequence[Sequence[SkillScore]]) -> h.Node:
    charts = []
    for scores in splits:
        split = scores[0].split
        marks: list[tuple[str, page.MarkStyle, IntervalEstimate]] = []
        for name, score in facts.name_scores(scores):
            estimate = facts.estimate_score(score)
            if estimate is not None:
                look: page.MarkStyle = "after" if score.name in {"best", "final"} else "before"
                marks.append((shorten(name, MAX_NAME_CHARS), look, estimate))
        if marks:
            title = f"{facts.SPLIT_WORDS[split].capitalize()} score"
            charts.append(page.draw_estimates(f"estimates-{split.value}", title, marks))
    return (
        page.build_figure("Mean scores of documents, with 95% intervals.", *charts)
        if charts
        else None
    )


def _build_scores(scores: Sequence[SkillScore]) -> h.Node:
    columns: dict[str, Sequence[h.Node]] = {**facts.list_score_columns(scores)}
    del columns["split"]
    columns["document"] = [
        [shorten(name, MAX_NAME_CHARS), h.small[escape_line(facts.describe_document(score))]]
        for name, score in facts.name_scores(scores)
    ]
    return page.build_column_table(
        f"{facts.SPLIT_WORDS[scores[0].split].capitalize()} scores", columns
    )


# --------------------------------------------------------------------------------------------
# settings


def _build_settings_section(
    history: RunHistory, config: Mapping[str, JsonValue]
) -> page.PageSection:
    usual = dict(flatten_fields(TrainerConfig().model_dump(mode="json")))
    settings = dict(flatten_fields(dict(config)))
    chosen = {
        key: value for key, value in settings.items() if key not in usual or usual[key] != value
    }
    rest = {key: value for key, value in settings.items() if key not in chosen}
    version = None if history.summary is None else history.summary.version
    content = (
        version is not None and h.p[f"Trained with reflact {escape_line(version)}."],
        bool(chosen) and _build_settings("Settings that differ from the defaults", chosen),
        h.details[h.summary["All other settings"], _build_settings("Default settings", rest)],
    )
    return page.PageSection("settings", "Settings", content)


def _build_settings(caption: str, settings: Mapping[str, JsonValue]) -> h.Element:
    limit = page.TextLimit(OTHER_BYTES)
    rows: list[list[h.Node]] = []
    for key, value in settings.items():
        text = value if isinstance(value, str) else canonical_json(value)
        rows.append([page.break_key(limit.fit(key, 200)), limit.fit(text, 1_000)])
    return page.build_table(caption, ("setting", "value"), rows, prose={1})
