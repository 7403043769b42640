"""One hostile key beside ten honest sessions: what the honest ones feel, and whether the service lives.

    python -m benchmarks.hostile [--seconds 60] [--connections 16] [--memory-mib 1024] [--only KIND,...] [--json FILE]

The service is one process with a limit on its memory (RLIMIT_DATA), before the fast engine and a redis-server. Ten harnesses hold
conversations, a call every 100 ms, while a probe asks /healthz every 50 ms: first alone, then while another process sends what is
refused at full speed, all under the key of one session. Printed are p50 and p99 of the honest calls in both times, resident memory, and
the worst answer of /healthz. Nothing is asserted but that the service lives and that every honest call is answered.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.processes import (
    ROOT,
    connection_to,
    fast_engine,
    machine,
    redis_server,
    request,
    resident_mib,
    serving,
    started,
)

HONEST = 10
TURNS = 20
"""Calls of a conversation, then another session begins."""
PAUSE_SECONDS = 0.1
PROBE_SECONDS = 0.05
SAMPLE_SECONDS = 0.2
MIB = 2**20
USER = {"role": "user", "content": "q"}


def _body(field: str, items: bytes, count: int, last: bytes = b"0") -> bytes:
    """`items` so many times, and something that is none."""
    return b'{"model":"policy","max_tokens":4,"%s":[' % field.encode() + (items + b",") * count + last + b"]}"


KINDS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "56 MB of empty messages": ("chat/completions", lambda: _body("messages", b"{}", 56 * MIB // 3)),
    "56 MB of text": ("chat/completions", lambda: _body("messages", json.dumps({**USER, "content": "q" * MIB}).encode(), 56)),
    "56 MB of brackets": ("chat/completions", lambda: _body("messages", b"[" * (28 * MIB) + b"]" * (28 * MIB), 1)),
    "100,000 items of a response": (
        "responses",
        lambda: _body("input", b'{"type":"message","role":"user","content":"what is asked here"}', 100_000),
    ),
    "50,000 tool results": (
        "messages",
        lambda: _body(
            "messages",
            b'{"role":"user","content":['
            + b",".join([b'{"type":"tool_result","tool_use_id":"a","content":"b"}'] * 50_000)
            + b"]}",
            1,
        ),
    ),
    "60 kB of messages": ("chat/completions", lambda: _body("messages", json.dumps(USER).encode(), 1_800)),
}


@dataclass
class Felt:
    """What was seen while the service was under one load. Milliseconds, and MiB."""

    calls_ms: list[float] = field(default_factory=list)
    probes_ms: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        p50, p99 = np.percentile(self.calls_ms, [50, 99])
        return {
            "honest_calls": len(self.calls_ms),
            "p50_ms": round(float(p50), 1),
            "p99_ms": round(float(p99), 1),
            "worst_ms": round(max(self.calls_ms), 1),
            "worst_healthz_ms": round(max(self.probes_ms), 1),
            "most_resident_mib": round(max(self.resident), 1),
            "hostile_answers": dict(self.answers),
        }


def run(seconds: float, connections: int, memory_mib: int, kinds: list[str]) -> dict[str, Any]:
    with fast_engine() as engine, redis_server() as port, serving(engine, port, "--engine-api", "token") as (service, url):
        limit = memory_mib * MIB
        resource.prlimit(service.pid, resource.RLIMIT_DATA, (limit, limit))
        hostile = request(url, "POST", "/sessions", {})
        alone = _feel(url, service.pid, seconds)
        with attacking(url, hostile, connections, kinds) as attack:
            beside = _feel(url, service.pid, seconds)
            beside.answers = _ended(attack)
        after = _feel(url, service.pid, min(seconds, 5.0))
        alive = service.poll() is None
    return {
        "seconds": seconds,
        "connections": connections,
        "memory_mib": memory_mib,
        "kinds": kinds,
        "alive": alive,
        "alone": alone.figures(),
        "beside": beside.figures(),
        "after": after.figures(),
    }


def _feel(url: str, pid: int, seconds: float) -> Felt:
    felt, over = Felt(), threading.Event()
    work: list[Callable[[], None]] = [*([lambda: _converse(url, felt, over)] * HONEST), lambda: _probe(url, felt, over)]
    failed: list[BaseException] = []

    def watched(each: Callable[[], None]) -> None:
        try:
            each()
        except (OSError, HTTPException, AssertionError) as error:
            failed.append(error)

    threads = [threading.Thread(target=watched, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until and not failed:
        felt.resident.append(resident_mib(pid))
        time.sleep(SAMPLE_SECONDS)
    over.set()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"the service failed an honest client: {failed[0]!r}")
    return felt


def _converse(url: str, felt: Felt, over: threading.Event) -> None:
    """One harness: append-only conversations, one after the other."""
    connection = connection_to(url)
    while not over.is_set():
        session = request(url, "POST", "/sessions", {})
        path, history = f"/s/{session['session_id']}/v1/chat/completions", [USER]
        headers = {"authorization": f"Bearer {session['api_key']}", "content-type": "application/json"}
        for _ in range(TURNS):
            if over.is_set():
                break
            began = time.perf_counter()
            connection.request("POST", path, json.dumps({"model": "policy", "messages": history}), headers)
            answer = connection.getresponse()
            content = answer.read()
            felt.calls_ms.append((time.perf_counter() - began) * 1000)
            assert answer.status == 200, content
            history += [json.loads(content)["choices"][0]["message"], USER]
            over.wait(PAUSE_SECONDS)
        request(url, "POST", f"/sessions/{session['session_id']}/close", {"status": "cancelled"})
    connection.close()


def _probe(url: str, felt: Felt, over: threading.Event) -> None:
    while not over.is_set():
        connection = connection_to(url)
        began = time.perf_counter()
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        felt.probes_ms.append((time.perf_counter() - began) * 1000)
        connection.close()
        over.wait(PROBE_SECONDS)


@contextmanager
def attacking(url: str, session: dict[str, Any], connections: int, kinds: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that sends refused bodies until its input ends, and then prints how it was answered."""
    named = ["--attack", url, session["session_id"], session["api_key"], "--connections", str(connections)]
    command = [sys.executable, "-m", "benchmarks.hostile", *named, "--only", ",".join(_short(kind) for kind in kinds)]
    with started(command) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield process


def _ended(attack: subprocess.Popen[str]) -> Counter[str]:
    attack.terminate()
    assert attack.stdout is not None
    return Counter(json.loads(attack.stdout.readline()))


def _attack(url: str, session_id: str, key: str, connections: int, kinds: list[str]) -> None:
    over, answers = threading.Event(), Counter[str]()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    bodies = [(f"/s/{session_id}/v1/{KINDS[kind][0]}", KINDS[kind][1]()) for kind in kinds]

    def send(first: int) -> None:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        place = first
        while not over.is_set():
            path, body = bodies[place % len(bodies)]
            place += 1
            connection = connection_to(url)
            try:
                connection.request("POST", path, body, headers)
                answers[str(connection.getresponse().status)] += 1
            except (OSError, HTTPException) as error:
                answers[type(error).__name__] += 1
            finally:
                connection.close()

    for number in range(connections):
        threading.Thread(target=send, args=(number,), daemon=True).start()
    print("ready", flush=True)
    over.wait()
    print(json.dumps(answers), flush=True)


def _short(kind: str) -> str:
    return kind.replace(",", "").replace(" ", "-")


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"ten honest sessions, {result['seconds']:g} s, {result['memory_mib']} MiB", title_justify="left")
    for column in ("", "calls", "p50 ms", "p99 ms", "worst ms", "worst /healthz ms", "most MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, told in (("alone", "alone"), ("beside", "beside a hostile key"), ("after", "after it")):
        each = result[name]
        names = ("honest_calls", "p50_ms", "p99_ms", "worst_ms", "worst_healthz_ms", "most_resident_mib")
        table.add_row(told, *(str(each[name]) for name in names))
    console = Console()
    console.print(table)
    console.print(f"the hostile key was answered {result['beside']['hostile_answers']}; alive: {result['alive']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--only", help="some of: " + ", ".join(map(_short, KINDS)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {_short(kind): kind for kind in KINDS}
    kinds = [by_name[name] for name in options.only.split(",")] if options.only else list(KINDS)
    if options.attack:
        _attack(*options.attack, options.connections, kinds)
        return
    result = run(options.seconds, options.connections, options.memory_mib, kinds)
    _show(result)
    if options.json:
        whole = {"machine": machine(), **result}
        (ROOT / options.json).write_text(json.dumps(whole, indent=2) + "\n")
    if not result["alive"]:
        raise SystemExit("the service did not live")


if __name__ == "__main__":
    main()
