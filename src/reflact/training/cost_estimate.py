"""Estimates the calls and tokens of a run before any call.

The plan determines the counts of rollouts and calls. The rest are stated assumptions, until the mean consumption
of earlier calls of the same purpose is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

from reflact.config.training import TrainerConfig
from reflact.data import plan_epoch
from reflact.llm.pricing import (
    BYTES_PER_TOKEN,
    MESSAGE_TOKENS,
    UNCAPPED_REPLY_TOKENS,
    CostEstimate,
    EstimateRow,
    usd_of,
)
from reflact.records import Spend, Usage
from reflact.search.race import plan_slices
from reflact.search.rewrite import CASE_TOKENS, DOCUMENTS
from reflact.training.plan import RunPlan
from reflact.training.trouble import PREFLIGHT
from reflact.types import Item, Split, canonical_json

CANDIDATES = 4
"""Candidates of a step, in estimates."""

ROLLOUTS_PER_CANDIDATE = 8
"""The rollouts that a candidate takes on average, those of its step on train items included."""

RANKED_PASSES = 1.5
"""The passes of a candidate before the ranked gate decides, on average."""

PREFLIGHT_BYTES = 70.0
"""The size of the call that tests the optimizer's connection."""

OTHER_BYTES = 2000
"""What a prompt shows beside its own text and the document, if it shows no trajectories."""


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
    config = plan.config
    steps = _plan_steps(plan)[done:]
    rollouts = _count_rollouts(plan, steps, done)
    calls = {("target", "rollout"): rollouts}
    for purpose, amount in _count_optimizer_calls(plan, steps, done).items():
        calls["optimizer", purpose] = amount
    if config.uses_critic:
        calls["critic", "score"] = _count_critic_calls(plan, steps, done, rollouts)

    means = {(entry.role, entry.purpose): entry.usage for entry in spent if entry.usage.calls}
    document = len((plan.initial_skill.text if skill is None else skill).encode())
    rows = []
    for (role, purpose), amount in calls.items():
        if amount:
            usage = means.get((role, purpose))
            row = _build_row(plan, role, purpose, amount, usage=usage, document=document)
            price = partial(usd_of, config=getattr(config.models, role))
            rows.append(row.with_price(price))
    known = sorted(purpose for _, purpose in means)
    return RunCostEstimate(steps=len(steps), rows=tuple(rows), assumptions=_list_assumptions(plan, known))


def _plan_steps(plan: RunPlan) -> list[tuple[tuple[str, ...], ...]]:
    """Return the batches of all planned steps, by the ids of their items."""
    train = plan.config.train
    ids = [item.id for item in plan.data.train]
    steps: list[tuple[tuple[str, ...], ...]] = []
    for epoch in range(1, train.num_epochs + 1):
        steps += plan_epoch(
            ids,
            epoch=epoch,
            seed=plan.config.seed,
            batch_size=train.batch_size,
            accumulation=train.accumulation,
        )
    return steps


def _list_assumptions(plan: RunPlan, known: Sequence[str]) -> tuple[str, ...]:
    config = plan.config
    consumption = f"a token is {BYTES_PER_TOKEN:g} bytes of text, and a reply takes a quarter of its limit"
    if known:
        consumption = f"mean consumption of earlier calls: {', '.join(known)}"
    assumptions = [
        "all planned steps are taken; a document that solves all validation items ends a run earlier",
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


def _count_rollouts(plan: RunPlan, steps: Sequence[Sequence[Sequence[str]]], done: int) -> float:
    config = plan.config
    n = len(plan.data.val)
    extra = int(config.test.placebo)
    final = len(plan.data.test) * (2 + extra) if config.test.enabled else n * extra
    if config.train.max_rollouts is not None:
        return config.train.max_rollouts + final
    rolled = sum(len(batch) for step in steps for batch in step)
    decided = len(steps) * _count_decision(plan)
    if not config.search.is_published:
        decided += len(steps) * CANDIDATES * plan_slices(n, math.inf)[0]
    baseline = 0 if done else config.baseline_passes * n
    slow = config.slow_update
    compared = float(min(slow.samples, len(plan.data.train)))
    if slow.enabled and slow.gated:
        compared += _count_decision(plan)
    return rolled + decided + baseline + _count_epoch_ends(plan, done) * compared + final


def _count_decision(plan: RunPlan) -> float:
    """Return the rollouts of one gate decision; those of the current skill are mostly stored."""
    gate = plan.config.gate
    is_ranked = gate.enabled and gate.policy == "ranked"
    return (RANKED_PASSES if is_ranked else 1.0) * len(plan.data.val)


def _count_epoch_ends(plan: RunPlan, done: int) -> int:
    """Return the number of remaining ends of epochs with a comparison; the first epoch has none."""
    if not (plan.config.slow_update.enabled or plan.config.meta_skill.enabled):
        return 0
    first = max(2, done // plan.steps_per_epoch + 1)
    return max(0, plan.config.train.num_epochs - first + 1)


def _count_optimizer_calls(
    plan: RunPlan, steps: Sequence[Sequence[Sequence[str]]], done: int
) -> Mapping[str, float]:
    """Return the optimizer's calls by purpose."""
    config = plan.config
    sources = config.search.sources
    calls: Counter[str] = Counter()
    if "rewrite" in sources:
        calls["write_document"] = round(DOCUMENTS * len(steps) / len(sources))
    if "edits" in sources and plan.proposer is None:
        for step in steps[:: len(sources)]:
            calls += _count_step_calls(config, [len(batch) for batch in step])
    ends = _count_epoch_ends(plan, done)
    calls["slow_update"] = ends * config.slow_update.enabled
    calls["meta_skill"] = ends * config.meta_skill.enabled
    is_replayed = config.replay.cassette is not None
    calls[PREFLIGHT] = int(config.models.is_optimizer_separate and not is_replayed and not done)
    return calls


def _count_step_calls(config: TrainerConfig, sizes: Sequence[int]) -> Counter[str]:
    """Return the calls of one step of edits with batches of these sizes."""
    minibatch = config.reflect.minibatch_size
    share = 1 if config.reflect.failure_only else 2
    failure = sum(math.ceil(size / share / minibatch) for size in sizes)
    success = 0 if config.reflect.failure_only else failure
    calls = Counter(analyst_failure=failure, analyst_success=success)
    if config.appendix.enabled:
        calls += Counter(lapse_failure=failure, lapse_success=success)
    draft = "draft_" if config.update.mode == "full_rewrite" else ""
    reports = sum(math.ceil(size / minibatch) for size in sizes)
    calls[f"{draft}merge"] = _count_merges(reports, config.aggregate.merge_batch_size)
    calls[f"{draft}merge_final"] = int(success > 0)
    if not draft:
        calls["ranking"] = int(config.select.lr_control != "none" and failure + success > 1)
        calls["step_size"] = int(config.select.lr_control == "autonomous")
        calls["rewrite"] = int(config.update.mode == "rewrite")
    return calls


def _count_merges(patches: int, size: int) -> int:
    """Return the merges of a tree over a number of patches; a group of one needs no merge."""
    nodes = patches
    merges = 0
    while nodes > 1:
        groups = [min(size, nodes - start) for start in range(0, nodes, size)]
        merges += sum(group > 1 for group in groups)
        nodes = len(groups)
    return merges


def _count_critic_calls(
    plan: RunPlan, steps: Sequence[Sequence[Sequence[str]]], done: int, rollouts: float
) -> float:
    """Return the critic's calls: anchors, graded answers, and notes on failures that it did not grade.

    Of the null answers it grades the refusal, once for each item of the last split.
    """
    config = plan.config
    critic = config.critic
    scores = 0.0
    if critic.memory is not None and not done:
        scores += critic.max_anchors
    if config.environment.grader == "critic":
        scores += rollouts
        if config.test.null_answers:
            scores += len(plan.data.test if config.test.enabled else plan.data.val)
    elif critic.annotate:
        scores += sum(len(batch) for step in steps for batch in step) / 2
    return scores * critic.n_samples


def _build_row(
    plan: RunPlan, role: str, purpose: str, calls: float, *, usage: Usage | None, document: int
) -> EstimateRow:
    """Return the row of some calls, by the mean ``usage`` of earlier ones; ``document`` is its size in bytes."""
    if usage is not None:
        given = usage.input_tokens / usage.calls
        written = usage.output_tokens / usage.calls
    else:
        given = _estimate_bytes(plan, role, purpose, document) / BYTES_PER_TOKEN + MESSAGE_TOKENS
        written = (getattr(plan.config.models, role).max_tokens or UNCAPPED_REPLY_TOKENS) / 4
    return EstimateRow(
        role=role,
        purpose=purpose,
        calls=calls,
        input_tokens=calls * given,
        output_tokens=calls * written,
    )


def _estimate_bytes(plan: RunPlan, role: str, purpose: str, document: int) -> float:
    """Return the estimated bytes of a call's prompt."""
    sizes = {name: len(prompt.system + prompt.user) for name, prompt in plan.prompts.prompts.items()}
    item = fmean(_measure_item(item) for split in Split for item in plan.data.items(split))
    if role == "target":
        return document + item
    if role == "critic":
        critic = plan.config.critic
        examples = 0 if critic.memory is None else critic.example_tokens
        return sizes["critic"] + 3 * item + examples * BYTES_PER_TOKEN
    if purpose == PREFLIGHT:
        return PREFLIGHT_BYTES
    own = sizes.get(purpose, max(sizes.values(), default=0)) + document
    reflect = plan.config.reflect
    size = fmean(map(_measure_item, plan.data.train))
    if purpose.startswith(("analyst", "lapse")):
        return own + min(size * reflect.minibatch_size, 3 * reflect.trajectory_tokens)
    if purpose == "write_document":
        return own + min(size * len(plan.data.train), 2 * CASE_TOKENS * BYTES_PER_TOKEN)
    return own + min(OTHER_BYTES, 3 * reflect.trajectory_tokens)


def _measure_item(item: Item) -> int:
    text = item.input if isinstance(item.input, str) else canonical_json(item.input)
    return len(text.encode())
