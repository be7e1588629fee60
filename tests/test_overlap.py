"""Rollout and reflection overlap without an effect on the result."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

import virtual_time
from doubles import RUN, opened
from reflact.config.training import ReflectConfig, UpdateConfig
from reflact.errors import ContextOverflow, EnvironmentFailure, ProviderDown, RunFailed
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.prompts import load_prompts
from reflact.protocols import LLM, Session
from reflact.stages.context import StageContext
from reflact.stages.reflect import Analyst, Minibatch, MinibatchDealer, roll_out_and_reflect, shuffle_batch
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
    """Random schedules give the bytes of the version that waits: rollouts, reports, journal, store."""
    barrier = virtual_time.run(scheduled, [0], 1, False)
    assert len(barrier) == 1
    assert virtual_time.run(scheduled, range(schedules), concurrency, True) == barrier


@given(
    outcomes=st.lists(st.sampled_from(["0", "0.4", "0.5", "1", "lost"]), min_size=1, max_size=24),
    size=st.integers(1, 6),
    batch=st.integers(0, 2),
    failure_only=st.booleans(),
)
def test_prefixes_complete_every_minibatch_once(
    outcomes: list[str], size: int, batch: int, failure_only: bool
) -> None:
    """Over all prefixes each minibatch is completed once, by its last member or by the end.

    Failures and successes are two subsequences of one order; unmeasured rollouts are in neither.
    """
    config = ReflectConfig(minibatch_size=size, failure_only=failure_only)
    cases = items(*outcomes)
    scores = [None if outcome == "lost" else Score.of(float(outcome)) for outcome in outcomes]
    rollouts = [
        Rollout(key=item.id, item_id=item.id, skill_hash="s", score=score)
        for item, score in zip(cases, scores, strict=True)
    ]
    found = []
    dealer = MinibatchDealer(cases, config, batch=batch, threshold=THRESHOLD)
    for number, rollout in enumerate(rollouts, 1):
        for part in dealer.add(rollout):
            assert part.rollouts[-1] == rollout or number == len(cases)
            assert len(part.items) == size or number == len(cases)
            assert part.batch == batch
            found.append(part)
    for source, kinds in (("failure", {"0", "0.4"}), ("success", set() if failure_only else {"0.5", "1"})):
        mine = [part for part in found if part.source == source]
        wanted = [
            pair for pair, o in zip(zip(cases, rollouts, strict=True), outcomes, strict=True) if o in kinds
        ]
        assert [pair for part in mine for pair in zip(part.items, part.rollouts, strict=True)] == wanted
        assert [part.index for part in mine] == list(range(len(mine)))


async def test_analysts_work_while_rollouts_run() -> None:
    """The first full minibatch is analysed though later rollouts cannot finish before it was."""
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


async def test_a_barrier_waits_for_all_rollouts() -> None:
    """Without overlap no analyst starts before the last rollout of the last batch has finished."""
    finished: list[str] = []

    async def on_run(item: Item) -> None:
        finished.append(item.id)

    async def analyse(part: Minibatch) -> AnalystReport:
        assert len(finished) == 12
        return part.empty_report

    batches = [items(*["0"] * 6), items(*["0"] * 6, name="o")]
    environment = World(on_run=on_run)
    await gathered(
        batches, environment=environment, store=await opened(), overlap=False, limit=1, analyse=analyse
    )


@pytest.mark.parametrize("overlap", [True, False])
async def test_accumulated_batches_are_dealt_apart(overlap: bool) -> None:
    """Each batch has minibatches of its own, in the plan's order; an item of two batches has two trials."""
    store = await opened()
    model = moody(at_once)
    reader = Analyst(
        context=make_context(model, store),
        tokens=2000,
        skill=SKILL,
        config=UpdateConfig(operations=("append",)),
        max_edits=2,
        notes=lambda batch: "",
    )
    batch = items("0", "1", "0", "0")
    rollouts, reports = await gathered(
        [batch, batch], environment=World(), store=store, overlap=overlap, analyse=reader.report
    )
    assert [r.trial for r in rollouts] == [0] * 4 + [1] * 4
    wanted = [("failure", 0), ("failure", 1), ("success", 0)]
    assert [(r.batch, r.source_type, r.index) for r in reports] == [(b, *w) for b in (0, 1) for w in wanted]
    parts = {(call.call_id.purpose, call.call_id.part) for call in model.calls}
    assert parts == {
        *(("analyst_failure", part) for part in ("0", "1", "1/0", "1/1")),
        *(("analyst_success", part) for part in ("0", "1/0")),
    }


async def test_a_threshold_says_what_failed() -> None:
    """Hard scores below the threshold are failures, others successes, unmeasured ones neither."""
    batch = items("0.4", "0.5", "lost", "0")
    _, reports = await gathered([batch], environment=World(), store=await opened(), size=9)
    assert {r.source_type: set(r.item_ids) for r in reports} == {"failure": {"i0", "i3"}, "success": {"i1"}}
    _, reports = await gathered([batch], environment=World(), store=await opened(), failure_only=True)
    assert [r.source_type for r in reports] == ["failure"]


@pytest.mark.parametrize("size", range(8, 20))
async def test_an_absence_is_noted_with_the_first_report_that_relies_on_it(size: int) -> None:
    """Each analyst finds noted what was lost before the cases of earlier reports, and nothing beyond that."""
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
    """What an outage cut off is tried again after a restart, where it kept analysts from reporting too."""
    batch = items("0", "0", "lost", "0", "lost")
    store = await opened()

    async def unreachable(part: Minibatch) -> AnalystReport:
        raise ProviderDown("gone")

    with pytest.raises(ProviderDown, match="gone"):
        await gathered([batch], environment=World(), store=store, overlap=overlap, analyse=unreachable)
    assert not await notes_of(store)


async def test_a_restart_keeps_what_was_relied_on_and_tries_the_rest_again() -> None:
    """After a stop a noted item stays out; one whose absence nobody had used is rolled out again."""
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
async def test_a_step_needs_a_measured_rollout(overlap: bool) -> None:
    """Where nothing could be measured the step fails, and nothing of that is frozen."""
    store = await opened()
    with pytest.raises(RunFailed, match="only 0 of 3 rollouts could be measured"):
        await gathered([items("lost", "lost", "lost")], environment=World(), store=store, overlap=overlap)
    assert not await notes_of(store)


@pytest.mark.parametrize("overlap", [True, False])
async def test_rollouts_and_analysts_have_limits(overlap: bool) -> None:
    """Over all batches of a step neither kind of work exceeds its own limit, and each reaches it."""
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
