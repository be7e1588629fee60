"""Trouble of a run, reported while it happens: models without valid replies, answers that are cut,
and exceptions of the caller's own code.
"""

from __future__ import annotations

import logging
import os
import shlex
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reflact import events
from reflact.adapters import CatchExits, read_text
from reflact.config.models import SECRET_NAME
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError, EnvironmentFailure, ReflactError, RunFailed
from reflact.jsonutil import replace_surrogates
from reflact.messages import CUT_OFF, NO_VALID_REPLY, CallReservation
from reflact.protocols import EventCallback
from reflact.records import CodeFailure, FaultKind, LossCount, StepRecord, Usage
from reflact.stages.rollout import RolloutJob
from reflact.text import escape_controls, list_items, shorten, shorten_reason
from reflact.types import AnalystReport

if TYPE_CHECKING:
    from reflact.store.runs import SQLiteRunStore

LOGGER = logging.getLogger("reflact")

# The most characters of a stored traceback; a longer one loses its middle.
MAX_TRACEBACK_CHARS = 8_000

PACKAGE = str(Path(__file__).resolve().parents[1])
ROLES = ("target", "optimizer", "critic")

# A tenth of the target's answers that are cut or empty is reported, and after 20 answers while the
# run goes on.
MIN_ANSWERS = 20
FAULTY_SHARE = 0.1

# The purpose of the call that tests an optimizer with its own connection before the baseline.
PREFLIGHT = "preflight"

# The calls of a role without a valid reply, and none with one, after which it counts as mute.
MUTE_CALLS = 3


def _log(source: RunWatch | FailureLog, level: int, message: str) -> None:
    """Log a message of a run; the record has the attributes ``run_id`` and ``label``."""
    run_id = source.run_id
    label = source.label or str(source.config.out_dir)
    line = escape_controls(f"run {run_id} ({label}): {message}")
    LOGGER.log(level, "%s", line, extra={"run_id": run_id, "label": label})


@dataclass
class RunWatch:
    """Finds trouble in the calls of one start of a run, and reports each kind once as a warning.

    A warning is no part of the run's history: trouble depends on time and on the network. ``post``
    takes the warnings, and ``label`` is the caller's name for the run in log lines.
    """

    run_id: str
    post: Callable[[events.Event], None]
    config: TrainerConfig
    label: str = ""
    _reported: set[str] = field(default_factory=set)
    _failed_calls: Counter[str] = field(default_factory=Counter)
    _answering_roles: set[str] = field(default_factory=set)
    _faults: dict[str, Counter[FaultKind]] = field(default_factory=dict)
    _n_answers: int = 0

    def observe_attempt(self, call: CallReservation, usage: Usage, fault: FaultKind | None) -> None:
        """Take an attempt of a call."""
        if call.role == "target":
            self._n_answers += usage.calls
        if fault is None:
            return
        counts = self._faults.setdefault(call.role, Counter())
        counts[fault] += 1
        if fault in {"cut prompt", "other model"} or self._n_answers >= MIN_ANSWERS:
            found = describe_answer_faults(counts, self._n_answers, self.config)
            for subject, message in found.items():
                self._warn(f"{subject} of {call.role}", message)

    def observe_call(self, event: events.ModelCallFinished) -> None:
        """Take the end of a call.

        A call that nobody answered says nothing of replies, and neither does the plain text that
        tests the endpoint.
        """
        role = event.role
        if event.purpose == PREFLIGHT:
            return
        if event.outcome == "reply":
            self._answering_roles.add(role)
        elif event.usage.calls:
            self._failed_calls[role] += 1
        if role in self._answering_roles or self._failed_calls[role] < MUTE_CALLS:
            return
        reason = " ".join((event.reason or "none").split()).rstrip(".")
        advice = advise_on_replies(role, self.config, reason)
        self._warn(
            f"role {role}",
            f"models.{role} gave no valid reply in its first {MUTE_CALLS} calls; the last reason: "
            f"{shorten_reason(reason)}. To mend it, {advice}",
        )

    def _warn(self, subject: str, message: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            _log(self, logging.WARNING, message)
            self.post(events.WarningIssued(run_id=self.run_id, message=message))


def describe_answer_faults(
    counts: Mapping[FaultKind, int], n_answers: int, config: TrainerConfig
) -> dict[str, str]:
    """Return what is wrong with prompts, models and the target's answers, each with what to do."""
    found = {}
    n_cut = counts.get("cut answer", 0)
    n_empty = counts.get("empty answer", 0)
    if n_prompts := counts.get("cut prompt"):
        found["prompts"] = (
            "prompts with more than eight characters for each token that its server counted: "
            f"{n_prompts:,}. It probably cut off their beginning, with the instructions. Raise its "
            "context (num_ctx of Ollama), or shorten the texts"
        )
    if n_replies := counts.get("other model"):
        found["models"] = (
            f"replies that name another model than the first reply of their role: {n_replies:,}. "
            "The endpoint may route calls or fall back, and then scores are those of several models"
        )
    if n_cut + n_empty > 0 and n_cut + n_empty >= FAULTY_SHARE * n_answers:
        key = "models.target.max_tokens"
        cap = config.models.target.max_tokens
        limit = "the server's limit" if cap is None else f"{key} ({cap:,})"
        change = "set" if cap is None else "raise"
        found["answers"] = (
            f"of {n_answers:,} answers of the target, {n_cut:,} were cut off at {limit} and "
            f"{n_empty:,} were empty. If the model thinks first, or right answers are longer, "
            f"{change} {key}"
        )
    return found


async def list_answer_faults(
    store: SQLiteRunStore, run_id: str, config: TrainerConfig
) -> tuple[str, ...]:
    """Return what ``describe_answer_faults`` finds over all starts of a run."""
    counts = {fault.kind: fault.count for fault in await store.faults(run_id)}
    n_answers = sum(part.usage.calls for part in await store.spend(run_id) if part.role == "target")
    return tuple(describe_answer_faults(counts, n_answers, config).values())


async def count_losses(
    store: SQLiteRunStore, run_id: str, records: Sequence[StepRecord]
) -> tuple[LossCount, ...]:
    """Return what a run lost on its way, over all its starts; what was not lost is left out."""
    epochs = await store.epochs(run_id)
    reports = [report for record in records for report in record.reports]
    dropped = [report.no_reply_reason for report in reports if report.no_reply_reason is not None]
    replaced = [fallback.reason for record in records for fallback in record.all_fallbacks]
    replaced += [fallback.reason for epoch in epochs for fallback in epoch.fallbacks]
    n_replies, n_invalid = await store.count_replies(run_id, "optimizer")
    if n_replies:
        # The last reply of a call that was given up was not sent back.
        n_invalid += sum(NO_VALID_REPLY in reason for reason in (*dropped, *replaced))
    n_unmeasured = len(await store.unmeasured(run_id))
    losses = (
        LossCount(kind="invalid reply", count=n_invalid, total=n_replies),
        LossCount(kind="dropped analyst", count=len(dropped), total=len(reports)),
        LossCount(kind="replaced decision", count=len(replaced)),
        LossCount(kind="lost rollout", count=n_unmeasured),
    )
    return tuple(loss for loss in losses if loss.count)


def advise_on_replies(role: str, config: TrainerConfig, reason: str = "") -> str:
    """Return what to change if a role gives no valid reply for a reason."""
    model = getattr(config.models, role)
    key = f"models.{role}"
    if CUT_OFF in reason and model.max_tokens is not None:
        return f"set {key}.max_tokens higher than {model.max_tokens:,}"
    shared = ""
    if role == "optimizer" and not config.models.is_optimizer_separate:
        shared = ", the model of the target"
    return f"choose a larger {key}.model than {model.model}{shared}"


def describe_refused(reports: Sequence[AnalystReport]) -> str | None:
    """Return about which items no analyst could be asked, with the first reason; None if none."""
    refused = [r for r in reports if r.no_reply_reason and NO_VALID_REPLY not in r.no_reply_reason]
    if not refused:
        return None
    items = [item_id for report in refused for item_id in report.item_ids]
    reason = shorten_reason(" ".join(str(refused[0].no_reply_reason).split()))
    return f"no analyst could be asked about {list_items(items)}; the first reason: {reason}"


def describe_unmeasured(reasons: Mapping[str, str | None]) -> str | None:
    """Return which items have no score in the end, with the first known reason; None if none."""
    if not reasons:
        return None
    known = [f"; the first reason: {shorten_reason(text)}" for text in reasons.values() if text]
    return f"no result counts {list_items(reasons)}{''.join(known[:1])}"


@dataclass
class FailureLog:
    """Keeps the exceptions of the caller's own code in one start of a run.

    Each is stored with its traceback, without keys. The first one of each kind and place is logged
    as an error under the logger ``reflact`` and reported as a warning; others are logged at the
    level of debugging. With ``train.raise_on_exception`` the first exception is raised.
    """

    run_id: str
    config: TrainerConfig
    store: SQLiteRunStore
    on_event: EventCallback
    label: str = ""
    _keys: Sequence[str] | None = None
    _known_places: set[str] = field(default_factory=set)

    async def record_rollout(
        self, job: RolloutJob, error: Exception, reason: str, step: int
    ) -> str:
        """Keep the exception of a rollout, and return why its item is unmeasured."""
        failed = error.__cause__ if isinstance(error, EnvironmentFailure) else error
        if not isinstance(failed, Exception):
            return reason
        return await self.record(failed, reason, step=step, key=job.key, item_id=job.item.id)

    @asynccontextmanager
    async def explain(self, what: str, *, step: int = 0) -> AsyncIterator[None]:
        """Turn an exception of the caller's code in the block into the end of the run."""
        try:
            with CatchExits():
                yield
        except ReflactError:
            raise
        except Exception as error:  # callers' code raises anything; the run ends with its words
            reason = f"{what}: {type(error).__name__}: {read_text(error)}"
            reason = await self.record(error, reason, step=step, key=f"{what}/{step}")
            raise RunFailed(reason) from error

    async def record(
        self, error: Exception, reason: str, *, step: int, key: str, item_id: str | None = None
    ) -> str:
        """Log, store and report an exception, and return the reason without keys; see the class."""
        from reflact.llm.redaction import remove_keys

        if self.config.train.raise_on_exception:
            raise error
        if self._keys is None:
            self._keys = await find_keys(self.config)
        reason = remove_keys(self._keys, replace_surrogates(reason))
        text = remove_keys(self._keys, replace_surrogates(format_exception(error)))
        failure = CodeFailure(step=step, item_id=item_id, reason=reason, traceback=text)
        await self.store.store_failure(self.run_id, key, failure)
        # Equal exceptions have the same class and come from the same line.
        lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        place = f"{type(error).__qualname__} {lines[-1:]}"
        is_new = place not in self._known_places
        self._known_places.add(place)
        level = logging.ERROR if is_new else logging.DEBUG
        _log(self, level, f"{reason}\n{text}")
        if is_new and item_id is not None:
            command = shlex.join(("reflact", "show", str(self.config.out_dir), "--item", item_id))
            message = f"{reason}; for the traceback: {command}"
            await self.on_event(
                events.WarningIssued(run_id=self.run_id, step=step, message=message)
            )
        return reason


async def find_keys(config: TrainerConfig) -> list[str]:
    """Return the keys of all roles, and the environment variables that are named like secrets."""
    from reflact.llm.redaction import is_key, resolve_key

    keys: list[str | None] = []
    for name, value in os.environ.items():
        if SECRET_NAME.search(name.lower().replace("_", "")):
            keys.append(value)
    for role in ROLES:
        with suppress(ConfigError):
            keys.append(await resolve_key(getattr(config.models, role), role))
    return [key for key in dict.fromkeys(keys) if key is not None and is_key(key)]


def format_exception(error: BaseException) -> str:
    """Return an exception with its traceback, from the first frame outside of reflact on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.tb_next
    lines = traceback.format_exception(type(error), error, frame or error.__traceback__)
    return shorten("".join(lines).rstrip(), MAX_TRACEBACK_CHARS)
