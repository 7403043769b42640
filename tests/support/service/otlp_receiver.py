"""A collector of traces on loopback: what is sent to it by OTLP over HTTP, as spans."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """Ids in hexadecimal; `parent_id` "" for the first of a trace."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started: int
    ended: int
    failed: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]
    service: str


class OtlpReceiver:
    """Used in a `with` block; spans come when whoever sends them says so or stops."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.raw = b""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver._take(body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, body: bytes) -> None:
        self.raw += body
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(of_resource.resource.attributes)["service.name"]
            for scope in of_resource.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]


def _span(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _values(span.attributes),
        tuple(event.name for event in span.events),
        service,
    )


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found
