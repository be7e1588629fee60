"""What the target answered to each item under the initial and the best document, read from a run's
store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from pydantic import JsonValue

from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.jsonutil import parse_stored
from reflact.records import ComparisonCategory, DocumentResult, ItemResult, SkillVersion, Usage
from reflact.stages.rollout import build_rollout_key
from reflact.training.rollouts import FIRST_REPORT_TRIAL
from reflact.types import Item, Rollout, Split

if TYPE_CHECKING:
    from reflact.store.runs import RunRow, SQLiteRunStore


async def read_items(
    store: SQLiteRunStore,
    run: RunRow,
    *,
    split: Split | None = None,
    version: SkillVersion | None = None,
) -> tuple[ItemResult, ...]:
    """Return the items of a split with their answers; if ``split`` is None, see
    ``history.read_run``.

    ``version`` is the best document; None: that of the latest commit, which may change while a run
    is under way.

    Raises:
        UsageError: Nothing is measured on the split.
        StoreError: The items are missing or damaged.
    """
    summary = await store.summary(run.run_id)
    last = await store.last_commit(run.run_id)
    if last is None:
        raise UsageError(
            f"run {run.run_id} has not measured its initial document yet; start or resume it with "
            "reflact train"
        )
    identity = await store.identity(run.run_id)
    config = parse_stored(
        TrainerConfig.model_validate, run.config, f"configuration of run {run.run_id}"
    )
    baseline = str(identity["skill"])
    best = (version or last.best).skill_hash
    if split is None:
        opened = summary is not None and summary.score("best", Split.test) is not None
        split = Split.test if opened else Split.val
    rollouts = await store.list_rollouts((baseline, best))
    items = (await store.items(str(identity["data"]))).items(split)
    find_key = _make_key_finder(config, identity)
    usage = await store.rollout_usage()
    errors = await store.unmeasured(run.run_id)
    by_item: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in rollouts:
        by_item.setdefault((rollout.item_id, rollout.skill_hash), []).append(rollout)

    def find_result(item: Item, skill_hash: str) -> DocumentResult:
        found = by_item.get((item.id, skill_hash), ())
        return _choose_rollouts(
            found, usage, errors, lambda trial: find_key(item, skill_hash, trial)
        )

    results = tuple(
        _compare(
            item,
            split,
            find_result(item, baseline),
            find_result(item, best),
            config.train.success_threshold,
        )
        for item in items
    )
    if not any(result.baseline.rollouts or result.best.rollouts for result in results):
        raise UsageError(
            f"run {run.run_id} has measured nothing on the {split.value} split; choose another "
            "split"
        )
    return results


def _ignore_key(item: Item, skill_hash: str, trial: int) -> str | None:
    return None


def _make_key_finder(
    config: TrainerConfig, identity: Mapping[str, JsonValue]
) -> Callable[[Item, str, int], str | None]:
    """Return a function for the key of a rollout of this run; it returns None if a critic
    grades.
    """
    target = identity.get("target")
    if config.environment.grader == "critic":
        return _ignore_key
    if target is None:
        from reflact.llm.client import identify_model
        from reflact.targets.chat import identify_chat_target

        model = identify_model(config.models.target)
        target = identify_chat_target(model, preamble=config.target.preamble, postamble="")

    def find(item: Item, skill_hash: str, trial: int) -> str | None:
        return build_rollout_key(
            item,
            skill_hash,
            target=str(target),
            environment=str(identity["environment"]),
            feedback=False,
            trial=trial,
        )

    return find


def _choose_rollouts(
    rollouts: Iterable[Rollout],
    usage: Mapping[str, Usage],
    errors: Mapping[str, str],
    find_key: Callable[[int], str | None],
) -> DocumentResult:
    """Return the trials that the reported score covers: fresh ones if there are any, otherwise the
    first.
    """
    chosen = {r.trial: r for r in rollouts if find_key(r.trial) in {None, r.key}}
    trials = sorted(trial for trial in chosen if trial >= FIRST_REPORT_TRIAL) or [0]
    found = tuple(chosen[trial] for trial in trials if trial in chosen)
    spent = [usage[rollout.key] for rollout in found if rollout.key in usage]
    keys = map(find_key, trials)
    return DocumentResult(
        rollouts=found,
        usage=sum(spent[1:], spent[0]) if spent else None,
        error=None
        if found
        else next((errors[key] for key in keys if key is not None and key in errors), None),
    )


def _compare(
    item: Item,
    split: Split,
    baseline: DocumentResult,
    best: DocumentResult,
    threshold: float | None,
) -> ItemResult:
    before = baseline.hard
    after = best.hard
    wrong = after is not None and after < (1 if threshold is None else threshold)
    category: ComparisonCategory | None = None
    if before is not None and after is not None:
        category = "persistent_failure" if wrong else "stable_success"
        category = "improved" if after > before else "regressed" if after < before else category
    return ItemResult(
        item_id=item.id,
        split=split,
        task_type=item.task_type,
        input=item.input,
        expected=item.reference,
        baseline=baseline,
        best=best,
        category=category,
        wrong=wrong,
    )
