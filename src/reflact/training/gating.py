"""Decisions on candidates: what is known already, the race, the gate, and the approver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter

from reflact.adapters import CatchExits
from reflact.data import USEFUL_SIZE
from reflact.errors import Unmeasured
from reflact.events import GatePowerEstimated
from reflact.gate.greater_mean import GateSettings
from reflact.gate.intervals import describe_claim
from reflact.gate.ranked_decision import MAX_PASSES, REJECT_BELOW
from reflact.records import CandidateReview, DecisionPoint, RunState, SkillVersion
from reflact.search.race import (
    RaceResult,
    RaceSettings,
    limit_candidates,
    order_items,
    plan_slices,
    run_race,
)
from reflact.skills.document import diff_texts, digest_form
from reflact.stages.evaluate import (
    PassRunner,
    RankedEvaluator,
    decide_without_evaluation,
    evaluate,
)
from reflact.text import name_count
from reflact.training.plan import RunPlan
from reflact.training.rollouts import make_pass_reader, make_pass_runner
from reflact.training.run import Run
from reflact.training.sources import StepInput, StepProposal
from reflact.training.state import name_documents
from reflact.types import (
    HARD_VARIANCE,
    Candidate,
    FrozenModel,
    RaceEntry,
    Rollout,
    Skill,
    Verdict,
)

# A run with fewer validation items begins with a warning.
FEW_ITEMS = 20

# The gain that all rollouts of a budget should bring together: the least worth of one is this part
# of it.
WORTH_OF_BUDGET = 0.25

# Versions after which a run with a budget of rollouts stops to repeat items of a target that always
# agreed.
CONFIRMED_VERSIONS = 2

APPROVAL_ADAPTER: TypeAdapter[bool | str] = TypeAdapter(bool | str)
ORDER_ADAPTER: TypeAdapter[tuple[str, ...] | None] = TypeAdapter(tuple[str, ...] | None)


class JudgedStep(FrozenModel):
    """The decision on a step's candidates, and what the race measured of them."""

    verdict: Verdict
    candidate: Candidate
    race: tuple[RaceEntry, ...] = ()


async def judge_candidates(run: Run, work: StepInput, proposed: StepProposal) -> JudgedStep:
    """Drop candidates that are known, race the others, and let the gate judge the one left."""
    if proposed.verdict is not None:
        return JudgedStep(verdict=proposed.verdict, candidate=Candidate(skill=work.skill))
    candidate = proposed.candidates[0]
    if proposed.merged is not None and proposed.chosen is not None:
        verdict = decide_without_evaluation(
            candidate,
            work.skill,
            merged=proposed.merged,
            chosen=proposed.chosen,
            known=_name_settled(run, work.state),
        )
        if verdict is not None:
            return JudgedStep(verdict=verdict, candidate=candidate)
    entries: tuple[RaceEntry, ...] = ()
    if not run.config.search.is_published or run.plan.proposer is not None:
        known = await _name_forms(run, work.state)
        fresh: dict[str, Candidate] = {}
        for each in proposed.candidates:
            if (form := digest_form(each.skill.text)) not in known:
                fresh.setdefault(form, each)
        racing: Sequence[Candidate] = list(fresh.values())
        if not racing:
            name = known[digest_form(candidate.skill.text)]
            reason = (
                f"Every candidate says the same as a document that is known ({name}), so none was "
                "measured."
            )
            verdict = Verdict(action="no_change", reason=reason, repeats=name)
            return JudgedStep(verdict=verdict, candidate=candidate)
        candidate = racing[0]
        if run.config.gate.enabled:
            n = len(run.plan.data.val)
            passes = work.passes - len(proposed.rollouts) / n
            racing = limit_candidates(racing, plan_slices(n, passes), passes * n)
            raced = await race(run, racing, work, passes=passes)
            entries = raced.entries
            if raced.winner is None:
                return _reject_race(racing, entries)
            candidate = racing[raced.winner]

    verdict = await judge(run, candidate.skill, work.state, "step")
    return JudgedStep(verdict=verdict, candidate=candidate, race=entries)


def _name_settled(run: Run, state: RunState) -> Mapping[str, str]:
    """Return where each document that edits may not lead to again is from, by hash."""
    known = name_documents(state, run.records)
    if run.config.gate.enabled:
        return known
    # Without a gate an earlier document may come back, with its stored score.
    vetoed = {record.candidate_hash for record in run.records if record.verdict.veto}
    return {document: name for document, name in known.items() if document in vetoed}


async def _name_forms(run: Run, state: RunState) -> dict[str, str]:
    """Return where each document that is not judged again is from, by the digest of its form.

    These are all that the run has measured; without a gate only the current one.
    """
    versions: tuple[SkillVersion, ...] = (state.current,)
    names: dict[str, str] = {}
    if run.config.gate.enabled:
        versions = state.kept
        for record in run.records:
            names |= {entry.form: f"in step {record.step}" for entry in record.race}
    for version in versions:
        skill = await run.find_skill(version.skill_hash)
        names[digest_form(skill.text)] = f"v{version.number}"
    return names


def _reject_race(candidates: Sequence[Candidate], entries: tuple[RaceEntry, ...]) -> JudgedStep:
    """Return the decision on a race that nobody won, whose scores stay in its entries.

    Its verdict has none: those of the race are means on a part of the items.
    """
    scores = [-1.0 if entry.score is None else entry.score for entry in entries]
    best = scores.index(max(scores))
    subject = "The candidate does not look"
    if len(entries) > 1:
        subject = f"None of the {len(entries)} candidates looks"
    reason = f"{subject} better than the current document. Best in the race: {entries[best].words}."
    is_refuted = all(e.p_better is not None and e.p_better < REJECT_BELOW for e in entries)
    verdict = Verdict(action="reject" if is_refuted else "set_aside", reason=reason)
    return JudgedStep(verdict=verdict, candidate=candidates[best], race=entries)


async def race(
    run: Run, candidates: Sequence[Candidate], work: StepInput, *, passes: float
) -> RaceResult:
    """Race a step's candidates.

    The current document is measured on all items first: the order of the race may not depend on
    which rollouts an interrupted start happened to leave in the store. If an item is unmeasured
    now, a later start may measure it, so the order is logged.
    """
    current = work.skill
    all_items = run.plan.gate_order
    metric = run.plan.metric
    run_pass = make_pass_runner(run, work.step, "step", [])
    scores = metric.score_items(await run_pass(current, 0, all_items))

    async def order() -> tuple[str, ...] | None:
        return order_items(all_items, scores) if None in scores.values() else None

    label = f"race_order/{current.hash}"
    logged = await run.decision_log.once(work.step, label, order, ORDER_ADAPTER)
    ranking = work.state.ranking
    variance = HARD_VARIANCE if ranking is None else ranking.variance
    settings = RaceSettings(
        item_ids=logged or order_items(all_items, scores),
        slices=plan_slices(len(all_items), passes),
        variance=0.0 if work.state.deterministic else variance,
    )

    async def measure(skill: Skill, item_ids: Sequence[str]) -> Sequence[Rollout]:
        return await run_pass(skill, 0, item_ids)

    result = await run_race(
        candidates, current, settings, measure=measure, score=metric.score_rollout
    )
    judged = set[str]()  # the gate measures these again, so it logs what stays unmeasured
    if result.winner is not None:
        judged = {current.hash, candidates[result.winner].skill.hash}
    others = [rollout for rollout in result.unmeasured if rollout.skill_hash not in judged]
    await run.log_unmeasured(others, work.step)
    return result


async def judge(run: Run, candidate: Skill, state: RunState, part: DecisionPoint) -> Verdict:
    """Return the gate's verdict on a candidate, which the approver may veto.

    Raises:
        Unmeasured: Too little could be measured. Nothing is logged, so that a retry can measure
            everything again.
    """
    step = state.step + (part == "step")
    current = await run.find_skill(state.current.skill_hash)
    passes: list[list[Rollout]] = []
    run_pass = make_pass_runner(run, step, part, passes)
    verdict = await _evaluate(run, candidate, current, state, run_pass)
    # A rollout may have been measured when a later pass repeated it.
    used = {rollout.key: rollout for rollouts in passes for rollout in rollouts}
    if verdict.action == "unmeasured":
        subjects: dict[DecisionPoint, str] = {
            "step": f"step {step} is unmeasured",
            "slow update": f"the slow update of epoch {state.epoch}",
            "promotion": "the last skill could not be compared with the best",
        }
        lost = [rollout for rollout in used.values() if rollout.score is None]
        first = f" The first failure: {lost[0].error}" if lost else ""
        raise Unmeasured(f"{subjects[part]}: {verdict.reason}{first}")
    await run.log_unmeasured(list(used.values()), step)
    return await _ask_approver(run, verdict, candidate, current, step=step, part=part)


async def _evaluate(
    run: Run, candidate: Skill, current: Skill, state: RunState, run_pass: PassRunner
) -> Verdict:
    """Return the gate's verdict by the rule that the run's policy and state call for."""
    gate = run.config.gate
    metric = run.plan.metric
    planned = run.config.train.max_rollouts
    confirms = gate.policy == "ranked" and run.config.target.deterministic is not True
    worth = gate.worth
    if planned is not None:  # a small budget asks for more gain of each pass
        confirms = confirms and len(state.kept) <= CONFIRMED_VERSIONS
        worth = max(worth, WORTH_OF_BUDGET / planned)
    settings = GateSettings(
        item_ids=run.plan.gate_order,
        coverage=gate.coverage,
        no_regression=gate.no_regression,
        is_open=not gate.enabled,
        confirms=confirms,
        kept=tuple(version.skill_hash for version in state.kept),
        worth=worth,
    )
    if settings.is_open or state.ranking is None or state.deterministic:
        best = await run.find_skill(state.best.skill_hash)
        verdict = await evaluate(
            candidate, current, best, settings=settings, metric=metric, run_pass=run_pass
        )
        if verdict is not None:
            return verdict
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


async def _ask_approver(
    run: Run, verdict: Verdict, candidate: Skill, current: Skill, *, step: int, part: DecisionPoint
) -> Verdict:
    """Return the verdict after the approver, whose answer is logged before it is used."""
    approve = run.approve
    if approve is None or not verdict.accepted:
        return verdict

    async def ask() -> bool | str:
        review = CandidateReview(
            step=step,
            part=part,
            current=current,
            candidate=candidate,
            diff=diff_texts(current.text, candidate.text),
            verdict=verdict,
        )
        with run.graceful_stop.wait_for_person(), CatchExits():
            reply = await approve(review)
        return reply if isinstance(reply, bool) else str(reply)

    label = f"approval/{part}/{candidate.hash}"
    answer = await run.decision_log.once(step, label, ask, APPROVAL_ADAPTER)
    if answer is True:
        return verdict
    veto = answer or "no reason was given"
    ranked = verdict.ranked
    if ranked is not None:
        ranked = ranked.model_copy(update={"chosen": current.hash})
    reason = f"{verdict.reason} Vetoed: {veto}"
    return verdict.model_copy(
        update={"action": "reject", "reason": reason, "ranked": ranked, "veto": veto}
    )


def describe_few_items(n: int) -> str:
    """Return a warning about a small validation split, with the noise of a difference."""
    points = 100 * math.sqrt(0.5 / n)
    return (
        f"Only {name_count(n, 'validation item')}: by chance alone, two equally good skills often "
        f"differ by {points:.0f} points. Use at least {FEW_ITEMS}, better {USEFUL_SIZE}."
    )


def estimate_gate_power(plan: RunPlan) -> GatePowerEstimated:
    """Return what the gate does and what the final test can confirm, in words."""
    gate = plan.config.gate
    n = len(plan.data.val)
    trials = 1
    items = name_count(n, "validation item")
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
