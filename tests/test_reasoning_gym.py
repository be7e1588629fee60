"""The environment of reasoning-gym: its traps, with a stand-in for the package and with the package itself."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prepare_arithmetic_data import build_environment

from pure_world import rows
from reflact import Trainer
from reflact.config.loading import load_config
from reflact.errors import ConfigError
from reflact.integrations import reasoning_gym as adapter
from reflact.integrations.reasoning_gym import EVALUATING, ReasoningGymEnvironment
from reflact.targets import Skill
from reflact.testing import append_reply, find_data_folder
from reflact.training.named_objects import load_named_environment
from reflact.types import Grade, Item, Rollout, Split, Turn
from toy_runs import build_trainer

FIXTURES = Path(__file__).parents[1] / "fixtures"
INSTALLED = find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym takes a minute to install")


class Numbers:
    """Stands in for a family: entry ``i`` of seed ``s`` is the question ``s + i``, as in reasoning-gym."""

    def __init__(self, family: str, seed: int, size: int, digits: int = 20) -> None:
        self.family, self.seed, self.size, self.digits = family, seed, size, digits

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = (self.seed + index // 2) % self.digits
        answer = None if self.family == "many" else str(number)
        return {"question": f"{self.family}: {number}?", "answer": answer, "metadata": {"number": number}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if int(answer) == entry["metadata"]["number"] else 0.25


class Says:
    """A session that gives one answer, or a right one."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        return message.rsplit(maxsplit=1)[-1].rstrip("?") if self.answer is None else self.answer


class Clerk:
    """A target that knows the answer, but writes it as the scorer wants it only if its skill says so."""

    identity = "clerk"

    def session(self, skill: Skill, *, rollout: str) -> Says:
        return Says(None if "digits" in skill.text else "It is so.")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the package by one with two families."""
    module = ModuleType("reasoning_gym")

    def create_dataset(name: str, **settings: Any) -> Numbers:
        if name not in {"plain", "many", "countdown"}:
            raise ValueError(f"Dataset {name} not registered")
        return Numbers(name, **settings)

    module.__dict__["create_dataset"] = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setattr(adapter, "version", lambda name: "0")


async def grade(environment: ReasoningGymEnvironment, item: Item, answer: str | None) -> Grade:
    return await environment.run(item, Says(answer), seed=0)


def list_questions(environment: ReasoningGymEnvironment) -> list[str]:
    return [str(item.input) for split in Split for item in environment.items(split)]


def test_no_question_is_in_two_splits(stand_in: None) -> None:
    """Questions that a family repeats are drawn once, and each split has as many of each family."""
    environment = ReasoningGymEnvironment(["plain", "many"], train=2, val=3, test=4)
    questions = list_questions(environment)
    assert len(questions) == len(set(questions)) == 18
    assert [item.task_type for item in environment.items(Split.train)] == ["plain", "many"] * 2
    with pytest.raises(ConfigError, match=r"plain has 5 different questions in 37 draws, and 9 are needed"):
        ReasoningGymEnvironment({"plain": {"digits": 5}}, train=2, val=3, test=4)


async def test_a_scorer_that_raises_gives_nothing(stand_in: None) -> None:
    """A reply that the scorer cannot read is wrong, with the reason; a part of a score is the soft score."""
    environment = ReasoningGymEnvironment(["plain"], train=1, val=1, test=1)
    item = environment.items(Split.val)[0]
    unread, wrong, right = [await grade(environment, item, answer) for answer in ("one", "99", " 1\n")]
    assert (unread.score.hard, unread.score.soft) == (0, 0)
    assert "the scorer cannot read the reply: ValueError" in str(unread.feedback)
    assert (wrong.score.hard, wrong.score.soft) == (0, 0.25)
    assert wrong.feedback == 'expected "1", got "99": the answer must be a single number and nothing else'
    assert (right.score.hard, right.feedback) == (1, None)


async def test_an_answer_that_is_none_is_scored(stand_in: None) -> None:
    """A question with many right answers has no reference, and its scorer decides."""
    environment = ReasoningGymEnvironment(["many"], train=1, val=1, test=1)
    item = environment.items(Split.test)[0]
    assert item.reference is None
    assert list(environment.list_right_answers(item)) == []
    assert (await grade(environment, item, None)).score.hard == 1
    assert (await grade(environment, item, "7")).feedback == "the scorer gives 0.25 of 1"


def test_families_that_run_answers_as_code_are_refused(stand_in: None) -> None:
    """A scorer that evaluates the model's answer needs the user's word, and an unknown family is an error."""
    with pytest.raises(ConfigError, match=r"scorer of countdown runs the model's answer as Python code"):
        ReasoningGymEnvironment(["plain", "countdown"], train=1, val=1, test=1)
    ReasoningGymEnvironment(["countdown"], train=1, val=1, test=1, allow_evaluation=True)
    with pytest.raises(ConfigError, match=r"cannot make none: Dataset none not registered"):
        ReasoningGymEnvironment(["none"], train=1, val=1, test=1)


async def test_a_run_of_a_configuration_learns_a_convention(stand_in: None, tmp_path: Path) -> None:
    """A configuration names the environment, and a run on two families learns the form of answers."""
    name = "reflact.integrations.reasoning_gym:ReasoningGymEnvironment"
    options = {"families": {"plain": None, "many": {"digits": 12}}, "train": 2, "val": 2, "test": 2}
    config = {
        "out_dir": tmp_path,
        "environment": {"name": name, "options": options},
        "search": {"sources": ["edits"]},
        "train": {"num_epochs": 1},
    }
    trainer = build_trainer(
        config,
        target=Clerk(),
        script=lambda prompt, reply_type, call_id: append_reply(reply_type, "Only digits."),
        environment=None,
    )
    assert (await trainer.train()).best.score == 1.0


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_the_missing_package_is_named() -> None:
    """Without reasoning-gym, the error says what to install."""
    with pytest.raises(ConfigError, match=r"pip install 'reflact\[reasoning-gym\]'"):
        ReasoningGymEnvironment(["plain"], train=1, val=1, test=1)


@needs_package
async def test_families_of_the_package() -> None:
    """The traps are in the package, and the environment is safe from them; conventions of form are scored."""
    from reasoning_gym import create_dataset

    zero, one = [
        {entry["question"] for entry in create_dataset("word_sorting", size=40, seed=s)} for s in (0, 1)
    ]
    assert len(zero & one) == 39
    config = load_config(
        {
            "out_dir": "out",
            "environment": {
                "name": "reflact.integrations.reasoning_gym:ReasoningGymEnvironment",
                "options": {
                    "families": ["calendar_arithmetic", "prime_factorization", "rush_hour"],
                    "train": 4,
                    "val": 4,
                    "test": 4,
                    "seed": 3,
                },
            },
        }
    )
    environment: Any = load_named_environment(config)
    questions = list_questions(environment)
    assert len(questions) == len(set(questions)) == 36
    items = {item.task_type: item for item in environment.items(Split.val)}
    assert items["rush_hour"].reference is None
    unread = await grade(environment, items["prime_factorization"], "two")
    assert "cannot read the reply: ValueError" in str(unread.feedback)
    plain, bold = [
        await grade(environment, items["calendar_arithmetic"], form % items["calendar_arithmetic"].reference)
        for form in ("%s", "**%s**")
    ]
    assert (plain.score.hard, bold.score.hard) == (1, 0)
    assert json.loads(environment.identity)["seed"] == 3


@needs_package
def test_the_families_that_run_answers_as_code_are_known() -> None:
    """No other module of the package evaluates an answer or a text that may be one."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    folder = Path(str(reasoning_gym.__file__)).parent
    modules = {
        path.stem
        for path in folder.rglob("*.py")
        if re.search(r"(?<!\w)(eval|parse_expr|sympify)\(\w*answer\w*\b", path.read_text(encoding="utf-8"))
    }
    assert modules <= EVALUATING
    assert set(DATASETS) >= EVALUATING
    assert modules == EVALUATING - {"composite"}


@needs_package
async def test_the_demo_has_the_items_and_scores_of_the_environment(tmp_path: Path) -> None:
    """The demo's sums are those of the environment, and both solve the same of the recorded replies."""
    environment = build_environment()
    folder = find_data_folder("demo") / "arithmetic"
    for split in Split:
        lines = (folder / "data" / split / "items.jsonl").read_text(encoding="utf-8").splitlines()
        assert [Item.model_validate_json(line) for line in lines] == list(environment.items(split))
    items = {item.id: item for split in Split for item in environment.items(split)}
    config = load_config(folder / "demo.yaml", overrides=[f"out_dir={tmp_path}"])
    assert (await Trainer(config).train()).status == "completed"
    found = rows(tmp_path, "SELECT rollout FROM rollouts")
    rollouts = [Rollout.model_validate_json(str(row[0])) for row in found]
    assert len(rollouts) > 100
    for rollout in rollouts:
        scored = await grade(environment, items[rollout.item_id], rollout.answer)
        assert scored.score.hard == rollout.score.hard, rollout.answer


@needs_package
async def test_a_recorded_training_through_the_environment_learns_the_form_of_answers(tmp_path: Path) -> None:
    """A small model's whole training replays from its file alone, with a rule as the skill and a confirmed gain."""
    config = load_config(FIXTURES / "reasoning_gym" / "train.yaml", overrides=[f"out_dir={tmp_path}"])
    summary = await Trainer(config).train()
    assert summary.status == "completed"
    assert summary.claim is not None
    assert summary.claim.confirmed
    baseline, best = (summary.score(name, Split.test) for name in ("baseline", "best"))
    assert baseline is not None
    assert best is not None
    assert baseline.successes < best.successes / 2
    assert "a single number and nothing else" in (tmp_path / "best_skill.md").read_text(encoding="utf-8")
