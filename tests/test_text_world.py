"""The example of an environment of many turns, `examples/text_world.py`, with a stand-in for its simulator."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from reflact import Trainer
from reflact.llm import CallId, RenderedPrompt, ReplyModel
from reflact.targets import ChatTarget
from reflact.testing import ScriptedLLM, append_reply
from reflact.types import Split, Turn
from toy_runs import settings

EXAMPLE = Path(__file__).parents[1] / "examples" / "text_world.py"
SOLUTION = ("open door", "go to garden", "look at bird")


class StandIn:
    """A world with the calls of ScienceWorld: each right action is a third of the score, and a jump is fatal."""

    def __init__(self) -> None:
        self._variation, self._done = 0, 0

    def get_variations_train(self) -> list[int]:
        return list(range(4))

    def get_variations_dev(self) -> list[int]:
        return list(range(4, 8))

    def get_variations_test(self) -> list[int]:
        return list(range(8, 12))

    def get_task_description(self) -> str:
        return f"Find an animal in garden {self._variation}."

    def load(self, task: str, variation: int, simplifications: str) -> None:
        self._variation = variation

    def reset(self) -> tuple[str, dict[str, Any]]:
        self._done = 0
        return "You are in a hallway.", {}

    def step(self, action: str) -> tuple[str, int, bool, dict[str, Any]]:
        if action == "jump":
            return "You fell.", 0, True, {"score": -100}
        self._done += action == SOLUTION[self._done]
        observation = f"You have done {self._done} of {len(SOLUTION)} steps."
        return observation, 0, self._done == len(SOLUTION), {"score": round(100 * self._done / len(SOLUTION))}


class Actions:
    """A session that plays some actions and then waits."""

    def __init__(self, *actions: str) -> None:
        self.turns: tuple[Turn, ...] = ()
        self.messages: list[str] = []
        self._actions = iter(actions)

    async def reply(self, message: str) -> str:
        self.messages.append(message)
        return next(self._actions, "wait")


def build_world(**options: Any) -> Any:
    """Return the example's environment with the stand-in."""
    spec = importlib.util.spec_from_file_location("text_world", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.TextWorld(StandIn(), "find-animal", **options)


@pytest.mark.parametrize(
    ("actions", "hard", "soft", "messages"),
    [
        (SOLUTION, 1, 1.0, 3),
        (SOLUTION[:2], 0, 0.67, 5),
        (("open door", "jump"), 0, 0.0, 2),
    ],
    ids=["solved", "too slow", "fatal"],
)
async def test_a_world_is_played_to_its_end(
    actions: tuple[str, ...], hard: float, soft: float, messages: int
) -> None:
    """The score is that of the world, a fatal mistake scores 0, and the last observation is the feedback."""
    world = build_world(max_turns=5)
    session = Actions(*actions)
    grade = await world.run(world.items(Split.val)[1], session, seed=0)
    assert (grade.score.hard, grade.score.soft, len(session.messages)) == (hard, soft, messages)
    assert session.messages[0] == "Find an animal in garden 5.\n\nYou are in a hallway."
    assert grade.feedback.startswith("You ")


async def test_a_skill_is_trained_in_the_world(tmp_path: Path) -> None:
    """An agent that learns the solution from its instructions solves all variations."""

    def act(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> str:
        turns = [message for message in prompt.messages if message.role == "assistant"]
        knows = "garden first" in prompt.messages[0].content
        return SOLUTION[len(turns)] if knows else "wait"

    trainer = Trainer(
        settings(tmp_path, test={"enabled": True}),
        environment=build_world(max_turns=3),
        target=ChatTarget(ScriptedLLM(act)),
        optimizer=ScriptedLLM(lambda prompt, kind, call_id: append_reply(kind, "Go to the garden first.")),
    )
    summary = await trainer.train()
    solved = {score.name: score.successes for score in summary.scores if score.split == "test"}
    assert (solved["baseline"], solved["best"]) == (0, 4)
