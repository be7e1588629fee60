"""Run the comparison at equal budget: every method on every task with every seed.

Give each peer an environment of its own, and start the two models of ``settings.yaml`` (scripts/local_server.py)::

    python -m venv PEERS/venv-gepa && PEERS/venv-gepa/bin/pip install gepa
    python -m venv PEERS/venv-dspy && PEERS/venv-dspy/bin/pip install dspy
    python -m venv PEERS/venv-skillopt && PEERS/venv-skillopt/bin/pip install CLONE_OF_SKILLOPT json_repair
    python benchmarks/equal_budget/run.py train --peers PEERS
    python benchmarks/equal_budget/run.py test
    python benchmarks/equal_budget/page.py

``train`` runs each method on the train and validation items, and writes a result with its best document. A cell that
has a result is skipped, and so is a peer whose environment is missing. ``test`` measures each document on the test
items, after all settings are decided. Both need nothing else on the network than the two models.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from meter import BudgetLimits, Frozen, Meter, MeterServer, ModelSettings, ReplyStore, RoleSpend, Servers

from reflact.config.loading import load_keys
from reflact.environments.dataset import DatasetEnvironment, build_environment
from reflact.types import Grade, Item, Split, Turn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results"
ALARM = 3 * 3600
"""Seconds after which a method hangs."""


class TaskSettings(Frozen):
    """A task: a configuration of reflact, its keys that are the task, how many items of each split count, its models."""

    title: str
    config: Path
    keep: tuple[str, ...]
    train: int
    val: int
    test: int
    models: str
    budget: BudgetLimits


class MethodSettings(Frozen):
    """A method: its script, the name of its environment, the packages whose versions count, and its settings.

    ``task_settings`` replace ``settings`` for the tasks that they name.
    """

    title: str
    script: str | None = None
    environment: str | None = None
    version: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    task_settings: dict[str, dict[str, Any]] = {}

    def for_task(self, task: str) -> dict[str, Any]:
        """Return the settings for a task."""
        return self.task_settings.get(task, self.settings)


class Settings(Frozen):
    """All of settings.yaml; ``models`` are pairs of a target and an optimizer, by the name that tasks use."""

    models: dict[str, dict[str, ModelSettings]]
    seeds: tuple[int, ...]
    tasks: dict[str, TaskSettings]
    methods: dict[str, MethodSettings]

    def digest(self, task: str, method: str) -> str:
        """Return a digest of all settings that a cell depends on."""
        about = self.methods[method]
        models = self.list_models(task)
        parts = {
            "models": {role: model.model_dump(exclude={"servers"}) for role, model in models.items()},
            "task": self.tasks[task].model_dump(mode="json", exclude={"title", "test", "models"}),
            "method": {
                **about.model_dump(exclude={"title", "task_settings"}),
                "settings": about.for_task(task),
            },
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def list_models(self, task: str) -> dict[str, ModelSettings]:
        """Return the models of a task by their role."""
        return self.models[self.tasks[task].models]


class Outcomes(Frozen):
    """Solved items of a split: a character for each, 1 if it is solved."""

    solved: int
    items: int
    each: str


class CellResult(Frozen):
    """What a method found with one task and seed, and what it cost."""

    method: str
    task: str
    seed: int
    settings: str
    versions: dict[str, str]
    ended: str
    notes: dict[str, Any]
    spend: dict[str, RoleSpend]
    seconds: float
    skill: str
    val: Outcomes
    test: Outcomes | None = None

    def write(self, folder: Path) -> None:
        """Write the result as its file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name_result(self.method, self.task, self.seed)
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")


def name_result(method: str, task: str, seed: int) -> str:
    """Return the file's name of a result."""
    return f"{task}-{method}-{seed}.json"


def read_results(folder: Path) -> list[CellResult]:
    """Read all results, in the order of their names."""
    return [CellResult.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def read_settings(path: Path) -> Settings:
    """Read settings.yaml."""
    return Settings.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


class FixedAnswer:
    """A session of the target whose reply is known."""

    turns: tuple[Turn, ...] = ()

    def __init__(self, answer: str) -> None:
        self._answer = answer

    async def reply(self, message: str) -> str:
        """Return the known answer."""
        return self._answer


class Task:
    """Items, messages and the grader of a task, from a configuration of reflact."""

    def __init__(self, settings: TaskSettings) -> None:
        path = ROOT / settings.config
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.config: dict[str, Any] = {
            f"{section}.{key}": value
            for section in settings.keep
            for key, value in sections.get(section, {}).items()
        }
        for key in {"data.path", "environment.tables"} & self.config.keys():
            self.config[key] = str(path.parent / self.config[key])
        self.environment: DatasetEnvironment = build_environment(load_keys(self.config))
        self.items: dict[str, Sequence[Item]] = {
            str(split): self.environment.items(split)[: getattr(settings, str(split))] for split in Split
        }
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._by_id = {item.id: item for items in self.items.values() for item in items}

    def grade(self, name: str, answer: str) -> Grade:
        """Grade an answer to an item."""
        grading = self.environment.run(self._by_id[name], FixedAnswer(answer), seed=0)
        return asyncio.run_coroutine_threadsafe(grading, self._loop).result()

    def describe_grade(self, name: str, answer: str) -> dict[str, Any]:
        """Grade an answer of a method: its score, and for a failure all that reflact shows to its optimizer."""
        grade, reference = self.grade(name, answer), self._by_id[name].reference
        right = reference if isinstance(reference, str) else json.dumps(reference)
        parts = ["The answer is wrong.", grade.feedback, f"Right answer: {right}"]
        feedback = "The answer is right." if grade.score.hard else "\n".join(filter(None, parts))
        return {"hard": grade.score.hard, "soft": grade.score.soft, "feedback": feedback}

    def measure(self, meter: Meter, skill: str, split: str) -> Outcomes:
        """Measure a document on a split, outside of the budget."""

        def is_solved(item: Item) -> bool:
            system = [{"role": "system", "content": skill.strip("\n")}] if skill.strip() else []
            message = {"role": "user", "content": self.environment.render_message(item)}
            status, payload, _ = meter.complete("target", {"messages": [*system, message]})
            if status != 200:
                raise RuntimeError(f"the target did not answer: {payload}")
            return self.grade(item.id, payload["choices"][0]["message"]["content"]).score.hard >= 1

        with ThreadPoolExecutor(4) as pool:
            each = list(pool.map(is_solved, self.items[split]))
        return Outcomes(solved=sum(each), items=len(each), each="".join("01"[solved] for solved in each))


class Comparison:
    """Runs cells.

    Args:
        settings: All settings.
        results: Folder of the results.
        work: Folder of runs and stored replies; it may be deleted when all cells are done.
        peers: Folder of the peers' environments, each named ``venv-NAME``.
    """

    def __init__(self, settings: Settings, *, results: Path, work: Path, peers: Path) -> None:
        self.settings = settings
        self._results = results
        self._work = work
        self._peers = peers
        work.mkdir(parents=True, exist_ok=True)
        self._replies = ReplyStore(work / "replies.jsonl")
        self._servers = {name: Servers(models) for name, models in settings.models.items()}

    def train(self, method: str, name: str, seed: int) -> CellResult | None:
        """Run a method in a cell; None if its environment is missing."""
        settings, task = self.settings.methods[method], Task(self.settings.tasks[name])
        meter = self._build_meter(name, seed)
        versions: dict[str, str] = {}
        best: dict[str, Any] = {"skill": "", "ended": "complete", "notes": {}}
        start = time.monotonic()
        if settings.script is not None:
            python = self._find_python(settings)
            if python is None:
                return None
            versions = _read_versions(python, settings.version)
            best = self._run_script(python, method, name, task, meter)
        result = CellResult(
            method=method,
            task=name,
            seed=seed,
            settings=self.settings.digest(name, method),
            versions=versions,
            ended=best["ended"],
            notes=best["notes"],
            spend=meter.spend,
            seconds=round(time.monotonic() - start, 1),
            skill=best["skill"],
            val=task.measure(meter, best["skill"], "val"),
        )
        result.write(self._results)
        return result

    def test(self, result: CellResult) -> CellResult:
        """Measure the document of a result on the test items."""
        task = Task(self.settings.tasks[result.task])
        meter = self._build_meter(result.task, result.seed)
        opened = result.model_copy(update={"test": task.measure(meter, result.skill, "test")})
        opened.write(self._results)
        return opened

    def _build_meter(self, task: str, seed: int) -> Meter:
        about = self.settings.tasks[task]
        models, servers = self.settings.models[about.models], self._servers[about.models]
        return Meter(models, about.budget, self._replies, servers, seed)

    def _find_python(self, settings: MethodSettings) -> Path | None:
        if settings.environment is None:
            return Path(sys.executable)
        path = self._peers / f"venv-{settings.environment}" / "bin" / "python"
        return path if path.exists() else None

    def _run_script(self, python: Path, method: str, name: str, task: Task, meter: Meter) -> dict[str, Any]:
        about, cell = self.settings.methods[method], f"{name}-{method}-{meter.seed}"
        folder = self._work / cell
        shutil.rmtree(folder, ignore_errors=True)
        for split in ("train", "val"):
            (folder / "data" / split).mkdir(parents=True)
            rows = [
                {**item.metadata, **item.model_dump(mode="json", exclude={"metadata"})}
                for item in task.items[split]
            ]
            (folder / "data" / split / "items.json").write_text(json.dumps(rows), encoding="utf-8")
        limits = meter.limits
        with MeterServer(meter, task.describe_grade) as server, (folder / "log.txt").open("w") as log:
            job = {
                "seed": meter.seed,
                "url": server.url,
                "rollouts": limits.rollouts,
                "optimizer_max_tokens": self.settings.list_models(name)["optimizer"].max_tokens,
                "settings": about.for_task(name),
                "config": {**task.config, "data.path": str(folder / "data")},
                "items": {
                    split: [_describe(task, item) for item in task.items[split]] for split in ("train", "val")
                },
            }
            (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
            done = subprocess.run(
                [python, HERE / str(about.script), folder / "job.json"],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                timeout=ALARM,
                check=False,
            )
        best: dict[str, Any] = json.loads((folder / "best.json").read_text(encoding="utf-8"))
        if done.returncode:
            raise RuntimeError(f"{cell} ended with {done.returncode}; see {folder / 'log.txt'}")
        return best


def _describe(task: Task, item: Item) -> dict[str, Any]:
    values = item.model_dump(mode="json", include={"id", "input", "reference", "task_type"})
    return {**values, "message": task.environment.render_message(item)}


def _read_versions(python: Path, packages: Iterable[str]) -> dict[str, str]:
    code = "import sys, importlib.metadata as m; print(*[m.version(name) for name in sys.argv[1:]])"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, done.stdout.split(), strict=True))


def main() -> None:
    """Run the cells that have no result, or open the test items."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("train", "test"))
    parser.add_argument("--settings", type=Path, default=HERE / "settings.yaml")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "equal-budget")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers")
    for name in ("tasks", "methods"):
        parser.add_argument(f"--{name}", nargs="*", default=None)
    parser.add_argument("--seeds", nargs="*", type=int, default=None)
    parser.add_argument("--parallel", type=int, default=1, help="cells at a time")
    options = parser.parse_args()
    settings = read_settings(options.settings)
    comparison = Comparison(settings, results=options.results, work=options.work, peers=options.peers)
    cells = [
        (method, task, seed)
        for task in options.tasks or settings.tasks
        for seed in options.seeds or settings.seeds
        for method in options.methods or settings.methods
    ]
    done = {(result.method, result.task, result.seed): result for result in read_results(options.results)}

    def run_cell(cell: tuple[str, str, int]) -> None:
        old = done.get(cell)
        if options.command == "test":
            new = None if old is None or old.test is not None else comparison.test(old)
        else:
            new = comparison.train(*cell) if old is None else None
        if new is not None:
            print(_show(new), flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(run_cell, cells))


def _show(result: CellResult) -> str:
    spent = ", ".join(f"{role} {s.calls} calls {s.tokens} tokens" for role, s in result.spend.items())
    test = "" if result.test is None else f", test {result.test.solved} of {result.test.items}"
    return (
        f"{result.task} {result.method} {result.seed}: val {result.val.solved} of {result.val.items}{test}; "
        f"{result.ended} after {result.seconds:.0f} s; {spent}; {result.notes}"
    )


if __name__ == "__main__":
    main()
