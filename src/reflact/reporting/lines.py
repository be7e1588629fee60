"""One line of plain text for each event that matters, and the formats that all reports share."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from reflact import events
from reflact.messages import describe_call
from reflact.records import EpochRecord
from reflact.types import EditResult, Fallback, GateAction, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

INDENT = 10
"""Cells of the label at the beginning of a line; the rest of a long line is indented by as many."""

ALLOWED_CONTROLS = "\n\t\u200c\u200d"
"""Line breaks, tabs, and the joiners of ordinary text."""

ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of controls, formats, surrogates, and line and paragraph separators."""

POSITIONS = re.compile(r"^@@ .*\n", re.MULTILINE)
"""The line of a unified diff that says where a part of it stands; lines of the text begin with another sign."""

MAX_REASON_CHARS = 160
"""The most characters of the reason of a fallback in a line of a run; ``reflact show`` has all of it."""

MAX_CUT_WORD = 20
"""A longer word may be cut if a text loses its middle."""

MINUTE, HOUR, DAY = 60, 3600, 86400

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
"""The decisions of a gate in words, at a terminal and on pages."""


class EventLines:
    """Formats events as lines. A step has one line, once it is committed.

    Repeated pauses of one endpoint have one line in each step.
    """

    def __init__(self) -> None:
        self._rollouts: events.RolloutsFinished | None = None
        self._edits: tuple[EditResult, ...] = ()
        self._verdict: Verdict | None = None
        self._replied: list[bool] = []
        self._paused: set[tuple[str, int | None]] = set()

    def format_event(self, event: events.Event) -> str | None:
        """Return the line of an event; None if the event has no line."""
        match event:
            case events.StepStarted():
                self._rollouts, self._edits, self._verdict = None, (), None
                self._replied = []
                self._paused.clear()
            case events.RolloutsFinished():
                self._rollouts = event
            case events.AnalystReported():
                self._replied.append(event.report.no_reply_reason is None)
            case events.EditsApplied():
                self._edits = event.results
            case events.CandidateJudged():
                self._verdict = event.verdict
            case events.StepCommitted():
                return self._format_step(event)
            case events.RateLimited():
                return self._format_pause(event)
        return _format_single(event)

    def format_resume(self, earlier: Iterable[events.Event]) -> str | None:
        """Return how far earlier starts of the run came; None if they committed nothing."""
        line = None
        for event in earlier:
            self.format_event(event)
            if isinstance(event, events.StepCommitted):
                line = f"run {event.run_id} resumes after {name_count(event.step, 'committed step')}"
            elif isinstance(event, events.BaselineMeasured):
                line = f"run {event.run_id} resumes before its first committed step"
        return line

    def _format_pause(self, event: events.RateLimited) -> str | None:
        key = (event.endpoint, event.status)
        if key in self._paused:
            return None
        self._paused.add(key)
        if event.status is None:
            return f"retry     {event.endpoint} cannot be reached; trying again"
        rate = "" if event.rate is None else f", then {event.rate:.3g} calls/s"
        wait = format_duration(event.seconds)
        return f"limit     {event.endpoint} answered {event.status}; waiting {wait}{rate}"

    def _format_step(self, event: events.StepCommitted) -> str:
        verdict, rollouts = self._verdict, self._rollouts
        scores = ""
        if verdict is not None and verdict.current_score is not None:
            scores = f"val {format_verdict_scores(verdict)}"
        words = [f"step {event.step:<4}", f"{ACTION_WORDS[event.action]:<12} ", f"{scores:<18}"]
        if rollouts is not None:
            solved = f"solved {rollouts.n - rollouts.failures}/{rollouts.n}" if rollouts.n else ""
            words.append(f" {solved:<12}")
        applied = sum(result.status == "applied" for result in self._edits)
        kinds = {result.edit.op for result in self._edits} & {"examples", "rewrite"}
        made = next(iter(kinds), f"edits {applied}/{len(self._edits)}" if self._edits else "")
        words.append(f" {made:<9}")
        words.append(f" v{event.current.number}")
        if event.best.number != event.current.number:
            words[-1] += f", best v{event.best.number}"
        if verdict is not None and verdict.repeats is not None:
            words[-1] += f"; {describe_decision(verdict)}"
        if not all(self._replied):
            analysts = name_count(len(self._replied), "analyst")
            words[-1] += f"; no valid reply from {self._replied.count(False)} of {analysts}"
        return " ".join(words)


def _format_single(event: events.Event) -> str | None:
    line: str | None = None
    match event:
        case events.RunStarted(n_train=train, n_val=val, n_test=test, steps_per_epoch=steps):
            line = f"run {event.run_id}: {train} train, {val} val, {test} test items; {name_count(steps, 'step')} per epoch"
        case events.GatePowerEstimated():
            line = f"gate      {event.description} A decision takes at most {name_count(event.rollouts, 'rollout')}."
        case events.NullAnswersGraded() if event.warning is not None:
            line = f"warning   {event.warning}"
        case events.BaselineMeasured():
            times = (
                "" if event.trials == 1 else f", rolled out {event.trials} times, since answers may differ"
            )
            line = f"baseline  val {event.score:.3f} on {name_count(event.n, 'item')}{times}"
        case events.FallbackUsed():
            line = f"fallback  {shorten_fallback(event.fallback)}"
        case events.EpochCommitted():
            line = format_epoch(event, format_each=shorten_fallback)
        case events.VersionReturned():
            line = f"return    {event.reason}"
        case events.TrainingStopped():
            line = f"stop      {event.reason}"
        case events.PromotionJudged():
            line = f"promotion {ACTION_WORDS[event.verdict.action]}: {event.verdict.reason}"
        case events.TestSplitOpened():
            line = f"test      the sealed test split is opened ({name_count(event.count, 'opening')} in this run)"
        case events.StepRetried():
            line = f"retry     {event.reason}"
        case events.WarningIssued():
            line = f"warning   {event.message}"
    return line


def describe_decision(verdict: Verdict) -> str:
    """Return a gate's decision in words; for a document that the run had before, the one that it equals."""
    return ACTION_WORDS[verdict.action] if verdict.repeats is None else f"same as {verdict.repeats}"


def format_fallback(fallback: Fallback) -> str:
    """Return what failed, why, and the fallback."""
    return f"{_name_failed_call(fallback)}: {fallback.reason}; used instead: {fallback.replacement}"


def shorten_fallback(fallback: Fallback) -> str:
    """Return the fallback first, then what failed, and why in at most ``MAX_REASON_CHARS``, without its place again."""
    call = _name_failed_call(fallback)
    reason = re.sub(rf" \({re.escape(call)}( in step \d+)?\)", "", fallback.reason)
    return f"{fallback.replacement} (instead of: {call}): {shorten_reason(reason)}"


def _name_failed_call(fallback: Fallback) -> str:
    purpose, _, part = fallback.label.partition("/")
    return describe_call(purpose, part)


def format_epoch(
    record: EpochRecord | events.EpochCommitted, *, format_each: Callable[[Fallback], str] = format_fallback
) -> str:
    """Return what happened after the last step of an epoch, with its fallbacks in a format."""
    words = [f"epoch {record.epoch:<2}"]
    if record.slow_update is not None:
        verdict = record.slow_update.verdict
        words.append(f"slow update {record.slow_update.action}")
        if verdict is not None:
            words.append(f"val {format_verdict_scores(verdict)}")
    if record.meta_skill is not None:
        words.append("meta skill written")
    words.extend(f"fallback {format_each(fallback)}" for fallback in record.fallbacks)
    return "  ".join([*words, f"current v{record.current.number}, best v{record.best.number}"])


def shorten_reason(reason: str, length: int = MAX_REASON_CHARS) -> str:
    """Return a reason with the message alone of an endpoint's JSON; a longer one is cut after a word."""
    head, brace, tail = reason.partition("{")
    with suppress(ValueError, RecursionError):
        body, end = json.JSONDecoder().raw_decode(brace + tail)
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str):
            reason = head + message + (brace + tail)[end:]
    return reason if len(reason) <= length else f"{reason[: length - 3].rsplit(' ', 1)[0]}..."


def shorten_middle(text: str, length: int) -> str:
    """Return a text of at most ``length`` characters; a longer one loses its middle, since its ends tell most.

    It is cut between words if a space is near.
    """
    if len(text) <= length:
        return text
    n_head, near = (length - 3) // 2, min(length // 6, MAX_CUT_WORD)
    head, tail = text[: n_head + 1], text[n_head + 2 - length :]
    head = head[: head.rfind(" ")] if " " in head[-near - 1 :] else head[:-1]
    tail = tail[tail.find(" ") + 1 :] if " " in tail[: near + 1] else tail[1:]
    return f"{head}...{tail}"


def format_score(score: float | None) -> str:
    """Return a score with three digits, or a dash if there is none."""
    return "-" if score is None else f"{score:.3f}"


def format_change(before: float | None, after: float | None) -> str:
    """Return ``before -> after``, or only the first score if there is no second."""
    return format_score(before) if after is None else f"{format_score(before)} -> {format_score(after)}"


def format_verdict_scores(verdict: Verdict) -> str:
    """Return the scores that a gate compared."""
    return format_change(verdict.current_score, verdict.candidate_score)


def format_clock(seconds: float) -> str:
    """Return elapsed time in complete seconds, as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(max(int(seconds), 0), MINUTE)
    hours, minutes = divmod(minutes, MINUTE)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_duration(seconds: float) -> str:
    """Return a duration in one unit: ``0.4 s``, ``42 s``, ``4 min``, ``2.5 h``, ``3.0 days``."""
    for limit, unit, name in ((100, 1, "s"), (100 * MINUTE, MINUTE, "min"), (48 * HOUR, HOUR, "h")):
        if seconds < limit:
            digits = 1 if name == "h" or seconds < 1 else 0
            return f"{seconds / unit:.{digits}f} {name}"
    return f"{seconds / DAY:.1f} days"


def format_count(number: int) -> str:
    """Return a count with at most four digits: ``9,999``, ``45.2k``, ``1.23M``."""
    if number < 10_000:
        return f"{number:,}"
    for unit, name in ((1e3, "k"), (1e6, "M")):
        value = number / unit
        if value < 999.5:
            return f"{value:.3g}{name}"
    return f"{number / 1e9:.3g}G"


SHOWN_ITEMS = 5
"""Items that a line names."""


def list_items(item_ids: Iterable[str], noun: str = "item") -> str:
    """Return the number of items and the first of their names."""
    ids = tuple(dict.fromkeys(item_ids))
    more = f" and {len(ids) - SHOWN_ITEMS} more" if len(ids) > SHOWN_ITEMS else ""
    return f"{name_count(len(ids), noun)}: {', '.join(ids[:SHOWN_ITEMS])}{more}"


def name_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: ``1 trace``, ``1,200 traces``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def hide_positions(diff: str) -> str:
    """Return a unified diff with three dots between its parts, instead of the positions of their lines."""
    first, *others = POSITIONS.split(diff)
    return first + "...\n".join(others)


def escape_controls(text: str) -> str:
    """Return a text with control and format characters as escapes, so that it cannot steer a terminal.

    Control characters move the cursor, change titles and fill the clipboard. Format characters hide letters
    and reverse the direction of text. A lone surrogate cannot be encoded at all.
    """
    text = text.replace("\r\n", "\n")
    return text if text.isprintable() else "".join(map(_escape_character, text))


def escape_line(text: str) -> str:
    """Escape as ``escape_controls`` does, and line breaks and tabs too: the result is one line."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape_character(character: str) -> str:
    if character in ALLOWED_CONTROLS or unicodedata.category(character) not in ESCAPED_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


def wrap_line(line: str, console: Console) -> Text:
    """Return a line that is wrapped at words if it is wider than the console, with the rest indented."""
    from rich.cells import cell_len
    from rich.text import Text

    width = console.width
    if cell_len(line) <= width or width < 3 * INDENT:
        return Text(line)
    first = Text(line).wrap(console, width)[0]
    rest = Text(line[len(first.plain) :].lstrip()).wrap(console, width - INDENT)
    return Text("\n").join([first, *(Text(" " * INDENT) + part for part in rest)])
