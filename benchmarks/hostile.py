"""One hostile key beside ten honest sessions: what the honest ones feel, and whether the service lives.

    python -m benchmarks.hostile [--seconds 60] [--rounds 5] [--connections 16] [--memory-mib 1024] [--only KIND,...] [--json FILE]

The service is one process with a limit on its memory (RLIMIT_DATA) and a core of its own, before the fast engine and a redis-server. Ten
harnesses hold conversations, a call every 100 ms, while a probe asks /healthz every 50 ms: for some seconds alone, then for as long while
another process sends what is refused at full speed, all under the key of one session, and so on in turn, so that whatever else the
machine does falls on both. Printed are p50 and p99 of the honest calls in both, the median of the rounds with the least and the most,
resident memory, and the worst answer of /healthz. Nothing is asserted but that the service lives and that every honest call is answered.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.cores import pin_this_process
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
from benchmarks.results import Grid, disturbed, median_of, number, ratio, rounded, spread, times

HONEST = 10
TURNS = 20
"""Calls of a conversation, then another session begins."""
PAUSE_SECONDS = 0.1
PROBE_SECONDS = 0.05
SAMPLE_SECONDS = 0.2
WARM_UP_SECONDS = 2.0
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
    """What was seen in one round under one load. Milliseconds, and MiB."""

    calls_ms: list[float] = field(default_factory=list)
    probes_ms: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)


def figures(rounds: Sequence[Felt]) -> dict[str, Any]:
    """Percentiles are spreads over the rounds; what is worst is that of all rounds."""
    p50, p99 = zip(*(np.percentile(felt.calls_ms, [50, 99]) for felt in rounds), strict=True)
    return {
        "honest_calls": sum(len(felt.calls_ms) for felt in rounds),
        "p50_ms": spread(map(float, p50)),
        "p99_ms": spread(map(float, p99)),
        "worst_ms": rounded(max(max(felt.calls_ms) for felt in rounds)),
        "worst_healthz_ms": rounded(max(max(felt.probes_ms) for felt in rounds)),
        "most_resident_mib": rounded(max(max(felt.resident) for felt in rounds)),
        "hostile_answers": dict(sum((felt.answers for felt in rounds), Counter())),
    }


def run(seconds: float, rounds: int, connections: int, memory_mib: int, kinds: list[str]) -> dict[str, Any]:
    alone, beside = [], []
    with ExitStack() as stack:
        engine = stack.enter_context(fast_engine(side="load"))
        port = stack.enter_context(redis_server("load"))
        service, url = stack.enter_context(serving(engine, port, "--engine-api", "token", side="tested"))
        pin_this_process("load")
        limit = memory_mib * MIB
        resource.prlimit(service.pid, resource.RLIMIT_DATA, (limit, limit))
        hostile = request(url, "POST", "/sessions", {})
        _feel(url, service.pid, WARM_UP_SECONDS)
        for _ in range(rounds):
            alone.append(_feel(url, service.pid, seconds / rounds))
            with attacking(url, hostile, connections, kinds) as attack:
                beside.append(_feel(url, service.pid, seconds / rounds))
                beside[-1].answers = _ended(attack)
        after = _feel(url, service.pid, seconds / rounds)
        alive = service.poll() is None
    return {
        "seconds": seconds,
        "rounds": rounds,
        "connections": connections,
        "memory_mib": memory_mib,
        "kinds": kinds,
        "alive": alive,
        "alone": figures(alone),
        "beside": figures(beside),
        "after": figures([after]),
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
    with started(command, side="load") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield process


def _ended(attack: subprocess.Popen[str]) -> Counter[str]:
    attack.terminate()
    assert attack.stdout is not None
    return Counter(json.loads(attack.stdout.readline()))


def _attack(url: str, session_id: str, key: str, connections: int, kinds: list[str]) -> None:
    # It takes what the honest harnesses and the engine, on the same core, leave to it.
    os.nice(19)
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

    for first in range(connections):
        threading.Thread(target=send, args=(first,), daemon=True).start()
    print("ready", flush=True)
    over.wait()
    print(json.dumps(answers), flush=True)


def _short(kind: str) -> str:
    return kind.replace(",", "").replace(" ", "-")


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    rows = []
    for name, told in (("alone", "alone"), ("beside", "beside a hostile key"), ("after", "after it")):
        each = result[name]
        worst = (number(each[figure]) for figure in ("worst_ms", "worst_healthz_ms", "most_resident_mib"))
        rows.append((told, number(each["honest_calls"]), _between(each["p50_ms"]), _between(each["p99_ms"]), *worst))
    rows.append(("beside / alone", "-", *(_ratio(result, name) for name in ("p50_ms", "p99_ms")), "-", "-", "-"))
    columns = ("", "calls", "p50 ms", "p99 ms", "worst ms", "worst /healthz ms", "most MiB")
    title = f"ten honest sessions, {result['seconds']:g} s each in {result['rounds']} rounds, {result['memory_mib']} MiB"
    return [Grid(title, columns, tuple(rows))]


def _between(found: Mapping[str, float]) -> str:
    return f"{number(found['median'])} ({number(found['least'])} to {number(found['most'])})"


def _ratio(result: dict[str, Any], name: str) -> str:
    return times(ratio(median_of(result["beside"], name), median_of(result["alone"], name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="alone, and as long beside the hostile key")
    parser.add_argument("--rounds", type=int, default=5, help="that share the seconds")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--only", help="some of: " + ", ".join(map(_short, KINDS)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {_short(kind): kind for kind in KINDS}
    kinds = [by_name[name] for name in options.only.split(",")] if options.only else list(KINDS)
    if options.attack:
        url, session_id, key = options.attack
        _attack(url, session_id, key, options.connections, kinds)
        return
    described = machine(alone=True)
    result = run(options.seconds, options.rounds, options.connections, options.memory_mib, kinds)
    console = Console(width=160)
    if disturbed(described):
        console.print(f"{described['cores_busy']} cores busy: something else is at work, compare within a row only")
    for grid in tables(result):
        console.print(grid.rich())
    console.print(f"the hostile key was answered {result['beside']['hostile_answers']}; alive: {result['alive']}")
    if options.json:
        whole = {"machine": described, **result}
        (ROOT / options.json).write_text(json.dumps(whole, indent=2) + "\n")
    if not result["alive"]:
        raise SystemExit("the service did not live")


if __name__ == "__main__":
    main()
