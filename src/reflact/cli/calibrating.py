"""What ``reflact calibrate`` reads and opens: traces, gold pairs, the memory, the model and its books."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from reflact.calibration.config import CalibrateConfig
    from reflact.calibration.trace import Trace
    from reflact.calls import CallId, RenderedPrompt, Reply
    from reflact.connection import ModelConnection
    from reflact.llm.rate_limit import LimitChange
    from reflact.memory import ContrastPair
    from reflact.memory_store import MemoryStore
    from reflact.ports import R
    from reflact.results import Spend
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reflact.calibration.results import CalibrationReport


CRITIC_ROLE = "critic"


class UncalledLLM:
    """A model that nobody asks: what is foreseen is foreseen without it.

    Args:
        identity: That of the model which is meant, by which a calibration that was stopped is known.
    """

    def __init__(self, identity: str = "unasked") -> None:
        self._identity = identity

    @property
    def identity(self) -> str:
        """That of the model."""
        return self._identity

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Refuse."""
        raise AssertionError(f"a forecast asked a model: {call_id.label}")


def calibration_run_id(config: CalibrateConfig) -> str:
    """Return under which name the calls are booked: one for each memory."""
    from reflact.connection import account_name

    return account_name(config.memory)


def open_model(
    config: CalibrateConfig, on_limit: Callable[[LimitChange], None] | None = None
) -> AbstractAsyncContextManager[ModelConnection]:
    """Return what opens the store of model calls and connects the model, see ``connection.connected``."""
    from reflact.connection import open_connection

    return open_connection(
        config.models.critic,
        store=config.store or config.memory,
        role=CRITIC_ROLE,
        run_id=calibration_run_id(config),
        budget=config.budget,
        replay=config.replay,
        on_limit=on_limit,
    )


async def read_earlier_spend(config: CalibrateConfig) -> tuple[UncalledLLM, tuple[Spend, ...]]:
    """Return the model without asking it, and what earlier starts have paid for."""
    from reflact.llm.client import Client
    from reflact.store.runs import open_store

    path, run_id = config.store or config.memory, calibration_run_id(config)
    if not path.is_file():
        return UncalledLLM(), ()
    async with open_store(path, read_only=True) as store:
        client = Client(
            config.models.critic, role=CRITIC_ROLE, run_id=run_id, effects=store, decision_log=store.decision_log(run_id)
        )
        return UncalledLLM(client.identity), await store.spend(run_id)


async def load_traces(
    config: CalibrateConfig, memory: MemoryStore
) -> tuple[tuple[Trace, ...], tuple[Trace, ...] | None]:
    """Return the traces to learn from, and those that are held out, None where the rule chooses them.

    Files that are not whole are told on standard error, and files of which the memory has more gold.

    Raises:
        DataError: A folder of traces is wrong, or the memory holds none.
    """
    from reflact.calibration.trace import Trace
    from reflact.cli.stored import print_incomplete_files

    heldout = None if config.heldout is None else Trace.load_all(config.heldout)
    traces = await load_stored_traces(memory) if config.traces is None else Trace.load_all(config.traces)
    print_incomplete_files((*traces, *(heldout or ())), err=True)
    if config.traces is not None:
        await _print_ignored_labels(traces, memory)
    return traces, heldout


async def _print_ignored_labels(traces: Sequence[Trace], memory: MemoryStore) -> None:
    """Say on standard error where labels in the memory do not count, since the traces come from files."""
    known = {one.id: one.n_labelled for one in await memory.summaries()}
    richer = sum(
        known.get(trace.id, 0)
        > sum(event.label is not None and event.label.source != "agreement" for event in trace.events)
        for trace in traces
    )
    if richer:
        typer.echo(
            f"{richer} of these traces have gold in the memory that their files lack, and files count where "
            "`traces` names them; leave `traces` out to take all traces from the memory",
            err=True,
        )


def read_pairs(path: Path) -> list[ContrastPair]:
    """Return the pairs of a file.

    Raises:
        DataError: It cannot be read, or a line is no pair.
    """
    from pydantic import ValidationError

    from reflact.calibration.given import describe_first_error
    from reflact.errors import DataError
    from reflact.memory import ContrastPair

    pairs = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"cannot read the anchors {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"the anchors {path} are not UTF-8 text: {error.reason}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            pairs.append(ContrastPair.model_validate_json(line))
        except ValidationError as error:
            raise DataError(
                f"{path}, line {number}, is no contrast pair: {describe_first_error(error)}; a line is what "
                "ContrastPair.model_dump_json gives"
            ) from None
    return pairs


async def load_stored_traces(memory: MemoryStore) -> tuple[Trace, ...]:
    """Return the traces of the memory, in the order of their names."""
    from reflact.calibration.trace import Trace
    from reflact.errors import DataError

    found = [await memory.trace(name) for name in await memory.trace_ids()]
    if not found:
        raise DataError("the memory holds no trace: name a folder as `traces`, or keep traces in the memory")
    return tuple(Trace.from_stored(one) for one in found if one is not None)


def require_writable(path: Path) -> None:
    """Make sure that a page can be written, before what it is to show is paid for.

    Raises:
        ConfigError: It cannot be; says why.
    """
    from reflact.errors import ConfigError

    trial = path.with_name(f".{path.name}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"--html {path} cannot be written: {error.strerror or error}; name another file, nothing "
            "was asked yet"
        ) from None


def write_calibration_page(path: Path, report: CalibrationReport) -> None:
    """Write a calibration's page in one step, so that nobody reads a part of it.

    Raises:
        StoreError: The file cannot be written.
    """
    from reflact.exports import write_atomically
    from reflact.pages.calibration import render_calibration_page

    write_atomically(path, render_calibration_page(report))
