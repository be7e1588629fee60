"""Two hundred random runs under random limits, each started again with more until it completes.

    python benchmarks/budgets.py         prints what each 50 runs came to; about a minute
    python benchmarks/budgets.py 1000    as many runs

Each run has 64 calls in flight, one or two limits of money, tokens, calls and time, random latencies and
usages, a fault in one of ten requests, and is killed up to twice. The provider keeps its own bill, also of
answers that never arrived, and refuses to go above a limit: an assertion ends the program. Each start must
leave the beginning of what an unbroken run leaves, and the last one all of it. Time is virtual.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import virtual_time
from toll_world import Story, planned, unbroken

RUNS = 200


async def main(runs: int) -> None:
    """Take runs through their stories."""
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(Path(folder))
        whole = await unbroken(plan)
        ends: Counter[str] = Counter()
        most = 0
        for seed in range(runs):
            story = Story(plan, seed)
            await story.tell(whole)
            ends.update(story.ends)
            most = max(most, story.most)
            if (seed + 1) % 50 == 0 or seed + 1 == runs:
                counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
                print(f"{seed + 1} runs: {counts}; {most} calls in flight at most; no limit exceeded")


if __name__ == "__main__":
    virtual_time.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else RUNS)
