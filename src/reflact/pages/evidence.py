"""The sections of a calibration's page that say on what evidence: tests, pairs, drops, models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

import htpy as h
from pydantic import JsonValue, TypeAdapter, ValidationError

from reflact.calibration.holding import CALLER_HOLDOUT_NAME
from reflact.calibration.results import CalibrationReport
from reflact.calibration.words import capitalize_first
from reflact.memory import PromotionEvidence
from reflact.memory_cards import TOTAL_ALPHA
from reflact.pages.charts import IntervalRow, MarkStyle, draw_intervals, find_limits
from reflact.pages.frame import (
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
from reflact.pages.verdict import describe_drop_reason, format_outcome
from reflact.results import IntervalEstimate

OBJECT_ADAPTER: Final = TypeAdapter(dict[str, JsonValue])
MODEL_KEYS = ("llm", "llm.model")
"""Where a critic's identity names its model: one that is only a name, or one with settings."""

MAX_DEPTH = 2
"""Names of settings have at most so many points in them."""


def build_tests_section(report: CalibrationReport) -> PageSection:
    """Return what every batch showed in its test, and what was decided."""
    name, heading = "evidence", "The evidence"
    untested = report.not_tested_reason is not None and h.p[f"Not tested: {escape_invisible(report.not_tested_reason)}."]
    if not report.tests:
        return PageSection(name, heading, (untested or h.p["No batch was tested."],))
    rows = [
        IntervalRow(_format_batch(test), IntervalEstimate(value=test.effect, low=test.low, high=test.high), _test_style(test))
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
                "given by the caller" if report.held_out_name == CALLER_HOLDOUT_NAME else escape_invisible(report.held_out_name),
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
    held = f" The scan holds back {report.n_quarantined:,} of the pairs; they are in no test." if report.n_quarantined else ""
    if report.n_archived or report.n_left_out:
        held += (
            f" The memory was full: its bound put away {format_count(report.n_archived, 'pair')} before a test, and "
            f"nothing was made of {format_count(report.n_left_out, 'trace')}."
        )
    made: list[list[h.Node]] = [
        [format_name(kind.mistake), _format_count(kind.n_pairs, kept), _format_difficulty(kind.difficulty)] for kind in report.pairs
    ]
    drops: list[list[h.Node]] = [
        [format_name(drop.reason), _format_count(drop.n_candidates, dropped), describe_drop_reason(drop.reason)]
        for drop in report.dropped
    ]
    return PageSection(
        "pairs",
        "What was made",
        (
            h.p[said + held],
            made
            and build_table("Pairs by the mistake that they show", ("mistake", "pairs", "mean difficulty"), made),
            any(kind.difficulty is not None for kind in report.pairs)
            and h.p(".note")[
                "Difficulty is the share of blind comparisons that took the wrong side for right."
            ],
            drops
            and build_table(
                "Candidates that became no pair", ("reason", "candidates", "meaning"), drops, prose={2}
            ),
            report.writer_stop_reason is not None and h.p[f"{escape_invisible(capitalize_first(report.writer_stop_reason))}."],
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
        *(h.fragment[" and the model ", h.code[escape_invisible(value)]] for name, value in parts if name in MODEL_KEYS),
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
    """Return the parts of a critic's identity by their names, or the whole of it where it has none.

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
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parse_object(text: str) -> dict[str, JsonValue] | None:
    try:
        return OBJECT_ADAPTER.validate_json(text)
    except ValidationError:
        return None
