"""The page of a calibration: what was promoted, how good the critic is, and the evidence.

Its sentences and figures are those of the terminal; ``calibration.report`` words them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import htpy as h

from reflact.calibration.metrics import RIGHT_TOLERANCE, CriticMetrics
from reflact.calibration.report import (
    CalibrationReport,
    MetricsChange,
    build_metric_table,
    compare_with_constant,
    describe_consumption,
    format_estimate,
    format_number,
    list_change_lines,
    list_pair_lines,
    list_power_lines,
    list_test_lines,
)
from reflact.reporting.html.charts import draw_reliability, draw_rounds
from reflact.reporting.html.page import PageSection, build_document, build_figure, build_table
from reflact.text import escape_controls, name_count

# The ends that the axis of errors may have, in points.
ERROR_AXIS_ENDS = (1, 2, 4, 6, 8, 10)


def render_calibration_page(report: CalibrationReport) -> str:
    """Return a calibration's report as one HTML document that needs no network and no script.

    Equal reports are equal documents. A report that was saved as JSON is read with
    ``CalibrationReport.model_validate_json``.
    """
    promoted = name_count(report.n_promoted, "pair") if report.n_promoted else "nothing"
    title = f"Calibration: {promoted} promoted"
    verdict = h.div(class_=["verdict", _choose_tone(report)])[
        h.p(".headline")[f"{promoted} promoted."],
        _build_paragraphs(_list_verdict_lines(report)),
    ]
    return build_document(
        title,
        [h.h1["Calibration of a critic"], verdict],
        (
            _build_change_section(report),
            _build_reliability_section(report),
            _build_rounds_section(report),
            PageSection(
                "evidence",
                "The evidence",
                (
                    _build_paragraphs(list_test_lines(report) or ["No batch was tested."]),
                    _build_paragraphs(list_power_lines(report)),
                ),
            ),
            PageSection("pairs", "Pairs and drops", (_build_paragraphs(list_pair_lines(report)),)),
            PageSection("cost", "Cost", (h.p[describe_consumption(report)],)),
            _build_critic_section(report),
        ),
    )


def _build_paragraphs(lines: Iterable[str]) -> list[h.Node]:
    return [h.p[escape_controls(line)] for line in lines]


def _choose_tone(report: CalibrationReport) -> str | None:
    gain = report.held_out.gain
    if gain is None or not report.n_promoted or gain.low <= 0 <= gain.high:
        return None
    return "better" if gain.low > 0 else "worse"


def _list_verdict_lines(report: CalibrationReport) -> tuple[str, ...]:
    """Return what changed if it is claimed, and else only how good the critic is."""
    after = report.held_out.after
    if report.n_promoted or after is None:
        return list_change_lines(report.held_out)
    return (compare_with_constant(after),)


def _list_measured(
    report: CalibrationReport,
) -> list[tuple[str, MetricsChange, CriticMetrics, CriticMetrics]]:
    """Return what was measured before and after: its name, the change, and both measures."""
    return [
        (name, change, change.before, change.after)
        for name, change in (("Held-out traces", report.held_out), ("Anchors", report.anchors))
        if change.before is not None and change.after is not None
    ]


def _build_change_section(report: CalibrationReport) -> PageSection:
    content: list[h.Node] = []
    for name, change, before, after in _list_measured(report):
        figures = build_metric_table(name, before, after)
        rows = [
            [[row.name, h.small[row.note]], row.before, row.after, row.constant]
            for row in figures.rows
        ]
        content.append(
            build_table(figures.caption, ("figure", "before", "after", "constant"), rows)
        )
        content += _build_paragraphs(list_change_lines(change))
    nothing = h.p["Nothing was measured."]
    return PageSection("change", "Before and after", (content or nothing,))


def _build_reliability_section(report: CalibrationReport) -> PageSection:
    charts = [
        build_figure(
            "On the dashed line, confidence equals the share of right scores. Larger marks are "
            f"more steps; a score is right within {format_number(RIGHT_TOLERANCE, 0)} point of the "
            "known one.",
            draw_reliability(
                f"reliability-{n}-before", f"{name}, before", before.reliability, look="before"
            ),
            draw_reliability(
                f"reliability-{n}-after", f"{name}, after", after.reliability, look="after"
            ),
        )
        for n, (name, _, before, after) in enumerate(_list_measured(report))
    ]
    nothing = h.p["Nothing was measured."]
    return PageSection("reliability", "Confidence and right scores", (charts or nothing,))


def _build_rounds_section(report: CalibrationReport) -> PageSection:
    measured = report.metrics_by_round
    if len(measured) < 2:
        made = name_count(report.n_rounds, "round was", "rounds were")
        words = f"{made} made, and the critic was not measured after any of them."
        return PageSection("rounds", "Round by round", (h.p[words],))
    constant = measured[-1].constant
    largest_error = max(one.error.high for one in measured)
    accuracy_chart = draw_rounds(
        "rounds-accuracy",
        "Pairwise accuracy",
        [one.accuracy for one in measured],
        maximum=1,
        reference=constant.accuracy,
        reference_label="guessing",
    )
    error_chart = draw_rounds(
        "rounds-error",
        "Mean absolute error",
        [one.error for one in measured],
        maximum=next(end for end in ERROR_AXIS_ENDS if end >= largest_error),
        reference=constant.error,
        reference_label="constant",
    )
    rows = [
        [
            f"after round {n}" if n else "before",
            format_estimate(one.accuracy),
            format_estimate(one.error),
        ]
        for n, one in enumerate(measured)
    ]
    caption = "Round by round, on the held-out traces"
    table = build_table(caption, ("round", "pairwise accuracy", "mean absolute error"), rows)
    note = f"{caption}: before any round, and after each that was tested."
    return PageSection(
        "rounds", "Round by round", (build_figure(note, accuracy_chart, error_chart), table)
    )


def _build_critic_section(report: CalibrationReport) -> PageSection:
    prompt = h.p[
        "All scores were made with the prompt ", h.code[escape_controls(report.prompt)], "."
    ]
    identity = h.pre[escape_controls(_indent_json(report.critic))]
    named = h.details[h.summary["Model and settings that identify this critic"], identity]
    return PageSection("critic", "Prompt, model and settings", (prompt, named))


def _indent_json(text: str) -> str:
    """Return a JSON object with a line for each value, and the model's, which is JSON in
    it, too.
    """
    try:
        identity = json.loads(text)
        model = json.loads(identity["llm"])
        return json.dumps({**identity, "llm": model}, indent=2, ensure_ascii=False)
    except (ValueError, TypeError, KeyError):
        return text
