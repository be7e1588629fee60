"""GEPA in a cell: its defaults, an adapter for the task, and as many metric calls as the cell has rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gepa
from client import BudgetSpent, Job
from gepa.core.adapter import EvaluationBatch

job = Job.read()
job.save("")


class Adapter:
    """Rolls out a document, and shows failures as reflact does."""

    propose_new_texts = None

    def evaluate(self, batch: Any, candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Roll out a batch."""
        shown = job.roll_out_all(candidate["skill"], batch)
        rollouts = [
            {**one, "task": item["message"]} for one, item in zip(shown, batch, strict=True)
        ]
        return EvaluationBatch(
            rollouts, [r["score"] for r in rollouts], rollouts if capture_traces else None
        )

    def make_reflective_dataset(self, candidate: Any, batch: Any, components: Sequence[str]) -> Any:
        """Return inputs, outputs and feedback of a batch, in the form of GEPA's default adapter."""
        rows = [
            {"Inputs": r["task"], "Generated Outputs": r["answer"], "Feedback": r["feedback"]}
            for r in batch.trajectories
        ]
        return dict.fromkeys(components, rows)


class Best:
    """Keeps the document with the best validation score, in case the budget ends within an iteration."""

    score = -1.0
    measured = 0

    def on_valset_evaluated(self, event: Any) -> None:
        """Keep a better document."""
        self.measured += 1
        if event["average_score"] > self.score:
            self.score = event["average_score"]
            job.save(
                event["candidate"]["skill"], "budget", candidates=self.measured, val=self.score
            )


def reflect(prompt: Any) -> str:
    """Ask the optimizer."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return job.ask("optimizer", messages)


best = Best()
try:
    result = gepa.optimize(
        {"skill": ""},
        job.items["train"],
        job.items["val"],
        adapter=Adapter(),
        reflection_lm=reflect,
        max_metric_calls=job.rollouts,
        seed=job.seed,
        callbacks=[best],
        **job.settings,
    )
except BudgetSpent:
    pass
else:
    job.save(
        result.best_candidate["skill"],
        "complete",
        candidates=len(result.candidates),
        val=best.score,
    )
