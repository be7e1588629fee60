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
from typing import TYPE_CHECKING, Any, Literal, Self

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
from reflact.calibration.generation import PairCallback, make_trace_pairs
from reflact.calibration.labeled_steps import StepScorer, list_labeled_steps
from reflact.calibration.loop import estimate_cost, recheck, run_calibration
from reflact.calibration.pairs import choose_batch
from reflact.calibration.promotion import (
    MemorySnapshot,
    emit_postponed,
    run_replay_test,
    take_snapshot,
)
from reflact.calibration.report import CalibrationCostEstimate, CalibrationReport
from reflact.calibration.runtime import CalibrationRuntime, CountingLLM, UsageLedger
from reflact.calibration.significance import find_missing_traces
from reflact.calibration.splits import MIN_PURPOSES, HoldoutRule
from reflact.calibration.start import open_calibration
from reflact.calibration.trace import Trace
from reflact.concurrency import Stream, open_task_group
from reflact.errors import AccessDenied, BudgetSpent, DataError, RunFailed, UnknownModel
from reflact.memory.cards import TraceIdentity, count_tests
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
        self._critic = critic or Critic(CountingLLM(llm, ledger), memory=store, prompts=prompts)
        # The agent's scores never wait for the calibrator's, whose calls share a semaphore.
        tested = critic or Critic(llm, memory=store, prompts=prompts)
        counted_critic = tested.wrap_llm(lambda model: CountingLLM(model, ledger, semaphore))
        self._runtime = CalibrationRuntime(
            llm=CountingLLM(llm, ledger, semaphore),
            store=store,
            scorer=StepScorer(counted_critic, max_concurrent=settings.concurrency),
            settings=settings,
            prompts=prompts,
            on_event=self._emit,
            ledger=ledger,
        )
        self._settings = settings
        self._queue: deque[Trace] = deque()
        self._on_event = on_event
        self._counts = TraceCounts()
        self._snapshot: MemorySnapshot | None = None
        self._n_new_pairs = 0
        self._has_reported_missing = False
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
        return self._runtime.usage

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(open_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._run_worker)
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        self._close()
        return await self._stack.__aexit__(*error)

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
            snapshot = await take_snapshot(self._runtime.store)
            await make_trace_pairs(
                self._runtime, trace, known_pair_ids=snapshot.known_pair_ids, on_pair=send
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
        anchors = await self._runtime.store.anchors()
        start = await open_calibration(self._runtime, traces, heldout, anchors)
        is_needed = start.report is None or ignore_finished
        if start.missing is not None and is_needed and not allow_untested:
            raise DataError(
                f"nothing could be tested, so no call was made: {start.missing.explanation}"
            )
        report = await run_calibration(
            self._runtime, start, anchors, ignore_finished=ignore_finished
        )
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
        by_id = {pair.id: pair for pair in (*await self._runtime.store.anchors(), *anchors)}
        all_anchors = tuple(by_id.values())
        start = await open_calibration(self._runtime, traces, heldout, all_anchors)
        return estimate_cost(self._runtime, start, all_anchors, max_reasks=reasks)

    async def recheck(self, heldout: Sequence[Trace]) -> tuple[PromotionEvidence, ...]:
        """Test every promoted batch again on held-out traces, and demote batches that do harm.

        Raises:
            ModelError: The endpoint refused, failed or could not be reached.
            StoreError: The store cannot be read or written.
        """
        return await recheck(self._runtime, heldout)

    async def _run_worker(self) -> None:
        while not self._stopped:
            while not self._queue:
                await self._changed.wait()
            trace = self._queue.popleft()
            self._is_working = True
            self._notify()
            try:
                await self._learn(trace)
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

    async def _learn(self, trace: Trace) -> None:
        """Store a trace, make its pairs unless it is held out, and test if a test is due."""
        store = self._runtime.store
        settings = self._runtime.settings
        await trace.save_to(store)
        n_purposes = len(await store.purposes(limit=MIN_PURPOSES * settings.holdout_folds))
        rule = HoldoutRule.choose(
            n_purposes, n_folds=settings.holdout_folds, holdout_by=settings.holdout_by
        )
        is_held_out = rule.is_held_out(trace.id, trace.purpose)
        use: Literal["learn", "hold_out"] = "hold_out" if is_held_out else "learn"
        self._emit(TraceAccepted(trace_id=trace.id, use=use))
        if self._snapshot is None:  # the memory is read at first, and after each test
            self._snapshot = await take_snapshot(store)
            self._n_new_pairs = len(self._snapshot.waiting_pairs)
        if not is_held_out:
            known = self._snapshot.known_pair_ids
            made = await make_trace_pairs(self._runtime, trace, known_pair_ids=known)
            self._n_new_pairs += made.n_new
        has_news = is_held_out or not self._has_reported_missing
        if self._n_new_pairs >= settings.batch_size and has_news:
            await self._test_waiting(rule)

    async def _test_waiting(self, rule: HoldoutRule) -> None:
        """Test the waiting pairs if there are enough held-out traces; say once if there are not.

        Pairs that no test followed for wait for another batch.
        """
        runtime = self._runtime
        snapshot = await take_snapshot(runtime.store)
        identities = await self._list_test_traces(rule, snapshot)
        n_tests = count_tests(snapshot.tests, identities)
        missing = find_missing_traces(identities, n_earlier_tests=n_tests)
        if missing is not None:
            if not self._has_reported_missing:
                emit_postponed(runtime, missing, self._n_new_pairs)
            self._has_reported_missing = True
            return
        self._has_reported_missing = False
        self._n_new_pairs = 0
        stored = [await runtime.store.trace(one.id) for one in identities]
        traces = [Trace.from_stored(one) for one in stored if one is not None]
        waiting = snapshot.list_testable_pairs(traces)
        batch = choose_batch(waiting, max_pairs=runtime.settings.max_pairs)
        if batch:
            steps = list_labeled_steps(traces)
            await run_replay_test(runtime, batch, steps, promoted=snapshot.promoted)
        self._snapshot = await take_snapshot(runtime.store)

    async def _list_test_traces(
        self, rule: HoldoutRule, snapshot: MemorySnapshot
    ) -> list[TraceIdentity]:
        """Return the newest held-out traces that may test; copies count once."""
        ids_by_content: dict[str, str] = {}
        for one in await self._runtime.store.testable_traces():
            if (
                not one.has_pairs
                and rule.is_held_out(one.id, one.purpose)
                and not snapshot.learned.disqualifies(rule, one.id, one.purpose)
            ):
                ids_by_content.setdefault(one.content_hash, one.id)
        newest = list(ids_by_content.items())[: self._runtime.settings.max_held_out_traces]
        return [TraceIdentity(trace_id, (content,)) for content, trace_id in newest]

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
