"""Stage 1: rolls out items under a skill with the target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import anyio
from pydantic import JsonValue

from reflact.adapters import (
    TargetAdapter,
    adapt_environment,
    adapt_target,
    describe_exception,
    read_text,
    read_turns,
)
from reflact.concurrency import Limit, fan_out
from reflact.errors import (
    AccessDenied,
    BadRequest,
    BudgetSpent,
    CassetteError,
    ContextOverflow,
    EnvironmentFailure,
    ReflactError,
    ReplyError,
    RequestRefused,
    RunFailed,
    StoreError,
    UnknownModel,
    WorkerLost,
)
from reflact.gate.greater_mean import count_required
from reflact.jsonutil import replace_surrogates
from reflact.protocols import DecisionLog, Environment, RolloutStore, Session, Target
from reflact.stages.context import Journal
from reflact.types import Grade, Item, Rollout, Score, Skill, digest_json

# Takes a finished rollout, and whether it was found in the store.
RolloutCallback = Callable[[Rollout, bool], Awaitable[None]]

# Statuses of a wrong address, which serves no other rollout either.
FATAL_STATUSES = frozenset({404, 301, 302, 303, 307, 308})

# How often a rollout begins if its workers end; after that it is unmeasured.
MAX_TRIES = 3

# Rollouts in flight in a loop of your own.
CONCURRENCY = 8


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
) -> str:
    """Return the digest of everything that a rollout's score depends on, 64 hexadecimal digits.

    ``target`` and ``environment`` are their identities.
    """
    return digest_json(
        {
            "kind": "rollout",
            "version": 1,
            "skill": skill_hash,
            "item": item.fingerprint,
            "target": target,
            "environment": environment,
            "feedback": feedback,
            "trial": trial,
        }
    )


# The label under which a rollout is logged as unmeasured begins so, and ends with its key.
UNMEASURED = "unmeasured/"


async def log_unmeasured(
    rollouts: Sequence[Rollout], *, decision_log: DecisionLog, step: int
) -> None:
    """Log the unmeasured rollouts among those that a decision of the step is about to use."""
    for rollout in rollouts:
        if rollout.score is None:
            await decision_log.put(step, UNMEASURED + rollout.key, rollout.error)


def require_coverage(rollouts: Sequence[Rollout], coverage: float) -> None:
    """Check that enough rollouts are measured; those that are refused for ever do not count."""
    missing = [r for r in rollouts if r.score is None]
    measured = len(rollouts) - len(missing)
    if missing and measured < count_required(coverage, sum(not r.refused for r in rollouts)):
        first = f"the first failure: {missing[0].error}"
        raise RunFailed(f"only {measured} of {len(rollouts)} rollouts could be measured; {first}")


class RolloutJob(NamedTuple):
    """One rollout to run."""

    item: Item
    skill: Skill
    trial: int
    key: str


# Keeps an exception of the caller's code; it returns why the rollout is unmeasured, or raises.
ExceptionCallback = Callable[[RolloutJob, Exception, str], Awaitable[str]]


@dataclass(kw_only=True)
class RolloutRunner:
    """Rolls items out; what is stored, or logged as unmeasured, is not run again.

    ``feedback``: rollouts carry the environment's feedback for the analysts. ``limit`` is the
    maximum of rollouts in flight, or a semaphore that several runners share. ``on_rollout`` is
    called with each rollout when it first finishes, in any order, and whether it was found in the
    store, and ``on_exception`` with each exception of the environment's or the target's own code.

    Methods raise AccessDenied, BadRequest or BudgetSpent if the endpoint serves no request of this
    kind, or the budget allows no further call.
    """

    target: Target | TargetAdapter
    environment: Environment
    store: RolloutStore
    decision_log: DecisionLog
    step: int
    feedback: bool
    limit: Limit
    on_rollout: RolloutCallback | None = None
    on_exception: ExceptionCallback | None = None
    _known: dict[str, Rollout] = field(default_factory=dict, init=False)
    _logged: dict[str, JsonValue] = field(default_factory=dict, init=False)
    _stored: set[str] = field(default_factory=set, init=False)
    _running: dict[str, anyio.Event] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._target = adapt_target(self.target)
        self._environment = adapt_environment(self.environment)

    async def roll_out_trials(
        self, items: Sequence[Item], skill: Skill, trials: Sequence[int]
    ) -> tuple[tuple[Rollout, ...], ...]:
        """Return the rollouts of trials that run together, each in the order of the items.

        A rollout has no score if the provider or the environment failed. The caller logs it before
        it decides, so that a resumed run decides on the same evidence.
        """
        return await self._run_groups(
            [[self.make_job(item, skill, trial) for item in items] for trial in trials]
        )

    async def roll_out_pass(
        self, items: Sequence[Item], skill: Skill, *, trial: int
    ) -> tuple[Rollout, ...]:
        """Return one trial of the items, in their order; the caller logs unmeasured rollouts.

        An unmeasured rollout is retried once after all others have finished, unless it is refused.
        """
        (rollouts,) = await self.roll_out_trials(items, skill, (trial,))
        again = []
        for item, rollout in zip(items, rollouts, strict=True):
            if rollout.score is None and not rollout.refused:
                self._known.pop(rollout.key, None)
                again.append(self.make_job(item, skill, trial))
        await fan_out(self._run_once, again, limit=self.limit)
        return tuple(self._known[rollout.key] for rollout in rollouts)

    async def roll_out_batches(
        self, batches: Sequence[Sequence[Item]], skills: Sequence[Skill]
    ) -> tuple[tuple[Rollout, ...], ...]:
        """Return the rollouts of a step's batches under each skill, in the order of the items.

        The caller logs unmeasured ones.
        """
        rows = [self.make_batch_jobs(batches, skill) for skill in skills]
        groups = await self._run_groups([[job for jobs in row for job in jobs] for row in rows])
        for rollouts in groups:
            require_coverage(rollouts, 0.0)
        return groups

    async def read_stored(
        self, items: Sequence[Item], skill: Skill, *, trial: int
    ) -> tuple[Rollout, ...]:
        """Return those rollouts of a trial that are stored, in the order of the items."""
        jobs = [self.make_job(item, skill, trial) for item in items]
        await self.find_stored(jobs)
        return tuple(self._known[job.key] for job in jobs if job.key in self._known)

    def make_job(self, item: Item, skill: Skill, trial: int) -> RolloutJob:
        """Return the job of an item's trial under a skill."""
        key = build_rollout_key(
            item,
            skill.hash,
            target=self._target.identity,
            environment=self._environment.identity,
            feedback=self.feedback,
            trial=trial,
        )
        return RolloutJob(item, skill, trial, key)

    def make_batch_jobs(
        self, batches: Sequence[Sequence[Item]], skill: Skill
    ) -> list[list[RolloutJob]]:
        """Return the jobs of a step's batches; an item in several of them has a trial for each."""
        trials: defaultdict[str, Iterator[int]] = defaultdict(count)
        return [
            [self.make_job(item, skill, next(trials[item.id])) for item in batch]
            for batch in batches
        ]

    async def find_stored(self, jobs: Sequence[RolloutJob]) -> None:
        """Read the stored rollouts of the jobs, and why others were logged as unmeasured."""
        stored = await self.store.find_rollouts([job.key for job in jobs])
        self._known.update(stored)
        self._stored.update(stored)
        labels = [UNMEASURED + job.key for job in jobs if job.key not in self._known]
        self._logged.update(await self.decision_log.find(self.step, labels))

    async def run(self, job: RolloutJob) -> Rollout:
        """Return a job's rollout, and report it."""
        rollout = await self._run_once(job)
        if self.on_rollout is not None:
            await self.on_rollout(rollout, job.key in self._stored)
        return rollout

    async def recall(self, job: RolloutJob) -> Rollout:
        """Return the rollout of a job that has run."""
        return self._known[job.key]

    async def _run_groups(
        self, groups: Sequence[Sequence[RolloutJob]]
    ) -> tuple[tuple[Rollout, ...], ...]:
        """Return the rollouts of the jobs in each group; all of them run together."""
        jobs = [job for group in groups for job in group]
        await self.find_stored(jobs)
        finished = iter(await fan_out(self.run, jobs, limit=self.limit))
        return tuple(tuple(next(finished) for _ in group) for group in groups)

    async def _run_once(self, job: RolloutJob) -> Rollout:
        """Return a job's known rollout, or wait for the same job, or run it."""
        key = job.key
        while key in self._running:
            await self._running[key].wait()
        if key not in self._known:
            self._running[key] = anyio.Event()
            try:
                self._known[key] = await self._run_new(job)
            finally:
                self._running.pop(key).set()
        return self._known[key]

    async def _run_new(self, job: RolloutJob, tries: int = MAX_TRIES) -> Rollout:
        blank = Rollout(
            key=job.key, item_id=job.item.id, skill_hash=job.skill.hash, trial=job.trial
        )
        logged = self._logged.get(UNMEASURED + job.key)
        if logged is not None:
            return blank.model_copy(update={"error": str(logged), "refused": True})

        session: Session | None = None
        item = _copy_item(job.item)
        try:
            session = self._target.session_for(item, job.skill, rollout=job.key)
            seed = derive_rollout_seed(job.item, job.trial)
            graded = await self._environment.run(item, session, seed=seed)
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
                reason = describe_exception(job.item, error, self._target, session)
                if self.on_exception is not None:
                    reason = await self.on_exception(job, error, reason)
            changes = {
                "error": replace_surrogates(reason),
                "turns": read_turns(session),
                "refused": isinstance(error, RequestRefused),
            }
            return blank.model_copy(update=changes)

        feedback = graded.feedback if self.feedback else None
        changes = {
            "turns": read_turns(session),
            "answer": replace_surrogates(graded.answer),
            "score": graded.score,
            "feedback": None if feedback is None else replace_surrogates(feedback),
        }
        finished = blank.model_copy(update=changes)
        await self.store.store_rollout(finished)
        return finished


def _copy_item(item: Item) -> Item:
    """Return an item for one rollout, whose code may change lists and mappings in it."""
    parts = (item.input, item.reference, item.metadata)
    is_changeable = any(isinstance(part, list | dict) and part for part in parts)
    return item.model_copy(deep=True) if is_changeable else item


async def roll_out(
    items: Sequence[Item],
    skill: Skill,
    *,
    target: Target,
    environment: Environment,
    journal: Journal | None = None,
    trial: int = 0,
) -> tuple[Rollout, ...]:
    """Return one rollout for each item, in their order; one that failed has no score.

    Rollouts that a ``journal`` has are not run again; without one, nothing is kept.
    """
    journal = Journal() if journal is None else journal
    runner = RolloutRunner(
        target=target,
        environment=environment,
        store=journal,
        decision_log=journal,
        step=0,
        feedback=True,
        limit=CONCURRENCY,
    )
    (rollouts,) = await runner.roll_out_trials(items, skill, (trial,))
    return rollouts
