"""What the trainer and its workers exchange: jobs, results, and how a worker makes the environment."""

from __future__ import annotations

import pickle
import pickletools
import traceback
from base64 import b64decode, b64encode
from typing import Protocol

from pydantic import Field

from reflact import errors
from reflact.config.training import EnvironmentConfig, TargetConfig, TrainerConfig
from reflact.errors import ConfigError, ReflactError
from reflact.llm.middleware import CheckedEnvironment
from reflact.protocols import Environment
from reflact.types import FrozenModel, Grade, Item, Turn


class EnvironmentReference(FrozenModel):
    """How a worker makes an environment.

    Attributes:
        identity: The environment's identity, which the worker's must equal.
        section: The configuration's section, which names the environment; None if ``pickled`` is set.
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
        target: How the worker makes the target; None: the session sends each message to the trainer's.
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
        failure: The number of the session's failure that it is; None for any other exception.
        cause: What it was raised from.
    """

    kind: str
    message: str
    traceback: str = ""
    failure: int | None = None
    cause: WorkerError | None = None


class ExecutorResult(FrozenModel):
    """The grade of a job, or the exception that its environment raised; ``turns`` are those of the worker's target."""

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


def describe_error(error: BaseException, *, failure: int | None = None) -> WorkerError:
    """Return an exception as a value."""
    own = isinstance(error, ReflactError)
    return WorkerError(
        kind=type(error).__name__,
        message=str(error),
        traceback="" if own else "".join(traceback.format_exception(error)),
        failure=failure,
        cause=None if error.__cause__ is None else describe_error(error.__cause__),
    )


def rebuild_error(error: WorkerError) -> Exception:
    """Return an exception of reflact's own class, or a ``CodeError`` with the name and text of the original."""
    kind = getattr(errors, error.kind, None)
    rebuilt: Exception
    if isinstance(kind, type) and issubclass(kind, ReflactError):
        rebuilt = kind(error.message)
    else:
        rebuilt = type(error.kind, (CodeError,), {"__module__": CodeError.__module__})(error.message)
    if error.cause is not None:
        rebuilt.__cause__ = rebuild_error(error.cause)
    if error.traceback:
        rebuilt.add_note(f"In the worker:\n{error.traceback}")
    return rebuilt


def refer_to_environment(
    environment: Environment, config: TrainerConfig, *, named: bool
) -> EnvironmentReference:
    """Return how workers make an environment; ``named`` if the configuration names it.

    Raises:
        ConfigError: A critic grades, or the object cannot be sent.
    """
    if named:
        section = config.environment
        if section.grader == "critic":
            raise ConfigError(
                f"executor.name: {config.executor.name} cannot run environment.grader: critic, because workers have no "
                "key for the critic's model; set executor.name to local"
            )
        if section.tables is not None:
            section = section.model_copy(update={"tables": section.tables.absolute()})
        return EnvironmentReference(identity=environment.identity, section=section)
    try:
        data = pickle.dumps(environment)
        reason = "the script that runs defines a part of it" if _names_main(data) else None
    except Exception as error:  # noqa: BLE001 - pickling runs the caller's code
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        raise ConfigError(
            f"executor.name: {config.executor.name} cannot send the environment, of type "
            f"{type(environment).__name__}, to workers: {reason}. Put the classes and functions that it needs into a module "
            "that workers can import, or set executor.name to local"
        )
    return EnvironmentReference(identity=environment.identity, pickled=b64encode(data).decode("ascii"))


def _names_main(data: bytes) -> bool:
    """Whether a pickle refers to the main module, which is another one in a worker."""
    return any(argument == "__main__" for _, argument, _ in pickletools.genops(data))


def rebuild_environment(reference: EnvironmentReference) -> Environment:
    """Return the environment of a reference, in a worker.

    Raises:
        ConfigError: It cannot be imported, or differs from the trainer's.
    """
    from reflact.data import DataSet
    from reflact.environments.dataset import DatasetEnvironment, build_grader
    from reflact.training.named_objects import load_named_environment

    environment: Environment | None
    if reference.section is None:
        environment = pickle.loads(b64decode(reference.pickled or ""))  # noqa: S301 - it comes from the trainer
    else:
        config = TrainerConfig(environment=reference.section)
        environment = load_named_environment(config)
        if environment is None:  # an item comes with its job
            environment = DatasetEnvironment(
                DataSet(train=(), val=(), test=()),
                grade=build_grader(config),
                template=config.environment.template,
            )
    if environment is None or environment.identity != reference.identity:
        raise ConfigError(
            "the environment of a worker differs from the trainer's: install the same versions of its packages on all "
            "machines"
        )
    return CheckedEnvironment(environment)
