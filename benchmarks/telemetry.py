"""What spans and metrics cost, with and without an SDK.

First single calls: a model that answers at once is asked directly, through spans without an SDK, and through
spans that an SDK keeps in memory; printed is what a call takes more. Then whole runs whose target is reached
through the whole client, over a network that answers at once: printed is the run's CPU time without an SDK,
the share of it that spans take (their number times the cost of one), and the ratio that an SDK makes. The
benchmark fails where spans without an SDK take more than 2% of such a run; models that think take no CPU.

    python benchmarks/telemetry.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio
import httpx
from anyio.lowlevel import checkpoint
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reflact import Trainer
from reflact.integrations.opentelemetry import Telemetry, TracedLLM, Tracing
from reflact.messages import CallId, Message, RenderedPrompt, Text
from reflact.protocols import LLM
from reflact.testing import ScriptedLLM, ToyEnvironment, toy_optimizer

CALLS, ROUNDS, MOST = 4_000, 7, 0.02
PROMPT = RenderedPrompt(name="target", version=1, messages=(Message(role="user", content="double 7"),))
SAMPLE = CallId(role="target", purpose="rollout", rollout="key")


def watched() -> tuple[Telemetry, InMemorySpanExporter]:
    """Return providers that keep what they are given."""
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(tracers, MeterProvider([InMemoryMetricReader()])), exporter


async def of_call(llm: LLM) -> float:
    """Return the CPU seconds of a call, the least of some rounds."""
    least = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(CALLS):
            await llm.ask(PROMPT, Text, call_id=SAMPLE)
        least = min(least, (time.process_time() - begun) / CALLS)
    return least


async def answer(request: httpx.Request) -> httpx.Response:
    """Say that the answer is not known."""
    await checkpoint()
    message = {"role": "assistant", "content": "unknown"}
    completion = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21},
    }
    return httpx.Response(200, json=completion)


async def of_run(telemetry: Telemetry | None) -> float:
    """Return the CPU seconds of a run."""
    with tempfile.TemporaryDirectory() as folder:
        target = {"model": "m", "base_url": "http://models.test/v1", "api_key_env": None}
        trainer = Trainer(
            {
                "out_dir": Path(folder) / "run",
                "models": {"target": target},
                "search": {"sources": ["edits"]},
                "train": {"num_epochs": 2, "batch_size": 8},
            },
            environment=ToyEnvironment(train=32, val=16, test=16),
            optimizer=ScriptedLLM(toy_optimizer()),
            transport=httpx.MockTransport(answer),
            telemetry=telemetry,
        )
        begun = time.process_time()
        await trainer.train()
        return time.process_time() - begun


async def main() -> int:
    """Measure and print; return 1 where spans cost too much."""
    model = ScriptedLLM(lambda *_: "14")
    bare = await of_call(model)
    off = await of_call(TracedLLM(model, Tracing("r1"))) - bare
    on = await of_call(TracedLLM(model, Tracing("r1", watched()[0]))) - bare
    print(f"a call takes {off * 1e6:.0f} µs more without an SDK, {on * 1e6:.0f} µs with one in memory")

    await of_run(None)
    without, with_sdk, spans = [], [], 0
    for _ in range(ROUNDS):
        without.append(await of_run(None))
        telemetry, exporter = watched()
        with_sdk.append(await of_run(telemetry))
        spans = len(exporter.get_finished_spans())
    run, kept = statistics.median(without), statistics.median(with_sdk)
    share = spans * off / run
    print(f"a run takes {run:.2f} s of CPU, and {spans} spans without an SDK {share:.2%} of it")
    print(f"with an SDK in memory it takes {kept / run:.3f} times as long")
    return 0 if share <= MOST else 1


if __name__ == "__main__":
    sys.exit(anyio.run(main))
