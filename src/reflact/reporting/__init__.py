"""Reports of runs and calibrations for people: terminal output and HTML pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.reporting.html.calibration import render_calibration_page
    from reflact.reporting.html.run import RunReport, read_report, render_run_page
    from reflact.reporting.html.serve import create_run_pages

__all__ = [
    "RunReport",
    "create_run_pages",
    "read_report",
    "render_calibration_page",
    "render_run_page",
]

__getattr__ = load_exports(
    __name__,
    {
        "reporting.html.calibration": ("render_calibration_page",),
        "reporting.html.run": ("RunReport", "read_report", "render_run_page"),
        "reporting.html.serve": ("create_run_pages",),
    },
    extras={"reporting.html.serve": "serve"},
)
