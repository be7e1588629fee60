"""Estimates the calls and tokens of a run before any call.

The plan determines the counts of rollouts and calls. The rest are stated assumptions, until the mean consumption
of earlier calls of the same purpose is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from reflact.config.training import TrainerConfig
from reflact.data import DataSet, count_steps_per_epoch, plan_epoch
from reflact.llm.pricing import (
    BYTES_PER_TOKEN,
    MESSAGE_TOKENS,
    UNCAPPED_REPLY_TOKENS,
    CostEstimate,
    EstimateRow,
)
from reflact.records import Spend
from reflact.search.race import plan_slices
from reflact.search.rewrite import CASE_TOKENS, DOCUMENTS
from reflact.types import Item, Split, canonical_json

CANDIDATES = 4
"""Candidates of a step, in estimates."""

ROLLOUTS_PER_CANDIDATE = 8
"""The rollouts that a candidate takes on average, those of its step on train items included."""

PREFLIGHT, PREFLIGHT_BYTES = "preflight", 70.0
"""The call that tests an optimizer with its own connection before the baseline, and its size."""


class RunCostEstimate(CostEstimate):
    """The estimate for the remaining ``steps`` of a run."""

    steps: int


class RunCostEstimator:
    """Estimates the remaining steps of a run.

    Args:
        config: The run's configuration.
        data: Its items.
        prompts: The size of each prompt's own text by name, in bytes.
        skill: The current document.
        done: Number of committed steps.
        spent: Consumption of earlier calls, in this run or a similar one.
        own_proposer: Whether the candidates come from an object of the caller, whose calls are unknown.
    """

    def __init__(
        self,
        config: TrainerConfig,
        data: DataSet,
        *,
        prompts: Mapping[str, int],
        skill: str,
        done: int,
        spent: Sequence[Spend],
        own_proposer: bool = False,
    ) -> None:
        self._own_proposer = own_proposer
        self._config = config
        self._data = data
        self._prompts = prompts
        self._skill = len(skill.encode())
        self._done = done
        self._spent = {(s.role, s.purpose): s.usage for s in spent if s.usage.calls}
        train = config.train
        self._per_epoch = count_steps_per_epoch(len(data.train), train.batch_size, train.accumulation)
        self._total = self._per_epoch * train.num_epochs
        self._left = max(0, self._total - done)

    def estimate(self) -> RunCostEstimate:
        """Return the likely calls and tokens by role and purpose."""
        rollouts = self._count_rollouts()
        calls = {("target", "rollout"): rollouts, **self._count_optimizer_calls()}
        if self._config.uses_critic:
            calls["critic", "score"] = self._count_critic_calls(rollouts)
        rows = (self._build_row(role, purpose, amount) for (role, purpose), amount in calls.items() if amount)
        known = sorted(purpose for _, purpose in self._spent)
        assumptions: tuple[str, ...] = (
            "all planned steps are taken; a document that solves all validation items ends a run earlier",
            "half of the rollouts fail, every step gives a candidate, no reply is re-asked",
            "a rollout is one call; in an environment with several turns it is one call per turn",
            f"mean consumption of earlier calls: {', '.join(known)}"
            if known
            else f"a token is {BYTES_PER_TOKEN:g} bytes of text, and a reply takes a quarter of its limit",
        )
        if self._config.train.max_rollouts is not None and not self._config.search.is_published:
            tried = self._config.train.max_rollouts - self._config.baseline_passes * len(self._data.val)
            assumptions += (
                f"train.max_rollouts pays for about {max(0, tried) // ROLLOUTS_PER_CANDIDATE} candidates",
            )
        if self._own_proposer:
            assumptions += ("calls and rollouts of your own proposer are unknown and left out",)
        return RunCostEstimate(steps=self._left, rows=tuple(rows), assumptions=assumptions)

    def _count_rollouts(self) -> float:
        most = self._config.train.max_rollouts
        if most is not None:
            return most + self._count_final()
        rolled = sum(len(batch) for step in self._plan_steps() for batch in step)
        decided = self._left * self._count_decision()
        if not self._config.search.is_published:
            decided += self._left * CANDIDATES * plan_slices(len(self._data.val), math.inf)[0]
        baseline = 0 if self._done else self._config.baseline_passes * len(self._data.val)
        compared = self._count_epoch_ends() * self._count_epoch_end()
        return rolled + decided + baseline + compared + self._count_final()

    def _plan_steps(self) -> list[tuple[tuple[str, ...], ...]]:
        train, ids = self._config.train, [item.id for item in self._data.train]
        steps = [
            step
            for epoch in range(1, train.num_epochs + 1)
            for step in plan_epoch(
                ids,
                epoch=epoch,
                seed=self._config.seed,
                batch_size=train.batch_size,
                accumulation=train.accumulation,
            )
        ]
        return steps[self._done :]

    def _count_decision(self) -> float:
        """Return the rollouts of one gate decision; those of the current skill are mostly stored."""
        gate = self._config.gate
        repeats = 1.0 if not gate.enabled or gate.policy == "strict" else 1.5
        return repeats * len(self._data.val)

    def _count_epoch_ends(self) -> int:
        """Return the number of remaining ends of epochs with a comparison."""
        if not (self._config.slow_update.enabled or self._config.meta_skill.enabled):
            return 0
        last, first = self._config.train.num_epochs, max(2, self._done // self._per_epoch + 1)
        return max(0, last - first + 1)

    def _count_epoch_end(self) -> float:
        """Return the rollouts of one end of an epoch with a comparison."""
        slow = self._config.slow_update
        samples = min(slow.samples, len(self._data.train))
        return samples + self._count_decision() if slow.enabled and slow.gated else samples

    def _count_final(self) -> int:
        extra = int(self._config.test.placebo)
        if not self._config.test.enabled:
            return len(self._data.val) * extra
        return len(self._data.test) * (2 + extra)

    def _count_optimizer_calls(self) -> dict[tuple[str, str], float]:
        """Return the optimizer's calls by purpose."""
        calls: Counter[str] = Counter()
        sources = self._config.search.sources
        if "rewrite" in sources:
            calls["write_document"] = round(DOCUMENTS * self._left / len(sources))
        steps = self._plan_steps() if "edits" in sources and not self._own_proposer else []
        for step in steps[:: len(sources)]:
            calls += self._count_step_calls([len(batch) for batch in step])
        ends = self._count_epoch_ends()
        calls["slow_update"] = ends * self._config.slow_update.enabled
        calls["meta_skill"] = ends * self._config.meta_skill.enabled
        is_replayed = self._config.replay.cassette is not None
        if self._config.models.is_optimizer_separate and not is_replayed and not self._done:
            calls[PREFLIGHT] = 1
        return {("optimizer", purpose): amount for purpose, amount in calls.items()}

    def _count_step_calls(self, sizes: Sequence[int]) -> Counter[str]:
        """Return the calls of one step of edits with batches of these sizes."""
        config = self._config
        if config.update.mode == "full_rewrite":
            return Counter(write_document=1)
        minibatch = config.reflect.minibatch_size
        share = 1 if config.reflect.failure_only else 2
        failure = sum(math.ceil(size / share / minibatch) for size in sizes)
        success = 0 if config.reflect.failure_only else failure
        calls = Counter(analyst_failure=failure, analyst_success=success)
        if config.appendix.enabled:
            calls += Counter(lapse_failure=failure, lapse_success=success)
        reports = sum(math.ceil(size / minibatch) for size in sizes)
        calls["merge"] = _count_merges(reports, config.aggregate.merge_batch_size)
        calls["merge_final"] = int(success > 0)
        calls["ranking"] = int(config.select.lr_control != "none" and failure + success > 1)
        calls["step_size"] = int(config.select.lr_control == "autonomous")
        calls["rewrite"] = int(config.update.mode == "rewrite")
        return calls

    def _count_critic_calls(self, rollouts: float) -> float:
        """Return the critic's calls: anchors, graded answers, and notes on failures that it did not grade."""
        own, grades = self._config.critic, self._config.environment.grader == "critic"
        scores: float = own.max_anchors if own.memory is not None and not self._done else 0
        if grades:
            scores += rollouts + self._count_null_answers()
        elif own.annotate:
            scores += sum(len(batch) for step in self._plan_steps() for batch in step) / 2
        return scores * own.n_samples

    def _count_null_answers(self) -> int:
        """Return the null answers that a critic grades: the refusal, once for each item of the last split."""
        if not self._config.test.null_answers:
            return 0
        return len(self._data.test if self._config.test.enabled else self._data.val)

    def _build_row(self, role: str, purpose: str, calls: float) -> EstimateRow:
        usage = self._spent.get((role, purpose))
        if usage is not None:
            given, written = usage.input_tokens / usage.calls, usage.output_tokens / usage.calls
        else:
            given = self._bytes(role, purpose) / BYTES_PER_TOKEN + MESSAGE_TOKENS
            cap = getattr(self._config.models, role).max_tokens
            written = (cap or UNCAPPED_REPLY_TOKENS) / 4
        return EstimateRow(
            role=role,
            purpose=purpose,
            calls=calls,
            input_tokens=calls * given,
            output_tokens=calls * written,
        )

    def _bytes(self, role: str, purpose: str) -> float:
        """Return the estimated bytes of a call's prompt."""
        item = fmean(_size(item) for split in Split for item in self._data.items(split))
        if role == "target":
            return self._skill + item
        if role == "critic":
            examples = 0 if self._config.critic.memory is None else self._config.critic.example_tokens
            return self._prompts["critic"] + 3 * item + examples * BYTES_PER_TOKEN
        if purpose == PREFLIGHT:
            return PREFLIGHT_BYTES
        own = self._prompts.get(purpose, max(self._prompts.values(), default=0))
        reflect = self._config.reflect
        size, most = fmean(map(_size, self._data.train)), 3 * reflect.trajectory_tokens
        if purpose.startswith(("analyst", "lapse")):
            shown = size * reflect.minibatch_size
        elif purpose == "write_document":
            shown, most = size * len(self._data.train), int(2 * CASE_TOKENS * BYTES_PER_TOKEN)
        else:
            shown = 2000.0
        return own + self._skill + min(shown, most)


def _count_merges(patches: int, size: int) -> int:
    """Return the merges of a tree over a number of patches; a group of one needs no merge."""
    nodes = patches
    merges = 0
    while nodes > 1:
        groups = [min(size, nodes - start) for start in range(0, nodes, size)]
        merges += sum(group > 1 for group in groups)
        nodes = len(groups)
    return merges


def _size(item: Item) -> int:
    return len((item.input if isinstance(item.input, str) else canonical_json(item.input)).encode())
