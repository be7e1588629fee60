"""Where the calls of a calibration go: 40 traces of two steps, and 40 held out, at the default settings.

The critic is a script: claims of success flatter it, it makes no error, or it inflates evenly. Printed for each:
calls by stage, all calls, rounds, promoted pairs, and the error on held-out steps before and after.

    python benchmarks/calibration_calls.py [--asked N]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from calibration_memory import ListMemory
from critic_flaws import FLAWS, CriticFlaw, make_flaw
from reflact import Calibrator
from reflact.calibration.config import CalibratorSettings
from reflact.calibration.events import (
    CalibrationEvent,
    CriticMeasured,
    PairBatchTested,
    RoundStarted,
)
from reflact.calibration.report import CalibrationReport
from reflact.memory.store import MemoryStore

STAGES = (
    "score before",
    "mistake",
    "compare",
    "replay test",
    "kinds of mistakes",
)


class CountedCalibration(NamedTuple):
    """The report of a calibration, and its calls by stage."""

    report: CalibrationReport
    calls: Counter[str]


async def count_calls(
    flaw: CriticFlaw, memory: MemoryStore, *, settings: CalibratorSettings
) -> CountedCalibration:
    ends: list[tuple[int, str]] = []

    def note(event: CalibrationEvent) -> None:
        match event:
            case CriticMeasured():
                ends.append(
                    (
                        len(flaw.llm.calls),
                        "score before" if event.when == "before" else "score after",
                    )
                )
            case PairBatchTested():
                ends.append((len(flaw.llm.calls), "replay test"))
            case RoundStarted():
                ends.append((len(flaw.llm.calls), "kinds of mistakes"))

    calibrator = Calibrator(flaw.llm, memory, settings=settings, on_event=note)
    report = await calibrator.calibrate(flaw.learn, heldout=flaw.held_out)
    calls: Counter[str] = Counter()
    for index, call in enumerate(flaw.llm.calls):
        call_id = call.call_id
        if call_id.role == "critic" and call_id.trial == 0:
            calls[next(stage for end, stage in ends if index < end)] += 1
        else:
            calls["samples" if call_id.role == "critic" else call_id.purpose] += 1
    return CountedCalibration(report, calls)


def describe(counted: CountedCalibration, stages: Sequence[str]) -> list[str]:
    report, calls = counted
    before, after = report.held_out.before, report.held_out.after
    assert before is not None
    assert after is not None
    errors = f"{before.error.value:.2f} -> {after.error.value:.2f}"
    counts = [
        *(calls[stage] for stage in stages),
        calls.total(),
        report.n_rounds,
        report.n_promoted,
    ]
    return [*map(str, counts), errors]


async def measure(settings: CalibratorSettings) -> None:
    """Print a row for each critic."""
    print("| critic    |", " | ".join((*STAGES, "all", "rounds", "promoted", "error")), "|")
    for flaw in FLAWS:
        counted = await count_calls(make_flaw(flaw), ListMemory(), settings=settings)
        print(f"| {flaw:<9} |", " | ".join(describe(counted, STAGES)), "|", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = CalibratorSettings().max_asked
    parser.add_argument(
        "--asked", type=int, default=default, help="mistakes that a model writes in a round"
    )
    options = parser.parse_args()
    settings = CalibratorSettings(max_asked=options.asked)
    anyio.run(measure, settings)


if __name__ == "__main__":
    main()
