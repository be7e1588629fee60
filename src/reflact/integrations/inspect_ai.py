"""Tasks of Inspect as environments, with their own samples, solvers and scorers.

    InspectEnvironment("my_tasks:security_guide", train=4, val=6, test=6)

The solver's calls of its model go to the run's target, which has the skill as its instructions. So
limits, stored replies and recordings cover them. Any target can solve tasks that hold one
conversation. ``InspectTarget`` is for all others, such as those with tools: it is the model of
``models.target``, asked as the solver asks.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from math import isfinite
from typing import Any

import anyio
from pydantic import JsonValue

from reflact.agents.gateway_session import GatewaySession, GatewayTarget
from reflact.concurrency import fan_out
from reflact.data import shuffle
from reflact.errors import ConfigError, EnvironmentFailure
from reflact.protocols import Session
from reflact.stages.null_answers import ConstantSession
from reflact.types import Grade, Item, Score, Skill, Split, canonical_json

# Version of the request format, part of every rollout's key; raise it if the format changes.
INSPECT_TARGET_VERSION = 1

# Inspect's own limit of concurrent requests; those of ``models.target`` hold.
MAX_CONNECTIONS = 1_000_000

# Answers a request of a solver: messages, tools and tool choice; returns a ``ModelOutput``.
Answer = Callable[[Sequence[Any], Sequence[Any], Any], Awaitable[Any]]


class InspectTarget(GatewayTarget):
    """The model of ``models.target``, for any task of an ``InspectEnvironment``.

    The skill is its system message, before the one that the task gives its model.
    """

    @property
    def identity(self) -> str:
        """The model and its settings, as canonical JSON."""
        llm = self.sender_identity
        return canonical_json({"target": "inspect", "version": INSPECT_TARGET_VERSION, "llm": llm})

    def session(self, skill: Skill, *, rollout: str) -> InspectSession:
        """Start a rollout; ``rollout`` is its key. ConfigError if there is no run."""
        return InspectSession(self, skill, rollout)


class InspectSession(GatewaySession):
    """The requests of a solver in one rollout."""

    async def reply(self, message: str) -> str:
        """Refuse; only a solver of Inspect can ask."""
        raise EnvironmentFailure(
            "target.kind: an InspectTarget works in an InspectEnvironment only"
        )

    async def answer(self, messages: Sequence[Any], tools: Sequence[Any], choice: Any) -> Any:
        """Answer a request of the solver, under the skill."""
        # not the public functions, which need a newer package of openai than instructor allows
        from inspect_ai.model._openai import (
            messages_to_openai,
            openai_chat_tool_choice,
            openai_chat_tools,
        )

        sent: list[Any] = list(await messages_to_openai(list(messages)))
        system = [message["content"] for message in sent[:1] if message["role"] == "system"]
        instructions = "\n\n".join(filter(None, [self.skill.text.strip("\n"), *system]))
        if instructions:
            sent[: len(system)] = [{"role": "system", "content": instructions}]
        body: dict[str, Any] = {"messages": sent}
        if tools:
            body |= {
                "tools": openai_chat_tools(list(tools)),
                "tool_choice": openai_chat_tool_choice(choice),
            }
        completion = json.loads(await self._answer(body))
        if len(sent) >= len(self._last):
            self._last = [*sent, completion["choices"][0]["message"]]
        return _read_completion(completion, tools)


def _read_completion(completion: dict[str, Any], tools: Sequence[Any]) -> Any:
    """Return a completion as an output of Inspect's."""
    from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelOutput, ModelUsage
    from inspect_ai.model._call_tools import parse_tool_call
    from inspect_ai.model._model_output import as_stop_reason

    choice = completion["choices"][0]
    counts = completion.get("usage") or {}
    calls = [
        parse_tool_call(
            call["id"], call["function"]["name"], call["function"]["arguments"], list(tools)
        )
        for call in choice["message"].get("tool_calls") or ()
    ]
    message = ChatMessageAssistant(
        content=choice["message"].get("content") or "", tool_calls=calls or None, source="generate"
    )
    usage = ModelUsage(
        input_tokens=counts.get("prompt_tokens", 0),
        output_tokens=counts.get("completion_tokens", 0),
        total_tokens=counts.get("total_tokens", 0),
    )
    stopped = ChatCompletionChoice(
        message=message, stop_reason=as_stop_reason(choice.get("finish_reason"))
    )
    return ModelOutput(model=str(completion.get("model", "")), choices=[stopped], usage=usage)


class InspectEnvironment:
    """Samples of an Inspect task, solved by its solver with the run's target, scored by its scorer.

    Args:
        task: A task, or the import path of a task or of a function that returns one.
        train, val, test: The number of samples in each split.
        seed: Deals the samples to the splits.
        arguments: The arguments of the function.
        models: Models of the task's roles, such as a simulated user or a judge, by Inspect's names
            of models. Inspect asks them itself, outside of the run's budget, its stored replies and
            recordings.
        metric: The value that counts if the scorer gives several; the optimizer sees all of them.
        task_version: Raise it if the solver or scorer changes, so that no older scores are reused.

    Raises:
        ConfigError: inspect-ai is not installed, or the task has an error or too few samples.
    """

    def __init__(
        self,
        task: Any,
        *,
        train: int,
        val: int,
        test: int,
        seed: int = 0,
        arguments: Mapping[str, JsonValue] | None = None,
        models: Mapping[str, Any] | None = None,
        metric: str | None = None,
        task_version: int = 1,
    ) -> None:
        self._task = _load_task(task, dict(arguments or {}))
        sandboxed = [
            sample
            for sample in self._task.dataset
            if sample.sandbox or sample.files or sample.setup
        ]
        if not self._task.scorer or self._task.sandbox or sandboxed:
            raise ConfigError(
                "an Inspect task needs a scorer, and no sandbox, to be an environment; pass such a "
                "task"
            )
        self._models = _open_models(models or {})
        self._metric = metric
        samples = {
            canonical_json([_show(sample), sample.choices]): sample for sample in self._task.dataset
        }
        sizes = {Split.train: train, Split.val: val, Split.test: test}
        if min(sizes.values()) < 1 or sum(sizes.values()) > len(samples):
            raise ConfigError(
                f"the task has {len(samples)} different samples for splits of {train}, {val}, "
                f"{test}; each split needs at least 1, and together they cannot need more"
            )
        # some tasks shuffle their samples anew at each start
        numbered = sorted(enumerate(samples.items(), 1), key=lambda entry: entry[1][0])
        dealt = iter(shuffle(((n, sample) for n, (_, sample) in numbered), seed, "inspect"))
        self._samples: dict[str, Any] = {}
        self._items = {
            split: tuple(self._add(*next(dealt)) for _ in range(n)) for split, n in sizes.items()
        }
        self._identity = canonical_json(
            {
                "environment": "inspect",
                "version": version("inspect-ai"),
                "task": self._task.name,
                "task_version": [str(self._task.version), task_version],
                "arguments": dict(arguments or {}),
                "models": {role: str(model) for role, model in sorted(self._models.items())},
                "metric": metric,
            }
        )

    def _add(self, number: int, sample: Any) -> Item:
        item_id = str(number if sample.id is None else sample.id)
        self._samples[item_id] = sample
        # the whole sample is in the item, so that a changed one is not taken for a stored one
        content = sample.model_dump(mode="json", exclude={"id", "input"})
        return Item(
            id=item_id, input=_show(sample), reference=content.pop("target"), metadata=content
        )

    @property
    def identity(self) -> str:
        """Version of Inspect, and the task with its arguments, as canonical JSON."""
        return self._identity

    def items(self, split: Split) -> Sequence[Item]:
        """Return a split's samples as items."""
        return self._items[split]

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Solve a sample with the task's solver and score it; the seed is not used.

        Raises:
            EnvironmentFailure: The solver holds no conversation that the target can serve.
        """
        # a task of its own has a context of its own, and Inspect keeps its model in context
        # variables
        (grade,) = await fan_out(lambda one: self._solve(one, session), (item,))
        return grade

    async def _solve(self, item: Item, session: Session) -> Grade:
        from inspect_ai.scorer import Target, value_to_float

        sample = self._samples[item.id].model_copy(deep=True)
        talk = session if isinstance(session, InspectSession) else _Conversation(session)
        failures: list[Exception] = []
        with anyio.CancelScope() as scope:

            async def answer(
                messages: Sequence[Any], tools: Sequence[Any], choice: Any, role: str = ""
            ) -> Any:
                try:
                    if role:
                        raise EnvironmentFailure(
                            f"the task asks a model in the role {role!r}: name it in `models`, "
                            f"such as {{{role}: openai/gpt-5}}"
                        )
                    return await talk.answer(messages, tools, choice)
                except Exception as error:
                    failures.append(error)  # some solvers go on after any error
                    scope.cancel()
                    raise

            state, generate = self._start(sample, item.id, answer)
            try:
                state = await self._run_solver(state, generate)
                score = await self._task.scorer[0](state, Target(sample.target))
            except Exception:  # a solver wraps the failure of its model as it likes
                if not failures:
                    raise
        if failures:
            raise failures[0]
        value = value_to_float()(self._choose_value(score.value))
        feedback = score.explanation or f"the task's scorer gives {score.value}"
        several = score.value if isinstance(score.value, Mapping) else {}
        metrics = {str(name): value_to_float()(each) for name, each in several.items()}
        whole = value == 1 and not several
        return Grade(
            score=Score.of(
                value, {name: number for name, number in metrics.items() if isfinite(number)}
            ),
            answer=state.output.completion,
            feedback=None if whole else feedback,
        )

    def _choose_value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if self._metric in value:
            return value[self._metric]
        raise EnvironmentFailure(
            "the task's scorer gives several values: set `metric` to one of "
            f"{', '.join(map(str, value))}"
        )

    def _start(self, sample: Any, item_id: str, answer: Answer) -> tuple[Any, Any]:
        """Return the state of a sample and a solver's ``generate``, as Inspect has them."""
        from inspect_ai._eval.context import init_model_context
        from inspect_ai._eval.task.generate import task_generate
        from inspect_ai.log._transcript import Transcript, init_transcript
        from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelName
        from inspect_ai.model._model import init_model_roles
        from inspect_ai.scorer import Target
        from inspect_ai.solver import TaskState
        from inspect_ai.solver._task_state import set_sample_state
        from inspect_ai.util._store import init_subtask_store

        model = _open_model(answer)
        task = self._task
        state = TaskState(
            model=ModelName("reflact/target"),
            sample_id=item_id,
            epoch=1,
            input=sample.input,
            messages=[ChatMessageUser(content=sample.input)]
            if isinstance(sample.input, str)
            else sample.input,
            target=Target(sample.target),
            choices=sample.choices,
            metadata=sample.metadata or {},
            message_limit=task.message_limit,
            token_limit=task.token_limit,
        )
        init_model_context(model)
        init_model_roles(_Roles(self._models, answer))
        set_sample_state(state)
        init_transcript(Transcript())
        init_subtask_store(state.store)

        async def generate(
            state: Any, tool_calls: Any = "loop", cache: Any = False, **settings: Any
        ) -> Any:
            return await task_generate(model, state, tool_calls, False, GenerateConfig(**settings))

        return state, generate

    async def _run_solver(self, state: Any, generate: Any) -> Any:
        """Return the state after the task's solvers, or at a limit of the task."""
        from inspect_ai.solver._task_state import sample_state
        from inspect_ai.util import LimitExceededError, apply_limits, time_limit, turn_limit

        task = self._task
        limits = [
            state._message_limit,
            state._token_limit,
            turn_limit(task.turn_limit),
            time_limit(task.time_limit),
        ]
        try:
            with apply_limits(limits):
                for solver in (*([task.setup] if task.setup else ()), task.solver):
                    state = await solver(state, generate)
        except LimitExceededError:
            state = sample_state() or state
        return state


class _Conversation:
    """The requests of a solver that holds one conversation, as messages of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent: list[Any] = []

    async def answer(self, messages: Sequence[Any], tools: Sequence[Any], choice: Any) -> Any:
        """Send the session what is new, and return its reply."""
        from inspect_ai.model import ModelOutput, ModelUsage

        ids = [message.id for message in messages]
        if isinstance(self._session, ConstantSession):
            self._sent = ids[:-1]
        elif tools or ids[: len(self._sent)] != self._sent:
            raise EnvironmentFailure(
                "this solver has tools, or does not hold one conversation with its model: set "
                "target.kind to reflact.integrations.inspect_ai:InspectTarget"
            )
        text = "\n\n".join(message.text for message in messages[len(self._sent) :])
        output = ModelOutput.from_content("reflact/target", await self._session.reply(text))
        output.usage = ModelUsage()
        self._sent = [*ids, output.message.id]
        return output


class _Roles(dict[str, Any]):
    """The models of a task's roles; one that is not named refuses."""

    def __init__(self, models: Mapping[str, Any], answer: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(models)
        self._answer = answer

    def get(self, role: str, default: Any = None) -> Any:
        """Return the model of a role."""
        return self[role] if role in self else _open_model(partial(self._answer, role=role))


def _open_model(answer: Answer) -> Any:
    """Return a model of Inspect whose replies come from a function."""
    from inspect_ai.model import GenerateConfig, Model

    return Model(_define_api()("target", answer=answer), GenerateConfig())


@cache
def _define_api() -> Any:
    """Register the provider of such models with Inspect, and return its class."""
    from inspect_ai.model import ModelAPI, modelapi

    @modelapi("reflact")
    class FunctionAPI(ModelAPI):  # type: ignore[misc]  # Inspect is not installed when types are checked
        def __init__(self, model_name: str, answer: Answer) -> None:
            super().__init__(model_name)
            self._answer = answer

        async def generate(self, **asked: Any) -> Any:
            return await self._answer(asked["input"], asked["tools"], asked["tool_choice"])

        def max_connections(self) -> int:
            return MAX_CONNECTIONS

        def should_retry(self, error: BaseException) -> bool:
            return False

    return FunctionAPI


def _show(sample: Any) -> JsonValue:
    """Return a sample's input without the ids of messages, which Inspect makes anew each time."""
    if isinstance(sample.input, str):
        return str(sample.input)
    return [message.model_dump(mode="json", exclude={"id"}) for message in sample.input]


def _open_models(models: Mapping[str, Any]) -> dict[str, Any]:
    from inspect_ai.model import get_model

    try:
        return {role: get_model(model) for role, model in models.items()}
    except Exception as error:  # providers raise anything
        raise ConfigError(f"a model of the task's roles cannot be opened: {error}") from error


def _load_task(task: Any, arguments: dict[str, JsonValue]) -> Any:
    try:
        from inspect_ai import Task
    except ImportError as error:
        raise ConfigError("this needs inspect-ai: pip install 'reflact[inspect]'") from error
    if isinstance(task, str):
        module, _, name = task.partition(":")
        try:
            task = getattr(import_module(module), name)
        except Exception as error:  # a module may raise anything while it is imported
            raise ConfigError(f"the Inspect task {task} cannot be imported: {error}") from error
    made = task if isinstance(task, Task) else task(**arguments)
    if not isinstance(made, Task):
        raise ConfigError(
            f"{task!r:.100} is no task of Inspect, and returns none; pass a Task, or a function "
            "that returns one"
        )
    return made
