"""The end of a run: the last skill against the best, final scores and controls; and ``eval``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from reflact import events
from reflact.concurrency import run_beside_loop, start_ahead
from reflact.errors import DataError, UsageError
from reflact.protocols import EventCallback
from reflact.records import (
    CaseComparison,
    Improvement,
    ItemSides,
    NamedDocument,
    PromotionRecord,
    RunState,
    SkillComparison,
    SkillEvaluation,
    SkillScore,
    SkillVersion,
)
from reflact.search.examples import apply_examples, shuffle_answers
from reflact.stages.evaluate import GateMetric
from reflact.stages.final_test import (
    compare_on_cases,
    judge_claim,
    make_placebo,
    measure_improvement,
)
from reflact.training.gating import judge
from reflact.training.judge import check_judge
from reflact.training.open_run import open_run, start
from reflact.training.plan import RunPlan
from reflact.training.preflight import check_skill
from reflact.training.rollouts import (
    FIRST_REPORT_TRIAL,
    REPORT_TRIALS,
    UNMEASURABLE,
    MeasuredSkill,
    list_constants,
    manage_environment,
    measure_constant,
    measure_skill,
)
from reflact.training.run import Run
from reflact.training.state import choose_best, find_current, replaces_best
from reflact.types import Control, Skill, Split

# The names of final scores, in the order of reports.
SCORE_ORDER = (
    "baseline",
    "placebo",
    "shuffled",
    "null_empty",
    "null_refusal",
    "null_frequent",
    "best",
    "final",
)

# A split, and the hash of the document that is measured on it.
DocumentKey = tuple[Split, str]

Take = Callable[[DocumentKey], Awaitable[MeasuredSkill]]


def find_promotion_rival(state: RunState) -> SkillVersion | None:
    """Return the version with which the last skill is compared; None if they are the same document.

    It is the best one. If beliefs choose that, only a last skill without a pass is compared, with
    the one it was made from.
    """
    rival = state.best
    if state.ranking is not None and not state.deterministic:
        measured = state.ranking.list_lineage(state.current.skill_hash)[-1]
        rival = next(version for version in state.kept if version.skill_hash == measured)
    return None if rival.skill_hash == state.current.skill_hash else rival


async def judge_promotion(run: Run, state: RunState) -> PromotionRecord:
    """Compare the last skill with the best one, and return the record."""
    rival = find_promotion_rival(state)
    assert rival is not None
    before = state.model_copy(update={"current": rival})
    last = await run.find_skill(state.current.skill_hash)
    async with run.timer.stage("evaluate", step=state.step, name="promotion"):
        verdict = await judge(run, last, before, "promotion")
    update = {"score": verdict.candidate_score, "inherited": False}
    current = state.current.model_copy(update=update)
    if verdict.ranked is not None and not verdict.accepted:
        current = find_current(before, verdict)
    best = current if replaces_best(verdict, state.best) else state.best
    record = PromotionRecord(step=state.step, verdict=verdict, current=current, best=best)
    return choose_best(state, record)


async def final_test(run: Run, state: RunState) -> None:
    """Measure baseline, best and last skill on the validation and test split, then controls.

    A failed measurement is named in ``missing`` and does not affect the others. Documents are
    rolled out together, or one after another if a budget may end between them. Equal texts are
    measured once, under the first of their names.
    """
    async with run.timer.stage("final_test", step=state.step, name="final test"):
        documents, controls = await _choose_documents(run, state)
        constants = list_constants(run) if run.config.test.null_answers else ()
        splits = [Split.val]
        if run.config.test.enabled:
            shown = [f"{name} {skill.hash}" for name, skill in (documents | controls).items()]
            shown += [answer.name for answer in constants]
            await open_test_split(run, f"step {state.step}: {', '.join(shown)}")
            splits.append(Split.test)
        last = splits[-1]

        calls: dict[DocumentKey, Callable[[], Awaitable[MeasuredSkill]]] = {}
        wanted = [(split, *named) for split in splits for named in documents.items()]
        wanted += [(last, *named) for named in controls.items()]
        for split, name, skill in wanted:
            trials = _list_trials(run, split, state)
            measure = partial(
                measure_skill, run, name, skill, split, step=state.step, trials=trials
            )
            calls.setdefault((split, skill.hash), measure)
        async with start_ahead(calls, lazily=run.config.budget.is_limited) as take:
            for split in splits:
                measured = await _measure_documents(run, split, documents, state, take)
                await _measure_improvements(run, split, measured, state)
            is_new = state.best.skill_hash != run.plan.initial_skill.hash
            if is_new and {"baseline", "best"} <= measured.keys():
                run.results.claim = judge_claim(
                    last,
                    measured["baseline"].rollouts,
                    measured["best"].rollouts,
                    metric=run.plan.metric,
                    on_these_items=last is Split.val and not state.deterministic,
                )
            for answer in constants:
                try:
                    graded = await measure_constant(run, answer, last, step=state.step)
                except UNMEASURABLE as error:
                    run.results.missing.append(f"{answer.name} on {last.value}: {error}")
                    continue
                await _add_score(run, graded.score, state)
            await _measure_documents(run, last, controls, state, take)


async def _choose_documents(run: Run, state: RunState) -> tuple[dict[str, Skill], dict[str, Skill]]:
    """Return the documents by name, and those that are controls, if there is a gain to doubt.

    They are a placebo, and the best document with the answers of its worked examples shuffled.
    """
    initial = run.plan.initial_skill
    best = await run.find_skill(state.best.skill_hash)
    last = await run.find_skill(state.current.skill_hash)
    documents = {"baseline": initial, "best": best, "final": last}
    if not run.config.test.placebo or best.hash == initial.hash:
        return documents, {}
    controls = {"placebo": make_placebo(run.plan.prompts.prompts["placebo"].system, best)}
    shuffled = shuffle_answers(state.best.examples, run.config.seed)
    if shuffled:
        controls["shuffled"] = apply_examples(best, shuffled).skill
    return documents, controls


async def _measure_documents(
    run: Run, split: Split, documents: Mapping[str, Skill], state: RunState, take: Take
) -> dict[str, MeasuredSkill]:
    """Return what was measured of documents on a split, without those that could not be."""
    measured: dict[str, MeasuredSkill] = {}
    for name, skill in documents.items():
        try:
            measured[name] = await take((split, skill.hash))
        except UNMEASURABLE as error:
            run.results.missing.append(f"{name} on {split.value}: {error}")
            continue
        for rollout in measured[name].rollouts:
            if rollout.score is None:
                run.results.unmeasured.setdefault(rollout.item_id, rollout.error)
        is_selected = _is_selected(run, name, skill, split, state)
        update = {"name": name, "selected_on": is_selected}
        await _add_score(run, measured[name].score.model_copy(update=update), state)
    return measured


async def _measure_improvements(
    run: Run, split: Split, measured: Mapping[str, MeasuredSkill], state: RunState
) -> None:
    baseline = measured["baseline"].rollouts if "baseline" in measured else ()
    for name in ("best", "final"):
        if name not in measured:
            continue
        rollouts = measured[name].rollouts
        gain = measure_improvement(name, split, baseline, rollouts, metric=run.plan.metric)
        if gain is None:
            run.results.missing.append(
                f"improvement of {name} on {split.value}: the baseline has no score on its items"
            )
            continue
        run.results.improvements.append(gain)
        await run.emit(events.ImprovementMeasured(run_id=run.id, step=state.step, improvement=gain))


async def _add_score(run: Run, score: SkillScore, state: RunState) -> None:
    """Add a score in the order of reports, and emit it."""
    splits = list(Split)
    run.results.scores.append(score)
    run.results.scores.sort(key=lambda s: (splits.index(s.split), SCORE_ORDER.index(s.name)))
    await run.emit(events.FinalScoreMeasured(run_id=run.id, step=state.step, score=score))


def _list_trials(run: Run, split: Split, state: RunState) -> tuple[int, ...]:
    """Return the trials of a reported score: fresh ones for a noisy target without a test split."""
    if split is Split.val and run.config.reports_fresh_trials and not state.deterministic:
        return tuple(range(FIRST_REPORT_TRIAL, FIRST_REPORT_TRIAL + REPORT_TRIALS))
    return (0,)


def _is_selected(run: Run, name: str, skill: Skill, split: Split, state: RunState) -> bool:
    """Whether the reported trials also selected the document."""
    if split is not Split.val or skill.hash == run.plan.initial_skill.hash:
        return False
    if not run.config.gate.enabled:
        return name == "best"
    is_fresh = _list_trials(run, split, state) != (0,)
    return not is_fresh and name in {"best", "final"}


async def open_test_split(run: Run, reason: str) -> None:
    """Count an opening of the sealed test split, by a training or an evaluation beside it; the
    same reason counts once.
    """
    reasons = [*await run.store.test_openings(run.plan.run_id)]
    if reason not in reasons:
        reasons.append(reason)
        await run.decision_log.put(0, f"test_opening/{len(reasons)}", reason)
    run.results.test_openings = len(reasons)
    await run.emit(events.TestSplitOpened(run_id=run.id, count=reasons.index(reason) + 1))


async def compare_skill(
    plan: RunPlan,
    skill: Skill,
    against: Sequence[Skill | Control],
    split: Split,
    *,
    repeats: int,
    names: Sequence[str],
    on_event: EventCallback,
) -> SkillComparison:
    """Measure a document beside others on a split, paired by item; see ``Trainer.compare``."""
    if not plan.data.items(split):
        raise DataError(
            f"there is no {split.value} split, so no document can be measured on it; choose "
            "another split"
        )
    first, *others = _name_documents(names, against)
    documents = {first: skill}
    for name, other in zip(others, against, strict=True):
        if isinstance(other, Skill):
            documents[name] = other
        elif other == "none":
            documents[name] = Skill(text="")
        elif other == "placebo":
            documents[name] = make_placebo(plan.prompts.prompts["placebo"].system, skill)
    named = [NamedDocument(name=n, skill_hash=d.hash) for n, d in documents.items()]
    evaluation = SkillEvaluation(
        run_id=plan.run_id, split=split, repeats=repeats, documents=tuple(named)
    )

    measured: list[MeasuredSkill] = []
    async with open_run(replace(plan, evaluation=evaluation), on_event) as run:
        await start(run)
        run.budget.report_usage()
        opened = manage_environment(run.plan.environment, run.failures)
        with run.tracing.run("reflact.eval"):
            async with opened:
                await check_skill(run)
                await check_judge(run)
                for name, document in documents.items():
                    if split is Split.test:
                        await open_test_split(run, f"eval {document.hash}")
                    measured.append(
                        await measure_skill(
                            run, name, document, split, step=0, trials=range(repeats)
                        )
                    )
                constants = list_constants(run) if "null" in against else ()
                measured += [await measure_constant(run, c, split, step=0) for c in constants]
        compared = await _compare(run.id, measured, plan.metric)
        compared = compared.model_copy(update={"judge": run.results.judge})
        await run.store.add_seconds(run.id, *run.timer.read_and_reset())
        await run.store.finish(run.id, "completed", None, compared.model_dump_json())
    return compared


def _name_documents(names: Sequence[str], against: Sequence[Skill | Control]) -> list[str]:
    """Return a name for the document and for each of the others, which no other one has."""
    if not names:
        others = [f"other_{n}" if isinstance(o, Skill) else o for n, o in enumerate(against, 1)]
        names = ("skill", *others)
    if len(names) != len(against) + 1:
        raise UsageError(
            f"names has {len(names)} names for {len(against) + 1} documents; name the document, "
            "then each of the others"
        )
    unique: list[str] = []
    for place, name in enumerate(names, 1):
        suffix = f" ({place})" if name in unique else ""
        unique.append(name + suffix)
    return unique


async def _compare(
    run_id: str, measured: Sequence[MeasuredSkill], metric: GateMetric
) -> SkillComparison:
    """Return the first document beside the others, item by item."""
    first, *others = measured
    gains: list[Improvement] = []
    on_cases: list[CaseComparison] = []
    items: list[ItemSides] = []
    for other in others:
        name = other.score.name
        before = other.rollouts
        gain = measure_improvement(name, first.score.split, before, first.rollouts, metric=metric)
        compare = partial(compare_on_cases, name, before, first.rollouts, metric=metric)
        compared, sides = await run_beside_loop(compare)
        items += sides
        if gain is not None:
            gains.append(gain)
        if compared is not None:
            on_cases.append(compared)
    return SkillComparison(
        run_id=run_id,
        skill=first.score,
        others=tuple(other.score for other in others),
        improvements=tuple(gains),
        on_cases=tuple(on_cases),
        items=tuple(items),
    )
