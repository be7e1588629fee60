"""The calibrator: turns an agent's traces into worked examples for the critic, and proves that they help.

It works beside an agent or is awaited for a whole round. What it learns is in the store as soon as it is
there: cut off at any moment, the store is whole, and the same traces handed in again repeat no call that an
effect store holds, since calls are named by what they are about.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Literal, Self

import anyio
from anyio import to_thread
from pydantic import ValidationError

from reflact.calibration.arguments import require_memory, require_model, require_traces, require_type
from reflact.calibration.call_policies import LimitedLLM, MeteredLLM, UsageLedger
from reflact.calibration.config import DEFAULT_CALIBRATOR_SETTINGS, CalibratorSettings
from reflact.calibration.cost_estimate import CalibrationCostEstimate, estimate_cost
from reflact.calibration.critic import Critic
from reflact.calibration.events import (
    BatchTestPostponed,
    CalibrationEvent,
    CalibrationEventCallback,
    CalibrationFinished,
    CalibratorStopped,
    PairBatchTested,
    TraceAccepted,
    TraceFailed,
    TraceSkipped,
)
from reflact.calibration.report import CalibrationReport
from reflact.calibration.rounds import CalibrationMemory, PairCallback, RoundRunner
from reflact.calibration.significance import NotEnoughTraces, ReplayTestUse
from reflact.calibration.trace import Trace
from reflact.calibration.worker import BoundedQueue, QueueResult, TraceLearner
from reflact.concurrency import Stream, open_task_group
from reflact.errors import AccessDenied, BudgetSpent, ConfigError, DataError, RunFailed, UnknownModel
from reflact.memory.models import ContrastPair, PromotionEvidence
from reflact.prompts import PromptBook, load_prompts
from reflact.protocols import LLM
from reflact.records import Usage
from reflact.types import FrozenModel

FATAL_ERRORS = (BudgetSpent, AccessDenied, UnknownModel, RunFailed)
"""Errors after which no further call can succeed."""


class TraceCounts(FrozenModel):
    """What became of the traces that were handed over.

    Args:
        taken: Queued, those still waiting and those dropped later included.
        dropped: Dropped from the queue to make room.
        rejected: Not queued: it was full, or the calibrator had stopped.
        failed: Taken up, but something went wrong with them.
    """

    n_accepted: int = 0
    n_dropped: int = 0
    n_rejected: int = 0
    n_failed: int = 0


class Calibrator:
    """Calibrates a critic from traces.

    ``async with`` starts a task of its own that works on submitted traces; leaving cancels it. ``calibrate``,
    ``recheck`` and ``pairs`` need no such block. Nothing that goes wrong beside the agent is raised there: it
    is told as an event. Limits and budget of its calls are those of the model that it is given.

    Args:
        llm: Writes mistakes, compares, and scores where ``critic`` is None.
        store: Where traces, pairs and tests go, such as ``MemoryStore``.
        critic: What is calibrated; None: one on ``llm`` that reads ``store``.
        judges: Blind comparisons of each pair; None: as the settings say.
        settings: How it works.
        prompts: The prompts; None: the newest that are packaged.
        tell: Is told what happens; must not block. What it raises is ignored.

    Raises:
        ConfigError: There cannot be so many judges, the model is not connected, or the store is none.
    """

    def __init__(
        self,
        llm: LLM,
        store: CalibrationMemory,
        *,
        critic: Critic | None = None,
        judges: int | None = None,
        settings: CalibratorSettings = DEFAULT_CALIBRATOR_SETTINGS,
        prompts: PromptBook | None = None,
        on_event: CalibrationEventCallback | None = None,
    ) -> None:
        require_model(llm, caller="a calibrator")
        require_memory(store, caller="a calibrator")
        settings = settings if judges is None else _set_judges(settings, judges)
        prompts = prompts or load_prompts()
        self._usage_ledger, places = UsageLedger(), anyio.Semaphore(settings.concurrency)
        self._critic = critic or Critic(MeteredLLM(llm, self._usage_ledger), memory=store, prompts=prompts)

        def door(model: LLM) -> LLM:
            return LimitedLLM(MeteredLLM(model, self._usage_ledger), places)

        at_work = critic or Critic(llm, memory=store, prompts=prompts)
        self._rounds = RoundRunner(
            door(llm),
            store,
            at_work.wrap_llm(door),
            settings=settings,
            prompts=prompts,
            on_test=self._emit_test,
            on_event=self._emit,
            usage_ledger=self._usage_ledger,
        )
        self._store, self._settings = store, settings
        self._worker = TraceLearner(store, self._rounds, settings=settings)
        self._queue: BoundedQueue[Trace] = BoundedQueue(settings.queue_size, settings.full_queue_policy)
        self._on_event = on_event
        self._counts = TraceCounts()
        self._stopped = False
        self._is_working = False
        self._idle = anyio.Event()
        self._stack = AsyncExitStack()

    @property
    def critic(self) -> Critic:
        """The critic that is calibrated; its scores never wait for the calibrator."""
        return self._critic

    @property
    def counts(self) -> TraceCounts:
        """What became of submitted traces so far."""
        return self._counts

    @property
    def usage(self) -> Usage:
        """What its calls consumed so far, and those of the critic that it made itself.

        Replies that were refused and replies found in a store are included; what a critic that was passed in
        is asked by others is not.
        """
        return self._usage_ledger.usage

    # -------------------------------------------------------------------------------- beside an agent

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(open_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._run_worker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._close()
        return await self._stack.__aexit__(kind, error, trace)

    def submit(self, trace: Trace) -> bool:
        """Hand a trace over; returns at once, and says whether it was queued.

        A full queue does what ``settings.when_full`` says; see ``hand_over`` for waiting. A trace may be
        handed over again when it has grown.
        """
        require_type(trace, Trace, subject="what is submitted")
        if self._stopped:
            return self._record_skipped(trace, "stopped")
        return self._record_queue_result(trace, self._queue.offer(trace))

    async def submit_and_wait(self, trace: Trace) -> bool:
        """Hand a trace over; where the policy is ``block`` this waits until there is room."""
        require_type(trace, Trace, subject="what is handed over")
        if self._stopped:
            return self._record_skipped(trace, "stopped")
        return self._record_queue_result(trace, await self._queue.put(trace))

    async def wait_until_idle(self) -> None:
        """Wait until nothing is queued and nothing is under way."""
        while not self._stopped and (self._queue or self._is_working):
            await self._idle.wait()

    # ------------------------------------------------------------------------------------- awaited

    def stream_pairs(self, trace: Trace) -> Stream[ContrastPair]:
        """Return an iterator over a trace's pairs, each as soon as it is in the store.

        Leaving ``async with`` around it, or a bare ``break``, cancels what is under way.

        Raises:
            ModelError: While iterating: the endpoint refused, failed or could not be reached.
            RunFailed: While iterating: critic or judge gave no valid reply to any of the first ten questions.
            StoreError: While iterating: the store cannot be read or written.
        """

        async def produce(send: PairCallback) -> None:
            standing = await self._rounds.tester.take_snapshot()
            await self._rounds.generate_pairs(
                trace,
                self._rounds.first_round_plan,
                writer=self._rounds.make_writer(),
                known_pair_ids=standing.known_pair_ids,
                on_pair=send,
            )

        return Stream(produce)

    async def calibrate(
        self,
        traces: Sequence[Trace],
        *,
        heldout: Sequence[Trace] | None = None,
        allow_untested: bool = False,
        ignore_finished: bool = False,
    ) -> CalibrationReport:
        """Make pairs, test them, promote what helps, and measure the critic before and after.

        One that was stopped goes on exactly: what it began with is in the store. Where one of the same traces
        is over and nothing has changed since, its report is returned and nothing is asked, made or tested.

        Args:
            traces: What is learned from, and held out where ``heldout`` is None.
            heldout: What tests and measures instead; those among them that were learned from are left out.
            allow_untested: Make pairs also where nothing can come to a test, such as for a later one.
            ignore_finished: Make further pairs of the same traces where nothing has changed; that opens another test,
                and all tests on the same held-out traces share one error probability.

        Raises:
            DataError: Something else than a list of traces is given; or nothing could be tested, which is
                said before anything is asked.
            ModelError: The endpoint refused, failed or could not be reached; what was made is stored.
            RunFailed: The critic gave no valid score of any of the first ten questions, or the judge no valid
                reply to any of the first ten comparisons.
            BudgetSpent: The budget has no room for a call.
            StoreError: The store cannot be read or written.
        """
        require_traces(traces, Trace, subject="what is learned from")
        if heldout is not None:
            require_traces(heldout, Trace, subject="what is held out")
        anchors = await self._store.anchors()
        course, missing = await self._rounds.open_calibration(traces, heldout, anchors)
        if missing is not None and not allow_untested and (course.report is None or ignore_finished):
            raise DataError(f"nothing could be tested, so nothing was asked: {missing}")
        report = await self._rounds.run(course, anchors, ignore_finished=ignore_finished)
        self._emit(CalibrationFinished(report=report))
        return report

    async def estimate_cost(
        self,
        traces: Sequence[Trace],
        *,
        heldout: Sequence[Trace] | None = None,
        anchors: Sequence[ContrastPair] = (),
        reasks: int = 2,
    ) -> CalibrationCostEstimate:
        """Return how many calls ``calibrate`` takes of the same traces at least and at most; none is made.

        Args:
            traces: As for ``calibrate``.
            heldout: As for ``calibrate``.
            anchors: Gold pairs that are to be measured beside those that the store has.
            reasks: How often the model is asked again after an invalid reply, at most.

        Raises:
            StoreError: The store cannot be read.
        """
        by_id = {pair.id: pair for pair in (*await self._store.anchors(), *anchors)}
        course, missing = await self._rounds.open_calibration(traces, heldout, tuple(by_id.values()))
        work = partial(
            estimate_cost,
            course,
            missing=missing,
            anchors=tuple(by_id.values()),
            settings=self._settings,
            n_samples=self._critic.settings.n_samples,
            max_reasks=reasks,
        )
        return await to_thread.run_sync(work)

    async def recheck(self, heldout: Sequence[Trace]) -> tuple[PromotionEvidence, ...]:
        """Measure every promoted batch again on held-out traces, and demote what harms.

        Raises:
            ModelError: The endpoint refused, failed or could not be reached.
            StoreError: The store cannot be read or written.
        """
        return await self._rounds.recheck(heldout)

    # ------------------------------------------------------------------------------------ the task

    async def _run_worker(self) -> None:
        while not self._stopped:
            trace = await self._queue.take()
            self._is_working = True
            try:
                await self._process_trace(trace)
            except FATAL_ERRORS as error:
                self._record_failure(trace, error)
                self._stop(str(error))
            except Exception as error:  # noqa: BLE001 - nothing that works beside an agent may end it
                self._record_failure(trace, error)
            finally:
                self._is_working = False
                self._signal_idle()

    async def _process_trace(self, trace: Trace) -> None:
        held_out = await self._worker.store_trace(trace)
        self._emit(TraceAccepted(trace_id=trace.id, use="hold_out" if held_out else "learn"))
        if not held_out:
            self._rounds.emit_pairs_generated(trace, await self._worker.generate_pairs(trace))
        await self._worker.test_if_due()

    def _emit_test(self, result: PromotionEvidence | NotEnoughTraces, pairs: int, use: ReplayTestUse) -> None:
        if isinstance(result, NotEnoughTraces):
            self._emit(
                BatchTestPostponed(
                    n_pairs=pairs,
                    n_traces=result.n_traces,
                    n_needed_traces=result.n_needed,
                    explanation=result.explanation,
                    usage=self.usage,
                )
            )
        else:
            self._emit(PairBatchTested(use=use, evidence=result, usage=self.usage))

    def _record_queue_result(self, trace: Trace, offered: QueueResult[Trace]) -> bool:
        if offered.dropped_element is not None:
            self._add_counts(n_dropped=1)
            self._emit(TraceSkipped(trace_id=offered.dropped_element.id, reason="dropped"))
        if not offered.is_queued:
            return self._record_skipped(trace, "stopped" if self._stopped else "full")
        self._add_counts(n_accepted=1)
        return True

    def _record_skipped(self, trace: Trace, reason: Literal["full", "stopped"]) -> bool:
        self._add_counts(n_rejected=1)
        self._emit(TraceSkipped(trace_id=trace.id, reason=reason))
        return False

    def _record_failure(self, trace: Trace, error: Exception) -> None:
        self._add_counts(n_failed=1)
        self._emit(TraceFailed(trace_id=trace.id, error=type(error).__name__, message=str(error)))

    def _stop(self, reason: str) -> None:
        self._close()
        self._emit(CalibratorStopped(reason=reason))

    def _close(self) -> None:
        self._stopped = True
        self._queue.close()
        self._signal_idle()

    def _signal_idle(self) -> None:
        self._idle.set()
        self._idle = anyio.Event()

    def _add_counts(self, **more: int) -> None:
        counts = {name: getattr(self._counts, name) + n for name, n in more.items()}
        self._counts = self._counts.model_copy(update=counts)

    def _emit(self, event: CalibrationEvent) -> None:
        if self._on_event is not None:
            with suppress(Exception):  # a listener's mistake must not end the agent
                self._on_event(event)


def _set_judges(settings: CalibratorSettings, judges: int) -> CalibratorSettings:
    contrast = settings.contrast
    try:
        given = type(contrast).model_validate({**contrast.model_dump(), "n_judges": judges})
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"judges: {said}") from None
    return settings.model_copy(update={"contrast": given})
