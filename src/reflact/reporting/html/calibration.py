"""The page of a calibration: what it came to, how good the critic is, and on what evidence."""

from __future__ import annotations

import htpy as h

from reflact.calibration.report import CalibrationReport, PurposeUsage
from reflact.records import IntervalEstimate, Usage
from reflact.reporting.html.page import (
    PageSection,
    build_contents,
    build_document,
    build_facts,
    build_sections,
    build_table,
    escape_invisible,
    format_count,
    format_name,
    format_number,
)
from reflact.reporting.html.sections import (
    build_change_section,
    build_mistakes_section,
    build_pairs_section,
    build_reliability_section,
    build_rounds_section,
    build_tests_section,
    build_versions_section,
)
from reflact.reporting.html.wording import build_verdict

TERM_DEFINITIONS = (
    ("Score", "How far an agent's state has come towards its purpose: 0 is nothing of it, 10 all of it."),
    (
        "Known score",
        "What a program or a person says is right. What a critic's own samples agree on is no measure of it.",
    ),
    (
        "Held-out traces",
        "Traces that nothing was learned from. They chose what was promoted, so the gain that they show is a "
        "little flattered.",
    ),
    ("Anchors", "Pairs of known scores that are never learned from and choose nothing."),
    (
        "Contrast pair",
        "A right and a wrong evaluation of one step. Promoted pairs stand in its prompt as examples.",
    ),
    ("Bias", "The mean of score minus known score, after a step. Above 0 the critic inflates."),
    (
        "Pairwise accuracy",
        "How often states of one trace are ordered as their known scores order them, and how often the right "
        "side of a contrast pair is nearer than the wrong one. Ties count half.",
    ),
    ("Order consistency", "How often successive states are ordered alike within one score and across two."),
    (
        "Brier score and calibration error",
        "Of the critic's confidence, as the probability that its score is within one point of the known one.",
    ),
    ("Interval", "95%, in brackets, over resamples of whole traces, since steps of a trace are alike."),
    (
        "Constant",
        "What always giving the same answer would reach on these steps. A critic that is no better knows "
        "nothing of them.",
    ),
)


def render_calibration_page(report: CalibrationReport) -> str:
    """Return a calibration's report as one HTML document that needs no network and no script.

    It holds what the report holds and nothing else, so equal reports are equal documents. A report that was
    saved as JSON is read with ``CalibrationReport.model_validate_json``.
    """
    sections = (
        build_change_section(report),
        build_reliability_section(report),
        build_rounds_section(report),
        build_tests_section(report),
        build_pairs_section(report),
        build_mistakes_section(report),
        _power_section(report),
        _usage_section(report),
        build_versions_section(report),
        _terms_section(),
    )
    found = build_verdict(report)
    promoted = format_count(report.n_promoted, "pair") if report.n_promoted else "nothing"
    return build_document(
        f"Calibration: {promoted} promoted",
        h.header[
            h.h1["Calibration of a critic"],
            h.div(class_=["verdict", found.tone])[
                h.p(".headline")[found.headline], (h.p[words] for words in found.notes)
            ],
            _build_tiles(report),
            build_contents(sections),
        ],
        build_sections(sections),
    )


def _build_tiles(report: CalibrationReport) -> h.Element:
    before, after = report.held_out.before, report.held_out.after
    tiles: list[tuple[str, h.Node]] = []
    if before is not None and after is not None:
        tiles.append(("Mean absolute error", _format_change(before.error, after.error)))
        if before.accuracy is not None and after.accuracy is not None:
            tiles.append(("Pairwise accuracy", _format_change(before.accuracy, after.accuracy)))
        steps = format_count(before.n_transitions, "step")
        tiles.append(("Held-out traces", [f"{before.n_traces:,}", h.small[f"{steps} with a known score"]]))
    kept = sum(kind.n_pairs for kind in report.pairs)
    made = f"{kept:,} kept in {format_count(report.n_rounds, 'round')}"
    tiles.append(("Pairs promoted", [f"{report.n_promoted:,}", h.small[made]]))
    return build_facts(tiles, class_="tiles")


def _format_change(before: IntervalEstimate, after: IntervalEstimate) -> h.Node:
    return [
        h.span(".before")[format_number(before.value)],
        " → ",
        h.span(".after")[format_number(after.value)],
        h.small["held-out, before → after"],
    ]


def _power_section(report: CalibrationReport) -> PageSection:
    return PageSection(
        "outlook", "What these traces can show", (h.p[f"{escape_invisible(report.power_summary)}."],)
    )


def _usage_section(report: CalibrationReport) -> PageSection:
    taken = report.usage
    rows = [_usage_row(one) for one in report.usage_by_purpose]
    unpriced = "No price is known for these calls." if taken.usd is None else None
    uncounted = (
        f"The provider counted no tokens of {format_count(taken.uncounted, 'call')}."
        if taken.uncounted
        else None
    )
    columns = (
        "asked for",
        "questions",
        "unanswered",
        "refused",
        "calls",
        "tokens in",
        "out",
        "USD",
    )
    totals = [sum(counts) for counts in zip(*map(_count_cells, report.usage_by_purpose), strict=True)]
    shown = [f"{total:,}" for total in totals] or ["–"] * 3
    return PageSection(
        "cost",
        "What it took",
        (
            build_table(
                "Replies, by who asked and what for",
                columns,
                [*rows, [h.strong["all"], *shown, *_usage_cells(taken)]],
            ),
            h.p(".note")[
                "Replies that were found in the store count as if they had been asked for; calls that failed "
                "without a reply do not. ",
                unpriced,
                " ",
                uncounted,
            ],
        ),
    )


def _usage_row(entry: PurposeUsage) -> list[h.Node]:
    counts = (f"{count:,}" for count in _count_cells(entry))
    return [[format_name(entry.role), ", ", format_name(entry.purpose)], *counts, *_usage_cells(entry.usage)]


def _count_cells(entry: PurposeUsage) -> tuple[int, ...]:
    return entry.n_questions, entry.n_unanswered, entry.n_invalid


def _usage_cells(usage: Usage) -> tuple[h.Node, ...]:
    counts = (usage.calls, usage.input_tokens, usage.output_tokens)
    return (*(f"{count:,}" for count in counts), "–" if usage.usd is None else format_number(usage.usd, 4))


def _terms_section() -> PageSection:
    return PageSection("terms", "How to read this", (build_facts(TERM_DEFINITIONS),))
