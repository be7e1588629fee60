"""The orders that a round of calibration is recorded on: outcomes, labels, parts that share nothing, the report."""

from __future__ import annotations

import record_orders

from reflact import Trace
from reflact.calibration.config import CalibrateConfig
from reflact.calibration.report import CalibrationReport
from reflact.config.loading import load_section


def test_the_written_traces_are_those_of_the_script() -> None:
    """Everybody gets the same traces; those to learn from may have a critic's evaluations beside the labels."""
    for part in ("learn", "held_out"):
        written = Trace.load_all(record_orders.FOLDER / "traces" / part)
        made = record_orders.make_traces(part)
        assert [trace.id for trace in written] == [trace.id for trace in made]
        for one, other in zip(written, made, strict=True):
            assert [(e.transition, e.label) for e in one.events] == [
                (e.transition, e.label) for e in other.events
            ]


async def test_the_recorded_replies_give_the_stored_report() -> None:
    """A replay asks no model and comes to the same figures, which docs/demo.md#the-recorded-calibration states."""
    folder = record_orders.FOLDER
    config = load_section(CalibrateConfig, folder / "calibrate.yaml")
    report = await record_orders.calibrate(config, mode="replay")
    assert report == CalibrationReport.model_validate_json(record_orders.REPORT.read_text(encoding="utf-8"))
