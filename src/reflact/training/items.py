"""What the target answered to each item under the documents of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.jsonutil import parse_stored
from reflact.records import ComparisonCategory, DocumentResult, ItemResult
from reflact.stages.rollout import build_rollout_key
from reflact.training.rollouts import FIRST_REPORT_TRIAL
from reflact.types import Item, Rollout, Split

if TYPE_CHECKING:
    from reflact.store.runs import RunRow, SQLiteRunStore


class ItemAnswers(NamedTuple):
    """An item, and what the target answered to it under each of some documents."""

    item: Item
    results: tuple[DocumentResult, ...]


def read_config(run: RunRow) -> TrainerConfig:
    """Return the configuration of a run; StoreError if it is damaged."""
    what = f"configuration of run {run.run_id}"
    return parse_stored(TrainerConfig.model_validate, run.config, what)


async def read_items(
    store: SQLiteRunStore, run: RunRow, *, split: Split | None = None
) -> tuple[ItemResult, ...]:
    """Return the items of a split with their answers; None: see ``history.read_run``.

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
    if split is None:
        opened = summary is not None and summary.score("best", Split.test) is not None
        split = Split.test if opened else Split.val
    initial = str((await store.identity(run.run_id))["skill"])
    measured = await read_answers(store, run, split, (initial, last.best.skill_hash))
    threshold = read_config(run).train.success_threshold
    results = []
    for item, (baseline, best) in measured:
        results.append(_compare(item, split, baseline, best, threshold))
    return tuple(results)


async def read_answers(
    store: SQLiteRunStore,
    run: RunRow,
    split: Split,
    documents: Sequence[str],
    *,
    repeats: int | None = None,
) -> tuple[ItemAnswers, ...]:
    """Return the items of a split with their results under documents, which are named by hash.

    A result has the first ``repeats`` trials; None: those of the reported score, which are fresh
    ones if there are any, and otherwise the first.

    Raises:
        UsageError: Nothing is measured on the split.
        StoreError: The items are missing or damaged.
    """
    identity = await store.identity(run.run_id)
    config = read_config(run)
    usage = await store.rollout_usage()
    errors = await store.unmeasured(run.run_id)
    by_item: defaultdict[tuple[str, str], dict[int, Rollout]] = defaultdict(dict)
    target = _identify_target(config, identity)

    def make_key(item: Item, skill_hash: str, trial: int) -> str:
        return build_rollout_key(
            item,
            skill_hash,
            target=target,
            environment=str(identity["environment"]),
            feedback=False,
            trial=trial,
        )

    items = (await store.items(str(identity["data"]))).items(split)
    known = {item.id: item for item in items}
    for rollout in await store.list_rollouts(documents):
        item = known.get(rollout.item_id)
        if item is None:
            continue
        # A store may have rollouts of other runs. A critic's grades belong to no key that can be
        # told from the run's identity, so all of them count.
        is_own = rollout.key == make_key(item, rollout.skill_hash, rollout.trial)
        if is_own or config.environment.grader == "critic":
            by_item[item.id, rollout.skill_hash][rollout.trial] = rollout

    def find_result(item: Item, skill_hash: str) -> DocumentResult:
        trials = by_item[item.id, skill_hash]
        reported = sorted(trial for trial in trials if trial >= FIRST_REPORT_TRIAL) or [0]
        if repeats is not None:
            reported = list(range(repeats))
        rollouts = tuple(trials[trial] for trial in reported if trial in trials)
        spent = [usage[rollout.key] for rollout in rollouts if rollout.key in usage]
        return DocumentResult(
            rollouts=rollouts,
            usage=sum(spent[1:], spent[0]) if spent else None,
            error=None if rollouts else errors.get(make_key(item, skill_hash, 0)),
        )

    measured = []
    for item in items:
        results = tuple(find_result(item, skill_hash) for skill_hash in documents)
        measured.append(ItemAnswers(item, results))
    if not any(result.rollouts for _, results in measured for result in results):
        raise UsageError(
            f"run {run.run_id} has measured nothing on the {split.value} split; choose another "
            "split"
        )
    return tuple(measured)


def _identify_target(config: TrainerConfig, identity: Mapping[str, JsonValue]) -> str:
    """Return the identity of a run's target in the keys of its rollouts."""
    if "target" in identity:
        return str(identity["target"])
    from reflact.llm.client import identify_model
    from reflact.targets.chat import identify_chat_target

    model = identify_model(config.models.target)
    return identify_chat_target(model, preamble=config.target.preamble, postamble="")


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
