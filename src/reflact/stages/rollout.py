"""Stage 1: the target works on items under a skill."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
from pydantic import JsonValue

from reflact.concurrency import fan_out, fan_out_until
from reflact.errors import (
    AccessDenied,
    BadRequest,
    BudgetSpent,
    CassetteError,
    ContextOverflow,
    ModelError,
    ReflactError,
    ReplyError,
    RunFailed,
    StoreError,
)
from reflact.protocols import DecisionLog, Environment, RolloutStore, Session, Target
from reflact.types import Grade, Item, Rollout, Score, Skill, digest_json

RolloutCallback = Callable[[Rollout], Awaitable[None]]
RolloutPair = tuple[Rollout, Rollout]
"""The candidate's and the current skill's rollout of one item."""

FATAL_STATUS = 404


def build_rollout_key(
    skill: Skill,
    item: Item,
    *,
    target: Target,
    environment: Environment,
    feedback: bool,
    trial: int,
    phase: str | None = None,
) -> str:
    """Return the identity of a rollout: all that its score depends on, as 64 hexadecimal digits.

    A ``phase`` keeps rollouts apart that would be the same otherwise.
    """
    parts: dict[str, JsonValue] = {
        "kind": "rollout",
        "version": 1,
        "skill": skill.hash,
        "item": item.fingerprint,
        "target": target.identity,
        "environment": environment.identity,
        "feedback": feedback,
        "trial": trial,
    }
    return digest_json(parts if phase is None else {**parts, "phase": phase})


def derive_rollout_seed(item: Item, trial: int) -> int:
    """Return the seed of an item's trial, 0 to 2**32 - 1: the same under every skill."""
    return int(digest_json(["rollout", item.fingerprint, trial])[:8], 16)


def number_trials(items: Sequence[Item]) -> tuple[int, ...]:
    """Return the trial of each item: how often the same one stands before it."""
    seen: Counter[str] = Counter()
    trials = []
    for item in items:
        trials.append(seen[item.id])
        seen[item.id] += 1
    return tuple(trials)


async def rollout(
    items: Sequence[Item],
    skill: Skill,
    *,
    target: Target,
    environment: Environment,
    store: RolloutStore,
    decision_log: DecisionLog,
    step: int,
    feedback: bool,
    coverage: float | None,
    limit: int,
    trial: int | None = None,
    phase: str | None = None,
    stop_when: Callable[[Sequence[Rollout]], bool] | None = None,
    on_rollout: RolloutCallback | None = None,
) -> tuple[Rollout, ...]:
    """Return one rollout for each item, in the order of the items; stored ones are not repeated.

    A rollout that a provider or environment failure cut short has no score. Once its absence is used
    it is journalled under ``step``, so that a restart decides on the same evidence.

    Args:
        items: What to work on.
        skill: The instructions.
        target: The frozen agent.
        environment: Runs and grades items.
        store: Where finished rollouts are.
        decision_log: Where unmeasured items are noted.
        step: The step that uses the rollouts.
        feedback: Whether the environment's words about the answer are kept for the analysts.
        coverage: Share of items that must be measured, 0..1; always at least one. None: any number, and
            whoever uses absences notes them (``note_unmeasured``).
        limit: Rollouts in flight at most.
        trial: Number of the trial; None numbers the occurrences of each item from 0.
        phase: Shares rollouts within this phase only; None shares them with every phase that has none.
        stop_when: Ends the work at the first finished prefix for which it is true; that prefix is returned.
        on_rollout: Called with each rollout as it finishes, in any order.

    Raises:
        RunFailed: Fewer than ``coverage`` of the items could be measured; nothing is journalled.
        AccessDenied, BadRequest: The endpoint will not serve any request of this kind.
        BudgetSpent: The run's budget has no room for a call.
    """
    runner = RolloutRunner(
        target=target,
        environment=environment,
        store=store,
        decision_log=decision_log,
        step=step,
        feedback=feedback,
        phase=phase,
        on_rollout=on_rollout,
    )
    trials = number_trials(items) if trial is None else [trial] * len(items)
    jobs = [runner.make_job(item, skill, number) for item, number in zip(items, trials, strict=True)]
    await runner.find_stored(jobs)
    if stop_when is None:
        rollouts = await fan_out(runner.run, jobs, limit=limit)
    else:
        rollouts = await fan_out_until(runner.run, jobs, enough=stop_when, limit=limit)
    if coverage is not None:
        require_coverage(rollouts, coverage)
        await log_unmeasured(rollouts, decision_log=decision_log, step=step)
    return rollouts


async def rollout_pairs(
    items: Sequence[Item],
    candidate: Skill,
    current: Skill,
    *,
    target: Target,
    environment: Environment,
    store: RolloutStore,
    decision_log: DecisionLog,
    step: int,
    trial: int,
    limit: int,
    phase: str | None = None,
    stop_when: Callable[[Sequence[RolloutPair]], bool] | None = None,
    on_rollout: RolloutCallback | None = None,
) -> tuple[RolloutPair, ...]:
    """Return one trial of each item under both skills, in the order of the items, without feedback.

    Both sides of an item run beside each other. A side that stayed unmeasured is tried once more when
    all others are through, and holds up the prefix until then; what it gives then is final. Nothing is
    journalled: whoever uses the absences does so with ``note_unmeasured``. ``until`` ends the work at
    the shortest prefix of final pairs for which it is true; exactly that prefix is returned. It must
    depend on the pairs alone. For the other arguments see ``rollout``.

    Raises:
        AccessDenied, BadRequest: The endpoint will not serve any request of this kind.
        BudgetSpent: The run's budget has no room for a call.
    """
    runner = RolloutRunner(
        target=target,
        environment=environment,
        store=store,
        decision_log=decision_log,
        step=step,
        feedback=False,
        phase=phase,
        on_rollout=on_rollout,
    )
    sides = [runner.make_job(item, skill, trial) for item in items for skill in (candidate, current)]
    await runner.find_stored(sides)

    def stop(finished: Sequence[Rollout]) -> bool:
        measured = all(side.score is not None for side in finished)
        return (
            stop_when is not None and measured and len(finished) % 2 == 0 and stop_when(_pair_sides(finished))
        )

    first = await fan_out_until(runner.run, sides, enough=stop, limit=limit)
    lost = [place for place, side in enumerate(first) if side.score is None]
    if not lost:
        return _pair_sides(first)

    def enough(retried: Sequence[Rollout]) -> bool:
        pairs = _finalize_pairs(first, lost, retried)
        return _find_shortest_prefix(pairs, lost[0] // 2 + 1, stop_when) is not None

    again = await fan_out_until(runner.retry, [sides[n] for n in lost], enough=enough, limit=limit)
    pairs = _finalize_pairs(first, lost, again)
    return pairs[: _find_shortest_prefix(pairs, lost[0] // 2 + 1, stop_when)]


async def log_unmeasured(rollouts: Sequence[Rollout], *, decision_log: DecisionLog, step: int) -> None:
    """Journal the unmeasured ones among rollouts that a decision of the step is about to use."""
    for lost in (r for r in rollouts if r.score is None):
        await decision_log.put(step, f"unmeasured/{lost.key}", lost.error)


def require_coverage(rollouts: Sequence[Rollout], coverage: float) -> None:
    """Refuse rollouts of which too few are measured.

    Raises:
        RunFailed: None is measured, or fewer than the share ``coverage``, 0..1, of them.
    """
    missing = [r for r in rollouts if r.score is None]
    measured = len(rollouts) - len(missing)
    if missing and (measured == 0 or measured < coverage * len(rollouts)):
        first = f"the first failure: {missing[0].error}"
        raise RunFailed(f"only {measured} of {len(rollouts)} rollouts could be measured; {first}")


class RolloutJob(NamedTuple):
    """One rollout to be had."""

    item: Item
    skill: Skill
    trial: int
    key: str


class RolloutRunner:
    """Takes jobs one by one: what is stored or noted as unmeasured is not run again, equal keys run once.

    Args:
        target: The frozen agent.
        environment: Runs and grades items.
        store: Where finished rollouts are.
        journal: Where unmeasured items are noted.
        step: The step that uses the rollouts.
        feedback: Whether the environment's words about the answer are kept.
        phase: See ``rollout``.
        report: Called with each rollout as it first finishes.
    """

    def __init__(
        self,
        *,
        target: Target,
        environment: Environment,
        store: RolloutStore,
        decision_log: DecisionLog,
        step: int,
        feedback: bool,
        phase: str | None = None,
        on_rollout: RolloutCallback | None = None,
    ) -> None:
        self._target = target
        self._environment = environment
        self._store = store
        self._decision_log = decision_log
        self._step = step
        self._feedback = feedback
        self._phase = phase
        self._report = on_rollout
        self._known: dict[str, Rollout] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    def make_job(self, item: Item, skill: Skill, trial: int) -> RolloutJob:
        """Return the job of an item's trial under a skill."""
        key = build_rollout_key(
            skill,
            item,
            target=self._target,
            environment=self._environment,
            feedback=self._feedback,
            trial=trial,
            phase=self._phase,
        )
        return RolloutJob(item, skill, trial, key)

    async def find_stored(self, jobs: Sequence[RolloutJob]) -> None:
        """Find out which of the jobs are stored."""
        self._known.update(await self._store.find_rollouts([job.key for job in jobs]))

    async def run(self, job: RolloutJob) -> Rollout:
        """Return a job's rollout; one without a score is known as such until it is tried ``again``."""
        done = await self._get_or_run(job)
        if self._report is not None:
            await self._report(done)
        return done

    async def retry(self, job: RolloutJob) -> Rollout:
        """Return a job's rollout, tried once more where it stayed unmeasured and no decision used that."""
        known = self._known.get(job.key)
        if known is not None and known.score is None:
            del self._known[job.key]
        return await self._get_or_run(job)

    async def _get_or_run(self, job: RolloutJob) -> Rollout:
        async with self._locks[job.key]:
            if job.key not in self._known:
                self._known[job.key] = await self._run_new(job)
            return self._known[job.key]

    async def _run_new(self, job: RolloutJob) -> Rollout:
        blank = Rollout(key=job.key, item_id=job.item.id, skill_hash=job.skill.hash, trial=job.trial)
        noted = await self._decision_log.get(self._step, f"unmeasured/{job.key}")
        if noted is not None:
            return blank.model_copy(update={"error": str(noted)})
        session = self._target.session(job.skill, rollout=job.key)
        done = await _run_rollout(
            job.item, blank, session, environment=self._environment, feedback=self._feedback
        )
        if done.score is not None:
            await self._store.store_rollout(done)
        return done


def _finalize_pairs(
    first: Sequence[Rollout], lost: Sequence[int], retried: Sequence[Rollout]
) -> tuple[RolloutPair, ...]:
    """Return the pairs up to the next lost side, after as many lost ones as there are were tried again."""
    sides = list(first)
    for place, side in zip(lost, retried, strict=False):
        sides[place] = side
    return _pair_sides(sides[: (*lost, len(sides))[len(retried)]])


def _find_shortest_prefix(
    pairs: Sequence[RolloutPair], least: int, stop_when: Callable[[Sequence[RolloutPair]], bool] | None
) -> int | None:
    lengths = range(least, len(pairs) + 1)
    return next((n for n in lengths if stop_when is not None and stop_when(pairs[:n])), None)


def _pair_sides(sides: Sequence[Rollout]) -> tuple[RolloutPair, ...]:
    return tuple(zip(sides[::2], sides[1::2], strict=False))


async def _run_rollout(
    item: Item, blank: Rollout, session: Session, *, environment: Environment, feedback: bool
) -> Rollout:
    try:
        graded = await environment.run(item, session, seed=derive_rollout_seed(item, blank.trial))
    except (AccessDenied, BudgetSpent, CassetteError, StoreError):
        raise
    except (ContextOverflow, ReplyError) as error:
        graded = Grade(score=Score.of(0), answer="", feedback=str(error))
    except ModelError as error:
        if isinstance(error, BadRequest) and error.status == FATAL_STATUS:
            raise
        return blank.model_copy(update={"error": str(error), "turns": session.turns})
    except ReflactError as error:
        return blank.model_copy(update={"error": str(error), "turns": session.turns})
    except Exception as error:  # noqa: BLE001 - foreign code: its error is one item's loss
        reason = f"the environment failed on item {item.id}: {type(error).__name__}: {error}"
        return blank.model_copy(update={"error": reason, "turns": session.turns})
    return blank.model_copy(
        update={
            "turns": session.turns,
            "answer": graded.answer,
            "score": graded.score,
            "feedback": graded.feedback if feedback else None,
        }
    )
