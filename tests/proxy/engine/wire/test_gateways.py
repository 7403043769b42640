"""A gateway before the engine: what a real nginx refuses, the harness is told as the engine's own refusal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import InternalServerError

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.machine import require
from tests.support.service.faulty_wire import FaultyWire
from tests.support.service.redis_server import RedisServer, free_port
from tests.support.service.running_service import RunningService, streamed_text, wait_until

CONFIGURATION = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit; {user}
events {{ }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi; default_type application/json; keepalive_timeout 0;
  server {{
    listen 127.0.0.1:{port};
    location = /health {{ return 200; }}
    location = /v1/models {{ return 200 '{{"data": [{{"id": "policy", "max_model_len": 8192}}]}}'; }}
    location = /weight_info {{ return 404; }}
    location = /v1/chat/completions/render {{ if ($content_length = 2) {{ return 400; }} return 200 '{{"token_ids": [1, 2, 3]}}'; }}
    # A service that looks for routes posts two bytes.
    location / {{ if ($content_length = 2) {{ return 400; }} return 429 'no more today'; }}
  }}
}}
"""


@contextmanager
def refusing_nginx(folder: Path) -> Iterator[str]:
    """The URL of a gateway that answers every call at its head, and closes the connection."""
    port = free_port()
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, port=port, user=user))
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([require("nginx"), "-e", "stderr", "-c", str(folder / "nginx.conf")])

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, 60, "nginx answers")
        yield url
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["token", "chat"])
def test_what_a_gateway_refuses_at_a_requests_head_is_refused_with_503(
    tmp_path: Path, redis_server: RedisServer, api: str, stream: bool
) -> None:
    """The end of a request waits for the store; where nginx had refused and closed meanwhile, it was written to a closed connection,
    and the call was answered 500."""
    redis_server.flushall()
    with (
        refusing_nginx(tmp_path) as url,
        FaultyWire(redis_server.port) as wire,
        RunningService(url, wire.redis_url, engine_api=api) as service,
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
        RunningService(engine.url, redis_server.url, engine_api=api, engine_session_header=header) as service,
    ):
        session = service.session()
        answer = session.ask("hi", stream=stream)
        if stream:
            streamed_text(answer)
        sampling = [asked for asked in engine.received if asked.path in ("/inference/v1/generate", "/v1/chat/completions")]
        told = {asked.headers.get("x-session-id") for asked in sampling if asked.body}
    assert session.session_id in told if header else told == {None}
