"""What stands between the service and its engines: the routers of vLLM and SGLang, and nginx as a balancer, each a real process."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import httpx

from tests.support.machine import require, unavailable
from tests.support.service.redis_server import free_port
from tests.support.service.running_service import wait_until

PROGRAMS = {"vllm_router": ["vllm_router.launch_router"], "sglang_router": ["sglang_router", "launch"]}


@contextmanager
def running_router(program: Literal["vllm_router", "sglang_router"], *engines: str, policy: str) -> Iterator[str]:
    """Its URL. Its sessions are told by the header X-Session-ID."""
    if importlib.util.find_spec(program) is None:
        unavailable(f"{program} is not installed: see tests/peers.txt")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", *PROGRAMS[program], "--port", str(port), "--prometheus-port", str(free_port())]
    argv += ["--worker-startup-check-interval", "1", "--policy", policy, "--worker-urls", *engines]
    router = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _list_workers(url) == len(engines), 120, f"{program} has found its engines")
        yield url
    finally:
        os.killpg(router.pid, signal.SIGKILL)
        router.wait(60)


def _list_workers(url: str) -> int:
    try:
        healthy = httpx.get(f"{url}/workers").json()["workers"]
    except (httpx.TransportError, ValueError, KeyError):
        return 0
    return sum(worker["is_healthy"] for worker in healthy)


class Nginx:
    """nginx with what stands in its `http` block, where PORT is its own; it answers /health with 200."""

    def __init__(self, folder: Path, http: str) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [require("nginx"), "-e", "stderr", "-c", str(folder / "nginx.conf")]
        self._configure(http)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        wait_until(self._answers, 60, "nginx answers")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _configure(self, http: str) -> None:
        user = "user root;" if os.geteuid() == 0 else ""
        kept = "".join(
            f"{kind}_temp_path {self._folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (self._folder / "nginx.conf").write_text(f"""
            daemon off; worker_processes 1; pid {self._folder}/nginx.pid; error_log stderr crit; {user} events {{ }}
            http {{ access_log off; {kept} {http.replace("PORT", str(self._port))} }}
        """)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False


class Balancer(Nginx):
    """Before `engines`; `how` is its directive for choosing one, "" in turn. Each request goes over a connection of its own."""

    def __init__(self, folder: Path, engines: Sequence[str], how: str = "") -> None:
        self._how = how
        super().__init__(folder, self._before(engines))

    def balance(self, engines: Sequence[str]) -> None:
        """From now on, without a pause."""
        self._configure(self._before(engines))
        subprocess.run([*self._command, "-s", "reload"], check=True, stderr=subprocess.DEVNULL)

    def _before(self, engines: Sequence[str]) -> str:
        servers = "".join(f"server {engine.removeprefix('http://')};" for engine in engines)
        place = "location / { proxy_pass http://engines; proxy_buffering off; }"
        return f"upstream engines {{ {self._how} {servers} }} server {{ listen 127.0.0.1:PORT; {place} }}"
