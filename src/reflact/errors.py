"""Everything that reflact raises, in one tree.

::

    ReflactError
    ├── UsageError               what the caller gave is wrong; nothing was sent or spent
    │   ├── ConfigError          a key or a value of the configuration
    │   ├── DataError            a data file, a split, an item
    │   ├── PromptError          a prompt file, its version, its holes
    │   ├── SkillError           a skill document that cannot be read as one
    │   └── RunConflict          the folder holds another run, or another process works in it
    ├── ModelError               a model call gave nothing usable
    │   ├── ReplyError           replies came, none passed validation
    │   ├── ContextOverflow      the request is larger than the model's context
    │   └── ProviderError        the provider refused, failed or could not be reached
    │       ├── AccessDenied     401 or 403: the key is missing, wrong or not allowed
    │       ├── BadRequest       400, 404, 422: the endpoint will not serve this request, ever
    │       │   └── UnknownModel the endpoint does not know the model
    │       └── ProviderDown     retries are used up: connection, time-out, 408, 409, 429, 5xx
    ├── CassetteError            a recording is missing, malformed, or holds no answer
    │   └── CassetteMiss         a request that was not recorded
    ├── EnvironmentFailure       an environment broke; its items stay unmeasured
    ├── StoreError               the database cannot be opened, read or written
    ├── BudgetSpent              a limit of `budget` leaves no room for the next call
    └── RunFailed                a run ended without completing, and why
        └── Unmeasured           too few rollouts could be measured to decide on

Messages say what happened, where, and what to do. Nothing that was stored is lost when one is raised.
"""

from __future__ import annotations

from reflact.records import Usage


class ReflactError(Exception):
    """Base of all errors raised by reflact."""


class UsageError(ReflactError):
    """What the caller gave is wrong; raised before any call was made."""


class ConfigError(UsageError):
    """A key or a value of the configuration is wrong."""


class DataError(UsageError):
    """A data file, a split or an item is wrong."""


class PromptError(UsageError):
    """A prompt file is missing, malformed, or its holes do not match what it is given."""


class SkillError(UsageError):
    """A text cannot be read as a skill document."""


class RunConflict(UsageError):
    """The folder holds another run, or another process is working in it."""


class ModelError(ReflactError):
    """A model call gave nothing usable.

    Attributes:
        usage: What its attempts consumed that were answered; none of the answers was valid.
    """

    usage = Usage()


class ReplyError(ModelError):
    """Replies came, but none passed validation; the attempts are stored and paid for.

    Args:
        message: What was wrong with the last reply.
        reasons: Why each attempt was refused, first to last.
    """

    def __init__(self, message: str, *, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class ContextOverflow(ModelError):
    """The request is larger than the model's context window."""


class ProviderError(ModelError):
    """The provider refused, failed or could not be reached.

    Args:
        message: What happened, where, and what to do.
        status: The HTTP status, or None where no response came.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class AccessDenied(ProviderError):
    """401 or 403: the key is missing, wrong, or not allowed to use this model."""


class BadRequest(ProviderError):
    """400, 404 or 422: the endpoint will never serve this request."""


class UnknownModel(BadRequest):
    """The endpoint does not know the model; it will serve none of this role's requests."""


class ProviderDown(ProviderError):
    """Retries are used up: connection errors, time-outs, 408, 409, 429 or 5xx."""


class CassetteError(ReflactError):
    """A recording is missing or malformed."""


class CassetteMiss(CassetteError):
    """A request for which the recording holds no answer; the network is never asked instead.

    Args:
        message: Which request, and which recorded one is nearest to it.
        difference: The lines of a diff from that one to the request; tracebacks show it too.
    """

    def __init__(self, message: str, *, difference: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.difference = difference
        if difference:
            self.add_note("\n".join(difference))


class EnvironmentFailure(ReflactError):
    """An environment broke while running or grading an item; the item stays unmeasured."""


class StoreError(ReflactError):
    """The database cannot be opened, read or written."""


class BudgetSpent(ReflactError):
    """A limit of ``budget`` leaves no room for the next call, or a provider went beyond a cap.

    Nothing is decided on what it left out: the open step commits nothing, and a start with a larger
    budget goes on from there.
    """


class RunFailed(ReflactError):
    """A run ended without completing; everything that had finished is stored and the run can go on."""


class Unmeasured(RunFailed):
    """Too few rollouts of a decision could be measured; it is tried once more before the run ends."""
