"""Attacks on runs: kills, damaged files, cancellations, and ten trainers in one event loop.

Each case must end in one of two ways: the run ends as the undisturbed one (its history, skills, events and documents
are equal byte for byte), or it is refused with one sentence, and nothing is changed silently. A case that ends
otherwise is printed with its seed and the script's exit code is 1.

The model is a pure function of its request, in a server process for the kills and in this process otherwise. So
nothing but the attack can make a difference.

Run it with ``make attack`` or ``python benchmarks/attack.py``. It takes at most 20 minutes: a campaign whose share of
the time is over stops and reports the cases that it did. ``--short`` is the form that the tests run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
from typer.testing import CliRunner

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from pure_world import Ended, PureNetwork, differences, left_by, settings, write_world  # noqa: E402
from reflact import Trainer  # noqa: E402
from reflact.cli.app import app  # noqa: E402
from reflact.concurrency import open_task_group  # noqa: E402
from reflact.errors import ReflactError  # noqa: E402
from training_process import train  # noqa: E402

ALIKE, REFUSED = "ended as the undisturbed run", "refused with one sentence"
IN_FLIGHT = 16
"""Calls that may be in flight: eight for each role."""

MAX_CHANGED_BYTES = 64
TRAINERS = 10


class Size(NamedTuple):
    """Cases of each campaign."""

    kills: int
    corruptions: int
    cancellations: int
    rounds: int


FULL = Size(kills=128, corruptions=400, cancellations=200, rounds=6)
SHORT = Size(kills=2, corruptions=6, cancellations=3, rounds=1)
SHARES = {"kills": 0.4, "corruptions": 0.25, "cancellations": 0.15, "ten trainers": 0.2}
"""Shares of the time."""


class Campaign:
    """Counts the outcomes of the cases of one campaign, within its time."""

    def __init__(self, name: str, n_cases: int, seconds: float) -> None:
        self.name = name
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.notes: Counter[str] = Counter()
        self._cases = n_cases
        self._started = time.monotonic()
        self._seconds = seconds
        self.took = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all cases are done, or the time is over."""
        self.took = time.monotonic() - self._started
        return self.outcomes.total() >= self._cases or self.took > self._seconds

    def count(self, case: str, outcome: str) -> None:
        """Count a case; an outcome that is not allowed is kept with the case."""
        self.outcomes[outcome] += 1
        if outcome not in {ALIKE, REFUSED}:
            self.wrong.append(f"{self.name}, {case}: {outcome}")

    def row(self) -> str:
        """Return a row of the table."""
        alike, refused = self.outcomes[ALIKE], self.outcomes[REFUSED]
        notes = "; ".join(f"{count} {note}" for note, count in sorted(self.notes.items())) or "-"
        cells = (self.name, self.outcomes.total(), alike, refused, len(self.wrong), notes)
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


def small_settings(world: Path, out_dir: Path, **sections: Any) -> dict[str, Any]:
    """Return the configuration of a run of two steps with all that follows them."""
    return settings(world, out_dir, train={"num_epochs": 1, "accumulation": 1}, **sections)


def run_here(config: Mapping[str, Any], network: httpx.AsyncBaseTransport | None = None) -> str:
    """Train to the end in this process, and return the status."""
    return anyio.run(Trainer(config, transport=network or PureNetwork()).train).status


def compare(out_dir: Path, whole: Ended, *, but: tuple[str, ...] = ()) -> str:
    """Return the outcome of a completed run."""
    try:
        different = differences(left_by(out_dir), whole, but=but)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return f"cannot be read: {type(error).__name__}: {error}"
    return f"differs in {', '.join(different)}" if different else ALIKE


# ------------------------------------------------------------------------------------------------ kills


@contextmanager
def pure_server() -> Iterator[int]:
    """Serve the pure model in its own process, and yield the port."""
    command = [sys.executable, str(TESTS / "pure_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def requests(port: int, how: str) -> list[str]:
    """Return the calls that the server was asked for since it last forgot them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{how}", timeout=30) as response:
        return [call_id for _, call_id in json.load(response)]


def attack_with_kills(campaign: Campaign, folder: Path, chance: random.Random) -> None:
    """Kill processes that train at random moments, until each run ends; nothing settled may be asked for again."""
    world = write_world(folder / "world", train=6, val=3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["reflact.llm.client", "reflact.store.runs", "training_process"])
    with pure_server() as port:

        def start(out_dir: Path) -> BaseProcess:
            process = context.Process(target=train, args=(small_settings(world, out_dir), port))
            process.start()
            return process

        process = start(folder / "whole")
        process.join()
        whole, n_calls = left_by(folder / "whole"), len(requests(port, "forget"))
        for number in range(10**6):
            if campaign.is_over:
                return
            out_dir, killed, asked = folder / f"run-{number}", 0, Counter[str]()
            while True:
                process = start(out_dir)
                goal, wait = chance.randrange(max(2, n_calls // 6)), chance.random() * 0.05
                while (
                    not campaign.is_over
                    and process.is_alive()
                    and len(requests(port, "seen")) < goal
                ):
                    process.join(0.01)
                process.join(None if campaign.is_over else wait)
                process.kill()
                process.join()
                asked.update(requests(port, "forget"))
                if process.exitcode != -signal.SIGKILL:
                    break
                killed += 1
                campaign.count(f"run {number}, kill {killed}", inspect_database(out_dir))
            repeats = asked - Counter(set(asked))
            campaign.notes["calls in flight were repeated"] += repeats.total()
            outcome = (
                compare(out_dir, whole)
                if process.exitcode == 0
                else f"exit code {process.exitcode}"
            )
            if repeats - unsettled_calls(out_dir):
                outcome = "settled calls were repeated"
            if outcome != ALIKE:
                campaign.count(f"run {number} after {killed} kills", outcome)
            campaign.notes["runs"] += 1


def inspect_database(out_dir: Path) -> str:
    """Return whether a killed process left a sound database, or none."""
    if not (out_dir / "run.db").exists():
        return ALIKE
    with closing(sqlite3.connect(out_dir / "run.db")) as database:
        found = database.execute("PRAGMA integrity_check").fetchall()
    return ALIKE if found == [("ok",)] else f"damaged: {found[0][0]}"


def unsettled_calls(out_dir: Path) -> Counter[str]:
    """Return how often each call was cut off in flight."""
    with closing(sqlite3.connect(out_dir / "run.db")) as database:
        rows = database.execute("SELECT call_id FROM calls WHERE state <> 'settled'")
        return Counter(call_id for (call_id,) in rows)


# ------------------------------------------------------------------------------------------ damaged files


def attack_files(campaign: Campaign, folder: Path, chance: random.Random) -> None:
    """Damage one file of a run that was stopped after its first step, and start it again."""
    world = write_world(folder / "world", train=6, val=3)
    whole_dir, half = folder / "whole", folder / "half"
    run_here(small_settings(world, whole_dir))
    whole = left_by(whole_dir)
    anyio.run(copy_half_done, small_settings(world, folder / "live"), half)
    while not campaign.is_over:
        shutil.rmtree(folder / "run", ignore_errors=True)
        out_dir = Path(shutil.copytree(half, folder / "run"))
        what = damage(out_dir, chance)
        outcome = start_damaged(small_settings(world, out_dir), whole)
        for command in ("runs", "show"):
            shown = CliRunner().invoke(app, [command, str(out_dir)])
            if shown.exception is not None and not isinstance(shown.exception, SystemExit):
                outcome = f"`{command}` fails with {shown.exception!r}"
        campaign.count(what, outcome)


async def copy_half_done(config: dict[str, Any], target: Path) -> None:
    """Train, and copy the folder with its write-ahead log after the first step."""
    async with Trainer(config, transport=PureNetwork()).stream() as stream:
        async for event in stream:
            if event.kind == "step_committed":
                shutil.copytree(config["out_dir"], target)
                return


def damage(out_dir: Path, chance: random.Random) -> str:
    """Change, cut off or remove a file, mostly the database and its log, and return what was done."""
    log, database = out_dir / "run.db-wal", out_dir / "run.db"
    if chance.random() < 0.5:  # so that most of the content is in the database
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    others = [p for p in sorted(out_dir.rglob("*")) if p.is_file() and p not in {database, log}]
    filled = [p for p in (database, log) if p.exists() and p.stat().st_size]
    path = chance.choice(others) if chance.random() < 0.1 else chance.choice(filled)
    content, way = (
        bytearray(path.read_bytes()),
        chance.choice(("flip", "flip", "write", "cut off", "remove")),
    )
    place = chance.randrange(max(1, len(content)))
    if way == "remove":
        path.unlink()
    elif way == "cut off":
        path.write_bytes(content[:place])
    elif content:
        if way == "flip":
            content[place] ^= 1 << chance.randrange(8)
        else:
            content[place : place + MAX_CHANGED_BYTES] = chance.randbytes(
                len(content[place : place + MAX_CHANGED_BYTES])
            )
        path.write_bytes(content)
    return f"{way} {path.relative_to(out_dir)} at {place}"


def start_damaged(config: dict[str, Any], whole: Ended) -> str:
    """Start a run whose files are damaged, and return the outcome."""
    try:
        status = run_here(config)
    except ReflactError as error:
        return REFUSED if "\n" not in str(error) else f"more than a sentence: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return f"{type(error).__name__}: {error}"
    # A damaged reply is asked for again, so it is paid for twice; the ledger has no checksums.
    return (
        compare(Path(config["out_dir"]), whole, but=("spend",))
        if status == "completed"
        else f"status {status}"
    )


# ---------------------------------------------------------------------------------- cancelled, and together


class CancellingNetwork(PureNetwork):
    """The pure model, which cancels a scope at a request."""

    def __init__(self, scope: anyio.CancelScope | None = None, *, after: int = 0) -> None:
        super().__init__()
        self._scope = scope
        self._after = after

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, and cancel the scope if it is its turn."""
        if self._scope is not None and len(self.samples) >= self._after:
            self._scope.cancel()
        return await super().handle_async_request(request)


async def train_cancelled(config: Mapping[str, Any], *, after: int) -> bool:
    """Train and cancel at a request; return whether the run was cut off before its end."""
    with anyio.CancelScope() as scope:
        await Trainer(config, transport=CancellingNetwork(scope, after=after)).train()
    return scope.cancelled_caught


def attack_with_cancellations(campaign: Campaign, folder: Path, chance: random.Random) -> None:
    """Cancel a run at random requests, again and again, until it ends."""
    world = write_world(folder / "world", train=6, val=3)
    network = PureNetwork()
    run_here(small_settings(world, folder / "whole"), network)
    whole = left_by(folder / "whole")
    for number in range(10**6):
        if campaign.is_over:
            return
        config = small_settings(world, folder / f"run-{number}")
        while not campaign.is_over:
            after = chance.randrange(max(2, len(network.samples) // 4))
            if not anyio.run(partial(train_cancelled, config, after=after)):
                break
            campaign.count(
                f"run {number}, request {after}", inspect_database(Path(config["out_dir"]))
            )
        run_here(config)
        campaign.notes["runs"] += 1
        outcome = compare(Path(config["out_dir"]), whole)
        if outcome != ALIKE:
            campaign.count(f"run {number}", outcome)


def attack_together(campaign: Campaign, folder: Path, chance: random.Random) -> None:
    """Train ten runs in one event loop, of which some are cancelled and resumed beside the others."""
    world = write_world(folder / "world", train=6, val=3)

    def configure(out_dir: Path, seed: int) -> dict[str, Any]:
        return small_settings(world, out_dir, seed=seed)

    wholes = []
    for seed in range(TRAINERS):
        run_here(configure(folder / f"whole-{seed}", seed))
        wholes.append(left_by(folder / f"whole-{seed}"))

    async def run_one(config: dict[str, Any], cuts: int) -> None:
        for _ in range(cuts):
            await train_cancelled(config, after=chance.randrange(40))
        await Trainer(config, transport=PureNetwork()).train()

    async def run_all(configs: list[dict[str, Any]], cuts: list[int]) -> None:
        async with open_task_group() as tasks:
            for config, n_cuts in zip(configs, cuts, strict=True):
                tasks.start_soon(run_one, config, n_cuts)

    number = 0
    while not campaign.is_over:
        configs = [configure(folder / f"round-{number}-{seed}", seed) for seed in range(TRAINERS)]
        cuts = [chance.choice((0, 0, 1, 2)) for _ in configs]
        anyio.run(run_all, configs, cuts)
        for seed, config in enumerate(configs):
            campaign.count(
                f"round {number}, trainer {seed}", compare(Path(config["out_dir"]), wholes[seed])
            )
        campaign.notes["cancellations"] += sum(cuts)
        number += 1


# ------------------------------------------------------------------------------------------------------ all


def main() -> None:
    """Run all campaigns and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a few cases of each campaign")
    parser.add_argument(
        "--minutes", type=float, default=19.0, help="the most minutes of all campaigns"
    )
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--only", choices=sorted(SHARES), help="one campaign, with all of the time")
    options = parser.parse_args()
    size = SHORT if options.short else FULL
    works: dict[str, tuple[int, Callable[[Campaign, Path, random.Random], None]]] = {
        "kills": (size.kills, attack_with_kills),
        "corruptions": (size.corruptions, attack_files),
        "cancellations": (size.cancellations, attack_with_cancellations),
        "ten trainers": (size.rounds * TRAINERS, attack_together),
    }
    print(
        "| campaign | cases | ended as the undisturbed run | refused with one sentence | wrong | beside |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    wrong = []
    with tempfile.TemporaryDirectory() as place:
        for name, (n_cases, work) in works.items():
            if options.only not in {None, name}:
                continue
            share = 1.0 if options.only else SHARES[name]
            campaign = Campaign(name, n_cases, 60 * options.minutes * share)
            folder = Path(place, name.replace(" ", "-"))
            folder.mkdir()
            work(campaign, folder, random.Random(f"{options.seed} {name}"))
            print(campaign.row(), flush=True)
            wrong += campaign.wrong
            shutil.rmtree(folder, ignore_errors=True)
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
