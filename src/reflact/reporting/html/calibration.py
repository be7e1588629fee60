"""The page of a calibration: what was promoted, how good the critic is, and the evidence."""

from __future__ import annotations

import json

import htpy as h

from reflact.calibration.metrics import RIGHT_TOLERANCE, CriticMetrics
from reflact.calibration.report import (
    METRIC_DESCRIPTIONS,
    CalibrationReport,
    MetricsChange,
    describe_gain,
    describe_outcome,
    format_number,
    get_effect,
)
from reflact.calibration.splits import CALLER_HOLDOUT_NAME
from reflact.calibration.usage import PurposeUsage
from reflact.memory.cards import TOTAL_ALPHA
from reflact.memory.models import PromotionEvidence
from reflact.records import Usage
from reflact.reporting.html.page import (
    PageSection,
    build_document,
    build_figure,
    build_table,
    draw_reliability,
    draw_rounds,
    format_estimate,
)
from reflact.text import escape_controls, name_count

# Why a mistake that was asked for became no pair, in words.
DROP_MEANINGS = {
    "bad_reply": "The model gave no valid reply, although it was asked again if that is allowed.",
    "too_long": "The prompt exceeds the model's context.",
    "judged_wrong": "The judge did not prefer the right side in both orders.",
    "known": "The memory already had this pair.",
}


def render_calibration_page(report: CalibrationReport) -> str:
    """Return a calibration's report as one HTML document that needs no network and no script.

    Equal reports are equal documents. A report that was saved as JSON is read with
    ``CalibrationReport.model_validate_json``.
    """
    promoted = name_count(report.n_promoted, "pair") if report.n_promoted else "nothing"
    verdict = h.div(class_=["verdict", _choose_tone(report)])[
        h.p(".headline")[describe_result(report)], (h.p[note] for note in describe_context(report))
    ]
    return build_document(
        f"Calibration: {promoted} promoted",
        [h.h1["Calibration of a critic"], verdict],
        (
            _build_change_section(report),
            _build_reliability_section(report),
            _build_rounds_section(report),
            _build_tests_section(report),
            _build_pairs_section(report),
            _build_usage_section(report),
            _build_critic_section(report),
        ),
    )


# ----------------------------------------------------------------------------------------- the
# verdict


def describe_result(report: CalibrationReport) -> str:
    """Return in a sentence what was promoted and what that changed, or why nothing was."""
    if not report.tests:
        why = report.not_tested_reason or report.end_reason
        reason = "" if why is None else f": {escape_controls(why)}"
        return f"No batch was tested, so nothing was promoted{reason}."
    if not report.n_promoted:
        best = max(report.tests, key=lambda test: test.effect)
        tried = (
            "its one batch"
            if len(report.tests) == 1
            else f"the best of {len(report.tests)} batches"
        )
        return (
            f"Nothing was promoted: with {tried} the error {describe_gain(get_effect(best))} on "
            f"{name_count(best.n_traces, 'held-out trace')} "
            f"({escape_controls(describe_outcome(best))})."
        )
    pairs = name_count(report.n_promoted, "pair was", "pairs were")
    before = report.held_out.before
    after = report.held_out.after
    gain = report.held_out.gain
    if before is None or after is None or gain is None:
        return f"{pairs} promoted."
    chance = "; the interval includes no change" if gain.low <= 0 <= gain.high else ""
    return (
        f"{pairs} promoted, and on {name_count(before.n_traces, 'held-out trace')} the critic's "
        f"mean absolute error went from {format_number(before.error.value)} to "
        f"{format_number(after.error.value)}; averaged within each trace it "
        f"{describe_gain(gain)}{chance}."
    )


def describe_context(report: CalibrationReport) -> list[str]:
    """Return what has to be known to read the result, in sentences."""
    sentences = []
    if report.tests and report.not_tested_reason is not None:
        sentences.append(
            f"A further batch was not tested: {escape_controls(report.not_tested_reason)}."
        )
    if report.tests and report.end_reason is not None:
        sentences.append(f"There was no further round: {escape_controls(report.end_reason)}.")
    if report.n_promoted and report.anchors.gain is not None:
        sentences.append(
            "The held-out traces decided which pairs were promoted. On the anchors, which decided "
            f"nothing, the error {describe_gain(report.anchors.gain)}."
        )
    gain = report.held_out.gain
    if not report.n_promoted and gain is not None and gain.value:
        sentences.append(
            f"Between the two measurements the error on the held-out traces {describe_gain(gain)}, "
            "although no batch of this calibration was promoted: other pairs were promoted or "
            "demoted in the meantime."
        )
    after = report.held_out.after
    if after is not None:
        constant = after.constant
        verdict = (
            ", so it is no better than a constant" if after.error.value >= constant.error else ""
        )
        sentences.append(
            f"For scale: always answering {format_number(constant.progress)} would be off by "
            f"{format_number(constant.error)} points on the held-out steps, and the critic is off "
            f"by {format_number(after.error.value)}{verdict}."
        )
    return sentences


def _choose_tone(report: CalibrationReport) -> str | None:
    gain = report.held_out.gain
    if gain is None or gain.low <= 0 <= gain.high:
        return None
    return "better" if gain.low > 0 else "worse"


# ------------------------------------------------------------------------------------------ the
# critic


def _list_changes(
    report: CalibrationReport,
) -> list[tuple[str, MetricsChange, CriticMetrics, CriticMetrics]]:
    """Return what was measured before and after: its name, the change, and both measures."""
    return [
        (name, change, change.before, change.after)
        for name, change in (("Held-out traces", report.held_out), ("Anchors", report.anchors))
        if change.before is not None and change.after is not None
    ]


def _build_change_section(report: CalibrationReport) -> PageSection:
    tables = [_build_comparison(*measured) for measured in _list_changes(report)]
    missing = [
        report.held_out.before is None
        and h.p["No held-out step has a known score, a score before and a score after."],
        report.anchors.before is None
        and h.p(".note")["There are no anchors, which are labelled pairs that only measure."],
    ]
    return PageSection("change", "Before and after", (tables, missing))


def _build_comparison(
    heading: str, change: MetricsChange, before: CriticMetrics, after: CriticMetrics
) -> h.Node:
    rows = [
        [
            [name, h.small[note]],
            format_estimate(getattr(before, field)),
            format_estimate(getattr(after, field)),
            format_number(constant)
            if (constant := getattr(before.constant, field, None)) is not None
            else "–",
        ]
        for name, field, note in METRIC_DESCRIPTIONS
    ]
    caption = (
        f"{heading}: {name_count(before.n_traces, 'trace')}, "
        f"{name_count(before.n_transitions, 'step')}"
    )
    return [
        build_table(caption, ("figure", "before", "after", "constant"), rows),
        change.gain is not None
        and h.p[f"Averaged within each trace, the error {describe_gain(change.gain)}."],
        change.n_unscored > 0
        and h.p(".note")[
            f"Not included: {name_count(change.n_unscored, 'step')} without a valid score before "
            "or after."
        ],
        before.n_traces == 1
        and h.p(".note")["A single trace has no interval, so the whole scale is shown."],
    ]


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
        for n, (name, _, before, after) in enumerate(_list_changes(report))
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
        maximum=next(end for end in (1, 2, 4, 6, 8, 10) if end >= largest_error),
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
    figure = build_figure(note, accuracy_chart, error_chart)
    return PageSection("rounds", "Round by round", (figure, table))


# ---------------------------------------------------------------------------------------- the
# evidence


def _build_tests_section(report: CalibrationReport) -> PageSection:
    power = h.p[f"{escape_controls(report.power_summary)}."]
    untested = (
        report.not_tested_reason is not None
        and h.p[f"Not tested: {escape_controls(report.not_tested_reason)}."]
    )
    if not report.tests:
        return PageSection(
            "evidence", "The evidence", (untested or h.p["No batch was tested."], power)
        )
    chosen_by_caller = report.held_out_name == CALLER_HOLDOUT_NAME
    said = h.p[
        "Held-out steps were scored with the promoted pairs, and again with the batch. A batch "
        "passes if p is at most alpha and pairwise accuracy does not fall. All batches on the same "
        f"traces share an error probability of {TOTAL_ALPHA:.1%}. These traces: ",
        "given by the caller" if chosen_by_caller else escape_controls(report.held_out_name),
        ".",
    ]
    columns = (
        "batch",
        "outcome",
        "error falls by",
        "p",
        "alpha",
        "accuracy",
        "pairs",
        "traces",
        "steps",
    )
    rows = [_build_test_row(test) for test in report.tests]
    table = build_table("Every batch that was tested", columns, rows, prose={1})
    return PageSection("evidence", "The evidence", (said, table, untested, power))


def _build_test_row(test: PromotionEvidence) -> list[h.Node]:
    look = "good" if test.passed_test else "bad" if test.outcome == "worse" else None
    return [
        f"Batch {test.n_earlier_tests + 1}",
        h.span(class_=["outcome", look])[escape_controls(describe_outcome(test))],
        format_estimate(get_effect(test)),
        f"{test.p_value:.2g}",
        f"{test.alpha:.2g}",
        "–" if test.accuracy_change is None else f"{test.accuracy_change:+z.2f}",
        f"{len(test.pair_ids):,}",
        f"{test.n_traces:,}",
        f"{test.n_transitions:,}"
        + (f", {test.n_unscored:,} of them unscored" if test.n_unscored else ""),
    ]


def _build_pairs_section(report: CalibrationReport) -> PageSection:
    dropped = report.n_candidates - report.n_pairs
    said = (
        f"From {name_count(report.n_training_traces, 'trace')}, in "
        f"{name_count(report.n_rounds, 'round')}: {name_count(report.n_candidates, 'candidate')}, "
        f"of which {report.n_pairs:,} became pairs and {dropped:,} did not."
    )
    if report.n_quarantined:
        said += (
            f" The scan quarantined or rejected {report.n_quarantined:,} of the pairs; they "
            "are in no test."
        )
    if report.n_left_out:
        said += (
            f" The memory was full: {name_count(report.n_left_out, 'pair was', 'pairs were')} "
            "not made."
        )
    pairs = [[escape_controls(kind.mistake), f"{kind.n_pairs:,}"] for kind in report.pairs]
    drops = [
        [escape_controls(drop.reason), f"{drop.n_candidates:,}", DROP_MEANINGS.get(drop.reason, "")]
        for drop in report.dropped
    ]
    return PageSection(
        "pairs",
        "Pairs and drops",
        (
            h.p[said],
            pairs
            and build_table("Pairs by the mistake that they show", ("mistake", "pairs"), pairs),
            drops
            and build_table(
                "Candidates that became no pair",
                ("reason", "candidates", "meaning"),
                drops,
                prose={2},
            ),
        ),
    )


def _build_usage_section(report: CalibrationReport) -> PageSection:
    rows = [_build_usage_row(one) for one in report.usage_by_purpose]
    notes = [
        "Stored replies are counted like new ones. Calls that failed without a reply are not "
        "counted."
    ]
    if report.usage.usd is None:
        notes.append("No price is known for these calls.")
    if report.usage.uncounted:
        calls = name_count(report.usage.uncounted, "call")
        notes.append(f"The provider reported no tokens for {calls}.")
    columns = (
        "asked for",
        "questions",
        "unanswered",
        "invalid",
        "calls",
        "tokens in",
        "out",
        "USD",
    )
    total: list[h.Node] = [h.strong["all"], "", "", "", *_format_usage(report.usage)]
    return PageSection(
        "cost",
        "Cost",
        (
            build_table("Replies by role and purpose", columns, [*rows, total]),
            h.p(".note")[" ".join(notes)],
        ),
    )


def _build_usage_row(entry: PurposeUsage) -> list[h.Node]:
    counts = (entry.n_questions, entry.n_unanswered, entry.n_invalid)
    name = escape_controls(f"{entry.role}, {entry.purpose}")
    return [name, *(f"{count:,}" for count in counts), *_format_usage(entry.usage)]


def _format_usage(usage: Usage) -> tuple[str, ...]:
    counts = (usage.calls, usage.input_tokens, usage.output_tokens)
    return (
        *(f"{count:,}" for count in counts),
        "–" if usage.usd is None else format_number(usage.usd, 4),
    )


def _build_critic_section(report: CalibrationReport) -> PageSection:
    said = h.p["All scores were made with the prompt ", h.code[escape_controls(report.prompt)], "."]
    identity = h.pre[escape_controls(_indent_json(report.critic))]
    named = h.details[h.summary["Model and settings that identify this critic"], identity]
    return PageSection("critic", "Prompt, model and settings", (said, named))


def _indent_json(text: str) -> str:
    """Return a JSON object with a line for each value, and the model's, which is JSON in
    it, too.
    """
    try:
        found = json.loads(text)
        return json.dumps({**found, "llm": json.loads(found["llm"])}, indent=2, ensure_ascii=False)
    except (ValueError, TypeError, KeyError):
        return text
