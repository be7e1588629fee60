"""What the target answered to each item under the initial and the best document of a run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.jsonutil import parse_stored
from reflact.records import ComparisonCategory, DocumentResult, ItemResult, SkillVersion
from reflact.stages.rollout import build_rollout_key
from reflact.training.rollouts import FIRST_REPORT_TRIAL, REPORT_TRIALS
from reflact.training.run import IDENTITIES_ADAPTER, IDENTITIES_LABEL
from reflact.types import Item, Split

if TYPE_CHECKING:
    from reflact.store.runs import RunRow, SQLiteRunStore


async def read_items(
    store: SQLiteRunStore,
    run: RunRow,
    *,
    split: Split | None = None,
    version: SkillVersion | None = None,
) -> tuple[ItemResult, ...]:
    """Return the items of a split with their answers; None: see ``history.read_run``.

    ``version`` is the best document; None: that of the latest commit, which may change while a run
    is under way. The trials are those of the reported score: fresh ones if there are any, otherwise
    the first.

    Raises:
        UsageError: Nothing is measured on the split.
        StoreError: The items are missing or damaged.
    """
    last = await store.last_commit(run.run_id)
    if last is None:
        raise UsageError(
            f"run {run.run_id} has not measured its initial document yet; start or resume it with "
            "reflact train"
        )
    if split is None:
        summary = await store.summary(run.run_id)
        opened = summary is not None and summary.score("best", Split.test) is not None
        split = Split.test if opened else Split.val
    what = f"configuration of run {run.run_id}"
    config = parse_stored(TrainerConfig.model_validate, run.config, what)
    identity = await store.identity(run.run_id)
    items = (await store.items(str(identity["data"]))).items(split)
    documents = (str(identity["skill"]), (version or last.best).skill_hash)
    logged = await store.decision_log(run.run_id).get(0, IDENTITIES_LABEL)
    target, environment = parse_stored(IDENTITIES_ADAPTER.validate_python, logged, IDENTITIES_LABEL)
    usage = await store.rollout_usage()
    errors = await store.unmeasured(run.run_id)
    # Fresh trials stand in place of the first one.
    trials = (0, *range(FIRST_REPORT_TRIAL, FIRST_REPORT_TRIAL + REPORT_TRIALS))
    keys: dict[tuple[str, str], list[str]] = {}
    for item in items:
        for skill_hash in documents:
            build_key = partial(
                build_rollout_key, item, skill_hash, target=target, environment=environment
            )
            keys[item.id, skill_hash] = [build_key(feedback=False, trial=n) for n in trials]
    stored = await store.find_rollouts([key for own in keys.values() for key in own])

    def find_result(item_id: str, skill_hash: str) -> DocumentResult:
        first, *fresh = keys[item_id, skill_hash]
        own = [key for key in fresh if key in stored] or [key for key in [first] if key in stored]
        spent = [usage[key] for key in own if key in usage]
        return DocumentResult(
            rollouts=tuple(stored[key] for key in own),
            usage=sum(spent[1:], spent[0]) if spent else None,
            error=None if own else errors.get(first),
        )

    results = []
    for item in items:
        baseline, best = (find_result(item.id, skill_hash) for skill_hash in documents)
        results.append(_compare(item, split, baseline, best, config.train.success_threshold))
    if not any(result.baseline.rollouts or result.best.rollouts for result in results):
        raise UsageError(
            f"run {run.run_id} has measured nothing on the {split.value} split; choose another "
            "split"
        )
    return tuple(results)


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
        if after != before:
            category = "improved" if after > before else "regressed"
        else:
            category = "persistent_failure" if wrong else "stable_success"
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
