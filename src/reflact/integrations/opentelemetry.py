"""Spans and metrics of a run, for OpenTelemetry.

Each start of a run is one trace: the run, its steps, their stages, rollouts, and model calls as the
conventions for generative AI have them (https://github.com/open-telemetry/semantic-conventions-genai). What
is no part of a step (the baseline, the ends of epochs, the promotion, the final test) hangs under the run.
Where no SDK is set up the same calls do nothing. Nothing that a model was told or has said is in there unless
``telemetry.content`` asks for it, nor are the words of errors, which may quote a reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
from opentelemetry import context, metrics, trace
from opentelemetry.trace import Span, SpanKind, StatusCode

from reflact.config.models import ModelConfig
from reflact.errors import ReplyError
from reflact.events import CandidateJudged, EpochCommitted, Event, PromotionJudged, Stage, StepCommitted
from reflact.llm.middleware import EnvironmentMiddleware, LLMMiddleware
from reflact.messages import CallId, CallReservation, RenderedPrompt, Reply, ReplyModel, StoredResponse, Text
from reflact.protocols import LLM, Environment, EventCallback, R, ResponseStore, Session
from reflact.records import FaultKind, RunSummary, Usage
from reflact.types import Grade, Item, Verdict

AttributeValue = str | bool | int | float


Attributes = dict[str, AttributeValue]


TOKEN_BOUNDS = tuple(4.0**n for n in range(14))


SECOND_BOUNDS = tuple(0.01 * 2**n for n in range(14))


"""The bounds of histograms that the conventions recommend."""


class ModelCallSpan:
    """A model call under way.

    Args:
        span: Its span.
        hide: Frees content of keys; None: no content is taken down.
        seen: Whether it is seen what is sent, and what comes from a store.

    Attributes:
        usage: What its answers that came from elsewhere than a store have consumed so far.
        attempts: Its attempts, where they are known.
        answered: Whether the model had its say, valid or not.
        error: The name of the error that it ended with, if it did.
        cut_off: Whether it was cancelled.
    """

    def __init__(self, span: Span, hide: Callable[[str], str] | None, *, seen: bool) -> None:
        self.usage = Usage()
        self.attempts: int | None = None
        self.answered = False
        self.error: str | None = None
        self.cut_off = False
        self._start = anyio.current_time()
        self._span = span
        self._hide = hide
        self._seen = seen

    def record_prompt(self, prompt: RenderedPrompt) -> None:
        """Take the prompt down, where content is asked for."""
        if self._hide is not None:
            said = [_message(m.role, self._hide(m.content)) for m in prompt.messages]
            self._span.set_attribute("gen_ai.input.messages", json.dumps(said, ensure_ascii=False))

    def record_reply(self, reply: Reply[R]) -> None:
        """Take the reply down. How plain text ended is not known here, and a typed reply is whole."""
        self.attempts, self.answered = reply.attempts, True
        if self._hide is not None:
            plain = isinstance(reply.value, Text)
            text = reply.value.text if isinstance(reply.value, Text) else reply.value.model_dump_json()
            said = _message("assistant", self._hide(text)) | {"finish_reason": "unknown" if plain else "stop"}
            self._span.set_attribute("gen_ai.output.messages", json.dumps([said], ensure_ascii=False))

    def record_failure(self, error: BaseException) -> None:
        """Take it down that there is no reply."""
        self.error, self.cut_off = type(error).__name__, not isinstance(error, Exception)
        if isinstance(error, ReplyError):
            self.attempts, self.answered = len(error.reasons), True

    @property
    def from_store(self) -> bool:
        """Whether every answer came from a store, so that there was no operation."""
        return self._seen and self.answered and not self.usage.calls

    def finish(self) -> float:
        """Take down what it consumed, and return how long it took, in seconds."""
        if self.usage.calls > self.usage.uncounted:
            self._span.set_attribute("gen_ai.usage.input_tokens", self.usage.input_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", self.usage.output_tokens)
        if self.usage.cached_tokens:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", self.usage.cached_tokens)
        if self.attempts is not None:
            self._span.set_attribute("reflact.attempts", self.attempts)
        if self._seen:
            self._span.set_attribute("reflact.stored", self.from_store)
        return anyio.current_time() - self._start


def common_attributes(config: ModelConfig | None) -> Attributes:
    """Return what spans and metrics of a model's calls share; of one that was passed in nothing is known."""
    chat: Attributes = {"gen_ai.operation.name": "chat"}
    if config is None:
        return {**chat, "gen_ai.provider.name": "other"}
    address = urlsplit(config.base_url)
    return {
        **chat,
        "gen_ai.provider.name": "azure.ai.openai" if config.api == "azure" else "openai",
        "gen_ai.request.model": config.model,
        "server.address": address.hostname or "",
        "server.port": address.port or {"http": 80}.get(address.scheme, 443),
    }


def request_attributes(config: ModelConfig | None) -> Attributes:
    """Return what spans of a model's calls say of its settings."""
    if config is None:
        return {}
    given = {
        "gen_ai.request.temperature": config.temperature,
        "gen_ai.request.top_p": config.top_p,
        "gen_ai.request.max_tokens": config.max_tokens,
        "gen_ai.request.seed": config.seed if isinstance(config.seed, int) else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


@dataclass(frozen=True)
class Telemetry:
    """Where a trainer's spans and metrics go.

    Args:
        tracer_provider: Takes the spans; None: the one that this process has set, if any.
        meter_provider: Takes the metrics; None: likewise.
    """

    tracer_provider: trace.TracerProvider | None = None
    meter_provider: metrics.MeterProvider | None = None


class _SpanPosition(NamedTuple):
    """Where in the plan something happens.

    Args:
        span: The span of the stage, or what stages hang under.
        above: What stages hang under: a run or a step.
        step: The step, 0 before the first.
        stage: The stage, if one is under way.
        rolling: The stage beside this one that rollouts belong to; None: this one.
    """

    span: Span
    parent: Span
    step: int = 0
    stage: Stage | None = None
    rollout_place: _SpanPosition | None = None


_POSITION_KEY = context.create_key("reflact-place")


_CALL_KEY = context.create_key("reflact-call")


class Tracing:
    """The spans and metrics of one start of a run.

    Args:
        run_id: The run.
        telemetry: Where they go; None: where this process has set.
        hide: Frees content of keys; None: no content is taken down.
    """

    def __init__(
        self,
        run_id: str,
        telemetry: Telemetry | None = None,
        *,
        hide: Callable[[str], str] | None = None,
    ) -> None:
        given = telemetry or Telemetry()
        self._run_id = run_id
        self._hide = hide
        self._tracer = trace.get_tracer("reflact", tracer_provider=given.tracer_provider)
        meter = metrics.get_meter("reflact", meter_provider=given.meter_provider)
        self._durations = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="GenAI operation duration.",
            explicit_bucket_boundaries_advisory=SECOND_BOUNDS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=TOKEN_BOUNDS,
        )
        self._steps = meter.create_counter(
            "reflact.training.step", unit="{step}", description="Committed steps."
        )
        self._decisions = meter.create_counter(
            "reflact.decisions",
            unit="{decision}",
            description="Decisions on candidates, by what came of them.",
        )
        self._spend = meter.create_counter(
            "reflact.spend", unit="{USD}", description="What model calls have cost, where prices are known."
        )

    # ---------------------------------------------------------------------------------------- the plan

    @contextmanager
    def run(self, name: str = "reflact.run") -> Iterator[None]:
        """The span of a start of the run, under a name."""
        with self._span(name, {}) as span, _attach_value(_POSITION_KEY, _SpanPosition(span, span)):
            yield

    @contextmanager
    def step(self, step: int, *, epoch: int) -> Iterator[None]:
        """The span of a step."""
        attributes: Attributes = {"reflact.step": step, "reflact.epoch": epoch}
        with (
            self._span("reflact.step", attributes) as span,
            _attach_value(_POSITION_KEY, _SpanPosition(span, span, step)),
        ):
            yield

    @contextmanager
    def stage(self, stage: Stage, *, step: int) -> Iterator[None]:
        """The span of a stage, beside other stages of the block in which it is opened.

        Analysts work while rollouts still run: rollouts then stay with their own stage.
        """
        here = _current_position()
        within = None if here is None else trace.set_span_in_context(here.parent)
        attributes: Attributes = {"reflact.step": step, "reflact.stage": stage}
        rolling = here if stage == "reflect" and here is not None and here.stage == "rollout" else None
        with self._span(f"reflact.stage {stage}", attributes, within=within) as span:
            place = _SpanPosition(span, span if here is None else here.parent, step, stage, rolling)
            with _attach_value(_POSITION_KEY, place):
                yield

    @contextmanager
    def rollout(self, item_id: str) -> Iterator[Span]:
        """The span of a rollout, under the stage that it belongs to."""
        here = _current_position()
        place = here if here is None or here.rollout_place is None else here.rollout_place
        within = None if place is None else trace.set_span_in_context(place.span)
        attributes = {"reflact.item.id": item_id, **_position_attributes(place)}
        with (
            self._span("reflact.rollout", attributes, within=within) as span,
            _attach_value(_POSITION_KEY, place),
        ):
            yield span

    # --------------------------------------------------------------------------------------- model calls

    @contextmanager
    def call(
        self, reply_type: type[ReplyModel], call_id: CallId, config: ModelConfig | None
    ) -> Iterator[ModelCallSpan]:
        """The span of a model call with all its attempts; one that a store answered is not measured."""
        shared = {**common_attributes(config), "reflact.role": call_id.role}
        attributes = {
            **shared,
            **request_attributes(config),
            "gen_ai.output.type": "text" if issubclass(reply_type, Text) else "json",
            "reflact.purpose": call_id.purpose,
            **_position_attributes(_current_position()),
        }
        name = "chat" if config is None else f"chat {config.model}"
        with self._span(name, attributes, kind=SpanKind.CLIENT) as span:
            call = ModelCallSpan(span, self._hide if span.is_recording() else None, seen=config is not None)
            try:
                with _attach_value(_CALL_KEY, call):
                    yield call
            except BaseException as error:
                call.record_failure(error)
                raise
            finally:
                seconds = call.finish()
                if not (call.from_store or call.cut_off):
                    ending = {} if call.error is None else {"error.type": call.error}
                    self._durations.record(seconds, {**shared, **ending})

    def count_usage(self, usage: Usage, *, role: str, purpose: str, config: ModelConfig | None) -> None:
        """Count what an answer consumed that came from elsewhere than a store."""
        call = context.get_value(_CALL_KEY)
        if isinstance(call, ModelCallSpan):
            call.usage += usage
        shared = {**common_attributes(config), "reflact.role": role}
        if usage.calls > usage.uncounted:
            self._tokens.record(usage.input_tokens, {**shared, "gen_ai.token.type": "input"})
            self._tokens.record(usage.output_tokens, {**shared, "gen_ai.token.type": "output"})
        if usage.usd is not None:
            self._spend.add(usage.usd, {**shared, "reflact.purpose": purpose})

    # -------------------------------------------------------------------------------------- what happens

    def count_events(self, on_event: EventCallback) -> EventCallback:
        """Return an emitter that counts steps and decisions on the way."""

        async def tell(event: Event) -> None:
            self._count_event(event)
            await on_event(event)

        return tell

    def record_outcome(self, summary: RunSummary) -> None:
        """Note on the run's span how it ended."""
        span = trace.get_current_span()
        span.set_attributes({"reflact.status": summary.status, "reflact.training.step": summary.steps})
        if summary.status == "failed":
            self._mark_failed(span, "failed", summary.reason or "")

    def _count_event(self, event: Event) -> None:
        match event:
            case StepCommitted():
                self._steps.add(1)
                here = _current_position()
                if here is not None and here.step == event.step:
                    here.parent.set_attribute("reflact.action", event.action)
            case CandidateJudged() | PromotionJudged():
                part = "step" if isinstance(event, CandidateJudged) else "promotion"
                self._count_decision(event.verdict, part)
            case EpochCommitted() if event.slow_update is not None and event.slow_update.verdict is not None:
                self._count_decision(event.slow_update.verdict, "slow_update")

    def _count_decision(self, verdict: Verdict, part: str) -> None:
        self._decisions.add(1, {"reflact.action": verdict.action, "reflact.part": part})

    @contextmanager
    def _span(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        within: context.Context | None = None,
    ) -> Iterator[Span]:
        """Open a span, by default under the current one, and make it the current one."""
        told = {"reflact.run.id": self._run_id, **attributes}
        span = self._tracer.start_span(name, context=within, kind=kind, attributes=told)
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield span
        except Exception as error:
            self._mark_failed(span, type(error).__name__, str(error))
            raise
        except BaseException:
            span.set_attribute("reflact.cancelled", True)
            raise
        finally:
            context.detach(token)
            span.end()

    def _mark_failed(self, span: Span, kind: str, words: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR, None if self._hide is None else self._hide(words))


def _current_position() -> _SpanPosition | None:
    place = context.get_value(_POSITION_KEY)
    return place if isinstance(place, _SpanPosition) else None


@contextmanager
def _attach_value(key: str, value: object) -> Iterator[None]:
    token = context.attach(context.set_value(key, value))
    try:
        yield
    finally:
        context.detach(token)


def _position_attributes(place: _SpanPosition | None) -> Attributes:
    if place is None:
        return {}
    stage: Attributes = {} if place.stage is None else {"reflact.stage": place.stage}
    return {"reflact.step": place.step, **stage}


class TracedLLM(LLMMiddleware):
    """A model whose calls are spans.

    Args:
        inner: The model.
        tracing: Where spans go.
        config: Its settings, if a ``TracedResponseStore`` counts what it consumes. None: the model was passed
            in by the caller, and the usage in its replies is counted.
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
        """Ask the model in a span."""
        with self._tracing.call(reply_type, call_id, self._config) as call:
            call.record_prompt(prompt)
            reply = await self.inner.ask(prompt, reply_type, call_id=call_id, check=check)
            if self._config is None:
                self._tracing.count_usage(
                    reply.usage, role=call_id.role, purpose=call_id.purpose, config=None
                )
            call.record_reply(reply)
        return reply


class TracedEnvironment(EnvironmentMiddleware):
    """An environment whose rollouts are spans.

    Args:
        inner: The environment.
        tracing: Where spans go.
    """

    def __init__(self, inner: Environment, tracing: Tracing) -> None:
        super().__init__(inner)
        self._tracing = tracing

    async def run(self, item: Item, session: Session, *, seed: int) -> Grade:
        """Run an item in a span that carries its score."""
        with self._tracing.rollout(item.id) as span:
            graded = await self.inner.run(item, session, seed=seed)
            span.set_attribute("reflact.score.hard", graded.score.hard)
            span.set_attribute("reflact.score.soft", graded.score.soft)
        return graded


class TracedResponseStore:
    """Implements ``ports.EffectStore`` by another one; what is paid for a role's model is counted once.

    Args:
        inner: The other one.
        tracing: Where metrics go.
        config: The role's settings.
    """

    def __init__(self, inner: ResponseStore, tracing: Tracing, config: ModelConfig) -> None:
        self._inner = inner
        self._tracing = tracing
        self._config = config

    async def find_response(self, key: str) -> StoredResponse | None:
        """Return what was stored under a key, or None."""
        return await self._inner.find_response(key)

    async def reserve(self, reservation: CallReservation) -> None:
        """Book a call before it is sent."""
        await self._inner.reserve(reservation)

    async def store_response(self, response: StoredResponse, reservation: CallReservation) -> None:
        """Store an answer and count what it consumed."""
        await self._inner.store_response(response, reservation)
        self._tracing.count_usage(
            response.usage, role=reservation.role, purpose=reservation.purpose, config=self._config
        )

    async def settle(self, reservation: CallReservation, usage: Usage) -> None:
        """Settle an intent that has no answer to be stored."""
        await self._inner.settle(reservation, usage)

    async def release(self, reservation: CallReservation) -> None:
        """Close an intent whose call has given nothing that is charged."""
        await self._inner.release(reservation)

    async def count_fault(self, run_id: str, kind: FaultKind) -> None:
        """Count a failed attempt of a run's call."""
        await self._inner.count_fault(run_id, kind)
