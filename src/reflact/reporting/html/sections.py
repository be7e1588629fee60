"""The sections of a calibration's page that say on what evidence: tests, pairs, drops, models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

import htpy as h
from pydantic import JsonValue, TypeAdapter, ValidationError

from reflact.calibration.metrics import RIGHT_TOLERANCE, CriticMetrics, ErrorGroup, ReliabilityBin
from reflact.calibration.report import METRIC_DESCRIPTIONS, CalibrationReport, MetricsChange, capitalize_first
from reflact.calibration.splits import CALLER_HOLDOUT_NAME
from reflact.memory.cards import TOTAL_ALPHA
from reflact.memory.models import PromotionEvidence
from reflact.records import IntervalEstimate
from reflact.reporting.html.charts import (
    IntervalRow,
    MarkStyle,
    draw_intervals,
    draw_reliability,
    draw_rounds,
    find_limits,
)
from reflact.reporting.html.page import (
    PageSection,
    build_details,
    build_figure,
    build_table,
    escape_invisible,
    format_count,
    format_estimate,
    format_name,
    format_number,
)
from reflact.reporting.html.wording import describe_drop_reason, format_gain, format_outcome

OBJECT_ADAPTER: Final = TypeAdapter(dict[str, JsonValue])


MODEL_KEYS = ("llm", "llm.model")


"""If a critic's identity names its model: one that is only a name, or one with settings."""


MAX_DEPTH = 2


"""Names of settings have at most so many points in them."""


def build_tests_section(report: CalibrationReport) -> PageSection:
    """Return what every batch showed in its test, and what was decided."""
    name, heading = "evidence", "The evidence"
    untested = (
        report.not_tested_reason is not None
        and h.p[f"Not tested: {escape_invisible(report.not_tested_reason)}."]
    )
    if not report.tests:
        return PageSection(name, heading, (untested or h.p["No batch was tested."],))
    rows = [
        IntervalRow(
            _format_batch(test),
            IntervalEstimate(value=test.effect, low=test.low, high=test.high),
            _test_style(test),
        )
        for test in report.tests
    ]
    return PageSection(
        name,
        heading,
        (
            h.p[
                "The steps of held-out traces were scored with what was promoted, and with the batch too. A "
                "batch passes if p is at most alpha and pairwise accuracy holds. All batches on the same "
                f"traces share an error probability of {TOTAL_ALPHA:.1%}. These traces: ",
                "given by the caller"
                if report.held_out_name == CALLER_HOLDOUT_NAME
                else escape_invisible(report.held_out_name),
                ".",
            ],
            build_figure(
                "By how much each batch lowers the error, with its 95% interval. Right of the line it helps; "
                "a filled diamond was promoted.",
                draw_intervals("effects", "Effect of each batch, in points", rows, limits=find_limits(rows)),
            ),
            build_table(
                "Every batch that was tested",
                ("batch", "outcome", "error falls by", "p", "alpha", "accuracy", "pairs", "traces", "steps"),
                [_test_row(test) for test in report.tests],
                prose={1},
            ),
            untested,
            (
                build_details(
                    f"Pairs of {_format_batch(test).lower()}",
                    h.ul(".ids")[(h.li[h.code[escape_invisible(pair_id[:12])]] for pair_id in test.pair_ids)],
                )
                for test in report.tests
            ),
        ),
    )


def _format_batch(test: PromotionEvidence) -> str:
    return f"Batch {test.n_earlier_tests + 1}"


def _test_style(test: PromotionEvidence) -> MarkStyle:
    return "after" if test.passed_test else "before"


def _test_row(test: PromotionEvidence) -> list[h.Node]:
    accuracy = "–" if test.accuracy_change is None else f"{test.accuracy_change:+z.2f}".replace("-", "−")
    effect = IntervalEstimate(value=test.effect, low=test.low, high=test.high)
    return [
        _format_batch(test),
        h.span(class_=["outcome", _row_class(test)])[format_outcome(test)],
        format_estimate(effect),
        f"{test.p_value:.2g}",
        f"{test.alpha:.2g}",
        accuracy,
        *(f"{count:,}" for count in (len(test.pair_ids), test.n_traces)),
        f"{test.n_transitions:,}" + (f", {test.n_unscored:,} of them unscored" if test.n_unscored else ""),
    ]


def _row_class(test: PromotionEvidence) -> str | None:
    return "good" if test.passed_test else "bad" if test.outcome == "worse" else None


def build_pairs_section(report: CalibrationReport) -> PageSection:
    """Return what was made of the traces: pairs by kind, and candidates that became none."""
    kept = sum(kind.n_pairs for kind in report.pairs)
    dropped = sum(drop.n_candidates for drop in report.dropped)
    said = (
        f"From {format_count(report.n_training_traces, 'trace')}, in {format_count(report.n_rounds, 'round')}: "
        f"{format_count(report.n_candidates, 'candidate')}, of which {kept:,} became pairs and {dropped:,} did not."
    )
    held = (
        f" The scan holds back {report.n_quarantined:,} of the pairs; they are in no test."
        if report.n_quarantined
        else ""
    )
    if report.n_archived or report.n_left_out:
        held += (
            f" The memory was full: its bound put away {format_count(report.n_archived, 'pair')} before a test, and "
            f"nothing was made of {format_count(report.n_left_out, 'trace')}."
        )
    made: list[list[h.Node]] = [
        [format_name(kind.mistake), _format_count(kind.n_pairs, kept), _format_difficulty(kind.difficulty)]
        for kind in report.pairs
    ]
    drops: list[list[h.Node]] = [
        [
            format_name(drop.reason),
            _format_count(drop.n_candidates, dropped),
            describe_drop_reason(drop.reason),
        ]
        for drop in report.dropped
    ]
    return PageSection(
        "pairs",
        "What was made",
        (
            h.p[said + held],
            made
            and build_table(
                "Pairs by the mistake that they show", ("mistake", "pairs", "mean difficulty"), made
            ),
            any(kind.difficulty is not None for kind in report.pairs)
            and h.p(".note")[
                "Difficulty is the share of blind comparisons that took the wrong side for right."
            ],
            drops
            and build_table(
                "Candidates that became no pair", ("reason", "candidates", "meaning"), drops, prose={2}
            ),
            report.writer_stop_reason is not None
            and h.p[f"{escape_invisible(capitalize_first(report.writer_stop_reason))}."],
        ),
    )


def _format_count(count: int, total: int) -> h.Node:
    width = f"width: {100 * count / max(total, 1):.0f}%"
    return [f"{count:,}", h.span(".bar", aria_hidden="true")[h.span(style=width)]]


def _format_difficulty(difficulty: float | None) -> str:
    return "not compared" if difficulty is None else format_number(difficulty)


def build_versions_section(report: CalibrationReport) -> PageSection:
    """Return which critic was measured and tested: its prompt, its model, its settings."""
    parts = split_identity(report.critic)
    said = h.p[
        "All scores were made with the prompt ",
        h.code[escape_invisible(report.prompt)],
        *(
            h.fragment[" and the model ", h.code[escape_invisible(value)]]
            for name, value in parts
            if name in MODEL_KEYS
        ),
        ".",
    ]
    named = build_table(
        "The critic",
        ("setting", "value"),
        [[h.code[escape_invisible(name)], h.code[escape_invisible(value)]] for name, value in parts],
        prose={1},
    )
    return PageSection(
        "versions", "Prompt, model and settings", (said, build_details("All that names this critic", named))
    )


def split_identity(identity: str) -> list[tuple[str, str]]:
    """Return the parts of a critic's identity by their names, or the whole of it if it has none.

    An identity is JSON, and within it so is that of the model.
    """
    found = _parse_object(identity)
    return [("identity", identity)] if found is None else list(_flatten("", found))


def _flatten(prefix: str, values: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        below = _parse_object(value) if isinstance(value, str) else value
        if isinstance(below, dict) and prefix.count(".") < MAX_DEPTH:
            yield from _flatten(f"{prefix}{name}.", below)
        else:
            yield (
                f"{prefix}{name}",
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
            )


def _parse_object(text: str) -> dict[str, JsonValue] | None:
    try:
        return OBJECT_ADAPTER.validate_json(text)
    except ValidationError:
        return None


DIFFICULTY_ORDER = ("easy", "middle", "hard")


SIDE_NAMES = (("held-out", "Held-out traces"), ("anchors", "Anchors"))


def _list_changes(
    report: CalibrationReport,
) -> Iterator[tuple[str, str, MetricsChange, CriticMetrics, CriticMetrics]]:
    """Yield what was measured before and after: id, name, the change, and both measures."""
    for (name, heading), change in zip(SIDE_NAMES, (report.held_out, report.anchors), strict=True):
        if change.before is not None and change.after is not None:
            yield name, heading, change, change.before, change.after


def build_change_section(report: CalibrationReport) -> PageSection:
    """Return the critic before and after, on the held-out traces and on the anchors."""
    measured = list(_list_changes(report))
    rows = [(name, heading, _error_rows(before, after)) for name, heading, _, before, after in measured]
    ends = find_limits([row for *_, both in rows for row in both])
    missing = {name for name, _ in SIDE_NAMES} - {name for name, *_ in measured}
    return PageSection(
        "change",
        "Before and after",
        (
            bool(rows)
            and build_figure(
                "With 95% intervals; lower is better. The upright bar is the constant: what always giving "
                "the same answer would reach.",
                *(
                    draw_intervals(
                        f"error-{name}",
                        f"{heading}: mean absolute error",
                        both,
                        limits=ends,
                        reference_label="constant",
                    )
                    for name, heading, both in rows
                ),
            ),
            [
                _build_comparison(heading, change, before, after)
                for _, heading, change, before, after in measured
            ],
            "held-out" in missing
            and h.p[
                "No held-out step has a score that is known to be right and was scored before and after, so "
                "the critic was not measured on held-out traces."
            ],
            "anchors" in missing
            and h.p(".note")[
                "There are no anchors: gold pairs that are never learned from and choose nothing."
            ],
        ),
    )


def _error_rows(before: CriticMetrics, after: CriticMetrics) -> tuple[IntervalRow, IntervalRow]:
    return (
        IntervalRow("before", before.error, "before", before.constant.error),
        IntervalRow("after", after.error, "after", after.constant.error),
    )


def _build_comparison(
    heading: str, change: MetricsChange, before: CriticMetrics, after: CriticMetrics
) -> h.Node:
    constant = {
        "error": before.constant.error,
        "accuracy": before.constant.accuracy,
        "brier": before.constant.brier,
    }
    rows: list[list[h.Node]] = []
    for name, field, note in METRIC_DESCRIPTIONS:
        same = constant.get(field)
        was, now = getattr(before, field), getattr(after, field)
        shown = "–" if same is None else format_number(same)
        rows.append([[name, h.small[note]], format_estimate(was), format_estimate(now), shown])
    gain = change.gain
    caption = (
        f"{heading}: {format_count(before.n_traces, 'trace')}, {format_count(before.n_transitions, 'step')}"
    )
    return [
        build_table(caption, ("figure", "before", "after", "constant"), rows),
        gain is not None and h.p[f"Averaged within each trace, the error {format_gain(gain)}."],
        change.n_unscored > 0
        and h.p(".note")[
            f"In neither column: {format_count(change.n_unscored, 'step')} without a valid score before or after."
        ],
        before.n_traces == 1
        and h.p(".note")["Of a single trace nothing can be said; its intervals are the scale."],
    ]


def build_reliability_section(report: CalibrationReport) -> PageSection:
    """Return reliability diagrams, before and after."""
    charts = [
        build_figure(
            f"On the dashed line the critic is right as often as it is sure. Larger marks "
            f"are more steps; a score is right within {format_number(RIGHT_TOLERANCE, 0)} point of the known one.",
            draw_reliability(
                f"reliability-{name}-before", f"{heading}, before", before.reliability, look="before"
            ),
            draw_reliability(
                f"reliability-{name}-after", f"{heading}, after", after.reliability, look="after"
            ),
        )
        for name, heading, _, before, after in _list_changes(report)
    ]
    tables = [
        build_table(
            f"{heading}: bins of confidence",
            ("confidence", "steps", "mean", "right", "steps", "mean", "right"),
            _bin_rows(before.reliability, after.reliability),
        )
        for _, heading, _, before, after in _list_changes(report)
    ]
    nothing = h.p["Nothing was measured, so there is nothing to draw."]
    numbers = build_details(
        "The numbers: steps, mean confidence and share right, before and then after", tables
    )
    return PageSection(
        "reliability", "How sure it is, and how often right", (charts or nothing, tables and numbers)
    )


def _bin_rows(before: tuple[ReliabilityBin, ...], after: tuple[ReliabilityBin, ...]) -> list[list[h.Node]]:
    columns = [{(one.low, one.high): one for one in bins} for bins in (before, after)]
    return [
        [
            f"{format_number(low, 1)} to {format_number(high, 1)}",
            *(cell for bins in columns for cell in _bin_cells(bins.get((low, high)))),
        ]
        for low, high in sorted(columns[0].keys() | columns[1].keys())
    ]


def _bin_cells(reliability_bin: ReliabilityBin | None) -> tuple[h.Node, ...]:
    if reliability_bin is None:
        return "–", "–", "–"
    return (
        f"{reliability_bin.n_transitions:,}",
        format_number(reliability_bin.confidence),
        format_number(reliability_bin.right_share),
    )


def build_rounds_section(report: CalibrationReport) -> PageSection:
    """Return accuracy and error round by round, if more than one was measured."""
    course_of = report.metrics_by_round
    name, heading = "rounds", "Round by round"
    if len(course_of) < 2:
        made = format_count(report.n_rounds, "round was", "rounds were")
        said = f"{made} made, and the critic was not measured after any of them."
        return PageSection(name, heading, (h.p[said if report.n_rounds else "No round was made."],))
    accuracy, error = [one.accuracy for one in course_of], [one.error for one in course_of]
    most = max(one.high for one in error)
    charts = [
        draw_rounds(
            "rounds-error",
            "Mean absolute error",
            error,
            maximum=next(end for end in (1, 2, 4, 6, 8, 10) if end >= most),
            reference=course_of[-1].constant.error,
            reference_label="constant",
        )
    ]
    if any(one is not None for one in accuracy):
        known_as, guess = "guessing", course_of[-1].constant.accuracy
        charts.insert(
            0,
            draw_rounds(
                "rounds-accuracy",
                "Pairwise accuracy",
                accuracy,
                maximum=1,
                reference=guess,
                reference_label=known_as,
            ),
        )
    rows: list[list[h.Node]] = [
        [
            "before" if place == 0 else f"after round {place}",
            format_estimate(one.accuracy),
            format_estimate(one.error),
        ]
        for place, one in enumerate(course_of)
    ]
    caption = (
        "The critic on the held-out traces, before any round and after each that was tested; 95% intervals."
    )
    numbers = build_table(
        "Round by round, on the held-out traces", ("round", "pairwise accuracy", "error"), rows
    )
    return PageSection(name, heading, (build_figure(caption, *charts), build_details("The numbers", numbers)))


def build_mistakes_section(report: CalibrationReport) -> PageSection:
    """Return the error among steps that invite a mistake, and among pairs of each difficulty."""
    tables = [
        build_table(
            f"{heading}: {by}",
            (of, "steps", "error before", "after", "bias before", "after"),
            _group_rows(was, now),
        )
        for _, heading, _, before, after in _list_changes(report)
        for by, of, was, now in (
            ("by the mistake that a step invites", "mistake", before.by_mistake, after.by_mistake),
            ("by the difficulty of its pairs", "difficulty", before.by_difficulty, after.by_difficulty),
        )
        if was or now
    ]
    nothing = h.p[
        "None of the measured steps belongs to a contrast pair, so none is known to invite a mistake."
    ]
    return PageSection("kinds", "Where it errs", (tables or nothing,))


def _group_rows(before: tuple[ErrorGroup, ...], after: tuple[ErrorGroup, ...]) -> list[list[h.Node]]:
    was, now = ({group.name: group for group in groups} for groups in (before, after))
    return [
        [
            format_name(name),
            _format_steps(was.get(name), now.get(name)),
            *_error_cells(was.get(name), now.get(name)),
        ]
        for name in sorted(was.keys() | now.keys(), key=_group_sort_key)
    ]


def _group_sort_key(name: str) -> tuple[int, str]:
    return (DIFFICULTY_ORDER.index(name) if name in DIFFICULTY_ORDER else 0, name)


def _format_steps(before: ErrorGroup | None, after: ErrorGroup | None) -> str:
    counts = {f"{group.n_transitions:,}" for group in (before, after) if group is not None}
    return " / ".join(sorted(counts))


def _error_cells(before: ErrorGroup | None, after: ErrorGroup | None) -> Iterator[h.Node]:
    for field in ("error", "bias"):
        for group in (before, after):
            yield format_estimate(None if group is None else getattr(group, field))
