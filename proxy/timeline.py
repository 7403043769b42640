"""Timeline: where the time of a call goes. Metrics, the log's line per call and its trace are all read from it.

Each step has the service's own time, and the time it waits for somebody else.

| step | what happens | waits for |
|---|---|---|
| admit | path, key and session are checked, the body arrives | store (a session that is not in memory), harness |
| parse | the body becomes a canonical request | |
| queue | a replica that serves and has room is found | engine |
| intent | the parent is found, and what is about to be sampled recorded | store |
| plan | the prompt's ids are made and proven (token path) | engine (renderings) |
| sample | the engine samples, and the reply is put together | engine |
| interpret | the engine's parsers read the sampled ids (token path) | engine |
| commit | the records are made and stored | store |
| reply | the answer is rendered and sent | harness |

Everything between two marks belongs to one step and one part, so all parts together are the time from the first look at the request
to the answer that went out. Waiting is measured at the wire; what a client library does there counts as waiting, and so does whatever
else the event loop does meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from itertools import compress
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from proxy.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer


STEPS = ("admit", "parse", "queue", "intent", "plan", "sample", "interpret", "commit", "reply")
ADMIT, PARSE, QUEUE, INTENT, PLAN, SAMPLE, INTERPRET, COMMIT, REPLY = range(len(STEPS))

PARTS = ("own", "engine", "store", "harness")
OWN, ENGINE, STORE, HARNESS = range(len(PARTS))

_CELLS = range(len(STEPS) * len(PARTS))
_AT_REPLICA = (INTENT, PLAN, SAMPLE)


class CallTrace(Protocol):
    """The spans of one call. A step lasts until the next one begins, or the call ends."""

    trace_id: str

    def step(self, name: str, attributes: Mapping[str, str] | None = None) -> None: ...

    def event(self, name: str) -> None: ...

    def carry(self, headers: MutableMapping[str, str]) -> None:
        """Add what lets another service's spans be children of the step."""
        ...

    def end(self, attributes: Mapping[str, str | int | float | list[str]], error: str) -> None:
        """`error`: its code, "" where there was none."""
        ...


class Timeline:
    """One call's time so far, by step and part, in seconds. It starts in `admit`."""

    __slots__ = ("_at", "_first", "_traced", "api", "first_token_at", "replica", "seconds", "started_at", "trace")

    def __init__(self, trace: CallTrace | None = None) -> None:
        self.seconds = [0.0] * len(_CELLS)
        self.trace = trace
        """None: not traced, or the call is over, though tasks that it started may still hold its timeline."""
        self.first_token_at: float | None = None
        self.replica = self.api = ""
        """Where the call is sampled, or was last tried."""
        self.started_at = self._at = time.perf_counter()
        self._first = ADMIT * len(PARTS)
        self._traced = ADMIT
        if trace is not None:
            trace.step(STEPS[ADMIT])

    def begin(self, step: int) -> None:
        """The current step is over and this one begins."""
        self.wait()
        self._first = step * len(PARTS)
        # In a trace, interpreting is part of sampling.
        if self.trace is not None and step not in (self._traced, INTERPRET):
            self._traced = step
            self.trace.step(STEPS[step], {"verbatim.replica": self.replica} if step in _AT_REPLICA else None)

    def wait(self) -> None:
        """From here on somebody else is waited for."""
        now = time.perf_counter()
        self.seconds[self._first] += now - self._at
        self._at = now

    def waited(self, part: int) -> None:
        """The wait for `part` is over."""
        now = time.perf_counter()
        self.seconds[self._first + part] += now - self._at
        self._at = now

    def mark_first_token(self) -> None:
        """The engine sampled the first token."""
        self.first_token_at = time.perf_counter()
        if self.trace is not None:
            self.trace.event("first_token")

    def taken(self) -> Iterator[tuple[int, float]]:
        """(index in `seconds`, seconds) of every cell that took any."""
        return zip(compress(_CELLS, self.seconds), filter(None, self.seconds), strict=True)

    @property
    def step(self) -> int:
        return self._first // len(PARTS)

    @property
    def engine_seconds(self) -> float:
        """How long the call waited for its engine to render, sample and interpret."""
        return sum(self.seconds[step * len(PARTS) + ENGINE] for step in (PLAN, SAMPLE, INTERPRET))


TIMELINE: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
"""The timeline of the call that the running task works for, so that the wire need not be told."""


class Waiting:
    """`with Waiting(STORE):` around an await; counts for the running task's call, where it works for one."""

    __slots__ = ("_part", "_timeline")

    def __init__(self, part: int) -> None:
        self._timeline = TIMELINE.get()
        self._part = part

    def __enter__(self) -> None:
        if self._timeline is not None:
            self._timeline.wait()

    def __exit__(self, *_: object) -> None:
        if self._timeline is not None:
            self._timeline.waited(self._part)


class Within:
    """`with Within(INTERPRET):` around what is a step of its own in the middle of another one."""

    __slots__ = ("_before", "_step", "_timeline")

    def __init__(self, step: int) -> None:
        self._timeline = TIMELINE.get()
        self._step = step
        self._before = step

    def __enter__(self) -> None:
        if self._timeline is not None:
            self._before = self._timeline.step
            self._timeline.begin(self._step)

    def __exit__(self, *_: object) -> None:
        if self._timeline is not None:
            self._timeline.begin(self._before)


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
    timeline, headers = TIMELINE.get(), dict[str, str]()
    if timeline is not None and timeline.trace is not None:
        timeline.trace.carry(headers)
    return headers


# Deadline: `async with Deadline(seconds):` works as `asyncio.timeout` at a third of its instructions; every call runs under several.
#
# After that time the task is cancelled where it waits, and the block raises TimeoutError. A cancellation from elsewhere stays one.


class Deadline:
    """`seconds` 0 or None: never."""

    __slots__ = ("_cancelling", "_over", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if self._seconds:
            task = asyncio.current_task()
            if task is None:
                raise RuntimeError("only a task can have a deadline")
            self._task, self._cancelling = task, task.cancelling()
            self._timer = task.get_loop().call_later(self._seconds, self._end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            if self._over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _end(self) -> None:
        self._over = True
        self._task.cancel()
