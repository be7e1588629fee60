"""The orders that a round of calibration is recorded on: outcomes, labels, parts that share nothing, the report."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import record_orders

from reflact import Trace
from reflact.calibration.config import CalibrateConfig
from reflact.calibration.report import CalibrationReport
from reflact.config.loading import load_section
from reflact.memory.models import ContrastPair


@pytest.mark.parametrize("part", record_orders.PARTS)
def test_steps_rise_stay_and_fall(part: str) -> None:
    """Each outcome has a third of the steps, and a label is the share of the goals that its state meets."""
    steps = [(trace.purpose, event) for trace in record_orders.make_traces(part) for event in trace.events]
    outcomes = Counter((event.label.delta > 0) - (event.label.delta < 0) for _, event in steps)
    assert max(outcomes.values()) - min(outcomes.values()) <= 1
    for purpose, event in steps:
        things, rest = purpose.split("the parcel holds ")[1].split("; ", 1)
        price, rest = rest.split(" is paid; the address is ")
        state = event.transition.after
        met = [thing in state["parcel"] for thing in things.split(", ")]
        met += [state["paid"] == int(price), state["address"] == rest.split(".")[0]]
        assert event.label.progress_after == 2 * sum(met)


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


def test_there_are_enough_traces_and_anchors_of_all_outcomes() -> None:
    """At least forty are held out; anchors rise, stay and fall equally often; no purpose is in two parts."""
    purposes = {
        part: {trace.purpose for trace in record_orders.make_traces(part)} for part in record_orders.PARTS
    }
    assert len(purposes["held_out"]) >= 40
    assert len(set.union(*purposes.values())) == sum(map(len, purposes.values()))
    lines = (record_orders.FOLDER / "anchors.jsonl").read_text(encoding="utf-8").splitlines()
    anchors = [ContrastPair.model_validate(json.loads(line)) for line in lines]
    assert Counter(pair.right.direction for pair in anchors) == {"rises": 4, "stays": 4, "falls": 4}


async def test_the_recorded_replies_give_the_stored_report() -> None:
    """A replay asks no model and comes to the same figures, which docs/demo.md#the-recorded-calibration states."""
    folder = record_orders.FOLDER
    config = load_section(CalibrateConfig, folder / "calibrate.yaml")
    report = await record_orders.calibrate(config, mode="replay")
    assert report == CalibrationReport.model_validate_json(record_orders.REPORT.read_text(encoding="utf-8"))
