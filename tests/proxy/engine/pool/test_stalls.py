"""Engines that answer and sample nothing: how they are noticed, what becomes of their calls, and what is no stall."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import APIError

from proxy.engine.pool.membership import replica_at
from proxy.engine.pool.seats import rank_replicas
from proxy.engine.pool.stalls import LOOKS, WITHOUT_COUNTERS, read_counts
from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine, logprobs_of
from tests.support.service.faulty_wire import FaultyWire
from tests.support.service.running_service import TRAINER, RunningService, Session, wait_until

STALL_SECONDS = 0.5
LONG = list(range(40, 52))

Pool = tuple[list[ScriptedEngine], RunningService]


@contextmanager
def running(redis_url: str, count: int = 2, **settings: Any) -> Iterator[Pool]:
    with ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine("qwen3")) for _ in range(count)]
        kept = {"engine_stall_seconds": STALL_SECONDS, **settings}
        service = stack.enter_context(RunningService([engine.url for engine in engines], redis_url, **kept))
        wait_until(lambda: number(service, "verbatim_engine_up") == count, 60, "all serve")
        yield engines, service


def number(service: RunningService, metric: str) -> float:
    """The metric's value, over all its labels."""
    page = service.request("GET", "/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((f"{metric} ", f"{metric}{{")))


def told(service: RunningService, url: str) -> dict[str, Any]:
    replicas = service.request("GET", "/engines").json()["replicas"]
    return next(replica for replica in replicas if replica["url"] == url)


def at_home(service: RunningService, urls: list[str], url: str) -> Session:
    """A session whose calls go to `url` first."""
    members = [replica_at(each) for each in urls]
    name = replica_at(url).name
    chosen = next(f"s{number}" for number in range(1000) if rank_replicas(f"s{number}", members)[0].name == name)
    return service.session(session_id=chosen)


def calls_at(engine: ScriptedEngine) -> list[Generation]:
    """Without the samples of one token that are nobody's."""
    return [generation for generation in engine.generations if generation.sampling.get("max_tokens") != 1]


def sampled_by_calls(engine: ScriptedEngine) -> list[int]:
    """How many tokens of each call."""
    return [len(generation.sampled.get(0, ())) for generation in calls_at(engine)]


def asked_of(engine: ScriptedEngine, path: str) -> int:
    return engine.paths().count(path)


@pytest.mark.parametrize("api", ["token", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_a_stalled_engine_has_not_begun_go_to_another_and_it_serves_again_when_it_samples(
    api: str, stream: bool, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "proxy.engine")
    with running(redis_url, engine_api=api) as (engines, service), ThreadPoolExecutor() as pool:
        (stalled, other), urls = engines, [engine.url for engine in engines]
        session = at_home(service, urls, stalled.url)
        stalled.stop_sampling()
        other.say("moved")
        moved = pool.submit(read, session, "q1", stream)
        assert moved.result(120) == "moved"
        state = told(service, stalled.url)
        assert state["status"] == "stalled" and "sampled nothing for 0.5 seconds" in state["reason"]
        assert number(service, "verbatim_engine_stalled") == 1 and number(service, "verbatim_engine_up") == 1
        # No call of its sessions goes there meanwhile.
        before = len(calls_at(stalled))
        other.say("new")
        assert read(session, "q2", stream) == "new"
        assert len(calls_at(stalled)) == before
        assert len([each for each in caplog.messages if "it is stalled" in each]) == 1
        stalled.go_on_sampling()
        wait_until(lambda: told(service, stalled.url)["status"] == "serving", 60, "it serves again")
        stalled.say("back")
        assert read(session, "q3", stream) == "back"
        calls = session.calls
        assert [call["status"] for call in calls] == ["finished"] * 3
        _, accounting = session.trajectories()
        assert accounting["sampled_tokens"] == sum(len(call["completion_ids"]) for call in calls)
        assert not [item for item in accounting["quarantined"] if item["reason"] == "dangling"]
        assert number(service, "verbatim_engine_stalled") == 0


def read(session: Session, question: str, stream: bool) -> str:
    answer = session.ask(question, stream=stream)
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


@pytest.mark.parametrize("api", ["token", "chat"])
def test_a_stream_that_has_begun_waits_for_its_stalled_engine_and_ends_exact(api: str, redis_url: str) -> None:
    with running(redis_url, engine_api=api) as (engines, service):
        (stalled, _), urls = engines, [engine.url for engine in engines]
        session = at_home(service, urls, stalled.url)
        gate = threading.Event()
        stalled.say(Say(token_ids=LONG, gate=gate, gate_after=5))
        stream = iter(session.ask("q", stream=True))
        first = next(stream)
        stalled.wait_for(lambda: sampled_by_calls(stalled) == [5])
        stalled.stop_sampling()
        wait_until(lambda: told(service, stalled.url)["status"] == "stalled", 60, "it is found stalled")
        stalled.go_on_sampling()
        gate.set()
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason is not None
        (call,) = session.calls
        assert call["completion_ids"][: len(LONG)] == LONG and call["status"] == "finished"
        assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])
        wait_until(lambda: told(service, stalled.url)["status"] == "serving", 60, "it serves again")


def test_the_only_engine_of_a_policy_keeps_its_calls_while_it_is_stalled(redis_url: str) -> None:
    with running(redis_url, 1) as ((engine,), service), ThreadPoolExecutor() as pool:
        session, late = service.session(), service.session()
        engine.stop_sampling()
        asked = pool.submit(session.answer, "q")
        wait_until(lambda: told(service, engine.url)["status"] == "stalled", 60, "it is found stalled")
        with pytest.raises(APIError, match="stalled"):
            late.ask("new")
        engine.go_on_sampling()
        asked.result(120)
        assert [call["status"] for call in session.calls] == ["finished"]


@pytest.mark.parametrize("counts", [True, False])
def test_a_whole_reply_of_an_engine_at_work_is_no_stall(counts: bool, redis_url: str) -> None:
    """The reply says nothing until its end: the engine's counters go on, or it has none and nothing is known."""
    with running(redis_url, 1) as ((engine,), service), ThreadPoolExecutor() as pool:
        engine.counts = counts
        session, gate = service.session(), threading.Event()
        steps = Steps(engine) if counts else None
        engine.say(Say(token_ids=LONG, gate=gate))
        asked = pool.submit(session.answer, "q")
        engine.wait_for(lambda: asked_of(engine, "/metrics") > (3 * LOOKS if counts else WITHOUT_COUNTERS * LOOKS + 5))
        assert number(service, "verbatim_engine_ejections_total") == 0
        assert told(service, engine.url)["status"] == "serving"
        gate.set()
        asked.result(120)
        assert steps is None or steps.taken
        assert [call["completion_ids"][: len(LONG)] for call in session.calls] == [LONG]


class Steps:
    """The engine works for another service: whenever it is asked what it has counted, it has sampled a token more."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.taken = 0
        counted = engine._metrics

        async def count(exchange: Any, body: Any) -> None:
            self.taken += 1
            for generation in engine.generations[:1]:
                generation.sampled.setdefault(99, []).append(0)
            await counted(exchange, body)

        engine._routes["GET", "/metrics"] = count


@pytest.mark.parametrize("database", [0, 1])
def test_an_engine_that_another_service_pushes_into_is_not_stalled(database: int, redis_url: str, tmp_path: Path) -> None:
    """A process on the same store, or on another one, in keep mode: calls in flight wait with the engine, and go on with it."""
    others = redis_url.removesuffix("/0") + f"/{database}"
    with (
        # Between the last token and the pause a slow machine may stand for a while.
        running(redis_url, 1, engine_stall_seconds=1.5) as ((engine,), service),
        RunningService(engine.url, others) as other,
        ThreadPoolExecutor() as pool,
    ):
        sessions, gate = [service.session() for _ in range(3)], threading.Event()
        engine.say(*(Say(token_ids=LONG, gate=gate, gate_after=5) for _ in sessions))
        asked = [pool.submit(read, session, "q", place > 0) for place, session in enumerate(sessions)]
        engine.wait_for(lambda: sampled_by_calls(engine) == [5, 5, 5])
        hold = engine.weights.hold("update", done=False)
        push = {"version": 1, "path": str(tmp_path), "mode": "keep"}
        pushed = pool.submit(other.request, "POST", "/weights", TRAINER, json=push)
        assert hold.reached.wait(120)
        before = asked_of(engine, "/metrics")
        engine.wait_for(lambda: asked_of(engine, "/metrics") > before + 3 * LOOKS)
        assert number(service, "verbatim_engine_stalled") == 0
        gate.set()
        hold.released.set()
        assert pushed.result(120).json()["applied"]
        for answer in asked:
            answer.result(120)
        for session in sessions:
            (call,) = session.calls
            assert call["status"] == "finished" and call["completion_ids"][: len(LONG)] == LONG


def test_a_connection_that_only_seems_open_costs_no_call_that_was_not_begun(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is gone and something between acknowledges for it: silent connections, and new ones that are never answered."""
    monkeypatch.setattr("proxy.engine.apis.probe.PROBE_TIMEOUT", aiohttp.ClientTimeout(total=2.0))
    with ExitStack() as stack:
        first, other = stack.enter_context(ScriptedEngine()), stack.enter_context(ScriptedEngine())
        wire = stack.enter_context(FaultyWire(first.port))
        urls = [wire.url, other.url]
        service = stack.enter_context(RunningService(urls, redis_url, engine_stall_seconds=STALL_SECONDS))
        wait_until(lambda: number(service, "verbatim_engine_up") == 2, 60, "all serve")
        pool = stack.enter_context(ThreadPoolExecutor())
        session, gate = at_home(service, urls, wire.url), threading.Event()
        first.say(Say(gate=gate))
        asked = pool.submit(session.answer, "q")
        first.wait_for(lambda: bool(calls_at(first)))
        wire.half_open()
        other.say("moved")
        assert asked.result(120)["content"] == "moved"
        assert [call["replica"] for call in session.calls] == [replica_at(other.url).name]
        wire.heal()
        gate.set()
        wait_until(lambda: told(service, wire.url)["status"] == "serving", 60, "it serves again")


def test_a_stream_on_a_dead_connection_ends_while_others_are_served(redis_url: str) -> None:
    """Its tokens are recorded as those of a reply that broke off; the harness is told, and may ask again."""
    with ExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine())
        wire = stack.enter_context(FaultyWire(engine.port))
        service = stack.enter_context(RunningService(wire.url, redis_url, engine_stall_seconds=STALL_SECONDS))
        session, others = service.session(), service.session()
        gate = threading.Event()
        engine.say(Say(token_ids=LONG, gate=gate, gate_after=5))
        stream = iter(session.ask("q", stream=True))
        next(stream)
        engine.wait_for(lambda: sampled_by_calls(engine) == [5])
        wire.half_open()
        wire.heal()
        stop = threading.Event()

        def talk() -> None:
            while not stop.is_set():
                # One of its own may be sent over a kept connection that is dead, too.
                with suppress(APIError):
                    others.ask("how are you")

        talking = threading.Thread(target=talk)
        talking.start()
        try:
            with pytest.raises(APIError):
                list(stream)
        finally:
            stop.set()
            gate.set()
            talking.join()
        (call,) = session.calls
        assert call["completion_ids"] == LONG[: len(call["completion_ids"])] and call["completion_ids"]
        assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])


PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 2.0
vllm:num_requests_running{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="policy"} 1.5e+06
vllm:prompt_tokens_created{engine="0",model_name="policy"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="policy"} 100.0
vllm:generation_tokens_total{engine="1",model_name="policy"} 23.0
"""


def test_what_an_engine_counts_is_summed_over_the_engines_behind_its_server() -> None:
    counts = read_counts(PAGE)
    assert sorted(counts.progress) == [0.25, 123.0, 1.5e6]
    assert (counts.running, counts.queued) == (5.0, 1.0)
    assert not read_counts("# TYPE python_info gauge\npython_info 1.0\n").progress
