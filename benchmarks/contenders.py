"""What is compared: the service with its durable Redis, its peers, nginx that reads nothing, and the engine without any proxy.

Peers live in an environment of their own (`make bench`), so that nobody's versions hold for another. Each contender is given
the engine's URL and a folder, and is ready when its block begins.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import nginx
from benchmarks.load import CallsFailed, Target
from benchmarks.processes import ROOT, Started, connection_to, free_port, redis_process, request, serving, started
from benchmarks.replies import MODEL

PEERS = Path(os.environ.get("VERBATIM_BENCH_PEERS", ROOT / ".cache" / "bench-peers"))
SESSIONS = 64
"""Over which the calls of a run go."""
DATABASE = "rllm.db"
START_SECONDS = 1800
"""A peer may take so long to listen: LiteLLM imports for 15 seconds on a quiet machine, and for many minutes on a busy one."""
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Proxy:
    """A contender at work. `tested` is the process whose core counts, `store` that of a store beside it."""

    name: str
    url: str
    targets: tuple[Target, ...]
    tested: Started | None = None
    store: Started | None = None
    redis_port: int | None = None


@contextmanager
def engine_alone(engine_url: str, folder: Path) -> Iterator[Proxy]:
    yield Proxy("engine", engine_url, (Target(_CHAT, ""),))


@contextmanager
def passing_nginx(engine_url: str, folder: Path, at_once: bool = False) -> Iterator[Proxy]:
    with nginx.passing(engine_url, folder, at_once=at_once) as (process, url):
        yield Proxy("nginx", url, (Target(_CHAT, ""),), process)


@contextmanager
def verbatim(engine_url: str, folder: Path, api: str = "chat", workers: int = 1, alone: bool = True) -> Iterator[Proxy]:
    """The service over a Redis of its own; `alone`: on a core of its own."""
    with ExitStack() as stack:
        store, port = stack.enter_context(redis_process("load"))
        flags = ("--engine-api", api, "--workers", str(workers))
        service, url = stack.enter_context(serving(engine_url, port, *flags, side="tested" if alone else None))
        sessions = [request(url, "POST", "/sessions", {}) for _ in range(SESSIONS)]
        targets = tuple(Target(f"/s/{made['session_id']}{_CHAT}", made["api_key"]) for made in sessions)
        yield Proxy(f"verbatim, {api} path", url, targets, service, store, port)


@contextmanager
def verbatim_token(engine_url: str, folder: Path) -> Iterator[Proxy]:
    with verbatim(engine_url, folder, "token") as proxy:
        yield proxy


@contextmanager
def verbatim_plugin(engine_url: str, folder: Path) -> Iterator[Proxy]:
    with verbatim(f"{engine_url}{nginx.WITH_PLUGIN}", folder, "token") as proxy:
        (replica,) = request(proxy.url, "GET", "/engines")["replicas"]
        assert replica["plugin"], replica["notes"]
        yield replace(proxy, name="verbatim, token path with the plugin")


@contextmanager
def rllm_memory(engine_url: str, folder: Path) -> Iterator[Proxy]:
    with _rllm(engine_url, folder, "rllm, memory", "--store", "memory") as proxy:
        yield proxy


@contextmanager
def rllm_sqlite(engine_url: str, folder: Path) -> Iterator[Proxy]:
    with _rllm(engine_url, folder, "rllm, SQLite", "--store", "sqlite", "--db-path", str(folder / DATABASE)) as proxy:
        yield proxy


@contextmanager
def _rllm(engine_url: str, folder: Path, name: str, *flags: str) -> Iterator[Proxy]:
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    argv = [peer("rllm-model-gateway"), "--host", "127.0.0.1", "--port", str(port), "--worker", f"{engine_url}/v1", *flags]
    log = folder / "output.log"
    with started([*argv, "--log-level", "warning"], side="tested", log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for_answer(name, process, port, "/health", log)
        yield Proxy(name, url, tuple(Target(f"/sessions/bench-{number}{_CHAT}", "") for number in range(SESSIONS)), process)


_LITELLM_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "NO_DOCS": "True", "LITELLM_TELEMETRY": "False"}


@contextmanager
def litellm(engine_url: str, folder: Path) -> Iterator[Proxy]:
    folder.mkdir(parents=True, exist_ok=True)
    asked = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{engine_url}/v1", "api_key": "none"}
    # Without a master key it does not start; calls with the master key are looked up in no database.
    key = f"sk-{secrets.token_hex(32)}"
    configuration = {
        "model_list": [{"model_name": MODEL, "litellm_params": asked}],
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": key},
    }
    (folder / "litellm.yaml").write_text(json.dumps(configuration))
    port = free_port()
    argv = [peer("litellm"), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "output.log"
    with started([*argv, "--num_workers", "1", "--telemetry", "False"], _LITELLM_ENV, "tested", log) as process:
        wait_for_answer("LiteLLM", process, port, "/health/liveliness", log)
        yield Proxy("LiteLLM", f"http://127.0.0.1:{port}", (Target(_CHAT, key),), process)


CONTENDERS: dict[str, Any] = {
    "engine": engine_alone,
    "nginx": passing_nginx,
    "verbatim": verbatim,
    "verbatim-token": verbatim_token,
    "verbatim-plugin": verbatim_plugin,
    "rllm-sqlite": rllm_sqlite,
    "rllm-memory": rllm_memory,
    "litellm": litellm,
}


def peer(command: str) -> str:
    """Path of a peer's command. Raises SystemExit when the peers are not installed."""
    binary = PEERS / "bin" / command
    if not binary.exists():
        raise SystemExit(f"{binary} is missing: `make bench` installs the peers")
    return str(binary)


def peer_versions() -> dict[str, str]:
    """The versions of what is compared with."""
    found = {}
    for folder in sorted(PEERS.glob("lib/python*/site-packages/*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        if name in ("litellm", "rllm_model_gateway"):
            found[name.replace("_", "-")] = version
    return found


def wait_for_answer(name: str, process: Started, port: int, path: str, log: Path) -> None:
    """Returns once the peer answers. Raises SystemExit with the end of its output when it ends, or has not after `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while not _answers(port, path):
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            what = (
                f"did not listen within {START_SECONDS} s"
                if code is None
                else f"ended with exit code {code} before it listened"
            )
            last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"{name} {what} on port {port}. The end of its output:\n{last}")
        time.sleep(0.2)


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def post(proxy: Proxy, content: bytes, number: int = 0) -> bytes:
    """One call, whole. Raises CallsFailed when it was not answered."""
    connection, target = connection_to(proxy.url), proxy.targets[number % len(proxy.targets)]
    headers = {"content-type": "application/json", "authorization": f"Bearer {target.key}"}
    connection.request("POST", target.path, content, headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise CallsFailed(f"{proxy.name} answered {answer.status}: {said[:500]!r}")
    return said
