"""All exceptions of reflact; their messages state what happened, where, and what to do."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reflact.records import Usage


class ReflactError(Exception):
    """Base of all errors raised by reflact; none loses stored results."""


class UsageError(ReflactError):
    """The caller's input is wrong; raised before any model call."""


class ConfigError(UsageError):
    """A key or a value of the configuration is wrong."""


class DataError(UsageError):
    """A data file, a split or an item is wrong."""


class PromptError(UsageError):
    """A prompt file is missing, malformed, or its variables do not match the values."""


class SkillError(UsageError):
    """A skill document is malformed."""


class RunConflict(UsageError):
    """The folder contains another run, or another process uses it."""


class ModelError(ReflactError):
    """A model call gave no usable reply."""

    answer = ""
    """All of the endpoint's refusal, of which the message has the beginning."""

    @cached_property
    def usage(self) -> Usage:
        """The usage of its answered attempts, none of which was valid."""
        # Here, so that the help of commands does not build all records.
        from reflact.records import Usage

        return Usage()


class CallError(ModelError):
    """One call has no valid reply, which says nothing of the role's other calls."""


class ReplyError(CallError):
    """No reply passed validation, for ``reasons``, one of each attempt; all are paid for."""

    def __init__(self, message: str, *, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class ContextOverflow(CallError):
    """The request is larger than the model's context window."""


class RequestRefused(CallError):
    """The endpoint refuses this request, for example because of a content filter.

    ``answers_others``: other calls were answered; False if that is not known yet.
    """

    def __init__(
        self, message: str, *, status: int | None = None, answers_others: bool = True
    ) -> None:
        super().__init__(message)
        self.status = status
        self.answers_others = answers_others


class ProviderError(ModelError):
    """The provider refused, failed or could not be reached; without a response no ``status``."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class AccessDenied(ProviderError):
    """401, or 403 for call after call: the key is missing, wrong, or not for this model."""


class QuotaSpent(AccessDenied):
    """402, or 400, 403 or 429 with words for it: the account has no quota or credit left."""


class BadRequest(ProviderError):
    """A redirect, 400, 404 or 422: the endpoint does not serve this request."""


class UnknownModel(BadRequest):
    """The endpoint does not know the model; it serves none of this role's requests."""


class ProviderDown(ProviderError):
    """Retries are used up: connection errors, time-outs, 408, 409, 429 or 5xx."""


class CassetteError(ReflactError):
    """A recording is missing or malformed."""


class CassetteMiss(CassetteError):
    """A request without a recorded response; no request is sent instead.

    ``difference`` is a diff from the nearest recorded request, which tracebacks show.
    """

    def __init__(self, message: str, *, difference: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.difference = difference
        if difference:
            self.add_note("\n".join(difference))


class EnvironmentFailure(ReflactError):
    """An environment failed to run or grade an item; the item stays unmeasured."""


class WorkerLost(EnvironmentFailure):
    """A worker of an executor ended during a rollout, which is retried."""


class StoreError(ReflactError):
    """The database cannot be opened, read or written."""


class BudgetSpent(ReflactError):
    """A limit of ``budget`` allows no further call, or a provider exceeded a cap.

    The open step commits nothing. A start with a larger budget resumes from there.
    """


class RunFailed(ReflactError):
    """A run ended without completing; all finished work is stored and the run can be resumed."""


class InterfaceError(RunFailed):
    """A method of your target or environment returned a value of a wrong type."""


class Unmeasured(RunFailed):
    """Too few rollouts of a decision could be measured; it is retried once before the run ends."""
