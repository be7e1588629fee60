"""Every sentence and figure about a run that people see. Terminal, pages and JSON only lay them
out.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import JsonValue

from reflact import events
from reflact.gate.intervals import CLAIM_LEVEL, wilson_interval
from reflact.jsonutil import flatten_fields
from reflact.messages import NO_REPORTS, describe_call, name_minibatch
from reflact.records import (
    UNPROVEN,
    Claim,
    CriticDescription,
    EpochRecord,
    Improvement,
    IntervalEstimate,
    JudgeDescription,
    RunStatus,
    RunSummary,
    SkillComparison,
    SkillScore,
    SkillVersion,
    Spend,
    StageCost,
    StepRecord,
    Usage,
)
from reflact.reporting.items import OUTCOME_WORDS, MatrixRow
from reflact.text import (
    describe_constant,
    escape_line,
    format_change,
    format_count,
    format_duration,
    format_score,
    format_usd,
    format_value,
    list_items,
    name_count,
    name_times,
    shorten,
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
    Split,
    Verdict,
)

if TYPE_CHECKING:
    from reflact.reporting.history import ComparedRun, RunComparison, RunListing

# The cells of a row of a table by the headings of its columns.
Row = dict[str, str]

# A text with its label, such as a part of a step; it may come from a model.
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
# Scores that show what a gain is not due to.
CONTROL_NAMES = ("placebo", "shuffled", "null_empty", "null_refusal", "null_frequent")

SCORE_NAMES = {"null_empty": "empty", "null_refusal": "refusal", "null_frequent": "frequent"}

# A loss of one, of several, and what became of it.
LOSS_WORDS = {
    "invalid reply": ("reply of the optimizer", "replies of the optimizer", "invalid"),
    "dropped analyst": ("analyst", "analysts", "without a report"),
    "replaced decision": ("decision of the optimizer", "decisions of the optimizer", "replaced"),
    "lost rollout": ("rollout", "rollouts", "without a score in all"),
}

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

# The most characters of a document's name in a table; it may be the path of a file.
MAX_NAME_CHARS = 40

# A run of fewer steps has tried few edits.
FEW_STEPS = 8


# ------------------------------------------------------------------------------ figures and spend


def describe_score(score: Score | None) -> str:
    """Return a score with its soft part and metrics: ``1 (soft 0.5, seconds 3.2)``."""
    if score is None:
        return "-"
    further = [("soft", score.soft)] if score.soft != score.hard else []
    further += score.metrics.items()
    words = ", ".join(f"{escape_line(name)} {value:.4g}" for name, value in further)
    return f"{score.hard:.3g} ({words})" if words else f"{score.hard:.3g}"


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
        unpriced = {e.role for e in entries if e.usage.calls and e.usage.usd is None}
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
        used = self.usage
        line = f"{name_count(used.calls, 'call')}, {format_count(used.input_tokens)} tokens in"
        line += f", {format_count(used.output_tokens)} out"
        if used.usd is not None:
            line += f", {format_usd(used.usd)}"
        uncertain = [name_count(self.n_unsettled, "interrupted call")] if self.n_unsettled else []
        if used.uncounted:
            uncertain.append(f"{used.uncounted:,} not counted by the provider")
        if not uncertain:
            return line
        line += f"; at most {SpendFact(usage=self.worst_case).tokens} tokens"
        if self.worst_case.usd is not None:
            line += f", {format_usd(self.worst_case.usd)}"
        return f"{line} more for {' and '.join(uncertain)}"


def build_usage_row(usage: Usage) -> Row:
    """Return what calls took in a table."""
    return {
        "calls": f"{usage.calls:,}",
        "tokens in": format_count(usage.input_tokens),
        "of them cached": format_count(usage.cached_tokens),
        "tokens out": format_count(usage.output_tokens),
        "cost": SpendFact(usage=usage).price,
    }


def format_spend(spend: Sequence[Spend]) -> tuple[str, ...]:
    """Return the spend of each role, one line each."""
    by_role: dict[str, list[Spend]] = {}
    for entry in spend:
        by_role.setdefault(entry.role, []).append(entry)
    return tuple(f"{role}: {SpendFact.of(by_role[role]).details}" for role in sorted(by_role))


def format_stage_costs(costs: Sequence[StageCost]) -> tuple[str, ...]:
    """Return time and spend of each stage, one line each."""
    lines = []
    for cost in costs:
        parts = (f"{cost.stage} {format_duration(cost.seconds)}", *format_spend(cost.spend))
        lines.append(f"took: {'; '.join(parts)}")
    return tuple(lines)


# ----------------------------------------------------------------------------- scores and results


def name_scores(scores: Sequence[SkillScore]) -> list[tuple[str, SkillScore]]:
    """Return scores with the names of their documents; an equal best and final share an entry."""
    keys = {(score.name, score.split, score.skill_hash) for score in scores}
    named = []
    for score in scores:
        name = SCORE_NAMES.get(score.name, score.name)
        if name == "best" and ("final", score.split, score.skill_hash) in keys:
            name = "best, final"
        is_named = name == "final" and ("best", score.split, score.skill_hash) in keys
        if not is_named:
            named.append((shorten(escape_line(name), MAX_NAME_CHARS), score))
    return named


def list_score_rows(scores: Sequence[SkillScore], *, with_hash: bool = False) -> list[Row]:
    """Return the scores of documents on splits, each with its count and 95% interval."""
    has_unmeasured = any(score.unmeasured for score in scores)
    has_soft = any(score.soft != score.hard for score in scores)
    rows = []
    for name, score in name_scores(scores):
        row = {"document": name, "split": score.split.value, "answers": f"{score.n:,}"}
        if has_unmeasured:
            row["unmeasured"] = f"{score.unmeasured:,}"
        row["solved"] = f"{score.successes:g}" if score.n else "-"
        row["score"] = format_score(score.hard)
        row["95% interval"] = "-"
        if score.low is not None:
            row["95% interval"] = f"{format_score(score.low)} to {format_score(score.high)}"
        if has_soft:
            row["soft score"] = format_score(score.soft)
        if with_hash:
            row["sha-256"] = score.skill_hash[:8]
        for metric in list_metrics(scores):
            row[f"mean {escape_line(metric)}"] = _format_metric(score.metrics, metric)
        rows.append(row)
    return rows


def list_metrics(scores: Sequence[SkillScore]) -> list[str]:
    """Return the names of the environment's further numbers."""
    return sorted({name for score in scores for name in score.metrics})


def _format_metric(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else "-"


def describe_document(score: SkillScore) -> str:
    """Return which document or constant a score is of; empty if its name is that of a file."""
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
        f"{points} points{metric} (95% interval {low} to {high}, {name_count(gain.n, noun)})"
    )


def list_evaluation_gains(compared: SkillComparison) -> Iterator[str]:
    """Yield what the document of an ``eval`` gains over each of the others."""
    for gain in compared.improvements:
        yield describe_gain(compared.skill.name, gain.name, gain)


def _format_points(gain: Improvement) -> list[str]:
    """Return mean, low and high in points; with a decimal if a whole number would hide a gain."""
    values = [100 * value for value in (gain.mean, gain.low, gain.high)]
    digits = 1 if any(0 < abs(value) < 1 for value in values) else 0
    texts = [f"{value:+.{digits}f}" for value in values]
    return ["0" if float(text) == 0 else text for text in texts]


def _name_metric(measured: SkillScore | Improvement) -> str:
    return {0.0: "score", 1.0: "soft score"}.get(measured.soft_weight, "mixed score")


def describe_version(version: SkillVersion) -> str:
    """Return a version with its origin and its validation score, if it has one."""
    words = f"v{version.number} from {version.origin}"
    if version.score is not None:
        words += f" (validation {format_score(version.score)}"
        if version.n is not None and version.trials is not None:
            words += f", {name_count(version.n, 'item')} measured {name_times(version.trials)}"
        words += ")"
    if version.inherited:
        words += " (inherited from an earlier version; this text was not measured)"
    return words


class ResultFact(FrozenModel):
    """How a run ended: its result, cost, decisions, notes, and what to do next."""

    summary: RunSummary

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its end."""
        return self.summary.status == "completed"

    @property
    def has_better_skill(self) -> bool:
        """Whether the best skill is not the initial one."""
        return self.summary.best is not None and self.summary.best.number != 0

    @property
    def result(self) -> str:
        """What the run achieved, in sentences; it depends on the measurements alone."""
        summary = self.summary
        if not self.is_complete:
            return " ".join((self._describe_stop(), *self.list_losses()))
        if summary.best is None and summary.claim is None:
            return "Nothing was measured."
        if summary.claim is not None:
            sentences = [_describe_claim(summary, summary.claim)]
        elif not self.has_better_skill:
            sentences = ["No better document was found; best_skill.md is your initial one."]
            score = summary.score("baseline", Split.test) or summary.score("baseline", Split.val)
            if score is not None:
                sentences.append(f"Its result: {_describe_result(score)}.")
        else:
            assert summary.best is not None
            reason = f": {summary.missing[0]}" if summary.missing else ""
            document = describe_version(summary.best)
            words = (
                f"The best document is {document}. Its gain was not measured at the end{reason}."
            )
            return " ".join((words, *self.list_losses()))
        lost = [s.unmeasured for s in summary.scores if s.split is summary.scores[-1].split]
        if any(lost):
            sentences.append(f"Not counted: {name_count(max(lost), 'rollout')} without a score.")
        sentences += (*self.list_doubts(), *self.list_losses())
        if summary.judge is not None:
            sentences.append(describe_judge(summary.judge))
        return " ".join(sentences)

    @property
    def verdict(self) -> str:
        """The result; if the run is not complete, with what to do next."""
        if self.is_complete:
            return self.result
        return f"{self.result} Next: {self._advise_after_stop()}."

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
        if not self.is_complete or not self.has_better_skill or claim is None:
            return None
        is_supported = claim.confirmed and not self.list_doubts()
        if claim.improvement.split is not Split.test or is_supported:
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
        parts = [
            name_count(summary.steps, "step"),
            f"{summary.accepts} accepted",
            f"{summary.rejects} rejected",
        ]
        parts += [
            f"{each.count} {ACTION_WORDS[each.action]}"
            for each in summary.actions
            if each.action in UNPROVEN
        ]
        return ", ".join((*parts, f"{summary.skips} without a change"))

    def list_lines(self, folder: Path) -> Iterator[str]:
        """Yield the closing lines of a run, whose files are in a folder."""
        summary = self.summary
        yield self.result
        yield f"Cost: {self.cost}."
        if summary.best is not None and self.has_better_skill:
            yield f"Skill: {folder / 'best_skill.md'}"
            if summary.added_tokens > 0 or summary.best.examples:
                tokens = f"about {format_count(summary.added_tokens)} tokens"
                yield f"It adds {tokens} to each call{summary.best.examples_note}."
        yield f"Next: {self.describe_next(folder)}"
        advice = self._list_advice()
        if advice:
            yield f"For a better result: {'; or '.join(advice)}."

    def describe_next(self, folder: Path) -> str:
        """Return the command or the change that helps most after a run."""
        if not self.is_complete:
            return self._advise_after_stop()
        if self.summary.missing:
            return "run the same command again to measure what is missing"
        show = f"reflact show {shlex.quote(str(folder))} --items"
        if not self.has_better_skill:
            return f"{show} --wrong"
        best = self.summary.score("best", Split.test)
        if best is not None and best.hard is not None and best.hard < OFTEN_WRONG:
            return f"{show} --changed, then with --wrong, since most are not solved yet"
        return f"{show} --changed"

    def list_doubts(self) -> list[str]:
        """Return what the controls say against the best document, one sentence each."""
        summary = self.summary
        scores = {s.name: s for s in summary.scores if s.split is summary.scores[-1].split}
        best = scores.get("best")
        if best is None or best.value is None:
            return []
        sentences = []
        constants = [score for score in scores.values() if score.answer is not None]
        top = max(constants, key=lambda score: score.value or 0.0, default=None)
        if top is not None and top.value is not None and top.value >= best.value:
            always = describe_constant(top.answer or "")
            compared = _compare_scores(best, top)
            sentences.append(f"The best document is not better than {always}: {compared}.")
        placebo = scores.get("placebo")
        is_reached = placebo is not None and (placebo.value or 0.0) >= best.value
        if placebo is not None and is_reached and self.has_better_skill:
            compared = _compare_scores(placebo, best)
            sentences.append(
                f"A text about something else does as well as the best document: {compared}. "
                "So the gain may have nothing to do with what the document says."
            )
        shuffled = scores.get("shuffled")
        if shuffled is not None and (shuffled.value or 0.0) >= best.value:
            compared = _compare_scores(shuffled, best)
            sentences.append(
                f"With shuffled answers, its examples do as well: {compared}. So they teach the "
                "form of an answer, and not which one is right."
            )
        return sentences

    def list_losses(self) -> Iterator[str]:
        """Yield what was lost on the way to the result, in one sentence if anything was."""
        words = []
        for loss in self.summary.losses:
            singular, plural, end = LOSS_WORDS[loss.kind]
            if loss.total is None:
                count = name_count(loss.count, singular, plural)
            else:
                count = f"{loss.count:,} of {name_count(loss.total, singular, plural)}"
            words.append(f"{count} {end}")
        if words:
            yield f"On the way: {'; '.join(words)}."

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

    def list_controls(self) -> Iterator[str]:
        """Yield what the names of the controls in a table of scores mean, in a line if any."""
        scores = {s.name: s for s in self.summary.scores if s.name in CONTROL_NAMES}
        words = [f"{SCORE_NAMES.get(n, n)} is {describe_document(s)}" for n, s in scores.items()]
        if words:
            yield f"controls: {'; '.join(words)}"

    def list_notes(self) -> Iterator[str]:
        """Yield what a reader of the scores must know, other than warnings."""
        summary = self.summary
        is_initial = summary.best is not None and summary.best.number == 0
        if is_initial and summary.scores and _read_setting(summary, "test.placebo"):
            yield "placebo: not measured, since there is no better document to compare it with"
        if summary.critic is not None:
            yield f"scores come from {_describe_critic(summary.critic)}"
        if summary.judge is not None and not self.is_complete:
            yield describe_judge(summary.judge)
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

    def _list_gains(self) -> Iterator[Improvement]:
        """Yield the improvements over the baseline that the claim does not tell."""
        summary = self.summary
        is_same = summary.best is not None and summary.best == summary.final
        if is_same and not self.has_better_skill:
            return
        claimed = None if summary.claim is None else summary.claim.improvement.split
        for gain in summary.improvements:
            is_repeated = is_same and gain.name == "final"
            if not is_repeated and (gain.name, gain.split) != ("best", claimed):
                yield gain

    def _list_advice(self) -> list[str]:
        """Return what may lead to a better skill, if no gain is confirmed."""
        summary = self.summary
        claim = summary.claim
        if not self.is_complete or summary.missing or (claim is not None and claim.confirmed):
            return []
        advice = []
        if summary.steps < FEW_STEPS:
            advice.append(f"take more steps than {summary.steps} (a larger train.num_epochs)")
        if model := _read_setting(summary, "models.optimizer.model"):
            advice.append(f"let a larger model than {model} write (models.optimizer.model)")
        if _read_setting(summary, "environment.description") == "":
            advice.append("say what a good answer is (environment.description)")
        if claim is not None and claim.improvement.mean > 0:
            split = SPLIT_WORDS[claim.improvement.split]
            advice.append(f"use more than {claim.improvement.n} {split} items")
        return advice

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
        scores = f"{_describe_result(after)} instead of {before.successes:.0f}{of}"
    else:
        scores = f"{_describe_result(after)} instead of {before.value or 0:.2f}"
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


def _describe_result(score: SkillScore) -> str:
    split = SPLIT_WORDS[score.split]
    if _is_count(score):
        return f"{score.successes:.0f} of {score.n} {split} items solved"
    trials = f", {score.trials} trials each" if score.trials > 1 else ""
    mean = "no score" if score.value is None else f"mean {_name_metric(score)} {score.value:.2f}"
    return f"{mean} on {score.n // score.trials} {split} items{trials}"


def _is_count(score: SkillScore) -> bool:
    """Whether a score is a share of solved items: one trial of 0 and 1, with Wilson's interval."""
    solved = round(score.successes)
    if score.soft_weight or score.trials > 1 or not score.n or score.successes != solved:
        return False
    return (score.low, score.high) == wilson_interval(solved, score.n)


def _describe_critic(critic: CriticDescription) -> str:
    pairs = name_count(critic.pairs, "pair")
    line = f"{critic.prompt} pinned to {pairs} ({critic.snapshot[:12]}): "
    measured = critic.accuracy
    if measured is None:
        return f"{line}its accuracy was not measured"
    line += f"mean absolute error {_format_estimate(measured.error)} of 10"
    if measured.accuracy is not None:
        line += f", pairwise accuracy {_format_estimate(measured.accuracy)}"
    return f"{line}, on {name_count(measured.traces, 'trace')}"


def describe_judge(judge: JudgeDescription) -> str:
    """Return who judged the sentences of a rubric, and how often it errs, in a sentence."""
    votes = "" if judge.votes == 1 else f", {judge.votes} votes"
    who = f"{judge.model} judged the sentences ({judge.prompt}{votes})"
    error = judge.error
    if error is None:
        return f"{who}; how often it errs is unknown, because no marks measure it."
    n = error.met + error.unmet
    wrong = error.false_met + error.false_unmet
    words = (
        f"{who}; it errs on {wrong} of {n} marked sentences: it calls {error.false_met} of "
        f"{error.unmet} met that are not, and {error.false_unmet} of {error.met} not met that are"
    )
    if error.unjudged:
        words += f"; {error.unjudged} more got no valid reply"
    return f"{words}."


def _format_estimate(estimate: IntervalEstimate) -> str:
    return f"{estimate.value:.2f} (95% interval {estimate.low:.2f} to {estimate.high:.2f})"


# ------------------------------------------------------------------------- steps, edits and epochs


class StepFact(FrozenModel):
    """A step in figures: what the gate decided, and what led to it."""

    step: int
    epoch: int
    action: GateAction
    verdict: Verdict | None = None
    n_items: int = 0
    n_failures: int = 0
    results: tuple[EditResult, ...] = ()
    n_analysts: int = 0
    n_unanswered: int = 0
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
            n_analysts=len(record.reports),
            n_unanswered=sum(r.no_reply_reason is not None for r in record.reports),
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
        return f"{self.n_items - self.n_failures}/{self.n_items}"

    @property
    def applied(self) -> str:
        """The applied edits of the chosen ones."""
        return f"{sum(result.status == 'applied' for result in self.results)}/{len(self.results)}"

    @property
    def line(self) -> str:
        """The step in one line."""
        kinds = {result.edit.op for result in self.results} & {"examples", "rewrite"}
        made = f"edits {self.applied}" if self.results else ""
        made = next(iter(kinds), made)
        scores = f"val {self.scores}" if self.scores else ""
        solved = f"solved {self.solved}" if self.n_items else ""
        end = f"v{self.current.number}"
        if self.best.number != self.current.number:
            end += f", best v{self.best.number}"
        if self.verdict is not None and self.verdict.repeats is not None:
            end += f"; {self.decision}"
        if self.n_unanswered:
            analysts = name_count(self.n_analysts, "analyst")
            end += f"; no valid reply from {self.n_unanswered} of {analysts}"
        action = ACTION_WORDS[self.action]
        return f"step {self.step:<4} {action:<12}  {scores:<22} {solved:<12}  {made:<9}  {end}"

    @property
    def row(self) -> Row:
        """The step in a table."""
        return {
            "step": f"{self.step:,}",
            "epoch": f"{self.epoch}",
            "decision": self.decision,
            "val": self.scores or "-",
            "solved": self.solved,
            "edits": self.applied,
            "skill": f"v{self.current.number}",
        }


def describe_commit(record: StepRecord | EpochRecord) -> str:
    """Return a commit with its decision: ``step 3: new best, 0.450 -> 0.833``."""
    words = f"step {record.step}"
    if isinstance(record, EpochRecord):
        words = f"slow update of epoch {record.epoch}"
    verdict = record.verdict
    if verdict is None:
        return words
    scores = format_change(verdict.current_score, verdict.candidate_score)
    return f"{words}: {ACTION_WORDS[verdict.action]}, {scores}"


class EditFact(FrozenModel):
    """An edit of a step with its outcome and its origin in words."""

    edit: Edit
    outcome: str
    origin: str

    @property
    def words(self) -> str:
        """The edit in one line."""
        edit = self.edit
        texts = " ".join(repr(text) for text in (edit.target, edit.content) if text)
        evidence = f"; evidence: {edit.evidence}" if edit.evidence else ""
        return f"{self.outcome}: {edit.op} {texts}; {self.origin}{evidence}"


def list_edit_facts(record: StepRecord) -> list[EditFact]:
    """Return the edits of a step: those that were carried out, then those that were not chosen."""
    outcomes = []
    for result in record.edits:
        reason = "" if result.reason is None else f" ({result.reason})"
        outcomes.append((result.edit, f"{result.status}{reason}"))
    carried_out = [result.edit for result in record.edits]
    unused = [edit for edit in record.merged.patch.edits if edit not in carried_out]
    outcomes += [(edit, "not chosen") for edit in unused]
    return [
        EditFact(edit=edit, outcome=outcome, origin=_describe_origin(record, edit))
        for edit, outcome in outcomes
    ]


def _describe_origin(record: StepRecord, edit: Edit) -> str:
    kind = "" if edit.source_type is None else f"{edit.source_type} "
    origin = f"supported by {name_count(edit.support_count, f'{kind}case')}"
    reports = [report for report in record.reports if edit in report.patch.edits]
    ids = [item_id for report in reports for item_id in report.item_ids]
    if ids:
        return f"{origin}, asked for by an analysis of {list_items(ids)}"
    if edit.merge_level:
        return f"{origin}, merged from {name_count(len(record.reports), 'report')}"
    return origin


def list_step_details(record: StepRecord) -> Iterator[LabelledText]:
    """Yield the verdict of a step, and all that led to it, but its edits."""
    yield "verdict", record.verdict.reason
    for pattern in dict.fromkeys(record.patterns):
        cases = name_count(pattern.count, "case")
        yield f"pattern in {cases}", f"{pattern.type}: {pattern.description}"
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
    for fallback in record.all_fallbacks:
        yield "fallback", describe_fallback(fallback)
    if record.notes:
        yield "notes of the appendix", " / ".join(record.notes)


def _list_choice(record: StepRecord) -> Iterator[LabelledText]:
    """Yield how edits were pooled and chosen."""
    merged = record.merged.patch
    chosen = record.chosen
    proposals = sum(len(report.patch.edits) for report in record.reports)
    if proposals:
        edits = name_count(len(merged.edits), "edit")
        reports = name_count(len(record.reports), "report")
        yield "proposed", f"{edits}, out of {name_count(proposals, 'proposal')} in {reports}"
        if merged.reasoning:
            is_merged = any(edit.merge_level for edit in merged.edits)
            yield "merge" if is_merged else "reasoning", merged.reasoning
    if record.rewrites or not chosen.pool_size:
        return
    size = chosen.decision
    if size is None:
        limit = "sets no limit" if chosen.budget is None else f"allows {chosen.budget}"
        count = len(chosen.patch.edits)
        reason = f"; the schedule {limit}"
    else:
        count = size.count
        reason = f", confidence {size.confidence:.2f}: {size.reasoning}"
        reason += f"; risks: {size.risks}" if size.risks else ""
    yield "step size", f"{count} of {name_count(chosen.pool_size, 'edit')}{reason}"
    if chosen.ranked:
        yield "ranking", chosen.patch.reasoning or "without a reason"


def describe_fallback(fallback: Fallback, *, is_short: bool = False) -> str:
    """Return the fallback first, then what failed, and why."""
    purpose, _, part = fallback.label.partition("/")
    reason = shorten_reason(fallback.reason) if is_short else fallback.reason
    return f"{fallback.replacement} (instead of: {describe_call(purpose, part)}): {reason}"


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
    words += [
        f"fallback {describe_fallback(fallback, is_short=True)}" for fallback in record.fallbacks
    ]
    return "  ".join([*words, f"current v{record.current.number}, best v{record.best.number}"])


def list_epoch_details(end: EpochRecord) -> Iterator[LabelledText]:
    """Yield what happened after the last step of an epoch."""
    slow = end.slow_update
    if end.comparisons:
        counts = Counter(comparison.category for comparison in end.comparisons)
        words = ", ".join(f"{count} {OUTCOME_WORDS[each]}" for each, count in counts.items())
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
    yield from (("fallback", describe_fallback(fallback)) for fallback in end.fallbacks)


# ------------------------------------------------------------------------------------------- items


def describe_cost(usage: Usage | None) -> str:
    """Return the price if it is known, otherwise the tokens; a dash if the calls were not seen."""
    if usage is None:
        return "-"
    if usage.usd is None:
        return f"{SpendFact(usage=usage).tokens} tokens"
    return format_usd(usage.usd)


def list_row_parts(row: MatrixRow, names: Sequence[str]) -> Iterator[LabelledText]:
    """Yield all texts of an item: input, expected answer, and each document's conversations."""
    yield "input", format_value(row.input)
    if row.expected is not None:
        yield "expected", format_value(row.expected)
    for name, result in zip(names, row.results, strict=True):
        if not result.rollouts:
            yield name, f"not measured: {result.error or 'no stored rollout'}"
        for number, rollout in enumerate(result.rollouts, start=1):
            heading = name if len(result.rollouts) == 1 else f"{name}, trial {number}"
            yield f"{heading}, score {describe_score(rollout.score)}", rollout.answer
            if rollout.feedback:
                yield "  feedback", rollout.feedback
            if len(rollout.turns) > 2:
                yield from ((f"  {turn.role}", turn.content) for turn in rollout.turns)


# --------------------------------------------------------------------------- lists and comparisons


def build_run_row(run: RunListing, root: Path) -> Row:
    """Return a run in a list of runs; its folder is shown as below ``root``. An ``eval`` is named
    after its document.
    """
    name = shorten_path(run.folder, root)
    if run.evaluation is not None:
        name = f"{name}: {run.evaluation.title}"
    return {
        "folder": escape_line(name),
        "run": escape_line(run.run_id),
        "status": run.state,
        "steps": "-" if run.evaluation else f"{run.steps:,}",
        "val": format_score(run.val),
        "baseline": format_score(run.baseline),
        "test": format_score(run.test),
        "cost": SpendFact(usage=run.usage).price,
        "date": f"{run.created:%Y-%m-%d}",
        "model": escape_line(run.model or "-"),
        "grader": escape_line(run.grader or "-"),
    }


def describe_listed_score(run: RunListing) -> LabelledText:
    """Return the score of a run's best skill, and what it stands against."""
    split = Split.val if run.test is None else Split.test
    score = run.val if run.test is None else run.test
    if score is None:
        return "-", ""
    words = SPLIT_WORDS[split]
    if run.baseline is not None:
        words += f", baseline {format_score(run.baseline)}"
    return format_score(score), words


def describe_listing(run: RunListing) -> str:
    """Return the state of a run in a sentence."""
    if run.evaluation is not None:
        spend = SpendFact(usage=run.usage).words
        return f"{run.state.capitalize()}: {run.evaluation.title}, {spend}."
    best = "" if run.val is None else f"; best validation score {format_score(run.val)}"
    spend = SpendFact(usage=run.usage).words
    return f"{run.state.capitalize()}: {name_count(run.steps, 'step')}, {spend}{best}."


def shorten_path(folder: str, root: Path) -> str:
    """Return a folder as below ``root``, if it is there; ``root`` itself is shown by its name."""
    path = Path(folder)
    if path == root:
        return path.resolve().name or folder
    return str(path.relative_to(root)) if path.is_relative_to(root) else folder


def build_compared_row(run: ComparedRun) -> Row:
    """Return a run of a comparison with the scores of its best skill, cost and time."""
    return {
        "run": escape_line(run.name),
        "status": run.status or "open",
        "steps": f"{run.steps:,}",
        "val": _format_compared(run.val),
        "test": _format_compared(run.test),
        "calls": format_count(run.usage.calls),
        "cost": SpendFact(usage=run.usage).price,
        "time": "-" if run.seconds is None else format_duration(run.seconds),
        "characters": format_count(len(run.best.skill.text)),
    }


def _format_compared(score: SkillScore | None) -> str:
    if score is None:
        return "-"
    return format_score(score.hard) + ("*" if score.unmeasured else "")


def list_gain_lines(comparison: RunComparison) -> Iterator[str]:
    """Yield the gain of each further run over the first one, and what stands against it."""
    first, *others = (run.name for run in comparison.runs)
    for gain in comparison.gains:
        yield describe_gain(gain.name, first, gain, "common item")
    measured = {gain.name for gain in comparison.gains}
    for name in others:
        if name not in measured:
            yield (
                f"{name} and {first} have no measured items in common; the usual reason is other "
                "data, another split (data.ratio) or other ids (data.fields.id)"
            )
    if measured and any(setting.key == "environment" for setting in comparison.settings):
        yield "the environments or graders differ, so a difference may come from them"


def format_setting(value: JsonValue) -> str:
    """Return a setting: a dash if there is none, a list of texts with commas, short hashes."""
    if value is None:
        return "-"
    if isinstance(value, list):
        texts = [each for each in value if isinstance(each, str)]
        if texts and len(texts) == len(value):
            value = ", ".join(texts)
    return CONTENT_HASH.sub(r"\1", format_value(value))
