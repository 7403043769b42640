"""A session's end, with several processes at work: calls are cut wherever they run, nothing is recorded after the freeze, what
nobody will record any more is seen as dangling, and what nobody uses any more is closed."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from contract.sessions import Fork
from proxy.api.closing import close_idle, close_session, delete_session, load_session
from proxy.app import build_services
from proxy.call import peers
from proxy.errors import Conflict, RequestError
from proxy.rows import CallsCursor, session_rows
from proxy.services import Services
from proxy.settings import Settings
from proxy.store import keys
from proxy.store.connection import StoreConnection
from proxy.store.service import RedisClock
from proxy.store.sessions import SessionStore
from proxy.store.states import Intent, SessionInfo, SessionState
from proxy.timeline import CancelScope
from reconstruct.codec import decode, encode
from tests.proxy.call.test_delivered import OWN
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.redis_server import RedisKind, RedisServer, running_redis
from tests.support.service.running_service import RunningService, Session, streamed_text, wait_until
from tests.support.service.verbatim_process import Serving
from tests.support.sessions.recorded_calls import record

# Two services on one Redis, and a call under way in the first


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def both(redis_kind: RedisKind, engine: ScriptedEngine) -> Iterator[tuple[RunningService, RunningService]]:
    redis_kind.flushall()
    with (
        RunningService(engine.url, redis_kind.url, protocol=OWN) as first,
        RunningService(engine.url, redis_kind.url, protocol=OWN) as second,
    ):
        yield first, second


@contextmanager
def under_way(engine: ScriptedEngine, harness: OpenAI, *, stream: bool = True) -> Iterator[Future[str]]:
    """The harness's call, whose engine stops after two tokens until it is cut. Gives the text that the harness will get."""
    gate = threading.Event()
    engine.reset().say(Say("hello world in Paris", gate=gate, gate_after=2))

    def call() -> str:
        answer: Any = harness.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "q"}], stream=stream
        )
        return streamed_text(answer)[0] if stream else answer.choices[0].message.content

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call)
        try:
            engine.wait_for(lambda: bool(engine.generations) and len(engine.last.sampled.get(0, ())) == 2)
            yield answer
        finally:
            gate.set()


def harness_of(created: dict[str, Any], service: Serving) -> OpenAI:
    """The harness of a session that was created anywhere, pointed to this service."""
    http = httpx.Client(verify=False, timeout=120)
    base_url = f"{service.url}/s/{created['session_id']}/v1"
    return OpenAI(base_url=base_url, api_key=created["api_key"], max_retries=0, http_client=http)


def shown(service: RunningService | Serving, session: Session, what: str = "calls") -> Any:
    answer = service.request("GET", f"/sessions/{session.session_id}/{what}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def statuses(service: RunningService | Serving, session: Session) -> list[str]:
    return [call["status"] for call in shown(service, session)["calls"]]


def close(service: RunningService | Serving, session: Session, status: str = "cancelled", **fields: Any) -> httpx.Response:
    return service.request("POST", f"/sessions/{session.session_id}/close", json={"status": status, **fields})


@pytest.mark.parametrize("closing", [0, 1], ids=["its own process", "another"])
def test_a_close_cuts_and_records_the_call_in_flight(
    engine: ScriptedEngine, both: tuple[RunningService, RunningService], closing: int
) -> None:
    here, there = both[0], both[closing]
    session = here.session()
    with under_way(engine, session.client) as answer:
        closed = close(there, session, "completed", reward=1.0)
        assert closed.status_code == 200
        assert closed.json()["calls"] == 1, "it is recorded when the close answers"
        assert answer.result() == "hello world"
    (call,) = shown(there, session)["calls"]
    assert (call["finish_reason"], call["status"], len(call["completion_ids"])) == ("abort", "aborted", 2)
    assert call["delivered"]
    accounting = shown(there, session, "trajectories")["accounting"]
    assert (accounting["sampled_tokens"], accounting["exported_tokens"]) == (2, 2), "the harness was given them"


@pytest.mark.case(52)
@pytest.mark.parametrize("deleting", [0, 1], ids=["its own process", "another"])
def test_a_delete_ends_the_call_in_flight_and_leaves_no_key(
    engine: ScriptedEngine, both: tuple[RunningService, RunningService], redis_kind: RedisKind, deleting: int
) -> None:
    here, there = both[0], both[deleting]
    session = here.session(group_id="g", group_size=2)
    with under_way(engine, session.client, stream=False) as answer:
        assert there.request("DELETE", f"/sessions/{session.session_id}").status_code == 204
        answer.exception(timeout=60)
        engine.wait_for(lambda: engine.last.aborted or engine.last.disconnected)
    assert [key for key in redis_kind.all_keys() if session.session_id.encode() in key or b"{g:g}" in key] == []
    assert there.request("GET", f"/sessions/{session.session_id}").status_code == 404
    with pytest.raises(APIError, match="does not exist"):
        session.ask("again")


def test_a_call_under_way_is_in_flight_for_every_process_and_not_quarantined(
    engine: ScriptedEngine, both: tuple[RunningService, RunningService]
) -> None:
    here, there = both
    session = here.session()
    with under_way(engine, session.client) as answer:
        for service in both:
            assert statuses(service, session) == ["in_flight"]
            assert shown(service, session, "trajectories")["accounting"]["quarantined"] == []
        close(there, session)
        answer.result()


def test_a_key_opens_nothing_once_another_process_has_closed_its_session(
    engine: ScriptedEngine, both: tuple[RunningService, RunningService]
) -> None:
    """This process still has the session's tree in memory, which says that it is open."""
    here, there = both
    engine.reset().say("hello")
    session = here.session()
    session.ask("q")
    assert close(there, session).status_code == 200
    body = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "q"}]}
    for answer in (session.request("GET", "/v1/models"), session.post("/v1/messages/count_tokens", body)):
        assert answer.status_code == 409, answer.text


# Processes that die


@pytest.mark.case(43)
def test_a_call_of_a_killed_process_is_dangling_and_holds_no_close(
    engine: ScriptedEngine, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "DEAD_SECONDS", 0.1)
    redis_server.flushall()
    with (
        RunningService(engine.url, redis_server.url) as left,
        Serving("--engine", engine.url, "--redis", redis_server.url, data_dir=tmp_path) as killed,
    ):
        session = left.session()
        created = {"session_id": session.session_id, "api_key": session.api_key}
        with harness_of(created, killed) as harness, under_way(engine, harness) as answer:
            assert statuses(left, session) == ["in_flight"]
            killed.send(signal.SIGKILL)
            answer.exception(timeout=60)
        with redis_server.client() as client:
            # So much time has passed since their last beats.
            for name in client.zrange(keys.PROCESSES, 0, -1):
                client.zincrby(keys.PROCESSES, -peers.LIFE_SECONDS, name)
        wait_until(lambda: statuses(left, session) == ["dangling"], 60, "nobody beats for it any more")
        (dangling,) = shown(left, session, "trajectories")["accounting"]["quarantined"]
        assert (dangling["tokens"], dangling["reason"]) == (0, "dangling")
        assert close(left, session, "completed", reward=1.0).status_code == 200
        assert statuses(left, session) == ["dangling"]


def test_after_a_restart_on_the_same_data_the_calls_of_the_last_run_dangle_at_once(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    with Serving("--engine", engine.url, data_dir=tmp_path) as first:
        created = first.request("POST", "/sessions", json={"session_id": "s"}).json()
        with harness_of(created, first) as harness, under_way(engine, harness) as answer:
            assert [call["status"] for call in calls_of(first)] == ["in_flight"]
            first.send(signal.SIGKILL)
            answer.exception(timeout=60)
    with Serving("--engine", engine.url, data_dir=tmp_path) as second:
        assert [call["status"] for call in calls_of(second)] == ["dangling"]


def calls_of(service: Serving) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.request("GET", "/sessions/s/calls").json()["calls"]
    return found


# Several processes as the store sees them: each with services of its own, and time that the test decides


@asynccontextmanager
async def process(url: str, **settings: Any) -> AsyncIterator[Services]:
    """What one process holds, beating and listening."""
    made = Settings(redis=url, **settings)
    connection = StoreConnection.to(made, url)
    services = build_services(made, connection)
    services.peers.start()
    try:
        yield services
    finally:
        await services.peers.stop()
        await connection.close()


@pytest.fixture
async def own(redis_kind: RedisKind) -> AsyncIterator[Services]:
    redis_kind.flushall()
    async with process(redis_kind.url, close_wait_seconds=60.0) as services:
        yield services


def intent(call_id: str, owner: str = "", started_at: float = 1.0) -> Intent:
    return Intent(call_id, None, b"digest", "replica", started_at, owner)


async def opened(services: Services, session_id: str = "s", **fields: Any) -> None:
    await services.sessions.create(SessionInfo(session_id, b"hash", time.time(), **fields))


async def begun_elsewhere(services: Services, url: str, owner: str, call_id: str) -> None:
    """An intent that the process `owner` signed."""
    connection = StoreConnection(url)
    begun = await SessionStore(connection, owner).begin("s", 0, intent(call_id))
    assert begun.accepted
    await connection.close()


class Clock:
    """In the place of the module `time`, where the monotonic time stands still, and of Redis's clock, `ahead` of the real one."""

    def __init__(self) -> None:
        self.now, self.ahead = 0.0, 0.0

    def monotonic(self) -> float:
        return self.now

    async def redis_time(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which closes wait for other processes, and sessions are idle."""
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    monkeypatch.setattr(RedisClock, "now", clock.redis_time)
    return clock


async def closing_waits(own: Services) -> asyncio.Task[SessionState]:
    """The close of the session `s`, which has asked the other processes to cut its calls."""
    closing_it = asyncio.create_task(close_session(own, "s", "completed", 1.0, None))
    assert (await own.peers._store.read_cuts("", 60.0))[0] == ["s"]
    return closing_it


async def is_waited_for(closing_it: asyncio.Task[SessionState]) -> bool:
    """Also when the close has looked a few times more."""
    await asyncio.sleep(4 * peers.POLL_SECONDS)
    return not closing_it.done()


async def test_a_close_waits_no_longer_than_it_may_for_a_process_that_does_not_end_its_call(
    own: Services, redis_kind: RedisKind, clock: Clock
) -> None:
    await opened(own)
    await begun_elsewhere(own, redis_kind.url, "stubborn", "c1")
    await own.peers._store.beat("stubborn", 60.0)
    closing_it = await closing_waits(own)
    clock.now = 59.0
    assert await is_waited_for(closing_it)
    clock.now = 60.0
    state = await closing_it
    assert state.status == "completed"
    with pytest.raises(Conflict, match="closed as completed"):
        await own.sessions.commit("s", "c1", {"c1": record("c1", "s", prompt=[1], sampled=[2])})


async def test_a_close_in_another_process_counts_every_reply_that_was_delivered(
    own: Services, redis_kind: RedisKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c0 and c1 are equal requests. Were the outcome of one missing, it would pass for an attempt."""
    monkeypatch.setattr("proxy.store.outcomes.CARRIED_WITHIN_SECONDS", 3600.0)
    await opened(own)
    async with process(redis_kind.url) as other:
        for number, call_id in enumerate(("c0", "c1")):
            await other.sessions.begin("s", number, intent(call_id))
            equal = replace(decode(record(call_id, "s", prompt=[1], sampled=[2])), digest=b"q", started_at=float(number))
            await other.sessions.commit("s", call_id, {call_id: encode(equal)})
            other.sessions.note_answered("s", [call_id], delivered=True)
        assert await own.sessions.find_holders("s") == {other.peers.process}, "it has not told of every reply"
        state = await close_session(own, "s", "completed", 1.0, None)
        built = await session_rows(own, state)
        assert (built.accounting.exported_tokens, built.accounting.quarantined) == (2, ())
        assert await own.sessions.load_delivered("s") == {"c0", "c1"}


async def test_a_process_that_stops_has_told_what_became_of_its_replies(
    own: Services, redis_kind: RedisKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c1 is on its way when the process stops."""
    monkeypatch.setattr("proxy.store.outcomes.CARRIED_WITHIN_SECONDS", 3600.0)
    await opened(own)
    async with process(redis_kind.url) as other:
        for number, call_id in enumerate(("c0", "c1")):
            await other.sessions.begin("s", number, intent(call_id))
            await other.sessions.commit("s", call_id, {call_id: record(call_id, "s", prompt=[1], sampled=[2])})
        other.sessions.note_answered("s", ["c0"], delivered=True)
    assert await own.sessions.find_holders("s") == set()
    assert await own.sessions.load_delivered("s") == {"c0"}


async def test_a_close_does_not_wait_for_a_process_that_is_dead(own: Services, redis_kind: RedisKind, clock: Clock) -> None:
    await opened(own)
    await begun_elsewhere(own, redis_kind.url, "dead", "c1")
    closing_it = await closing_waits(own)
    clock.now = peers.DEAD_SECONDS
    await asyncio.wait_for(closing_it, 60)


@pytest.mark.parametrize("asked_again", [False, True])
async def test_the_last_reply_of_a_process_that_died_counts_as_delivered_unless_it_was_asked_for_again(
    own: Services, redis_kind: RedisKind, clock: Clock, asked_again: bool
) -> None:
    """It died with c0 recorded and could not tell whether the harness got it. c1, in this process, asks the same or something else."""
    await opened(own)
    connection = StoreConnection.to(Settings(), redis_kind.url)
    dead = SessionStore(connection, "dead")
    first = decode(record("c0", "s", prompt=[1], sampled=[2]))
    await dead.begin("s", 0, intent("c0"))
    await dead.commit("s", "c0", {"c0": encode(first)})
    await connection.close()
    second = replace(decode(record("c1", "s", prompt=[1], sampled=[3, 4])), started_at=9.0)
    if asked_again:
        second = replace(second, fingerprint=first.fingerprint, root_key=first.root_key)
    await own.sessions.begin("s", 1, intent("c1"))
    await own.sessions.commit("s", "c1", {"c1": encode(second)})
    own.sessions.note_answered("s", ["c1"], delivered=True)
    open_rows = await session_rows(own, await load_session(own, "s"))
    assert open_rows.accounting.exported_tokens == 3, "what may be on its way counts as delivered"
    closing_it = await closing_waits(own)
    clock.now = peers.DEAD_SECONDS
    state = await asyncio.wait_for(closing_it, 60)
    accounting = (await session_rows(own, state)).accounting
    lost = [("c0", 1, "not_delivered")] if asked_again else []
    assert [(item.call_id, item.tokens, item.reason) for item in accounting.quarantined] == lost
    assert (accounting.exported_tokens, accounting.complete) == (2 if asked_again else 3, True)


async def test_a_process_that_seems_dead_only_because_its_store_was_away_is_waited_for(
    own: Services, redis_kind: RedisKind, clock: Clock
) -> None:
    """Its beats came too late for a while. The close gives it the time to beat again, and then to record its call."""
    await opened(own)
    await begun_elsewhere(own, redis_kind.url, "away", "c1")
    closing_it = await closing_waits(own)
    clock.now = peers.DEAD_SECONDS * 0.9
    assert await is_waited_for(closing_it)
    await own.peers._store.beat("away", 60.0)
    clock.now = peers.DEAD_SECONDS * 3
    assert await is_waited_for(closing_it)
    await own.sessions.commit("s", "c1", {"c1": record("c1", "s", prompt=[1], sampled=[2])})
    state = await closing_it
    assert state.calls == 1


async def test_a_process_that_missed_the_word_hears_it_afterwards(redis_kind: RedisKind) -> None:
    """The sessions to cut are kept, so that a process whose connection broke for a moment reads on where it was."""
    redis_kind.flushall()
    async with process(redis_kind.url) as own:
        scope = CancelScope("s", "c1")
        peers = own.peers._store
        for number in range(5):
            await peers.request_cut(f"earlier-{number}")
        heard, mark = await peers.read_cuts("", 1.0)
        assert heard == [f"earlier-{number}" for number in range(5)]
        await peers.request_cut("s")
        assert (await peers.read_cuts(mark, 1.0))[0] == ["s"]
        own.inflight.enter(scope)
        await peers.request_cut("s")
        async with asyncio.timeout(60):
            while not scope.cancelled:
                await asyncio.sleep(0.01)
        own.inflight.leave(scope)


async def test_what_the_store_could_not_be_told_is_settled_later(own: Services, redis_kind: RedisKind) -> None:
    """A call ends while the store is away: its intent is taken away, or nobody's, as soon as the store is back."""
    await opened(own)
    await own.sessions.begin("s", 0, intent("lost"))
    assert await own.peers.in_flight(await own.sessions.load_intents("s")) == set(), "the process itself knows at once"
    async with process(redis_kind.url) as other:
        await until_it_beats(other, own.peers.process)
        assert await other.peers.in_flight(await other.sessions.load_intents("s")) == {"lost"}
        await own.sessions.abandon_intents(own.inflight.list_running())
        assert await other.peers.in_flight(await other.sessions.load_intents("s")) == set()
        assert [left.call_id for left in await other.sessions.load_intents("s")] == ["lost"]


async def test_a_call_that_begins_while_others_are_settled_keeps_its_intent(own: Services) -> None:
    """Its intent was given up, or dropped: another process then froze the session without waiting for the call."""
    await opened(own)
    await own.sessions.commit("s", "", {"c1": record("c1", "s", prompt=[1], sampled=[2])})
    own.sessions.note_answered("s", ["c1"], delivered=True)

    async def begin() -> None:
        own.inflight.enter(CancelScope("s", "c2"))
        await own.sessions.begin("s", 1, intent("c2"))

    await asyncio.gather(own.sessions.abandon_intents(own.inflight.list_running()), begin())
    assert [(left.call_id, left.process) for left in await own.sessions.load_intents("s")] == [("c2", own.peers.process)]
    assert await own.sessions.load_delivered("s") == {"c1"}


async def until_it_beats(services: Services, name: str) -> None:
    """Until the process of that name is alive for these services."""
    async with asyncio.timeout(60):
        while name not in await services.peers._store.find_alive({name}):
            await asyncio.sleep(0.02)


async def test_a_process_that_stops_is_gone_at_once(own: Services, redis_kind: RedisKind) -> None:
    async with process(redis_kind.url) as other:
        name = other.peers.process
        await until_it_beats(own, name)
    assert await own.peers._store.find_alive({name}) == set()


# Sessions that nobody uses any more


@asynccontextmanager
async def several(url: str, count: int, **settings: Any) -> AsyncIterator[list[Services]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(process(url, **settings)) for _ in range(count)]


async def test_an_idle_session_is_closed_as_timeout_by_one_process(redis_kind: RedisKind, clock: Clock) -> None:
    redis_kind.flushall()
    async with several(redis_kind.url, 5, session_idle_seconds=0.5) as processes:
        clock.ahead = -60.0
        for number in range(20):
            await opened(processes[0], f"s{number}", group_id="g", group_size=20)
        assert await close_idle(processes[0]) == 0
        clock.ahead = 1.0
        expired = await asyncio.gather(*(close_idle(services) for services in processes))
        assert sum(expired) == 20
        for number in range(20):
            state = await processes[0].sessions.load(f"s{number}")
            assert state is not None
            assert (state.status, state.error) == ("timeout", "no call for 0.5 seconds")
        assert await processes[0].delivery.find_announced(time.time() + 60) == []
        assert await processes[0].sessions.find_unclosed(time.time() + 60) == []


async def test_calls_keep_a_session_from_expiring_and_dangling_ones_do_not(
    redis_kind: RedisKind, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "DEAD_SECONDS", 0.0)
    redis_kind.flushall()
    async with process(redis_kind.url, session_idle_seconds=600.0) as own:
        await opened(own)
        scope = CancelScope("s", "c1")
        own.inflight.enter(scope)
        await own.sessions.begin("s", 0, intent("c1"))
        clock.ahead = 700.0
        assert await close_idle(own) == 0, "a call is under way"
        await own.sessions.drop_intent("s", "c1")
        own.inflight.leave(scope)
        assert await close_idle(own) == 0, "one has just failed"
        await begun_elsewhere(own, redis_kind.url, "dead", "c2")
        clock.ahead = 1400.0
        assert await close_idle(own) == 1, "a dead process's call is no activity"


async def test_a_call_that_waits_for_an_engine_keeps_its_session_from_expiring(
    redis_kind: RedisKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no intent yet: a push of weights that held calls for longer than the idle time ended their runs."""
    monkeypatch.setattr(peers, "BEAT_SECONDS", peers.RETRY_SECONDS)
    redis_kind.flushall()
    async with process(redis_kind.url, session_idle_seconds=600.0) as own:
        started_at = time.time()
        await own.sessions.create(SessionInfo("s", b"hash", started_at - 1000.0))
        own.inflight.enter(CancelScope("s", "c1"))
        async with asyncio.timeout(60):
            while (await session_of(own)).updated_at < started_at - 10.0:
                await asyncio.sleep(0.02)
        assert await close_idle(own) == 0
        own.inflight.leave(next(iter(own.inflight._scopes["s"])))


async def session_of(services: Services) -> SessionState:
    state = await services.sessions.load("s")
    assert state is not None
    return state


async def test_a_session_is_not_closed_in_the_moment_in_which_a_call_begins(own: Services) -> None:
    await opened(own)
    later = time.time() + 60
    await own.sessions.begin("s", 0, intent("c1"))
    assert not await own.sessions.expire("s", later, later, 0), "one more intent than the caller knew of"
    assert await own.sessions.expire("s", later, later, 1)
    assert not await own.sessions.expire("s", time.time() - 1, time.time() - 1, 1), "somebody is at it"
    assert await own.sessions.expire("s", later, later, 1), "and left it undone"


async def test_with_no_idle_time_set_nothing_expires(own: Services) -> None:
    await own.sessions.create(SessionInfo("s", b"hash", 1.0))
    assert await close_idle(own) == 0
    state = await own.sessions.load("s")
    assert state is not None and state.status == "open"


def test_the_service_expires_idle_sessions_by_itself(engine: ScriptedEngine, redis_url: str) -> None:
    engine.reset().say("hello")
    # It looks for idle sessions as often as a second of idleness asks for, which a slow machine would take for a call.
    with RunningService(engine.url, redis_url, session_idle_seconds=1.0) as service:
        service.settings.session_idle_seconds = 3600.0
        session = service.session()
        session.ask("q")
        service.settings.session_idle_seconds = 0.1
        wait_until(lambda: shown_state(service, session) == "timeout", 60, "it has expired")
        assert close(service, session, "completed").status_code == 409
        wait_until(lambda: "verbatim_expired_sessions_total 1.0" in metrics_of(service), 120, "it is counted")
        assert 'verbatim_sweep_age_seconds{sweep="sessions"}' in metrics_of(service)


def test_a_sweep_that_failed_is_tried_again(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    with running_redis() as redis, RunningService(engine.url, redis.url, session_idle_seconds=1.0) as service:
        with redis.client() as client:
            client.set(keys.UNCLOSED, "what no list of sessions can be")
            wait_until(lambda: "the sweep of sessions failed" in caplog.text, 120, "it has failed")
            client.delete(keys.UNCLOSED)
        session = service.session()
        wait_until(lambda: shown_state(service, session) == "timeout", 60, "it has expired")


def metrics_of(service: RunningService) -> str:
    return service.request("GET", "/metrics").text


def shown_state(service: RunningService, session: Session) -> str:
    status: str = service.request("GET", f"/sessions/{session.session_id}").json()["status"]
    return status


# What a delete leaves, and pages


async def test_a_delete_removes_every_key_of_a_session(own: Services, redis_kind: RedisKind) -> None:
    for session_id in ("before", "stays"):
        await opened(own, session_id, group_id="other")
        await close_session(own, session_id, "completed", 1.0, None)
    await delete_session(own, "before")
    while keys.PROCESSES.encode() not in redis_kind.all_keys():
        await asyncio.sleep(0.02)
    before = lasting_keys(redis_kind)
    for number, ended in enumerate((False, True)):
        await opened(own, "s", group_id=f"g{number}")
        await own.sessions.begin("s", 0, intent("c0"))
        await own.sessions.commit("s", "c0", {"c0": record("c0", "s", prompt=[1], sampled=[2])})
        await own.sessions.begin("s", 1, intent("dangling"))
        own.sessions.note_answered("s", ["c0"], delivered=True)
        await own.sessions.abandon_intents(["dangling"])
        await own.sessions.set_reward("s", 1.0, {"c0": 1.0}, {}, {"a": 1})
        if ended:
            await close_session(own, "s", "completed", 1.0, None)
        assert len(lasting_keys(redis_kind) - before) >= 6
        await delete_session(own, "s")
        assert lasting_keys(redis_kind) == before
    assert await own.sessions.find_unclosed(time.time() + 60) == []


def lasting_keys(redis: RedisKind) -> set[bytes]:
    """All but those of the groups, of which there is a fixed number: some come and go with what is in them."""
    return {key for key in redis.all_keys() if not key.startswith(b"vb:{delivery}:")}


async def test_no_fork_is_opened_of_a_session_that_is_being_deleted(own: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delete was refused half-way: the session had left its group, and was deleted later without a word."""
    await opened(own)
    fork = Fork("s", (await session_of(own)).info.created_at, 0)
    opened_forks = []

    async def cut(session_id: str) -> None:
        opened_forks.append(await own.sessions.pin("f", fork, time.time()))

    monkeypatch.setattr(own.peers, "cut", cut)
    await delete_session(own, "s")
    assert opened_forks == [False] and await own.sessions.load("s") is None
    assert await own.delivery.find_announced(time.time() + 60) == []


async def test_the_pages_of_sessions_hold_each_once_while_others_come_and_go(own: Services) -> None:
    for number in range(25):
        await own.sessions.create(SessionInfo(f"s{number:02}", b"hash", 100.0 + number // 2))
    seen, cursor = [], None
    for page in range(100):
        states, cursor = await own.sessions.listing.load_page(status=None, group_id=None, limit=4, cursor=cursor)
        seen += [state.info.session_id for state in states]
        await own.sessions.create(SessionInfo(f"new{page}", b"hash", 200.0 + page))
        await own.sessions.delete(seen[-1])
        if cursor is None:
            break
    assert seen == [f"s{number:02}" for number in range(24, -1, -1)]


def test_the_pages_of_calls_hold_each_record_once_while_calls_are_recorded(engine: ScriptedEngine, redis_url: str) -> None:
    """Three records and three unfinished calls, two to a page; between the pages two calls are recorded, one of them unfinished
    before."""
    with RunningService(engine.url, redis_url) as service:
        session = service.session()
        commit(redis_url, session, "c0", "c1", "c2")
        begin(redis_url, session, "u0", "u1", "u2")
        pages, cursor = [], None
        for number in range(10):
            query = "" if cursor is None else f"&cursor={cursor}"
            page = shown(service, session, f"calls?limit=2{query}")
            pages.append([(call["call_id"], call["status"]) for call in page["calls"]])
            cursor = page["cursor"]
            if number == 1:
                commit(redis_url, session, "u1", "c3")
            if cursor is None:
                break
        flat = [call_id for page in pages for call_id, _ in page]
        assert flat == ["c0", "c1", "c2", "u0", "u1", "c3", "u2"]
        assert all(len(page) <= 2 for page in pages)


def commit(url: str, session: Session, *call_ids: str) -> None:
    async def run() -> None:
        async with process(url) as services:
            for call_id in call_ids:
                made = record(call_id, session.session_id, prompt=[1], sampled=[2])
                await services.sessions.commit(session.session_id, call_id, {call_id: made})

    asyncio.run(run())


def begin(url: str, session: Session, *call_ids: str) -> None:
    async def run() -> None:
        async with process(url) as services:
            for number, call_id in enumerate(call_ids):
                state = await services.sessions.load(session.session_id)
                assert state is not None
                # Of a call that is not under way the process takes its intent back when it beats.
                services.inflight.enter(CancelScope(session.session_id, call_id))
                await services.sessions.begin(session.session_id, state.calls, intent(call_id, started_at=1.5 + number))

    asyncio.run(run())


@pytest.mark.parametrize("text", ["x", "-1", "1_2", "1_x_c", "", "٣"])
def test_a_cursor_that_was_never_given_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cursor"):
        CallsCursor.parse(text)


def test_a_cursor_reads_back_as_it_was_given() -> None:
    for cursor in (CallsCursor(), CallsCursor(7), CallsCursor(7, (1731.25, "call_1"))):
        assert CallsCursor.parse(str(cursor)) == cursor
