"""The processes a benchmark drives over loopback: the fast engine, a redis-server with its append-only file, the service."""

from __future__ import annotations

import http.client
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from proxy.store.embedded import redis_server_binary

ROOT = Path(__file__).resolve().parents[1]
ADMIN = "admin-of-the-benchmark"


@dataclass(frozen=True, slots=True)
class Parts:
    """The processes under test, and where they listen."""

    service: subprocess.Popen[str]
    url: str
    engine_url: str
    redis_port: int


@contextmanager
def running(*service_argv: str) -> Iterator[Parts]:
    """Engine, redis-server and service, each a process of its own; `service_argv` replaces how the service is run."""
    with ExitStack() as stack:
        engine = stack.enter_context(_started([sys.executable, "-m", "benchmarks.fast_engine"]))
        assert engine.stdout is not None
        engine_url = engine.stdout.readline().strip()
        port = stack.enter_context(redis_server())
        service, url = stack.enter_context(serving(engine_url, port, argv=service_argv or ("-m", "cli.main")))
        yield Parts(service, url, engine_url, port)


@contextmanager
def redis_server() -> Iterator[int]:
    """The port of a redis-server that keeps an append-only file, as the embedded one does."""
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-") as folder:
        port = _free_port()
        persist = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--appendonly", "yes", "--save", ""]
        with _started([str(redis_server_binary()), *persist]):
            _wait_for_redis(port)
            yield port


@contextmanager
def serving(
    engine_url: str, redis_port: int, *flags: str, argv: Sequence[str] = ("-m", "cli.main")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, URL) of `verbatim serve` with these flags."""
    where = ["--engine", engine_url, "--redis", f"redis://127.0.0.1:{redis_port}/0"]
    with _started([sys.executable, *argv, "serve", "--port", "0", "--log-level", "warning", *where, *flags]) as service:
        yield service, _url_of(service)


@contextmanager
def _started(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    tokens = {"VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_TRAINER_TOKEN": ADMIN + "-trainer"}
    process = subprocess.Popen(argv, cwd=ROOT, env=os.environ | tokens, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_for_redis(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.05)
        else:
            return


def _url_of(service: subprocess.Popen[str]) -> str:
    assert service.stdout is not None
    for line in service.stdout:
        if line.startswith("base URL: "):
            return line.removeprefix("base URL: ").strip()
    raise SystemExit("the service did not start")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def request(url: str, method: str, path: str, body: Any = None) -> Any:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
    headers = {"authorization": f"Bearer {ADMIN}", "content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status < 300, content
    return json.loads(content)


def cpu_seconds(pid: int) -> float:
    """Time on a core of all threads of a process, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
