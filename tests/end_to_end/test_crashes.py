"""Everything is killed at random moments under load, and nothing is lost, delivered twice after its acknowledgement, or half there.

Real processes: a redis-server that syncs every write, two services on it or one that has it for itself, a trainer, and harnesses with
the openai SDK. What must hold afterwards is in tests/support/crashes/oracle.py. The long run is
`python -m benchmarks.crashes`. Run with `-s` to see every kill.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes.rounds import CrashRounds
from tests.support.crashes.setups import Setup, embedded, shared
from tests.support.service.redis_server import IN_MEMORY

SEED = 176
"""Chosen so that these few rounds kill every process alone, and several at once."""
PROCESSES: dict[Any, tuple[str, ...]] = {
    shared: ("redis", "proxy-0", "proxy-1", "trainer"),
    embedded: ("redis", "proxy-0", "trainer"),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is room: processes are killed, not machines, and each write is synced: a disk that is busy with something else
    would keep all of them waiting."""
    with tempfile.TemporaryDirectory(prefix="crashes-", dir=IN_MEMORY) as name:
        yield Path(name)


@pytest.mark.case(43)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("setup", "rounds"), [(shared, 10), (embedded, 5)])
def test_every_promise_holds_after_kills_of_every_process_at_random_moments(
    setup: Callable[[Path, str], Setup], rounds: int, folder: Path
) -> None:
    survived = CrashRounds(SEED, setup, folder, note=print).run(rounds)
    assert all(survived.kills[name] for name in PROCESSES[setup])
    checked = survived.checked
    assert checked.replies > rounds and checked.tokens and checked.groups
    assert survived.refusals, "no call met a crash"
