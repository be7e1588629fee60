"""The environment of an Inspect task: its scores are those of Inspect for the same replies."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from reflact.errors import ConfigError
from reflact.integrations.inspect_ai import InspectEnvironment
from reflact.types import Split, Turn

INSTALLED = find_spec("inspect_ai") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="inspect-ai brings 350 MB")
SIZES = {"train": 2, "val": 2, "test": 2}


class Says:
    """A session that answers each question as a table says, and keeps what it was sent."""

    def __init__(self, answer: str) -> None:
        self.answer, self.sent = answer, ""
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        self.sent = message
        return self.answer


def make_task(name: str) -> Any:
    """Return a task of samples that Inspect brings, with a solver and a scorer of Inspect."""
    from inspect_ai import Task
    from inspect_ai.dataset import FieldSpec, example_dataset
    from inspect_ai.scorer import choice, f1, includes
    from inspect_ai.solver import chain_of_thought, generate, multiple_choice, system_message

    solver, scorer = {
        "theory_of_mind": ([chain_of_thought(), generate()], includes()),
        "security_guide": ([system_message("You guard."), generate()], f1()),
        "biology_qa": ([generate()], includes()),
        "choices": (multiple_choice(), choice()),
    }[name]
    if name == "choices":
        from inspect_ai.dataset import Sample

        dataset: Any = [Sample(input=f"{n}?", choices=["one", "two"], target="AB"[n % 2]) for n in range(6)]
    else:
        fields = FieldSpec(input="question", target="answer") if name == "biology_qa" else None
        dataset = example_dataset(name, fields)[:6]
    return Task(dataset=dataset, solver=solver, scorer=scorer)


@needs_package
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["theory_of_mind", "security_guide", "biology_qa", "choices"])
def test_scores_are_those_of_inspect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter and Inspect's own evaluation give every sample the same score for the same reply."""
    import asyncio

    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import value_to_float

    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    environment = InspectEnvironment(make_task(name), **SIZES)
    items = {item.id: item for split in Split for item in environment.items(split)}
    samples = list(make_task(name).dataset)
    replies = [
        f"ANSWER: {sample.target}" if number % 2 else "ANSWER: A garden"
        for number, sample in enumerate(samples)
    ]
    outputs = [ModelOutput.from_content("mockllm/model", reply) for reply in replies]
    for output in outputs:
        output.usage = ModelUsage()
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = evaluate(make_task(name), model=model, log_dir=str(tmp_path), max_samples=1, max_connections=1)
    assert log.status == "success"
    theirs = {
        str(sample.id): value_to_float()(next(iter((sample.scores or {}).values())).value)
        for sample in log.samples or []
    }
    told = {str(sample.id): sample.output.completion for sample in log.samples or []}

    async def run() -> dict[str, float]:
        return {
            text: (await environment.run(item, Says(told[text]), seed=0)).score.hard
            for text, item in items.items()
        }

    assert asyncio.run(run()) == pytest.approx(theirs)
    assert len(set(theirs.values())) > 1


@needs_package
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("own_model", "words"), [(False, "this solver has tools"), (True, "no model")])
def test_a_solver_that_asks_otherwise_is_unmeasured(own_model: bool, words: str) -> None:
    """Tools cannot go through a conversation, and a model outside of the run is not asked."""
    import asyncio

    from inspect_ai.solver import chain, generate, self_critique, use_tools
    from inspect_ai.tool import think

    task = make_task("biology_qa")
    task.solver = chain([generate(), self_critique()] if own_model else [use_tools(think()), generate()])
    environment = InspectEnvironment(task, **SIZES)
    with pytest.raises(Exception, match=words):
        asyncio.run(environment.run(environment.items(Split.val)[0], Says("1"), seed=0))


@pytest.mark.skipif(INSTALLED, reason="inspect-ai is installed")
def test_the_missing_package_is_named() -> None:
    """Without inspect-ai, the error says what to install."""
    with pytest.raises(ConfigError, match=r"pip install 'reflact\[inspect\]'"):
        InspectEnvironment("tasks:mine", **SIZES)
