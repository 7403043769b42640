"""Everything is killed at random moments under load, and nothing is lost, delivered twice after its acknowledgement, or half there.

Real processes: a redis-server that syncs every write, two services on it or one that has it for itself, a trainer, and harnesses with
the openai SDK. What must
hold afterwards is in crash_oracle.py. The long run is `python -m benchmarks.crashes`. Run with `-s` to see every kill.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.crashes.rounds import CrashRounds
from tests.support.crashes.setups import Setup, embedded, shared
from tests.support.service.verbatim_process import Serving, wait_until

SEED = 20
PROCESSES = {shared: ("redis", "proxy-0", "proxy-1", "trainer"), embedded: ("redis", "proxy-0", "trainer")}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("setup", "rounds"), [(shared, 18), (embedded, 8)])
def test_every_promise_holds_after_kills_of_every_process_at_random_moments(
    setup: Callable[[Path, str], Setup], rounds: int, tmp_path: Path
) -> None:
    survived = CrashRounds(SEED, setup, tmp_path, note=print).run(rounds)
    assert all(survived.kills[name] for name in PROCESSES[setup])
    checked = survived.checked
    assert checked.replies > rounds and checked.tokens and checked.groups
    assert survived.refusals, "no call met a crash"


def test_a_worker_that_is_killed_before_it_serves_is_replaced_like_any_other(tmp_path: Path) -> None:
    with Serving("--engine", "http://127.0.0.1:9", "--workers", "2", data_dir=tmp_path / "data") as service:
        first = workers(service)
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: len(set(workers(service)) - set(first)) == 1, 60, "its successor starts")
        (starting,) = set(workers(service)) - set(first)
        os.kill(starting, signal.SIGKILL)
        wait_until(lambda: len(set(workers(service)) - {*first, starting}) == 1, 60, "and that one's")
        assert service.request("GET", "/healthz").status_code == 200
        assert service.stop(within_seconds=60) == 0
        assert f"worker {starting} died" in service.stderr


def workers(service: Serving) -> list[int]:
    """The children that serve, or will: the others are Redis and what Python keeps beside its processes."""
    found = []
    for pid in service.children:
        # One that has just ended is a child still.
        with suppress(OSError):
            found += [pid] if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found
