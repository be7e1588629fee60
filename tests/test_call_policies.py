"""What a calibration consumed: every reply counts, whoever asked and whatever became of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from itertools import count
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import pytest
from rich.console import Console

from calibrate_command import configured, flattering, record, reflact
from calibration_memory import ListMemory
from doubles import PROMPT, RUN, Endpoint, completion, connected, opened
from flattered_world import PURPOSE, answer, flattered_traces, name_traces, record_flattered
from reflact import Calibrator, Critic
from reflact.calibration.call_policies import FAIL_FAST_CALLS, MeteredLLM, UsageLedger, sum_usage
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.critic import CriticReply, ResultCache
from reflact.calibration.curriculum import CurriculumSettings
from reflact.calibration.events import CalibrationEvent, CalibratorStopped
from reflact.calibration.judges import JudgeReply
from reflact.calibration.report import CalibrationReport, PurposeUsage
from reflact.cli.calibrate_output import print_calibration
from reflact.errors import ContextOverflow, ProviderDown, ReplyError, RunFailed
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import Usage
from reflact.reporting.html.calibration import render_calibration_page
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

PLACE = CallId(role="judge", purpose="compare")
GOOD = json.dumps({"reasoning": "By the states.", "better": "first"})
ONE = Usage(calls=1, input_tokens=10, cached_tokens=4, output_tokens=3)


def booked(usage: Usage = Usage(), **counts: int) -> PurposeUsage:  # noqa: B008 - frozen
    """Return an entry of comparisons."""
    return PurposeUsage.model_validate({"role": "judge", "purpose": "compare", "usage": usage, **counts})


async def test_replies_that_were_refused_count() -> None:
    """A valid reply after a refused one took two calls; a question without any took all its attempts."""
    endpoint, books = Endpoint(completion("?"), completion(GOOD), *[completion("?")] * 3), UsageLedger()
    async with connected(endpoint) as client:
        counted = MeteredLLM(client, books)
        await counted.ask(PROMPT, JudgeReply, call_id=PLACE)
        with pytest.raises(ReplyError):
            await counted.ask(PROMPT, JudgeReply, call_id=PLACE.model_copy(update={"trial": 1}))
    (entry,) = books.entries
    assert (entry.n_questions, entry.n_unanswered, entry.n_invalid) == (2, 1, 4)
    assert entry.usage == books.usage == ONE + ONE + ONE + ONE + ONE


async def test_what_was_answered_counts_where_a_later_attempt_fails() -> None:
    """A refused reply was paid for, also where the question does not fit the model's context after it."""
    store, books = await opened(), UsageLedger()
    full = {"error": {"code": "context_length_exceeded", "message": "too long"}}
    async with connected(Endpoint(completion("?"), httpx.Response(400, json=full)), store=store) as client:
        with pytest.raises(ContextOverflow):
            await MeteredLLM(client, books).ask(PROMPT, JudgeReply, call_id=PLACE)
    (spent,) = await store.spend(RUN)
    assert books.usage == spent.usage
    assert (books.usage.calls, books.entries[0].n_invalid, books.entries[0].n_unanswered) == (1, 1, 1)


async def test_a_question_that_is_cancelled_is_left_to_the_books_of_the_models_store() -> None:
    """Nobody here knows what it took, so nothing is made up."""
    books = UsageLedger()

    async def hang(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        await anyio.sleep_forever()
        return None

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                lambda: MeteredLLM(ScriptedLLM(hang), books).ask(PROMPT, JudgeReply, call_id=PLACE)
            )
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert books.entries == ()


def test_later_books_say_what_came_since() -> None:
    """What is booked between two looks is the difference, by role and purpose."""
    books = UsageLedger()
    books.add(booked(ONE, n_questions=2, n_invalid=1))
    earlier = books.entries
    assert books.entries_since(earlier) == ()
    books.add(booked(ONE, n_questions=1, n_unanswered=1))
    books.add(PurposeUsage(role="critic", purpose="score", n_questions=1, usage=ONE))
    assert books.entries_since(earlier) == (
        PurposeUsage(role="critic", purpose="score", n_questions=1, usage=ONE),
        booked(ONE, n_questions=1, n_unanswered=1),
    )
    assert books.entries_since(()) == books.entries
    assert sum_usage(books.entries) == ONE + ONE + ONE


async def test_the_calls_of_a_critic_that_is_passed_in_count() -> None:
    """Its calls are in the report by purpose, refused replies too; what others ask it is not."""
    refused = 0

    def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        nonlocal refused
        if reply_type is CriticReply and call_id.attempt == 0:
            refused += 1
            return "?"
        return answer(prompt, reply_type)

    llm = ScriptedLLM(script)
    critic = Critic(llm)
    settings = CalibratorSettings(contrast=PairSettings(n_judges=2, candidates_per_event=2))
    calibrator = Calibrator(llm, ListMemory(), critic=critic, settings=settings)
    learn, held_out = (
        [record_flattered(f"t{n}", n) for n in range(3)],
        [record_flattered(f"h{n}", n) for n in range(20)],
    )
    await critic.score(learn[0].events[0].transition, purpose=PURPOSE)
    assert calibrator.usage == Usage()
    outside, refused = len(llm.calls), 0
    report = await calibrator.calibrate(learn, heldout=held_out)
    entries = {(one.role, one.purpose): one for one in report.usage_by_purpose}
    assert entries["critic", "score"].n_questions >= 20
    assert entries["critic", "score"].n_invalid == refused > 0
    assert report.usage == calibrator.usage
    assert report.usage.calls == len(llm.calls) - outside


async def test_the_calls_of_a_critic_that_is_passed_in_wait_for_a_place() -> None:
    """No more calls are in flight than the calibrator may have, those of the critic included."""
    flying = most = 0

    async def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await anyio.lowlevel.checkpoint()
        flying -= 1
        return answer(prompt, reply_type)

    llm = ScriptedLLM(script)
    settings = CalibratorSettings(contrast=PairSettings(n_judges=2, judged_pairs="all"), concurrency=2)
    calibrator = Calibrator(llm, ListMemory(), critic=Critic(llm), settings=settings)
    await calibrator.calibrate(
        [record_flattered(f"t{n}", n) for n in range(4)],
        heldout=[record_flattered("h", 1)],
        allow_untested=True,
    )
    assert most == 2


Mute = Callable[[CallId], bool]


def settings(*, judges: int = 0, places: int = 2, rounds: int = 1) -> CalibratorSettings:
    """Return settings of a calibration that needs a judge, or a writer for some of its pairs."""
    return CalibratorSettings(
        contrast=PairSettings(n_judges=judges, candidates_per_event=8, max_pairs=1000, max_unproven=1000),
        curriculum=CurriculumSettings(max_rounds=rounds, patience=rounds),
        concurrency=places,
    )


def muted(mute: Mute, *, stops: int | None = None, excess: float = 0.0) -> ScriptedLLM:
    """Return the flattered model, mute where that says so, and out of reach after so many questions."""
    numbers = count()

    def script(prompt: RenderedPrompt, reply_type: type[ReplyModel], call_id: CallId) -> ScriptedAnswer:
        if stops is not None and next(numbers) >= stops:
            return ProviderDown("gone")
        refused = ReplyError("better: [b]neither[/b]")
        return refused if mute(call_id) else answer(prompt, reply_type, excess=excess)

    return ScriptedLLM(script)


def scoring(call_id: CallId) -> bool:
    """Whether the critic is asked."""
    return call_id.role == "critic"


def judging(call_id: CallId) -> bool:
    """Whether a judge is asked."""
    return call_id.role == "judge"


def writing(call_id: CallId) -> bool:
    """Whether a writer is asked."""
    return call_id.role == "contrast"


def asked(llm: ScriptedLLM, who: Mute) -> set[str]:
    """Return the different questions that somebody was asked."""
    return {call.call_id.label for call in llm.calls if who(call.call_id)}


async def calibrated(
    llm: ScriptedLLM, how: CalibratorSettings, *, learn: int = 4, memory: ListMemory | None = None
) -> CalibrationReport:
    """Return the report of a calibration over so many traces."""
    calibrator = Calibrator(llm, ListMemory() if memory is None else memory, settings=how)
    return await calibrator.calibrate(
        flattered_traces("learn", learn), heldout=flattered_traces("held out", 20)
    )


async def beside(llm: ScriptedLLM, number: int, *, judges: int = 0, gold: bool = True) -> list[str]:
    """Let a calibrator work on so many traces beside an agent and return why it stopped, if it did."""
    told: list[CalibrationEvent] = []
    how = settings(judges=judges)
    async with Calibrator(llm, ListMemory(), settings=how, on_event=told.append) as calibrator:
        for n, name in enumerate(name_traces("learn", number)):
            calibrator.submit(record_flattered(name, n, gold=gold))
        await calibrator.wait_until_idle()
    return [event.reason for event in told if isinstance(event, CalibratorStopped)]


@pytest.mark.parametrize(
    ("mute", "words", "most"),
    [
        (scoring, r"any of the first 10 questions.*neither.*models\.critic", FAIL_FAST_CALLS + 2),
        (
            judging,
            r"any of the first 10 comparisons.*neither.*contrast\.n_judges: 0",
            4 * FAIL_FAST_CALLS - 1,
        ),
    ],
    ids=["critic", "judge"],
)
async def test_without_a_valid_reply_it_ends_with_the_last_reason(mute: Mute, words: str, most: int) -> None:
    """Ten questions without one are enough; but for what waits already no more is asked."""
    llm = muted(mute)
    with pytest.raises(RunFailed, match=words):
        await calibrated(llm, settings(judges=3), learn=2 * FAIL_FAST_CALLS)
    assert FAIL_FAST_CALLS <= len(asked(llm, mute)) <= most
    (reason,) = await beside(muted(mute), 2 * FAIL_FAST_CALLS, judges=3, gold=mute is judging)
    assert re.search(words, reason)


async def test_one_valid_score_is_enough_to_go_on() -> None:
    """A critic that is often silent is no wrong model: its silence is counted instead."""
    numbers = count(1)
    llm = muted(lambda call_id: scoring(call_id) and next(numbers) < FAIL_FAST_CALLS)
    report = await calibrated(llm, settings())
    assert report.held_out.n_unscored == FAIL_FAST_CALLS - 1


async def test_one_valid_comparison_is_enough_to_go_on() -> None:
    """A judge that is often silent loses pairs, and ends nothing."""
    numbers = count(1)
    llm = muted(lambda call_id: judging(call_id) and next(numbers) != FAIL_FAST_CALLS)
    report = await calibrated(llm, settings(judges=3))
    assert len(asked(llm, judging)) > FAIL_FAST_CALLS
    assert {drop.reason for drop in report.dropped} >= {"judged_wrong"}


def test_the_command_ends_with_code_1(tmp_path: Path) -> None:
    """A model that answers in another form is told after a few calls, in one sentence."""
    record(tmp_path / "learn", 6)
    record(tmp_path / "held out", 24)
    with flattering(first="What a lovely day.") as (url, asked):
        path = configured(tmp_path, url)
        result = reflact(path, "--set", "models.critic.reasks=0", "--show", "quiet")
    assert result.exit_code == 1
    kept, error = result.stderr.splitlines()
    assert kept.startswith("stopped before the first round")
    assert error.startswith("error: the critic gave no valid score of any of the first 10 questions")
    assert len(asked) <= FAIL_FAST_CALLS + 8


@pytest.fixture(scope="module")
def given_up() -> tuple[ScriptedLLM, CalibrationReport]:
    """A model that wrote nothing valid, and the report of a calibration over ten traces."""
    llm = muted(writing)
    return llm, anyio.run(lambda: calibrated(llm, settings(), learn=FAIL_FAST_CALLS))


@pytest.mark.slow
async def test_a_mute_writer_is_asked_no_more(given_up: tuple[ScriptedLLM, CalibrationReport]) -> None:
    """It is asked of the first ten traces, and in no later round; what needs no writer is made and tested."""
    few, many = given_up[0], muted(writing, excess=1)
    report = await calibrated(many, settings(rounds=3), learn=2 * FAIL_FAST_CALLS)
    assert len(asked(many, writing)) >= FAIL_FAST_CALLS
    assert asked(many, writing) == asked(few, writing)
    assert report.n_rounds > 1
    assert report.n_promoted > 0
    lost = {drop.reason: drop.n_candidates for drop in report.dropped}
    assert lost["bad_reply"] > len(asked(many, writing))


def test_the_report_says_that_it_was_given_up(given_up: tuple[ScriptedLLM, CalibrationReport]) -> None:
    """With the last reason, letter by letter."""
    out = StringIO()
    print_calibration(Console(file=out, width=400), given_up[1])
    (said,) = [line for line in out.getvalue().splitlines() if "no valid reply to any" in line]
    assert said.startswith("The writer gave no valid reply")
    assert said.endswith("; the last one: better: [b]neither[/b].")
    assert "<p>The writer gave no valid reply" in render_calibration_page(given_up[1])


async def test_a_writer_that_was_heard_once_is_asked_on(
    given_up: tuple[ScriptedLLM, CalibrationReport],
) -> None:
    """One valid reply among the first traces is enough."""
    valid = min(asked(given_up[0], writing))
    llm = muted(lambda call_id: writing(call_id) and call_id.label != valid)
    report = await calibrated(llm, settings(), learn=2 * FAIL_FAST_CALLS)
    assert report.writer_stop_reason is None
    assert len(asked(llm, writing)) > len(asked(given_up[0], writing))


@pytest.mark.slow
async def test_how_many_are_asked_at_a_time_makes_no_difference() -> None:
    """That a writer is given up follows from what was said, not from when."""
    one = muted(writing, excess=1)
    alone = await calibrated(one, settings(rounds=2), learn=2 * FAIL_FAST_CALLS)
    for places in (1, 3, 16):
        several = muted(writing, excess=1)
        together = await calibrated(several, settings(rounds=2, places=places), learn=2 * FAIL_FAST_CALLS)
        assert asked(several, writing) == asked(one, writing)
        assert together == alone


@pytest.mark.slow
async def test_cut_off_it_gives_the_writer_up_at_the_same_place() -> None:
    """The report of a calibration that went on is that of one that was never stopped."""
    how = settings(rounds=2)
    whole = await calibrated(muted(writing), how, learn=2 * FAIL_FAST_CALLS)
    for stops in (60, 110, 150):
        memory = ListMemory()
        with pytest.raises(ProviderDown):
            await calibrated(muted(writing, stops=stops), how, learn=2 * FAIL_FAST_CALLS, memory=memory)
        again = await calibrated(muted(writing), how, learn=2 * FAIL_FAST_CALLS, memory=memory)
        assert again == whole


async def test_beside_an_agent_a_mute_writer_is_asked_no_more() -> None:
    """Once ten questions of finished traces had no valid reply; the calibrator goes on with the rest."""
    llm = muted(writing)
    assert await beside(llm, 3 * FAIL_FAST_CALLS) == []
    assert FAIL_FAST_CALLS <= len(asked(llm, writing)) < FAIL_FAST_CALLS + 4


async def test_an_error_goes_to_all_who_wait_and_is_not_kept() -> None:
    """Those who share the work share its error; whoever comes later tries again."""
    memo, gate, outcomes, begun = ResultCache[int](4), anyio.Event(), list[str](), list[str]()

    async def fail() -> int:
        begun.append("work")
        await gate.wait()
        raise OSError("broken")

    async def succeed() -> int:
        return 7

    async def ask() -> None:
        try:
            await memo.get_or_compute("key", fail)
        except OSError as error:
            outcomes.append(str(error))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert outcomes == ["broken"] * 3
    assert begun == ["work"]
    assert await memo.get_or_compute("key", succeed) == 7
