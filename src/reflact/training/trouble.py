"""Trouble of a run: exceptions of the caller's own code, which keep their tracebacks."""

from __future__ import annotations

import logging
import os
import shlex
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType

from reflact import events
from reflact.config.models import SECRET_NAME
from reflact.config.training import TrainerConfig
from reflact.errors import ConfigError, EnvironmentFailure, ReflactError, RunFailed
from reflact.protocols import EventCallback
from reflact.records import CodeFailure
from reflact.reporting.lines import escape_controls
from reflact.stages.rollout import RolloutJob, describe_exception
from reflact.training.setup import Runtime

LOGGER = logging.getLogger("reflact")

MAX_TRACEBACK_CHARS = 8_000
"""The most characters of a stored traceback; a longer one loses its middle."""

PACKAGE = str(Path(__file__).resolve().parents[1])
ROLES = ("target", "optimizer", "critic")


class FailureLog:
    """Keeps the exceptions of the caller's own code in one start of a run.

    Each is stored with its traceback, without keys. The first one of each kind and place is logged as an error under
    the logger ``reflact`` and reported as a warning; others are logged at the level of debugging. With
    ``train.raise_on_exception`` the first exception is raised.
    """

    def __init__(self, runtime: Runtime, on_event: EventCallback) -> None:
        self._runtime = runtime
        self._on_event = on_event
        self._keys: Sequence[str] | None = None
        self._known: set[str] = set()

    async def record_rollout(self, job: RolloutJob, error: Exception, step: int) -> str:
        """Keep the exception of a rollout, and return why its item is unmeasured."""
        reason = await describe_exception(job, error)
        failed = error.__cause__ if isinstance(error, EnvironmentFailure) else error
        if not isinstance(failed, Exception):
            return reason
        return await self.record(failed, reason, step=step, key=job.key, item_id=job.item.id)

    @asynccontextmanager
    async def explain(self, what: str, *, step: int = 0) -> AsyncIterator[None]:
        """Turn an exception of the caller's code in the block into the end of the run, with a reason.

        Raises:
            RunFailed: The code raised an exception that is none of reflact's.
        """
        try:
            yield
        except ReflactError:
            raise
        except Exception as error:
            reason = f"{what}: {type(error).__name__}: {error}"
            raise RunFailed(await self.record(error, reason, step=step, key=f"{what}/{step}")) from error

    async def record(
        self, error: Exception, reason: str, *, step: int, key: str, item_id: str | None = None
    ) -> str:
        """Log, store and report an exception, and return the reason without keys; see the class."""
        if self._runtime.config.train.raise_on_exception:
            raise error
        if self._keys is None:
            self._keys = await find_keys(self._runtime.config)
        reason, text = (self._remove_keys(part) for part in (reason, format_exception(error)))
        failure = CodeFailure(step=step, item_id=item_id, reason=reason, traceback=text)
        await self._runtime.store.store_failure(self._runtime.run_id, key, failure)
        place = find_place(error)
        is_new = place not in self._known
        self._known.add(place)
        LOGGER.log(logging.ERROR if is_new else logging.DEBUG, "%s", escape_controls(f"{reason}\n{text}"))
        if is_new and item_id is not None:
            command = shlex.join(("reflact", "show", str(self._runtime.config.out_dir), "--item", item_id))
            message = f"{reason}; for the traceback: {command}"
            await self._on_event(
                events.WarningIssued(run_id=self._runtime.run_id, step=step, message=message)
            )
        return reason

    def _remove_keys(self, text: str) -> str:
        from reflact.llm.redaction import remove_keys

        return remove_keys(self._keys or (), text)


async def find_keys(config: TrainerConfig) -> list[str]:
    """Return the keys of all roles, and the values of environment variables that are named like secrets."""
    from reflact.llm.redaction import is_key, resolve_key

    found = [value for name, value in os.environ.items() if SECRET_NAME.search(name.lower().replace("_", ""))]
    for role in ROLES:
        with suppress(ConfigError):
            key = await resolve_key(getattr(config.models, role), role)
            found += [] if key is None else [key]
    return [key for key in dict.fromkeys(found) if is_key(key)]


def format_exception(error: BaseException) -> str:
    """Return an exception with its traceback, from the first frame outside of reflact on, at a bounded length."""
    outer = _find_first_frame(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, outer or error.__traceback__)).rstrip()
    if len(text) <= MAX_TRACEBACK_CHARS:
        return text
    half = MAX_TRACEBACK_CHARS // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


def find_place(error: BaseException) -> str:
    """Return the kind of an exception and the line that raised it, which tell equal exceptions."""
    frames = traceback.extract_tb(_find_first_frame(error.__traceback__) or error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(PACKAGE)] or list(frames)
    return f"{type(error).__qualname__} {own[-1].filename}:{own[-1].lineno}" if own else repr(type(error))


def _find_first_frame(frame: TracebackType | None) -> TracebackType | None:
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.tb_next
    return frame
