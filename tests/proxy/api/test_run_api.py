"""GET /run and the metrics of the run: what sessions that real harnesses ran and closed add up to."""

from __future__ import annotations

import asyncio
import csv
import io
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.store.delivery import CloseRequest
from proxy.store.service import WeightState
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine, fresh_service
from tests.support.service.redis_server import RedisServer, Store
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.service.verbatim_process import wait_until

__all__ = ["fresh_engine", "fresh_service"]


def run(service: RunningService, **query: Any) -> list[dict[str, Any]]:
    answer = service.request("GET", "/run", TRAINER, params=query)
    assert answer.status_code == 200, answer.text
    points: list[dict[str, Any]] = answer.json()["points"]
    return points


def play(service: RunningService, engine: ScriptedEngine, version: int, reward: float | None, **fields: Any) -> str:
    """A session of one call under these weights, closed."""
    engine.sampler.version = str(version)
    session = service.session(**fields)
    session.ask("hello")
    session.close("completed" if reward is not None else "failed", **({} if reward is None else {"reward": reward}))
    return session.session_id


def sampled(service: RunningService, *session_ids: str) -> int:
    calls = [call for each in session_ids for call in service.request("GET", f"/sessions/{each}/calls").json()["calls"]]
    return sum(len(call["completion_ids"]) for call in calls)


def test_sessions_add_up_per_weight_version_and_label(service: RunningService, engine: ScriptedEngine) -> None:
    math, code = {"label": "math"}, {"label": "code"}
    first = [play(service, engine, 1, reward, group_id="g", group_size=2, metadata=math) for reward in (0.0, 0.5)]
    second = [play(service, engine, 2, reward, group_id="h", group_size=2, metadata=code) for reward in (1.0, 1.0)]
    lost = play(service, engine, 2, None, metadata=code)
    one, two = run(service)
    assert (one["start"], one["rollouts"], one["reward"], one["solved"], one["equal_groups"]) == (1, 2, 0.25, 0.0, 0.0)
    assert (one["reward_p10"], one["reward_p50"], one["reward_p90"]) == (0.0, 0.0, 0.5)
    assert (two["start"], two["rollouts"], two["rewarded"], two["solved"], two["failed"]) == (
        2,
        3,
        2,
        1.0,
        pytest.approx(1 / 3),
    )
    assert (two["groups"], two["equal_groups"], two["calls"], two["label"]) == (1, 1.0, 1.0, None)
    assert one["sampled_tokens"] == sampled(service, *first) / 2
    assert two["sampled_tokens"] == pytest.approx(sampled(service, *second, lost) / 3)
    assert [(point["label"], point["start"]) for point in run(service, by_label=True)] == [("code", 2), ("math", 1)]
    (whole,) = run(service, axis="all")
    assert (whole["rollouts"], whole["reward"], whole["rollouts_per_hour"]) == (5, 0.625, None)
    # The clock may strike between two of them.
    hours = run(service, axis="hours")
    assert sum(point["rollouts"] for point in hours) == 5 and all(point["rollouts_per_hour"] > 0 for point in hours)


def test_what_is_repeated_or_corrected_counts_once(service: RunningService, engine: ScriptedEngine) -> None:
    session_id = play(service, engine, 1, 0.0)
    for _ in range(2):
        service.request("POST", f"/sessions/{session_id}/close", json={"status": "completed", "reward": 0.0})
    assert service.request("POST", f"/sessions/{session_id}/reward", json={"reward": 1.0}).status_code == 200
    (point,) = run(service)
    assert (point["rollouts"], point["rewarded"], point["reward"], point["reward_p50"]) == (1, 1, 1.0, 1.0)
    # It stays counted when it is deleted.
    assert service.request("DELETE", f"/sessions/{session_id}").status_code in (200, 204)
    (point,) = run(service)
    assert (point["rollouts"], point["reward"]) == (1, 1.0)


def test_a_close_that_a_dead_process_left_half_done_counts_once(
    service: RunningService, engine: ScriptedEngine, redis_server: RedisServer
) -> None:
    """The session is announced and frozen, and was filled into its group, but the process died before that could be seen: the sweep of
    another one takes all steps again."""
    session_id = play(service, engine, 1, 1.0)

    async def announce_again() -> None:
        store = Store.at(redis_server.url)
        await store.delivery.announce(session_id, CloseRequest("completed", 1.0), 0.0)
        await store.connection.close()

    asyncio.run(announce_again())
    second = RunningService(engine.url, redis_server.url, engine_api="token", session_idle_seconds=1.0)
    with second:
        waiting = "vb:{delivery}:announced"
        wait_until(lambda: redis_server.client().zcard(waiting) == 0, 60, "the announcement is gone")
    (point,) = run(service)
    assert (point["rollouts"], point["solved"]) == (1, 1.0)


def test_staleness_truncation_and_sessions_that_are_not_trained(
    service: RunningService, engine: ScriptedEngine, redis_server: RedisServer
) -> None:
    """Staleness is what the weights have moved on since the oldest token when the session closes: 4 - 1."""
    engine.sampler.version = "1"
    session = service.session()
    session.ask("hello", max_tokens=1)

    async def push() -> None:
        store = Store.at(redis_server.url)
        await store.weights.advance(WeightState(4))
        await store.connection.close()

    asyncio.run(push())
    session.close(reward=0.0)
    untrained = service.session(trained=False)
    untrained.ask("hello")
    untrained.close(reward=1.0)
    (point,) = run(service)
    assert (point["rollouts"], point["truncated"], point["staleness"]) == (1, 1.0, 3.0)


def test_the_same_as_csv(service: RunningService, engine: ScriptedEngine) -> None:
    play(service, engine, 7, 0.5, metadata={"label": 'a,"b"'})
    answer = service.request("GET", "/run", TRAINER, params={"format": "csv", "by_label": True})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    (read,) = csv.DictReader(io.StringIO(answer.text))
    (point,) = run(service, by_label=True)
    assert read == {name: "" if value is None else str(value) for name, value in point.items()}
    assert (read["label"], read["start"], read["reward"]) == ('a,"b"', "7", "0.5")


def test_an_axis_that_there_is_not_is_refused(service: RunningService) -> None:
    assert service.request("GET", "/run", params={"axis": "century"}).status_code == 400


def test_metrics_show_the_sums_and_the_last_hour(service: RunningService, engine: ScriptedEngine) -> None:
    for reward in (0.0, 1.0):
        play(service, engine, 1, reward, group_id="g", group_size=2, metadata={"label": "math"})
    play(service, engine, 1, None, metadata={"label": "math"})
    families = text_string_to_metric_families(service.request("GET", "/metrics").text)
    found = {
        (sample.name, *(value for name, value in sample.labels.items() if name in ("status", "percentile"))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("verbatim_run_") and sample.labels.get("label") == "math"
    }
    assert found["verbatim_run_rollouts_total", "completed"] == 2 and found["verbatim_run_rollouts_total", "failed"] == 1
    assert found["verbatim_run_calls_total",] == 3 and found["verbatim_run_rewarded",] == 2
    assert (found["verbatim_run_summed_reward",], found["verbatim_run_solved",]) == (1.0, 1)
    assert (found["verbatim_run_groups",], found["verbatim_run_equal_groups",]) == (1, 0)
    assert found["verbatim_run_reward", "10"] == 0.0 and found["verbatim_run_reward", "90"] == 1.0
