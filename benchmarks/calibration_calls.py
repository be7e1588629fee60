"""Where the calls of a calibration go: 40 traces of two steps, and 40 held out, at the default settings.

The critic is a script: claims of success flatter it, it makes no error, or it inflates evenly. Printed for each:
calls by stage, all calls, rounds, promoted pairs, and the error on held-out steps before and after.

    python benchmarks/calibration_calls.py [--asked N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from calibration_memory import ListMemory
from critic_flaws import FLAWS, count_calls, describe, make_flaw
from reflact.calibration.config import CalibratorSettings

STAGES = (
    "score before",
    "mistake",
    "compare",
    "replay test",
    "kinds of mistakes",
)


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
