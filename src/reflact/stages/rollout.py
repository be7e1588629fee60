"""Stage 1: rolls out items under a skill with the target."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, cast

import anyio
from pydantic import JsonValue, ValidationError

from reflact.concurrency import Limit, fan_out
from reflact.errors import (
    AccessDenied,
    BadRequest,
    BudgetSpent,
    CassetteError,
    ContextOverflow,
    EnvironmentFailure,
    InterfaceError,
    ReflactError,
    ReplyError,
    RequestRefused,
    RunFailed,
    StoreError,
    UnknownModel,
    WorkerLost,
)
from reflact.gate.greater_mean import count_required
from reflact.jsonutil import describe_problems, replace_surrogates
from reflact.protocols import (
    CatchExits,
    DecisionLog,
    Environment,
    ItemTarget,
    RolloutStore,
    Session,
    Target,
    find_wrong_arguments,
    read_text,
    write_definition,
)
from reflact.types import Grade, Item, Rollout, Score, Skill, Turn, digest_json

RolloutCallback = Callable[[Rollout, bool], Awaitable[None]]
"""Takes a finished rollout, and whether it was found in the store."""

"""The candidate's and the current skill's rollout of one item."""

FATAL_STATUSES = frozenset({404, 301, 302, 303, 307, 308})
"""Statuses of a wrong address, which serves no other rollout either."""

TURNS_LINE = 'self.turns += (Turn(role="user", content=message), Turn(role="assistant", content=answer))'

MAX_TRIES = 3
"""How often a rollout begins if its workers end; after that it is unmeasured."""


def derive_rollout_seed(item: Item, trial: int) -> int:
    """Return the seed of an item's trial, 0 to 2**32 - 1: the same under every skill."""
    return int(digest_json(["rollout", item.fingerprint, trial])[:8], 16)


def build_rollout_key(
    item: Item,
    skill_hash: str,
    *,
    target: str,
    environment: str,
    feedback: bool,
    trial: int,
    phase: str | None,
) -> str:
    """Return the digest of everything that a rollout's score depends on, 64 hexadecimal digits.

    ``target`` and ``environment`` are their identities; a phase is part of the key unless all phases share rollouts.
    """
    parts: dict[str, JsonValue] = {
        "kind": "rollout",
        "version": 1,
        "skill": skill_hash,
        "item": item.fingerprint,
        "target": target,
        "environment": environment,
        "feedback": feedback,
        "trial": trial,
    }
    return digest_json(parts if phase is None else {**parts, "phase": phase})


def label_unmeasured(key: str) -> str:
    """Return the label under which a rollout is logged as unmeasured."""
    return f"unmeasured/{key}"


async def log_unmeasured(rollouts: Sequence[Rollout], *, decision_log: DecisionLog, step: int) -> None:
    """Log the unmeasured rollouts among those that a decision of the step is about to use."""
    for lost in (r for r in rollouts if r.score is None):
        await decision_log.put(step, label_unmeasured(lost.key), lost.error)


def require_coverage(rollouts: Sequence[Rollout], coverage: float) -> None:
    """Check that enough rollouts are measured; those that are refused for ever do not count.

    Raises:
        RunFailed: No rollout is measured, or less than the share ``coverage``, 0..1; see ``count_required``.
    """
    missing = [r for r in rollouts if r.score is None]
    measured = len(rollouts) - len(missing)
    if missing and measured < count_required(coverage, sum(not r.refused for r in rollouts)):
        first = f"the first failure: {missing[0].error}"
        raise RunFailed(f"only {measured} of {len(rollouts)} rollouts could be measured; {first}")


def copy_item(item: Item) -> Item:
    """Return an item for one rollout, whose code may change lists and mappings in it without effect on others."""
    parts = (item.input, item.reference, item.metadata)
    return item.model_copy(deep=True) if any(isinstance(p, list | dict) and p for p in parts) else item


def start_session(target: Target, item: Item, skill: Skill, *, rollout: str) -> Session:
    """Return a new session of a target about an item; ``rollout`` is the rollout's key.

    Raises:
        InterfaceError: The target returned no session.
    """
    with CatchExits():
        if hasattr(target, "session_for"):  # an `isinstance` of a protocol takes longer than a short rollout
            session = cast("ItemTarget", target).session_for(item, skill, rollout=rollout)
        else:
            session = target.session(skill, rollout=rollout)
    if not (hasattr(session, "reply") and isinstance(getattr(session, "turns", None), tuple | list)):
        raise _describe_wrong_session(target, session)
    return session


async def run_environment(environment: Environment, item: Item, session: Session, *, seed: int) -> Grade:
    """Return an environment's grade of an item; ``run`` of the environment may raise any other exception.

    Raises:
        EnvironmentFailure: It was cancelled, but not by the caller: it waited for a task of its own that was cancelled.
    """
    try:
        with CatchExits():
            return await environment.run(item, session, seed=seed)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if anyio.current_effective_deadline() == -math.inf or (task is not None and task.cancelling()):
            raise
        raise EnvironmentFailure(
            f"the environment failed on item {item.id}: it raised CancelledError, and nobody cancelled the rollout; catch "
            "this where your code waits for a task that may be cancelled"
        ) from error


def _describe_wrong_session(target: object, session: object) -> InterfaceError:
    """Return the error about an object that is no session."""
    source = f"`session` of {type(target).__name__}"
    if inspect.iscoroutine(session):
        session.close()
        return InterfaceError(
            f"{source} is async, and reflact does not wait for it; write {write_definition(Target.session)}"
        )
    name = type(session).__name__
    if not hasattr(session, "reply"):
        return InterfaceError(
            f"{source} returned a value of type {name}, which has no `reply`; add {write_definition(Session.reply)}"
        )
    line = f"self.turns = () in its __init__ and {TURNS_LINE} in its `reply`"
    if not hasattr(session, "turns"):
        return InterfaceError(
            f"{source} returned a value of type {name}, which has no `turns`, the conversation that the "
            f"optimizer reads; write {line}"
        )
    found = session.turns
    if callable(found):
        line = "@property above def turns(self)"
    return InterfaceError(
        f"`turns` of {name} is a {type(found).__name__}, and no tuple of Turn; write {line}"
    )


class RolloutJob(NamedTuple):
    """One rollout to run."""

    item: Item
    skill: Skill
    trial: int
    key: str


ExceptionCallback = Callable[[RolloutJob, Exception, str], Awaitable[str]]
"""Keeps an exception of the caller's code in a rollout; it gets and returns why the rollout is unmeasured, or raises."""


def describe_exception(item: Item, error: Exception, target: Target, session: Session | None) -> str:
    """Return why a rollout is unmeasured after an exception of the caller's code, and whose code it was."""
    if isinstance(error, EnvironmentFailure):
        return read_text(error)
    who = "agent" if _has_failed(error, target, session) else "environment"
    text = read_text(error)
    if isinstance(error, ValidationError):
        found = type(error.errors(include_url=False)[0]["input"]).__name__
        text = f"{error.title}: {describe_problems(error)} (got {found})"
    elif isinstance(error, TypeError) and who == "environment":
        text += _suggest_reply(session, error)
    return f"the {who} failed on item {item.id}: {type(error).__name__}: {text}"


def _suggest_reply(session: object, error: TypeError) -> str:
    """Return the line to write, if a session's ``reply`` is the likely cause of an error where it was called."""
    own: Any = getattr(session, "reply", None)
    if own is None:
        return ""
    problem = find_wrong_arguments(own, Session.reply)
    if "await" in str(error) and not inspect.iscoroutinefunction(own):
        problem = f"is not async; write {write_definition(Session.reply)}"
    return "" if problem is None else f"; `reply` of {type(session).__name__} {problem}"


def _has_failed(error: Exception, target: Target, session: Session | None) -> bool:
    """Whether an exception passed through a method of a target or its session."""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if owner is not None and (owner is session or owner is target):
            return True
        trace = trace.tb_next
    return False


async def _return_reason(job: RolloutJob, error: Exception, reason: str) -> str:
    return reason


@dataclass(frozen=True, kw_only=True)
class RolloutRunner:
    """Rolls items out; stored rollouts and logged unmeasured ones are not run again, equal keys run once.

    ``feedback``: rollouts carry the environment's feedback for the analysts. ``limit`` is the maximum of
    rollouts in flight, or a semaphore that several runners share. Rollouts are reused within a ``phase`` only, or
    among all phases that are None. ``on_rollout`` is called with each rollout when it first finishes, in any order,
    and whether it was found in the store, and ``on_exception`` with each exception of the environment's or the target's own code.
    """

    target: Target
    environment: Environment
    store: RolloutStore
    decision_log: DecisionLog
    step: int
    feedback: bool
    limit: Limit
    phase: str | None = None
    on_rollout: RolloutCallback | None = None
    on_exception: ExceptionCallback = _return_reason
    _known: dict[str, Rollout] = field(default_factory=dict, init=False)
    _logged: dict[str, JsonValue] = field(default_factory=dict, init=False)
    _stored: set[str] = field(default_factory=set, init=False)
    _running: dict[str, anyio.Event] = field(default_factory=dict, init=False)

    async def roll_out(
        self, items: Sequence[Item], skill: Skill, *, coverage: float | None, trial: int = 0
    ) -> tuple[Rollout, ...]:
        """Return one rollout for each item, in the order of the items.

        A rollout has no score if the provider or the environment failed. It is logged under the step before
        it is returned, so that a resumed run decides on the same evidence. ``coverage`` is the share of items
        that must be measured, 0..1, and at least one; None: any number, and the caller logs the unmeasured
        ones.

        Raises:
            RunFailed: Less than ``coverage`` of the items could be measured; nothing is logged.
            AccessDenied, BadRequest: The endpoint serves no request of this kind.
            BudgetSpent: A limit of the budget allows no further call.
        """
        jobs = [self.make_job(item, skill, trial) for item in items]
        await self.find_stored(jobs)
        rollouts = await fan_out(self.run, jobs, limit=self.limit)
        if coverage is not None:
            require_coverage(rollouts, coverage)
            await log_unmeasured(rollouts, decision_log=self.decision_log, step=self.step)
        return rollouts

    async def roll_out_pass(self, items: Sequence[Item], skill: Skill, *, trial: int) -> tuple[Rollout, ...]:
        """Return one trial of the items, in their order; the caller logs unmeasured rollouts.

        An unmeasured rollout is retried once after all others have finished, unless it is refused. Raises as
        ``roll_out``.
        """
        first = await self.roll_out(items, skill, coverage=None, trial=trial)
        pairs = zip(items, first, strict=True)
        lost = [item for item, rollout in pairs if rollout.score is None and not rollout.refused]
        if not lost:
            return first
        jobs = [self.make_job(item, skill, trial) for item in lost]
        retried = {r.key: r for r in await fan_out(self.retry, jobs, limit=self.limit)}
        return tuple(retried.get(rollout.key, rollout) for rollout in first)

    async def read_stored(self, items: Sequence[Item], skill: Skill, *, trial: int) -> tuple[Rollout, ...]:
        """Return the stored rollouts of a trial, in the order of the items; one that is missing is left out."""
        jobs = [self.make_job(item, skill, trial) for item in items]
        await self.find_stored(jobs)
        return tuple(self._known[job.key] for job in jobs if job.key in self._known)

    def make_job(self, item: Item, skill: Skill, trial: int) -> RolloutJob:
        """Return the job of an item's trial under a skill.

        Its key is a digest of everything that the score depends on: 64 hexadecimal digits.
        """
        key = build_rollout_key(
            item,
            skill.hash,
            target=self.target.identity,
            environment=self.environment.identity,
            feedback=self.feedback,
            trial=trial,
            phase=self.phase,
        )
        return RolloutJob(item, skill, trial, key)

    def make_batch_jobs(self, batches: Sequence[Sequence[Item]], skill: Skill) -> list[list[RolloutJob]]:
        """Return the jobs of a step's batches; an item that occurs in several has a trial for each."""
        trials: defaultdict[str, Iterator[int]] = defaultdict(count)
        return [[self.make_job(item, skill, next(trials[item.id])) for item in batch] for batch in batches]

    async def roll_out_batches(
        self, batches: Sequence[Sequence[Item]], skills: Sequence[Skill]
    ) -> tuple[tuple[Rollout, ...], ...]:
        """Return the rollouts of a step's batches under each skill, in the order of the items.

        The caller logs unmeasured ones.

        Raises:
            RunFailed: No rollout of a skill could be measured.
        """
        rows = [[j for batch in self.make_batch_jobs(batches, skill) for j in batch] for skill in skills]
        if not rows:
            return ()
        jobs = [job for row in rows for job in row]
        await self.find_stored(jobs)
        done = await fan_out(self.run, jobs, limit=self.limit)
        size = len(rows[0])
        rolled = tuple(done[start : start + size] for start in range(0, len(done), size))
        for rollouts in rolled:
            require_coverage(rollouts, 0.0)
        return rolled

    async def find_stored(self, jobs: Sequence[RolloutJob]) -> None:
        """Read the stored rollouts of the jobs, and why others were logged as unmeasured."""
        stored = await self.store.find_rollouts([job.key for job in jobs])
        self._known.update(stored)
        self._stored.update(stored)
        labels = [label_unmeasured(job.key) for job in jobs if job.key not in self._known]
        self._logged.update(await self.decision_log.find(self.step, labels))

    async def run(self, job: RolloutJob) -> Rollout:
        """Return a job's rollout; an unmeasured one is not run again before ``retry``."""
        finished = await self._get_or_run(job)
        if self.on_rollout is not None:
            await self.on_rollout(finished, job.key in self._stored)
        return finished

    async def retry(self, job: RolloutJob) -> Rollout:
        """Return a job's rollout; run it again if it is unmeasured and not logged."""
        known = self._known.get(job.key)
        if known is not None and known.score is None:
            del self._known[job.key]
        return await self._get_or_run(job)

    async def _get_or_run(self, job: RolloutJob) -> Rollout:
        key = job.key
        while key in self._running:
            await self._running[key].wait()
        if key not in self._known:
            self._running[key] = finished = anyio.Event()
            try:
                self._known[key] = await self._run_new(job)
            finally:
                del self._running[key]
                finished.set()
        return self._known[key]

    async def _run_new(self, job: RolloutJob, tries: int = MAX_TRIES) -> Rollout:
        blank = Rollout(key=job.key, item_id=job.item.id, skill_hash=job.skill.hash, trial=job.trial)
        if (logged := self._logged.get(label_unmeasured(job.key))) is not None:
            return blank.model_copy(update={"error": str(logged), "refused": True})
        session: Session | None = None
        item = copy_item(job.item)
        try:
            session = start_session(self.target, item, job.skill, rollout=job.key)
            seed = derive_rollout_seed(job.item, job.trial)
            graded = await run_environment(self.environment, item, session, seed=seed)
        except (AccessDenied, BudgetSpent, CassetteError, RunFailed, StoreError, UnknownModel):
            raise
        except (ContextOverflow, ReplyError) as error:
            graded = Grade(score=Score.of(0), answer="", feedback=str(error))
        except Exception as error:  # environments and targets may raise anything
            if isinstance(error, BadRequest) and error.status in FATAL_STATUSES:
                raise
            if isinstance(error, WorkerLost) and tries > 1:
                return await self._run_new(job, tries - 1)
            reason = read_text(error)
            if not isinstance(error, ReflactError) or isinstance(error, EnvironmentFailure):
                reason = describe_exception(job.item, error, self.target, session)
                reason = await self.on_exception(job, error, reason)
            failed = {
                "error": replace_surrogates(reason),
                "turns": _read_turns(session),
                "refused": isinstance(error, RequestRefused),
            }
            return blank.model_copy(update=failed)
        feedback = graded.feedback if self.feedback else None
        finished = blank.model_copy(
            update={
                "turns": _read_turns(session),
                "answer": replace_surrogates(graded.answer),
                "score": graded.score,
                "feedback": None if feedback is None else replace_surrogates(feedback),
            }
        )
        await self.store.store_rollout(finished)
        return finished


def _read_turns(session: Session | None) -> tuple[Turn, ...]:
    """Return the turns of a session, with U+FFFD in place of lone surrogates, which a database cannot store.

    Raises:
        InterfaceError: One of them is no turn.
    """
    turns = () if session is None else session.turns
    for turn in turns:
        if not isinstance(turn, Turn):
            raise InterfaceError(
                f"`turns` of {type(session).__name__} has a {type(turn).__name__} in place of a Turn; write {TURNS_LINE}"
            )
    return tuple(
        turn
        if turn.content.isascii()
        else turn.model_copy(update={"content": replace_surrogates(turn.content)})
        for turn in turns
    )
