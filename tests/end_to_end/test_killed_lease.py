"""A service that is killed while a lease is on its way to the trainer: the lease ends, and the next one brings the same rows, whole."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import httpx

from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.verbatim_process import TRAINER, Serving

SESSIONS, TOKENS = 4, 120_000
"""As JSON more than the buffers of a connection hold."""
LEASE_SECONDS = 1.0
HEADERS = {"Authorization": f"Bearer {TRAINER}", "Accept": "application/json"}
ASKED = {"max_groups": 1, "lease_seconds": LEASE_SECONDS, "wait_seconds": 60}


def fill_group(service: Serving) -> list[str]:
    ids = []
    for _ in range(SESSIONS):
        opened = service.request("POST", "/sessions", json={"group_id": "g", "group_size": SESSIONS}).json()
        body = {"model": "policy", "messages": [{"role": "user", "content": "word " * TOKENS}]}
        key = {"Authorization": f"Bearer {opened['api_key']}"}
        answer = httpx.post(service.url + "/v1/chat/completions", json=body, headers=key, timeout=300)
        assert answer.status_code == 200, answer.text
        path = f"/sessions/{opened['session_id']}/close"
        assert service.request("POST", path, json={"status": "completed", "reward": 1.0}).status_code == 200
        ids.append(opened["session_id"])
    return ids


def begin_lease(service: Serving) -> socket.socket:
    """A connection on which the lease has begun to come: the rest waits for whoever reads it."""
    url = httpx.URL(service.control_url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((url.host, url.port))
    body = b'{"max_groups": 1, "lease_seconds": %d, "wait_seconds": 60}' % LEASE_SECONDS
    lines = ["POST /batches/lease HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    assert connection.recv(1024).startswith(b"HTTP/1.1 200 ")
    return connection


def read_rest(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(2**20):
            received += piece
    except ConnectionResetError:
        pass
    return received


def test_a_lease_that_a_kill_cuts_off_is_delivered_again_whole(redis_server: RedisServer, tmp_path: Path) -> None:
    redis_server.flushall()
    with ScriptedEngine("qwen3", max_model_len=10 * TOKENS) as engine:
        engine.script = lambda generation, index: Say("hello world")
        flags = ("--engine", engine.url, "--engine-api", "token", "--redis", redis_server.url, "--log-level", "warning")
        with Serving(*flags, data_dir=tmp_path / "one") as service:
            sessions = fill_group(service)
            with begin_lease(service) as connection:
                os.kill(service.pid, signal.SIGKILL)
                assert not read_rest(connection).endswith(b"0\r\n\r\n")
        with Serving(*flags, data_dir=tmp_path / "two") as service:
            answer = service.request("POST", "/batches/lease", TRAINER, json=ASKED, timeout=300)
    (group,) = answer.json()["groups"]
    rows, told = group["trajectories"], group["sessions"]
    assert [row["session_id"] for row in rows] == sessions
    assert all(TOKENS < len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"]) for row in rows)
    assert all(sum(row["loss_mask"]) == accounting["exported_tokens"] > 0 for row, accounting in zip(rows, told, strict=True))
