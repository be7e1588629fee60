"""The reference workload in reflact, in the older trainer and in GEPA: wall time, processor time, work and result.

Install GEPA beside reflact, and clone the older trainer (https://github.com/microsoft/SkillOpt) with what it requires::

    pip install gepa
    python benchmarks/peers.py --skillopt PATH_OF_THE_CLONE --repeats 5

A trainer that is not there has no row. All trainers have the same items (80 train, 40 validation), the same toy target
and the same rules to find. Each rollout and each call of the optimizer sleeps for 200 ms, in 16 and 6 slots. Time is
real. Repeats take turns, and the table has medians.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import anyio
from schedule import LATENCY, Slots, SlowTarget

from reflact import Trainer
from reflact.config.loading import load_keys
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.testing import ScriptedLLM, ToyEnvironment, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.testing.toy import TOY_RULES

TRAIN, VAL, TEST = 80, 40, 8
BATCH, MINIBATCH, EPOCHS = 20, 4, 2
SLOTS = (16, 6)
INITIAL = "# Skill\n"
LINES = {name: rule.line for name, rule in TOY_RULES.items()}


class Outcome(NamedTuple):
    """One run: seconds of wall and processor time, rollouts and calls, and the share of the rules that it found."""

    wall: float
    cpu: float
    rollouts: int
    calls: int
    found: float


class World:
    """The toy world for trainers that are not async: draws, sleeps and counts.

    Args:
        noise: Share of rollouts in which the target does the opposite of what it knows.
    """

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.rollouts, self.calls = count(), count()
        self._draws = random.Random(0)
        names = list(TOY_RULES)
        sizes = {"train": TRAIN, "val": VAL, "test": TEST}
        self.items = {
            split: [{"id": f"{split}-{n:03}", "rule": names[n % len(names)]} for n in range(size)]
            for split, size in sizes.items()
        }

    def is_solved(self, skill: str, item: dict[str, str]) -> bool:
        """Roll out one item, in a slot of the caller."""
        next(self.rollouts)
        time.sleep(LATENCY)
        return (LINES[item["rule"]] in skill) is not (self._draws.random() < self.noise)

    def call(self) -> None:
        """Spend the time of a call of the optimizer."""
        next(self.calls)
        time.sleep(LATENCY)

    def roll_out(self, skill: str, items: Iterable[dict[str, str]]) -> list[bool]:
        """Roll out items in all slots."""
        with ThreadPoolExecutor(SLOTS[0]) as pool:
            return list(pool.map(lambda item: self.is_solved(skill, item), items))

    def end(self, skill: str, wall: float, cpu: float) -> Outcome:
        """Return the outcome of a run that began at these readings of the clocks."""
        found = sum(line in skill for line in LINES.values()) / len(LINES)
        spent = (time.perf_counter() - wall, time.process_time() - cpu)
        return Outcome(*spent, next(self.rollouts), next(self.calls), found)


def find_lines(text: str) -> list[str]:
    """Return the lines of the rules that a text says are missing, most frequent first."""
    missing = re.findall(r"missing rule: (\w+)", text)
    return [LINES[name] for name in sorted(set(missing), key=missing.count, reverse=True)]


def run_reflact(noise: float, *, policy: str) -> Outcome:
    """Train with reflact, with its store in a file."""
    rollouts, calls, toy = Slots(SLOTS[0]), Slots(SLOTS[1]), toy_optimizer(edits=2)

    async def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await calls.use(call_id.purpose)
        return toy(prompt, reply_type, call_id)  # type: ignore[return-value]

    async def train(folder: str) -> str:
        config = load_keys(
            {
                "out_dir": folder,
                "report": False,
                "seed": 1,
                "train.batch_size": BATCH,
                "train.num_epochs": EPOCHS,
                "train.rollout_concurrency": SLOTS[0],
                "reflect.minibatch_size": MINIBATCH,
                "reflect.concurrency": SLOTS[1],
                "gate.policy": policy,
                "test.enabled": False,
            }
        )
        environment = ToyEnvironment(train=TRAIN, val=VAL, test=TEST, rules=len(LINES))
        target = SlowTarget(rollouts, noise)
        await Trainer(config, environment=environment, target=target, optimizer=ScriptedLLM(answer)).train()
        return (Path(folder) / "best_skill.md").read_text(encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        skill = anyio.run(train, folder)
        spent = (time.perf_counter() - wall, time.process_time() - cpu)
    found = sum(line in skill for line in LINES.values()) / len(LINES)
    return Outcome(*spent, rollouts.used.total(), calls.used.total(), found)


def run_skillopt(noise: float) -> Outcome:
    """Train with the older trainer: its own loop and files; its models are played."""
    import skillopt.model.azure_openai as backend
    from skillopt.datasets.base import SplitDataLoader
    from skillopt.engine.trainer import ReflACTTrainer
    from skillopt.envs.base import EnvAdapter

    world = World(noise)

    class Adapter(EnvAdapter):  # type: ignore[misc]
        analyst_workers, failure_only, minibatch_size, edit_budget = SLOTS[1], False, MINIBATCH, 4

        def __init__(self, folder: Path) -> None:
            for split, items in world.items.items():
                (folder / split).mkdir(parents=True)
                (folder / split / "items.json").write_text(json.dumps(items), encoding="utf-8")
            self.loader = SplitDataLoader(split_dir=str(folder), split_mode="split_dir")

        def setup(self, cfg: dict[str, Any]) -> None:
            super().setup(cfg)
            self.loader.setup(cfg)

        def get_dataloader(self) -> SplitDataLoader:
            return self.loader

        def build_env_from_batch(self, batch: Any, **_: Any) -> list[dict[str, str]]:
            return list(batch.payload or [])

        def build_train_env(self, *_: Any, **__: Any) -> None: ...

        def build_eval_env(self, *_: Any, **__: Any) -> None: ...

        def rollout(self, items: Any, skill: str, out_dir: str, **_: Any) -> list[dict[str, Any]]:
            solved = world.roll_out(skill, items)
            for item in items:
                folder = Path(out_dir) / "predictions" / item["id"]
                folder.mkdir(parents=True, exist_ok=True)
                turns = [{"role": "user", "content": f"{item['rule']} 7"}, {"role": "agent", "content": "?"}]
                (folder / "conversation.json").write_text(json.dumps(turns), encoding="utf-8")
            return [
                {
                    "id": item["id"],
                    "hard": int(right),
                    "soft": float(right),
                    "task_type": item["rule"],
                    "fail_reason": "" if right else f"missing rule: {item['rule']}",
                }
                for item, right in zip(items, solved, strict=True)
            ]

        def get_task_types(self) -> list[str]:
            return list(LINES)

    def answer(*, user: str, stage: str = "", **_: Any) -> tuple[str, dict[str, int]]:
        world.call()
        lines = find_lines(user)[:2] if stage == "analyst" else [x for x in LINES.values() if x in user]
        edits = [{"op": "append", "content": line, "target": ""} for line in lines]
        replies: dict[str, dict[str, Any]] = {
            "analyst": {"patch": {"reasoning": "As seen.", "edits": edits}},
            "merge": {"reasoning": "Joined.", "edits": edits},
            "ranking": {"reasoning": "The first ones.", "selected_indices": list(range(16))},
            "slow_update": {"reasoning": "As seen.", "slow_update_content": "Answer every task."},
            "meta_skill": {"reasoning": "As seen.", "meta_skill_content": "Add the lines of rules."},
        }
        return json.dumps(replies[stage]), {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}

    backend.chat_optimizer = answer
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        initial = Path(folder) / "initial.md"
        initial.write_text(INITIAL, encoding="utf-8")
        settings = {
            "out_root": f"{folder}/out",
            "skill_init": str(initial),
            "optimizer_model": "played",
            "target_model": "played",
            "batch_size": BATCH,
            "num_epochs": EPOCHS,
            "accumulation": 1,
            "seed": 1,
            "merge_batch_size": 8,
            "edit_budget": 4,
            "analyst_workers": SLOTS[1],
            "sel_env_num": VAL,
            "test_env_num": TEST,
            "eval_test": False,
            "use_slow_update": True,
            "use_meta_skill": True,
            "lr_scheduler": "cosine",
        }
        adapter = Adapter(Path(folder) / "items")
        wall, cpu = time.perf_counter(), time.process_time()
        ReflACTTrainer(settings, adapter).train()
        skill = (Path(folder) / "out" / "best_skill.md").read_text(encoding="utf-8")
        return world.end(skill, wall, cpu)


def run_gepa(noise: float, *, rollouts: int) -> Outcome:
    """Train with GEPA and its defaults, with as many rollouts as reflact took."""
    import gepa
    from gepa.core.adapter import EvaluationBatch

    world = World(noise)

    class Adapter:
        propose_new_texts = None

        def evaluate(self, batch: Any, candidate: dict[str, str], capture_traces: bool = False) -> Any:
            solved = world.roll_out(candidate["skill"], batch)
            told = [
                "right" if right else f"missing rule: {item['rule']}"
                for item, right in zip(batch, solved, strict=True)
            ]
            return EvaluationBatch(told, [float(right) for right in solved], told if capture_traces else None)

        def make_reflective_dataset(self, candidate: Any, batch: Any, components: Sequence[str]) -> Any:
            return {name: [{"Feedback": told} for told in batch.outputs] for name in components}

    def answer(prompt: Any) -> str:
        world.call()
        shown = str(prompt)
        held = [line for line in LINES.values() if line in shown]
        new = [line for line in find_lines(shown) if line not in held][:2]
        return "```\n" + "\n".join([INITIAL.strip(), *held, *new]) + "\n```"

    wall, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = gepa.optimize(
            {"skill": INITIAL},
            world.items["train"],
            world.items["val"],
            adapter=Adapter(),
            reflection_lm=answer,
            max_metric_calls=rollouts,
            seed=1,
        )
    return world.end(result.best_candidate["skill"], wall, cpu)


def list_trainers(skillopt: Path | None) -> dict[str, Callable[[float], Outcome]]:
    """Return the trainers that are there, by name."""
    trainers: dict[str, Callable[[float], Outcome]] = {
        "reflact, strict": lambda noise: run_reflact(noise, policy="strict"),
        "reflact, ranked": lambda noise: run_reflact(noise, policy="ranked"),
    }
    if skillopt is not None:
        sys.path.insert(0, str(skillopt))
        trainers["the older trainer"] = run_skillopt
    with contextlib.suppress(ImportError):
        import gepa  # noqa: F401

        trainers["GEPA"] = lambda noise: run_gepa(noise, rollouts=612)
    return trainers


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--skillopt", type=Path, default=None, help="a clone of the older trainer")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    trainers = list_trainers(options.skillopt)
    print("| noise | trainer | wall | processor time | rollouts | calls | rules found |")
    print("|---|---|---|---|---|---|---|")
    for noise in (0.0, 0.2):
        outcomes: dict[str, list[Outcome]] = {name: [] for name in trainers}
        for _ in range(options.repeats):
            for name, run in trainers.items():
                outcomes[name].append(run(noise))
        for name, runs in outcomes.items():
            wall, cpu, rollouts, calls, found = (median(column) for column in zip(*runs, strict=True))
            print(
                f"| {noise} | {name} | {wall:.1f} s | {cpu:.2f} s | {rollouts:.0f} | {calls:.0f} | {found:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
