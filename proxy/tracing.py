"""OpenTelemetry traces: a span of each call, a child of the harness's own where it sends a traceparent, and one of each step in it.

    call
    ├── admit      path, key and session, and the body as it comes in
    ├── parse      the body becomes a canonical request
    ├── queue      a replica that serves and has room is found
    ├── plan       the parent is found, the prompt's ids are made and proven
    ├── intent     what is about to be sampled is written down
    ├── sample     the engine samples; event first_token
    ├── commit     the records are stored
    └── reply      the rest of the answer goes out

A call that another replica is tried for has the middle steps once more. What the engine is asked carries the step's context, so
the engine's own spans are children of it. Made by the official SDK, which is loaded only where traces are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Self

from proxy.call_notes import NOTES
from proxy.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

EXPORT_SECONDS = 5.0
"""How long a batch may take to be sent, tried again or not, and so the last one of a service that stops."""


class Tracing:
    """`exporter` is given the spans that ended, in batches, from a thread of its own."""

    def __init__(self, exporter: SpanExporter, ratio: float) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word.
        resource = Resource.create({SERVICE_NAME: "verbatim"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(ParentBasedTraceIdRatio(ratio), resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("verbatim")

    @classmethod
    def to(cls, settings: Settings) -> Self | None:
        """To the collector of the settings; None where they name none."""
        if settings.trace_endpoint is None:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(settings.trace_endpoint, timeout=EXPORT_SECONDS), settings.trace_ratio)

    def begin(self, headers: Mapping[str, str]) -> Spans:
        return Spans(self._tracer, headers)

    def close(self) -> None:
        """Send what is left. Blocks."""
        self._provider.shutdown()


class Spans:
    """Those of one call; a `CallTrace`. Given as parents by name: what is current would follow a task, and not the call."""

    def __init__(self, tracer: Tracer, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind, format_trace_id, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._context = set_span_in_context
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = tracer
        self._call = tracer.start_span("call", self._propagator.extract(headers), SpanKind.SERVER)
        self._step: Span = self._call
        self.trace_id = format_trace_id(self._call.get_span_context().trace_id)

    def step(self, name: str, attributes: Mapping[str, str] | None = None) -> None:
        self._end_step()
        self._step = self._tracer.start_span(name, self._context(self._call), attributes=attributes)

    def event(self, name: str) -> None:
        self._step.add_event(name)

    def carry(self, headers: MutableMapping[str, str]) -> None:
        self._propagator.inject(headers, self._context(self._step))

    def end(self, attributes: Mapping[str, str | int | float | list[str]], error: str) -> None:
        from opentelemetry.trace import StatusCode

        self._end_step()
        self._call.set_attributes(attributes)
        if error:
            self._call.set_status(StatusCode.ERROR, error)
        self._call.end()

    def _end_step(self) -> None:
        if self._step is not self._call:
            self._step.end()


def carried() -> Mapping[str, str]:
    """The headers that let what an engine does for a call be a part of the call's step."""
    notes, headers = NOTES.get(), dict[str, str]()
    if notes is not None and notes.trace is not None:
        notes.trace.carry(headers)
    return headers
