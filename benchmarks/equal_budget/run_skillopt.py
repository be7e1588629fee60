"""SkillOpt in a cell: its own loop, prompts and parsers, with its OpenAI-compatible backend and an adapter for the task."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from client import BudgetSpent, Job

job = Job.read()
job.save("")
for role in ("OPTIMIZER", "TARGET"):
    os.environ[f"{role}_OPENAI_COMPATIBLE_BASE_URL"] = f"{job.url}/{role.lower()}/v1"
    os.environ[f"{role}_OPENAI_COMPATIBLE_MODEL"] = role.lower()
    os.environ[f"{role}_OPENAI_COMPATIBLE_MAX_TOKENS"] = str(job.optimizer_max_tokens)
    os.environ[f"{role}_OPENAI_COMPATIBLE_TIMEOUT_SECONDS"] = "3600"

from skillopt.datasets.base import SplitDataLoader  # noqa: E402 - it reads the environment when it is imported
from skillopt.engine.trainer import ReflACTTrainer  # noqa: E402
from skillopt.envs.base import EnvAdapter  # noqa: E402


class Adapter(EnvAdapter):  # type: ignore[misc]
    """Rolls out a document, and writes the conversations that its analysts read."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.analyst_workers = settings["analyst_workers"]
        self.failure_only = False
        self.minibatch_size = settings["minibatch_size"]
        self.edit_budget = settings["edit_budget"]
        for split in ("train", "val", "test"):
            (folder / split).mkdir(parents=True, exist_ok=True)
            rows = job.items["val" if split == "test" else split]
            (folder / split / "items.json").write_text(json.dumps(rows), encoding="utf-8")
        self.loader = SplitDataLoader(split_dir=str(folder), split_mode="split_dir")

    def setup(self, cfg: dict[str, Any]) -> None:
        """Prepare the items."""
        super().setup(cfg)
        self.loader.setup(cfg)

    def get_dataloader(self) -> SplitDataLoader:
        """Return the source of items."""
        return self.loader

    def build_env_from_batch(self, batch: Any, **_: Any) -> list[dict[str, Any]]:
        """Return the items of a batch."""
        return list(batch.payload or [])

    def build_train_env(self, *_: Any, **__: Any) -> None:
        """Batches come from the source of items."""

    def build_eval_env(self, *_: Any, **__: Any) -> None:
        """Batches come from the source of items."""

    def rollout(self, items: Any, skill: str, out_dir: str, **_: Any) -> list[dict[str, Any]]:
        """Roll out items."""
        results = []
        for item, shown in zip(items, job.roll_out_all(skill, items), strict=True):
            folder = Path(out_dir) / "predictions" / item["id"]
            folder.mkdir(parents=True, exist_ok=True)
            turns = [*shown["turns"], {"role": "system", "content": shown["feedback"]}]
            turns = [{**turn, "role": turn["role"].replace("assistant", "agent")} for turn in turns]
            (folder / "conversation.json").write_text(json.dumps(turns), encoding="utf-8")
            results.append(
                {
                    "id": item["id"],
                    "hard": int(shown["hard"]),
                    "soft": shown["soft"],
                    "n_turns": len(shown["turns"]) // 2,
                    "task_type": item["task_type"] or "task",
                    "task_description": item["message"],
                    "predicted_answer": shown["answer"],
                    "fail_reason": "" if shown["hard"] else shown["feedback"],
                }
            )
        return results

    def get_task_types(self) -> list[str]:
        """Return the kinds of task."""
        return sorted({item["task_type"] or "task" for item in job.items["train"]})


def read_best(out: Path) -> str:
    """Return the best document; the run starts without a file of it."""
    path = out / "best_skill.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def count_replies(out: Path) -> dict[str, int]:
    """Count steps by their outcome, and analysts whose reply could be parsed."""
    history = out / "history.json"
    steps = json.loads(history.read_text(encoding="utf-8")) if history.exists() else []
    counts = {f"steps {action}": 0 for action in sorted({step["action"] for step in steps})}
    for step in steps:
        counts[f"steps {step['action']}"] += 1
    return {
        **counts,
        "parsed analyst replies": len(list(out.glob("steps/**/patches/minibatch_*.json"))),
    }


out = job.folder / "out"
settings = {
    "out_root": str(out),
    "skill_init": str(job.folder / "none.md"),
    "model_backend": "openai_compatible",
    "optimizer_backend": "openai_compatible",
    "target_backend": "openai_compatible",
    "optimizer_model": "optimizer",
    "target_model": "target",
    "accumulation": 1,
    "seed": job.seed,
    "sel_env_num": 0,
    "test_env_num": 0,
    "eval_test": False,
    "gate_metric": job.score,
    **job.settings,
}
ended = "complete"
try:
    ReflACTTrainer(settings, Adapter(settings, job.folder / "items")).train()
except BudgetSpent:
    ended = "budget"
job.save(read_best(out), ended, **count_replies(out))
