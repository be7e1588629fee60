"""``reflact calibrate``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reflact.cli.running import Config, Overrides

if TYPE_CHECKING:
    import httpx

    from reflact.calibration.config import CalibrateConfig
    from reflact.calibration.results import CalibrationReport
    from reflact.calibration.trace import Trace
    from reflact.memory import ContrastPair
    from reflact.memory_store import MemoryStore
    from reflact.ports import LLM
    from reflact.roles import ModelConfig

ROLE = "critic"


def calibrate(
    config: Config,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")
    ] = False,
) -> None:
    """Make contrast pairs of traces, promote those that help the critic, and measure it before and after.

    Calls that were paid for are not asked again: stopped and started anew, it goes on where it was.
    """
    calibrate_and_show(config, overrides, as_json=as_json)


def calibrate_and_show(path: Path, overrides: Sequence[str] | None, *, as_json: bool = False) -> None:
    """Run a round as a file describes it, and print what it did.

    Raises:
        UsageError: The configuration, a trace or an anchor is wrong.
        ModelError: The endpoint refused, failed or could not be reached; the cassette lacks an answer.
        StoreError: The memory cannot be read or written.
    """
    import anyio
    from rich.console import Console

    from reflact.calibration.config import CalibrateConfig, anchored
    from reflact.cli.calibrated import print_calibration
    from reflact.errors import ConfigError
    from reflact.llm.allowance import require_cap
    from reflact.loading import load_section

    settings = load_section(CalibrateConfig, path, overrides=overrides or ())
    settings = anchored(settings, path.resolve().parent)
    if not settings.models.critic.model:
        raise ConfigError("models.critic.model is required: name the model that scores")
    require_cap(settings.budget, settings.models.critic, role=ROLE)
    report = anyio.run(_calibrated, settings)
    if as_json:
        typer.echo(report.model_dump_json())
    else:
        print_calibration(Console(), report)


async def _calibrated(config: CalibrateConfig) -> CalibrationReport:
    from reflact.calibration.calibrator import Calibrator
    from reflact.calibration.critic import Critic
    from reflact.calibration.trace import Trace
    from reflact.memory_store import MemoryStore
    from reflact.prompts import load_book

    prompts = load_book(config.prompts.versions, config.prompts.folder)
    heldout = None if config.heldout is None else Trace.load_all(config.heldout)
    async with MemoryStore(config.memory) as memory, _model(config) as llm:
        traces = await _stored(memory) if config.traces is None else Trace.load_all(config.traces)
        if config.anchors is not None:
            await memory.keep_anchors(_pairs(config.anchors))
        critic = Critic(llm, memory=memory, settings=config.critic, prompts=prompts)
        calibrator = Calibrator(llm, memory, critic=critic, settings=config.calibrator, prompts=prompts)
        return await calibrator.calibrate(traces, heldout=heldout)


@asynccontextmanager
async def _model(config: CalibrateConfig) -> AsyncIterator[LLM]:
    """Open the store of model calls and connect the model, under a budget that holds over all starts.

    Raises:
        BudgetSpent: The time is up.
    """
    import anyio

    from reflact.llm.budget import Budget
    from reflact.llm.client import Client
    from reflact.store.runs import open_store
    from reflact.types import digest

    run_id = f"c{digest(str(config.memory.absolute()))[:12]}"
    budget = Budget(config.budget)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(config.store or config.memory))
        await store.open_run(run_id, {}, None)
        budget.begin(await store.spend(run_id), await store.add_seconds(run_id, 0.0))
        client = Client(
            _reachable(config),
            role=ROLE,
            run_id=run_id,
            effects=store,
            journal=store.journal(run_id),
            budget=budget,
            transport=await _transport(config, stack),
        )
        llm = await stack.enter_async_context(client)
        begun = anyio.current_time()
        try:
            with anyio.CancelScope(deadline=budget.deadline) as time:
                yield llm
            if time.cancelled_caught:
                raise budget.out_of_time()
        finally:
            with anyio.move_on_after(1, shield=True):
                await store.add_seconds(run_id, anyio.current_time() - begun)


def _reachable(config: CalibrateConfig) -> ModelConfig:
    """Return the model's settings; a replay needs no key."""
    keyless = config.replay.cassette is not None and config.replay.mode == "replay"
    model = config.models.critic
    return model.model_copy(update={"api_key_env": None, "key": None}) if keyless else model


async def _transport(config: CalibrateConfig, stack: AsyncExitStack) -> httpx.AsyncBaseTransport | None:
    from reflact.llm.cassette import open_cassette

    if config.replay.cassette is None:
        return None
    return await stack.enter_async_context(open_cassette(config.replay.cassette, mode=config.replay.mode))


def _pairs(path: Path) -> list[ContrastPair]:
    """Return the pairs of a file.

    Raises:
        DataError: It cannot be read, or a line is no pair.
    """
    from pydantic import ValidationError

    from reflact.errors import DataError
    from reflact.memory import ContrastPair

    pairs = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the anchors {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            pairs.append(ContrastPair.model_validate_json(line))
        except ValidationError as error:
            raise DataError(
                f"{path}, line {number}, is no contrast pair: {error.errors()[0]['msg']}"
            ) from None
    return pairs


async def _stored(memory: MemoryStore) -> tuple[Trace, ...]:
    """Return the traces of the memory, in the order of their names."""
    from reflact.calibration.trace import Trace
    from reflact.errors import DataError

    found = [await memory.trace(name) for name in await memory.trace_ids()]
    if not found:
        raise DataError("the memory holds no trace: name a folder as `traces`, or keep traces in the memory")
    return tuple(Trace.of(one) for one in found if one is not None)
