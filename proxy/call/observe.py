"""What is told of every call at its end, where the settings ask for it: a line in the log, a trace, or both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Self

from proxy.errors import VerbatimError
from proxy.settings import Settings, find_collector
from proxy.timeline import CallTrace
from reconstruct.extras import how_to_install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from proxy.call.writer import HarnessRequest


class Observer:
    def __init__(self, tracing: Tracing | None, *, logs: bool) -> None:
        self._tracing = tracing
        self._logs = logs

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """None where the settings ask for neither."""
        tracing = Tracing.to_collector()
        return cls(tracing, logs=settings.log_calls) if tracing is not None or settings.log_calls else None

    def begin_trace(self, headers: Mapping[str, str]) -> CallTrace | None:
        """None: calls are not traced."""
        return None if self._tracing is None else self._tracing.begin(headers)

    def end(self, exchange: HarnessRequest) -> None:
        """The request is answered, or will not be."""
        if exchange.call is None and exchange.error is None and (exchange.client.status or 500) < 500:
            # A list of models, a count of tokens: no call, and nothing went wrong.
            return
        if exchange.timeline.trace is not None:
            exchange.timeline.trace.end(attributes_of(exchange), _code(exchange))
        if self._logs:
            log_call(exchange)
        # Tasks that the call started and that outlive it hold its timeline.
        exchange.timeline.trace = None

    async def close(self) -> None:
        """Send the traces that are left."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def _outcome(exchange: HarnessRequest) -> str:
    """finished, aborted (cut by the harness, a close or a stop), failed, or refused: it never became a call."""
    if exchange.call is None:
        return "refused"
    if exchange.call.scope.cancelled:
        return "aborted"
    return "finished" if exchange.reply is not None else "failed"


def _code(exchange: HarnessRequest) -> str:
    """The error's code, "" where there was none."""
    if exchange.error is not None:
        return exchange.error.code
    return "" if exchange.reply is not None or (exchange.client.status or 500) < 500 else VerbatimError.code


# One log line per call: who called, the outcome, the times. Never content.
#
# Every field is bounded, including those a harness chooses. A formatter finds the fields in the record's `fields`; the message has the
# most important ones.


log = logging.getLogger(__name__)

_LONGEST = 200
"""Characters of a text that a caller chose."""
_REQUEST_IDS = ("x-request-id", "x-client-request-id", "request-id")
"""Headers in which clients and what stands between them and the service name a request."""

Field = str | int | float | bool | None


def log_call(exchange: HarnessRequest) -> None:
    """At level info; a call that failed by no fault of its harness at warning."""
    fields = fields_of(exchange)
    failed = _outcome(exchange) != "aborted" and (exchange.client.status or 0) >= 500
    log.log(
        logging.WARNING if failed else logging.INFO, "call %s", _line(fields), extra={"fields": {"event": "call", **fields}}
    )


def fields_of(exchange: HarnessRequest) -> dict[str, Field]:
    """What is known of the call; None where it did not come so far."""
    call, reply, timeline, headers = exchange.call, exchange.reply, exchange.timeline, exchange.headers
    now, first_token_at = time.perf_counter(), timeline.first_token_at
    return {
        "outcome": _outcome(exchange),
        "code": _code(exchange) or None,
        "http_status": exchange.client.status,
        "session_id": call.session_id if call else None,
        "call_id": call.call_id if call else None,
        "request_id": next((_cut(headers[name]) for name in _REQUEST_IDS if name in headers), None),
        "trace_id": timeline.trace.trace_id if timeline.trace else None,
        "dialect": exchange.dialect.name,
        "model": _cut(call.request.model) if call else None,
        "stream": call.request.stream if call else None,
        "api": timeline.api or None,
        "replica": timeline.replica or None,
        "finish_reason": _cut(reply.choices[0].finish_reason) if reply and reply.choices else None,
        "choices": call.request.n if call else None,
        "prompt_tokens": reply.prompt_tokens if reply else None,
        "sampled_tokens": reply.completion_tokens if reply else None,
        "seconds": round(now - timeline.started_at, 4),
        "first_token_seconds": round(first_token_at - timeline.started_at, 4) if first_token_at is not None else None,
        "engine_seconds": round(timeline.engine_seconds, 4) if call else None,
    }


def attributes_of(exchange: HarnessRequest) -> dict[str, str | int | float | list[str]]:
    """The same for a trace, by OpenTelemetry's names where it has some (semantic conventions for generative AI and HTTP)."""
    fields = fields_of(exchange)
    named = {f"verbatim.{name}": fields[name] for name in _OUR_OWN} | {theirs: fields[ours] for theirs, ours in _THEIRS.items()}
    found: dict[str, str | int | float | list[str]] = {name: value for name, value in named.items() if value is not None}
    if exchange.call is not None:
        info = exchange.call.session.info
        kept = {
            "verbatim.group_id": info.group_id,
            "verbatim.task_id": info.task_id,
            "verbatim.role": exchange.call.purpose.role,
        }
        found |= {name: value for name, value in kept.items() if value}
        found["gen_ai.operation.name"] = exchange.dialect.operation
    if exchange.reply is not None:
        found["gen_ai.response.finish_reasons"] = [_cut(choice.finish_reason) for choice in exchange.reply.choices]
    return found


_OUR_OWN = ("outcome", "session_id", "call_id", "request_id", "dialect", "stream", "api", "replica", "engine_seconds")
_THEIRS: Mapping[str, str] = {
    "gen_ai.request.model": "model",
    "gen_ai.request.choice.count": "choices",
    "gen_ai.response.id": "call_id",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "sampled_tokens",
    "http.response.status_code": "http_status",
    "error.type": "code",
}


def _line(fields: Mapping[str, Field]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def _cut(text: str) -> str:
    """Its beginning, on one line and without blanks, so that one field cannot pass for two."""
    shown = "".join(letter if letter.isprintable() and not letter.isspace() else "_" for letter in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}..."


# OpenTelemetry: a span per call, a child of the harness's own if it sends a traceparent, and a span per step:
#
#     call
#     ├── admit      path, key and session, reading the body
#     ├── parse      body to canonical request
#     ├── queue      finding a replica that serves and has room
#     ├── intent     finding the parent, recording what is about to be sampled
#     ├── plan       making and proving the prompt's ids
#     ├── sample     sampling; event first_token
#     ├── commit     storing the records
#     └── reply      sending the rest of the answer
#
# A call that moves to another replica has the middle steps twice. Requests to the engine carry the step's context, so the engine's spans
# are its children. The official SDK is loaded only if traces are configured.


EXPORT_SECONDS = 5.0
"""How long a batch may take to be sent, tried again or not, and so the last one of a service that stops."""


class Tracing:
    """`exporter` is given the spans that ended, in batches, from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word, OTEL_TRACES_SAMPLER says what is sampled.
        resource = Resource.create({SERVICE_NAME: "verbatim"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("verbatim")

    @classmethod
    def to_collector(cls) -> Self | None:
        """To the collector that OpenTelemetry's variables name; None where they name none. A variable that is set for all programs of a
        machine is no reason not to start: without the SDK there are no traces, and one line says so."""
        if (variable := find_collector()) is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ModuleNotFoundError:
            log.warning("%s is set, but no traces are sent: %s", variable, how_to_install("otel"))
            return None
        return cls(OTLPSpanExporter(timeout=EXPORT_SECONDS))

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
