"""The page of a calibration: whole, self-contained, safe, and with the report's numbers."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from calibration_reports import NOTHING, everything, hostile
from html_page import Node, assert_named, assert_self_contained, read, tables
from reflact.calibration.report import (
    CalibrationReport,
    build_metric_table,
    describe_consumption,
    list_change_lines,
    list_pair_lines,
    list_power_lines,
    list_test_lines,
)
from reflact.cli.calibrate_output import print_calibration
from reflact.reporting.html.calibration import render_calibration_page

MARKUP = (
    "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\"'&amp;{{7*7}}{% x %}${y}\x1b[31m\u202e"
)


REPORTS = {"everything": everything(), "nothing": NOTHING, "hostile": hostile(MARKUP)}


def page_of(report: CalibrationReport) -> Node:
    return read(render_calibration_page(report))


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_page_is_whole_and_named_and_asks_for_nothing(report: CalibrationReport) -> None:
    root = page_of(report)
    assert_named(root)
    assert len([*root.all("h1")]) == 1
    assert next(root.all("html")).attributes["lang"] == "en"
    assert {"header", "nav", "section"} <= {node.name for node in next(root.all("main")).all()}
    for table in root.all("table"):
        assert {cell.attributes["scope"] for cell in table.all("th")} == {"col", "row"}
        assert len({len([*row.all("th"), *row.all("td")]) for row in table.all("tr")}) == 1
    policy = assert_self_contained(root)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src" not in policy
    assert not [*root.all("script")]


def test_hostile_text_stays_text() -> None:
    """Markup in any field of a report appears as it was written, its unseen characters as escapes."""
    root = page_of(hostile(MARKUP))
    written = MARKUP.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    for section in ("evidence", "pairs", "critic"):
        (part,) = (node for node in root.all("section") if node.attributes["id"] == section)
        assert written in part.text
    assert "\x1b" not in root.text
    assert "\u202e" not in root.text
    assert {node.name for node in page_of(everything()).all()} >= {node.name for node in root.all()}


def test_the_page_says_what_the_terminal_says() -> None:
    report = everything()
    text = page_of(report).text
    out = StringIO()
    print_calibration(Console(file=out, width=1000), report)
    lines = [
        *list_pair_lines(report),
        *list_test_lines(report),
        *list_power_lines(report),
        *list_change_lines(report.anchors),
        describe_consumption(report),
    ]
    assert [line for line in lines if line not in text] == []
    assert [line for line in lines if line not in out.getvalue()] == []
    found = tables(page_of(report))
    figures = build_metric_table("Anchors", report.anchors.before, report.anchors.after)
    assert [row[1:] for row in found[figures.caption][1:]] == [list(row[2:]) for row in figures.rows]


def test_a_change_without_a_promotion_is_not_claimed() -> None:
    full = everything()
    refused = full.model_copy(update={"tests": full.tests[1:]})
    (verdict,) = (node for node in page_of(refused).all("div") if "verdict" in node.attributes["class"])
    assert verdict.text.startswith("nothing promoted.")
    assert "fell by" not in verdict.text
