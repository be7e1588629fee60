"""What the trainer and its workers exchange: jobs, results and exceptions, all as values."""

from __future__ import annotations

import traceback
from typing import Protocol

from pydantic import Field

from reflact import errors
from reflact.config.training import EnvironmentConfig, TargetConfig
from reflact.errors import ReflactError
from reflact.types import FrozenModel, Grade, Item, Turn


class EnvironmentReference(FrozenModel):
    """How a worker makes an environment.

    Attributes:
        identity: The environment's identity, which the worker's must equal.
        section: The configuration's section, which names the environment; None if ``pickled`` is
            set.
        pickled: An object that was passed in Python, pickled, in base64.
    """

    identity: str
    section: EnvironmentConfig | None = None
    pickled: str | None = Field(default=None, repr=False)


class TargetReference(FrozenModel):
    """How a worker makes a target whose agent asks its model through a gateway, such as a command.

    Attributes:
        identity: The target's identity, which the worker's must equal.
        section: The configuration's section, which names the target.
        model: The name of the model behind the gateway.
        llm: The model's identity.
    """

    identity: str
    section: TargetConfig
    model: str
    llm: str


class ExecutorJob(FrozenModel):
    """One rollout to run in a worker; it holds values only, and no key of a provider.

    Attributes:
        key: Unique among the jobs of a run's start; the result has it too.
        environment: How the worker makes the environment, once for all jobs.
        item: The item.
        seed: The seed of the item's trial.
        base_url: Where the session asks the target during this rollout.
        token: The key for this address.
        target: How the worker makes the target; None: the session sends each message to the
            trainer's.
        skill: The skill of the worker's target.
        rollout: The rollout's key.
    """

    key: str
    environment: EnvironmentReference
    item: Item
    seed: int
    base_url: str
    token: str = Field(repr=False)
    target: TargetReference | None = None
    skill: str = ""
    rollout: str = ""


class WorkerError(FrozenModel):
    """An exception in a worker.

    Attributes:
        kind: The name of its class.
        message: Its text.
        traceback: Where it was raised; empty for errors of reflact.
        cause: What it was raised from.
    """

    kind: str
    message: str
    traceback: str = ""
    cause: WorkerError | None = None


class ExecutorResult(FrozenModel):
    """The grade of a job, or the exception that its environment raised; ``turns`` are those of the
    worker's target.
    """

    key: str
    turns: tuple[Turn, ...] = ()
    grade: Grade | None = None
    error: WorkerError | None = None


class Executor(Protocol):
    """Runs jobs somewhere; it is never part of a run's identity, because it changes no result."""

    async def run(self, job: ExecutorJob) -> ExecutorResult:
        """Run a job to its end; a cancelled caller leaves at once.

        Raises:
            WorkerLost: The worker ended; the job may be run again.
        """


class CodeError(Exception):
    """An exception of the caller's own code in a worker; subclasses have the name of its class."""


def describe_error(error: BaseException) -> WorkerError:
    """Return an exception as a value."""
    is_own = isinstance(error, ReflactError)
    return WorkerError(
        kind=type(error).__name__,
        message=str(error),
        traceback="" if is_own else "".join(traceback.format_exception(error)),
        cause=None if error.__cause__ is None else describe_error(error.__cause__),
    )


def rebuild_error(error: WorkerError) -> Exception:
    """Return an exception of reflact's own class, or a ``CodeError`` with the name and text of the
    original.
    """
    kind = getattr(errors, error.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, ReflactError)):
        kind = type(error.kind, (CodeError,), {"__module__": CodeError.__module__})
    rebuilt: Exception = kind(error.message)
    if error.cause is not None:
        rebuilt.__cause__ = rebuild_error(error.cause)
    if error.traceback:
        rebuilt.add_note(f"In the worker:\n{error.traceback}")
    return rebuilt
