"""How near the adapted rate comes to the one that an endpoint sustains: beside the bound, against a real server.

A server in a process of its own allows R requests within any second, answers 429 beyond, with and without
``Retry-After``, and takes 20 ms for an answer. 32 calls are always wanting to be sent, 16 may be in flight:
the network library's own cost for each call grows with its connections. The last row of each rate is the
same load without adaptation. Counted are the answers and the refusals after a warm-up of 30
seconds, for 30 seconds.

    python benchmarks/limits.py
"""

from __future__ import annotations

import time
from collections import Counter

import anyio
import httpx
from chat_server import running

from reflact.concurrency import open_task_group
from reflact.config.models import ModelConfig
from reflact.llm.metering import send_whole
from reflact.llm.rate_limit import EndpointClient, LimitChange, endpoint_for
from reflact.llm.retry import RetryTransport, read_retry_after

CALLS, SLOTS, WARM_SECONDS, SECONDS = 32, 16, 30.0, 30.0
SERVED, REFUSED = 0.75, 0.05


class Sending(httpx.AsyncBaseTransport):
    """Sends one attempt once it is admitted, and counts answers by status after the warm-up."""

    def __init__(self, client: EndpointClient, counted_from: float) -> None:
        self._network = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        self._client = client
        self._counted_from = counted_from
        self.heard: Counter[int] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async with self._client.admit(1) as slot:
            response = await send_whole(request, self._network, 60)
            asked = read_retry_after(response.headers)
            slot.observe(response.status_code, asked, None)
            if time.monotonic() >= self._counted_from:
                self.heard[response.status_code] += 1
            return response

    async def aclose(self) -> None:
        await self._network.aclose()


async def measure(url: str, adaptive: bool) -> tuple[float, float, int]:
    """Return answers a second, the share of calls refused, and the back-offs, all after the warm-up."""
    start = time.monotonic()
    changes: list[float] = []

    def told(_: LimitChange) -> None:
        changes.append(time.monotonic() - start)

    async def worker(transport: httpx.AsyncBaseTransport) -> None:
        while time.monotonic() < start + WARM_SECONDS + SECONDS:
            request = httpx.Request("POST", f"{url}/chat/completions", json={"model": "m"})
            await transport.handle_async_request(request)

    config = ModelConfig(model="m", base_url=url, concurrency=SLOTS, adaptive=adaptive, max_retries=1000)
    with endpoint_for(config, on_limit=told) as client:
        sending = Sending(client, start + WARM_SECONDS)
        async with sending, open_task_group() as tasks:
            retrying = RetryTransport(sending, client)
            for _ in range(CALLS):
                tasks.start_soon(worker, retrying)
    refused = sending.heard[429] / sending.heard.total()
    return sending.heard[200] / SECONDS, refused, sum(at >= WARM_SECONDS for at in changes)


def main() -> None:
    """Measure each rate with and without the header, and print what came of it beside the bound."""
    print(
        "| R a second | Retry-After | rate found | served/s | of R (>= 75%) | refused (<= 5%) | back-offs |"
    )
    print("|---|---|---|---|---|---|---|")
    missed = 0
    for rate in (50, 200):
        for says, adaptive in (("nothing", True), ("seconds", True), ("nothing", False)):
            with running(rate, says, 20) as url:
                served, refused, back_offs = anyio.run(measure, url, adaptive)
            cells = (rate, says, "yes" if adaptive else "no", f"{served:.1f}", f"{served / rate:.1%}")
            print("|", " | ".join(map(str, (*cells, f"{refused:.2%}", back_offs))), "|", flush=True)
            missed += adaptive and (served < SERVED * rate or refused > REFUSED)
    if missed:
        raise SystemExit(f"{missed} of 4 missed the bound")


if __name__ == "__main__":
    main()
