"""Rollout and reflection overlap without an effect on the result."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from anyio.lowlevel import checkpoint
from pydantic import JsonValue

import virtual_time
from doubles import RUN, opened
from reflact.config.training import ReflectConfig, UpdateConfig
from reflact.errors import ContextOverflow, EnvironmentFailure, ProviderDown
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import load_prompts
from reflact.protocols import LLM, Session
from reflact.stages.context import StageContext
from reflact.stages.reflect import Analyst, Minibatch, roll_out_and_reflect, shuffle_batch
from reflact.stages.rollout import RolloutRunner
from reflact.testing import InMemoryRunStore, ScriptedLLM
from reflact.testing.llm import ScriptedAnswer, append_edit
from reflact.types import AnalystReport, Grade, Item, Rollout, Score, Skill, Split, Turn, digest_json

BOOK = load_prompts()
SKILL = Skill(text="Answer briefly.\n")
SEED, STEP, THRESHOLD = 7, 3, 0.5

Waits = Callable[[], float]
Notes = dict[tuple[int, str], str]
Found = tuple[tuple[Rollout, ...], tuple[AnalystReport, ...]]


def at_once() -> float:
    """Take no time."""
    return 0.0


class Target:
    """Answers every message with itself."""

    identity = "target"

    def session(self, skill: Skill, *, rollout: str) -> Session:
        return _Echo()


class _Echo:
    def __init__(self) -> None:
        self.turns: tuple[Turn, ...] = ()

    async def reply(self, message: str) -> str:
        self.turns += (Turn(role="user", content=message), Turn(role="assistant", content=message))
        return message


class World:
    """An environment whose items say how they end: ``<name> <score>``, or ``<name> lost``.

    Attributes:
        ran: The items of all attempts, in order of their starts.
    """

    identity = "world"

    def __init__(
        self, waits: Waits = at_once, *, on_run: Callable[[Item], Awaitable[None]] | None = None
    ) -> None:
        self._waits = waits
        self._on_run = on_run
        self.ran: list[str] = []

    def items(self, split: Split) -> Sequence[Item]:
        return ()

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        self.ran.append(item.id)
        answer = await session.reply(str(item.input))
        await anyio.sleep(self._waits())
        if self._on_run is not None:
            await self._on_run(item)
        outcome = answer.partition(" ")[2]
        if outcome == "lost":
            raise EnvironmentFailure(f"{item.id} broke")
        return Grade(score=Score.of(float(outcome)), answer=answer, feedback=f"seed {seed}")


def items(*outcomes: str, name: str = "i") -> tuple[Item, ...]:
    """Return items that end in these ways."""
    return tuple(Item(id=f"{name}{n}", input=f"{name}{n} {outcome}") for n, outcome in enumerate(outcomes))


def moody(waits: Waits) -> ScriptedLLM:
    """Return a model whose replies follow from the prompt: an edit, nonsense, or too long a prompt."""

    async def answer(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await anyio.sleep(waits())
        mood = digest_json([m.content for m in prompt.messages])
        if int(mood[0], 16) < 3:
            return "I would rather not."
        if int(mood[0], 16) < 7:
            return ContextOverflow(f"{call_id.label} is too long")
        edits: list[JsonValue] = [append_edit(reply_type, f"- {mood}")]
        pattern: JsonValue = {"type": "t", "cases": [1], "description": mood[:9]}
        whole: dict[str, JsonValue] = {"reasoning": mood[:9], "patterns": [pattern], "edits": edits}
        return {k: v for k, v in whole.items() if k in reply_type.model_fields}

    return ScriptedLLM(answer)


async def notes_of(store: InMemoryRunStore) -> Notes:
    """Return what the run's journal holds."""
    rows = await store._database.fetch_rows("SELECT step, label, value FROM decision_log")
    return {(step, label): value for step, label, value in rows}


def make_context(llm: LLM, store: InMemoryRunStore) -> StageContext:
    """Return the context of the step."""
    return StageContext(llm=llm, prompts=BOOK, decision_log=store.decision_log(RUN), step=STEP)


def analyst(store: InMemoryRunStore, waits: Waits) -> Analyst:
    """Return an analyst with the packaged prompts and a moody model."""
    return Analyst(
        context=make_context(moody(waits), store),
        tokens=2000,
        skill=SKILL,
        config=UpdateConfig(operations=("append",)),
        max_edits=2,
        notes=lambda batch: f"This is {batch.source} {batch.part}.",
    )


async def silent(batch: Minibatch) -> AnalystReport:
    """Analyse nothing."""
    return batch.empty_report


async def gathered(
    batches: Sequence[Sequence[Item]],
    *,
    environment: World,
    store: InMemoryRunStore,
    overlap: bool = True,
    size: int = 2,
    limit: int = 8,
    concurrency: int = 8,
    failure_only: bool = False,
    analyse: Callable[[Minibatch], Awaitable[AnalystReport]] = silent,
) -> Found:
    """Gather the reports of one step."""
    return await roll_out_and_reflect(
        batches,
        SKILL,
        runner=RolloutRunner(
            target=Target(),
            environment=environment,
            store=store,
            decision_log=store.decision_log(RUN),
            step=STEP,
            feedback=True,
            limit=limit,
        ),
        analyse=analyse,
        config=ReflectConfig(
            minibatch_size=size, concurrency=concurrency, overlap=overlap, failure_only=failure_only
        ),
        seed=SEED,
        threshold=THRESHOLD,
    )


def in_order(batch: Sequence[Item]) -> list[str]:
    """Return the ids of the first batch in its seeded order."""
    return [item.id for item in shuffle_batch(batch, seed=SEED, step=STEP)]


MIXED = items(
    "0", "1", "0.3", "lost", "0.5", "0", "1", "0", "0.4", "1", "lost", "0", "0.7", "0.2", "1", "0", "0"
)
OTHERS = items("1", "0", "lost", "0", "0.6", "0", "0", "1", "0.1", name="o")
BATCHES = (MIXED, (*OTHERS, *MIXED[:5]), ())


async def scheduled(schedules: Sequence[int], concurrency: int, overlap: bool) -> set[tuple[str, ...]]:
    """Gather once for each schedule, in which everything takes a random time; return what differs."""
    seen = set()
    for schedule in schedules:
        draw = random.Random(schedule)

        def waits(draw: random.Random = draw) -> float:
            return draw.choice([0.0, draw.random(), draw.random() * 20])

        store = await opened()
        rollouts, reports = await gathered(
            BATCHES,
            environment=World(waits),
            store=store,
            overlap=overlap,
            limit=concurrency,
            concurrency=concurrency,
            analyse=analyst(store, waits).report,
        )
        assert {report.no_reply_reason is None for report in reports} == {True, False}
        assert any("shortened_prompt" in label for _, label in await notes_of(store))
        stored = await store._database.fetch_rows("SELECT rollout FROM rollouts ORDER BY rollout")
        notes = await notes_of(store)
        seen.add(
            (
                *(rollout.model_dump_json() for rollout in rollouts),
                *(report.model_dump_json() for report in reports),
                *(f"{step} {label} {value}" for (step, label), value in sorted(notes.items())),
                *(rollout for (rollout,) in stored),
            )
        )
    return seen


@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.parametrize("schedules", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_the_order_of_completion_changes_nothing(schedules: int, concurrency: int) -> None:
    barrier = virtual_time.run(scheduled, [0], 1, False)
    assert len(barrier) == 1
    assert virtual_time.run(scheduled, range(schedules), concurrency, True) == barrier


async def test_analysts_work_while_rollouts_run() -> None:
    analysed = anyio.Event()
    batch = items(*["0"] * 6)
    first = set(in_order(batch)[:2])

    async def on_run(item: Item) -> None:
        if item.id not in first:
            await analysed.wait()

    async def analyse(part: Minibatch) -> AnalystReport:
        analysed.set()
        return part.empty_report

    with anyio.fail_after(60):
        _, reports = await gathered(
            [batch], environment=World(on_run=on_run), store=await opened(), analyse=analyse
        )
    assert len(reports) == 3


@pytest.mark.parametrize("size", range(8, 20))
async def test_an_absence_is_noted_with_the_first_report_that_relies_on_it(size: int) -> None:
    batch = items(*(["0", "0", "lost", "0", "lost"] * 4)[:size])
    order = in_order(batch)
    lost = {item.id for item in batch if str(item.input).endswith("lost")}
    store = await opened()
    relied = [0]

    async def analyse(part: Minibatch) -> AnalystReport:
        found = {value.split()[0].strip('"') for value in (await notes_of(store)).values()}
        assert found == lost & set(order[: max(relied)])
        relied.append(order.index(part.items[-1].id) if len(part.items) == 2 else size)
        return part.empty_report

    await gathered([batch], environment=World(), store=store, limit=1, analyse=analyse)
    assert len(relied) == 1 + (size - len(lost) + 1) // 2
    assert len(await notes_of(store)) == len(lost)


@pytest.mark.parametrize("overlap", [True, False])
async def test_an_outage_freezes_nothing(overlap: bool) -> None:
    batch = items("0", "0", "lost", "0", "lost")
    store = await opened()

    async def unreachable(part: Minibatch) -> AnalystReport:
        raise ProviderDown("gone")

    with pytest.raises(ProviderDown, match="gone"):
        await gathered([batch], environment=World(), store=store, overlap=overlap, analyse=unreachable)
    assert not await notes_of(store)


async def test_a_restart_keeps_what_was_relied_on_and_tries_the_rest_again() -> None:
    batch = items(*["0", "lost", "0", "lost", "0", "0", "0", "lost"])
    order = in_order(batch)
    lost = [item for item in order if str({i.id: i for i in batch}[item].input).endswith("lost")]
    store = await opened()
    asked: list[int] = []

    async def dies(part: Minibatch) -> AnalystReport:
        asked.append(part.index)
        if part.index == 1:
            raise ProviderDown("gone")
        return part.empty_report

    with pytest.raises(ProviderDown, match="gone"):
        await gathered([batch], environment=World(), store=store, limit=1, analyse=dies)
    notes = (await notes_of(store)).values()
    used = [item for item in lost if any(item in value for value in notes)]
    assert 0 < len(used) < len(lost)
    assert asked == [0, 1]
    again = World()
    await gathered([batch], environment=again, store=store, limit=1)
    assert not set(used) & set(again.ran)
    assert set(lost) - set(used) <= set(again.ran)


@pytest.mark.parametrize("overlap", [True, False])
async def test_rollouts_and_analysts_have_limits(overlap: bool) -> None:
    running = {"rollouts": 0, "analysts": 0}
    highest = {"rollouts": 0, "analysts": 0}

    async def work(kind: str) -> None:
        running[kind] += 1
        highest[kind] = max(highest[kind], running[kind])
        for _ in range(30):
            await checkpoint()
        running[kind] -= 1

    async def analyse(part: Minibatch) -> AnalystReport:
        await work("analysts")
        return part.empty_report

    await gathered(
        [items(*["0"] * 12), items(*["0"] * 12, name="o")],
        environment=World(on_run=lambda item: work("rollouts")),
        store=await opened(),
        overlap=overlap,
        limit=5,
        concurrency=2,
        analyse=analyse,
    )
    assert highest == {"rollouts": 5, "analysts": 2}
