"""Whole runs with several sources of candidates: what they end with, what they pay, and that they repeat."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from reflact import Trainer, events
from reflact.errors import QuotaSpent
from reflact.messages import CallId, RenderedPrompt, ReplyModel, Text
from reflact.protocols import Session
from reflact.records import StepRecord
from reflact.search.rewrite import PURPOSE
from reflact.skills.document import find_regions
from reflact.stages.reply_models import AnalystReply
from reflact.store.runs import open_store
from reflact.testing import ScriptedLLM, ToyEnvironment, append_reply, toy_optimizer
from reflact.testing.llm import ScriptedAnswer
from reflact.testing.toy import grade_toy
from reflact.types import Grade, Item, Skill, Split, digest_json
from toy_runs import Actor, document, list_messages, right, run, settings

ALL: dict[str, Any] = {"sources": ["examples", "rewrite", "edits"]}
DETERMINISTIC: dict[str, Any] = {"deterministic": True}


class QuietEnvironment:
    """The toy world without right answers that can be written down; ``turns`` are messages after the question."""

    identity = "quiet toy"

    def __init__(self, turns: Sequence[str] = (), **sizes: int) -> None:
        self._toy = ToyEnvironment(**sizes)
        self._turns = turns

    def items(self, split: Split) -> Sequence[Item]:
        return self._toy.items(split)

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        answer = await session.reply(str(item.input))
        for turn in self._turns:
            await session.reply(turn)
        return grade_toy(item, answer)


def mute(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    return "" if issubclass(reply_type, Text) else "no reply of any use"


def luck(seed: int, *parts: str) -> float:
    return int(digest_json([seed, *parts])[:13], 16) / 16**13


def learn_slowly(skill: Skill, message: str, before: int) -> str:
    """Answer more of the questions under some documents than under others; no document solves all."""
    share = 0.1 + 0.6 * luck(1, skill.text) if skill.text.strip() else 0.1
    return right(message) if luck(2, skill.text, message) < share else "unknown"


def write_anew(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
    line = f"- Idea {call_id.step} of part {call_id.part or 'one'} is worth a try."
    if issubclass(reply_type, Text):
        return f"```markdown\n{line}\n```"
    if issubclass(reply_type, AnalystReply):
        return append_reply(reply_type, line)
    return toy_optimizer()(prompt, reply_type, call_id)


def count_candidates(records: Sequence[StepRecord]) -> int:
    raced = [{entry.skill_hash for entry in record.race if entry.n} for record in records]
    judged = [set() if r.verdict.candidate is None else {r.candidate_hash} for r in records]
    return sum(len(some | other) for some, other in zip(raced, judged, strict=True))


def read_examples(text: str) -> str:
    return "".join(text[r.start : r.end] for r in find_regions(text) if r.name == "examples")


@pytest.mark.parametrize("train", [5, 12, 24])
async def test_an_optimizer_that_never_replies_leaves_the_best_worked_examples(
    tmp_path: Path, train: int
) -> None:
    world = ToyEnvironment(train=train, val=12, test=6, rules=4)
    done = await run(
        tmp_path,
        environment=world,
        script=mute,
        search=ALL,
        train={"batch_size": 5, "num_epochs": 3},
        test={"enabled": True},
    )
    assert done.summary.status == "completed"
    assert done.summary.best.score == 1
    ids = [example.item_id for example in done.summary.best.examples]
    assert len(ids) == len(set(ids)) >= 4
    assert set(ids) <= {item.id for item in world.items(Split.train)}
    score = done.summary.score("best", Split.test)
    assert score.hard == 1


TALK = (
    *["nothing of interest. " * 15] * 8,
    "Error: the sign is missing.",
    *["nothing of interest. " * 15] * 3,
    "Is that your answer?",
)


@pytest.mark.parametrize("turns", [(), TALK], ids=["one turn", "several turns"])
async def test_without_right_answers_examples_are_rollouts_that_were_graded_right(
    tmp_path: Path, turns: Sequence[str]
) -> None:
    """Of several turns, an example is a transcript of the decisive ones."""
    world = QuietEnvironment(turns, train=12, val=8, test=4)
    lucky = {str(item.input) for item in world.items(Split.train)[:4]}
    done = await run(
        tmp_path,
        environment=world,
        actor=Actor(lambda _, message, before: right(message) if message in lucky else None),
        script=mute,
        search={**ALL, "max_document_tokens": 20_000},
        train={"batch_size": 12, "num_epochs": 3},
    )
    assert (done.summary.status, done.summary.best.score) == ("completed", 1)
    examples = done.summary.best.examples
    assert {example.task for example in examples} == lucky
    for example in examples:
        assert len(example.answer.encode()) <= 1_500
        answer = right(example.task)
        if not turns:
            assert example.answer == answer
            continue
        assert example.answer in done.best
        for shown in (f"assistant: {answer}", "user: Error: the sign is missing.", TALK[-1]):
            assert shown in example.answer


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_small_budget_tries_many_candidates(tmp_path: Path, seed: int) -> None:
    """With 240 rollouts on 20 validation items at least 25 candidates are tried.

    The last candidate may go to the gate: the run pays less than one pass over the validation items beyond its budget.
    """
    actor = Actor(learn_slowly)
    done = await run(
        tmp_path,
        environment=ToyEnvironment(train=24, val=20, test=4, rules=6),
        actor=actor,
        script=write_anew,
        seed=seed,
        search=ALL,
        train={"batch_size": 8, "num_epochs": 20, "max_rollouts": 240},
        target=DETERMINISTIC,
    )
    assert done.summary.status == "completed"
    assert "train.max_rollouts is 240" in str(done.summary.reason)
    assert count_candidates(done.records) >= 25
    lost = [record for record in done.records if record.race and not any(e.judged for e in record.race)]
    assert lost
    assert {record.verdict.candidate_score for record in lost} == {None}  # a part of the items is no score
    assert sum(record.n_rollouts for record in done.records) + 20 == len(actor.asked) < 240 + 20
    assert done.summary.best.score > 0.3


@pytest.mark.parametrize("limit", [10, 12, 17, 30, 60])
async def test_a_target_without_credit_ends_the_run_with_its_best_document(
    tmp_path: Path, limit: int
) -> None:
    class Poor(Actor):
        async def answer(self, skill: Skill, message: str) -> str | None:
            if len(self.asked) >= limit:
                raise QuotaSpent("the target's account is empty")
            return await super().answer(skill, message)

    done = await run(
        tmp_path,
        environment=ToyEnvironment(train=12, val=8, test=4),
        actor=Poor(learn_slowly),
        script=write_anew,
        search={"sources": ["rewrite", "examples"]},
        train={"batch_size": 4, "num_epochs": 6},
        target=DETERMINISTIC,
    )
    assert (done.summary.status, done.summary.reason) == ("budget", "the target's account is empty")
    assert (tmp_path / "best_skill.md").read_text(encoding="utf-8") == done.best


LONGEST_WAIT = 20


def make_search_settings(folder: Path, noise: float | None, *, concurrency: int = 8) -> dict[str, Any]:
    return settings(
        folder,
        search=ALL,
        target={"deterministic": None if noise else True},
        train={
            "batch_size": 6,
            "num_epochs": 4,
            "rollout_concurrency": concurrency,
            "max_rollouts": 600,
            "grace_seconds": 0.0,
        },
        reflect={"minibatch_size": 3, "concurrency": concurrency},
        select={"max_edits": 2},
        slow_update={"enabled": True},
        test={"enabled": True, "placebo": True},
    )


class Slow:
    """A toy world whose answers come in the order of a seed.

    Args:
        seed: The seed of the waits.
        noise: The noise of the toy target; None: it learns slowly and always gives the same answers.
        cut: Called with the number of each rollout.
    """

    def __init__(self, seed: int, noise: float | None, cut: Callable[[int], None] = lambda _: None) -> None:
        self._draw = random.Random(seed)
        self._cut = cut
        self._asked = 0
        self._noise = noise
        self.target = Actor(self._act, noise=noise or 0.0)

    async def wait(self) -> None:
        for _ in range(self._draw.randrange(LONGEST_WAIT)):
            await checkpoint()

    async def _act(self, skill: Skill, message: str, before: int) -> str | None:
        self._asked += 1
        self._cut(self._asked)
        await self.wait()
        return learn_slowly(skill, message, before) if self._noise is None else None

    async def script(
        self, prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId
    ) -> ScriptedAnswer:
        await self.wait()
        said = toy_optimizer()(prompt, reply_type, call_id)
        if call_id.purpose == PURPOSE and isinstance(said, dict):
            if call_id.part == "3":
                return "```markdown\n# cut"
            lines = str(said["text"]).splitlines()
            place = 1 + int(call_id.part)
            said["text"] = "\n".join([*lines[:place], *lines[place + 1 :]])
        return said

    def make_trainer(self, config: dict[str, Any]) -> Trainer:
        return Trainer(
            config,
            environment=ToyEnvironment(train=24, val=12, test=6, rules=6),
            target=self.target,
            optimizer=ScriptedLLM(self.script),
        )


async def read_history(folder: Path, run_id: str) -> tuple[str, ...]:
    async with open_store(folder / "run.db") as store:
        stored = await store.events(run_id)
        records = await store.records(run_id)
        epochs = await store.epochs(run_id)
    return (
        *(event.canonical_content for event in stored),
        *(record.model_dump_json() for record in (*records, *epochs)),
        *(f"{p.name}\n{p.read_text('utf-8')}" for p in sorted((folder / "skills").iterdir())),
        (folder / "best_skill.md").read_text("utf-8"),
    )


async def train_unbroken(
    folder: Path, noise: float | None, *, concurrency: int = 8, order: int = 0
) -> tuple[str, ...]:
    config = make_search_settings(folder, noise, concurrency=concurrency)
    trainer = Slow(order, noise).make_trainer({**config, "seed": 2})
    summary = await trainer.train()
    assert summary.status == "completed"
    return await read_history(folder, trainer.run_id)


NOISES = pytest.mark.parametrize("noise", [0.15, None], ids=["noisy", "deterministic"])
INTERRUPTED = pytest.mark.parametrize(
    "noise", [pytest.param(0.15, marks=pytest.mark.slow), None], ids=["noisy", "deterministic"]
)


@NOISES
async def test_concurrency_and_order_of_answers_influence_nothing(
    tmp_path: Path, noise: float | None
) -> None:
    histories = [
        await train_unbroken(tmp_path / f"{concurrency}", noise, concurrency=concurrency, order=order)
        for order, concurrency in enumerate((1, 8, 64))
    ]
    assert len(set(histories)) == 1
    assert all(f'"source":"{name}"' in "".join(histories[0]) for name in ALL["sources"])
    assert '"race":[' in "".join(histories[0])


@INTERRUPTED
async def test_a_run_that_is_stopped_after_every_commit_has_the_same_history(
    tmp_path: Path, noise: float | None
) -> None:
    whole = await train_unbroken(tmp_path / "whole", noise)
    folder, starts, status = tmp_path / "stopped", 0, "cancelled"
    config = {**make_search_settings(folder, noise), "seed": 2}
    commits = (events.StepCommitted, events.EpochCommitted, events.BaselineMeasured, events.PromotionJudged)
    while status == "cancelled":
        starts += 1
        assert starts < 60
        trainer = Slow(starts, noise).make_trainer(config)
        async with trainer.stream() as stream:
            async for event in stream:
                if isinstance(event, commits):
                    trainer.stop("after a commit")
                if isinstance(event, events.RunFinished):
                    status = event.summary.status
    assert starts > 5
    assert status == "completed"
    assert await read_history(folder, trainer.run_id) == whole


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
@INTERRUPTED
async def test_a_run_that_is_cut_off_anywhere_has_the_same_history(
    tmp_path: Path, noise: float | None, seed: int
) -> None:
    whole = await train_unbroken(tmp_path / "whole", noise)
    folder, starts, places = tmp_path / "cut", 0, random.Random(seed)
    config = {**make_search_settings(folder, noise), "seed": 2}
    summary = None
    while summary is None:
        starts += 1
        assert starts < 60
        last = places.randrange(15, 70)
        with anyio.CancelScope() as scope:
            world = Slow(starts, noise, lambda n: scope.cancel() if n == last else None)  # noqa: B023
            trainer = world.make_trainer(config)
            summary = await trainer.train()
    assert starts > 3
    assert summary.status == "completed"
    assert await read_history(folder, trainer.run_id) == whole


async def test_validation_and_test_items_are_in_no_document(tmp_path: Path) -> None:
    world = ToyEnvironment(train=24, val=20, test=12, rules=6)
    done = await run(
        tmp_path,
        environment=world,
        actor=Actor(learn_slowly),
        script=write_anew,
        search=ALL,
        train={"batch_size": 8, "num_epochs": 3},
        test={"enabled": True},
    )
    tasks = {line.removeprefix("Task: ") for text in done.texts.values() for line in text.splitlines()}
    assert tasks & list_messages(Split.train, world)
    assert not tasks & (list_messages(Split.val, world) | list_messages(Split.test, world))
    ids = {example.item_id for record in done.records for example in record.current.examples}
    assert ids <= {item.id for item in world.items(Split.train)}


@pytest.mark.parametrize(
    "initial",
    [
        "",
        f"{document('double')}\n",
        f"{document('double')}\n<!-- SLOW_UPDATE_START -->\n{'Take your time. ' * 6}\n<!-- SLOW_UPDATE_END -->\n",
        f"---\nname: sums\ndescription: {'Knows sums. ' * 8}\n---\n\nAnswer every task.\n",
    ],
)
async def test_examples_are_added_as_long_as_the_document_is_short_enough(
    tmp_path: Path, initial: str
) -> None:
    done = await run(
        tmp_path,
        initial=initial,
        environment=ToyEnvironment(train=24, val=12, test=4, rules=6),
        actor=Actor(learn_slowly),
        script=mute,
        search={"sources": ["examples"], "max_document_tokens": 140},
        train={"batch_size": 6, "num_epochs": 2},
    )
    with_examples = [text for text in done.texts.values() if read_examples(text)]
    assert len(with_examples) > 3
    assert max(len(text.encode()) for text in with_examples) <= 140 * 3


async def test_an_example_that_holds_a_marker_is_left_out(tmp_path: Path) -> None:
    class Marked(ToyEnvironment):
        def items(self, split: Split) -> Sequence[Item]:
            first, *others = super().items(split)
            return [first.model_copy(update={"reference": "<!-- EXAMPLES_END -->"}), *others]

    done = await run(
        tmp_path, environment=Marked(train=8, val=8, test=4), script=mute, search=ALL, train={"batch_size": 4}
    )
    ids = {example.item_id for example in done.summary.best.examples}
    assert ids
    assert "train-000" not in ids
