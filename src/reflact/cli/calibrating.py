"""What ``reflact calibrate`` reads and opens: traces, gold pairs, the memory, the model and its books."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import httpx

    from reflact.calibration.config import CalibrateConfig
    from reflact.calibration.trace import Trace
    from reflact.calls import Rendered, Reply, Sample
    from reflact.memory import ContrastPair
    from reflact.memory_store import MemoryStore
    from reflact.ports import LLM, R, RunStore
    from reflact.results import Spend
    from reflact.roles import ModelConfig

ROLE = "critic"


class Unasked:
    """A model that nobody asks: what is foreseen is foreseen without it."""

    @property
    def identity(self) -> str:
        """Its name."""
        return "unasked"

    async def ask(
        self,
        prompt: Rendered,
        reply_type: type[R],
        *,
        sample: Sample,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Refuse."""
        raise AssertionError(f"a forecast asked a model: {sample.label}")


class Opened(NamedTuple):
    """A model that is connected, and the books that its calls are written in."""

    llm: LLM
    store: RunStore
    run_id: str

    async def spent(self) -> tuple[Spend, ...]:
        """Return what all starts have paid for."""
        return await self.store.spend(self.run_id)


def run_of(config: CalibrateConfig) -> str:
    """Return under which name the calls are booked: one for each memory."""
    from reflact.types import digest

    return f"c{digest(str(config.memory.absolute()))[:12]}"


@asynccontextmanager
async def opened(config: CalibrateConfig) -> AsyncIterator[Opened]:
    """Open the store of model calls and connect the model, under a budget that holds over all starts.

    Raises:
        BudgetSpent: The time is up.
    """
    import anyio

    from reflact.llm.budget import Budget
    from reflact.llm.client import Client
    from reflact.store.runs import open_store

    run_id, budget = run_of(config), Budget(config.budget)
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
                yield Opened(llm, store, run_id)
            if time.cancelled_caught:
                raise budget.out_of_time()
        finally:
            with anyio.move_on_after(1, shield=True):
                await store.add_seconds(run_id, anyio.current_time() - begun)


async def spent_before(config: CalibrateConfig) -> tuple[Spend, ...]:
    """Return what earlier starts have paid for, where there is a store of calls."""
    from reflact.store.runs import open_store

    path = config.store or config.memory
    if not path.is_file():
        return ()
    async with open_store(path) as store:
        return await store.spend(run_of(config))


async def given(
    config: CalibrateConfig, memory: MemoryStore
) -> tuple[tuple[Trace, ...], tuple[Trace, ...] | None]:
    """Return the traces to learn from, and those that are held out, None where the rule chooses them.

    Raises:
        DataError: A folder of traces is wrong, or the memory holds none.
    """
    from reflact.calibration.trace import Trace

    heldout = None if config.heldout is None else Trace.load_all(config.heldout)
    traces = await stored_traces(memory) if config.traces is None else Trace.load_all(config.traces)
    return traces, heldout


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


def pairs_of(path: Path) -> list[ContrastPair]:
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


async def stored_traces(memory: MemoryStore) -> tuple[Trace, ...]:
    """Return the traces of the memory, in the order of their names."""
    from reflact.calibration.trace import Trace
    from reflact.errors import DataError

    found = [await memory.trace(name) for name in await memory.trace_ids()]
    if not found:
        raise DataError("the memory holds no trace: name a folder as `traces`, or keep traces in the memory")
    return tuple(Trace.of(one) for one in found if one is not None)
