"""Wall time, processor time, memory and disk of a run by its number of rollouts, and how soon it resumes.

A run of the toy world, whose target answers at once with 4 KB: 400 train, 100 validation and 100 test items, batches of
100, the ranked gate, noise. The number of epochs makes the number of rollouts; a run of 100 has a tenth of the items.
All rollouts are stored on disk. Each run is a process of its own. Its memory is the most that it took, without the
memory after its imports and a run of 100 rollouts. Rollouts of train items cost more than those of the gate, since
analysts read them, and the share of them grows when the skill gets better, so it is stated.

A second series has conversations of 64 KB, until the store has 1 GB.

To resume: a run of 20,000 stored rollouts is killed by an error of its optimizer, and a new process of the command
line's functions resumes it. Measured is the time from the end of its imports to the first new rollout or call.

    python benchmarks/runs.py            runs of 100 to 50,000 rollouts; eight minutes
    python benchmarks/runs.py --largest 5000 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import anyio
from harness import describe_machine, draw_lines, fit_line, take_turns, write_results

from reflact import Trainer
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.protocols import Session
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.testing.toy import ToySession
from reflact.types import Skill, Turn

EPOCHS = (0, 1, 2, 5, 10, 20, 50, 82)
"""Epochs of each run, of about 600 rollouts; 0 is the small run."""


RESUMED_EPOCHS = 31
ROUNDS = 5
SMALL, LARGE = 4_096, 65_536
"""Bytes of a conversation."""

STARTS = {
    "import typer": "import typer",
    "import reflact": "import reflact",
    "reflact --help": "import sys; sys.argv = ['reflact', '--help']; from reflact.cli import main; main()",
}


class LongTarget(ToyTarget):
    """The toy target with conversations of ``size`` bytes, which counts them and notes when the first one began."""

    n_sessions, n_analysed, first, size = 0, 0, None, SMALL

    def session(self, skill: Skill, *, rollout: str) -> Session:  # type: ignore[override]
        """Start a conversation."""
        self.n_sessions += 1
        self.first = self.first or time.perf_counter()
        return LongSession(super().session(skill, rollout=rollout), rollout * (self.size // 64))


class LongSession:
    """A conversation whose turns have as many bytes as those of a real agent."""

    def __init__(self, inner: ToySession, result: str) -> None:
        self._inner, self._result = inner, result

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation, with a result of a tool."""
        return (*self._inner.turns, Turn(role="tool", content=self._result))

    async def reply(self, message: str) -> str:
        """Answer as the toy target."""
        return await self._inner.reply(message)


def make_trainer(
    folder: Path, epochs: int, target: LongTarget, *, stop_at: int | None = None
) -> Trainer:
    """Return a trainer of the workload; its optimizer fails from a step on."""
    toy, part = toy_optimizer(), 1 if epochs else 10

    def answer(
        prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId
    ) -> ScriptedAnswer:
        llm.calls.clear()  # it would keep all prompts
        if stop_at is not None and (call_id.step or 0) >= stop_at:
            raise RuntimeError("stopped")
        target.n_analysed += prompt.messages[-1].content.count("<case_")
        return toy(prompt, reply_type, call_id)  # type: ignore[return-value]

    llm = ScriptedLLM(answer)
    return Trainer(
        {
            "out_dir": folder,
            "report": False,
            "seed": 1,
            "search": {"sources": ["edits"]},
            "train": {"num_epochs": max(1, epochs), "batch_size": 100 // part},
            "reflect": {"minibatch_size": 25 // (5 if part > 1 else 1)},
        },
        environment=ToyEnvironment(train=400 // part, val=100 // part, test=100 // part, rules=6),
        target=target,
        optimizer=llm,
    )


def read_memory() -> float:
    """Return the most megabytes that this process has taken."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_once(epochs: int, size: int = SMALL) -> dict[str, float]:
    """Do one run and return its figures."""
    with tempfile.TemporaryDirectory() as name:
        folder, target = Path(name), LongTarget(noise=0.2)
        target.size = size
        anyio.run(make_trainer(folder / "warm", 0, LongTarget(noise=0.2)).train)
        trainer = make_trainer(folder / "run", epochs, target)
        _ = trainer.run_id  # reads the data
        memory, wall, processor = read_memory(), time.perf_counter(), time.process_time()
        summary = anyio.run(trainer.train)
        assert summary.status == "completed", summary.reason
        return {
            "rollouts": target.n_sessions,
            "analysed": target.n_analysed / target.n_sessions,
            "wall": time.perf_counter() - wall,
            "processor": time.process_time() - processor,
            "memory": read_memory() - memory,
            "disk": sum(file.stat().st_size for file in (folder / "run").glob("run.db*")) / 2**20,
        }


def resume(folder: str, begun: float) -> dict[str, float]:
    """Resume a stored run until its first new rollout; times are since the process began and since its imports ended."""
    loaded, target = time.time(), LongTarget(noise=0.2)
    wall, processor = time.perf_counter(), time.process_time()

    async def train() -> None:
        trainer = make_trainer(Path(folder), RESUMED_EPOCHS, target)
        async with trainer.stream() as stream:
            async for _ in stream:
                if target.first is not None:
                    return

    anyio.run(train)
    assert target.first is not None
    return {
        "imports": loaded - begun,
        "first rollout": target.first - wall,
        "processor": time.process_time() - processor,
        "processor, imports": processor,
    }


def in_process(*arguments: str) -> dict[str, float]:
    """Run this program in a process of its own and return the figures that it prints."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env=os.environ,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_resume(rounds: int) -> dict[str, float]:
    """Return the medians for a run of 20,000 stored rollouts."""
    with tempfile.TemporaryDirectory() as name:
        folder, target = Path(name) / "run", LongTarget(noise=0.2)
        last = 4 * RESUMED_EPOCHS - 2
        with suppress(RuntimeError):
            anyio.run(make_trainer(folder, RESUMED_EPOCHS, target, stop_at=last).train)
        found = []
        for number in range(rounds):
            copy = shutil.copytree(folder, Path(name) / f"{number}")
            found.append(in_process("--resume", str(copy), str(time.time())))
        return {"rollouts": target.n_sessions} | {
            key: median(each[key] for each in found) for key in found[0]
        }


def measure_runs(
    epochs: Sequence[int], size: int, largest: int, n_rounds: int
) -> list[dict[str, float]]:
    """Return the medians of runs of several numbers of epochs, and print them and the lines through them."""
    sizes = [n for n in epochs if 610 * n <= largest + 100]
    cases = {n: lambda n=n: {n: in_process("--once", str(n), str(size))} for n in sizes}
    rounds = take_turns(cases, n_rounds)
    runs = [{key: median(each[n][key] for each in rounds) for key in rounds[0][n]} for n in sizes]
    for run in runs:
        each = 1e3 * run["processor"] / run["rollouts"]
        print(
            f"| {run['rollouts']:,.0f} | {run['analysed']:.0%} | {run['wall']:.1f} s | {run['processor']:.1f} s "
            f"| {each:.2f} ms | {run['memory']:.0f} MB | {run['disk']:.0f} MB |",
            flush=True,
        )
    for x in ("rollouts", "disk"):
        for key in ("wall", "processor", "memory", "disk"):
            slope, start = fit_line([(run[x], run[key]) for run in runs])
            print(f"{key}: {1000 * slope:.3f} for 1,000 {x}, and {start:.2f}")
    return runs


def measure_starts(rounds: int) -> dict[str, float]:
    """Return the processor milliseconds of new interpreters that run some code, without those of the bare one."""

    def start(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    bare = min(start("") for _ in range(3 * rounds))
    return {
        name: min(start(code) for _ in range(3 * rounds)) - bare for name, code in STARTS.items()
    }


def main() -> None:
    """Measure, print, write the results and draw the plots."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=50_000, help="rollouts of the largest run")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--once", type=int, nargs=2, metavar=("EPOCHS", "BYTES"))
    parser.add_argument("--resume", nargs=2)
    arguments = parser.parse_args()
    if arguments.once is not None:
        print(json.dumps(run_once(*arguments.once)))
        return
    if arguments.resume is not None:
        print(json.dumps(resume(arguments.resume[0], float(arguments.resume[1]))))
        return
    machine = describe_machine()
    runs = measure_runs(EPOCHS, SMALL, arguments.largest, arguments.rounds)
    resumed, starts = measure_resume(arguments.rounds), measure_starts(arguments.rounds)
    print(json.dumps({"resume": resumed, "starts": starts}, indent=1))
    results = {"runs": runs, "resume": resumed, "starts": starts}
    write_results(
        "runs", {"machine": [machine, describe_machine()], "rounds": arguments.rounds, **results}
    )

    def list_points(
        found: list[dict[str, float]], x: str, *keys: str
    ) -> dict[str, list[tuple[float, float]]]:
        return {key: [(run[x], run[key]) for run in found] for key in keys}

    draw_lines(
        "runs",
        {
            "wall and processor time, s": list_points(runs, "rollouts", "wall", "processor"),
            "memory over imports, MB": list_points(runs, "rollouts", "memory"),
            "store, MB": list_points(runs, "rollouts", "disk"),
        },
        x="rollouts",
    )


if __name__ == "__main__":
    main()
