"""What a calibration consumed: every reply counts, whoever asked and whatever became of it."""

from __future__ import annotations

import json

import anyio
import anyio.lowlevel
import httpx
import pytest

from calibration_memory import ListMemory
from doubles import PROMPT, RUN, Endpoint, completion, connected, opened
from flattered_world import PURPOSE, answer, steps
from reflact import Critic
from reflact.calibration.calibrator import Calibrator
from reflact.calibration.call_policies import MeteredLLM, UsageLedger, sum_usage
from reflact.calibration.config import CalibratorSettings, PairSettings
from reflact.calibration.critic import CriticReply
from reflact.calibration.judges import JudgeReply
from reflact.calibration.report import PurposeUsage
from reflact.calibration.trace import Trace
from reflact.errors import ContextOverflow, ReplyError
from reflact.memory.models import Evaluation
from reflact.messages import CallId, RenderedPrompt, ReplyModel
from reflact.records import Usage
from reflact.testing import ScriptedLLM
from reflact.testing.llm import ScriptedAnswer

pytestmark = pytest.mark.anyio

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


def recorded(name: str, number: int) -> Trace:
    """Return a trace of one step."""
    trace = Trace(PURPOSE, id=name)
    ((step, gold),) = steps(name, number, count=1, claims=[True])
    said = Evaluation(
        progress_before=0,
        progress_after=gold.progress_after + 3,
        reasoning="It says so.",
        evidence=("filed",),
    )
    trace.record(step, said, label=gold)
    return trace


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
    learn, held_out = [recorded(f"t{n}", n) for n in range(3)], [recorded(f"h{n}", n) for n in range(20)]
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
    settings = CalibratorSettings(contrast=PairSettings(n_judges=2), concurrency=2)
    calibrator = Calibrator(llm, ListMemory(), critic=Critic(llm), settings=settings)
    await calibrator.calibrate(
        [recorded(f"t{n}", n) for n in range(4)], heldout=[recorded("h", 1)], allow_untested=True
    )
    assert most == 2
