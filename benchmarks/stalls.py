"""How long the event loop stands still while much is asked of it: the slowest answers of /healthz, and what the loop did meanwhile.

    python -m benchmarks.stalls [--quick] [--out DIR]

1,024 sessions of 50,000 tokens are filled, closed, leased whole in each encoding, shown and archived, with a real redis-server, while
another process asks /healthz every 20 ms. The service is watched from inside (`benchmarks.watched_service`). CPU time of a turn of the loop
is what it computed itself; "its own" is the turn by the clock without the time in which no core was free for it: other load hardly counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ADMIN, Started, connection_to, fast_engine, redis_server, request, serving, started
from benchmarks.results import Grid, main, number, progress, rounded

TRAINER = ADMIN + "-trainer"
SESSIONS, QUICK_SESSIONS = 1024, 16
GROUP_SIZE = 8
PROMPT_TOKENS, SAMPLED_TOKENS, TURNS = 24_000, 1_000, 2
BYTES_PER_TOKEN = 4
"""Of the engine."""
THREADS = 32
PROBE_SECONDS = 0.02
READ_BYTES = 2**18
LEASES = {
    "lease, packed": "application/msgpack;arrays=packed",
    "lease, msgpack": "application/msgpack",
    "lease, JSON": "application/json",
}
KEPT_SECONDS = 1
"""A session goes as soon as no trainer will get it."""
NAMED = 3
"""Slow turns of a phase of which the stacks are told."""


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    began: float
    ended: float
    peak_mib: float


class Phases:
    """Those of one run, with the peak of the service's resident memory in each."""

    def __init__(self, pid: int, url: str) -> None:
        self._process = Path(f"/proc/{pid}")
        self._url = url
        self.ended: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        (self._process / "clear_refs").write_text("5")  # the peak is counted anew: proc(5)
        began = time.monotonic()
        yield
        request(self._url, "GET", "/healthz")  # answered after the turn that ended the phase
        status = dict(line.split(":", 1) for line in (self._process / "status").read_text().splitlines())
        self.ended.append(Phase(name, began, time.monotonic(), int(status["VmHWM"].split()[0]) / 1024))


def run(quick: bool) -> dict[str, Any]:
    sessions = QUICK_SESSIONS if quick else SESSIONS
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        turns, asked = folder / "turns", folder / "asked"
        env = {"VERBATIM_RETENTION": json.dumps({"seconds": KEPT_SECONDS, "archive_dir": str(folder / "archive")})}
        argv = ("-m", "benchmarks.watched_service", str(turns))
        with (
            fast_engine("--tokens", str(SAMPLED_TOKENS)) as engine,
            redis_server() as port,
            serving(engine, port, "--engine-api", "chat", argv=argv, env=env) as (service, url),
            _probing(url, asked),
        ):
            phases = Phases(service.pid, url)
            _drive(url, sessions, phases)
        lines = [json.loads(line) for line in turns.read_text().splitlines()]
        probes = [tuple(map(float, line.split())) for line in asked.read_text().splitlines()]
    told = [describe(phase, probes, lines) for phase in phases.ended]
    return {"sessions": sessions, "tokens": sessions * TURNS * (PROMPT_TOKENS + SAMPLED_TOKENS), "phases": told}


def _drive(url: str, sessions: int, phases: Phases) -> None:
    made: list[str] = []
    with progress() as bar, ThreadPoolExecutor(THREADS) as pool:

        def work(name: str, each: Callable[[Any], Any], over: Sequence[Any]) -> None:
            with phases.phase(name):
                for _ in bar.track(pool.map(each, over), len(over), description=name):
                    pass

        with phases.phase("/ui, the first time"):
            _show(url, "/ui")
        work("fill", lambda place: made.append(_fill(url, place)), range(sessions))
        work("close", lambda session: _close(url, session), made)
        for name, accept in LEASES.items():
            with phases.phase(name):
                lease = _lease(url, accept)
            request(url, "POST", f"/batches/{lease}/nack", {}, token=TRAINER)
        work("/ui of sessions", lambda path: _show(url, path), ["/ui", "/ui/groups", "/ui/run", *_pages(made[:8])])
        request(url, "POST", f"/batches/{_lease(url, LEASES['lease, packed'])}/ack", {}, token=TRAINER)
        with phases.phase("archive"):
            while request(url, "GET", "/sessions?limit=1")["sessions"]:
                time.sleep(0.5)


def _fill(url: str, place: int) -> str:
    group = {"group_id": f"group-{place // GROUP_SIZE}", "group_size": GROUP_SIZE}
    session = request(url, "POST", "/sessions", group)
    history: list[Any] = []
    for turn in range(TURNS):
        text = f"{place}.{turn}: " + "some text " * (PROMPT_TOKENS * BYTES_PER_TOKEN // 10)
        history.append({"role": "user", "content": text})
        body = {"model": "policy", "messages": history}
        answer = request(url, "POST", f"/s/{session['session_id']}/v1/chat/completions", body, token=session["api_key"])
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "found"}
        history += [message, result]
    return str(session["session_id"])


def _close(url: str, session: str) -> None:
    request(url, "POST", f"/sessions/{session}/close", {"status": "completed", "reward": 1.0})


def _pages(sessions: Sequence[str]) -> list[str]:
    return [f"/{part}" for session in sessions for part in (f"ui/sessions/{session}", f"sessions/{session}/calls")]


def _show(url: str, path: str) -> None:
    connection = connection_to(url)
    connection.request("GET", path, headers={"authorization": f"Bearer {ADMIN}"})
    answer = connection.getresponse()
    assert answer.read() and answer.status == 200, path
    connection.close()


def _lease(url: str, accept: str) -> str:
    """The id of a lease of everything. Of its rows only a piece at a time is kept."""
    connection = connection_to(url)
    headers = {"authorization": f"Bearer {TRAINER}", "content-type": "application/json", "accept": accept}
    connection.request("POST", "/batches/lease", json.dumps({"max_groups": SESSIONS, "lease_seconds": 3600}), headers)
    answer = connection.getresponse()
    head = answer.read(200)
    assert answer.status == 200, head
    while answer.read(READ_BYTES):
        pass
    connection.close()
    # Of 32 digits in every encoding, the first field.
    return head.partition(b"lease_id")[2].lstrip(b'":\xd9\x20')[:32].decode()


# The probe: a process of its own, that no work of the load holds up.


@contextmanager
def _probing(url: str, asked: Path) -> Iterator[Started]:
    with started([sys.executable, "-m", "benchmarks.stalls", "--probe", url, str(asked)]) as process:
        yield process


def _probe(url: str, path: str) -> None:
    """Writes a line for each answer: when it came, and milliseconds."""
    connection = connection_to(url)
    with Path(path).open("w") as file:
        while True:
            began = time.monotonic()
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            now = time.monotonic()
            print(now, (now - began) * 1000, file=file, flush=True)
            threading.Event().wait(PROBE_SECONDS)


def describe(phase: Phase, probes: Sequence[tuple[float, ...]], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was answered and noted while it ran. `probes`: when each came, and milliseconds."""
    waited = sorted(ms for at, ms in probes if phase.began < at <= phase.ended)
    turns = [line for line in lines if phase.began < line["at"] <= phase.ended]
    return {
        "phase": phase.name,
        "seconds": rounded(phase.ended - phase.began),
        "probes": len(waited),
        "worst_healthz_ms": rounded(waited[-1]) if waited else None,
        "over_100_ms": sum(ms > 100 for ms in waited),
        "longest_turn_ms": rounded(1000 * max((turn["seconds"] for turn in turns), default=0)),
        "longest_own_ms": rounded(1000 * max([0.0, *(turn["seconds"] - turn["without_core"] for turn in turns)])),
        "longest_turn_cpu_ms": rounded(1000 * max((turn["cpu_seconds"] for turn in turns), default=0)),
        "longest_collection_ms": rounded(1000 * max((turn["collecting"] for turn in turns), default=0)),
        "peak_mib": rounded(phase.peak_mib),
        "slowest": [_name_work(turn) for turn in sorted(turns, key=lambda turn: turn["seconds"])[: -NAMED - 1 : -1]],
    }


def _name_work(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn with the stacks that were seen most often in it."""
    often = [f"{times}x {stack}" for stack, times in Counter(turn["stacks"]).most_common(NAMED)]
    times = {"ms": "seconds", "cpu_ms": "cpu_seconds", "without_core_ms": "without_core"}
    return {name: rounded(1000 * turn[field]) for name, field in times.items()} | {"at_work": often}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    figures = {
        "s": "seconds",
        "worst /healthz ms": "worst_healthz_ms",
        "over 100 ms": "over_100_ms",
        "longest turn ms": "longest_turn_ms",
        "its own ms": "longest_own_ms",
        "its CPU ms": "longest_turn_cpu_ms",
        "collector ms": "longest_collection_ms",
        "peak MiB": "peak_mib",
    }
    rows = [(each["phase"], *(number(each[name]) for name in figures.values())) for each in result["phases"]]
    title = f"{result['sessions']:,} sessions, {result['tokens']:,} tokens: the longest turns of the event loop"
    return [Grid(title, ("", *figures), tuple(rows))]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        _probe(*sys.argv[2:])
    else:
        main("stalls", __doc__, run, tables, alone=False)
