"""Providers of OpenTelemetry that keep what they are given, and questions to what they kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reflact.integrations.opentelemetry import Telemetry


class Watch:
    """Keeps all spans and metrics of whoever is given its ``telemetry``."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(self.tracers, MeterProvider([self._reader]))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """The spans that have ended, in the order in which they did."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans whose name begins so."""
        return [span for span in self.spans if span.name.startswith(name)]

    @property
    def calls(self) -> list[ReadableSpan]:
        """The spans of model calls."""
        return self.named("chat")

    @property
    def traces(self) -> set[int]:
        """The traces that spans belong to."""
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
        """Return how many spans there are of each path."""
        return Counter(self.path(span) for span in self.spans)

    def total(self, attribute: str) -> int:
        """Return the sum of an attribute over the spans of model calls."""
        values = [told(span).get(attribute, 0) for span in self.calls]
        return sum(value for value in values if isinstance(value, int))

    def metric(self, name: str, *by: str) -> dict[tuple[object, ...], float]:
        """Return a metric's sums by the values of some attributes; none where nothing was measured."""
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
        """Return everything that spans and metrics say, as one text."""
        return "\n".join([*(span.to_json() for span in self.spans), str(self._reader.get_metrics_data())])


def told(span: ReadableSpan) -> Mapping[str, object]:
    """Return a span's attributes."""
    return span.attributes or {}
