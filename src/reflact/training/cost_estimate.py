"""Estimates the calls and tokens of a run before any call.

The plan determines the counts of rollouts and calls. The rest are stated assumptions, until the
mean consumption of a role's earlier calls is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from reflact.config.training import TrainerConfig
from reflact.environments.rubric import read_rubric
from reflact.llm.budget import COUNTED_LIMITS
from reflact.llm.pricing import (
    BYTES_PER_TOKEN,
    MESSAGE_TOKENS,
    UNCAPPED_REPLY_TOKENS,
    CostEstimate,
    EstimateRow,
    usd_of,
    worst_case,
)
from reflact.records import Spend, Usage
from reflact.search.race import plan_slices
from reflact.search.rewrite import CASE_TOKENS, DOCUMENTS
from reflact.training.plan import RunPlan
from reflact.types import FrozenModel, Item, Split, canonical_json

# Candidates of a step, in estimates.
CANDIDATES = 4

# The rollouts that a candidate takes on average, those of its step on train items included.
ROLLOUTS_PER_CANDIDATE = 8

# The passes of a candidate before the ranked gate decides, on average.
RANKED_PASSES = 1.5

# What a role's calls are for, in words.
PURPOSES = {"target": "rollout", "optimizer": "steps", "critic": "score"}


class RunCostEstimate(CostEstimate):
    """The estimate for the remaining ``steps`` of a run."""

    steps: int

    def sum_limited(self, key: str) -> float:
        """Return what a limit of a budget counts: calls, tokens or dollars."""
        if key == "max_usd":
            return self.usd or 0.0
        if key == "max_calls":
            return math.fsum(row.calls for row in self.rows)
        return math.fsum(row.input_tokens + row.output_tokens for row in self.rows)


class BudgetForecast(FrozenModel):
    """What the tightest limit of a budget buys: ``steps`` with their ``candidates``.

    ``passes_first_step`` is False if the run will stop before its next step ends.
    """

    key: str
    steps: int
    candidates: int
    passes_first_step: bool


# Estimates the remaining steps of a run, by the arguments of ``estimate_run``.
Guess = Callable[..., RunCostEstimate]


def forecast_budget(
    plan: RunPlan, guess: Guess, *, done: int, spent: Sequence[Spend]
) -> BudgetForecast | None:
    """Return what the budget buys of the remaining steps; None if nothing limits the calls.

    The first call of a role needs room for its worst case, since nothing is known of its answers.
    """
    config = plan.config
    whole = guess(done=done)
    start = guess(done=done, steps=0, is_tested=False)
    rest = guess(done=done, steps=0)
    is_known = {entry.role for entry in spent if entry.usage.calls}
    forecast: BudgetForecast | None = None
    for key in COUNTED_LIMITS:
        limit = getattr(config.budget, key)
        if limit is None:
            continue
        used = sum((entry.usage for entry in spent), Usage())
        counts = {"max_calls": used.calls, "max_usd": used.usd or 0.0}
        left = limit - counts.get(key, used.input_tokens + used.output_tokens)
        step = guess(done=done, steps=1, is_tested=False).sum_limited(key) - start.sum_limited(key)
        steps = whole.steps
        if whole.sum_limited(key) > left and step > 0:
            steps = max(0, min(steps, int((left - rest.sum_limited(key)) / step)))
        first = 0.0
        for row in whole.rows:
            if row.role not in is_known:
                first = max(first, _bound_call(plan, row, key))
        passes = start.sum_limited(key) + max(step, first) <= left
        if forecast is None or (passes, steps) < (forecast.passes_first_step, forecast.steps):
            tried = CANDIDATES if not config.search.is_published else 1
            forecast = BudgetForecast(
                key=key, steps=steps, candidates=tried * steps, passes_first_step=passes
            )
    return forecast


def _bound_call(plan: RunPlan, row: EstimateRow, key: str) -> float:
    """Return what a budget reserves for the first call of a role."""
    model = getattr(plan.config.models, row.role)
    size = math.ceil(row.input_tokens / row.calls * BYTES_PER_TOKEN)
    worst = worst_case(size, model.max_tokens, model)
    counts = {"max_calls": 1.0, "max_usd": worst.usd or 0.0}
    return counts.get(key, float(worst.input_tokens + worst.output_tokens))


def estimate_run(
    plan: RunPlan,
    *,
    done: int = 0,
    steps: int | None = None,
    is_tested: bool = True,
    skill: str | None = None,
    spent: Sequence[Spend] = (),
    rollout_calls: float = 1.0,
) -> RunCostEstimate:
    """Return the likely calls, tokens and money of a run's next steps, by role.

    Args:
        plan: The run.
        done: Number of committed steps.
        steps: The steps to take; None: all that remain.
        is_tested: Whether the run's end, with its final test, is included.
        skill: The current document; None: the initial one.
        spent: Consumption of earlier calls, in this run or a similar one.
        rollout_calls: The target's calls in a rollout.
    """
    document = len((plan.initial_skill.text if skill is None else skill).encode())
    if steps is None:
        steps = max(0, plan.steps_per_epoch * plan.config.train.num_epochs - done)
    rows = []
    known = []
    counts = count_calls(plan, steps, is_new=not done, is_tested=is_tested)
    for role, count in counts.items():
        calls = count * rollout_calls if role == "target" else count
        model = getattr(plan.config.models, role)
        used = sum((entry.usage for entry in spent if entry.role == role), Usage())
        given = _estimate_bytes(plan, role, document) / BYTES_PER_TOKEN + MESSAGE_TOKENS
        written = (model.max_tokens or UNCAPPED_REPLY_TOKENS) / 4
        if used.calls:
            known.append(role)
            given = used.input_tokens / used.calls
            written = used.output_tokens / used.calls
        row = EstimateRow(
            role=role,
            purpose=PURPOSES[role],
            calls=calls,
            input_tokens=calls * given,
            output_tokens=calls * written,
        )
        rows.append(row.with_price(partial(usd_of, config=model)))
    assumptions = _list_assumptions(plan, known, rollout_calls)
    return RunCostEstimate(steps=steps, rows=tuple(rows), assumptions=assumptions)


def count_calls(
    plan: RunPlan, steps: int, *, is_new: bool, is_tested: bool = True
) -> dict[str, float]:
    """Return the likely rollouts and calls of a run's steps by role, with its first measurement if
    it is new, and with its end if that is included.
    """
    config = plan.config
    n_train = len(plan.data.train)
    n_val = len(plan.data.val)
    is_ranked = config.gate.enabled and config.gate.policy == "ranked"
    decision = (RANKED_PASSES if is_ranked else 1.0) * n_val
    if not config.search.is_published:
        decision += CANDIDATES * plan_slices(n_val, math.inf)[0]
    slow = config.slow_update
    # The first epoch has nothing to compare.
    ends = min(config.train.num_epochs - 1, math.ceil(steps / plan.steps_per_epoch))
    compared = min(slow.samples, n_train) + (decision if slow.enabled and slow.gated else 0)
    has_ends = slow.enabled or config.meta_skill.enabled

    placebo = int(config.test.placebo)
    final = len(plan.data.test) * (2 + placebo) if config.test.enabled else n_val * placebo
    rolled = round(steps * n_train / plan.steps_per_epoch)
    rollouts = rolled + steps * decision + ends * compared * has_ends
    rollouts += config.baseline_passes * n_val * is_new
    is_whole = steps == plan.steps_per_epoch * config.train.num_epochs
    if config.train.max_rollouts is not None and is_whole:
        rollouts = config.train.max_rollouts
    rollouts += final * is_tested

    sources = config.search.sources
    asked = ends * (slow.enabled + config.meta_skill.enabled)
    if "rewrite" in sources:
        asked += round(DOCUMENTS * steps / len(sources))
    if "edits" in sources and plan.proposer is None:
        asked += math.ceil(steps / len(sources)) * _count_step_calls(plan)

    calls = {"target": rollouts, "optimizer": asked}
    if config.environment.grader == "rubric":
        calls["critic"] = rollouts * _count_sentences(plan) * config.environment.rubric_votes
    if config.uses_progress:
        graded = rollouts if config.environment.grader == "critic" else rolled / 2
        anchors = config.critic.max_anchors if config.critic.memory is not None and is_new else 0
        scored = (graded + anchors) * config.critic.n_samples
        calls["critic"] = calls.get("critic", 0.0) + scored
    return {role: amount for role, amount in calls.items() if amount}


def _count_sentences(plan: RunPlan) -> float:
    """Return the mean number of sentences that a judge reads of an answer."""
    items = [item for split in Split for item in plan.data.items(split)]
    return fmean(len(read_rubric(item.reference).sentences) for item in items)


def _count_step_calls(plan: RunPlan) -> int:
    """Return the optimizer's calls in a step of edits, half of whose rollouts fail."""
    config = plan.config
    if config.update.mode == "full_rewrite":
        return 1
    batch = min(config.train.batch_size, len(plan.data.train))
    minibatch = config.reflect.minibatch_size
    sides = 1 if config.reflect.failure_only else 2
    reports = config.train.accumulation * sides * math.ceil(batch / sides / minibatch)
    # A tree over so many reports has so many nodes, and one more joins its two sides.
    merges = math.ceil((reports - 1) / (config.aggregate.merge_batch_size - 1)) + (sides > 1)
    ranking = config.select.lr_control != "none" and reports > 1
    step_size = config.select.lr_control == "autonomous"
    rewrite = config.update.mode == "rewrite"
    analyses = reports * (1 + config.appendix.enabled)
    return analyses + merges + ranking + step_size + rewrite


def _list_assumptions(plan: RunPlan, known: Sequence[str], rollout_calls: float) -> tuple[str, ...]:
    config: TrainerConfig = plan.config
    consumption = (
        f"a token is {BYTES_PER_TOKEN:g} bytes of text, and a reply takes a quarter of its limit"
    )
    if known:
        consumption = f"mean consumption of earlier calls: {', '.join(known)}"
    assumptions = [
        "all planned steps are taken; a document that solves all validation items ends a run "
        "earlier",
        "half of the rollouts fail, every step gives a candidate, no reply is re-asked",
        "a rollout is one call; in an environment with several turns it is one call per turn",
        consumption,
    ]
    if rollout_calls > 1:
        assumptions[2] = f"a rollout is {rollout_calls:g} calls of the target, as in the check"
    if config.train.max_rollouts is not None and not config.search.is_published:
        tried = config.train.max_rollouts - config.baseline_passes * len(plan.data.val)
        candidates = max(0, tried) // ROLLOUTS_PER_CANDIDATE
        assumptions.append(f"train.max_rollouts pays for about {candidates} candidates")
    if plan.proposer is not None:
        assumptions.append("calls and rollouts of your own proposer are unknown and left out")
    return tuple(assumptions)


def _estimate_bytes(plan: RunPlan, role: str, document: int) -> float:
    """Return the estimated bytes of the prompt of a role's call."""
    item = fmean(_measure_item(item) for split in Split for item in plan.data.items(split))
    if role == "target":
        return document + item
    prompts = plan.prompts.prompts
    if role == "critic":
        critic = plan.config.critic
        examples = 0 if critic.memory is None else critic.example_tokens
        prompt = prompts["critic" if plan.config.uses_progress else "rubric"]
        return len(prompt.system + prompt.user) + 3 * item + examples * BYTES_PER_TOKEN
    instructions = fmean(len(prompt.system + prompt.user) for prompt in prompts.values())
    cases = min(item * plan.config.train.batch_size, 2 * CASE_TOKENS * BYTES_PER_TOKEN)
    return instructions + document + cases


def _measure_item(item: Item) -> int:
    text = item.input if isinstance(item.input, str) else canonical_json(item.input)
    return len(text.encode())
