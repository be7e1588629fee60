"""The trainer's side: the environment of a run whose rollouts take place in workers."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from reflact.adapters import CatchExits, EnvironmentAdapter, TargetAdapter, load_named_executor
from reflact.config.models import ModelsConfig, is_secret_name
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError
from reflact.executors.jobs import (
    EnvironmentReference,
    Executor,
    ExecutorJob,
    TargetReference,
    describe_error,
    rebuild_error,
)
from reflact.protocols import Environment, Session
from reflact.targets.gateway import open_gateway
from reflact.targets.gateway_session import GatewaySession
from reflact.types import Grade, Item

# Shorter values of a key's variable are placeholders, which other variables may contain as a word.
MIN_KEY_CHARACTERS = 12


class ExecutedEnvironment(EnvironmentAdapter):
    """An environment whose rollouts run in the workers of an executor.

    A chat model and an object stay in the trainer's process: a worker's session sends them each
    message. A command or a function that the configuration names runs in the worker, and the
    requests of its agent are sent here. Both go through a gateway with an address and a token of
    its own for each rollout, so calls, keys, limits, stored replies and records are those of any
    other run.

    Args:
        own: The environment in the trainer's process, which is asked for all but rollouts.
        executor: Runs the jobs.
        reference: How a worker makes the environment.
        target: How a worker makes the target; None if it stays here.
        host: The address of this machine on which workers reach the gateway.
    """

    def __init__(
        self,
        own: Environment,
        executor: Executor,
        reference: EnvironmentReference,
        target: TargetReference | None,
        *,
        host: str,
    ) -> None:
        super().__init__(own)
        self._executor = executor
        self._reference = reference
        self._target = target
        self._host = host
        self._numbers = count()

    async def set_up(self) -> None:
        """Do nothing: each worker sets its own environment up."""

    async def close(self) -> None:
        """Do nothing: each worker closes its own environment."""

    async def _start_run(self, item: Item, session: Session, seed: int) -> Grade:
        """Run an item in a worker.

        Raises:
            WorkerLost: The worker ended.
            Exception: What the session or the environment raised.
        """
        failures: list[Exception] = []

        async def answer(body: Mapping[str, Any]) -> str:
            try:
                with CatchExits():
                    return json.dumps({"answer": await _answer(session, body)})
            except Exception as error:  # noqa: BLE001 - the session in the worker raises it
                failures.append(error)
                return json.dumps({"failure": describe_error(error).model_dump(mode="json")})

        async with open_gateway(answer, model="target", host=self._host) as address:
            job = ExecutorJob(
                key=f"{next(self._numbers)}/{item.id}/{seed}",
                environment=self._reference,
                item=item,
                seed=seed,
                **address._asdict(),
            )
            if self._target is None or not isinstance(session, GatewaySession):
                result = await self._executor.run(job)
            else:
                agent = {
                    "target": self._target,
                    "skill": session.skill.text,
                    "rollout": session.rollout,
                }
                result = await self._executor.run(job.model_copy(update=agent))
                session.adopt(result.turns)

        if result.grade is not None:
            return result.grade
        assert result.error is not None
        for failure in failures:  # what the session raised here passed through the worker
            if (type(failure).__name__, str(failure)) == (result.error.kind, result.error.message):
                raise failure
        raise rebuild_error(result.error)


async def _answer(session: Session, body: Mapping[str, Any]) -> str:
    """Return the target's answer to a message, or its model's to a request of the agent in a
    worker.
    """
    if "forwarded" in body and isinstance(session, GatewaySession):
        return await session.forward(body["forwarded"], **body["call"])
    return await session.reply(str(body["messages"][-1]["content"]))


@asynccontextmanager
async def place_environment(
    environment: EnvironmentAdapter, config: TrainerConfig, target: TargetAdapter, *, named: bool
) -> AsyncIterator[ExecutedEnvironment]:
    """Yield an environment that runs in the configured executor; ``named`` if the configuration
    names it.

    Raises:
        ConfigError: Workers cannot make the environment, or the executor cannot be opened.
    """
    own = environment.own
    reference = (
        refer_to_named_environment(own, config) if named else pickle_environment(own, config)
    )
    sent_target = refer_to_target(target, config)
    async with open_executor(config) as executor:
        yield ExecutedEnvironment(own, executor, reference, sent_target, host=config.executor.host)


def refer_to_target(target: TargetAdapter, config: TrainerConfig) -> TargetReference | None:
    """Return how workers make a run's target; None if it stays in the trainer's process."""
    if config.target.kind == "chat" or not target.is_connectable:
        return None
    from reflact.llm.client import identify_model

    model = config.models.target
    return TargetReference(
        identity=target.identity,
        section=config.target,
        model=model.model,
        llm=identify_model(model),
    )


def refer_to_named_environment(
    environment: Environment, config: TrainerConfig
) -> EnvironmentReference:
    """Return how workers make the environment of a configuration.

    Raises:
        ConfigError: A critic grades.
    """
    section = config.environment
    if section.grader == "critic":
        raise ConfigError(
            f"executor.name: {config.executor.name} cannot run environment.grader: critic, because "
            "workers have no key for the critic's model; set executor.name to local"
        )
    if section.tables is not None:
        section = section.model_copy(update={"tables": section.tables.absolute()})
    return EnvironmentReference(identity=environment.identity, section=section)


def pickle_environment(environment: Environment, config: TrainerConfig) -> EnvironmentReference:
    """Return how workers make an environment that was passed in Python.

    Raises:
        ConfigError: The object cannot be sent.
    """
    try:
        data = pickle.dumps(environment)
    except Exception as error:  # noqa: BLE001 - pickling runs the caller's code
        reason = f"{type(error).__name__}: {error}"
    else:
        # the main module of a worker is another one
        if not any(argument == "__main__" for _, argument, _ in pickletools.genops(data)):
            pickled = b64encode(data).decode("ascii")
            return EnvironmentReference(identity=environment.identity, pickled=pickled)
        reason = "the script that runs defines a part of it"
    raise ConfigError(
        f"executor.name: {config.executor.name} cannot send the environment, of type "
        f"{type(environment).__name__}, to workers: {reason}. Put the classes and functions that "
        "it needs into a module that workers can import, or set executor.name to local"
    )


@asynccontextmanager
async def open_executor(config: TrainerConfig) -> AsyncIterator[Executor]:
    """Open the executor of a configuration, which is not the event loop.

    Raises:
        ConfigError: The cluster cannot be reached, or the name is that of no executor.
    """
    settings = config.executor
    if settings.name == "ray":
        from reflact.executors.ray import open_ray

        workers = settings.workers or os.cpu_count() or 1
        hidden = os.environ.keys() - select_variables(config).keys()
        async with open_ray(workers, address=settings.address, hidden=hidden) as pool:
            yield pool
    else:
        async with load_named_executor(config) as executor:
            yield executor


def select_variables(config: TrainerConfig) -> dict[str, str]:
    """Return the environment variables that workers get: none with a key of a model, or a name of a
    secret.
    """
    key_names = {getattr(config.models, role).api_key_env for role in ModelsConfig.model_fields}
    keys = [os.environ.get(name or "", "") for name in key_names]
    keys = [key for key in keys if len(key) >= MIN_KEY_CHARACTERS]
    selected = {}
    for name, value in os.environ.items():
        is_secret = is_secret_name(name) or name.endswith("_TOKEN")
        is_allowed = name in config.executor.variables or not is_secret
        if is_allowed and name not in key_names and not any(key in value for key in keys):
            selected[name] = value
    return selected
