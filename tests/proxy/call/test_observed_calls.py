"""A call's trace and its line in the log: what they hold, what they never hold, and that they cost nothing where nobody asks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cli.serving.logs import JsonLine, OneLine
from proxy import timeline
from proxy.call.observe import Tracing
from proxy.settings import find_collector
from tests.support.engine.scripted_engine import Fail, Hang, Say, ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, hanging_up, wait_until
from tests.support.service.verbatim_process import Serving

SECRET = "xyzzy-the-prompt"
HARNESS_TRACE, HARNESS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STEPS = ["admit", "parse", "queue", "intent", "plan", "sample", "commit", "reply"]


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as scripted:
        yield scripted


@contextmanager
def traced(
    receiver: OtlpReceiver, engine: ScriptedEngine, redis_server: RedisServer, otel: Mapping[str, str] = {}, **settings: Any
) -> Iterator[RunningService]:
    """Its last spans are sent when it stops."""
    redis_server.flushall()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.endpoint, **otel}.items():
            patch.setenv(name, value)
        with RunningService(engine.url, redis_server.url, **{"engine_api": "token", **settings}) as service:
            yield service


def tree_of(spans: list[ReceivedSpan]) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
    """The call's span and its steps, in the order in which they began."""
    (call,) = [span for span in spans if span.name == "call"]
    steps = sorted((span for span in spans if span is not call), key=lambda span: span.started)
    assert {(step.trace_id, step.parent_id) for step in steps} == {(call.trace_id, call.span_id)}
    return call, steps


def test_a_call_is_a_child_of_the_harness_span_and_its_steps_follow_each_other(
    engine: ScriptedEngine, redis_server: RedisServer
) -> None:
    with OtlpReceiver() as receiver:
        with traced(receiver, engine, redis_server) as service:
            session = service.session(group_id="g")
            parent = {"traceparent": f"00-{HARNESS_TRACE}-{HARNESS_SPAN}-01"}
            list(session.ask(SECRET, stream=True, extra_headers=parent))
            (record,) = session.calls
        call, steps = tree_of(receiver.spans)
    assert (call.trace_id, call.parent_id, call.service) == (HARNESS_TRACE, HARNESS_SPAN, "verbatim")
    assert [step.name for step in steps] == STEPS
    bounds = [(step.started, step.ended) for step in steps]
    assert all(before[1] <= after[0] for before, after in pairwise(bounds))
    assert call.started <= bounds[0][0] and bounds[-1][1] <= call.ended
    assert [step.name for step in steps if "first_token" in step.events] == ["sample"]
    expected = {
        "verbatim.session_id": session.session_id,
        "verbatim.call_id": record["call_id"],
        "verbatim.group_id": "g",
        "verbatim.api": "token",
        "gen_ai.request.model": "policy",
        "gen_ai.usage.input_tokens": len(record["prompt_ids"]),
        "gen_ai.usage.output_tokens": len(record["completion_ids"]),
        "gen_ai.response.finish_reasons": [record["finish_reason"]],
        "http.response.status_code": 200,
    }
    assert expected.items() <= call.attributes.items() and not call.failed
    assert SECRET.encode() not in receiver.raw and session.api_key.encode() not in receiver.raw
    by_path = {asked.path: asked.headers.get("traceparent", "") for asked in engine.received if asked.method == "POST"}
    (sample,) = [step for step in steps if step.name == "sample"]
    assert by_path["/inference/v1/generate"] == f"00-{HARNESS_TRACE}-{sample.span_id}-01"


def test_a_refused_call_and_one_that_the_engine_fails_say_why(engine: ScriptedEngine, redis_server: RedisServer) -> None:
    with OtlpReceiver() as receiver:
        with traced(receiver, engine, redis_server) as service:
            session = service.session()
            body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
            wrong = {"authorization": "Bearer vb-wrong"}
            assert session.post("/v1/chat/completions", body, headers=wrong).status_code == 401
            engine.script = lambda generation, index: Fail(500, "broken")
            failed = session.post("/v1/chat/completions", body).status_code
            session.request("GET", "/v1/models")
        calls = sorted((span for span in receiver.spans if span.name == "call"), key=lambda span: span.started)
    told = [(call.failed, call.attributes["error.type"], call.attributes["http.response.status_code"]) for call in calls]
    assert told == [(True, "invalid_api_key", 401), (True, "engine_failed", failed)]


def test_a_harness_that_does_not_want_its_call_traced_is_heard(engine: ScriptedEngine, redis_server: RedisServer) -> None:
    with OtlpReceiver() as receiver:
        with traced(receiver, engine, redis_server) as service:
            service.session().ask("hello", extra_headers={"traceparent": f"00-{HARNESS_TRACE}-{HARNESS_SPAN}-00"})
        for otel in ({"OTEL_TRACES_SAMPLER": "always_off"}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}):
            with traced(receiver, engine, redis_server, otel) as service:
                service.session().ask("hello")
    assert receiver.spans == []


def lines_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "proxy.call.observe"]


def test_every_call_has_one_bounded_line_without_what_was_said(
    engine: ScriptedEngine, redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is refused, and one that the harness leaves; what it may choose is cut, and cannot begin another field."""
    # The engine hangs: there is nothing to wait for.
    monkeypatch.setattr(timeline, "ABORT_SECONDS", 0.1)
    redis_server.flushall()
    caplog.set_level(logging.INFO)
    with RunningService(engine.url, redis_server.url, engine_api="token", log_calls=True) as service:
        session = service.session()
        engine.say(SECRET, Say("an answer with plugh"))
        session.ask(SECRET, extra_headers={"x-request-id": "r 1 outcome=forged " + "x" * 5000})
        wait_until(lambda: len(lines_of(caplog)) == 1, 120, "the first call is logged")
        plain_http.post(
            f"{session.base_url}/chat/completions", content=b"{", headers={"Authorization": f"Bearer {session.api_key}"}
        )
        plain_http.get(f"{session.base_url}/models", headers={"Authorization": f"Bearer {session.api_key}"})
        engine.script = lambda generation, index: Hang()
        body = {"model": "policy", "messages": [{"role": "user", "content": SECRET}]}
        with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key):
            wait_until(lambda: len(engine.generations) == 2, 120, "the call is at the engine")
        wait_until(lambda: len(lines_of(caplog)) == 3, 120, "three calls are logged")
        first_call = session.calls[0]
    records = lines_of(caplog)
    fields = [record.fields for record in records]  # type: ignore[attr-defined]
    assert [(each["outcome"], each["code"]) for each in fields] == [
        ("finished", None),
        ("refused", "bad_request"),
        ("aborted", fields[2]["code"]),
    ]
    assert (fields[0]["call_id"], fields[0]["session_id"]) == (first_call["call_id"], session.session_id)
    assert (fields[0]["prompt_tokens"], fields[0]["sampled_tokens"]) == (
        len(first_call["prompt_ids"]),
        len(first_call["completion_ids"]),
    )
    assert fields[0]["request_id"].startswith("r_1_outcome=forged_") and len(fields[0]["request_id"]) < 300
    for record in records:
        for written in (JsonLine().format(record), OneLine("%(message)s").format(record)):
            assert len(written) < 2000 and "\n" not in written
            assert SECRET not in written and "plugh" not in written and session.api_key not in written
        assert json.loads(JsonLine().format(record))["event"] == "call"


@pytest.mark.parametrize(
    "mark", ["\u202e", "\u2066", "\u200b", "\u200f", "\ufeff", "\u061c", "\U000e0041", "\x1b", "\x9b", "\u2028"]
)
def test_no_mark_that_changes_what_is_seen_reaches_the_log_raw(mark: str) -> None:
    """U+202E turned the rest of a line round: what it said was not what was seen."""
    try:
        raise ValueError(f"in{mark}valid")
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord("n", logging.INFO, "p", 1, "got %s", (f"a{mark}b é 漢字",), raised)
    for written in (JsonLine().format(record), OneLine("%(message)s").format(record)):
        assert mark not in written
    line, *traceback = OneLine("%(message)s").format(record).split("\n")
    assert line == f"got a{mark.encode('unicode_escape').decode()}b é 漢字"
    assert len(traceback) > 2 and mark.encode("unicode_escape").decode() in traceback[-1]


def test_a_served_process_writes_json_and_each_call_where_it_is_told_to(engine: ScriptedEngine, tmp_path: Path) -> None:
    """With two workers: they are told, too."""
    flags = ["--engine", engine.url, "--workers", "2", "--log-calls"]
    with Serving(*flags, data_dir=tmp_path, VERBATIM_LOG_FORMAT="json") as service:
        created = service.request("POST", "/sessions", json={"session_id": "s"}).json()
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
        body = {"model": "policy", "messages": [{"role": "user", "content": SECRET}]}
        url, headers = f"{created['base_urls']['openai']}/chat/completions", {"Authorization": f"Bearer {created['api_key']}"}
        # Each worker finds the engine by itself.
        wait_until(lambda: plain_http.post(url, json=body, headers=headers).status_code == 200, 60, "an answer")
        wait_until(lambda: '"finished"' in service.stderr, 120, "the call is logged")
        written = [json.loads(line) for line in service.stderr.splitlines()]
    call = next(line for line in written if line.get("outcome") == "finished")
    assert (call["session_id"], call["level"], call["http_status"]) == ("s", "info", 200)
    assert {"time", "logger", "message"} <= call.keys()


def test_a_traceback_is_one_json_object_and_holds_no_key() -> None:
    key = "vb-" + "0" * 40
    try:
        raise ValueError(f"{key} " + "y" * 50_000)
    except ValueError:
        record = logging.LogRecord("proxy", logging.ERROR, __file__, 1, "broken by %s\n", (key,), sys.exc_info())
    written = JsonLine().format(record)
    assert "\n" not in written and key not in written and len(written) < 20_000
    assert json.loads(written)["exception"].endswith("y")


def test_nothing_of_it_is_loaded_or_run_where_nobody_asks(redis_server: RedisServer) -> None:
    program = f"""
import sys
from proxy.app import create_app
from proxy.settings import Settings
create_app(Settings(engine=[], redis={redis_server.url!r}))
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_collector_for_all_signals_does_too_and_without_the_sdk_the_service_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cluster may set it for every pod."""
    assert find_collector() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert find_collector() == "OTEL_EXPORTER_OTLP_ENDPOINT"
    tracing = Tracing.to_collector()
    assert tracing is not None
    tracing.close()
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert Tracing.to_collector() is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent" in caplog.text


# A collector of traces on loopback


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
