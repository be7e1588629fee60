"""An environment from a task of Inspect: its samples, solver and scorer as they are; ``reflact[inspect]``.

    InspectEnvironment("my_tasks:security_guide", train=4, val=6, test=6)

The solver's calls of ``generate`` go to the run's target, which has the skill as its instructions. So limits, stored
replies and recordings cover them, and the target may be any agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from pydantic import JsonValue

from reflact.concurrency import fan_out
from reflact.data import shuffle
from reflact.errors import ConfigError, EnvironmentFailure
from reflact.protocols import Session
from reflact.types import Grade, Item, Score, Split, canonical_json


class InspectEnvironment:
    """Samples of an Inspect task, solved by the task's solver with the run's target, and scored by its scorer.

    Args:
        task: A task, or the import path of a task or of a function that returns one.
        train: Samples in the train split.
        val: Samples in the validation split.
        test: Samples in the test split.
        seed: Deals the samples to the splits.
        arguments: The arguments of the function.
        task_version: Raise it if the task's solver or scorer changes, so that older scores are not reused.

    Raises:
        ConfigError: inspect-ai is not installed, the task cannot be loaded, or it has too few different samples.
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
        task_version: int = 1,
    ) -> None:
        self._task = _load_task(task, dict(arguments or {}))
        if not self._task.scorer or self._task.setup or self._task.sandbox:
            raise ConfigError(
                "an Inspect task needs a scorer, and neither setup nor sandbox, to be an environment; pass such a task"
            )
        samples = {canonical_json([_show(sample), sample.choices]): sample for sample in self._task.dataset}
        sizes = {Split.train: train, Split.val: val, Split.test: test}
        if min(sizes.values()) < 1 or sum(sizes.values()) > len(samples):
            raise ConfigError(
                f"the task has {len(samples)} different samples for splits of {train}, {val}, {test}; each split "
                "needs at least 1, and together they cannot need more"
            )
        dealt = iter(shuffle(enumerate(samples.values()), seed, "inspect"))
        self._samples: dict[str, Any] = {}
        self._items = {split: tuple(self._add(*next(dealt)) for _ in range(n)) for split, n in sizes.items()}
        self._identity = canonical_json(
            {
                "environment": "inspect",
                "version": version("inspect-ai"),
                "task": self._task.name,
                "task_version": [str(self._task.version), task_version],
                "arguments": dict(arguments or {}),
            }
        )

    def _add(self, number: int, sample: Any) -> Item:
        item_id = str(number + 1 if sample.id is None else sample.id)
        self._samples[item_id] = sample
        # the whole sample is in the item, so that a changed one is not taken for a stored one
        content = sample.model_dump(mode="json", exclude={"id", "input"})
        return Item(id=item_id, input=_show(sample), reference=content.pop("target"), metadata=content)

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
            EnvironmentFailure: The solver asks in a way that a conversation with the target cannot serve.
        """
        # a task of its own has a context of its own, and Inspect keeps its model in context variables
        (grade,) = await fan_out(lambda one: self._solve(one, session), (item,))
        return grade

    async def _solve(self, item: Item, session: Session) -> Grade:
        from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelName, ModelOutput, get_model
        from inspect_ai.model._model import init_active_model
        from inspect_ai.scorer import Target, value_to_float
        from inspect_ai.solver import TaskState

        init_active_model(get_model("none/none"), GenerateConfig())  # so that get_model() asks no other model
        sample = self._samples[item.id].model_copy(deep=True)
        given = [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else sample.input
        state = TaskState(
            model=ModelName("none/none"),
            sample_id=item.id,
            epoch=1,
            input=sample.input,
            messages=list(given),
            target=Target(sample.target),
            choices=sample.choices,
            metadata=sample.metadata or {},
        )
        sent: list[Any] = []

        async def generate(state: Any, *arguments: Any, **settings: Any) -> Any:
            if state.tools or [message.id for message in state.messages[: len(sent)]] != sent:
                raise EnvironmentFailure(
                    "this solver has tools, or does not hold one conversation with its model; use a task whose solver only "
                    "generates"
                )
            message = "\n\n".join(message.text for message in state.messages[len(sent) :])
            state.output = ModelOutput.from_content("none/none", await session.reply(message))
            state.messages.append(state.output.message)
            sent[:] = [message.id for message in state.messages]
            return state

        state = await self._task.solver(state, generate)
        score = await self._task.scorer[0](state, Target(sample.target))
        value = value_to_float()(score.value)
        feedback = None if value == 1 else (score.explanation or f"the task's scorer gives {score.value}")
        return Grade(score=Score.of(value), answer=state.output.completion, feedback=feedback)


def _show(sample: Any) -> JsonValue:
    """Return a sample's input without the ids of messages, which Inspect makes anew each time."""
    if isinstance(sample.input, str):
        return str(sample.input)
    return [message.model_dump(mode="json", exclude={"id"}) for message in sample.input]


def _load_task(task: Any, arguments: dict[str, JsonValue]) -> Any:
    try:
        from inspect_ai import Task
    except ImportError as error:
        raise ConfigError("this needs inspect-ai: pip install 'reflact[inspect]'") from error
    if isinstance(task, str):
        module, _, name = task.partition(":")
        try:
            task = getattr(import_module(module), name)
        except Exception as error:
            raise ConfigError(f"the Inspect task {task} cannot be imported: {error}") from error
    made = task if isinstance(task, Task) else task(**arguments)
    if not isinstance(made, Task):
        raise ConfigError(
            f"{task!r:.100} is no task of Inspect, and returns none; pass a Task, or a function that returns one"
        )
    return made
