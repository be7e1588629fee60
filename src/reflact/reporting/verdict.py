"""The verdict on a run in words: what it achieved, what it cost, and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path

from pydantic import JsonValue

from reflact.config.models import is_small_model
from reflact.gate.intervals import CLAIM_LEVEL, wilson_interval
from reflact.records import Claim, Improvement, RunStatus, RunSummary, SkillScore, SkillVersion, Usage
from reflact.reporting.lines import (
    ACTION_WORDS,
    format_count,
    format_duration,
    format_score,
    list_items,
    name_count,
)
from reflact.stages.null_answers import describe_constant
from reflact.stages.ranked_evaluation import name_times
from reflact.types import GateAction, RaceEntry, Skill, Split

SPLIT_WORDS = {Split.train: "train", Split.val: "validation", Split.test: "test"}
STOP_WORDS: dict[RunStatus, str] = {
    "budget": "Stopped by its budget",
    "cancelled": "Stopped",
    "failed": "Failed",
}
SCORE_NAMES = {"null_empty": "empty", "null_refusal": "refusal", "null_frequent": "frequent"}
"""Names of scores in words; those that are missing here are words already."""

NO_REPORTS = "no analyst gave a valid reply"
"""Begins the reason of a run whose steps are all decided without a single report, so that it cannot be resumed."""

OFTEN_WRONG = 0.5
"""The share of solved test items below which the answers that are still wrong deserve a look."""

FEW_STEPS = 8
"""A run of fewer steps has tried few edits."""

NO_BETTER = "No better document was found; best_skill.md is your initial one."


def has_better_skill(summary: RunSummary) -> bool:
    """Return whether the best skill of a run is not the initial one."""
    return summary.best is not None and summary.best.number != 0


def describe_outcome(summary: RunSummary, folder: Path) -> tuple[str, ...]:
    """Return the closing lines of a run: its result, its cost and time, its skill, and the next step."""
    skill: tuple[str, ...] = ()
    if has_better_skill(summary):
        cost = describe_skill_cost(summary)
        skill = (f"Skill: {folder / 'best_skill.md'}", *((cost,) if cost else ()))
    return (
        describe_result(summary),
        f"Cost: {describe_cost(summary)}; {format_duration(summary.seconds)}.",
        *skill,
        f"Next: {describe_next(summary, folder)}",
        *advise_on_training(summary),
    )


def describe_result(summary: RunSummary) -> str:
    """Return what a run achieved, in sentences; it depends on the measurements alone, not on cost and time."""
    best = summary.best
    if summary.status != "completed":
        return _describe_stop(summary)
    caveats = (*_describe_lost(summary), *describe_controls(summary))
    if summary.claim is not None:
        return " ".join((_describe_claim(summary, summary.claim), *caveats))
    if best is None:
        return "Nothing was measured."
    if best.number == 0:
        score = summary.score("baseline", Split.test) or summary.score("baseline", Split.val)
        result = () if score is None else (f"Its result: {_describe_score(score)}.",)
        return " ".join((NO_BETTER, *result, *caveats))
    reason = f": {summary.missing[0]}" if summary.missing else ""
    return f"The best document is {_describe_version(best)}. Its gain was not measured at the end{reason}."


def _describe_lost(summary: RunSummary) -> tuple[str, ...]:
    """Return how many rollouts of the last split have no score, as sentences."""
    lost = max((s.unmeasured for s in summary.scores if s.split is summary.scores[-1].split), default=0)
    return (f"Not counted: {name_count(lost, 'rollout')} without a score.",) if lost else ()


def find_doubt(summary: RunSummary) -> str | None:
    """Return the result of a complete run if its test or a control does not support the best document; else None."""
    claim = summary.claim
    if summary.status != "completed" or not has_better_skill(summary) or claim is None:
        return None
    if claim.improvement.split is not Split.test or (claim.confirmed and not describe_controls(summary)):
        return None
    return describe_result(summary)


def describe_verdict(summary: RunSummary) -> str:
    """Return the result of a run; if it is not complete, with what to do next."""
    result = describe_result(summary)
    return result if summary.status == "completed" else f"{result} Next: {_advise_after_stop(summary)}."


def describe_controls(summary: RunSummary) -> tuple[str, ...]:
    """Return what the controls say against the best document, one sentence each."""
    scores = {score.name: score for score in summary.scores if score.split is summary.scores[-1].split}
    best, placebo, sentences = scores.get("best"), scores.get("placebo"), list[str]()
    if best is None or best.value is None:
        return ()
    constants = [score for score in scores.values() if score.answer is not None and score.value is not None]
    top = max(constants, key=lambda score: score.value or 0.0, default=None)
    if top is not None and _reaches(top, best):
        always = describe_constant(top.answer or "")
        sentences.append(f"The best document is not better than {always}: {_compare_scores(best, top)}.")
    if has_better_skill(summary) and placebo is not None and _reaches(placebo, best):
        sentences.append(
            f"A text about something else does as well as the best document: {_compare_scores(placebo, best)}. So "
            "the gain may have nothing to do with what the document says."
        )
    return tuple(sentences)


def _reaches(control: SkillScore, best: SkillScore) -> bool:
    return control.value is not None and best.value is not None and control.value >= best.value


def _compare_scores(one: SkillScore, other: SkillScore) -> str:
    return f"{one.value or 0:.2f} against {other.value or 0:.2f} on {SPLIT_WORDS[one.split]} items"


def describe_score_name(score: SkillScore) -> str:
    """Return which document or constant a score is of, in words; empty if its name is that of a file."""
    if score.answer is not None:
        frequent = (
            ", the most frequent right answer of the train items" if score.name == "null_frequent" else ""
        )
        return f"{describe_constant(score.answer)}{frequent}"
    documents = {
        "baseline": "the initial skill",
        "placebo": "a text about something else",
        "shuffled": "the best skill with the answers of its examples shuffled",
        "best": "the best skill",
        "final": "the last skill",
    }
    return documents.get(score.name, "")


def describe_decisions(summary: RunSummary) -> str:
    """Return how many steps a run has, and how many of them ended in which way."""
    return f"{name_count(summary.steps, 'step')}, {count_decisions(summary)}"


def count_decisions(summary: RunSummary) -> str:
    """Return how many steps of a run ended in which way."""
    others = {each.action: each.count for each in summary.actions}
    unproven: tuple[GateAction, ...] = ("set_aside", "return")
    counts = [
        f"{summary.accepts} accepted",
        f"{summary.rejects} rejected",
        *(f"{others[action]} {ACTION_WORDS[action]}" for action in unproven if action in others),
        f"{summary.skips} without a change",
    ]
    return ", ".join(counts)


def describe_entry(entry: RaceEntry) -> str:
    """Return what a race measured of a candidate, in words."""
    if entry.score is None or entry.current_score is None or entry.p_better is None:
        return f"nothing could be measured of {entry.label}"
    end = "; it went to the gate" if entry.judged else ""
    return (
        f"{entry.label}: {entry.score:.3f} on {name_count(entry.n, 'validation item')}, and the current document "
        f"{entry.current_score:.3f} on the same; better with probability {entry.p_better:.2f}{end}"
    )


def describe_skill_cost(summary: RunSummary) -> str:
    """Return what the best document adds to each call, and whose text it holds; empty if it adds nothing."""
    if not has_better_skill(summary) or summary.best is None:
        return ""
    if summary.added_tokens <= 0 and not summary.best.examples:
        return ""
    words = f"It adds about {format_count(summary.added_tokens)} tokens to each call"
    return f"{words}{describe_examples(summary.best)}."


def describe_examples(version: SkillVersion) -> str:
    """Return whose text a document holds in its worked examples, as the end of a sentence; empty without any."""
    if not version.examples:
        return ""
    return f", and holds the text of {list_items((e.item_id for e in version.examples), 'train item')}"


def describe_gain(skill: str, other: str, gain: Improvement, noun: str = "item") -> str:
    """Return a line about what a document gains over another one, over so many items of a kind."""
    low, high, other = 100 * gain.low, 100 * gain.high, SCORE_NAMES.get(other, other)
    points = f"points of the {_name_metric(gain)}" if gain.soft_weight else "points"
    return (
        f"{skill} over {other} on {SPLIT_WORDS[gain.split]}: {100 * gain.mean:+.1f} {points} "
        f"(95% interval {low:+.1f} to {high:+.1f}, {name_count(gain.n, noun)})"
    )


def list_gains(summary: RunSummary) -> tuple[Improvement, ...]:
    """Return the improvements over the baseline that the claim does not tell; those of the final skill if it is another."""
    best, final = summary.best, summary.final
    if best is not None and best == final and not best.number:
        return ()
    is_same = best is not None and final is not None and best.skill_hash == final.skill_hash
    claimed = None if summary.claim is None else summary.claim.improvement
    gains = (gain for gain in summary.improvements if not (is_same and gain.name == "final"))
    return tuple(
        gain for gain in gains if claimed is None or (gain.name, gain.split) != ("best", claimed.split)
    )


def describe_version(version: SkillVersion) -> str:
    """Return a version with its origin and its validation score, if it has one."""
    score = _describe_version(version)
    if version.inherited:
        score += " (inherited from an earlier version; this text was not measured)"
    return score


def format_cost(calls: int, usd: float | None) -> str:
    """Return the cost of calls, for a table."""
    return "-" if not calls else "unknown" if usd is None else format_usd(usd)


def describe_cost(summary: RunSummary) -> str:
    """Return the money that a run's calls cost, as far as their prices are known."""
    used = [entry for entry in summary.spend if entry.usage.calls or entry.unsettled]
    if not used:
        return "no calls were counted"
    total = sum((entry.usage for entry in used), Usage())
    unpriced = sorted({entry.role for entry in used if entry.usage.calls and entry.usage.usd is None})
    words = format_usage(total)
    if total.usd is not None and unpriced:
        words += f", and calls of {' and '.join(unpriced)} with an unknown price"
    worst = None if total.usd is None else sum((entry.worst_case for entry in used), Usage()).usd
    return words if not worst else f"{words}, at most {format_usd(worst)} more for unfinished calls"


def format_usage(usage: Usage) -> str:
    """Return what calls cost; without a price, their tokens too."""
    calls = name_count(usage.calls, "call")
    if usage.usd is not None:
        return f"{format_usd(usage.usd)}, {calls}"
    return f"price unknown, {calls}, {format_count(usage.input_tokens + usage.output_tokens)} tokens"


def describe_next(summary: RunSummary, folder: Path) -> str:
    """Return the command or the change that helps most after a run."""
    if summary.status != "completed":
        return _advise_after_stop(summary)
    if summary.missing:
        return "run the same command again to measure what is missing"
    show, best = f"reflact show {shlex.quote(str(folder))} --items", summary.score("best", Split.test)
    if not has_better_skill(summary):
        return f"{show} --wrong"
    is_often_wrong = best is not None and best.hard is not None and best.hard < OFTEN_WRONG
    return f"{show} --changed{', then with --wrong, since most are not solved yet' * is_often_wrong}"


def advise_on_training(summary: RunSummary) -> tuple[str, ...]:
    """Return in a sentence what may lead to a better skill, if a complete run has not confirmed a gain."""
    if summary.status != "completed" or summary.missing or (summary.claim and summary.claim.confirmed):
        return ()
    advice, n_steps = list[str](), summary.steps
    idle = sum(each.count for each in summary.actions if each.action == "no_patches")
    if n_steps < FEW_STEPS:
        advice.append(
            f"take more steps than {n_steps} (a larger train.num_epochs extends this run; a smaller train.batch_size "
            "needs another one)"
        )
    if model := _read_setting(summary, "models", "optimizer", "model"):
        reason = f", since {idle} of {n_steps} steps had no edits" if 3 * idle >= n_steps > 0 else ""
        advice.append(f"let a larger model than {model} write the edits{reason} (models.optimizer.model)")
        if is_small_model(str(model)):
            advice.append("write the rules that you know into the skill, with which a run begins (skill)")
    if _read_setting(summary, "environment", "description") == "":
        advice.append("say what a good answer is (environment.description)")
    if any(score.name == "baseline" and score.skill_hash == Skill(text="").hash for score in summary.scores):
        advice.append("begin with instructions of your own, not with an empty document (skill)")
    if summary.claim is not None and summary.claim.improvement.mean > 0:
        advice.append(
            f"use more than {summary.claim.improvement.n} {SPLIT_WORDS[summary.claim.improvement.split]} items"
        )
    return (f"For a better result: {'; or '.join(advice)}.",) if advice else ()


def _read_setting(summary: RunSummary, *names: str) -> JsonValue:
    """Return the value of a key in the configuration of a run; None if it is not there."""
    value = summary.config
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _advise_after_stop(summary: RunSummary) -> str:
    again = "run the same command or program again to resume"
    if summary.status == "cancelled":
        return again
    if summary.status == "budget":
        return f"raise the limit, then {again}"
    if (summary.reason or "").startswith(NO_REPORTS):
        other = "add --fork (in Python: fork=True), or name another out_dir"
        return f"mend the cause, then start another run, since these steps are decided: {other}"
    return f"mend the cause, then {again}, with --fork (in Python: fork=True) if keys changed"


def format_usd(usd: float) -> str:
    """Return an amount in cents, or four digits after the point if it is smaller than a cent."""
    return f"${usd:,.2f}" if usd >= 0.01 or not usd else f"${usd:.4f}"


def _describe_stop(summary: RunSummary) -> str:
    steps = f"{summary.steps} step{'' if summary.steps == 1 else 's'}"
    reason = "" if summary.reason is None else f": {summary.reason.rstrip('.')}"
    words = f"{STOP_WORDS.get(summary.status, 'Stopped')} after {steps}{reason}."
    if summary.best is None:
        return f"{words} Nothing was measured yet."
    if summary.best.number == 0:
        return f"{words} So far no better document was found."
    return (
        f"{words} So far the best document is {_describe_version(summary.best)}; its test follows at the end."
    )


def _describe_version(version: SkillVersion) -> str:
    if version.score is None:
        return f"v{version.number} from {version.origin}"
    score, part = format_score(version.score), ""
    if version.n is not None and version.trials is not None:
        part = f", {name_count(version.n, 'item')} measured {name_times(version.trials)}"
    return f"v{version.number} from {version.origin} (validation {score}{part})"


def _describe_claim(summary: RunSummary, claim: Claim) -> str:
    gain = claim.improvement
    before, after = (summary.score(name, gain.split) for name in ("baseline", "best"))
    if before is None or after is None:
        scores = f"on {gain.n} {SPLIT_WORDS[gain.split]} items"
    elif _is_count(before) and _is_count(after):
        old = f"{before.successes:.0f}" + ("" if before.n == after.n else f" of {before.n}")
        scores = f"{_describe_score(after)} instead of {old}"
    else:
        scores = f"{_describe_score(after)} instead of {before.value or 0:.2f}"
    interval = f"{_format_points(gain)}; 95% interval {_format_bounds(gain)}"
    words = f"{_judge(claim)}: {scores} ({interval}).{explain_doubt(claim)}"
    if gain.split is Split.val:
        words += " There is no test split, so this holds for these items only; expect less on new ones."
    return words


def explain_doubt(claim: Claim) -> str:
    """Return why a gain is not confirmed although its interval lies above 0, after a space; else nothing."""
    if claim.confirmed or claim.improvement.low <= 0 or claim.chance is None:
        return ""
    return (
        f" So few items differ that chance alone gives such a result in {claim.chance:.1%} of cases; a confirmed one may "
        f"have {CLAIM_LEVEL:.1%} at most."
    )


def _judge(claim: Claim) -> str:
    gain = claim.improvement
    if claim.confirmed:
        return "Better"
    if gain.high < 0:
        return "Worse than the initial document"
    return "Perhaps better, not confirmed" if gain.mean > 0 else "Not better"


def _describe_score(score: SkillScore) -> str:
    split = SPLIT_WORDS[score.split]
    if _is_count(score):
        return f"{score.successes:.0f} of {score.n} {split} items solved"
    trials = f", {score.trials} trials each" if score.trials > 1 else ""
    mean = "no score" if score.value is None else f"mean {_name_metric(score)} {score.value:.2f}"
    return f"{mean} on {score.n // score.trials} {split} items{trials}"


def _name_metric(measured: SkillScore | Improvement) -> str:
    return {0.0: "score", 1.0: "soft score"}.get(measured.soft_weight, "mixed score")


def _is_count(score: SkillScore) -> bool:
    """Whether a score is a share of solved items: one trial of hard scores 0 and 1, whose interval is Wilson's."""
    if score.soft_weight or score.trials > 1 or not score.n or score.successes != round(score.successes):
        return False
    return (score.low, score.high) == wilson_interval(round(score.successes), score.n)


def _format_points(gain: Improvement) -> str:
    return f"{_format_signed(gain, gain.mean)} points"


def _format_bounds(gain: Improvement) -> str:
    return f"{_format_signed(gain, gain.low)} to {_format_signed(gain, gain.high)}"


def _format_signed(gain: Improvement, value: float) -> str:
    """Return points with a sign; with one decimal if a whole number would show a small difference as 0."""
    small = any(0 < abs(100 * each) < 1 for each in (gain.mean, gain.low, gain.high))
    text = f"{100 * value:+.{1 if small else 0}f}"
    return "0" if float(text) == 0 else text
