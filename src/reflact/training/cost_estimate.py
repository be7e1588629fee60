"""Estimates the calls and tokens of a run before any call.

The plan determines the counts of rollouts and calls. The rest are stated assumptions, until the mean consumption
of earlier calls of the same purpose is known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from reflact.config.training import TrainerConfig
from reflact.data import DataSet, count_steps_per_epoch, plan_epoch
from reflact.gate.ranked_decision import MAX_PASSES
from reflact.llm.pricing import (
    BYTES_PER_TOKEN,
    CostEstimate,
    EstimateRange,
    EstimateRow,
    estimate_tokens,
    exact_range,
)
from reflact.records import Spend
from reflact.search.race import plan_slices
from reflact.search.rewrite import CASE_TOKENS, DOCUMENTS
from reflact.types import Item, Split, canonical_json

CANDIDATES = 4
"""Candidates of a step, in estimates."""

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
        """Return the low, expected and high counts by role and purpose."""
        rollouts = self._count_rollouts()
        calls = {("target", "rollout"): rollouts, **self._optimizer_calls()}
        if self._config.uses_critic:
            calls["critic", "score"] = self._count_critic_calls(rollouts)
        rows = tuple(
            self._row(role, purpose, amount) for (role, purpose), amount in calls.items() if amount.high
        )
        known = sorted(purpose for _, purpose in self._spent)
        assumptions: tuple[str, ...] = (
            "likely: half of the rollouts fail, every step gives a candidate, no reply is re-asked",
            "a rollout is one call; in an environment with several turns it is one call per turn",
            f"mean consumption of earlier calls: {', '.join(known)}"
            if known
            else f"a token is {BYTES_PER_TOKEN:g} bytes of text, and a reply takes a quarter of its limit",
        )
        if self._own_proposer:
            assumptions += ("calls and rollouts of your own proposer are unknown and left out",)
        return RunCostEstimate(steps=self._left, rows=rows, assumptions=assumptions)

    def _count_rollouts(self) -> EstimateRange:
        sizes = [sum(len(batch) for batch in step) for step in self._plan_steps()]
        first_epoch = sum(
            sizes[: max(0, self._per_epoch - self._done)]
        )  # those of an unchanged skill are stored
        rolled = EstimateRange(low=first_epoch, expected=sum(sizes), high=sum(sizes))
        rolled += self._baseline() + self._final()
        rolled += self._decision() * exact_range(self._left)
        if not self._config.search.is_published:
            rolled += self._race() * exact_range(self._left)
        rolled += self._epoch_end() * exact_range(self._count_epoch_ends())
        return rolled + self._decision(expected=0)

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

    def _baseline(self) -> EstimateRange:
        if self._done:
            return EstimateRange()
        return exact_range(self._config.baseline_passes * len(self._data.val))

    def _decision(self, expected: float = 1.0) -> EstimateRange:
        """Return the rollouts of one gate decision on both sides; those of the current skill are mostly stored."""
        gate, n = self._config.gate, len(self._data.val)
        if not gate.enabled or gate.policy == "strict":
            return EstimateRange(expected=expected * n, high=4 * n)
        most = 2 * n * (gate.max_trials or MAX_PASSES)
        return EstimateRange(expected=expected * n * 1.5, high=most + n)

    def _race(self) -> EstimateRange:
        """Return the rollouts of a step's race before the gate's pass."""
        slices = plan_slices(len(self._data.val), math.inf)
        return EstimateRange(low=slices[0], expected=CANDIDATES * slices[0], high=2 * CANDIDATES * slices[-1])

    def _count_epoch_ends(self) -> int:
        """Return the number of remaining ends of epochs with a comparison."""
        if not (self._config.slow_update.enabled or self._config.meta_skill.enabled):
            return 0
        last, first = self._config.train.num_epochs, max(2, self._done // self._per_epoch + 1)
        return max(0, last - first + 1)

    def _epoch_end(self) -> EstimateRange:
        slow, n = self._config.slow_update, len(self._data.train)
        samples = min(slow.samples, n)
        most = n if slow.pair_policy != "mixed" else samples
        rolled = EstimateRange(low=0, expected=samples, high=2 * most)
        return rolled + self._decision() if slow.enabled and slow.gated else rolled

    def _final(self) -> EstimateRange:
        n_val, n_test = len(self._data.val), len(self._data.test)
        extra = int(self._config.test.placebo)
        trials = self._config.gate.report_trials if self._config.reports_fresh_trials else 1
        if not self._config.test.enabled:
            return EstimateRange(expected=n_val * extra, high=n_val * (3 + extra) * trials)
        val = EstimateRange(high=n_val * 3 * trials)
        return val + EstimateRange(low=n_test, expected=n_test * (2 + extra), high=n_test * (3 + extra))

    def _optimizer_calls(self) -> dict[tuple[str, str], EstimateRange]:
        """Return the optimizer's calls by purpose; the high count includes re-asks."""
        calls: defaultdict[str, EstimateRange] = defaultdict(EstimateRange)
        appendix, slow = self._config.appendix, self._config.slow_update
        sources = self._config.search.sources
        if "rewrite" in sources:
            likely = DOCUMENTS * self._left / len(sources)
            calls["write_document"] = EstimateRange(expected=likely, high=2 * DOCUMENTS * self._left)
        steps = self._plan_steps() if "edits" in sources and not self._own_proposer else []
        for step in steps[:: len(sources)]:
            failure, success = self._minibatches([len(batch) for batch in step])
            calls["analyst_failure"] += failure
            calls["analyst_success"] += success
            if appendix.enabled:
                calls["lapse_failure"] += failure
                calls["lapse_success"] += success
            for purpose, amount in self._decision_calls(failure, success).items():
                calls[purpose] += amount
        ends = self._count_epoch_ends()
        once = EstimateRange(low=ends * (slow.pair_policy == "mixed"), expected=ends, high=ends)
        if slow.enabled:
            calls["slow_update"] = once
        if self._config.meta_skill.enabled:
            calls["meta_skill"] = once
        if (
            self._config.models.is_optimizer_separate
            and self._config.replay.cassette is None
            and not self._done
        ):
            calls[PREFLIGHT] = exact_range(1)
        tries = EstimateRange(low=1, expected=1, high=1 + self._config.models.optimizer.reasks)
        return {("optimizer", purpose): amount * tries for purpose, amount in calls.items()}

    def _minibatches(self, sizes: Sequence[int]) -> tuple[EstimateRange, EstimateRange]:
        """Return the minibatches of failures and of successes in batches of these sizes."""
        minibatch = self._config.reflect.minibatch_size
        most = sum(math.ceil(size / minibatch) for size in sizes)
        if self._config.reflect.failure_only:
            return EstimateRange(expected=most, high=most), EstimateRange()
        half = EstimateRange(expected=sum(math.ceil(size / 2 / minibatch) for size in sizes), high=most)
        return half, half

    def _decision_calls(self, failure: EstimateRange, success: EstimateRange) -> dict[str, EstimateRange]:
        """Return the calls for merges, ranking, step size, rewrite and appendix of one step."""
        config = self._config
        draft = "draft_" if config.update.mode == "full_rewrite" else ""
        size, both = config.aggregate.merge_batch_size, float(success.high > 0)
        merges = EstimateRange(
            expected=_count_merges(failure.expected, size) + _count_merges(success.expected, size),
            high=_count_merges(failure.high, size) + _count_merges(success.high, size),
        )
        once = EstimateRange(expected=1, high=1)
        calls = {f"{draft}merge": merges, f"{draft}merge_final": EstimateRange(expected=both, high=both)}
        if draft:
            return calls
        if config.select.lr_control != "none":
            calls["ranking"] = EstimateRange(expected=failure.expected + success.expected > 1, high=1)
        if config.select.lr_control == "autonomous":
            calls["step_size"] = once
        if config.update.mode == "rewrite":
            calls["rewrite"] = once
        if config.appendix.enabled and config.appendix.consolidate_threshold is not None:
            calls["consolidate"] = EstimateRange(high=1)
        return calls

    def _count_critic_calls(self, rollouts: EstimateRange) -> EstimateRange:
        """Return the critic's calls: anchors, graded answers, and notes on failures it did not grade."""
        own, grades = self._config.critic, self._config.environment.grader == "critic"
        anchors = own.max_anchors if own.memory is not None and not self._done else 0
        scores = EstimateRange(expected=anchors, high=anchors)
        if grades:
            scores += rollouts.model_copy(update={"low": 0 if self._done else len(self._data.val)})
            scores += exact_range(self._count_null_answers())
        if own.annotate:
            dealt = sum(len(batch) for step in self._plan_steps() for batch in step)
            scores += EstimateRange(expected=0 if grades else dealt / 2, high=dealt)
        tries = EstimateRange(low=1, expected=1, high=1 + self._config.models.critic.reasks)
        return scores * tries * exact_range(own.n_samples)

    def _count_null_answers(self) -> int:
        """Return the null answers that a critic grades: the refusal, once for each item of the last split."""
        if not self._config.test.null_answers:
            return 0
        return len(self._data.test if self._config.test.enabled else self._data.val)

    def _row(self, role: str, purpose: str, calls: EstimateRange) -> EstimateRow:
        cap, usage = getattr(self._config.models, role).max_tokens, self._spent.get((role, purpose))
        given, written = estimate_tokens(self._bytes(role, purpose), cap=cap, usage=usage)
        return EstimateRow(
            role=role, purpose=purpose, calls=calls, input_tokens=calls * given, output_tokens=calls * written
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


def _count_merges(patches: float, size: int) -> float:
    """Return the merges of a tree over a number of patches; a group of one needs no merge."""
    nodes, merges = math.ceil(patches), 0
    while nodes > 1:
        groups = [min(size, nodes - start) for start in range(0, nodes, size)]
        merges += sum(group > 1 for group in groups)
        nodes = len(groups)
    return float(merges)


def _size(item: Item) -> int:
    return len((item.input if isinstance(item.input, str) else canonical_json(item.input)).encode())
