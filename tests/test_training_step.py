"""Gradient accumulation: batches that are rolled out and read apart, and merged into one step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from reflact.data import plan_epoch
from reflact.testing import ToyEnvironment
from reflact.types import Split
from toy_runs import run


async def test_a_step_takes_several_batches(tmp_path: Path) -> None:
    """Two batches of two make steps of four: all are rolled out, read apart and merged into one candidate."""
    done = await run(
        tmp_path,
        train={"batch_size": 2, "accumulation": 2},
        reflect={"minibatch_size": 1},
        select={"max_edits": 4, "min_edits": 4},
    )
    train = [i.id for i in ToyEnvironment(train=8, val=4, test=4).items(Split.train)]
    plan = plan_epoch(train, epoch=1, seed=42, batch_size=2, accumulation=2)
    assert len(done.records) == len(plan) == 2
    for record, batches in zip(done.records, plan, strict=True):
        assert record.item_ids == tuple(i for batch in batches for i in batch)
        for n, batch in enumerate(batches):
            read = [i for r in record.reports if r.batch == n for i in r.item_ids]
            assert sorted(read) == sorted(batch)
        assert record.rollout.n == 4
        assert record.n_failures == sum(r.source_type == "failure" for r in record.reports)
    first = done.records[0]
    types = {i.id: i.task_type for i in ToyEnvironment(train=8, val=4, test=4).items(Split.train)}
    assert len(first.merged.patch.edits) == len({types[i] for i in first.item_ids})
    assert {e.merge_level for e in first.merged.patch.edits} == {1}
    assert done.actions[0] == "accept_new_best"


async def test_an_epoch_deals_every_item_and_refills_the_last_step(tmp_path: Path) -> None:
    """Six items in steps of two batches of two: the fourth batch is dealt from a fresh shuffle."""
    environment = ToyEnvironment(train=6, val=4, test=4)
    done = await run(tmp_path, environment=environment, train={"batch_size": 2, "accumulation": 2})
    assert len(done.records) == 2
    dealt = Counter(i for record in done.records for i in record.item_ids)
    assert set(dealt) == {item.id for item in environment.items(Split.train)}
    assert sum(dealt.values()) == 8
