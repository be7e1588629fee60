"""The calibrator turns an agent's traces into worked examples for the critic, and tests that they
help.

It stores each result at once, so a process may be killed at any moment. When the same traces come
again, calls with stored responses are not made again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import anyio

from reflact.calibration.config import DEFAULT_CALIBRATOR_SETTINGS, CalibratorSettings
from reflact.calibration.critic import Critic, require_model
from reflact.calibration.events import (
    CalibrationEvent,
    CalibrationEventCallback,
    CalibrationFinished,
    CalibratorStopped,
    TraceAccepted,
    TraceFailed,
    TraceSkipped,
)
from reflact.calibration.generation import CalibrationRuntime, PairCallback
from reflact.calibration.labeled_steps import StepScorer, list_labeled_steps, list_pair_steps
from reflact.calibration.loop import CalibrationLoop
from reflact.calibration.promotion import take_snapshot
from reflact.calibration.report import CalibrationCostEstimate, CalibrationReport
from reflact.calibration.significance import describe_test_power
from reflact.calibration.trace import Trace
from reflact.calibration.usage import CountingLLM, UsageLedger
from reflact.calibration.worker import TraceLearner
from reflact.concurrency import Stream, open_task_group
from reflact.errors import AccessDenied, BudgetSpent, DataError, RunFailed, UnknownModel
from reflact.memory.models import ContrastPair, PromotionEvidence
from reflact.prompts import PromptBook, load_prompts
from reflact.protocols import LLM
from reflact.records import Usage
from reflact.types import FrozenModel

if TYPE_CHECKING:
    from reflact.memory.store import MemoryStore

LOGGER = logging.getLogger("reflact")

# Errors after which no further call can succeed.
FATAL_ERRORS = (BudgetSpent, AccessDenied, UnknownModel, RunFailed)


class TraceCounts(FrozenModel):
    """How many submitted traces were queued, dropped for newer ones, not queued, or failed."""

    n_accepted: int = 0
    n_dropped: int = 0
    n_rejected: int = 0
    n_failed: int = 0


class Calibrator:
    """Calibrates a critic from traces.

    ``async with`` starts a task that processes submitted traces; leaving the block cancels the
    task. ``calibrate``, ``recheck`` and ``stream_pairs`` need no such block. Errors beside the
    agent are emitted as events and never raised. If the first trace fails, or the task stops, the
    logger ``reflact`` warns. The limits and the budget of its calls are those of ``llm``.

    Args:
        llm: Writes mistakes and judges them; scores as well if ``critic`` is None.
        store: Keeps traces, pairs and tests, such as ``MemoryStore``.
        critic: The critic to calibrate; None: one on ``llm`` that reads ``store``.
        settings: The section ``calibrator`` of the configuration.
        prompts: The prompts; None: the newest that are packaged.
        on_event: Gets each event; must not block. Its exceptions are ignored.

    Raises:
        ConfigError: The model is not connected.
    """

    def __init__(
        self,
        llm: LLM,
        store: MemoryStore,
        *,
        critic: Critic | None = None,
        settings: CalibratorSettings = DEFAULT_CALIBRATOR_SETTINGS,
        prompts: PromptBook | None = None,
        on_event: CalibrationEventCallback | None = None,
    ) -> None:
        require_model(llm, caller="a calibrator")
        prompts = prompts or load_prompts()
        ledger = UsageLedger()
        semaphore = anyio.Semaphore(settings.concurrency)
        self._usage_ledger = ledger
        self._critic = critic or Critic(CountingLLM(llm, ledger), memory=store, prompts=prompts)
        # The agent's scores never wait for the calibrator's, whose calls share a semaphore.
        tested = critic or Critic(llm, memory=store, prompts=prompts)
        counted_critic = tested.wrap_llm(lambda model: CountingLLM(model, ledger, semaphore))
        runtime = CalibrationRuntime(
            llm=CountingLLM(llm, ledger, semaphore),
            store=store,
            scorer=StepScorer(counted_critic, max_concurrent=settings.concurrency),
            settings=settings,
            prompts=prompts,
            on_event=self._emit,
            usage_ledger=ledger,
        )
        self._loop = CalibrationLoop(runtime)
        self._store = store
        self._settings = settings
        self._worker = TraceLearner(runtime, self._loop)
        self._queue: deque[Trace] = deque()
        self._on_event = on_event
        self._counts = TraceCounts()
        self._is_quiet = False
        self._stopped = False
        self._is_working = False
        self._changed = anyio.Event()
        self._stack = AsyncExitStack()

    @property
    def critic(self) -> Critic:
        """The critic that is calibrated; its scores never wait for the calibrator."""
        return self._critic

    @property
    def counts(self) -> TraceCounts:
        """The counts of submitted traces."""
        return self._counts

    @property
    def usage(self) -> Usage:
        """The usage of its calls so far, and of the critic that it made itself.

        Invalid replies and stored replies are included. Calls that others make to a passed critic
        are not.
        """
        return self._usage_ledger.usage

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(open_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._run_worker)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self._close()
        return await self._stack.__aexit__(kind, error, trace)

    def submit(self, trace: Trace) -> bool:
        """Submit a trace and return at once whether it was queued.

        ``settings.full_queue_policy`` decides about a full queue; ``submit_and_wait`` can wait. A
        trace that has grown may be submitted again.
        """
        if self._stopped:
            return self._reject(trace, "stopped")
        if self._is_full:
            if self._settings.full_queue_policy != "drop_oldest":
                return self._reject(trace, "full")
            self._add_counts(n_dropped=1)
            self._emit(TraceSkipped(trace_id=self._queue.popleft().id, reason="dropped"))
        self._queue.append(trace)
        self._add_counts(n_accepted=1)
        self._notify()
        return True

    async def submit_and_wait(self, trace: Trace) -> bool:
        """Submit a trace; if the policy is ``block``, wait until the queue has room."""
        while self._settings.full_queue_policy == "block" and self._is_full and not self._stopped:
            await self._changed.wait()
        return self.submit(trace)

    async def wait_until_idle(self) -> None:
        """Wait until the queue is empty and no trace is being processed."""
        while not self._stopped and (self._queue or self._is_working):
            await self._changed.wait()

    def stream_pairs(self, trace: Trace) -> Stream[ContrastPair]:
        """Return an iterator over a trace's pairs; each comes as soon as it is stored.

        Leaving ``async with`` around it, or ``break``, cancels the calls in progress.

        Raises:
            ModelError: While iterating: the endpoint refused, failed or could not be reached.
            RunFailed: While iterating: the critic gave no valid score of any of the first ten
                questions.
            StoreError: While iterating: the store cannot be read or written.
        """

        async def produce(send: PairCallback) -> None:
            snapshot = await take_snapshot(self._store)
            await self._loop.generator.make_trace_pairs(
                trace, known_pair_ids=snapshot.known_pair_ids, on_pair=send
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
        """Generate pairs, test them, promote the ones that help, and measure the critic before and
        after.

        A stopped calibration resumes exactly. If nothing has changed since a calibration of the
        same traces ended, this returns its report without any call or test.

        Args:
            traces: The traces to learn from; if ``heldout`` is None, a part of them is held out.
            heldout: The traces that test and measure; traces that were learned from are left out.
            allow_untested: Generate pairs although nothing can be tested now, for a later test.
            ignore_finished: Generate further pairs although nothing has changed. That opens another
                test, and all tests on the same held-out traces share one error probability.

        Raises:
            DataError: Nothing could be tested; raised before any call.
            ModelError: The endpoint refused, failed or could not be reached; finished pairs are
                stored.
            RunFailed: The critic gave no valid score of any of the first ten questions.
            BudgetSpent: The budget has no room for a call.
            StoreError: The store cannot be read or written.
        """
        anchors = await self._store.anchors()
        start = await self._loop.open(traces, heldout, anchors)
        is_needed = start.report is None or ignore_finished
        if start.missing is not None and is_needed and not allow_untested:
            raise DataError(
                f"nothing could be tested, so no call was made: {start.missing.explanation}"
            )
        report = await self._loop.run(start, anchors, ignore_finished=ignore_finished)
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
        """Return the least and the largest number of calls that ``calibrate`` makes; nothing is
        called.

        ``anchors`` are measured in addition to those in the store. Invalid replies are sent back
        ``reasks`` times.

        Raises:
            StoreError: The store cannot be read.
        """
        by_id = {pair.id: pair for pair in (*await self._store.anchors(), *anchors)}
        all_anchors = tuple(by_id.values())
        start = await self._loop.open(traces, heldout, all_anchors)
        steps = list_labeled_steps(start.split.held_out)
        n_held_out_traces = len({step.trace for step in steps})
        min_calls, max_calls = self._loop.count_calls(start, all_anchors, max_reasks=reasks)
        return CalibrationCostEstimate(
            n_training_traces=len(start.split.training),
            n_held_out_traces=n_held_out_traces,
            n_held_out_steps=len(steps),
            n_anchor_steps=len(list_pair_steps(all_anchors)),
            min_calls=min_calls,
            max_calls=max_calls,
            power_summary=describe_test_power(
                n_held_out_traces, n_earlier_tests=start.n_earlier_tests
            ),
            missing_reason=None if start.missing is None else start.missing.explanation,
            n_earlier_tests=start.n_earlier_tests,
            resumed=start.number is not None,
            is_finished=start.report is not None,
        )

    async def recheck(self, heldout: Sequence[Trace]) -> tuple[PromotionEvidence, ...]:
        """Test every promoted batch again on held-out traces, and demote batches that do harm.

        Raises:
            ModelError: The endpoint refused, failed or could not be reached.
            StoreError: The store cannot be read or written.
        """
        return await self._loop.recheck(heldout)

    async def _run_worker(self) -> None:
        while not self._stopped:
            while not self._queue:
                await self._changed.wait()
            trace = self._queue.popleft()
            self._is_working = True
            self._notify()
            try:
                await self._process_trace(trace)
                self._is_quiet = True  # it works, so events are enough for later failures
            except Exception as error:  # noqa: BLE001 - no error beside an agent may end the agent
                self._add_counts(n_failed=1)
                self._emit(
                    TraceFailed(trace_id=trace.id, error=type(error).__name__, message=str(error))
                )
                is_fatal = isinstance(error, FATAL_ERRORS)
                if is_fatal or not self._is_quiet:
                    self._is_quiet = True
                    what = "stopped" if is_fatal else "has learned nothing so far"
                    LOGGER.warning("the calibrator %s: trace %s failed: %r", what, trace.id, error)
                if is_fatal:
                    self._close()
                    self._emit(CalibratorStopped(reason=str(error)))
            finally:
                self._is_working = False
                self._notify()

    async def _process_trace(self, trace: Trace) -> None:
        held_out = await self._worker.store_trace(trace)
        self._emit(TraceAccepted(trace_id=trace.id, use="hold_out" if held_out else "learn"))
        if not held_out:
            await self._worker.make_pairs(trace)
        await self._worker.test_if_due()

    @property
    def _is_full(self) -> bool:
        return len(self._queue) >= self._settings.queue_size

    def _reject(self, trace: Trace, reason: Literal["full", "stopped"]) -> bool:
        self._add_counts(n_rejected=1)
        self._emit(TraceSkipped(trace_id=trace.id, reason=reason))
        return False

    def _close(self) -> None:
        self._stopped = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _add_counts(self, **more: int) -> None:
        counts = {name: getattr(self._counts, name) + n for name, n in more.items()}
        self._counts = self._counts.model_copy(update=counts)

    def _emit(self, event: CalibrationEvent) -> None:
        if self._on_event is not None:
            with suppress(Exception):  # an error of a callback must not end the agent
                self._on_event(event)
