"""Spans and metrics of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, SpanKind, StatusCode, get_current_span

import pure_server
from pure_world import PureNetwork, settings, write_world
from reflact import Trainer
from reflact.config.models import ModelConfig
from reflact.integrations.opentelemetry import Telemetry, TracedLLM, Tracing
from reflact.messages import CallId, Message, RenderedPrompt, Text
from reflact.records import RunSummary, Usage
from reflact.testing import ScriptedLLM

STAGES = ("aggregate", "select", "update", "evaluate", "rollout", "reflect", "appendix")
ROLLOUT = "reflact.rollout > chat pure"
PROMPT = RenderedPrompt(name="target", version=1, messages=(Message(role="user", content="how much is it?"),))
MODEL = {
    "model": "pure",
    "base_url": "http://pure.test/v1",
    "api_key_env": None,
    "call_id_header": "x-sample",
}
OPTIMIZER = {"call_id_header": "x-sample"}
SAMPLE = CallId(role="target", purpose="rollout", rollout="key")


class Watch:
    """Keeps all spans and metrics of the runs that get its ``telemetry``."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(self.tracers, MeterProvider([self._reader]))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name.startswith(name)]

    @property
    def calls(self) -> list[ReadableSpan]:
        return self.named("chat")

    @property
    def traces(self) -> set[int]:
        return {span.context.trace_id for span in self.spans}

    def path(self, span: ReadableSpan) -> str:
        """Return the names of a span and of all above it, the topmost first."""
        known = {each.context.span_id: each for each in self.spans}
        names = [span.name]
        while span.parent is not None:
            span = known[span.parent.span_id]
            names.append(span.name)
        return " > ".join(reversed(names))

    def paths(self) -> Counter[str]:
        return Counter(self.path(span) for span in self.spans)

    def total(self, attribute: str) -> int:
        """Return the sum of an attribute over the spans of model calls."""
        values = [told(span).get(attribute, 0) for span in self.calls]
        return sum(value for value in values if isinstance(value, int))

    def metric(self, name: str, *by: str) -> dict[tuple[object, ...], float]:
        """Return a metric's sums by the values of some attributes; nothing if there is no measurement."""
        data = self._reader.get_metrics_data()
        sums: dict[tuple[object, ...], float] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in (metric for metric in scope.metrics if metric.name == name):
                    for point in metric.data.data_points:
                        key = tuple((point.attributes or {}).get(attribute) for attribute in by)
                        value = point.value if isinstance(point, NumberDataPoint) else point.sum
                        sums[key] = sums.get(key, 0) + value
        return sums

    def text(self) -> str:
        return "\n".join([*(span.to_json() for span in self.spans), str(self._reader.get_metrics_data())])


def told(span: ReadableSpan) -> Mapping[str, object]:
    return span.attributes or {}


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return write_world(tmp_path / "world")


async def train(config: dict[str, Any], watch: Watch, network: httpx.AsyncBaseTransport) -> RunSummary:
    return await Trainer(config, transport=network, telemetry=watch.telemetry).train()


def tokens(summary: RunSummary) -> tuple[int, int]:
    """Return the input and output tokens that a run has paid for."""
    usage = sum((entry.usage for entry in summary.spend), Usage())
    return usage.input_tokens, usage.output_tokens


CANARIES = {"alpha", "rule slip", "coin", "You ", "- keep", "- hush"}
"""Words of items, skills, prompts and replies."""
KEY = "hunter2canary99"


def train_with_canaries(folder: Path, *, content: bool, epochs: int = 3) -> tuple[RunSummary, Watch]:
    """Train with prices, and with a key that a reply and an item contain."""
    world, watch = write_world(folder / "world"), Watch()

    async def key() -> str:
        await checkpoint()
        return KEY

    def leak(body: dict[str, Any], call_id: str) -> str:
        said = pure_server.answer(body, call_id)
        return said if said != "unknown" else f"unknown {KEY}"

    price = {"input": 1.0, "output": 2.0}
    models = {"target": {**MODEL, "price": price, "key": key}, "optimizer": OPTIMIZER}
    config = settings(
        world, folder / "run", models=models, train={"num_epochs": epochs}, telemetry={"content": content}
    )
    items = (world / "train" / "items.jsonl").read_text("utf-8")
    assert items.count("gamma 6") == 1
    (world / "train" / "items.jsonl").write_text(items.replace("gamma 6", f"gamma 6 {KEY}"), encoding="utf-8")
    return anyio.run(train, config, watch, PureNetwork(leak)), watch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSummary, Watch]:
    return train_with_canaries(tmp_path_factory.mktemp("trained"), content=False)


def test_a_run_is_one_trace_with_every_call_in_its_place(trained: tuple[RunSummary, Watch]) -> None:
    """Calls stand under their stage, those of targets under their rollout, stages under their step."""
    summary, watch = trained
    assert summary.status == "completed"
    assert len(watch.traces) == 1
    step, run = "reflact.run > reflact.step > reflact.stage", "reflact.run > reflact.stage"
    calls = {f"{step} {stage} > chat pure" for stage in STAGES if stage != "rollout"}
    calls |= {f"{run} {stage} > chat pure" for stage in ("slow_update", "meta_skill")}
    rollouts = {f"{run} {stage} > {ROLLOUT}" for stage in ("evaluate", "slow_update", "final_test")}
    rollouts |= {f"{step} {stage} > {ROLLOUT}" for stage in ("rollout", "evaluate")}
    found = {path for path in watch.paths() if path.endswith("chat pure")}
    assert found <= calls | rollouts
    assert rollouts | {f"{step} {stage} > chat pure" for stage in ("reflect", "aggregate")} <= found
    for span in watch.calls:
        above = watch.path(span).split(" > ")
        assert told(span)["reflact.role"] == ("target" if "reflact.rollout" in above else "optimizer")
        assert f"reflact.stage {told(span)['reflact.stage']}" in above
    assert [told(span)["reflact.step"] for span in watch.named("reflact.step")] == list(range(1, 7))


def test_spans_and_metrics_count_what_the_run_has_paid(trained: tuple[RunSummary, Watch]) -> None:
    """Token counts of spans and of the metric, and the spend, equal the summary's.

    Among the calls are some whose first reply was sent back, and some without any valid reply.
    """
    summary, watch = trained
    given, written = tokens(summary)
    assert (watch.total("gen_ai.usage.input_tokens"), watch.total("gen_ai.usage.output_tokens")) == (
        given,
        written,
    )
    measured = watch.metric("gen_ai.client.token.usage", "gen_ai.token.type")
    assert measured == {("input",): given, ("output",): written}
    assert {told(span)["reflact.attempts"] for span in watch.calls} == {1, 2, 3}
    invalid = [told(span) for span in watch.calls if told(span).get("error.type") == "ReplyError"]
    assert {each["reflact.attempts"] for each in invalid} == {3}
    assert all(each["gen_ai.usage.output_tokens"] for each in invalid)
    spend = {(e.role, e.purpose): e.usage.usd for e in summary.spend}
    assert watch.metric("reflact.spend", "reflact.role", "reflact.purpose") == pytest.approx(spend)
    assert watch.metric("reflact.steps") == {(): summary.steps}
    decisions = {(count.action,): count.count for count in summary.actions}
    measured = watch.metric("reflact.decisions", "reflact.part", "reflact.action")
    assert {key[1:]: value for key, value in measured.items() if key[0] == "step"} == decisions


@pytest.mark.slow
async def test_a_resumed_run_counts_nothing_twice(world: Path, tmp_path: Path) -> None:
    """A start after another is a trace of its own; together they count what was paid, and nothing twice.

    An answer that is stored while its caller is cancelled is counted, but comes too late for the span.
    """
    watches = [Watch(), Watch()]
    scope = anyio.CancelScope()

    def cut(body: dict[str, Any], call_id: str) -> str:
        if call_id.startswith("optimizer/merge/step=2/"):
            scope.cancel()
        return pure_server.answer(body, call_id)

    config = settings(world, tmp_path / "run", train={"rollout_concurrency": 1})
    with scope:
        await train(config, watches[0], PureNetwork(cut))
    assert scope.cancelled_caught
    summary = await train(config, watches[1], PureNetwork())
    assert summary.status == "completed"
    for kind, paid in zip(("input", "output"), tokens(summary), strict=True):
        measured = [watch.metric("gen_ai.client.token.usage", "gen_ai.token.type") for watch in watches]
        assert sum(counts[kind,] for counts in measured) == paid
        assert 0.9 * paid < sum(watch.total(f"gen_ai.usage.{kind}_tokens") for watch in watches) <= paid
    assert sum(watch.metric("reflact.steps")[()] for watch in watches) == summary.steps
    stored = [span for span in watches[1].calls if told(span)["reflact.stored"]]
    assert stored
    assert all("gen_ai.usage.input_tokens" not in told(span) for span in stored)
    assert watches[0].traces.isdisjoint(watches[1].traces)
    runs = {told(span)["reflact.run.id"] for watch in watches for span in watch.spans}
    assert runs == {summary.run_id}


async def test_a_cancelled_run_ends_its_spans(world: Path, tmp_path: Path) -> None:
    watch, scope = Watch(), anyio.CancelScope()

    def cut(body: dict[str, Any], call_id: str) -> str:
        if call_id.startswith("optimizer/analyst_failure/step=1/"):
            scope.cancel()
        return pure_server.answer(body, call_id)

    with scope:
        await train(settings(world, tmp_path / "run"), watch, PureNetwork(cut))
    assert scope.cancelled_caught
    cancelled = {span.name for span in watch.spans if told(span).get("reflact.cancelled")}
    assert {"reflact.run", "reflact.step", "reflact.stage reflect", "chat pure"} <= cancelled
    assert len(watch.traces) == 1
    assert {watch.path(span).split(" > ")[0] for span in watch.spans} == {"reflact.run"}
    assert not [span for span in watch.spans if span.status.status_code is StatusCode.ERROR]
    assert get_current_span() is INVALID_SPAN


def test_spans_hold_content_only_where_it_is_asked_for(
    trained: tuple[RunSummary, Watch], tmp_path: Path
) -> None:
    """Without ``telemetry.content`` no word of a prompt, reply or skill is in any span; a key never is."""
    silent = trained[1].text()
    assert {canary for canary in {*CANARIES, KEY, "[key]"} if canary in silent} == set()
    told_all = train_with_canaries(tmp_path, content=True, epochs=1)[1].text()
    assert {canary for canary in {*CANARIES, KEY, "[key]"} if canary in told_all} == {*CANARIES, "[key]"}


async def test_a_call_says_what_the_conventions_ask_for() -> None:
    """A call's span has its kind, name, provider, model, place and settings; Azure has its own name."""
    watch = Watch()
    tracing = Tracing("r1", watch.telemetry)
    config = ModelConfig(model="m", base_url="https://models.test/v1", temperature=0.5, max_tokens=7, seed=3)
    with tracing.run(), tracing.step(4, epoch=2), tracing.stage("evaluate", step=4):
        await TracedLLM(ScriptedLLM(lambda *_: "yes"), tracing, config).ask(PROMPT, Text, call_id=SAMPLE)
    (span,) = watch.calls
    assert (span.name, span.kind) == ("chat m", SpanKind.CLIENT)
    assert told(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.output.type": "text",
        "server.address": "models.test",
        "server.port": 443,
        "reflact.run.id": "r1",
        "reflact.role": "target",
        "reflact.purpose": "rollout",
        "reflact.step": 4,
        "reflact.stage": "evaluate",
        "reflact.attempts": 1,
        "reflact.stored": True,
    }
    assert watch.metric("gen_ai.client.operation.duration") == {}, "nothing was sent"


async def test_a_failing_call_is_an_error_on_all_that_it_ends(world: Path, tmp_path: Path) -> None:
    watch = Watch()

    async def refuse(request: httpx.Request) -> httpx.Response:
        await checkpoint()
        return httpx.Response(401, json={"error": {"message": "canary of the server"}})

    config = settings(world, tmp_path / "run")
    summary = await train(config, watch, httpx.MockTransport(refuse))
    assert summary.status == "failed"
    failed = [span for span in watch.calls if told(span).get("error.type") == "AccessDenied"]
    assert failed
    assert {span.status.status_code for span in failed} == {StatusCode.ERROR}
    assert {span.status.description for span in failed} == {None}
    (run,) = watch.named("reflact.run")
    assert (told(run)["error.type"], told(run)["reflact.status"]) == ("failed", "failed")
    assert ("AccessDenied",) in watch.metric("gen_ai.client.operation.duration", "error.type")
    assert "canary of the server" not in watch.text()
    assert not [event for span in watch.spans for event in span.events]
