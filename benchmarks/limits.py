"""How near the adapted rate comes to the one that an endpoint sustains: beside the bound, against a real server.

A server in a process of its own allows R requests within any second, answers 429 beyond, with and without
``Retry-After``, and takes 20 ms for an answer. 32 calls are always wanting to be sent, 16 may be in flight:
the network library's own cost for each call grows with its connections. Counted are the answers and the refusals after a warm-up of 30
seconds, for 30 seconds.

    python benchmarks/limits.py
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from itertools import count

import anyio
import httpx
from chat_server import running

from reflact.concurrency import open_task_group
from reflact.config.models import ModelConfig
from reflact.llm.budget import Account
from reflact.llm.client import Client
from reflact.llm.rate_limit import LimitChange
from reflact.messages import CallId
from reflact.testing import InMemoryRunStore

CALLS, SLOTS, WARM_SECONDS, SECONDS = 32, 16, 30.0, 30.0
SERVED, REFUSED = 0.75, 0.05


class Counting(httpx.AsyncHTTPTransport):
    """Counts answers by status after the warm-up."""

    def __init__(self, counted_from: float) -> None:
        super().__init__(limits=httpx.Limits(max_connections=None))
        self._counted_from = counted_from
        self.heard: Counter[int] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if time.monotonic() >= self._counted_from:
            self.heard[response.status_code] += 1
        return response


async def measure(url: str) -> tuple[float, float, int]:
    """Return answers a second, the share of calls refused, and the back-offs, all after the warm-up."""
    start = time.monotonic()
    changes: list[float] = []
    numbers = count()

    async def worker(client: Client) -> None:
        while time.monotonic() < start + WARM_SECONDS + SECONDS:
            call_id = CallId(role="target", purpose="limits", number=next(numbers), rollout="r")
            await client.forward({"messages": []}, call_id=call_id)

    config = ModelConfig(model="m", base_url=url, api_key_env=None, concurrency=SLOTS, max_retries=1000)
    store = InMemoryRunStore()
    await store.open_run("limits", {}, {})
    account = Account("limits", store, store.decision_log("limits"))
    network = Counting(start + WARM_SECONDS)
    note = partial(note_time, changes, start)
    async with (
        network,
        Client(config, "target", account, transport=network, on_limit=note) as client,
        open_task_group() as tasks,
    ):
        for _ in range(CALLS):
            tasks.start_soon(worker, client)
    refused = network.heard[429] / network.heard.total()
    return network.heard[200] / SECONDS, refused, sum(at >= WARM_SECONDS for at in changes)


def note_time(changes: list[float], start: float, _: LimitChange) -> None:
    """Note when a back-off was."""
    changes.append(time.monotonic() - start)


def main() -> None:
    """Measure each rate with and without the header, and print what came of it beside the bound."""
    print("| R a second | Retry-After | served/s | of R (>= 75%) | refused (<= 5%) | back-offs |")
    print("|---|---|---|---|---|---|")
    missed = 0
    for rate in (50, 200):
        for says in ("nothing", "seconds"):
            with running(rate, says, 20) as url:
                served, refused, back_offs = anyio.run(measure, url)
            cells = (rate, says, f"{served:.1f}", f"{served / rate:.1%}")
            print("|", " | ".join(map(str, (*cells, f"{refused:.2%}", back_offs))), "|", flush=True)
            missed += served < SERVED * rate or refused > REFUSED
    if missed:
        raise SystemExit(f"{missed} of 4 missed the bound")


if __name__ == "__main__":
    main()
