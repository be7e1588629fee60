"""Every sentence and figure about a run that people see. Terminal, pages and JSON only lay them
out.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import JsonValue

from reflact import events
from reflact.gate.intervals import CLAIM_LEVEL, wilson_interval
from reflact.jsonutil import flatten_fields
from reflact.messages import NO_REPORTS, describe_call, name_minibatch
from reflact.records import (
    Claim,
    ComparisonCategory,
    CriticDescription,
    EpochRecord,
    Improvement,
    IntervalEstimate,
    ItemResult,
    RunStatus,
    RunSummary,
    SkillScore,
    SkillVersion,
    Spend,
    StageCost,
    StepRecord,
    Usage,
    average_metrics,
)
from reflact.text import (
    describe_constant,
    escape_line,
    format_count,
    format_duration,
    format_usd,
    list_items,
    name_count,
    name_times,
    shorten_reason,
)
from reflact.types import (
    Edit,
    EditKind,
    EditResult,
    Fallback,
    FrozenModel,
    GateAction,
    Score,
    Skill,
    Split,
    Verdict,
)

if TYPE_CHECKING:
    from reflact.reporting.history import RunComparison, RunListing

# The cells of a table by the headings of its columns.
Columns = Mapping[str, Sequence[str]]

# A line about a step or an epoch: what it is, and its text, which may come from a model.
LabelledText = tuple[str, str]

SPLIT_WORDS = {Split.train: "train", Split.val: "validation", Split.test: "test"}

ACTION_WORDS: dict[GateAction, str] = {
    "accept_new_best": "new best",
    "accept": "accepted",
    "reject": "rejected",
    "force_accept": "accepted untested",
    "no_change": "no change",
    "no_patches": "no edits",
    "no_rewrite": "no document",
    "set_aside": "set aside",
    "return": "returned",
    "unmeasured": "not measured",
}

STOP_WORDS: dict[RunStatus, str] = {
    "budget": "Stopped by its budget",
    "cancelled": "Stopped",
    "failed": "Failed",
}

# How an item did under two documents, the most telling outcome first.
OUTCOME_WORDS: dict[ComparisonCategory | None, str] = {
    "improved": "better",
    "regressed": "worse",
    "persistent_failure": "still wrong",
    "stable_success": "right under both",
    None: "not measured under both",
}

EDIT_WORDS: dict[EditKind, str] = {
    "append": "Addition at the end",
    "insert_after": "Insertion",
    "replace": "Replacement",
    "delete": "Deletion",
    "suggest": "Suggestion",
    "rewrite": "New document",
    "examples": "Worked examples",
}

# Names of scores in words; those that are missing here are words already.
SCORE_NAMES = {"null_empty": "empty", "null_refusal": "refusal", "null_frequent": "frequent"}

DOCUMENT_WORDS = {
    "baseline": "the initial skill",
    "placebo": "a text about something else",
    "shuffled": "the best skill with the answers of its examples shuffled",
    "best": "the best skill",
    "final": "the last skill",
}

# What the columns of a table of steps mean, for people who see one for the first time.
STEP_LEGEND = (
    "val: estimated score before the step -> that of its candidate; solved: train items of the "
    "step; edits: applied of chosen; skill: the version after the step"
)

UNMEASURED_NOTE = "* Not all items are measured."

# A hash; its first characters are enough to see that two differ.
CONTENT_HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,56}\b")

# The share of solved test items below which the answers that are still wrong deserve a look.
OFTEN_WRONG = 0.5

# A run of fewer steps has tried few edits.
FEW_STEPS = 8

NO_BETTER = "No better document was found; best_skill.md is your initial one."


# --------------------------------------------------------------------------------------- figures


def format_score(score: float | None) -> str:
    """Return a score with three digits, or a dash if there is none."""
    return "-" if score is None else f"{score:.3f}"


def format_change(before: float | None, after: float | None) -> str:
    """Return ``before -> after``, or only the first score if there is no second."""
    if after is None:
        return format_score(before)
    return f"{format_score(before)} -> {format_score(after)}"


def format_value(value: JsonValue) -> str:
    """Return a text as it is, nothing for None, and any other value as JSON."""
    if value is None:
        return ""
    return (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    )


def describe_score(score: Score | None) -> str:
    """Return a score with all that is not its hard part in brackets: ``1 (soft 0.5,
    seconds 3.2)``.
    """
    if score is None:
        return "-"
    further = [("soft", score.soft)] if score.soft != score.hard else []
    further += score.metrics.items()
    words = ", ".join(f"{escape_line(name)} {value:.4g}" for name, value in further)
    return f"{score.hard:.3g} ({words})" if words else f"{score.hard:.3g}"


# ----------------------------------------------------------------------------------------- spend


class SpendFact(FrozenModel):
    """What calls took, and at most more for calls whose usage is not known."""

    usage: Usage = Usage()
    worst_case: Usage = Usage()
    n_unsettled: int = 0
    unpriced_roles: tuple[str, ...] = ()

    @classmethod
    def of(cls, spend: Iterable[Spend]) -> Self:
        """Return the sum of entries."""
        entries = [entry for entry in spend if entry.usage.calls or entry.unsettled]
        unpriced = {
            entry.role for entry in entries if entry.usage.calls and entry.usage.usd is None
        }
        return cls(
            usage=sum((entry.usage for entry in entries), Usage()),
            worst_case=sum((entry.worst_case for entry in entries), Usage()),
            n_unsettled=sum(entry.unsettled for entry in entries),
            unpriced_roles=tuple(sorted(unpriced)),
        )

    @property
    def price(self) -> str:
        """The price for a table: a dash without calls."""
        if not self.usage.calls:
            return "-"
        return "unknown" if self.usage.usd is None else format_usd(self.usage.usd)

    @property
    def tokens(self) -> str:
        """The tokens in both directions."""
        return format_count(self.usage.input_tokens + self.usage.output_tokens)

    @property
    def words(self) -> str:
        """The price as far as it is known, and the calls; without a price, the tokens too."""
        if not self.usage.calls and not self.n_unsettled:
            return "no calls were counted"
        calls = name_count(self.usage.calls, "call")
        if self.usage.usd is None:
            return f"price unknown, {calls}, {self.tokens} tokens"
        words = f"{format_usd(self.usage.usd)}, {calls}"
        if self.unpriced_roles:
            words += f", and calls of {' and '.join(self.unpriced_roles)} with an unknown price"
        if self.worst_case.usd:
            words += f", at most {format_usd(self.worst_case.usd)} more for unfinished calls"
        return words

    @property
    def details(self) -> str:
        """Calls, tokens in and out, and the price; then what uncounted calls may have used."""
        tokens_in = f"{format_count(self.usage.input_tokens)} tokens in"
        tokens_out = f"{format_count(self.usage.output_tokens)} out"
        line = f"{name_count(self.usage.calls, 'call')}, {tokens_in}, {tokens_out}"
        if self.usage.usd is not None:
            line += f", {format_usd(self.usage.usd)}"
        uncertain = [name_count(self.n_unsettled, "interrupted call")] if self.n_unsettled else []
        if self.usage.uncounted:
            uncertain.append(f"{self.usage.uncounted:,} not counted by the provider")
        if not uncertain:
            return line
        worst = SpendFact(usage=self.worst_case)
        price = "" if self.worst_case.usd is None else f", {format_usd(self.worst_case.usd)}"
        return f"{line}; at most {worst.tokens} tokens{price} more for {' and '.join(uncertain)}"


def format_spend(spend: Sequence[Spend]) -> tuple[str, ...]:
    """Return the spend of each role, one line each."""
    roles = sorted({entry.role for entry in spend})
    entries = {role: [entry for entry in spend if entry.role == role] for role in roles}
    return tuple(f"{role}: {SpendFact.of(entries[role]).details}" for role in roles)


def format_stage_costs(costs: Sequence[StageCost]) -> tuple[str, ...]:
    """Return time and spend of each stage, one line each; stages without calls share a line."""
    times = {cost.stage: f"{cost.stage} {format_duration(cost.seconds)}" for cost in costs}
    lines = [
        f"took: {'; '.join((times[c.stage], *format_spend(c.spend)))}" for c in costs if c.spend
    ]
    others = [times[cost.stage] for cost in costs if not cost.spend]
    return (*lines, f"took: {', '.join(others)}") if others else tuple(lines)


# ----------------------------------------------------------------------------- scores and results


def name_scores(scores: Sequence[SkillScore]) -> list[tuple[str, SkillScore]]:
    """Return scores with the names of their documents; best and final share an entry if they are
    the same.
    """
    best = {(score.split, score.skill_hash) for score in scores if score.name == "best"}
    final = {(score.split, score.skill_hash) for score in scores if score.name == "final"}
    named = []
    for score in scores:
        is_both = (score.split, score.skill_hash) in best & final
        if is_both and score.name == "final":
            continue
        name = "best, final" if is_both and score.name == "best" else score.name
        named.append((escape_line(SCORE_NAMES.get(name, name)), score))
    return named


def list_score_columns(scores: Sequence[SkillScore], *, with_hash: bool = False) -> Columns:
    """Return the scores of documents on splits, each with its count and 95% interval."""
    named = name_scores(scores)
    measured = [score for _, score in named]
    columns = {
        "document": [name for name, _ in named],
        "split": [score.split.value for score in measured],
        "answers": [f"{score.n:,}" for score in measured],
        "unmeasured": [f"{score.unmeasured:,}" for score in measured],
        "solved": [f"{score.successes:g}" if score.n else "-" for score in measured],
        "score": [format_score(score.hard) for score in measured],
        "95% interval": [_format_interval(score) for score in measured],
        "soft score": [format_score(score.soft) for score in measured],
        "sha-256": [score.skill_hash[:8] for score in measured],
    }
    for metric in list_metrics(scores):
        columns[f"mean {escape_line(metric)}"] = [
            _format_metric(s.metrics, metric) for s in measured
        ]
    if not any(score.unmeasured for score in scores):
        del columns["unmeasured"]
    if all(score.soft == score.hard for score in scores):
        del columns["soft score"]
    if not with_hash:
        del columns["sha-256"]
    return columns


def list_metrics(scores: Sequence[SkillScore]) -> list[str]:
    """Return the names of the environment's further numbers."""
    return sorted({name for score in scores for name in score.metrics})


def _format_interval(score: SkillScore) -> str:
    return "-" if score.low is None else f"{format_score(score.low)} to {format_score(score.high)}"


def _format_metric(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else "-"


def estimate_score(score: SkillScore | None) -> IntervalEstimate | None:
    """Return a score with its interval; None if it is not measured."""
    if score is None or score.hard is None or score.low is None or score.high is None:
        return None
    return IntervalEstimate(value=score.hard, low=score.low, high=score.high)


def describe_document(score: SkillScore) -> str:
    """Return which document or constant a score is of, in words; empty if its name is that of a
    file.
    """
    if score.answer is None:
        return DOCUMENT_WORDS.get(score.name, "")
    words = describe_constant(score.answer)
    if score.name == "null_frequent":
        words += ", the most frequent right answer of the train items"
    return words


def describe_gain(skill: str, other: str, gain: Improvement, noun: str = "item") -> str:
    """Return a line about what a document gains over another one, over so many items of a kind."""
    metric = f" of the {_name_metric(gain)}" if gain.soft_weight else ""
    points, low, high = _format_points(gain)
    return (
        f"{skill} over {SCORE_NAMES.get(other, other)} on {SPLIT_WORDS[gain.split]}: "
        f"{points} points{metric} "
        f"(95% interval {low} to {high}, {name_count(gain.n, noun)})"
    )


def _format_points(gain: Improvement) -> tuple[str, ...]:
    """Return mean, low and high in points with a sign; with a decimal if a whole number would hide
    a gain.
    """
    values = [100 * value for value in (gain.mean, gain.low, gain.high)]
    digits = 1 if any(0 < abs(value) < 1 for value in values) else 0
    texts = [f"{value:+.{digits}f}" for value in values]
    return tuple("0" if float(text) == 0 else text for text in texts)


def _name_metric(measured: SkillScore | Improvement) -> str:
    return {0.0: "score", 1.0: "soft score"}.get(measured.soft_weight, "mixed score")


def describe_version(version: SkillVersion) -> str:
    """Return a version with its origin and its validation score, if it has one."""
    words = f"v{version.number} from {version.origin}"
    if version.score is not None:
        part = ""
        if version.n is not None and version.trials is not None:
            part = f", {name_count(version.n, 'item')} measured {name_times(version.trials)}"
        words += f" (validation {format_score(version.score)}{part})"
    if version.inherited:
        words += " (inherited from an earlier version; this text was not measured)"
    return words


def has_better_skill(summary: RunSummary) -> bool:
    """Return whether the best skill of a run is not the initial one."""
    return summary.best is not None and summary.best.number != 0


class ResultFact(FrozenModel):
    """How a run ended: its result, cost, decisions, notes, and what to do next."""

    summary: RunSummary

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its end."""
        return self.summary.status == "completed"

    @property
    def result(self) -> str:
        """What the run achieved, in sentences; it depends on the measurements alone."""
        summary = self.summary
        if not self.is_complete:
            return self._describe_stop()
        if summary.claim is not None:
            sentences = [_describe_claim(summary, summary.claim)]
        elif summary.best is None:
            return "Nothing was measured."
        elif summary.best.number == 0:
            score = summary.score("baseline", Split.test) or summary.score("baseline", Split.val)
            sentences = [NO_BETTER]
            if score is not None:
                sentences.append(f"Its result: {_describe_score(score)}.")
        else:
            reason = f": {summary.missing[0]}" if summary.missing else ""
            document = describe_version(summary.best)
            return f"The best document is {document}. Its gain was not measured at the end{reason}."
        return " ".join((*sentences, *self._list_losses(), *self.list_doubts()))

    @property
    def verdict(self) -> str:
        """The result; if the run is not complete, with what to do next."""
        return (
            self.result if self.is_complete else f"{self.result} Next: {self._advise_after_stop()}."
        )

    @property
    def tone(self) -> Literal["better", "worse"] | None:
        """Whether the result is good or bad news."""
        claim = self.summary.claim
        if self.summary.status == "failed" or (claim is not None and claim.improvement.high < 0):
            return "worse"
        return "better" if self.is_complete and claim is not None and claim.confirmed else None

    @property
    def warning(self) -> str | None:
        """The result if the test or a control does not support the best document; else None."""
        claim = self.summary.claim
        if not self.is_complete or not has_better_skill(self.summary) or claim is None:
            return None
        if claim.improvement.split is not Split.test or (
            claim.confirmed and not self.list_doubts()
        ):
            return None
        return self.result

    @property
    def cost(self) -> str:
        """The price and the time."""
        return f"{SpendFact.of(self.summary.spend).words}; {format_duration(self.summary.seconds)}"

    @property
    def decisions(self) -> str:
        """How many steps ended in which way."""
        summary = self.summary
        counts = {each.action: each.count for each in summary.actions}
        unproven: tuple[GateAction, ...] = ("set_aside", "return")
        parts = [
            f"{summary.accepts} accepted",
            f"{summary.rejects} rejected",
            *(
                f"{counts[action]} {ACTION_WORDS[action]}"
                for action in unproven
                if action in counts
            ),
            f"{summary.skips} without a change",
        ]
        return f"{name_count(summary.steps, 'step')}, {', '.join(parts)}"

    def list_lines(self, folder: Path) -> Iterator[str]:
        """Yield the closing lines of a run, whose files are in a folder."""
        summary = self.summary
        yield self.result
        yield f"Cost: {self.cost}."
        if summary.best is not None and summary.best.number:
            yield f"Skill: {folder / 'best_skill.md'}"
            if summary.added_tokens > 0 or summary.best.examples:
                tokens = f"about {format_count(summary.added_tokens)} tokens"
                yield f"It adds {tokens} to each call{summary.best.examples_note}."
        yield f"Next: {self.describe_next(folder)}"
        yield from self._list_advice()

    def describe_next(self, folder: Path) -> str:
        """Return the command or the change that helps most after a run."""
        if not self.is_complete:
            return self._advise_after_stop()
        if self.summary.missing:
            return "run the same command again to measure what is missing"
        show = f"reflact show {shlex.quote(str(folder))} --items"
        if not has_better_skill(self.summary):
            return f"{show} --wrong"
        best = self.summary.score("best", Split.test)
        if best is not None and best.hard is not None and best.hard < OFTEN_WRONG:
            return f"{show} --changed, then with --wrong, since most are not solved yet"
        return f"{show} --changed"

    def list_doubts(self) -> list[str]:
        """Return what the controls say against the best document, one sentence each."""
        summary = self.summary
        scores = {
            score.name: score for score in summary.scores if score.split is summary.scores[-1].split
        }
        best = scores.get("best")
        if best is None or best.value is None:
            return []
        sentences = []
        constants = [score for score in scores.values() if score.answer is not None]
        top = max(constants, key=lambda score: score.value or 0.0, default=None)
        if top is not None and _reaches(top, best):
            always = describe_constant(top.answer or "")
            sentences.append(
                f"The best document is not better than {always}: {_compare_scores(best, top)}."
            )
        placebo = scores.get("placebo")
        if has_better_skill(summary) and placebo is not None and _reaches(placebo, best):
            compared = _compare_scores(placebo, best)
            sentences.append(
                f"A text about something else does as well as the best document: {compared}. "
                "So the gain may have nothing to do with what the document says."
            )
        return sentences

    def list_versions(self) -> Iterator[str]:
        """Yield the best and the last version, in one line if they are the same."""
        best = self.summary.best
        final = self.summary.final
        if best is not None and best == final:
            yield f"best and final: {describe_version(best)}"
            return
        if best is not None and self.is_complete:
            yield f"best: {describe_version(best)}"
        if final is not None:
            yield f"final: {describe_version(final)}"

    def list_notes(self) -> Iterator[str]:
        """Yield what a reader of the scores must know."""
        summary = self.summary
        yield from (f"warning: {warning}" for warning in summary.warnings)
        controls = {s.name: s for s in summary.scores if s.name in {"placebo", *SCORE_NAMES}}
        if controls:
            words = [
                f"{SCORE_NAMES.get(n, n)} is {describe_document(s)}" for n, s in controls.items()
            ]
            yield f"controls: {'; '.join(words)}"
        is_initial = summary.best is not None and summary.best.number == 0
        if is_initial and summary.scores and _read_setting(summary, "test.placebo"):
            yield "placebo: not measured, since there is no better document to compare it with"
        if summary.critic is not None:
            yield f"scores come from {_describe_critic(summary.critic)}"
        if summary.annotated_by is not None:
            yield f"failure analysts saw the scores of {_describe_critic(summary.annotated_by)}"
        if any(score.selected_on for score in summary.scores):
            yield (
                "best and final were selected on the validation items, so expect lower scores on "
                "new items"
            )
        for score in summary.scores:
            if len(score.buckets) > 1 and score.name in {"baseline", "best"}:
                types = ", ".join(f"{b.task_type} {b.hard:.3f} of {b.n}" for b in score.buckets)
                yield f"{score.name} on {SPLIT_WORDS[score.split]} by task type: {types}"
        for gain in self._list_gains():
            yield describe_gain(gain.name, "baseline", gain)
        yield from (f"not measured: {line}" for line in summary.missing)
        if summary.faults:
            kinds = ", ".join(f"{fault.count:,} x {fault.kind}" for fault in summary.faults)
            yield f"faults of calls: {kinds}"

    def _list_losses(self) -> Iterator[str]:
        """Yield how many rollouts of the last split have no score."""
        scores = self.summary.scores
        lost = max((s.unmeasured for s in scores if s.split is scores[-1].split), default=0)
        if lost:
            yield f"Not counted: {name_count(lost, 'rollout')} without a score."

    def _list_gains(self) -> Iterator[Improvement]:
        """Yield the improvements over the baseline that the claim does not tell."""
        summary = self.summary
        best = summary.best
        final = summary.final
        if best is not None and best == final and not best.number:
            return
        is_same = best is not None and final is not None and best.skill_hash == final.skill_hash
        claimed = None if summary.claim is None else summary.claim.improvement.split
        for gain in summary.improvements:
            is_repeated = gain.name == "final" and is_same
            if not is_repeated and (gain.name, gain.split) != ("best", claimed):
                yield gain

    def _list_advice(self) -> Iterator[str]:
        """Yield in a sentence what may lead to a better skill, if no gain is confirmed."""
        summary = self.summary
        claim = summary.claim
        if not self.is_complete or summary.missing or (claim is not None and claim.confirmed):
            return
        advice = []
        idle = sum(each.count for each in summary.actions if each.action == "no_patches")
        if summary.steps < FEW_STEPS:
            advice.append(
                f"take more steps than {summary.steps} (a larger train.num_epochs extends this "
                "run; a smaller train.batch_size needs another one)"
            )
        if model := _read_setting(summary, "models.optimizer.model"):
            often = 3 * idle >= summary.steps > 0
            reason = f", since {idle} of {summary.steps} steps had no edits" if often else ""
            advice.append(
                f"let a larger model than {model} write the edits{reason} (models.optimizer.model)"
            )
        if _read_setting(summary, "environment.description") == "":
            advice.append("say what a good answer is (environment.description)")
        initial = [score.skill_hash for score in summary.scores if score.name == "baseline"]
        if Skill(text="").hash in initial:
            advice.append("begin with instructions of your own, not with an empty document (skill)")
        if claim is not None and claim.improvement.mean > 0:
            items = f"{claim.improvement.n} {SPLIT_WORDS[claim.improvement.split]} items"
            advice.append(f"use more than {items}")
        if advice:
            yield f"For a better result: {'; or '.join(advice)}."

    def _describe_stop(self) -> str:
        summary = self.summary
        reason = "" if summary.reason is None else f": {summary.reason.rstrip('.')}"
        end = STOP_WORDS.get(summary.status, "Stopped")
        words = f"{end} after {name_count(summary.steps, 'step')}{reason}."
        if summary.best is None:
            return f"{words} Nothing was measured yet."
        if summary.best.number == 0:
            return f"{words} So far no better document was found."
        document = describe_version(summary.best)
        return f"{words} So far the best document is {document}; its test follows at the end."

    def _advise_after_stop(self) -> str:
        again = "run the same command or program again to resume"
        if self.summary.status == "cancelled":
            return again
        if self.summary.status == "budget":
            return f"raise the limit, then {again}"
        if (self.summary.reason or "").startswith(NO_REPORTS):
            other = "add --fork (in Python: fork=True), or name another out_dir"
            return f"mend the cause, then start another run, since these steps are decided: {other}"
        return f"mend the cause, then {again}, with --fork (in Python: fork=True) if keys changed"


def _read_setting(summary: RunSummary, key: str) -> JsonValue:
    """Return the value of a key in the configuration of a run; None if it is not there."""
    return dict(flatten_fields(summary.config)).get(key)


def _reaches(control: SkillScore, best: SkillScore) -> bool:
    return control.value is not None and best.value is not None and control.value >= best.value


def _compare_scores(one: SkillScore, other: SkillScore) -> str:
    return f"{one.value or 0:.2f} against {other.value or 0:.2f} on {SPLIT_WORDS[one.split]} items"


def _describe_claim(summary: RunSummary, claim: Claim) -> str:
    gain = claim.improvement
    before = summary.score("baseline", gain.split)
    after = summary.score("best", gain.split)
    if before is None or after is None:
        scores = f"on {gain.n} {SPLIT_WORDS[gain.split]} items"
    elif _is_count(before) and _is_count(after):
        of = "" if before.n == after.n else f" of {before.n}"
        scores = f"{_describe_score(after)} instead of {before.successes:.0f}{of}"
    else:
        scores = f"{_describe_score(after)} instead of {before.value or 0:.2f}"
    points, low, high = _format_points(gain)
    words = f"{_judge(claim)}: {scores} ({points} points; 95% interval {low} to {high})."
    if not claim.confirmed and gain.low > 0 and claim.chance is not None:
        words += (
            f" So few items differ that chance alone gives such a result in {claim.chance:.1%} of "
            f"cases; a confirmed one may have {CLAIM_LEVEL:.1%} at most."
        )
    if gain.split is Split.val:
        words += (
            " There is no test split, so this holds for these items only; expect less on new ones."
        )
    return words


def _judge(claim: Claim) -> str:
    if claim.confirmed:
        return "Better"
    if claim.improvement.high < 0:
        return "Worse than the initial document"
    return "Perhaps better, not confirmed" if claim.improvement.mean > 0 else "Not better"


def _describe_score(score: SkillScore) -> str:
    split = SPLIT_WORDS[score.split]
    if _is_count(score):
        return f"{score.successes:.0f} of {score.n} {split} items solved"
    trials = f", {score.trials} trials each" if score.trials > 1 else ""
    mean = "no score" if score.value is None else f"mean {_name_metric(score)} {score.value:.2f}"
    return f"{mean} on {score.n // score.trials} {split} items{trials}"


def _is_count(score: SkillScore) -> bool:
    """Whether a score is a share of solved items: one trial of 0 and 1, whose interval is
    Wilson's.
    """
    if (
        score.soft_weight
        or score.trials > 1
        or not score.n
        or score.successes != round(score.successes)
    ):
        return False
    return (score.low, score.high) == wilson_interval(round(score.successes), score.n)


def _describe_critic(critic: CriticDescription) -> str:
    line = (
        f"{critic.prompt} pinned to {name_count(critic.pairs, 'pair')} ({critic.snapshot[:12]}): "
    )
    measured = critic.accuracy
    if measured is None:
        return f"{line}its accuracy was not measured"
    line += f"mean absolute error {_format_estimate(measured.error)} of 10"
    if measured.accuracy is not None:
        line += f", pairwise accuracy {_format_estimate(measured.accuracy)}"
    return f"{line}, on {name_count(measured.traces, 'trace')}"


def _format_estimate(estimate: IntervalEstimate) -> str:
    return f"{estimate.value:.2f} (95% interval {estimate.low:.2f} to {estimate.high:.2f})"


# ------------------------------------------------------------------------------------ steps and
# edits


class StepFact(FrozenModel):
    """A step in figures: what the gate decided, and what led to it."""

    step: int
    epoch: int
    action: GateAction
    verdict: Verdict | None = None
    n_items: int | None = None
    n_failures: int = 0
    results: tuple[EditResult, ...] = ()
    replies: tuple[bool, ...] = ()
    current: SkillVersion
    best: SkillVersion

    @classmethod
    def of(cls, record: StepRecord) -> Self:
        """Return the figures of a committed step."""
        return cls(
            step=record.step,
            epoch=record.epoch,
            action=record.verdict.action,
            verdict=record.verdict,
            n_items=record.rollout.n,
            n_failures=record.n_failures,
            results=record.edits,
            replies=tuple(report.no_reply_reason is None for report in record.reports),
            current=record.current,
            best=record.best,
        )

    @property
    def decision(self) -> str:
        """The decision in words; for a document that the run had before, the one that it equals."""
        if self.verdict is not None and self.verdict.repeats is not None:
            return f"same as {self.verdict.repeats}"
        return ACTION_WORDS[self.action]

    @property
    def scores(self) -> str:
        """The scores that the gate compared; empty if it measured nothing."""
        if self.verdict is None or self.verdict.current_score is None:
            return ""
        return format_change(self.verdict.current_score, self.verdict.candidate_score)

    @property
    def solved(self) -> str:
        """The solved train items of all."""
        return f"{self.n_items - self.n_failures}/{self.n_items}" if self.n_items else ""

    @property
    def applied(self) -> str:
        """The applied edits of the chosen ones."""
        return f"{sum(result.status == 'applied' for result in self.results)}/{len(self.results)}"

    @property
    def line(self) -> str:
        """The step in one line."""
        kinds = {result.edit.op for result in self.results} & {"examples", "rewrite"}
        edits = next(iter(kinds), f"edits {self.applied}" if self.results else "")
        scores = f"val {self.scores}" if self.scores else ""
        solved = f"solved {self.solved}" if self.solved else ""
        end = f"v{self.current.number}"
        if self.best.number != self.current.number:
            end += f", best v{self.best.number}"
        if self.verdict is not None and self.verdict.repeats is not None:
            end += f"; {self.decision}"
        if not all(self.replies):
            analysts = name_count(len(self.replies), "analyst")
            end += f"; no valid reply from {self.replies.count(False)} of {analysts}"
        action = ACTION_WORDS[self.action]
        return f"step {self.step:<4} {action:<12}  {scores:<22} {solved:<12}  {edits:<9}  {end}"


def list_step_columns(steps: Sequence[StepFact]) -> Columns:
    """Return the columns of a run's committed steps."""
    return {
        "step": [f"{step.step:,}" for step in steps],
        "epoch": [f"{step.epoch}" for step in steps],
        "decision": [step.decision for step in steps],
        "val": [step.scores or "-" for step in steps],
        "solved": [step.solved or "0/0" for step in steps],
        "edits": [step.applied for step in steps],
        "skill": [f"v{step.current.number}" for step in steps],
    }


class EditFact(FrozenModel):
    """An edit of a step's pool, or one that was made without a pool: its texts, outcome
    and origin.
    """

    kind: EditKind
    target: str
    content: str
    outcome: str
    origin: str
    evidence: str = ""

    @property
    def words(self) -> str:
        """The edit in one line."""
        texts = " ".join(repr(text) for text in (self.target, self.content) if text)
        evidence = f"; evidence: {self.evidence}" if self.evidence else ""
        return f"{self.outcome}: {self.kind} {texts}; {self.origin}{evidence}"


def list_edit_facts(record: StepRecord) -> list[EditFact]:
    """Return the edits of a step: those that were carried out, then those that were not chosen."""
    pool = record.merged.patch.edits
    facts = []
    for result in record.edits:
        reason = "" if result.reason is None else f" ({result.reason})"
        facts.append(_build_edit_fact(record, result.edit, f"{result.status}{reason}"))
    carried_out = [result.edit for result in record.edits]
    facts += [
        _build_edit_fact(record, edit, "not chosen") for edit in pool if edit not in carried_out
    ]
    return facts


def _build_edit_fact(record: StepRecord, edit: Edit, outcome: str) -> EditFact:
    pool = record.merged.patch.edits
    chosen = record.chosen.patch.edits
    kind = "" if edit.source_type is None else f"{edit.source_type} "
    origin = f"supported by {name_count(edit.support_count, f'{kind}case')}"
    if edit in chosen:
        ranked = ", ranked by the optimizer" if record.chosen.ranked else ""
        origin += f", number {chosen.index(edit) + 1} of {len(pool)} in the pool{ranked}"
    reports = [report for report in record.reports if edit in report.patch.edits]
    merged = ""
    if not reports:
        types = {edit.source_type}
        reports = [
            r for r in record.reports if r.patch.edits and (None in types or r.source_type in types)
        ]
        merged = f", merged from {name_count(len(reports), 'report')}"
    ids = [item_id for report in reports for item_id in report.item_ids]
    if ids:
        origin += f", asked for by an analysis of {list_items(ids)}{merged}"
    return EditFact(
        kind=edit.op,
        target=edit.target,
        content=edit.content,
        outcome=outcome,
        origin=origin,
        evidence=edit.evidence,
    )


def list_step_details(record: StepRecord) -> Iterator[LabelledText]:
    """Yield the verdict of a step, and all that led to it, but its edits."""
    yield "verdict", record.verdict.reason
    for pattern in dict.fromkeys(record.patterns):
        yield (
            f"pattern in {name_count(pattern.count, 'case')}",
            f"{pattern.type}: {pattern.description}",
        )
    for report in record.reports:
        minibatch = name_minibatch(report.source_type, report.index, report.batch)
        if report.no_reply_reason is not None:
            yield f"no report on {minibatch}", report.no_reply_reason
        if report.triage_no_reply_reason is not None:
            yield f"no triage of {minibatch}", report.triage_no_reply_reason
        yield from (("reminder", reminder) for reminder in report.reminders)
    for rewrite in record.rewrites:
        if rewrite.document is None:
            yield f"rewrite {rewrite.number + 1}", f"none, because {rewrite.reason}"
        elif rewrite.reasoning:
            yield f"reasoning of rewrite {rewrite.number + 1}", rewrite.reasoning
    yield from (("raced", entry.words) for entry in record.race)
    yield from _list_choice(record)
    if record.rewrite_summary:
        yield "rewrite", record.rewrite_summary
    for fallback in (*record.merged.fallbacks, *record.chosen.fallbacks, *record.fallbacks):
        yield "fallback", format_fallback(fallback)
    if record.notes:
        yield "notes of the appendix", " / ".join(record.notes)


def _list_choice(record: StepRecord) -> Iterator[LabelledText]:
    """Yield how edits were pooled and chosen."""
    pool = record.merged.patch.edits
    chosen = record.chosen
    proposals = sum(len(report.patch.edits) for report in record.reports)
    if proposals:
        sources = (
            f"{name_count(proposals, 'proposal')} in {name_count(len(record.reports), 'report')}"
        )
        yield "proposed", f"{name_count(len(pool), 'edit')}, out of {sources}"
        if record.merged.patch.reasoning:
            label = "merge" if any(edit.merge_level for edit in pool) else "reasoning"
            yield label, record.merged.patch.reasoning
    if record.rewrites or not chosen.pool_size:
        return
    of = f"of {name_count(chosen.pool_size, 'edit')}"
    size = chosen.decision
    if size is None:
        limit = "sets no limit" if chosen.budget is None else f"allows {chosen.budget}"
        yield "step size", f"{len(chosen.patch.edits)} {of}; the schedule {limit}"
    else:
        risks = f"; risks: {size.risks}" if size.risks else ""
        yield (
            "step size",
            f"{size.count} {of}, confidence {size.confidence:.2f}: {size.reasoning}{risks}",
        )
    if chosen.ranked:
        yield "ranking", chosen.patch.reasoning or "without a reason"


def format_fallback(fallback: Fallback) -> str:
    """Return what failed, why, and the fallback."""
    return f"{_name_call(fallback)}: {fallback.reason}; used instead: {fallback.replacement}"


def shorten_fallback(fallback: Fallback) -> str:
    """Return the fallback first, then what failed, and why in few words."""
    return (
        f"{fallback.replacement} (instead of: {_name_call(fallback)}): "
        f"{shorten_reason(fallback.reason)}"
    )


def _name_call(fallback: Fallback) -> str:
    purpose, _, part = fallback.label.partition("/")
    return describe_call(purpose, part)


def describe_epoch(record: EpochRecord | events.EpochCommitted) -> str:
    """Return the end of an epoch in one line."""
    words = [f"epoch {record.epoch:<2}"]
    slow = record.slow_update
    if slow is not None:
        words.append(f"slow update {slow.action}")
        if slow.verdict is not None:
            scores = format_change(slow.verdict.current_score, slow.verdict.candidate_score)
            words.append(f"val {scores}")
    if record.meta_skill is not None:
        words.append("meta skill written")
    words += [f"fallback {shorten_fallback(fallback)}" for fallback in record.fallbacks]
    return "  ".join([*words, f"current v{record.current.number}, best v{record.best.number}"])


def list_epoch_details(end: EpochRecord) -> Iterator[LabelledText]:
    """Yield what happened after the last step of an epoch."""
    slow = end.slow_update
    if end.comparisons:
        counts = Counter(comparison.category for comparison in end.comparisons)
        words = ", ".join(
            f"{count} {OUTCOME_WORDS[category]}" for category, count in counts.items()
        )
        yield "compared with the epoch before", words
    if slow is not None:
        if slow.verdict is not None:
            yield "slow update verdict", slow.verdict.reason
        if slow.helped != "none":
            yield "earlier guidance", slow.helped
        if slow.reasoning:
            yield "slow update reasoning", slow.reasoning
        if slow.guidance:
            yield "guidance", slow.guidance
    if end.meta_skill_reasoning:
        yield "memory reasoning", end.meta_skill_reasoning
    if end.meta_skill:
        yield "new memory of the optimizer", end.meta_skill
    yield from (("fallback", format_fallback(fallback)) for fallback in end.fallbacks)


# ---------------------------------------------------------------------------------------------
# items


class ItemFact(FrozenModel):
    """An item with what the target answered to it under the initial and the best document."""

    item: ItemResult

    @property
    def item_id(self) -> str:
        """The id in one line."""
        return escape_line(self.item.item_id)

    @property
    def outcome(self) -> str:
        """How its score changed."""
        return OUTCOME_WORDS[self.item.category]

    @property
    def texts(self) -> dict[str, str]:
        """The input, the expected answer, and the first answer under each document."""
        answers = {}
        for name, result in (("baseline", self.item.baseline), ("best", self.item.best)):
            reason = f"({result.error or 'not measured'})"
            answers[name] = reason if result.answer is None else result.answer
        return {
            "input": format_value(self.item.input),
            "expected": format_value(self.item.expected),
            **answers,
        }

    @property
    def scores(self) -> str:
        """The hard scores under both documents, such as ``0 -> 1``."""
        results = (self.item.baseline, self.item.best)
        return " -> ".join(
            "-" if result.hard is None else f"{result.hard:.2g}" for result in results
        )

    @property
    def metrics(self) -> str:
        """The further numbers under both documents, a line for each, such as ``seconds 3.2 ->
        1.5``.
        """
        before = average_metrics(self.item.baseline.rollouts)
        after = average_metrics(self.item.best.rollouts)
        names = sorted({*before, *after})
        return "\n".join(
            f"{escape_line(name)} {_format_metric(before, name)} -> {_format_metric(after, name)}"
            for name in names
        )

    @property
    def usage(self) -> Usage | None:
        """What the calls behind its answers took; None if they were not seen."""
        results = (self.item.baseline, self.item.best)
        usages = [result.usage for result in results if result.usage is not None]
        return sum(usages, Usage()) if usages else None

    @property
    def cost(self) -> str:
        """The price if it is known, otherwise the tokens."""
        usage = self.usage
        if usage is None:
            return "-"
        return (
            f"{SpendFact(usage=usage).tokens} tokens"
            if usage.usd is None
            else format_usd(usage.usd)
        )

    @property
    def title(self) -> str:
        """The item in one line."""
        kind = "" if self.item.task_type is None else f", {escape_line(self.item.task_type)}"
        return f"{self.item_id} ({self.item.split.value}{kind}): {self.outcome}, {self.scores}"

    def list_parts(self) -> Iterator[LabelledText]:
        """Yield all its texts: input, expected answer, and each document's conversations and
        scores.
        """
        yield "input", format_value(self.item.input)
        if self.item.expected is not None:
            yield "expected", format_value(self.item.expected)
        for name, result in (("baseline", self.item.baseline), ("best", self.item.best)):
            if not result.rollouts:
                yield name, f"not measured: {result.error or 'no stored rollout'}"
            for number, rollout in enumerate(result.rollouts, start=1):
                heading = name if len(result.rollouts) == 1 else f"{name}, trial {number}"
                heading += f", score {describe_score(rollout.score)}"
                if number == 1 and result.usage is not None:
                    heading += f", {SpendFact(usage=result.usage).details.partition(', ')[2]}"
                yield heading, rollout.answer
                if rollout.feedback:
                    yield "  feedback", rollout.feedback
                if len(rollout.turns) > 2:
                    yield from ((f"  {turn.role}", turn.content) for turn in rollout.turns)


def summarize_items(items: Sequence[ItemResult]) -> str:
    """Return how many items of a split are better, worse, still wrong, and right under both
    documents.
    """
    counts = Counter(item.category for item in items)
    words = [
        f"{counts[name]:,} {word}" for name, word in OUTCOME_WORDS.items() if counts[name] or name
    ]
    return f"{name_count(len(items), f'{items[0].split.value} item')}: {', '.join(words)}"


# ------------------------------------------------------------------------------ lists and
# comparisons


def list_run_columns(runs: Sequence[RunListing], root: Path) -> Columns:
    """Return a list of runs; their folders are shown as below ``root``."""
    return {
        "folder": [escape_line(shorten_path(run.folder, root)) for run in runs],
        "run": [escape_line(run.run_id) for run in runs],
        "status": [describe_status(run) for run in runs],
        "steps": [f"{run.steps:,}" for run in runs],
        "val": [format_score(run.val) for run in runs],
        "baseline": [format_score(run.baseline) for run in runs],
        "test": [format_score(run.test) for run in runs],
        "cost": [SpendFact(usage=run.usage).price for run in runs],
        "date": [f"{run.created:%Y-%m-%d}" for run in runs],
    }


def describe_status(run: RunListing) -> str:
    """Return the status of a run; ``measured`` if only documents were measured in its folder."""
    return run.status or ("measured" if run.measured and not run.steps else "open")


def describe_listing(run: RunListing) -> str:
    """Return the state of a run in a sentence."""
    best = "" if run.val is None else f"; best validation score {format_score(run.val)}"
    state = "not ended" if run.status is None else run.status
    return (
        f"{state.capitalize()}: {name_count(run.steps, 'step')}, "
        f"{SpendFact(usage=run.usage).words}{best}."
    )


def shorten_path(folder: str, root: Path) -> str:
    """Return the path of a folder as below ``root``, if it is there; ``root`` itself is shown by
    its name.
    """
    path = Path(folder)
    if path == root:
        return path.resolve().name or folder
    return str(path.relative_to(root)) if path.is_relative_to(root) else folder


def list_comparison_columns(comparison: RunComparison) -> Columns:
    """Return the runs of a comparison with the scores of their best skills, cost and time."""
    runs = comparison.runs
    return {
        "run": [escape_line(run.name) for run in runs],
        "status": [run.status or "open" for run in runs],
        "steps": [f"{run.steps:,}" for run in runs],
        "val": [_format_compared(run.val) for run in runs],
        "test": [_format_compared(run.test) for run in runs],
        "calls": [format_count(run.usage.calls) for run in runs],
        "cost": [SpendFact(usage=run.usage).price for run in runs],
        "time": ["-" if run.seconds is None else format_duration(run.seconds) for run in runs],
        "characters": [format_count(len(run.best.skill.text)) for run in runs],
    }


def _format_compared(score: SkillScore | None) -> str:
    return "-" if score is None else format_score(score.hard) + ("*" if score.unmeasured else "")


def list_gain_lines(comparison: RunComparison) -> Iterator[str]:
    """Yield the gain of each further run over the first one, and why scores cannot be compared, if
    so.
    """
    first, *others = (run.name for run in comparison.runs)
    for gain in comparison.gains:
        yield describe_gain(gain.name, first, gain, "common item")
    identities = next((s.values for s in comparison.settings if s.key == "environment"), ())
    graders = [_read_grader(identity) for identity in identities] or [None] * len(comparison.runs)
    measured = {gain.name for gain in comparison.gains}
    for name, grader in zip(others, graders[1:], strict=True):
        if name not in measured:
            yield (
                f"{name} and {first} have no measured items in common; the usual reason is other "
                "data, another split (data.ratio) or other ids (data.fields.id)"
            )
        elif grader != graders[0]:
            noun = "environments" if grader in identities or graders[0] in identities else "graders"
            yield (
                f"{name} and {first} have different {noun}, so their difference may come from "
                f"the {noun}"
            )


def _read_grader(identity: JsonValue) -> JsonValue:
    """Return the grader in the identity of an environment; the whole identity if it names none."""
    with suppress(ValueError):
        fields = json.loads(str(identity))
        return fields["grader"] if isinstance(fields, dict) and "grader" in fields else identity
    return identity


def list_setting_rows(comparison: RunComparison) -> list[tuple[str, tuple[str, ...]]]:
    """Return the settings and identities that differ, each with the value of each run."""
    return [(each.key, tuple(map(format_setting, each.values))) for each in comparison.settings]


def format_setting(value: JsonValue) -> str:
    """Return a setting: a text as it is, a list of texts with commas, else JSON; a dash if there is
    none.
    """
    if value is None:
        return "-"
    texts = [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
    shown = ", ".join(texts) if texts and texts == value else format_value(value)
    return CONTENT_HASH.sub(r"\1", shown)
