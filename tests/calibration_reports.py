"""Reports of calibrations, made of the recorded one: with everything in it, with nothing, and hostile."""

from __future__ import annotations

from functools import cache

from reflact.calibration.report import CalibrationReport, DropCount, MetricsChange
from reflact.prompts import find_data_folder
from reflact.records import Usage

RECORDED = CalibrationReport.model_validate_json(
    (find_data_folder("calibration") / "report.json").read_bytes()
)
UNMEASURED = MetricsChange(before=None, after=None, gain=None)
NOTHING = RECORDED.model_copy(
    update={
        "n_rounds": 0,
        "n_training_traces": 0,
        "n_candidates": 0,
        "pairs": (),
        "tests": (),
        "held_out": UNMEASURED,
        "anchors": UNMEASURED,
        "metrics_by_round": (),
        "usage": Usage(),
    }
)


@cache
def everything() -> CalibrationReport:
    (test,) = RECORDED.tests
    refused = test.model_copy(update={"passed_test": False, "outcome": "accuracy_fell", "n_earlier_tests": 1})
    useless = test.model_copy(update={"passed_test": False, "outcome": "not_shown", "effect": -0.43})
    return RECORDED.model_copy(
        update={
            "dropped": (DropCount(reason="bad_reply", n_candidates=6),),
            "n_candidates": RECORDED.n_candidates + 6,
            "n_quarantined": 2,
            "tests": (test, refused, useless),
            "not_tested_reason": "the fourth batch came too late",
            "held_out": RECORDED.held_out.model_copy(update={"n_unscored": 4}),
            "usage": Usage(calls=1234, input_tokens=56789, output_tokens=4321, usd=1.2345, uncounted=2),
        }
    )


def hostile(text: str) -> CalibrationReport:
    full = everything()
    return full.model_copy(
        update={
            "critic": text,
            "prompt": text,
            "pairs": tuple(kind.model_copy(update={"mistake": text}) for kind in full.pairs),
            "dropped": tuple(drop.model_copy(update={"reason": text}) for drop in full.dropped),
            "tests": tuple(
                test.model_copy(update={"critic": text, "prompt": text, "outcome": text})
                for test in full.tests
            ),
            "not_tested_reason": text,
            "power_summary": text,
        }
    )
