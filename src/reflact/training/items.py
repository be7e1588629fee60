"""What the target answered to each item under the documents of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from reflact.config.training import TrainerConfig
from reflact.errors import UsageError
from reflact.jsonutil import parse_stored
from reflact.records import ComparisonCategory, DocumentResult
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
