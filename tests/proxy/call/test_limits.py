"""How many calls a session may begin per second, and that waiting for a batch does not hold up a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import RateLimitError

from proxy.call.http import CallRate
from proxy.errors import TooManyCalls
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import RunningService, hanging_up
from tests.support.service.verbatim_process import TRAINER, Serving, wait_until


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
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url, call_limits={"per_second": 0.01}) as service:
        session, other = service.session(), service.session()
        session.ask("q")
        with pytest.raises(RateLimitError) as refused:
            session.ask("q")
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 100
        other.ask("q")
        assert len(session.calls) == len(other.calls) == 1


def test_a_trainer_that_waits_is_answered_when_the_service_stops(tmp_path: Path) -> None:
    """Its wait would hold the stop for as long as calls in flight may take."""
    with (
        ScriptedEngine("qwen3") as engine,
        Serving("--engine", engine.url, data_dir=tmp_path, VERBATIM_DRAIN_SECONDS="60") as service,
        hanging_up(f"{service.url}/batches/lease", {"wait_seconds": 300}, TRAINER) as waiting,
    ):
        # Asked for after the lease, which has been read when this is answered: its store was asked too.
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 120, "the lease waits")
        assert service.stop(within_seconds=30) == 0
        assert waiting.recv(4096).startswith(b"HTTP/1.1 204 ")
