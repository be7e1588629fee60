"""The page of a calibration: whole, self-contained, safe, and with the report's numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration_reports import NOTHING, everything, evidence, hostile, measures
from html_page import Node, assert_named, assert_self_contained, read, tables
from reflact.calibration.asked import DropReason
from reflact.calibration.report import OUTCOME_TEXTS, CalibrationReport, DropCount, MetricsChange
from reflact.calibration.significance import ReplayTestOutcome
from reflact.prompts import find_data_folder
from reflact.records import IntervalEstimate
from reflact.reporting.html.calibration import (
    DROP_MEANINGS,
    describe_context,
    describe_result,
    render_calibration_page,
)

MARKUP = (
    "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\"'&amp;{{7*7}}{% x %}${y}\x1b[31m\u202e"
)


RECORDED = (find_data_folder("calibration") / "report.json").read_bytes()
ONE_TRACE = MetricsChange(before=measures(1, traces=1), after=measures(1, traces=1), gain=None)
REPORTS = {
    "everything": everything(),
    "nothing": NOTHING,
    "hostile": hostile(MARKUP),
    "recorded": CalibrationReport.model_validate_json(RECORDED),
    "one trace": NOTHING.model_copy(update={"held_out": ONE_TRACE}),
}
each_report = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)


def page_of(report: CalibrationReport) -> Node:
    """Return the elements of a report's page."""
    return read(render_calibration_page(report))


def shown(estimate: IntervalEstimate | None) -> str:
    """Return a figure as a table shows it."""
    if estimate is None:
        return "–"
    figures = (estimate.value, estimate.low, estimate.high)
    return "{} [{}, {}]".format(*(f"{one:.2f}".replace("-0.00", "0.00") for one in figures))


def drawing(root: Node, name: str) -> Node:
    """Return the chart of a name."""
    return next(
        svg for svg in root.all("svg") if svg.attributes["aria-labelledby"].startswith(f"{name}-title")
    )


def places(chart: Node, look: str) -> list[tuple[float, float]]:
    """Return the centres of a chart's marks."""
    found = []
    for one in chart.all():
        if one.name == "circle" and one.attributes["class"] == look:
            found.append((float(one.attributes["cx"]), float(one.attributes["cy"])))
        elif one.name == "polygon" and one.attributes["class"] == look:
            corners = [tuple(map(float, corner.split(","))) for corner in one.attributes["points"].split()]
            found.append((corners[0][0], corners[1][1]))
    return found


@each_report
def test_a_page_is_whole_and_named_for_those_who_do_not_see_it(report: CalibrationReport) -> None:
    """Elements are closed, ids unique, references find them; tables and charts have names and descriptions."""
    root = page_of(report)
    assert_named(root)
    assert len([*root.all("h1")]) == 1
    assert next(root.all("html")).attributes["lang"] == "en"
    assert {"header", "nav", "section"} <= {node.name for node in next(root.all("main")).all()}
    for table in root.all("table"):
        assert {cell.attributes["scope"] for cell in table.all("th")} == {"col", "row"}
        assert len({len([*row.all("th"), *row.all("td")]) for row in table.all("tr")}) == 1


@each_report
def test_a_page_asks_for_nothing_and_runs_nothing(report: CalibrationReport) -> None:
    """It holds no script, no handler, and no address of anything outside; its policy forbids all of them."""
    root = page_of(report)
    policy = assert_self_contained(root)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src" not in policy
    assert not [*root.all("script")]


def test_hostile_text_stays_text() -> None:
    """Markup in any field of a report appears as it was written, its unseen characters as escapes."""
    root = page_of(hostile(MARKUP))
    written = MARKUP.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    for section in ("evidence", "pairs", "cost", "critic"):
        (part,) = (node for node in root.all("section") if node.attributes["id"] == section)
        assert written in part.text
    assert "\x1b" not in root.text
    assert "\u202e" not in root.text
    assert {node.name for node in page_of(everything()).all()} >= {node.name for node in root.all()}


@given(st.text(max_size=40))
def test_no_text_adds_an_element_or_an_attribute(text: str) -> None:
    """Whatever an outlook says, the page has the elements and attributes that it has without it."""

    def bones(report: CalibrationReport) -> list[tuple[str, tuple[str, ...]]]:
        return [(node.name, tuple(node.attributes)) for node in page_of(report).all()]

    said = NOTHING.model_copy(update={"power_summary": text, "not_tested_reason": text})
    assert bones(said) == bones(NOTHING.model_copy(update={"not_tested_reason": ""}))


def test_the_figures_are_the_reports() -> None:
    """Each figure before and after, with its interval and the constant beside it, as the report has it."""
    report = everything()
    found = tables(page_of(report))
    for heading, change in (("Held-out traces", report.held_out), ("Anchors", report.anchors)):
        before, after = change.before, change.after
        assert after is not None
        rows = found[f"{heading}: {before.n_traces} traces, {before.n_transitions} steps"][1:]
        fields = ("error", "bias", "accuracy", "consistency", "brier", "calibration")
        assert [row[1:3] for row in rows] == [
            [shown(getattr(before, field)), shown(getattr(after, field))] for field in fields
        ]
        constant = before.constant
        assert [row[3] for row in rows] == [
            f"{constant.error:.2f}", "–", f"{constant.accuracy:.2f}", "–", f"{constant.brier:.2f}", "–"
        ]  # fmt: skip


def test_the_tests_are_the_reports() -> None:
    """Every batch stands there with its effect, interval, p and alpha, counts and outcome in words."""
    rows = tables(page_of(everything()))["Every batch that was tested"][1:]
    accuracy, no_gain = "not promoted: pairwise accuracy fell", "not promoted: no gain was shown"
    level, counts = ["0.0021", "0.015"], ["4", "24", "72"]
    assert rows == [
        ["Batch 1", "promoted", "0.61 [0.36, 0.86]", *level, "+0.05", *counts],
        ["Batch 2", accuracy, "0.37 [0.12, 0.62]", *level, "-0.07", *counts],
        ["Batch 3", no_gain, "-0.43 [-0.68, -0.18]", *level, "–", *counts],
    ]


def test_pairs_drops_groups_and_costs_are_the_reports() -> None:
    """Counts by kind, by reason and by who asked, and what they mean."""
    report = everything()
    found = tables(page_of(report))
    assert found["Pairs by the mistake that they show"][1:] == [
        ["credit_for_intention", "20"],
        ["inflated_score", "12"],
    ]
    assert [row[:2] for row in found["Candidates that became no pair"][1:]] == [
        ["bad_reply", "6"],
        ["judged_wrong", "3"],
    ]
    assert all(row[2] for row in found["Candidates that became no pair"][1:])
    cost = found["Replies by role and purpose"]
    assert cost[1] == ["critic, score", "900", "1", "2", "902", "0", "0", "–"]
    assert cost[-1] == ["all", "", "", "", "1,234", "56,789", "4,321", "1.2345"]


def test_the_reliability_diagram_shows_the_bins() -> None:
    """Each filled bin is a mark at its confidence and share right, with its count below."""
    report = everything()
    root = page_of(report)
    for look, one in (("before", report.held_out.before), ("after", report.held_out.after)):
        chart = drawing(root, f"reliability-0-{look}")
        right = [(46 + 284 * part.confidence, 314 - 284 * part.right_share) for part in one.reliability]
        assert [pytest.approx(place, abs=0.06) for place in right] == places(chart, look)
        counts = [str(part.n_transitions) for part in one.reliability]
        assert [text.text for text in chart.all("text") if text.attributes.get("class") == "value"] == counts


def test_the_page_begins_with_what_was_promoted() -> None:
    """One sentence: how many pairs, by how much the error fell, with its interval, on how many traces."""
    assert describe_result(everything()) == (
        "4 pairs were promoted, and on 24 held-out traces the critic's mean absolute error went from "
        "2.00 to 0.50; averaged within each trace it fell by 1.41 points [1.02, 1.83]."
    )
    notes = describe_context(everything())
    assert "On the anchors, which decided nothing, the error fell by 0.83 points" in notes[1]
    header = next(page_of(everything()).all("header"))
    assert next(header.all("p")).text == describe_result(everything())


def test_the_page_says_why_nothing_was_promoted() -> None:
    """A refused batch is named with its reason; a batch that was not tested with what was missing."""
    test = evidence(1, 0.37, promoted=False, outcome="accuracy_fell", accuracy=-0.07)
    assert describe_result(NOTHING.model_copy(update={"tests": (test,)})) == (
        "Nothing was promoted: with its one batch the error fell by 0.37 points [0.12, 0.62] on 24 held-out "
        "traces (not promoted: pairwise accuracy fell)."
    )
    untested = NOTHING.model_copy(update={"not_tested_reason": "19 held-out traces are too few"})
    said = "No batch was tested, so nothing was promoted: 19 held-out traces are too few."
    assert describe_result(untested) == said
    assert describe_result(NOTHING) == "No batch was tested, so nothing was promoted."


def test_a_change_without_a_promotion_is_not_claimed() -> None:
    """What others promoted meanwhile is said, and not ascribed to this calibration."""
    full = everything()
    refused = full.model_copy(update={"tests": full.tests[1:]})
    assert "Nothing was promoted: with the best of 2 batches" in describe_result(refused)
    assert any(
        "although no batch of this calibration was promoted" in note for note in describe_context(refused)
    )


def test_every_reason_and_every_outcome_has_words() -> None:
    """What a candidate can be dropped for and how a test can end is all explained."""
    assert DropReason.__args__ == tuple(DROP_MEANINGS)
    assert set(ReplayTestOutcome.__args__) == set(OUTCOME_TEXTS)
    drops = tuple(DropCount(reason=reason, n_candidates=1) for reason in DROP_MEANINGS)
    rows = tables(page_of(NOTHING.model_copy(update={"dropped": drops})))["Candidates that became no pair"]
    assert all(row[2] for row in rows)
