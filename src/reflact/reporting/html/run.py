"""The page of a training run: what it achieved, which edits did it, and what the target answered."""

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
from reflact.records import IntervalEstimate, RunSummary, SkillScore, Spend, StepRecord, Usage
from reflact.reporting.html.page import (
    LiveBar,
    MarkStyle,
    PageSection,
    ScorePoint,
    TextLimit,
    break_key,
    build_column_table,
    build_document,
    build_figure,
    build_table,
    draw_estimates,
    draw_scores,
)
from reflact.reporting.html.run_details import (
    SCRIPT,
    build_changes_section,
    build_items_section,
    build_memory_section,
)
from reflact.reporting.lines import (
    ACTION_WORDS,
    escape_line,
    format_change,
    format_count,
    format_duration,
    format_score,
    name_count,
    shorten_middle,
)
from reflact.reporting.tables import (
    STEP_LEGEND,
    list_score_columns,
    list_step_columns,
    merge_equal_scores,
)
from reflact.reporting.verdict import (
    SPLIT_WORDS,
    describe_cost,
    describe_decisions,
    describe_gain,
    describe_score_name,
    describe_verdict,
    explain_doubt,
    format_cost,
    format_usd,
    list_gains,
)
from reflact.training.history import (
    RunHistory,
    VersionText,
    open_run,
    read_run,
    read_versions,
)
from reflact.types import (
    FrozenModel,
    Split,
    Verdict,
    canonical_json,
)

OTHER_BYTES = 300_000
"""The room for texts in a section without one of its own."""

MAX_STEPS, MAX_POINTS, MAX_ROWS, MAX_NAME_CHARS = 1_000, 400, 60, 200


class RunReport(FrozenModel):
    """What the page of a run shows: its history with items, its initial and best document if any.

    ``config`` is its configuration, as it is stored at the start.
    """

    history: RunHistory
    config: JsonValue = None
    baseline: VersionText | None = None
    best: VersionText | None = None


async def read_report(path: Path | str, run_id: str | None = None) -> RunReport:
    """Read the report of a run, which may be under way; arguments and errors are those of ``read_run``."""
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


def render_run_page(report: RunReport, *, live: LiveBar | None = None) -> str:
    """Return a run as one HTML document that needs no network and can be read without a script.

    Equal reports are equal documents. The page stays below 10 MB: it says what it leaves out. With ``live``, a server
    tells the page when there is something new.
    """
    history = report.history
    found = report.config if history.summary is None else history.summary.config
    config = found if isinstance(found, dict) else {}
    name = shorten_middle(escape_line(Path(str(config.get("out_dir", ""))).name), MAX_NAME_CHARS)
    return build_document(
        f"Run {escape_line(history.run_id)}{name and f' · {name}'}",
        [h.h1["Training of a skill", name and f" · {name}"], _build_verdict(history), _build_tiles(history)],
        (
            _build_scores_section(history),
            _build_test_section(history.summary),
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
    steps, run_id = name_count(len(history.steps), "step"), escape_line(history.run_id)
    if summary is None or history.is_open:
        note = f"Run {run_id}, started {history.created:%Y-%m-%d %H:%M} UTC"
        return h.div(".verdict")[
            h.p(".headline")[f"The run is under way: {steps} so far."],
            h.p[f"{note}."],
        ]
    limit = TextLimit(OTHER_BYTES)
    return h.div(class_=["verdict", _choose_tone(summary)])[
        h.p(".headline")[limit.fit(summary.verdict or describe_verdict(summary), 2_000)],
        h.p[f"Cost: {describe_cost(summary)}; {format_duration(summary.seconds)}."],
        h.p[
            f"Run {run_id}, started {history.created:%Y-%m-%d %H:%M} UTC, {summary.status}: "
            f"{describe_decisions(summary)}."
        ],
        [h.p[f"Warning: {limit.fit(warning, 1_000)}."] for warning in summary.warnings[:MAX_ROWS]],
    ]


def _build_tiles(history: RunHistory) -> h.Node:
    """Return the main figures of a run; nothing if it has not begun."""
    summary = history.summary
    spend = [entry for cost in history.costs for entry in cost.spend] if summary is None else summary.spend
    usage = sum((entry.usage for entry in spend), Usage())
    tiles = [("steps", f"{len(history.steps) if summary is None else summary.steps:,}")]
    if usage.calls:
        tiles += [
            ("calls", format_count(usage.calls)),
            ("tokens", format_count(usage.input_tokens + usage.output_tokens))
            if usage.usd is None
            else ("cost", format_cost(usage.calls, usage.usd)),
        ]
    if summary is not None:
        tiles.append(("time", format_duration(summary.seconds)))
    tiles = [*_list_score_tiles(history), *tiles]
    return h.dl(".tiles")[(h.div[h.dt[name], h.dd[figure]] for name, figure in tiles)]


def _list_score_tiles(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield the scores of the initial and the best skill; during a run, those of its gate."""
    summary = history.summary
    if summary is None:
        baseline, best = find_baseline(history), history.steps[-1].best if history.steps else None
        if baseline is not None:
            score = None if best is None or not best.number else best.score
            yield "validation score", format_change(baseline.score, score).replace("->", "→")
        return
    for split in (Split.test, Split.val):
        before, after = (summary.score(name, split) for name in ("baseline", "best"))
        if before is not None and after is not None and before.value is not None and after.value is not None:
            yield f"{SPLIT_WORDS[split]} score", f"{format_score(before.value)} → {format_score(after.value)}"


def find_baseline(history: RunHistory) -> events.BaselineMeasured | None:
    """Return the measurement of the initial skill, if it is done."""
    return next((event for event in history.events if isinstance(event, events.BaselineMeasured)), None)


def _choose_tone(summary: RunSummary) -> str | None:
    claim = summary.claim
    if summary.status == "failed" or (claim is not None and claim.improvement.high < 0):
        return "worse"
    return "better" if summary.status == "completed" and claim is not None and claim.confirmed else None


# ---------------------------------------------------------------------------------------- score by step


def _build_scores_section(history: RunHistory) -> PageSection:
    name, heading = "scores", "Score by step"
    points = [*_list_points(history)]
    if not points:
        return PageSection(name, heading, (h.p["Nothing is measured yet."],))
    others = [point for point in points if not point.accepted]
    every = -(-len(others) // MAX_POINTS)
    kept = {id(point) for point in others[:: max(every, 1)]}
    drawn = [point for point in points if point.accepted or id(point) in kept]
    current = _list_current_scores(history)
    charts = [
        draw_scores(f"scores-{size}", "Validation score", drawn, current, width=width)
        for size, width in (("narrow", 340), ("wide", 960))
    ]
    thinned = f" Of the documents that were not accepted, 1 of {every} is drawn." if every > 1 else ""
    caption = (
        "Filled diamonds are accepted documents, hollow circles others; vertical lines are 95% intervals. The line "
        f"is the current document. Best and final were selected by these scores.{thinned}"
    )
    return PageSection(
        name,
        heading,
        (
            h.figure[
                h.div(".narrow")[charts[0]],
                h.div(".wide")[charts[1]],
                h.figcaption[caption],
            ],
            _build_step_table(history.steps),
        ),
    )


def _list_points(history: RunHistory) -> Iterator[ScorePoint]:
    baseline = find_baseline(history)
    if baseline is not None:
        interval = wilson_interval(baseline.score * baseline.n, baseline.n) if baseline.n else None
        yield _build_point(0, "initial document", baseline.score, interval, accepted=True)
    decisions: list[tuple[float, str, Verdict]] = [
        (record.step, f"step {record.step}", record.verdict) for record in history.steps
    ]
    decisions += [
        (end.step + 0.5, f"slow update of epoch {end.epoch}", end.slow_update.verdict)
        for end in history.epochs
        if end.slow_update is not None and end.slow_update.verdict is not None
    ]
    for at, label, verdict in sorted(decisions, key=lambda decision: decision[0]):
        if verdict.candidate_score is not None:
            words = f"{label}, {ACTION_WORDS[verdict.action]}"
            yield _build_point(
                at,
                words,
                verdict.candidate_score,
                _estimate_interval(verdict),
                accepted=verdict.accepted,
            )


def _build_point(
    at: float,
    label: str,
    value: float,
    interval: tuple[float, float] | None,
    *,
    accepted: bool,
) -> ScorePoint:
    shown = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return ScorePoint(at, f"{label}: {value:.2f}{shown}", value, interval, accepted)


def _estimate_interval(verdict: Verdict) -> tuple[float, float] | None:
    """Return Wilson's interval of a candidate's score for the measured items."""
    score, measured = verdict.candidate_score, verdict.candidate
    if score is None or measured is None or not measured.n:
        return None
    trials = 1
    if verdict.ranked is not None:
        passes = [known for known in verdict.ranked.passes if known.skill_hash == measured.skill_hash]
        trials = max((known.trial + 1 for known in passes), default=1)
    n = max(measured.n // trials, 1)
    return wilson_interval(min(max(score, 0.0), 1.0) * n, n)


def _list_current_scores(history: RunHistory) -> list[tuple[float, float | None]]:
    ends = {end.step: end for end in history.epochs}
    baseline = find_baseline(history)
    scores: list[tuple[float, float | None]] = [] if baseline is None else [(0, baseline.score)]
    for record in history.steps:
        for at, found in ((record.step, record), (record.step + 0.5, ends.get(record.step))):
            if found is not None:
                scores.append((at, found.current.score))
    return scores


def _build_step_table(records: Sequence[StepRecord]) -> h.Node:
    if not records:
        return None
    limit = TextLimit(OTHER_BYTES)
    shown = records[-MAX_STEPS:]
    reasons = [limit.fit(record.verdict.veto or record.verdict.reason, 300) for record in shown]
    columns = {**list_step_columns(shown), "reason": reasons}
    left_out = len(records) - len(shown)
    return h.details[
        h.summary[f"All {name_count(len(records), 'step')} as a table"],
        left_out > 0 and h.p(".note")[f"The first {left_out:,} steps are left out."],
        build_column_table("Steps", columns, prose=("decision", "val", "reason")),
        h.p(".note")[f"{STEP_LEGEND.replace('val:', 'validation:')}."],
    ]


# -------------------------------------------------------------------------------------- cost and time


def _build_cost_section(history: RunHistory) -> PageSection:
    summary = history.summary
    parts = history.costs if summary is None else ()
    staged = [cost for cost in parts if cost.stage]
    spend = _sum_spend(
        [entry for cost in parts for entry in cost.spend] if summary is None else summary.spend
    )
    times = {cost.stage: 0.0 for cost in staged}
    for cost in staged:
        times[cost.stage] += cost.seconds
    if summary is not None:
        times = {stage.stage: stage.seconds for stage in summary.stages}
    seconds = sum(times.values())
    stages = [
        [
            escape_line(stage).replace("_", " "),
            format_duration(spent),
            f"{100 * spent / seconds:.0f}%" if seconds else "–",
        ]
        for stage, spent in sorted(times.items(), key=lambda item: -item[1])
    ]
    return PageSection(
        "cost",
        "Cost and time",
        (
            h.p["The run has not ended yet; these are its calls so far."]
            if summary is None
            else h.p[f"In total: {describe_cost(summary)}; {format_duration(summary.seconds)}."],
            _build_spend(spend),
            summary is not None and _build_faults(summary),
            bool(stages) and build_table("Time by stage", ("stage", "time", "share of all stages"), stages),
            bool(stages) and h.p(".note")["Stages may overlap."],
        ),
    )


def _sum_spend(spend: Sequence[Spend]) -> dict[str, Usage]:
    """Return the usage by role and purpose, in the order of the first entries."""
    usage: dict[str, Usage] = {}
    for entry in spend:
        if entry.usage.calls or entry.unsettled:
            name = shorten_middle(
                escape_line(f"{entry.role}: {entry.purpose}").replace("_", " "), MAX_NAME_CHARS
            )
            usage[name] = usage[name] + entry.usage if name in usage else entry.usage
    return usage


def _build_spend(usage: Mapping[str, Usage]) -> h.Node:
    if not usage:
        return h.p(".note")["Calls of models that were passed as objects are not counted."]
    columns = ("role and purpose", "calls", "tokens in", "of them cached", "tokens out", "cost")
    rows = [(name, *_list_usage(used)) for name, used in usage.items()]
    total = sum(usage.values(), Usage())
    return build_table("Calls by role", columns, [*rows, ("total", *_list_usage(total))])


def _build_faults(summary: RunSummary) -> h.Node:
    worst = sum((spend.worst_case for spend in summary.spend), Usage())
    tokens = worst.input_tokens + worst.output_tokens
    faults = ", ".join(f"{fault.count:,} x {fault.kind}" for fault in summary.faults)
    return [
        tokens > 0 and h.p(".note")[f"Unfinished or uncounted calls may have used {tokens:,} more tokens."],
        bool(faults) and h.p[f"Faults of calls: {escape_line(faults)}."],
    ]


def _list_usage(usage: Usage) -> tuple[str, ...]:
    counts = (usage.calls, usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    price = "unknown" if usage.usd is None else format_usd(usage.usd)
    return (*(f"{count:,}" for count in counts), price)


# ------------------------------------------------------------------------------------- the sealed test


def _build_test_section(summary: RunSummary | None) -> PageSection:
    name, heading = "test", "The sealed test"
    if summary is None:
        return PageSection(name, heading, (h.p["The test split stays sealed until the run ends."],))
    if not summary.scores:
        return PageSection(name, heading, (h.p["Nothing was measured at the end."],))
    test = [score for score in summary.scores if score.split is Split.test]
    val = [score for score in summary.scores if score.split is not Split.test]
    claim = summary.claim
    gains = [
        h.p[escape_line(describe_gain(gain.name.capitalize(), "baseline", gain)), "."]
        for gain in list_gains(summary)
    ]
    confirmed = claim is not None and (
        f"The gain of the best skill over the initial one is {'' if claim.confirmed else 'not '}confirmed: its 95% "
        f"interval {'lies' if claim.improvement.low > 0 else 'does not lie'} above 0.{explain_doubt(claim)}"
    )
    limit = TextLimit(OTHER_BYTES)
    critics = [critic for critic in (summary.critic, summary.annotated_by) if critic is not None]
    return PageSection(
        name,
        heading,
        (
            not test and h.p["There was no sealed test, so these scores are those of the validation items."],
            confirmed and h.p[confirmed],
            _build_score_charts([scores for scores in (test, val) if scores]),
            [_build_scores(scores) for scores in (test, val) if scores],
            gains,
            any(score.selected_on for score in val)
            and h.p(".note")[
                "Best and final were selected on the validation items: expect less on new ones."
            ],
            _build_task_types(test or val),
            [h.p[f"Not measured: {limit.fit(line, 1_000)}."] for line in summary.missing[:MAX_ROWS]],
            [h.p[f"A critic with {name_count(critic.pairs, 'pair')} was used."] for critic in critics],
        ),
    )


def _build_score_charts(splits: Sequence[Sequence[SkillScore]]) -> h.Node:
    charts = []
    for scores in splits:
        split = SPLIT_WORDS[scores[0].split].capitalize()
        marks: list[tuple[str, MarkStyle, IntervalEstimate]] = [
            (name, "after" if score.name in {"best", "final"} else "before", estimate)
            for name, score in _name_scores(scores)
            if (estimate := estimate_score(score)) is not None
        ]
        if marks:
            charts.append(draw_estimates(f"estimates-{scores[0].split.value}", f"{split} score", marks))
    return build_figure("Mean scores of documents, with 95% intervals.", *charts) if charts else None


def _name_scores(scores: Sequence[SkillScore]) -> list[tuple[str, SkillScore]]:
    return [(shorten_middle(name, MAX_NAME_CHARS), score) for name, score in merge_equal_scores(scores)]


def _build_scores(scores: Sequence[SkillScore]) -> h.Node:
    split = SPLIT_WORDS[scores[0].split].capitalize()
    columns: dict[str, Sequence[h.Node]] = {**list_score_columns(scores)}
    del columns["split"]
    columns["document"] = [
        [name, h.small[escape_line(describe_score_name(score))]] for name, score in _name_scores(scores)
    ]
    return build_column_table(f"{split} scores", columns)


def estimate_score(score: SkillScore) -> IntervalEstimate | None:
    """Return a score with its interval; None if it is not measured."""
    if score.hard is None or score.low is None or score.high is None:
        return None
    return IntervalEstimate(value=score.hard, low=score.low, high=score.high)


def _build_task_types(scores: Sequence[SkillScore]) -> h.Node:
    before, after = (
        {bucket.task_type: bucket for score in scores if score.name == name for bucket in score.buckets}
        for name in ("baseline", "best")
    )
    limit = TextLimit(OTHER_BYTES)
    types = [task_type for task_type in after if task_type in before]
    rows = [
        [
            limit.fit(task_type, 100),
            f"{after[task_type].n:,}",
            format_score(before[task_type].hard),
            format_score(after[task_type].hard),
        ]
        for task_type in types[:MAX_ROWS]
    ]
    left_out = len(types) - len(rows)
    return rows and [
        build_table("Scores by task type", ("task type", "answers", "baseline", "best"), rows),
        left_out > 0 and h.p(".note")[f"{left_out:,} more task types are left out."],
    ]


# -------------------------------------------------------------------------------------------- settings


def _build_settings_section(history: RunHistory, config: Mapping[str, JsonValue]) -> PageSection:
    summary = history.summary
    usual = dict(flatten_fields(TrainerConfig().model_dump(mode="json")))
    settings = dict(flatten_fields(dict(config)))
    chosen = {key: value for key, value in settings.items() if key not in usual or usual[key] != value}
    rest = {key: value for key, value in settings.items() if key not in chosen}
    version = None if summary is None else summary.version
    return PageSection(
        "settings",
        "Settings",
        (
            version is not None and h.p[f"Trained with reflact {escape_line(version)}."],
            _build_settings("Settings that differ from the defaults", chosen) if chosen else None,
            h.details[h.summary["All other settings"], _build_settings("Default settings", rest)],
        ),
    )


def _build_settings(caption: str, settings: Mapping[str, JsonValue]) -> h.Element:
    limit = TextLimit(OTHER_BYTES)
    rows: list[list[h.Node]] = [
        [
            break_key(limit.fit(key, 200)),
            limit.fit(value if isinstance(value, str) else canonical_json(value), 1_000),
        ]
        for key, value in settings.items()
    ]
    return build_table(caption, ("setting", "value"), rows, prose={1})
