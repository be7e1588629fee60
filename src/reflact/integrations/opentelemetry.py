"""Spans and metrics of a run for OpenTelemetry; without an SDK they do nothing.

Each start of a run is one trace: the run, its steps, their stages, rollouts, and model calls. Model
calls follow the conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
from opentelemetry import context, metrics, trace
from opentelemetry.trace import Span, SpanKind, StatusCode

from reflact.config.models import ModelConfig
from reflact.errors import ReplyError
from reflact.events import (
    CandidateJudged,
    EpochCommitted,
    Event,
    PromotionJudged,
    Stage,
    StepCommitted,
)
from reflact.llm.middleware import LLMMiddleware
from reflact.messages import CallId, RenderedPrompt, Reply, ReplyModel, Text
from reflact.protocols import LLM, EventCallback, R
from reflact.records import RunSummary, Usage
from reflact.types import Grade, Verdict

Attributes = dict[str, str | bool | int | float]

# Bounds of histograms, as the conventions recommend.
TOKEN_BOUNDS = tuple(4.0**n for n in range(14))
SECOND_BOUNDS = tuple(0.01 * 2**n for n in range(14))

# The providers of the API package itself record nothing.
SILENT_MODULES = ("opentelemetry.trace", "opentelemetry.metrics")


@dataclass(frozen=True)
class Telemetry:
    """The providers of spans and metrics; None: the global provider of this process."""

    tracer_provider: trace.TracerProvider | None = None
    meter_provider: metrics.MeterProvider | None = None


@dataclass
class ModelCall:
    """A running model call: its reply, and what it has consumed that no store had."""

    reply: Reply[Any] | None = None
    usage: Usage = field(default_factory=Usage)


class _SpanPosition(NamedTuple):
    """The current span, the run or step above it, and the stage of rollouts beside it."""

    span: Span
    parent: Span
    step: int = 0
    stage: Stage | None = None
    rollouts: _SpanPosition | None = None

    @property
    def attributes(self) -> Attributes:
        """The step and the stage."""
        stage: Attributes = {} if self.stage is None else {"reflact.stage": self.stage}
        return {"reflact.step": self.step, **stage}


_POSITION_KEY = context.create_key("reflact-position")
_CALL_KEY = context.create_key("reflact-call")


class Tracing:
    """Creates the spans and metrics of one start of a run.

    ``hide`` removes keys from content. Without it, no content is recorded.
    """

    def __init__(
        self,
        run_id: str,
        telemetry: Telemetry | None = None,
        *,
        hide: Callable[[str], str] | None = None,
    ) -> None:
        self._run_id = run_id
        self._hide = hide
        telemetry = telemetry or Telemetry()
        tracers = telemetry.tracer_provider or trace.get_tracer_provider()
        meters = telemetry.meter_provider or metrics.get_meter_provider()
        self.is_recording = not all(
            type(provider).__module__.startswith(SILENT_MODULES) for provider in (tracers, meters)
        )
        self._tracer = trace.get_tracer("reflact", tracer_provider=tracers)
        meter = metrics.get_meter("reflact", meter_provider=meters)
        self._durations = meter.create_histogram(
            "gen_ai.client.operation.duration",
            "s",
            "GenAI operation duration.",
            explicit_bucket_boundaries_advisory=SECOND_BOUNDS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=TOKEN_BOUNDS,
        )
        self._steps = meter.create_counter("reflact.steps", "{step}", "Committed steps.")
        self._decisions = meter.create_counter(
            "reflact.decisions", "{decision}", "Decisions on candidates, by outcome."
        )
        self._spend = meter.create_counter(
            "reflact.spend", "{USD}", "The cost of model calls, if prices are known."
        )

    @contextmanager
    def run(self, name: str = "reflact.run") -> Iterator[None]:
        """Open the span of a start of the run."""
        with self._span(name, {}) as span, _attach(_POSITION_KEY, _SpanPosition(span, span)):
            yield

    @contextmanager
    def step(self, step: int, *, epoch: int) -> Iterator[None]:
        """Open the span of a step."""
        attributes: Attributes = {"reflact.step": step, "reflact.epoch": epoch}
        with (
            self._span("reflact.step", attributes) as span,
            _attach(_POSITION_KEY, _SpanPosition(span, span, step)),
        ):
            yield

    @contextmanager
    def stage(self, stage: Stage, *, step: int) -> Iterator[None]:
        """Open the span of a stage, as a sibling of other open stages.

        Analysts may run during rollouts; rollouts keep their own stage.
        """
        here = _find_position()
        rollouts = here if stage == "reflect" and here.stage == "rollout" else None
        attributes: Attributes = {"reflact.step": step, "reflact.stage": stage}
        with self._span(f"reflact.stage {stage}", attributes, parent=here.parent) as span:
            position = _SpanPosition(span, here.parent, step, stage, rollouts)
            with _attach(_POSITION_KEY, position):
                yield

    @contextmanager
    def rollout(self, item_id: str) -> Iterator[Callable[[Grade], None] | None]:
        """Open the span of a rollout, as a child of its stage; yields what adds its score.

        It yields None if nothing records, since a span would take 4% of a short rollout.
        """
        if not self.is_recording:
            yield None
            return
        here = _find_position()
        position = here.rollouts or here
        attributes = {"reflact.item.id": item_id, **position.attributes}
        with self._span("reflact.rollout", attributes, parent=position.span) as span:

            def add_score(grade: Grade) -> None:
                span.set_attribute("reflact.score.hard", grade.score.hard)
                span.set_attribute("reflact.score.soft", grade.score.soft)

            with _attach(_POSITION_KEY, position):
                yield add_score

    @contextmanager
    def call(
        self,
        prompt: RenderedPrompt,
        reply_type: type[ReplyModel],
        call_id: CallId,
        config: ModelConfig | None,
    ) -> Iterator[ModelCall]:
        """Open the span of a model call; ``config`` is None if no store has its replies."""
        shared = {**_describe_model(config), "reflact.role": call_id.role}
        attributes = {
            **shared,
            "gen_ai.output.type": "text" if issubclass(reply_type, Text) else "json",
            "reflact.purpose": call_id.purpose,
            **_find_position().attributes,
        }
        for setting in ("temperature", "max_tokens", "seed"):
            value = getattr(config, setting, None)
            if value is not None:
                attributes[f"gen_ai.request.{setting}"] = value
        call = ModelCall()
        start = anyio.current_time()
        error: BaseException | None = None
        name = "chat" if config is None else f"chat {config.model}"
        with self._span(name, attributes, kind=SpanKind.CLIENT) as span:
            messages = [(message.role, message.content) for message in prompt.messages]
            self._record_messages(span, "input", messages)
            try:
                with _attach(_CALL_KEY, call):
                    yield call
            except BaseException as raised:  # the span ends with it, also if it is a cancellation
                error = raised
                raise
            finally:
                is_stored = self._finish_call(span, call, error, has_store=config is not None)
                if not is_stored and (error is None or isinstance(error, Exception)):
                    ending = {} if error is None else {"error.type": type(error).__name__}
                    self._durations.record(anyio.current_time() - start, {**shared, **ending})

    def _finish_call(
        self, span: Span, call: ModelCall, error: BaseException | None, *, has_store: bool
    ) -> bool:
        """Record a call's reply and consumption; return whether every reply came from the store."""
        attempts = len(error.reasons) if isinstance(error, ReplyError) else None
        if call.reply is not None:
            attempts = call.reply.attempts
            value = call.reply.value
            if isinstance(value, Text):
                self._record_messages(span, "output", [("assistant", value.text)], "unknown")
            else:
                content = value.model_dump_json()
                self._record_messages(span, "output", [("assistant", content)], "stop")
        usage = call.usage
        is_stored = has_store and attempts is not None and not usage.calls
        if usage.calls > usage.uncounted:
            span.set_attribute("gen_ai.usage.input_tokens", usage.input_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)
        if usage.cached_tokens:
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        if attempts is not None:
            span.set_attribute("reflact.attempts", attempts)
        if has_store:
            span.set_attribute("reflact.stored", is_stored)
        return is_stored

    def _record_messages(
        self, span: Span, side: str, messages: Sequence[tuple[str, str]], ending: str | None = None
    ) -> None:
        """Record messages, each with its role and content, if content is on."""
        if self._hide is None or not span.is_recording():
            return
        end = {} if ending is None else {"finish_reason": ending}
        shown = []
        for role, content in messages:
            part = {"type": "text", "content": self._hide(content)}
            shown.append({"role": role, "parts": [part], **end})
        span.set_attribute(f"gen_ai.{side}.messages", json.dumps(shown, ensure_ascii=False))

    def count_usage(
        self, usage: Usage, *, role: str, purpose: str, config: ModelConfig | None
    ) -> None:
        """Count the consumption of a reply that did not come from the store."""
        call = context.get_value(_CALL_KEY)
        if isinstance(call, ModelCall):
            call.usage += usage
        shared = {**_describe_model(config), "reflact.role": role}
        if usage.calls > usage.uncounted:
            self._tokens.record(usage.input_tokens, {**shared, "gen_ai.token.type": "input"})
            self._tokens.record(usage.output_tokens, {**shared, "gen_ai.token.type": "output"})
        if usage.usd is not None:
            self._spend.add(usage.usd, {**shared, "reflact.purpose": purpose})

    def count_events(self, on_event: EventCallback) -> EventCallback:
        """Return a callback that counts steps and decisions and passes events on."""

        def count_decision(verdict: Verdict, part: str) -> None:
            self._decisions.add(1, {"reflact.action": verdict.action, "reflact.part": part})

        async def count(event: Event) -> None:
            match event:
                case StepCommitted():
                    self._steps.add(1)
                    here = _find_position()
                    if here.step == event.step:
                        here.parent.set_attribute("reflact.action", event.action)
                case CandidateJudged():
                    count_decision(event.verdict, "step")
                case PromotionJudged():
                    count_decision(event.verdict, "promotion")
                case EpochCommitted() if event.slow_update and event.slow_update.verdict:
                    count_decision(event.slow_update.verdict, "slow_update")
            await on_event(event)

        return count

    def record_outcome(self, summary: RunSummary) -> None:
        """Record the outcome on the span of the run."""
        span = trace.get_current_span()
        span.set_attributes({"reflact.status": summary.status, "reflact.steps": summary.steps})
        if summary.status == "failed":
            self._mark_failed(span, "failed", summary.reason or "")

    @contextmanager
    def _span(
        self,
        name: str,
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Span | None = None,
    ) -> Iterator[Span]:
        """Open a span, by default under the current one, and make it the current one."""
        within = None if parent is None else trace.set_span_in_context(parent)
        all_attributes = {"reflact.run.id": self._run_id, **attributes}
        span = self._tracer.start_span(name, context=within, kind=kind, attributes=all_attributes)
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield span
        except Exception as error:  # only marked, and raised on
            self._mark_failed(span, type(error).__name__, str(error))
            raise
        except BaseException:  # a cancellation is no failure
            span.set_attribute("reflact.cancelled", True)
            raise
        finally:
            context.detach(token)
            span.end()

    def _mark_failed(self, span: Span, kind: str, message: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR, None if self._hide is None else self._hide(message))


def _describe_model(config: ModelConfig | None) -> Attributes:
    """Return the attributes of a model's spans and metrics; a model passed as an object has few."""
    if config is None:
        return {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "other"}
    provider = {"azure": "azure.ai.openai"}.get(config.api, "openai")
    if config.api == "pydantic_ai":
        provider = config.model.partition(":")[0]
    address = urlsplit(config.base_url)
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": config.model,
        "server.address": address.hostname or "",
        "server.port": address.port or {"http": 80}.get(address.scheme, 443),
    }


def _find_position() -> _SpanPosition:
    position = context.get_value(_POSITION_KEY)
    if isinstance(position, _SpanPosition):
        return position
    return _SpanPosition(trace.get_current_span(), trace.get_current_span())


@contextmanager
def _attach(key: str, value: object) -> Iterator[None]:
    token = context.attach(context.set_value(key, value))
    try:
        yield
    finally:
        context.detach(token)


class TracedLLM(LLMMiddleware):
    """A model whose calls are spans.

    ``config`` has its settings if its client reports its consumption. It is None if the caller
    passed the model; then the usage in its replies is counted.
    """

    def __init__(self, inner: LLM, tracing: Tracing, config: ModelConfig | None = None) -> None:
        super().__init__(inner)
        self._tracing = tracing
        self._config = config

    async def ask(
        self,
        prompt: RenderedPrompt,
        reply_type: type[R],
        *,
        call_id: CallId,
        check: Callable[[R], None] | None = None,
    ) -> Reply[R]:
        """Ask the model in a span, unless nothing records."""
        if not self._tracing.is_recording:
            return await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
        with self._tracing.call(prompt, reply_type, call_id, self._config) as call:
            reply = await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
            call.reply = reply
            if self._config is None:
                role = call_id.role
                purpose = call_id.purpose
                self._tracing.count_usage(reply.usage, role=role, purpose=purpose, config=None)
        return reply
