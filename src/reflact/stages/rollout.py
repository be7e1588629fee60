"""Stage 1: the target works on items under a skill."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reflact.errors import (
    AccessDenied,
    BadRequest,
    CassetteError,
    ContextOverflow,
    ModelError,
    ReflactError,
    ReplyError,
    RunFailed,
    StoreError,
)
from reflact.ports import Environment, Journal, RolloutStore, Session, Target
from reflact.tasks import fan_out
from reflact.types import Graded, Item, Rollout, Score, Skill, digest

Report = Callable[[Rollout], Awaitable[None]]

FATAL_STATUS = 404


def rollout_key(
    skill: Skill, item: Item, *, target: Target, environment: Environment, feedback: bool, trial: int
) -> str:
    """Return the identity of a rollout: all that its score depends on, as 64 hexadecimal digits."""
    return digest(
        {
            "kind": "rollout",
            "version": 1,
            "skill": skill.hash,
            "item": item.fingerprint,
            "target": target.identity,
            "environment": environment.identity,
            "feedback": feedback,
            "trial": trial,
        }
    )


async def rollout(
    items: Sequence[Item],
    skill: Skill,
    *,
    target: Target,
    environment: Environment,
    store: RolloutStore,
    journal: Journal,
    step: int,
    feedback: bool,
    coverage: float,
    limit: int,
    trial: int = 0,
    report: Report | None = None,
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
        journal: Where unmeasured items are noted.
        step: The step that uses the rollouts.
        feedback: Whether the environment's words about the answer are kept for the analysts.
        coverage: Share of items that must be measured, 0..1; always at least one.
        limit: Rollouts in flight at most.
        trial: Number of the trial.
        report: Called with each rollout as it finishes, in any order.

    Raises:
        RunFailed: Fewer than ``coverage`` of the items could be measured; nothing is journalled.
        AccessDenied, BadRequest: The endpoint will not serve any request of this kind.
    """
    keys = [
        rollout_key(skill, i, target=target, environment=environment, feedback=feedback, trial=trial)
        for i in items
    ]
    stored = await store.find_rollouts(keys)

    async def one(index: int) -> Rollout:
        item, key = items[index], keys[index]
        done = stored.get(key)
        if done is None:
            blank = Rollout(key=key, item_id=item.id, skill_hash=skill.hash, trial=trial)
            noted = await journal.recall(step, f"unmeasured/{key}")
            if noted is not None:
                done = blank.model_copy(update={"error": str(noted)})
            else:
                session = target.session(skill, rollout=key)
                done = await _run(item, blank, session, environment=environment, feedback=feedback)
                if done.score is not None:
                    await store.keep_rollout(done)
        if report is not None:
            await report(done)
        return done

    rollouts = await fan_out(one, range(len(items)), limit=limit)
    await _settle(rollouts, journal=journal, step=step, coverage=coverage)
    return rollouts


async def _run(
    item: Item, blank: Rollout, session: Session, *, environment: Environment, feedback: bool
) -> Rollout:
    try:
        graded = await environment.run(item, session, seed=int(blank.key[:8], 16))
    except (AccessDenied, CassetteError, StoreError):
        raise
    except (ContextOverflow, ReplyError) as error:
        graded = Graded(score=Score.of(0), answer="", feedback=str(error))
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


async def _settle(rollouts: Sequence[Rollout], *, journal: Journal, step: int, coverage: float) -> None:
    missing = [r for r in rollouts if r.score is None]
    measured = len(rollouts) - len(missing)
    if missing and (measured == 0 or measured < coverage * len(rollouts)):
        first = f"the first failure: {missing[0].error}"
        raise RunFailed(f"only {measured} of {len(rollouts)} rollouts could be measured; {first}")
    for lost in missing:
        await journal.note(step, f"unmeasured/{lost.key}", lost.error)
