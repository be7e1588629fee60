"""Decisions on candidates: the race, the gate, and the approver."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reflact.adapters import CatchExits
from reflact.data import USEFUL_SIZE
from reflact.errors import Unmeasured
from reflact.events import GatePowerEstimated
from reflact.gate.greater_mean import GateSettings
from reflact.gate.intervals import describe_claim
from reflact.gate.ranked_decision import MAX_PASSES, start_ranking
from reflact.records import CandidateReview, DecisionPoint, RunState
from reflact.search.race import (
    Contender,
    RaceResult,
    RaceSettings,
    order_items,
    plan_slices,
    run_race,
)
from reflact.skills.document import diff_texts
from reflact.stages.evaluate import EvaluationResult, evaluate, force_accept
from reflact.stages.ranked_evaluation import RankedEvaluator
from reflact.stages.rollout import log_unmeasured
from reflact.training.plan import RunPlan
from reflact.training.rollouts import make_pass_reader, make_pass_runner
from reflact.training.run import Run
from reflact.types import HARD_VARIANCE, Ranking, Rollout, Skill, Verdict

# A run with fewer validation items begins with a warning.
FEW_ITEMS = 20

# The gain that all rollouts of a budget should bring together: the least worth of one is this part
# of it.
WORTH_OF_BUDGET = 0.25

# Versions after which a run with a budget of rollouts stops to repeat items of a target that always
# agreed.
CONFIRMED_VERSIONS = 2


def rank_baseline(plan: RunPlan, passes: Sequence[Sequence[Rollout]]) -> Ranking | None:
    """Return the ranking after the baseline's passes; None unless the gate ranks versions."""
    gate = plan.config.gate
    if not gate.enabled or gate.policy != "ranked":
        return None
    scores = [plan.metric.score_items(rollouts) for rollouts in passes]
    return start_ranking(plan.initial_skill.hash, scores, is_hard=gate.metric == "hard")


async def race(
    run: Run,
    contenders: Sequence[Contender],
    current: Skill,
    state: RunState,
    *,
    step: int,
    passes: float,
) -> RaceResult:
    """Race a step's candidates; ``passes`` is how many passes the rest of the run's rollouts pays
    for.

    The current document is measured on all items first: the order of the race may not depend on
    which rollouts an interrupted start happened to leave in the store.
    """
    all_items = run.plan.gate_order
    metric = run.plan.metric
    run_pass = make_pass_runner(run, step=step, part="step")
    order = await _order_race(run, current, await run_pass(current, 0, all_items), step=step)
    variance = HARD_VARIANCE if state.ranking is None else state.ranking.variance
    settings = RaceSettings(
        item_ids=order,
        slices=plan_slices(len(all_items), passes),
        variance=0.0 if state.deterministic else variance,
    )

    async def measure(skill: Skill, item_ids: Sequence[str]) -> Sequence[Rollout]:
        return await run_pass(skill, 0, item_ids)

    result = await run_race(
        contenders, current, settings, measure=measure, score=metric.score_rollout
    )
    judged = set[str]()  # the gate measures these again, so it logs what stays unmeasured
    if result.winner is not None:
        judged = {current.hash, contenders[result.winner].candidate.skill.hash}
    others = [rollout for rollout in result.unmeasured if rollout.skill_hash not in judged]
    await log_unmeasured(others, decision_log=run.decision_log, step=step)
    return result


async def _order_race(
    run: Run, current: Skill, known: Sequence[Rollout], *, step: int
) -> tuple[str, ...]:
    """Return the order of a race's items; if some are unmeasured now and tried again later, it is
    logged.
    """
    label = f"race_order/{current.hash}"
    logged = await run.decision_log.get(step, label)
    if isinstance(logged, list):
        return tuple(map(str, logged))
    scores = {rollout.item_id: run.plan.metric.score_rollout(rollout) for rollout in known}
    order = order_items(run.plan.gate_order, scores)
    if None in scores.values():
        await run.decision_log.put(step, label, list(order))
    return order


async def judge(
    run: Run, candidate: Skill, state: RunState, *, step: int, part: DecisionPoint, subject: str
) -> Verdict:
    """Return the gate's verdict on a candidate, which the approver may veto.

    Raises:
        Unmeasured: Too little could be measured; ``subject`` begins the message. Nothing is logged,
            so that a retry can measure everything again.
    """
    current = await run.find_skill(state.current.skill_hash)
    evaluated = await _evaluate(run, candidate, current, state, step=step, part=part)
    verdict = evaluated.verdict
    if verdict.action == "unmeasured":
        first = next((f" The first failure: {lost.error}" for lost in evaluated.unmeasured), "")
        raise Unmeasured(f"{subject}: {verdict.reason}{first}")
    await log_unmeasured(evaluated.unmeasured, decision_log=run.decision_log, step=step)
    return await _ask_approver(run, verdict, candidate, current, step=step, part=part)


async def _evaluate(
    run: Run, candidate: Skill, current: Skill, state: RunState, *, step: int, part: DecisionPoint
) -> EvaluationResult:
    gate = run.config.gate
    metric = run.plan.metric
    settings = _build_settings(run.plan, state)
    run_pass = make_pass_runner(run, step=step, part=part)
    if not gate.enabled:
        return await force_accept(
            candidate, current, settings=settings, metric=metric, run_pass=run_pass
        )
    if state.ranking is None or state.deterministic:
        best = await run.find_skill(state.best.skill_hash)
        evaluated = await evaluate(
            candidate, current, best, settings=settings, metric=metric, run_pass=run_pass
        )
        if evaluated is not None:
            return evaluated
    assert state.ranking is not None, "only the ranked policy repeats items"
    evaluator = RankedEvaluator(
        candidate=candidate,
        current=current,
        settings=settings,
        metric=metric,
        run_pass=run_pass,
        read_pass=make_pass_reader(run),
    )
    return await evaluator.evaluate(state.ranking, measures_current=state.deterministic)


def find_worth(plan: RunPlan) -> float:
    """Return the least gain for each rollout of a further pass; a small budget finds more with
    other candidates.
    """
    worth = plan.config.gate.worth
    planned = plan.config.train.max_rollouts
    return worth if planned is None else max(worth, WORTH_OF_BUDGET / planned)


def _build_settings(plan: RunPlan, state: RunState) -> GateSettings:
    gate = plan.config.gate
    is_limited = plan.config.train.max_rollouts is not None
    confirms = gate.policy == "ranked" and plan.config.target.deterministic is not True
    return GateSettings(
        item_ids=plan.gate_order,
        coverage=gate.coverage,
        no_regression=gate.no_regression,
        confirms=confirms and not (is_limited and len(state.kept) > CONFIRMED_VERSIONS),
        kept=tuple(version.skill_hash for version in state.kept),
        worth=find_worth(plan),
    )


async def _ask_approver(
    run: Run, verdict: Verdict, candidate: Skill, current: Skill, *, step: int, part: DecisionPoint
) -> Verdict:
    """Return the verdict after the approver, whose answer is logged before it is used."""
    if run.approve is None or not verdict.accepted:
        return verdict
    label = f"approval/{part}/{candidate.hash}"
    answer = await run.decision_log.get(step, label)
    if answer is None:
        review = CandidateReview(
            step=step,
            part=part,
            current=current,
            candidate=candidate,
            diff=diff_texts(current.text, candidate.text),
            verdict=verdict,
        )
        with run.graceful_stop.wait_for_person(), CatchExits():
            reply = await run.approve(review)
        answer = reply if isinstance(reply, bool) else str(reply)
        await run.decision_log.put(step, label, answer)
    if answer is True:
        return verdict
    veto = answer if isinstance(answer, str) and answer else "no reason was given"
    ranked = verdict.ranked
    return verdict.model_copy(
        update={
            "action": "reject",
            "reason": f"{verdict.reason} Vetoed: {veto}",
            "ranked": None
            if ranked is None
            else ranked.model_copy(update={"chosen": current.hash}),
            "veto": veto,
        }
    )


def describe_few_items(n: int) -> str:
    """Return a warning about a small validation split, with the standard deviation of a difference
    of two means.
    """
    points = 100 * math.sqrt(0.5 / n)
    return (
        f"Only {n} validation item{'s' * (n != 1)}: by chance alone, two equally good skills often "
        f"differ by {points:.0f} points. Use at least {FEW_ITEMS}, better {USEFUL_SIZE}."
    )


def estimate_gate_power(plan: RunPlan) -> GatePowerEstimated:
    """Return what the gate does and what the final test can confirm, in words."""
    gate = plan.config.gate
    n = len(plan.data.val)
    trials = 1
    items = f"{n} validation item{'s' * (n != 1)}"
    if not gate.enabled:
        words = "The gate is off: every candidate is accepted."
    elif gate.policy == "strict":
        words = (
            f"The strict gate accepts any gain on {items}, even one by chance: do not rely on it "
            "unless the target always gives the same answers."
        )
    else:
        claim = describe_claim(len(plan.data.test) if plan.config.test.enabled else 0)
        words = (
            f"The gate measures a candidate on {items}, again if it is close, and goes on with the "
            f"skill that is most probably best. {claim}"
        )
        trials = MAX_PASSES
    if n < FEW_ITEMS:
        words = f"{describe_few_items(n)} {words}"
    return GatePowerEstimated(
        run_id=plan.run_id, description=words, trials=trials, rollouts=2 * n * trials
    )
