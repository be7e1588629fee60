"""The processor time of a rollout by the number of rollouts in a run, and that of a start of the command line.

A run of the toy world, whose target answers at once: steps with large batches, the ranked gate, and the final test,
with all rollouts stored on disk. Printed is the processor time of all threads for each rollout, the least of some
rounds, its ratio to that of the smallest run, and the growth of the process's memory. Then the processor time of
`reflact --help` and of `import reflact`, as ratios to that of the interpreter and typer alone.

    python benchmarks/rollouts.py         about a minute
    python benchmarks/rollouts.py 50000   with a run of as many rollouts
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio

from reflact import Trainer
from reflact.protocols import Session
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.types import Skill

SIZES, ROUNDS = (1_000, 4_000, 16_000), 3
STARTS = {
    "import typer": "import typer",
    "import reflact": "import reflact",
    "reflact --help": "import sys; sys.argv = ['reflact', '--help']; from reflact.cli import main; main()",
}


class CountingTarget(ToyTarget):
    """The toy target, which counts its conversations."""

    n_sessions = 0

    def session(self, skill: Skill, *, rollout: str) -> Session:  # type: ignore[override]
        """Start a conversation and count it."""
        self.n_sessions += 1
        return super().session(skill, rollout=rollout)


async def measure_run(size: int) -> float:
    """Return the processor milliseconds of a rollout in a run of about so many rollouts."""
    train, rest = 4 * size // 11, size // 11
    target = CountingTarget(noise=0.2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            {
                "out_dir": Path(folder) / "run",
                "report": False,
                "train": {"num_epochs": 1, "batch_size": max(1, train // 2)},
                "reflect": {"minibatch_size": max(1, train // 4)},
            },
            environment=ToyEnvironment(train=train, val=rest, test=rest),
            target=target,
            optimizer=ScriptedLLM(toy_optimizer()),
        )
        _ = trainer.run_id  # reads the data
        start = time.process_time()
        summary = await trainer.train()
        used = time.process_time() - start
    assert summary.status == "completed", summary.reason
    return 1e3 * used / target.n_sessions


def measure_start(code: str) -> float:
    """Return the processor milliseconds of a new interpreter that runs some code, without those of the bare one."""

    def run(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return 1e3 * (min(run(code) for _ in range(3 * ROUNDS)) - min(run("") for _ in range(3 * ROUNDS)))


def main(sizes: tuple[int, ...]) -> None:
    """Measure and print."""
    anyio.run(measure_run, 100)
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = None
    for size in sizes:
        took = min(anyio.run(measure_run, size) for _ in range(ROUNDS))
        first = first or took
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) / 1024
        print(
            f"{size:6,} rollouts  {took:6.3f} ms each  {took / first:5.2f}  memory +{grown:.0f} MB",
            flush=True,
        )
    least = {name: measure_start(code) for name, code in STARTS.items()}
    for name, took in least.items():
        print(f"{name:16} {took:6.0f} ms  {took / least['import typer']:5.2f}")


if __name__ == "__main__":
    main((*SIZES, *map(int, sys.argv[1:])))
