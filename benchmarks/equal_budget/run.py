"""Run the comparison at equal budget: every method on every task with every seed.

Give each peer an environment of its own, and start the model of ``settings.yaml`` (batch_server.py)::

    python -m venv PEERS/venv-gepa && PEERS/venv-gepa/bin/pip install gepa
    python -m venv PEERS/venv-dspy && PEERS/venv-dspy/bin/pip install dspy optuna
    python -m venv PEERS/venv-skillopt && PEERS/venv-skillopt/bin/pip install skillopt json_repair
    python benchmarks/equal_budget/run.py train --peers PEERS
    python benchmarks/equal_budget/run.py test
    python benchmarks/equal_budget/page.py

``train`` runs each method on the train and validation items, and writes a result with its best document. A cell that
has a result is skipped, and so is a peer whose environment is missing. ``test`` measures each document on the test
items, after all settings are decided. Both need nothing else on the network than the model. ``--tasks`` takes names of
tasks or ``tuning`` and ``showing``; ``--methods``, ``--budgets`` and ``--seeds`` choose cells too.
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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import yaml
from meter import (
    BudgetLimits,
    Frozen,
    Meter,
    MeterServer,
    ModelSettings,
    ReplyStore,
    RoleSpend,
    Servers,
)

from reflact.adapters import load_named_environment
from reflact.config.loading import load_keys
from reflact.environments.dataset import build_environment
from reflact.protocols import Environment
from reflact.types import Grade, Item, Split, Turn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results"
ALARM = 3 * 3600
"""Seconds after which a method hangs."""


class TaskSettings(Frozen):
    """A task: its half, the most tokens of an answer, the score that counts, and its configuration of reflact.

    ``config`` is ``tasks/NAME/task.yaml``, if none is named.
    """

    title: str
    half: Literal["tuning", "showing"]
    reply_tokens: int
    score: Literal["hard", "soft"] = "hard"
    config: Path | None = None


class MethodSettings(Frozen):
    """A method: its script, its environment, the packages whose versions count, its settings and its budgets."""

    title: str
    script: str | None = None
    environment: str | None = None
    version: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    budgets: tuple[str, ...] = ("small", "large")


class Settings(Frozen):
    """All of settings.yaml; ``models`` are a target and an optimizer, and ``sizes`` the items of each split."""

    models: dict[str, ModelSettings]
    seeds: tuple[int, ...]
    sizes: dict[str, int]
    budgets: dict[str, BudgetLimits]
    tasks: dict[str, TaskSettings]
    methods: dict[str, MethodSettings]

    def digest(self, cell: Cell) -> str:
        """Return a digest of all settings that a cell depends on, except its seed."""
        parts = {
            "models": {
                role: model.model_dump(exclude={"servers"})
                for role, model in self.list_models(cell.task).items()
            },
            "task": self.tasks[cell.task].model_dump(
                mode="json", exclude={"title", "half", "config"}
            ),
            "sizes": self.sizes,
            "budget": self.budgets[cell.budget].model_dump(),
            "method": self.methods[cell.method].model_dump(exclude={"title", "budgets"}),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def list_models(self, task: str) -> dict[str, ModelSettings]:
        """Return the models of a task by their role."""
        target = self.models["target"].model_copy(
            update={"max_tokens": self.tasks[task].reply_tokens}
        )
        return {**self.models, "target": target}

    def list_tasks(self, half: str) -> list[str]:
        """Return the tasks of a half."""
        return [name for name, task in self.tasks.items() if task.half == half]


class Cell(Frozen):
    """What is run: a method on a task, with a budget and a seed."""

    task: str
    method: str
    budget: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.task}-{self.method}-{self.budget}-{self.seed}"


class Outcomes(Frozen):
    """The score of each item of a split, and their mean."""

    mean: float
    each: tuple[float, ...]


class CellResult(Frozen):
    """What a method found in a cell, and what it cost.

    ``document_tokens`` are those that the document adds to each call of the target.
    """

    cell: Cell
    settings: str
    versions: dict[str, str]
    ended: str
    notes: dict[str, Any]
    spend: dict[str, RoleSpend]
    seconds: float
    skill: str
    document_tokens: int
    val: Outcomes
    test: Outcomes | None = None

    def write(self, folder: Path) -> None:
        """Write the result as its file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.cell.name}.json"
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")


def read_results(folder: Path) -> list[CellResult]:
    """Read all results, in the order of their names."""
    return [
        CellResult.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))
    ]


def read_settings(path: Path) -> Settings:
    """Read settings.yaml."""
    return Settings.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


class Unanswered(Exception):
    """The environment has a further message to the target."""


class ReplayedSession:
    """A session of the target whose answers are known.

    Raises:
        Unanswered: All answers are used.
    """

    turns: tuple[Turn, ...] = ()

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = list(answers)

    async def reply(self, message: str) -> str:
        """Return the next answer."""
        if not self._answers:
            raise Unanswered(message)
        return self._answers.pop(0)


class Task:
    """Items, messages and the grader of a task, from a configuration of reflact."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.name, self.score = name, settings.tasks[name].score
        path = settings.tasks[name].config or HERE / "tasks" / name / "task.yaml"
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.config = _read_keys(sections, path.parent)
        config = load_keys(self.config)
        self.environment: Environment = load_named_environment(config) or build_environment(config)
        self.items: dict[str, Sequence[Item]] = {
            str(split): self.environment.items(split)[: settings.sizes[split]] for split in Split
        }
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._by_id = {item.id: item for items in self.items.values() for item in items}

    def play(self, name: str, answers: Sequence[str]) -> Grade | str:
        """Grade the answers to an item, or return the next message to the target."""
        playing = self.environment.run(self._by_id[name], ReplayedSession(answers), seed=0)
        try:
            return asyncio.run_coroutine_threadsafe(playing, self._loop).result()
        except Unanswered as message:
            return str(message)

    def describe_grade(self, name: str, answers: Sequence[str]) -> dict[str, Any]:
        """Grade answers of a method: the score, and for a failure all that reflact shows to its optimizer."""
        grade, reference = self.play(name, answers), self._by_id[name].reference
        if isinstance(grade, str):
            return {"message": grade}
        right = reference if isinstance(reference, str) else json.dumps(reference)
        wrong = (
            "The answer is wrong."
            if self.score == "hard"
            else f"The answer scores {grade.score.soft:.2f} of 1."
        )
        shown = f"Right answer: {right}" if reference is not None else None
        is_right = grade.score.hard == 1
        feedback = (
            "The answer is right."
            if is_right
            else "\n".join(filter(None, (wrong, grade.feedback, shown)))
        )
        score = getattr(grade.score, self.score)
        return {
            "hard": grade.score.hard,
            "soft": grade.score.soft,
            "score": score,
            "feedback": feedback,
        }

    def measure(self, meter: Meter, skill: str, split: str) -> Outcomes:
        """Measure a document on a split, outside of the budget."""

        def measure_item(item: Item) -> float:
            answers: list[str] = []
            messages = [{"role": "system", "content": skill.strip("\n")}] if skill.strip() else []
            while isinstance(grade := self.play(item.id, answers), str):
                messages.append({"role": "user", "content": grade})
                status, payload, _ = meter.complete("target", {"messages": messages})
                if status != 200:
                    raise RuntimeError(f"the target did not answer: {payload}")
                answers.append(payload["choices"][0]["message"]["content"])
                messages.append({"role": "assistant", "content": answers[-1]})
            return round(float(getattr(grade.score, self.score)), 3)

        with ThreadPoolExecutor(8) as pool:
            each = tuple(pool.map(measure_item, self.items[split]))
        return Outcomes(mean=round(sum(each) / len(each), 4), each=each)

    def count_document(self, meter: Meter, skill: str) -> int:
        """Return the tokens that a document adds to each call, as the model counts them."""
        if not skill.strip():
            return 0
        user = {"role": "user", "content": self.play(self.items["val"][0].id, ())}
        system = {"role": "system", "content": skill.strip("\n")}
        counts = [
            meter.complete("target", {"messages": messages})[1]["usage"]["prompt_tokens"]
            for messages in ([system, user], [user])
        ]
        return int(counts[0] - counts[1])


def _read_keys(sections: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the keys of a task's configuration, with whole paths."""
    keys = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
    }
    for key in {"data.path", "environment.tables"} & keys.keys():
        keys[key] = str(folder / keys[key])
    if "environment.options" in keys:
        options = keys["environment.options"]
        keys["environment.options"] = {**options, "path": str(folder / options["path"])}
    return keys


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
        self._servers = Servers(settings.models)

    def train(self, cell: Cell) -> CellResult | None:
        """Run a method in a cell; None if its environment is missing."""
        settings, task = self.settings.methods[cell.method], Task(self.settings, cell.task)
        meter = self._build_meter(cell)
        versions: dict[str, str] = {}
        best: dict[str, Any] = {"skill": "", "ended": "complete", "notes": {}}
        start = time.monotonic()
        if settings.script is not None:
            python = self._find_python(settings)
            if python is None:
                return None
            versions = _read_versions(python, settings.version)
            best = self._run_script(python, cell, task, meter)
        result = CellResult(
            cell=cell,
            settings=self.settings.digest(cell),
            versions=versions,
            ended=best["ended"],
            notes=best["notes"],
            spend=meter.spend,
            seconds=round(time.monotonic() - start, 1),
            skill=best["skill"],
            document_tokens=task.count_document(meter, best["skill"]),
            val=task.measure(meter, best["skill"], "val"),
        )
        result.write(self._results)
        return result

    def test(self, result: CellResult) -> CellResult:
        """Measure the document of a result on the test items."""
        task = Task(self.settings, result.cell.task)
        outcomes = task.measure(self._build_meter(result.cell), result.skill, "test")
        opened = result.model_copy(update={"test": outcomes})
        opened.write(self._results)
        return opened

    def _build_meter(self, cell: Cell) -> Meter:
        models, limits = self.settings.list_models(cell.task), self.settings.budgets[cell.budget]
        return Meter(models, limits, self._replies, self._servers, cell.seed)

    def _find_python(self, settings: MethodSettings) -> Path | None:
        if settings.environment is None:
            return Path(sys.executable)
        path = self._peers / f"venv-{settings.environment}" / "bin" / "python"
        return path if path.exists() else None

    def _run_script(self, python: Path, cell: Cell, task: Task, meter: Meter) -> dict[str, Any]:
        folder = self._work / cell.name
        shutil.rmtree(folder, ignore_errors=True)
        _write_items(folder / "data", task)
        about = self.settings.methods[cell.method]
        with (
            MeterServer(meter, task.describe_grade) as server,
            (folder / "log.txt").open("w") as log,
        ):
            job = {
                "seed": meter.seed,
                "url": server.url,
                "rollouts": meter.limits.rollouts,
                "optimizer_tokens": meter.limits.optimizer_tokens,
                "optimizer_max_tokens": self.settings.models["optimizer"].max_tokens,
                "score": task.score,
                "settings": about.settings,
                "config": _move_data(task.config, folder / "data"),
                "items": {
                    split: [_describe(task, item) for item in task.items[split]]
                    for split in ("train", "val")
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
        if done.returncode:
            raise RuntimeError(
                f"{cell.name} ended with {done.returncode}; see {folder / 'log.txt'}"
            )
        best: dict[str, Any] = json.loads((folder / "best.json").read_text(encoding="utf-8"))
        return best


def _write_items(folder: Path, task: Task) -> None:
    """Write the items that a method may see."""
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)
        rows = [
            {**item.metadata, **item.model_dump(mode="json", exclude={"metadata"})}
            for item in task.items[split]
        ]
        (folder / split / "items.json").write_text(json.dumps(rows), encoding="utf-8")


def _move_data(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a task's configuration with the items of a folder."""
    if options := config.get("environment.options"):
        return {**config, "environment.options": {**options, "path": str(folder)}}
    return {**config, "data.path": str(folder)}


def _describe(task: Task, item: Item) -> dict[str, Any]:
    values = item.model_dump(mode="json", include={"id", "input", "reference", "task_type"})
    return {**values, "message": task.play(item.id, ())}


def _read_versions(python: Path, packages: Iterable[str]) -> dict[str, str]:
    code = "import sys, importlib.metadata as m; print(*[m.version(name) for name in sys.argv[1:]])"
    done = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return dict(zip(packages, done.stdout.split(), strict=True))


def main() -> int:
    """Run the cells that have no result, or open the test items."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("train", "test"))
    parser.add_argument("--settings", type=Path, default=HERE / "settings.yaml")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "equal-budget")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers")
    for name in ("tasks", "methods", "budgets"):
        parser.add_argument(f"--{name}", nargs="*", default=None)
    parser.add_argument("--seeds", nargs="*", type=int, default=None)
    parser.add_argument("--parallel", type=int, default=1, help="cells at a time")
    options = parser.parse_args()
    settings = read_settings(options.settings)
    comparison = Comparison(
        settings, results=options.results, work=options.work, peers=options.peers
    )
    done = {result.cell: result for result in read_results(options.results)}

    def run_cell(cell: Cell) -> bool:
        try:
            new = _run_cell(comparison, options.command, cell, done.get(cell))
        except RuntimeError as error:  # the other cells go on
            print(error, file=sys.stderr, flush=True)
            return False
        if new is not None:
            print(_show(new), flush=True)
        return True

    with ThreadPoolExecutor(options.parallel) as pool:
        return int(not all(list(pool.map(run_cell, _list_cells(settings, options)))))


def _list_cells(settings: Settings, options: argparse.Namespace) -> list[Cell]:
    """Return the chosen cells; small budgets first, and each seed for all methods before the next one."""
    tasks = [
        task
        for name in options.tasks or settings.tasks
        for task in (settings.list_tasks(name) if name in {"tuning", "showing"} else [name])
    ]
    return [
        Cell(task=task, method=method, budget=budget, seed=seed)
        for budget in options.budgets or settings.budgets
        for seed in options.seeds or settings.seeds
        for task in tasks
        for method in options.methods or settings.methods
        if budget in settings.methods[method].budgets
    ]


def _run_cell(
    comparison: Comparison, command: str, cell: Cell, result: CellResult | None
) -> CellResult | None:
    """Do what is missing of a cell; None if nothing is, or cannot be done."""
    if command == "train":
        return comparison.train(cell) if result is None else None
    return None if result is None or result.test is not None else comparison.test(result)


def _show(result: CellResult) -> str:
    spent = ", ".join(
        f"{role} {s.calls} calls {s.tokens} tokens" for role, s in result.spend.items()
    )
    test = "" if result.test is None else f", test {result.test.mean:.3f}"
    return (
        f"{result.cell.name}: val {result.val.mean:.3f}{test}; {result.document_tokens} tokens; "
        f"{result.ended} after {result.seconds:.0f} s; {spent}; {result.notes}"
    )


if __name__ == "__main__":
    sys.exit(main())
