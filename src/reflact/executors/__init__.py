"""Where an environment's ``run`` takes place: in the event loop, or in workers of Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reflact.lazy import load_exports

if TYPE_CHECKING:
    from reflact.executors.jobs import EnvironmentReference, Executor, ExecutorJob, ExecutorResult
    from reflact.executors.worker import JobRunner

__all__ = ["EnvironmentReference", "Executor", "ExecutorJob", "ExecutorResult", "JobRunner"]

__getattr__ = load_exports(
    __name__,
    {
        "executors.jobs": ("EnvironmentReference", "Executor", "ExecutorJob", "ExecutorResult"),
        "executors.worker": ("JobRunner",),
    },
)
