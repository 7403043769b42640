"""Many engines behind one service, over real HTTP: replicas that die and return, that are full, and policies side by side."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from openai import APIStatusError, InternalServerError

from proxy.engine.pool.membership import replica_at
from proxy.engine.pool.seats import rank_replicas
from proxy.engine.replica import Replica
from tests.support.engine.scripted_engine import Drop, Fail, Generation, Say, ScriptedEngine, logprobs_of
from tests.support.service.running_service import RunningService, Session, hanging_up, wait_until

Pool = tuple[list[ScriptedEngine], RunningService]
GENERATE = "/inference/v1/generate"


@contextmanager
def running(redis_url: str, count: int, **settings: Any) -> Iterator[Pool]:
    with ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine("qwen3")) for _ in range(count)]
        service = stack.enter_context(RunningService([engine.url for engine in engines], redis_url, **settings))
        wait_until(lambda: number(service, "verbatim_engine_up") == count, 60, "all serve")
        yield engines, service


def name(engine: ScriptedEngine) -> str:
    return engine.url.removeprefix("http://")


def spread(service: RunningService, engines: list[ScriptedEngine], **fields: Any) -> list[Session]:
    """Four sessions for each engine, whose calls go there first."""
    members = [replica_at(engine.url) for engine in engines]
    homes: dict[str, list[str]] = {member.name: [] for member in members}
    for number in itertools.count():
        homes[rank_replicas(f"s{number}", members)[0].name].append(f"s{number}")
        if all(len(ids) >= 4 for ids in homes.values()):
            return [service.session(session_id=session_id, **fields) for ids in homes.values() for session_id in ids[:4]]
    raise AssertionError


def home(service: RunningService, session: Session) -> str:
    """The replica that the session's next call goes to while there is room: where a first call went."""
    session.ask("where am I")
    replica: str = session.calls[-1]["replica"]
    return replica


def home_first(service: RunningService, session: Session, engines: list[ScriptedEngine]) -> list[ScriptedEngine]:
    where = home(service, session)
    return sorted(engines, key=lambda engine: name(engine) != where)


def number(service: RunningService, metric: str) -> float:
    """The metric's value, over all its labels."""
    page = service.request("GET", "/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((f"{metric} ", f"{metric}{{")))


@pytest.mark.case(51)
def test_one_of_three_replicas_is_killed_and_returns_and_no_harness_notices(redis_url: str) -> None:
    """A dozen sessions talk meanwhile. A call that had begun to be sampled fails with a 502, which every SDK tries again; one
    that had not goes to another replica inside the service."""
    with running(redis_url, 3) as (engines, service):
        sessions = spread(service, engines, max_retries=4)
        dead, turns = engines[0], [0] * len(sessions)
        stop = threading.Event()

        def talk(place: int) -> None:
            history: list[Any] = []
            while not stop.is_set():
                history.append({"role": "user", "content": f"turn {turns[place]} of {place}"})
                history.append(sessions[place].answer(history))
                turns[place] += 1

        def rounds(more: int) -> None:
            goals = [turn + more for turn in turns]
            wait_until(lambda: all(now >= goal for now, goal in zip(turns, goals, strict=True)), 120, "everybody went on")

        with ThreadPoolExecutor(len(sessions)) as pool:
            talks = [pool.submit(talk, place) for place in range(len(sessions))]
            try:
                rounds(1)
                port = dead.port
                dead.stop()
                rounds(1)
                before = len(dead.generations)
                dead.start(port)
                wait_until(lambda: len(dead.generations) > before, 60, "its sessions are back")
                rounds(1)
            finally:
                stop.set()
            for talked in talks:
                talked.result()
        used: Counter[str] = Counter()
        for session in sessions:
            _, accounting = session.trajectories()
            calls = session.calls
            for call in calls:
                assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])
                used[call["replica"]] += 1
            assert {item["reason"] for item in accounting["quarantined"]} <= {"not_delivered"}
        assert set(used) == {name(engine) for engine in engines}


def test_sessions_stay_where_they_are_and_a_lost_replica_moves_only_its_own(redis_url: str) -> None:
    with running(redis_url, 3) as (engines, service):
        sessions = spread(service, engines, max_retries=2)
        before = [home(service, session) for session in sessions]
        assert [home(service, session) for session in sessions] == before
        engines[1].stop()
        after = [home(service, session) for session in sessions]
        for was, now in zip(before, after, strict=True):
            assert now == was or was == name(engines[1])
        assert name(engines[1]) not in after


def test_a_call_whose_engine_refuses_it_unsampled_goes_to_the_next_one(redis_url: str) -> None:
    """Busy, or gone since the last probe: the call is recorded under the replica that took it, and no intent is left."""
    with running(redis_url, 2, engine_watch_seconds=60.0) as (engines, service):
        session = service.session()
        first, other = home_first(service, session, engines)
        first.fault(GENERATE, Fail(503, "too busy"))
        session.ask("q1")
        first.fault("/v1/chat/completions/render", Fail(429, "too many requests"))
        session.ask("q2")
        first.fault("/v1/chat/completions/render", Drop(), Drop())
        session.ask("q3")
        first.stop()
        session.ask("q4")
        calls = session.calls
        assert [call["replica"] for call in calls] == [name(first), *[name(other)] * 4]
        assert {call["status"] for call in calls} == {"finished"}
        assert len(other.generations) == 4
        assert number(service, "verbatim_engine_retries_total") >= 3
        wait_until(lambda: number(service, "verbatim_engine_ejections_total") == 1, 60, "it was found to be gone")
        assert [item for item in session.trajectories()[1]["quarantined"] if item["reason"] == "dangling"] == []


def test_an_engine_that_does_not_even_accept_a_connection_costs_no_call(redis_url: str) -> None:
    """Its machine is gone, or its queue of connections is full: nothing was sent, so the next replica takes the call."""
    with running(redis_url, 2, engine_connect_seconds=3.0) as (engines, service):
        session = service.session()
        first, other = home_first(service, session, engines)
        first.stop()
        with clogged(first.port):
            session.ask("q")
        assert session.calls[-1]["replica"] == name(other)


@contextmanager
def clogged(port: int) -> Iterator[None]:
    """A port where connections are neither accepted nor refused."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield


def test_a_call_of_which_a_token_may_have_been_sampled_is_not_tried_again(redis_url: str) -> None:
    with running(redis_url, 2) as (engines, service):
        session = service.session()
        first, other = home_first(service, session, engines)
        first.fault(GENERATE, Drop())
        with pytest.raises(InternalServerError) as failed:
            session.ask("q1")
        assert failed.value.status_code == 502
        first.say(Say("hello world", break_after=1))
        with pytest.raises((InternalServerError, httpx.HTTPError, APIStatusError)):
            session.ask("q2")
        assert other.generations == []


def test_when_every_replica_refuses_the_call_it_fails_as_one_engine_would(redis_url: str) -> None:
    with running(redis_url, 4) as (engines, service):
        session = service.session()
        for engine in engines:
            engine.fault(GENERATE, Fail(503, "too busy"))
        with pytest.raises(InternalServerError, match="too busy") as busy:
            session.ask("q")
        assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (503, "1")
        asked = [request for engine in engines for request in engine.received if request.path == GENERATE and request.body]
        assert len(asked) == 3
        session.ask("q")


@contextmanager
def gated(engines: list[ScriptedEngine]) -> Iterator[threading.Event]:
    """Every reply waits for the event before its first token; it is set at the end whatever happens."""
    gate = threading.Event()
    for engine in engines:
        engine.script = lambda generation, index: Say("hello world", gate=gate)
    try:
        yield gate
    finally:
        gate.set()


def sampling(engines: list[ScriptedEngine]) -> int:
    return sum(len(engine.generations) for engine in engines)


def queued(service: RunningService) -> float:
    return number(service, "verbatim_engine_queue")


def test_a_full_replica_gives_its_sessions_to_their_second_choice_then_calls_wait(redis_url: str) -> None:
    with running(redis_url, 2, engine_max_calls=2) as (engines, service):
        session = service.session()
        first = home(service, session)
        with ThreadPoolExecutor(8) as pool, gated(engines) as gate:
            before = sampling(engines)
            asked = [pool.submit(session.ask, f"question {place}") for place in range(6)]
            wait_until(lambda: sampling(engines) - before == 4 and queued(service) == 2, 60, "four are sampled, two wait")
            assert number(service, "verbatim_engine_calls_in_flight") == 4
            gate.set()
            for answer in asked:
                assert answer.result().choices[0].message.content == "hello world"
        used = Counter(call["replica"] for call in session.calls[1:])
        assert set(used) == {name(engine) for engine in engines} and used[first] >= 2
        assert (queued(service), number(service, "verbatim_engine_calls_in_flight")) == (0, 0)
        assert number(service, "verbatim_engine_queue_seconds_count") == 7


def test_a_session_with_many_calls_does_not_keep_another_waiting(redis_url: str) -> None:
    """One seat. The greedy session has eight calls waiting when the modest one asks: it is served second."""
    served: list[str] = []

    def script(generation: Generation, index: int) -> Say:
        served.append(str(generation.messages or generation.prompt))
        return Say("hello", gate=gates["first" if len(served) == 1 else "all"])

    gates = {"first": threading.Event(), "all": threading.Event()}
    with running(redis_url, 1, engine_max_calls=1) as ((engine,), service), ThreadPoolExecutor(10) as pool:
        greedy, modest = service.session(), service.session()
        engine.script = script
        try:
            asked = [pool.submit(greedy.ask, f"greedy {place}") for place in range(9)]
            wait_until(lambda: queued(service) == 8, 60, "eight wait")
            asked.append(pool.submit(modest.ask, "modest"))
            wait_until(lambda: queued(service) == 9, 60, "and one more")
        finally:
            gates["first"].set()
            gates["all"].set()
        for answer in asked:
            answer.result()
    assert ["modest" in prompt for prompt in served].index(True) == 2, "after the one under way and one of the greedy's"


@pytest.fixture
def full(redis_url: str) -> Iterator[tuple[ScriptedEngine, RunningService, Future[Any]]]:
    """An engine with one seat, which a call has until the test is over."""
    settings = {"engine_max_calls": 1, "keepalive_seconds": 0.1}
    with running(redis_url, 1, **settings) as ((engine,), service), ThreadPoolExecutor(1) as pool, gated([engine]):
        holder = service.session(session_id="holder")
        holding = pool.submit(lambda: holder.ask("hold").choices[0].message.content)
        engine.wait_for(lambda: len(engine.generations) == 1)
        yield engine, service, holding


def test_a_stream_that_waits_is_kept_alive_and_leaves_when_its_harness_hangs_up(
    full: tuple[ScriptedEngine, RunningService, Future[Any]],
) -> None:
    engine, service, holding = full
    session = service.session()
    body = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "stream": True}
    with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key) as connection:
        heard = b""
        while heard.count(b"data:") < 3:
            more = connection.recv(4096)
            assert more, heard
            heard += more
        assert heard.startswith(b"HTTP/1.1 200") and queued(service) == 1
    wait_until(lambda: queued(service) == 0, 60, "it left")
    assert not holding.done() and session.calls == [] and len(engine.generations) == 1


def test_a_call_that_waits_ends_when_its_session_is_closed(full: tuple[ScriptedEngine, RunningService, Future[Any]]) -> None:
    _, service, holding = full
    session = service.session()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(session.ask, "q")
        wait_until(lambda: queued(service) == 1, 60, "it waits")
        session.close("cancelled")
        with pytest.raises(InternalServerError, match="cut before it was sampled"):
            asked.result(timeout=60)
    assert queued(service) == 0 and session.calls == [] and not holding.done()


def test_a_call_that_waits_in_another_process_ends_too_when_its_session_is_closed(
    full: tuple[ScriptedEngine, RunningService, Future[Any]], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.engine.pool.seats.LOOK_SECONDS", 0.1)
    _, service, _ = full
    session = service.session()
    with RunningService(service.settings.engine, service.settings.redis or redis_url) as other, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(session.ask, "q")
        wait_until(lambda: queued(service) == 1, 60, "it waits")
        closed = other.request("POST", f"/sessions/{session.session_id}/close", json={"status": "cancelled"})
        assert closed.status_code == 200
        with pytest.raises(APIStatusError) as refused:
            asked.result(timeout=60)
    assert refused.value.status_code in (409, 502)
    assert queued(service) == 0


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "q"}]},
    "/v1/responses": {"input": "q"},
    "/v1/messages": {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9},
    "/v1beta/models/policy:generateContent": {"contents": [{"role": "user", "parts": [{"text": "q"}]}]},
}


@pytest.mark.parametrize("path", ASKED)
def test_a_call_that_waited_too_long_is_told_to_come_back_in_its_dialect(path: str, redis_url: str) -> None:
    settings = {"engine_max_calls": 1, "queue_seconds": 0.2}
    with running(redis_url, 1, **settings) as ((engine,), service), ThreadPoolExecutor(1) as pool, gated([engine]):
        session = service.session()
        holding = pool.submit(session.ask, "hold")
        engine.wait_for(lambda: len(engine.generations) == 1)
        url = f"{service.url}/s/{session.session_id}{path}"
        key = {"Authorization": f"Bearer {session.api_key}", "anthropic-version": "2023-06-01"}
        answer = httpx.post(url, json={"model": "policy", **ASKED[path]}, headers=key, timeout=120)
        assert (answer.status_code, answer.headers["retry-after"]) in ((503, "5"), (529, "5"))
        assert "no engine had room for the call within 0.2 seconds" in json.dumps(answer.json())
        assert not holding.done() and queued(service) == 0


@contextmanager
def policies(redis_url: str, **settings: Any) -> Iterator[tuple[dict[str, ScriptedEngine], RunningService]]:
    """The default policy's engine serves "policy"; that of the policy "judge" serves "large", that of "critic" serves "policy"."""
    with ExitStack() as stack:
        default = stack.enter_context(ScriptedEngine("qwen3"))
        judge = stack.enter_context(ScriptedEngine("qwen3", model="large", max_model_len=4096))
        critic = stack.enter_context(ScriptedEngine("qwen3"))
        engines = [default.url, f"judge={judge.url}", f"critic={critic.url}"]
        service = stack.enter_context(RunningService(engines, redis_url, **settings))
        wait_until(lambda: number(service, "verbatim_engine_up") == 3, 60, "all serve")
        yield {"": default, "judge": judge, "critic": critic}, service


@pytest.mark.parametrize("api", ["token", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_goes_to_the_policy_it_asks_for(api: str, stream: bool, redis_url: str) -> None:
    with policies(redis_url, engine_api=api) as (engines, service):
        session = service.session()
        for model, policy in [("policy", ""), ("judge", "judge"), ("large", "judge"), ("critic", "critic")]:
            engines[policy].say(Say(f"hello from {model}"))
            answer = session.client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": f"to {model}"}], stream=stream
            )
            parts = answer if stream else [answer]
            said = "".join((part.choices[0].delta if stream else part.choices[0].message).content or "" for part in parts)
            assert said == f"hello from {model}"
            assert session.calls[-1]["replica"] == name(engines[policy])
        engines[""].say("hello from the default one")
        answer = session.client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "to gpt-5"}])
        assert (answer.model, answer.choices[0].message.content) == ("gpt-5", "hello from the default one")
        assert {model.id for model in session.client.models.list()} == {"policy", "judge", "large", "critic"}
        assert session.client.models.retrieve("judge").id == "judge"


def test_prompts_and_token_counts_know_policies_too(redis_url: str) -> None:
    with policies(redis_url, engine_api="token") as (engines, service):
        session = service.session()
        engines["judge"].say(Say("fine"))
        assert session.client.completions.create(model="judge", prompt="how is it?", max_tokens=5).choices[0].text == "fine"
        key = {"x-api-key": session.api_key, "anthropic-version": "2023-06-01"}
        asked = {"model": "judge", "messages": [{"role": "user", "content": "q"}]}
        url = f"{service.url}/s/{session.session_id}/v1/messages/count_tokens"
        before = len(engines["judge"].received)
        assert httpx.post(url, json=asked, headers=key).json()["input_tokens"] > 0
        assert len(engines["judge"].received) > before
        assert session.calls[0]["replica"] == name(engines["judge"])


def test_a_policy_whose_engine_is_down_is_not_answered_by_another(redis_url: str) -> None:
    with policies(redis_url) as (engines, service):
        session = service.session()
        engines["judge"].stop()
        for model in ("judge", "large"):
            with pytest.raises(InternalServerError) as down:
                session.client.chat.completions.create(model=model, messages=[{"role": "user", "content": "q"}])
            assert down.value.status_code == 503
        session.ask("q")


@pytest.mark.parametrize("frozen", ["judge", "large"])
def test_a_frozen_models_calls_are_recorded_and_never_trained(frozen: str, redis_url: str) -> None:
    with policies(redis_url, frozen_models=[frozen]) as (_, service):
        session = service.session()
        session.ask("solve it")
        for model in ("judge", "large"):
            asked = [{"role": "user", "content": f"how good is it, {model}?"}]
            session.client.chat.completions.create(model=model, messages=asked)
        solved, *judged = session.calls
        rows, accounting = session.trajectories()
        assert [row["call_ids"] for row in rows] == [[solved["call_id"]]]
        expected = {call["call_id"]: len(call["completion_ids"]) for call in judged}
        quarantined = {
            item["call_id"]: item["tokens"] for item in accounting["quarantined"] if item["reason"] == "frozen_model"
        }
        assert quarantined == expected and all(quarantined.values())
        for call in judged:
            assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])
            assert call["reply"]["content"] is not None and call["status"] == "finished"


def test_a_note_is_logged_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica("gpu1", "http://gpu1")
    for sentence in ("returns no token ids", "returns no token ids", "returns no logprobs"):
        replica.note("ids", sentence)
    assert [record.getMessage() for record in caplog.records] == [
        "engine gpu1 returns no token ids",
        "engine gpu1 returns no logprobs",
    ]
    assert replica.notes == {"ids": "returns no logprobs"}
    replica.note("ids", "")
    assert replica.notes == {}
