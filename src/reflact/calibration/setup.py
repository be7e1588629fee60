"""Connects a model for a critic or a calibrator: stored replies are reused, and a budget holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reflact.config.models import ModelConfig
from reflact.config.training import BudgetConfig, ReplayConfig
from reflact.errors import ConfigError
from reflact.lazy import CLIENT_MODULES, import_all
from reflact.llm.budget import require_cap
from reflact.protocols import LLM
from reflact.records import Spend
from reflact.types import digest_json

if TYPE_CHECKING:
    from reflact.llm.rate_limit import LimitChange

UNLIMITED_BUDGET = BudgetConfig()
NO_REPLAY = ReplayConfig()


# Returns the spend of all starts.
ReadSpend = Callable[[], Awaitable[tuple[Spend, ...]]]


@asynccontextmanager
async def connect(
    model: ModelConfig,
    *,
    store: Path | str,
    role: str = "critic",
    budget: BudgetConfig = UNLIMITED_BUDGET,
    replay: ReplayConfig = NO_REPLAY,
) -> AsyncIterator[LLM]:
    """Connect a model for a critic or a calibrator; stored replies are not asked for again.

    Args:
        model: The endpoint, the model, its settings.
        store: The file of model calls, such as the memory's own, created if missing.
        role: The name of the model's use, in messages and in the store.
        budget: The limits of all connections to this file together.
        replay: Recorded responses instead of the endpoint.

    Raises:
        ConfigError: No model is named, its key is not set, or a limit needs a cap that the model
            lacks.
        BudgetSpent: On leaving: the time is up.
        CassetteError: The recording is missing or malformed.
        StoreError: The file cannot be read or written.
    """
    if not model.model:
        raise ConfigError(f"the {role}'s model has no name: set `model` as its endpoint knows it")
    require_cap(budget, model, role=role)
    run_id = account_name(Path(store))
    async with open_connection(
        model, store=Path(store), role=role, run_id=run_id, budget=budget, replay=replay
    ) as (llm, _):
        yield llm


@asynccontextmanager
async def open_connection(
    model: ModelConfig,
    *,
    store: Path,
    role: str,
    run_id: str,
    budget: BudgetConfig,
    replay: ReplayConfig,
    on_limit: Callable[[LimitChange], None] | None = None,
) -> AsyncIterator[tuple[LLM, ReadSpend]]:
    """Open the store of model calls and connect a model, under a budget over all starts."""
    import anyio.to_thread

    await anyio.to_thread.run_sync(import_all, CLIENT_MODULES)
    from reflact.llm.budget import Account, Budget
    from reflact.llm.cassettes import open_cassette
    from reflact.llm.client import Client
    from reflact.store.runs import open_store

    limits = Budget(budget)
    transport = None
    is_replay = replay.cassette is not None and replay.mode == "replay"
    async with AsyncExitStack() as stack:
        if replay.cassette is not None:
            transport = await stack.enter_async_context(
                open_cassette(replay.cassette, mode=replay.mode)
            )
        calls = await stack.enter_async_context(open_store(store))
        await calls.open_run(run_id, {}, None, resume=False)  # others may have calls in flight
        limits.begin(await calls.spend(run_id), await calls.add_seconds(run_id, 0.0))
        if budget != UNLIMITED_BUDGET:
            calls.check_calls(limits.check_ledger)
        client = Client(
            model.model_copy(update={"api_key_env": None, "key": None}) if is_replay else model,
            role,
            Account(run_id, calls, calls.decision_log(run_id), limits),
            transport=transport,
            on_limit=on_limit,
        )
        llm = await stack.enter_async_context(client)
        begun = anyio.current_time()
        try:
            with anyio.CancelScope(deadline=limits.deadline) as time:
                yield llm, partial(calls.spend, run_id)
            if time.cancelled_caught:
                raise limits.out_of_time()
        finally:
            with anyio.move_on_after(1, shield=True):
                await calls.add_seconds(run_id, anyio.current_time() - begun)


def account_name(path: Path) -> str:
    """Return the name under which the calls for a file are counted."""
    return f"c{digest_json(str(path.absolute()))[:12]}"
