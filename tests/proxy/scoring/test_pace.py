"""Scoring leaves an engine that has calls of harnesses the rest of its time, and takes all of one that has none."""

from __future__ import annotations

import pytest

from proxy.engine.replica import Replica
from proxy.scoring.pace import Pace


class Clock:
    """Time passes only where somebody sleeps or works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("proxy.scoring.pace.time.monotonic", lambda: self.now)
        monkeypatch.setattr("proxy.scoring.pace.asyncio.sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def ask(clock: Clock, paced: Pace, replica: Replica, engines: int = 1, begins: int = 0) -> float:
    """How long it waited before a request that takes two seconds, during which `begins` calls begin."""
    before = clock.now
    await paced.wait("teacher")
    waited = clock.now - before
    replica.in_flight += 1
    with paced.asking("teacher", replica, engines):
        clock.now += 2
        replica.in_flight += begins
    replica.in_flight -= 1
    return waited


@pytest.mark.parametrize(("share", "engines", "waits"), [(0.5, 1, 2.0), (0.25, 1, 6.0), (0.25, 3, 2.0), (1.0, 1, 0.0)])
async def test_beside_calls_the_next_request_waits_for_the_rest_of_the_time(
    clock: Clock, share: float, engines: int, waits: float
) -> None:
    paced, replica = Pace(share), Replica("a", "http://a", in_flight=1)
    assert await ask(clock, paced, replica, engines) == 0
    assert await ask(clock, paced, replica, engines) == pytest.approx(waits)


async def test_an_engine_without_calls_is_asked_at_once_until_one_begins(clock: Clock) -> None:
    paced, replica = Pace(0.5), Replica("a", "http://a")
    assert [await ask(clock, paced, replica) for _ in range(2)] == [0, 0]
    await ask(clock, paced, replica, begins=1)
    assert await ask(clock, paced, replica) == 2
    # What was waited for is paid.
    clock.now += 100
    assert await ask(clock, paced, replica) == 0


async def test_requests_at_once_are_no_calls_of_harnesses(clock: Clock) -> None:
    paced, replica = Pace(0.5), Replica("a", "http://a", in_flight=1)
    with paced.asking("teacher", replica, 1):
        replica.in_flight += 1
        with paced.asking("teacher", replica, 1):
            clock.now += 2
        replica.in_flight -= 1
    await paced.wait("teacher")
    assert clock.now == 102


async def test_calls_of_an_adapter_are_calls_of_its_engine(clock: Clock) -> None:
    paced, replica = Pace(0.5), Replica("a", "http://a")
    replica.adapters.append(Replica("a", "http://a", base=replica, in_flight=1))
    await ask(clock, paced, replica)
    assert await ask(clock, paced, replica) == 2
