"""Estimates the calls and tokens of a run before any call.

The plan determines the counts of rollouts and calls. The rest are stated assumptions, until the
mean consumption of earlier calls of the same purpose is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from reflact.config.training import TrainerConfig
from reflact.llm.pricing import (
    BYTES_PER_TOKEN,
    MESSAGE_TOKENS,
    UNCAPPED_REPLY_TOKENS,
    CostEstimate,
    EstimateRow,
    usd_of,
)
from reflact.records import Spend
from reflact.search.race import plan_slices
from reflact.search.rewrite import CASE_TOKENS, DOCUMENTS
from reflact.training.plan import RunPlan
from reflact.training.trouble import PREFLIGHT
from reflact.types import Item, Split, canonical_json

# Candidates of a step, in estimates.
CANDIDATES = 4

# The rollouts that a candidate takes on average, those of its step on train items included.
ROLLOUTS_PER_CANDIDATE = 8

# The passes of a candidate before the ranked gate decides, on average.
RANKED_PASSES = 1.5

# The size of the call that tests the optimizer's connection.
PREFLIGHT_BYTES = 70.0

# What a prompt shows beside its own text and the document, if it shows no trajectories.
OTHER_BYTES = 2000.0


class RunCostEstimate(CostEstimate):
    """The estimate for the remaining ``steps`` of a run."""

    steps: int


def estimate_run(
    plan: RunPlan, *, done: int = 0, skill: str | None = None, spent: Sequence[Spend] = ()
) -> RunCostEstimate:
    """Return the likely calls, tokens and money of a run's remaining steps, by role and purpose.

    Args:
        plan: The run.
        done: Number of committed steps.
        skill: The current document; None: the initial one.
        spent: Consumption of earlier calls, in this run or a similar one.
    """
    document = len((plan.initial_skill.text if skill is None else skill).encode())
    means = {(entry.role, entry.purpose): entry.usage for entry in spent if entry.usage.calls}
    steps = max(0, plan.steps_per_epoch * plan.config.train.num_epochs - done)
    rows = []
    for (role, purpose), calls in count_calls(plan, steps).items():
        model = getattr(plan.config.models, role)
        if (role, purpose) in means:
            usage = means[role, purpose]
            given = usage.input_tokens / usage.calls
            written = usage.output_tokens / usage.calls
        else:
            given = (
                _estimate_bytes(plan, role, purpose, document) / BYTES_PER_TOKEN + MESSAGE_TOKENS
            )
            written = (model.max_tokens or UNCAPPED_REPLY_TOKENS) / 4
        row = EstimateRow(
            role=role,
            purpose=purpose,
            calls=calls,
            input_tokens=calls * given,
            output_tokens=calls * written,
        )
        rows.append(row.with_price(partial(usd_of, config=model)))
    known = sorted(purpose for _, purpose in means)
    return RunCostEstimate(
        steps=steps, rows=tuple(rows), assumptions=_list_assumptions(plan, known)
    )


def count_calls(plan: RunPlan, steps: int) -> dict[tuple[str, str], float]:
    """Return the likely calls of a run's last steps, by role and purpose."""
    config = plan.config
    train = config.train
    n_val = len(plan.data.val)
    is_new = steps == plan.steps_per_epoch * train.num_epochs
    sources = config.search.sources
    has_ends = config.slow_update.enabled or config.meta_skill.enabled
    # The first epoch has nothing to compare.
    ends = min(train.num_epochs - 1, math.ceil(steps / plan.steps_per_epoch)) if has_ends else 0
    is_ranked = config.gate.enabled and config.gate.policy == "ranked"
    decision = (RANKED_PASSES if is_ranked else 1.0) * n_val

    batch = min(train.batch_size, len(plan.data.train))
    rolled = round(steps * len(plan.data.train) / plan.steps_per_epoch)
    looks = 0.0 if config.search.is_published else CANDIDATES * plan_slices(n_val, math.inf)[0]
    compared = min(config.slow_update.samples, len(plan.data.train))
    if config.slow_update.enabled and config.slow_update.gated:
        compared += round(decision)
    placebo = int(config.test.placebo)
    final = len(plan.data.test) * (2 + placebo) if config.test.enabled else n_val * placebo
    rollouts = rolled + steps * (decision + looks) + ends * compared + final
    rollouts += config.baseline_passes * n_val * is_new
    if train.max_rollouts is not None:
        rollouts = train.max_rollouts + final

    calls: dict[tuple[str, str], float] = {("target", "rollout"): rollouts}
    asked: Counter[str] = Counter()
    if "rewrite" in sources:
        asked["write_document"] = round(DOCUMENTS * steps / len(sources))
    if "edits" in sources and plan.proposer is None:
        for purpose, amount in _count_step_calls(config, batch).items():
            asked[purpose] += math.ceil(steps / len(sources)) * amount
    asked["slow_update"] = ends * config.slow_update.enabled
    asked["meta_skill"] = ends * config.meta_skill.enabled
    is_tested = config.models.is_optimizer_separate and config.replay.cassette is None
    asked[PREFLIGHT] = int(is_tested and is_new)
    calls |= {("optimizer", purpose): amount for purpose, amount in asked.items()}

    critic = config.critic
    scores = critic.max_anchors if critic.memory is not None and is_new else 0.0
    if config.environment.grader == "critic":
        # Of the null answers it grades the refusal, once for each item of the last split.
        refusals = len(plan.data.test if config.test.enabled else plan.data.val)
        scores += rollouts + refusals * config.test.null_answers
    elif critic.annotate:
        scores += rolled / 2
    if config.uses_critic:
        calls["critic", "score"] = scores * critic.n_samples
    return {key: amount for key, amount in calls.items() if amount}


def _count_step_calls(config: TrainerConfig, batch: int) -> Counter[str]:
    """Return the calls of one step of edits with batches of a size, half of whose rollouts fail."""
    if config.update.mode == "full_rewrite":
        return Counter(write_document=1)
    n = config.train.accumulation
    minibatch = config.reflect.minibatch_size
    share = 1 if config.reflect.failure_only else 2
    failure = n * math.ceil(batch / share / minibatch)
    success = 0 if config.reflect.failure_only else failure
    calls = Counter(analyst_failure=failure, analyst_success=success)
    if config.appendix.enabled:
        calls += Counter(lapse_failure=failure, lapse_success=success)
    # A tree over so many reports has so many nodes.
    reports = n * math.ceil(batch / minibatch)
    calls["merge"] = math.ceil((reports - 1) / (config.aggregate.merge_batch_size - 1))
    calls["merge_final"] = int(success > 0)
    calls["ranking"] = int(config.select.lr_control != "none" and failure + success > 1)
    calls["step_size"] = int(config.select.lr_control == "autonomous")
    calls["rewrite"] = int(config.update.mode == "rewrite")
    return calls


def _list_assumptions(plan: RunPlan, known: Sequence[str]) -> tuple[str, ...]:
    config = plan.config
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
    if config.train.max_rollouts is not None and not config.search.is_published:
        tried = config.train.max_rollouts - config.baseline_passes * len(plan.data.val)
        candidates = max(0, tried) // ROLLOUTS_PER_CANDIDATE
        assumptions.append(f"train.max_rollouts pays for about {candidates} candidates")
    if plan.proposer is not None:
        assumptions.append("calls and rollouts of your own proposer are unknown and left out")
    return tuple(assumptions)


def _estimate_bytes(plan: RunPlan, role: str, purpose: str, document: int) -> float:
    """Return the estimated bytes of a call's prompt."""
    sizes = {
        name: len(prompt.system + prompt.user) for name, prompt in plan.prompts.prompts.items()
    }
    item = fmean(_measure_item(item) for split in Split for item in plan.data.items(split))
    if role == "target":
        return document + item
    if role == "critic":
        critic = plan.config.critic
        examples = 0 if critic.memory is None else critic.example_tokens
        return sizes["critic"] + 3 * item + examples * BYTES_PER_TOKEN
    if purpose == PREFLIGHT:
        return PREFLIGHT_BYTES
    reflect = plan.config.reflect
    shown = OTHER_BYTES
    if purpose.startswith(("analyst", "lapse")):
        shown = min(item * reflect.minibatch_size, BYTES_PER_TOKEN * reflect.trajectory_tokens)
    elif purpose == "write_document":
        shown = min(item * len(plan.data.train), 2 * CASE_TOKENS * BYTES_PER_TOKEN)
    return sizes.get(purpose, max(sizes.values(), default=0)) + document + shown


def _measure_item(item: Item) -> int:
    text = item.input if isinstance(item.input, str) else canonical_json(item.input)
    return len(text.encode())
