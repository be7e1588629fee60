"""What the target answered to each item under the documents of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.jsonutil import parse_stored
from reflact.records import ComparisonCategory, DocumentResult
from reflact.stages.rollout import build_rollout_key
from reflact.training.rollouts import FIRST_REPORT_TRIAL, REPORT_TRIALS
from reflact.training.run import IDENTITIES_ADAPTER, IDENTITIES_LABEL
from reflact.types import Item, Split

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


def find_threshold(config: TrainerConfig) -> float:
    """Return the least score of a solved item, 0..1."""
    threshold = config.train.success_threshold
    return 1.0 if threshold is None else threshold


async def choose_split(store: SQLiteRunStore, run: RunRow) -> Split:
    """Return the split of a run's last scores: the test split if it was opened."""
    summary = await store.summary(run.run_id)
    opened = summary is not None and summary.score("best", Split.test) is not None
    return Split.test if opened else Split.val


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
    nothing = UsageError(
        f"run {run.run_id} has measured nothing on the {split.value} split; choose another split"
    )
    identity = await store.identity(run.run_id)
    logged = await store.decision_log(run.run_id).get(0, IDENTITIES_LABEL)
    if logged is None:
        raise nothing
    target, environment = parse_stored(IDENTITIES_ADAPTER.validate_python, logged, IDENTITIES_LABEL)
    items = (await store.items(str(identity["data"]))).items(split)
    usage = await store.rollout_usage()
    errors = await store.unmeasured(run.run_id)
    # Fresh trials stand in place of the first one.
    trials = (0, *range(FIRST_REPORT_TRIAL, FIRST_REPORT_TRIAL + REPORT_TRIALS))
    if repeats is not None:
        trials = tuple(range(repeats))
    keys: dict[tuple[str, str], list[str]] = {}
    for item in items:
        for skill_hash in documents:
            build_key = partial(
                build_rollout_key, item, skill_hash, target=target, environment=environment
            )
            keys[item.id, skill_hash] = [build_key(feedback=False, trial=n) for n in trials]
    stored = await store.find_rollouts([key for own in keys.values() for key in own])

    def find_result(item: Item, skill_hash: str) -> DocumentResult:
        first, *fresh = own = keys[item.id, skill_hash]
        if repeats is None:
            own = fresh if any(key in stored for key in fresh) else [first]
        own = [key for key in own if key in stored]
        spent = [usage[key] for key in own if key in usage]
        return DocumentResult(
            rollouts=tuple(stored[key] for key in own),
            usage=sum(spent[1:], spent[0]) if spent else None,
            error=None if own else errors.get(first),
        )

    measured = []
    for item in items:
        results = tuple(find_result(item, skill_hash) for skill_hash in documents)
        measured.append(ItemAnswers(item, results))
    if not any(result.rollouts for _, results in measured for result in results):
        raise nothing
    return tuple(measured)


def categorize(
    before: DocumentResult, after: DocumentResult, solved_from: float
) -> ComparisonCategory | None:
    """Return how an item's score changed between two documents; None unless both are measured.

    ``solved_from`` is the least score of a solved item, 0..1.
    """
    if before.hard is None or after.hard is None:
        return None
    if after.hard != before.hard:
        return "improved" if after.hard > before.hard else "regressed"
    return "stable_success" if after.hard >= solved_from else "persistent_failure"
