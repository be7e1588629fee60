"""reflact in a cell."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from client import CONCURRENCY, Job

from reflact import Trainer
from reflact.config.loading import load_keys
from reflact.events import StepCommitted


def build_keys(job: Job) -> dict[str, Any]:
    """Return the configuration: that of the task, the models behind the meter, and the settings of the method."""
    models = {
        f"models.{role}.{key}": value
        for role in ("target", "optimizer")
        for key, value in {
            "model": role,
            "base_url": f"{job.url}/{role}/v1",
            "api_key_env": None,
            "mode": "json_schema",
            "concurrency": CONCURRENCY,
            "timeout": 3600,
        }.items()
    }
    return {
        **job.config,
        **models,
        "gate.metric": job.score,
        "out_dir": str(job.folder / "out"),
        "seed": job.seed,
        "train.max_rollouts": job.rollouts,
        "report": False,
        "models.target.temperature": 0,
        "models.optimizer.seed": "per_call",
        "models.optimizer.temperature": 1,
        "models.optimizer.max_tokens": job.optimizer_max_tokens,
        "test.enabled": False,
        "test.null_answers": False,
        **job.settings,
    }


async def train(job: Job) -> Counter[str]:
    """Train until the run or the budget ends, and count the steps by their outcome."""
    actions: Counter[str] = Counter()
    async with Trainer(load_keys(build_keys(job))).stream() as stream:
        async for event in stream:
            if isinstance(event, StepCommitted):
                actions[f"steps {event.action}"] += 1
    return actions


if __name__ == "__main__":
    task = Job.read()
    task.save("")
    steps = asyncio.run(train(task))
    out = task.folder / "out"
    path = out / "best_skill.md"
    skill = path.read_text(encoding="utf-8") if path.exists() else ""
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    ended = "complete" if summary["status"] == "completed" else "budget"
    task.save(skill, ended, status=summary["status"], **steps)
