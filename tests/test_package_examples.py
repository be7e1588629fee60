"""Examples that use a package which the tests do without; a stand-in takes its place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reflact import Trainer
from reflact.llm import CallId, RenderedPrompt, ReplyModel
from reflact.targets import ChatTarget
from reflact.testing import ScriptedLLM, ToyEnvironment, ToyTarget, append_reply, toy_optimizer
from reflact.types import Split, Turn
from toy_runs import settings

EXAMPLES = Path(__file__).parents[1] / "examples"
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


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def build_world(**options: Any) -> Any:
    return load_example("text_world").TextWorld(StandIn(), "find-animal", **options)


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


class Sums(list[dict[str, Any]]):
    """A data set with the calls of reasoning-gym: each question is there twice, and one reply breaks the scorer."""

    def __init__(self) -> None:
        super().__init__({"question": f"{n // 2} + 1 =", "answer": str(n // 2 + 1)} for n in range(240))

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        if answer == "broken":
            raise ValueError(answer)
        return 1.0 if answer == entry["answer"] else 0.01


@pytest.mark.parametrize(
    ("reply", "hard", "soft"), [(" 22 ", 1, 1.0), ("It is 22.", 0, 0.01), ("broken", 0, 0.0)]
)
async def test_a_puzzle_is_scored_by_its_package(reply: str, hard: float, soft: float) -> None:
    """No question is in two splits, and a reply that the scorer cannot read scores 0."""
    puzzles = load_example("generated_puzzles").Puzzles(Sums(), "sums")
    items = [item for split in Split for item in puzzles.items(split)]
    assert len({item.input for item in items}) == len(items) == 100
    item = puzzles.items(Split.val)[1]
    grade = await puzzles.run(item, Actions(reply), seed=0)
    assert (item.input, grade.score.hard, grade.score.soft) == ("21 + 1 =", hard, soft)


class Records:
    """Records with the calls of MLflow's client."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.metrics: dict[str, dict[int, float]] = {}
        self.files: list[str] = []
        self.statuses: list[str] = []

    def search_runs(self, experiments: list[str], query: str, *, max_results: int) -> list[Any]:
        return [self._describe(tag) for tag in self.tags if f"'{tag}'" in query]

    def create_run(self, experiment: str, *, tags: dict[str, str]) -> Any:
        self.tags.append(tags["reflact.run_id"])
        return self._describe(self.tags[-1])

    def log_metric(self, run: str, name: str, value: float, *, step: int) -> None:
        self.metrics.setdefault(f"{run} {name}", {})[step] = value

    def log_artifact(self, run: str, path: str) -> None:
        self.files.append(f"{run} {Path(path).read_text('utf-8')}")

    def update_run(self, run: str, status: str) -> None:
        self.statuses.append(f"{run} {status}")

    def _describe(self, tag: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"record of {tag}"))


async def test_both_starts_of_a_run_are_one_record_in_mlflow(tmp_path: Path) -> None:
    records, example = Records(), load_example("track_with_mlflow")
    for _ in range(2):
        trainer = Trainer(
            settings(tmp_path / "run", train={"num_epochs": 2}),
            environment=ToyEnvironment(),
            target=ToyTarget(),
            optimizer=ScriptedLLM(toy_optimizer()),
        )
        summary = await example.train_with_mlflow(trainer, records, "1", tmp_path / "run")
    record = f"record of {summary.run_id}"
    assert records.tags == [summary.run_id]
    assert len(records.metrics[f"{record} score.best"]) == summary.steps
    assert records.files[-1] == f"{record} " + (tmp_path / "run" / "best_skill.md").read_text("utf-8")
    assert records.statuses == [f"{record} FINISHED"] * 2


async def test_a_loop_of_the_six_stages_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """Its loop takes a document to the full score, and rejects what adds nothing."""
    example = load_example("own_loop")
    target, environment = ToyTarget(), ToyEnvironment()
    skill, decisions = await example.train(target, environment, ScriptedLLM(toy_optimizer()), steps=5)
    assert [line.partition(":")[0] for line in decisions[:4]] == ["accept_new_best"] * 4
    assert decisions[4].startswith("reject")
    assert len(skill.text.split("\n\n")) == 4
    await example.main()
    assert skill.text.strip() in capsys.readouterr().out
