"""Report a run to MLflow while it goes on. Run `pip install mlflow-skinny`.

python examples/track_with_mlflow.py run.yaml http://localhost:5000
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from reflact import RunSummary, Trainer
from reflact.events import RunFinished, StepCommitted

STATUSES = {
    "completed": "FINISHED",
    "budget": "FINISHED",
    "cancelled": "KILLED",
    "failed": "FAILED",
}


def find_run(client: Any, experiment: str, run_id: str) -> str:
    """Return MLflow's id of a run. A resumed run goes on in its own record."""
    found = client.search_runs([experiment], f"tags.`reflact.run_id` = '{run_id}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    return str(client.create_run(experiment, tags={"reflact.run_id": run_id}).info.run_id)


async def train_with_mlflow(
    trainer: Trainer, client: Any, experiment: str, out_dir: Path
) -> RunSummary:
    """Train; log the best score of each step, and at the end the document and the status.

    MLflow's client blocks, so each call runs in a thread.
    """
    call = asyncio.to_thread
    run = ""
    async for event in trainer.stream():
        run = run or await call(find_run, client, experiment, event.run_id)
        match event:
            case StepCommitted(step=step, best=best) if best.score is not None:
                await call(client.log_metric, run, "score.best", best.score, step=step)
            case RunFinished(summary=summary):
                await call(client.log_artifact, run, str(out_dir / "best_skill.md"))
                await call(client.update_run, run, STATUSES[summary.status])
    return summary


if __name__ == "__main__":
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=sys.argv[2])
    trainer = Trainer(Path(sys.argv[1]))
    experiment = client.create_experiment("reflact")
    print(asyncio.run(train_with_mlflow(trainer, client, experiment, Path("runs"))).verdict)
