"""How many calls a session may begin per second, and that waiting for a batch does not hold up a stop."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from openai import RateLimitError
from running_service import RunningService
from scripted_engine import ScriptedEngine
from verbatim_process import TRAINER, Serving, wait_until

from proxy.errors import TooManyCalls
from proxy.limits import CallRate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admitted(rate: CallRate, session_id: str, calls: int) -> int:
    count = 0
    for _ in range(calls):
        try:
            rate.admit(session_id)
        except TooManyCalls:
            continue
        count += 1
    return count


def test_a_session_begins_so_many_calls_a_second_and_no_other_pays_for_it() -> None:
    clock = Clock()
    rate = CallRate(4, clock)
    assert admitted(rate, "a", 10) == 4
    assert admitted(rate, "b", 10) == 4
    clock.now = 0.5
    assert admitted(rate, "a", 10) == 2
    clock.now = 100
    assert admitted(rate, "a", 10) == 4


def test_the_refusal_says_when_the_next_call_may_begin() -> None:
    clock = Clock()
    rate = CallRate(0.25, clock)
    rate.admit("a")
    with pytest.raises(TooManyCalls) as refused:
        rate.admit("a")
    assert refused.value.retry_after_seconds == 4
    clock.now = 4
    rate.admit("a")


def test_no_limit_counts_nothing() -> None:
    assert admitted(CallRate(0), "a", 1000) == 1000


def test_sessions_that_rest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallRate, "_MOST_BUCKETS", 10)
    clock = Clock()
    rate = CallRate(1, clock)
    for number in range(50):
        clock.now += 0.2
        rate.admit(f"s{number}")
    assert len(rate._buckets) <= 11


def test_a_call_too_many_is_429_and_leaves_no_record(redis_url: str) -> None:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url, calls_per_second=0.01) as service:
        session, other = service.session(), service.session()
        session.ask("q")
        with pytest.raises(RateLimitError) as refused:
            session.ask("q")
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 100
        other.ask("q")
        assert len(session.calls) == len(other.calls) == 1


def test_a_trainer_that_waits_is_answered_when_the_service_stops(tmp_path: Path) -> None:
    """Its wait would hold the stop for as long as calls in flight may take."""
    answers: list[httpx.Response] = []
    with (
        ScriptedEngine("qwen3") as engine,
        Serving("--engine", engine.url, data_dir=tmp_path, VERBATIM_DRAIN_SECONDS="60") as service,
    ):

        def wait() -> None:
            headers = {"authorization": f"Bearer {TRAINER}"}
            body = {"wait_seconds": 300}
            answers.append(httpx.post(f"{service.url}/batches/lease", json=body, headers=headers, timeout=330))

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: in_flight_leases(service) > 0, 30, "the lease waits")
        assert service.stop(within_seconds=30) == 0
        waiting.join(30)
    assert [answer.status_code for answer in answers] == [204]


def in_flight_leases(service: Serving) -> int:
    """Connections to the service beside the one that asks."""
    port = int(service.url.rpartition(":")[2])
    wanted = f"0100007F:{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(1 for fields in lines if fields[1] == wanted and fields[3] == "01")
