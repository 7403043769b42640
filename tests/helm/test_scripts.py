"""The scripts that the chart's pods run: against the real service, and against pages in vLLM's shape."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from contract.attempts import NodeState
from proxy.store.connection import StoreConnection
from proxy.store.tasks.work import WorkStore
from tests.support.documents.helm_chart import CHART, container, pod_of, the
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.rollout_service import serving_tasks
from tests.support.service.running_service import ADMIN, NODE, RunningService
from tests.support.service.verbatim_process import wait_until

FILES = CHART / "files"


def script(name: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(FILES / name), *args]
    return subprocess.run(
        command, env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_test_pod_opens_uses_and_deletes_a_session(redis_url: str) -> None:
    with ScriptedEngine() as engine, serving_tasks(redis_url, engine.url, engine_api="token") as service:
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
        # A Secret made from a file ends in a line end.
        token = f"# of the operator\n{ADMIN}\n"
        done = script("test_service.py", VERBATIM_URL=service.url, VERBATIM_HARNESS_URL=service.url, VERBATIM_ADMIN_TOKEN=token)
        assert done.returncode == 0, done.stderr
        assert "GET /readyz: 200" in done.stdout and "serves " in done.stdout
        assert service.request("GET", "/sessions").json()["sessions"] == []
        done = script(
            "test_service.py", VERBATIM_URL=service.url, VERBATIM_HARNESS_URL=service.url, VERBATIM_ADMIN_TOKEN="another"
        )
        assert done.returncode == 1 and "401" in done.stderr


def test_a_node_is_ready_once_the_service_has_heard_of_it(redis_url: str) -> None:
    def asked(service: RunningService) -> subprocess.CompletedProcess[str]:
        token = f"{NODE}\n"
        return script("node_ready.py", VERBATIM_URL=service.url, VERBATIM_NODE_TOKEN=token, VERBATIM_NODE_NAME="pod-1")

    async def beat(seen_at: float) -> None:
        connection = StoreConnection(redis_url)
        state = NodeState("pod-1", {}, ["kubernetes"], 4.0, 4096, seen_at=seen_at)
        await WorkStore(connection).beat(state, [], seen_at)
        await connection.close()

    with serving_tasks(redis_url) as service:
        done = asked(service)
        assert done.returncode == 1 and "has not heard of the node pod-1" in done.stderr
        asyncio.run(beat(time.time() - 120))
        assert asked(service).returncode == 1
        asyncio.run(beat(time.time()))
        done = asked(service)
        assert done.returncode == 0, done.stderr


def test_a_node_on_a_machine_with_a_wrong_clock_is_ready(redis_url: str) -> None:
    """The old bug: its clock, an hour ahead, was compared with Redis's, and the cluster restarted it for ever."""
    ahead = "import runpy, sys, time; now = time.time; time.time = lambda: now() + 3600; runpy.run_path(sys.argv[1], run_name='__main__')"

    async def beat() -> None:
        connection = StoreConnection(redis_url)
        work = WorkStore(connection)
        now = await work.now()
        await work.beat(NodeState("pod-1", {}, ["kubernetes"], 4.0, 4096, seen_at=now), [], now)
        await connection.close()

    with serving_tasks(redis_url) as service:
        asyncio.run(beat())
        node = {"VERBATIM_URL": service.url, "VERBATIM_NODE_TOKEN": NODE, "VERBATIM_NODE_NAME": "pod-1"}
        done = subprocess.run(
            [sys.executable, "-I", "-c", ahead, str(FILES / "node_ready.py")],
            env={"PATH": os.environ["PATH"], **node},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_the_network_test_fails_where_something_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(listener.getsockname()[1])}
        done = script("test_network.py", **place)
        assert done.returncode == 1 and "does not carry policies out" in done.stderr
    with nobody() as port:
        done = script("test_network.py", **{**place, "KUBERNETES_SERVICE_PORT": str(port)})
        assert done.returncode == 0, done.stderr


@contextmanager
def nobody() -> Iterator[int]:
    """A port at which nobody answers, and which nobody else is given meanwhile."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield silent.getsockname()[1]


@contextmanager
def engine(*pages: bytes) -> Iterator[tuple[str, list[int]]]:
    """Gives one page after the other, the last again and again; and how many were asked for."""
    asked: list[int] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(1)
            page = pages[min(len(asked), len(pages)) - 1]
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def page(running: int, waiting: int) -> bytes:
    return (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        f'vllm:num_requests_running{{engine="0",model_name="policy"}} {running}.0\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="policy"}} {waiting}.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0\n'
        'vllm:generation_tokens_total{engine="0"} 99.0\n'
    ).encode()


def drained(url: str, seconds: float) -> str:
    return f"import runpy; runpy.run_path({str(FILES / 'drain_engine.py')!r})['drain']({url!r}, {seconds}, 0.0, 0.01)"


def test_an_engine_ends_when_its_calls_have() -> None:
    with engine(page(3, 1), page(1, 0), page(0, 0)) as (url, asked):
        done = subprocess.run([sys.executable, "-I", "-c", drained(url, 300)], timeout=120, check=False)
        assert done.returncode == 0 and len(asked) == 3


def test_an_engine_that_never_gets_idle_ends_all_the_same_and_one_that_is_gone_at_once() -> None:
    with engine(page(1, 0)) as (url, asked):
        done = subprocess.run([sys.executable, "-I", "-c", drained(url, 0.5)], timeout=120, check=False)
        assert done.returncode == 0 and asked
    with nobody() as port:
        gone = drained(f"http://127.0.0.1:{port}/metrics", 300)
        assert subprocess.run([sys.executable, "-I", "-c", gone], timeout=120, check=False).returncode == 0


def test_the_drain_is_called_as_its_pod_calls_it() -> None:
    (*_, url, seconds) = container(pod_of(the({}, "StatefulSet", "-vllm")) or {})["lifecycle"]["preStop"]["exec"]["command"]
    assert (url, seconds) == ("http://127.0.0.1:8000/metrics", "600")
    with engine(page(1, 0)) as (own, asked):
        done = script("drain_engine.py", own, "0.5")
        assert done.returncode == 0 and asked, done.stderr
