"""The processes a benchmark drives over loopback: how they are started, pinned and measured; the fast engine, a redis-server with its
append-only file, the service."""

from __future__ import annotations

import http.client
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import measured_code
from benchmarks.cores import Side, described, pinned
from proxy.store.programs import choose_program

ROOT = measured_code.ROOT
ADMIN = "admin-of-the-benchmark"
END_SECONDS = 60
"""A process that was asked to end has so long for it."""
Started = subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class Parts:
    """The processes under test, and where they listen."""

    service: Started
    url: str
    engine_url: str
    redis_port: int


@contextmanager
def running(*service_argv: str) -> Iterator[Parts]:
    """Engine, redis-server and service, each a process of its own; `service_argv` replaces how the service is run."""
    with ExitStack() as stack:
        engine_url = stack.enter_context(fast_engine())
        port = stack.enter_context(redis_server())
        service, url = stack.enter_context(serving(engine_url, port, argv=service_argv or ("-m", "cli.main")))
        yield Parts(service, url, engine_url, port)


@contextmanager
def fast_engine(*flags: str, side: Side | None = None) -> Iterator[str]:
    """The URL of an engine whose replies depend on what it is asked."""
    with started([sys.executable, "-m", "benchmarks.fast_engine", *flags], side=side) as engine:
        assert engine.stdout is not None
        yield engine.stdout.readline().strip()


@contextmanager
def redis_server(side: Side | None = None) -> Iterator[int]:
    """The port of a redis-server that keeps an append-only file, as the embedded one does."""
    with redis_process(side) as (_, port):
        yield port


@contextmanager
def redis_process(side: Side | None = None) -> Iterator[tuple[Started, int]]:
    """The same with its process."""
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-") as folder:
        port = free_port()
        persist = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--appendonly", "yes", "--save", ""]
        with started([str(choose_program().path), *persist], side=side) as process:
            wait_for_port(port)
            yield process, port


@contextmanager
def serving(
    engine_url: str,
    redis_port: int | None,
    *flags: str,
    argv: Sequence[str] = ("-m", "cli.main"),
    side: Side | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Started, str]]:
    """(process, URL) of `verbatim serve` with these flags; without a Redis it has the embedded one."""
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-", ignore_cleanup_errors=True) as folder:
        store = ["--data-dir", folder] if redis_port is None else ["--redis", f"redis://127.0.0.1:{redis_port}/0"]
        # Every call that the load generator leaves unanswered at its end would be warned of.
        command = [sys.executable, *argv, "serve", "--port", "0", "--log-level", "error", "--engine", engine_url]
        with started([*command, *store, *flags], env, side) as service:
            yield service, _url_of(service)


@contextmanager
def started(
    argv: Sequence[str], env: Mapping[str, str] | None = None, side: Side | None = None, log: Path | None = None
) -> Iterator[Started]:
    """A process, ended with the block; `side` says on which cores it runs, `log` where it writes, for one that nobody reads."""
    tokens = {"VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_TRAINER_TOKEN": ADMIN + "-trainer"}
    whole = os.environ | tokens | dict(env or {})
    with ExitStack() as stack:
        out: Any = subprocess.PIPE if log is None else stack.enter_context(log.open("ab"))
        errors = None if log is None else subprocess.STDOUT
        process = subprocess.Popen(pinned(argv, side), cwd=ROOT, env=whole, stdout=out, stderr=errors, text=True)
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[Any], number: signal.Signals = signal.SIGTERM) -> None:
    """Asks the process to end, and kills it with all below it when it has not after `END_SECONDS`."""
    process.send_signal(number)
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        for member in family(process.pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for_port(port: int, seconds: float = 600) -> None:
    """Returns when something listens there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            time.sleep(0.05)
        else:
            return


def _url_of(service: subprocess.Popen[str]) -> str:
    assert service.stdout is not None
    for line in service.stdout:
        if line.startswith("base URL: "):
            return line.removeprefix("base URL: ").strip()
    raise SystemExit("the service did not start")


def machine(alone: bool = False) -> dict[str, Any]:
    """What the figures were measured on, and which code; `alone`: what was measured had a core of its own."""
    model = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "pinned": described(alone),
        "cores_busy": _cores_busy(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **measured_code.describe_code(),
    }


def _cores_busy(seconds: float = 1.0) -> float:
    """How many cores are at work while this process waits. The load average would still tell of what was measured before."""
    before = _core_seconds()
    time.sleep(seconds)
    return round((_core_seconds() - before) / seconds, 2)


def _core_seconds() -> float:
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def connection_to(url: str) -> http.client.HTTPConnection:
    """Not open yet; an answer may take ten minutes."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)


def request(url: str, method: str, path: str, body: Any = None, token: str = ADMIN) -> Any:
    """The decoded answer, None when it is empty; `body` is sent as JSON, unless it is bytes."""
    connection = connection_to(url)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status < 300, content
    return json.loads(content) if content else None


def cpu_seconds(pid: int) -> float:
    """Time on a core of all threads of a process, to the nanosecond."""
    spent = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has just ended
            spent += int(thread.read_text().split()[0])
    return spent / 1e9


def family(pid: int) -> list[int]:
    """The process and all below it."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, task.read_text().split())
    return [pid, *(member for child in children for member in family(child))]


def family_cpu_seconds(pid: int) -> float:
    return sum(map(cpu_seconds, family(pid)))


def resident_mib(pid: int) -> float:
    """Memory of the process and all below it; pages that they share count in each."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = 0
    for member in family(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * page / 2**20
