"""A gateway or a router before the engine: what a real nginx refuses, the harness is told as the engine's own refusal; a router hears of
sessions what the operator wants it to."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from openai import InternalServerError

from tests.support.engine.routers import Nginx
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.faulty_wire import FaultyWire
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, streamed_text

ASKED = [{"role": "user", "content": "hello"}]
REFUSING = """
default_type application/json; keepalive_timeout 0;
server {
  listen 127.0.0.1:PORT;
  location = /health { return 200; }
  location = /v1/models { return 200 '{"data": [{"id": "policy", "max_model_len": 8192}]}'; }
  location = /weight_info { return 404; }
  location = /v1/chat/completions/render { if ($content_length = 2) { return 400; } return 200 '{"token_ids": [1, 2, 3]}'; }
  # A service that looks for routes posts two bytes.
  location / { if ($content_length = 2) { return 400; } return 429 'no more today'; }
}
"""
"""A gateway that answers every call at its head, and closes the connection."""


@pytest.mark.case(68)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["token", "chat"])
def test_what_a_gateway_refuses_at_a_requests_head_is_refused_with_503(
    tmp_path: Path, redis_server: RedisServer, api: str, stream: bool
) -> None:
    """The end of a request waits for the store; where nginx had refused and closed meanwhile, it was written to a closed connection,
    and the call was answered 500."""
    redis_server.flushall()
    with (
        Nginx(tmp_path, REFUSING) as gateway,
        FaultyWire(redis_server.port) as wire,
        RunningService(gateway.url, wire.redis_url, engine_api=api) as service,
    ):
        session = service.session()
        wire.latency(0.05)
        for _ in range(3):
            with pytest.raises(InternalServerError) as refused:
                session.ask("hello", stream=stream)
            assert (refused.value.status_code, refused.value.code) == (503, "engine_unavailable")
            assert "too busy (HTTP 429): no more today" in refused.value.message
            assert "retry-after" in refused.value.response.headers
        assert session.calls == []


@pytest.mark.parametrize("api", ["token", "chat"])
@pytest.mark.parametrize("header", ["", "X-Session-ID"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_router_is_told_the_session_where_the_operator_wants_it(
    redis_server: RedisServer, api: str, header: str, stream: bool
) -> None:
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, engine_api=api, engine_router={"session_header": header}) as service,
    ):
        session = service.session()
        answer = session.ask("hi", stream=stream)
        if stream:
            streamed_text(answer)
        # Probes have no session: a body of their own and empty.
        told = {asked.path: asked.headers.get("x-session-id") for asked in engine.received if asked.body}
    steps = {"/v1/chat/completions"}
    if api == "token":
        steps = {"/v1/chat/completions/render", "/inference/v1/generate", "/v1/chat/completions/derender"}
    assert {path: told[path] for path in steps} == dict.fromkeys(steps, session.session_id if header else None)


@pytest.mark.parametrize("api", ["token", "chat"])
def test_every_request_that_is_made_for_a_session_carries_it(redis_server: RedisServer, api: str) -> None:
    """Also the one that ends a call, sent for whoever closes the session: it went to any engine behind the router, which knew no such call,
    and the call was hung up on. And those that count tokens and read a prompt of text."""
    redis_server.flushall()
    settings: dict[str, Any] = {"engine_api": api, "engine_router": {"session_header": "X-Session-ID"}}
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, **settings) as service,
        ThreadPoolExecutor() as harness,
    ):
        session = service.session()
        session.ask("hello")
        engine.reset().say(Say("a b c d", gate=threading.Event(), gate_after=2))
        session.client.post("/messages/count_tokens", body={"model": "policy", "messages": ASKED}, cast_to=object)
        cut = harness.submit(session.ask, "go on")
        engine.wait_for(lambda: len(engine.generations) == 1)
        session.close()
        cut.result()
        other = service.session()
        other.client.completions.create(model="policy", prompt="once upon", max_tokens=2)
        told = {(asked.path, asked.headers.get("x-session-id")) for asked in engine.received if asked.body}
    first, second = session.session_id, other.session_id
    assert {header for _, header in told} == {first, second}
    assert ("/abort_requests", first) in told
    assert {path for path, header in told if header == second} & {"/v1/completions", "/v1/completions/render"}


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("path", ["", "/finish_session"])
def test_a_router_is_told_that_a_session_is_over_where_the_operator_wants_it(
    redis_server: RedisServer, path: str, status: int
) -> None:
    """Closed and deleted alike, and once if it is first closed and then deleted. A router that knows no such route changes nothing."""
    with (
        Router(status) as router,
        RunningService(
            router.url,
            redis_server.url,
            engine_api="chat",
            engine_router={"session_header": "X-Session-ID", "release_path": path},
        ) as service,
    ):
        service.await_ready()
        closed, deleted, both = service.session(), service.session(), service.session()
        closed.close("cancelled")
        both.close("cancelled")
        for session in (deleted, both):
            assert service.request("DELETE", f"/sessions/{session.session_id}").status_code == 204
    # The service ends only when it has told.
    sessions = {session.session_id for session in (closed, deleted, both)} if path else set()
    assert sorted(router.released) == sorted((session, session) for session in sessions)


class Router:
    """A router in front of an engine that samples nothing; `released` are the ids in the query and the header of `POST /finish_session`."""

    def __init__(self, status: int) -> None:
        self.released: list[tuple[str, str]] = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200 if self.path == "/v1/models" else 404, {"data": [{"id": "policy"}]})

            def do_POST(self) -> None:
                url = urlsplit(self.path)
                if url.path == "/finish_session":
                    router.released.append((parse_qs(url.query)["session_id"][0], self.headers["X-Session-ID"]))
                self._answer(status, {})

            def _answer(self, status: int, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Router:
        threading.Thread(target=self._server.serve_forever).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
