"""A bad network between the service and its Redis or its engine: no reply goes out unrecorded, what fails fails soon and may be
tried again, and when the network is well the service is too."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import APIError, InternalServerError

from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from proxy.store.states import Intent, SessionInfo
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.faulty_wire import FaultyWire
from tests.support.service.redis_server import RedisServer, Store, ask, free_port, info, running_redis
from tests.support.service.running_service import RunningService, Session, streamed_text, wait_until
from tests.support.sessions.questions import QUESTIONS

Fault = Callable[[FaultyWire], None]
FAULTS: dict[str, Fault] = {
    "latency": lambda wire: wire.latency(0.02),
    "reset": FaultyWire.reset,
    "reset in an answer": lambda wire: wire.reset_after(20),
    "black hole": FaultyWire.black_hole,
    "half open": FaultyWire.half_open,
}
each_fault = pytest.mark.parametrize("fault", FAULTS)
BREAKING = ("reset", "reset in an answer")
"""Those that are noticed at once, also by whoever asks whether the service is ready."""

TOLD = {
    "chat": (503, "store_unavailable"),
    "completions": (503, "store_unavailable"),
    "responses": (503, "store_unavailable"),
    "messages": (529, "overloaded_error"),
    "gemini": (503, "UNAVAILABLE"),
}
"""How each dialect says that the store is full: the status, and the code in the body. In a stream Responses has few codes."""

PATIENT = 60.0
"""More than any call may take here, also on a slow machine: a call that takes this long hangs. It gives up its store after a second and
a half, its engine after half a second."""


@dataclass
class Harnesses:
    """Several that ask on and on, each in a session of its own; what became of every call."""

    service: RunningService
    replies: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    @contextmanager
    def asking(self, count: int) -> Iterator[None]:
        stop = threading.Event()
        self.sessions = [self.service.session() for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            talks = [pool.submit(self._talk, session, stop, number % 2 == 0) for number, session in enumerate(self.sessions)]
            try:
                yield
            finally:
                stop.set()
        for talk in talks:
            talk.result()

    def _talk(self, session: Session, stop: threading.Event, stream: bool) -> None:
        while not stop.is_set():
            began = time.monotonic()
            try:
                answer = session.ask("q", stream=stream)
                text = streamed_text(answer)[0] if stream else answer.choices[0].message.content
                self.replies.append(text)
            except APIError as error:
                self.errors.append(error)
                time.sleep(0.05)
            self.seconds.append(time.monotonic() - began)

    def recorded(self) -> list[str]:
        """The replies in the store, of calls whose status says that they went well."""
        return [call["reply"]["content"] for session in self.sessions for call in session.calls if call["status"] == "finished"]


def number_every_reply(engine: ScriptedEngine) -> None:
    numbers = itertools.count()
    engine.script = lambda generation, index: Say(f"hello {next(numbers)}")


def assert_nothing_lost(harnesses: Harnesses) -> None:
    recorded = harnesses.recorded()
    assert len(set(harnesses.replies)) == len(harnesses.replies)
    assert set(harnesses.replies) <= set(recorded), "every reply that a harness got is in the store"
    assert len(set(recorded)) == len(recorded), "and there once"
    for error in harnesses.errors:
        status = getattr(error, "status_code", None)
        assert status in (None, 502, 503), "in a stream that has begun, or one that says: try again"
    for session in harnesses.sessions:
        session.trajectories()


def assert_survives(fault: str, wire: FaultyWire, service: RunningService) -> None:
    """Six harnesses talk through two rounds of the fault: no reply is lost, and afterwards all is as before."""
    harnesses = Harnesses(service)
    with harnesses.asking(6):
        wait_for_more(harnesses.replies, "replies come")
        for _ in range(2):
            FAULTS[fault](wire)
            wait_for_more(harnesses.seconds, "calls end under the fault")
            if fault in BREAKING:
                wait_until(lambda: not is_ready(service), 60, "the service says that it is not ready")
            wire.heal()
            wait_for_more(harnesses.replies, "replies come again")
    assert max(harnesses.seconds) < PATIENT
    assert_nothing_lost(harnesses)
    wait_until(lambda: is_ready(service), 60, "it says that it is ready")


def wait_for_more(of: list[Any], what: str, count: int = 9) -> None:
    goal = len(of) + count
    wait_until(lambda: len(of) >= goal, 60, what)


def is_ready(service: RunningService) -> bool:
    return service.request("GET", "/readyz").status_code == 200


@each_fault
def test_between_service_and_store_nothing_is_lost_and_all_is_well_afterwards(fault: str) -> None:
    patience: dict[str, Any] = {"redis_timeout_seconds": 0.5, "redis_retry_seconds": 1.0}
    with (
        ScriptedEngine("qwen3") as engine,
        running_redis() as redis,
        FaultyWire(redis.port) as wire,
        RunningService(engine.url, wire.redis_url, **patience) as service,
    ):
        number_every_reply(engine)
        assert_survives(fault, wire, service)


@each_fault
def test_between_service_and_engine_nothing_is_lost_and_all_is_well_afterwards(
    fault: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.engine.pool.standing.RETRY_SECONDS", 0.1)
    with (
        ScriptedEngine("qwen3") as engine,
        FaultyWire(engine.port) as wire,
        RunningService(wire.url, redis_url, engine_timeout_seconds=0.5, engine_connect_seconds=0.5) as service,
    ):
        number_every_reply(engine)
        assert_survives(fault, wire, service)


def test_a_record_is_offered_until_the_store_takes_it() -> None:
    """The store is away when the engine has ended: the harnesses, one of them streaming, wait, and get their replies when the records
    are there."""
    gate = threading.Event()
    with (
        ScriptedEngine("qwen3") as engine,
        running_redis() as redis,
        FaultyWire(redis.port) as wire,
        RunningService(engine.url, wire.redis_url) as service,
        ThreadPoolExecutor(2) as pool,
    ):
        engine.script = lambda generation, index: Say("hello world", gate=gate, gate_after=1)
        whole, streamed = service.session(), service.session()
        answers = [
            pool.submit(lambda: whole.answer("q")["content"]),
            pool.submit(lambda: streamed_text(streamed.ask("q", stream=True))[0]),
        ]
        engine.wait_for(lambda: [len(one.sampled.get(0, ())) for one in engine.generations] == [1, 1])
        wire.reset()
        gate.set()
        wait_until(lambda: wire.resets >= 20, 60, "the service has tried again and again")
        assert not any(answer.done() for answer in answers)
        wire.heal()
        assert [answer.result() for answer in answers] == ["hello world"] * 2
        for session in (whole, streamed):
            assert [call["status"] for call in session.calls] == ["finished"]
            assert session.trajectories()[1]["quarantined"] == []


@pytest.fixture(scope="module")
def filling() -> Iterator[tuple[ScriptedEngine, RedisServer, RunningService]]:
    """A Redis of 32 MiB that evicts nothing, and what uses it."""
    room = ("--maxmemory", "32mb", "--maxmemory-policy", "noeviction")
    with ScriptedEngine("qwen3") as engine, running_redis(*room) as redis, RunningService(engine.url, redis.url) as service:
        yield engine, redis, service


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", sorted(QUESTIONS))
def test_a_store_that_fills_while_a_reply_is_recorded_fails_the_call_and_records_none_of_it(
    filling: tuple[ScriptedEngine, RedisServer, RunningService], dialect: str, stream: bool
) -> None:
    """The intent is stored when the engine samples; the record finds no room, in whichever shape the caller is told. The session goes on
    once there is room, and its rows hold only what was answered."""
    (engine, redis, service), gate = filling, threading.Event()
    path, body = QUESTIONS[dialect]
    if stream and dialect == "gemini":
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
    elif stream:
        body = {**body, "stream": True}
    engine.reset().say("hello", Say("hello world", gate=gate, gate_after=1), "hello")
    session = service.session()
    assert session.post(path, body).status_code == 200
    with redis.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.post, path, body)
        engine.wait_for(lambda: len(engine.generations) == 2 and len(engine.last.sampled.get(0, ())) == 1)
        client.setrange("filler", 64 * 2**20, b"x")
        gate.set()
        refused = answer.result(timeout=120)
        client.delete("filler")
    status, code = TOLD[dialect] if (dialect, stream) != ("responses", True) else (200, "server_error")
    assert refused.status_code == (200 if stream else status), refused.text
    assert code in refused.text and "raise maxmemory or shorten retention" in refused.text
    assert session.post(path, body).status_code == 200
    assert [(call["status"], len(call["completion_ids"])) for call in session.calls] == [
        ("finished", 2),
        ("finished", 2),
        ("dangling", 0),
    ]
    rows, accounting = session.trajectories()
    assert [(item["reason"], item["tokens"]) for item in accounting["quarantined"]] == [("dangling", 0)]
    assert sum(map(sum, (row["loss_mask"] for row in rows))) == 4


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[StoreConnection]:
    """The connections to the store that services make, whose patience a test may change on the way: what is to be answered must not
    depend on a machine's speed."""
    made: list[StoreConnection] = []
    connect = StoreConnection.to

    def to(*given: Any) -> StoreConnection:
        made.append(connect(*given))
        return made[-1]

    monkeypatch.setattr(StoreConnection, "to", to)
    return made


def test_a_record_that_the_store_never_takes_fails_the_call_and_says_when_to_try_again(
    connections: list[StoreConnection],
) -> None:
    gate = threading.Event()
    with (
        ScriptedEngine("qwen3") as engine,
        running_redis() as redis,
        FaultyWire(redis.port) as wire,
        RunningService(engine.url, wire.redis_url, redis_retry_seconds=0.3) as service,
        ThreadPoolExecutor(1) as pool,
    ):
        engine.say(Say("hello world", gate=gate, gate_after=1), "hello")
        session = service.session()
        answer = pool.submit(session.ask, "q")
        engine.wait_for(lambda: bool(engine.generations) and len(engine.last.sampled.get(0, ())) == 1)
        wire.half_open()
        connections[0].timeout_seconds = 0.5
        gate.set()
        with pytest.raises(InternalServerError) as refused:
            answer.result(timeout=120)
        assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
        assert refused.value.response.headers["retry-after"]
        connections[0].timeout_seconds = 30.0
        wire.heal()
        assert session.answer("q")["content"] == "hello"
        wait_until(lambda: [call["status"] for call in session.calls] == ["finished", "dangling"], 120, "the lost one is seen")
        assert [item["reason"] for item in session.trajectories()[1]["quarantined"]] == ["dangling"]


@pytest.mark.parametrize("fault", [FaultyWire.black_hole, FaultyWire.half_open], ids=["black hole", "half open"])
def test_a_call_on_an_engine_that_hangs_can_be_cut_and_what_was_sampled_is_recorded(
    fault: Fault, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.timeline.ABORT_SECONDS", 0.5)
    monkeypatch.setattr("proxy.timeline.HUNG_UP_SECONDS", 0.5)
    gate = threading.Event()
    with (
        ScriptedEngine("qwen3") as engine,
        FaultyWire(engine.port) as wire,
        RunningService(wire.url, redis_url) as service,
        ThreadPoolExecutor(1) as pool,
    ):
        engine.say(Say("hello world in Paris", gate=gate, gate_after=2))
        session = service.session()
        heard = threading.Event()

        def harness() -> None:
            with pytest.raises(APIError):
                for chunk in session.ask("q", stream=True):
                    if chunk.choices[0].delta.content:
                        heard.set()

        answer = pool.submit(harness)
        assert heard.wait(120)
        fault(wire)
        session.close("cancelled")
        answer.result(timeout=120)
        (call,) = session.calls
        assert (call["status"], len(call["completion_ids"])) == ("failed", 2)
        wire.heal()
        gate.set()


# The store by itself


async def test_half_open_connections_hold_nobody_and_are_given_up_all_at_once() -> None:
    with running_redis() as server, FaultyWire(server.port) as wire:
        store = Store.at(wire.redis_url, timeout_seconds=60.0)
        await store.sessions.create(SessionInfo("s", b"hash", 1.0))
        await asyncio.gather(*(store.sessions.load("s") for _ in range(40)))
        wire.half_open()
        store.connection.timeout_seconds = 0.3
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            await store.sessions.load("s")
        wire.heal()
        store.connection.timeout_seconds = 30.0
        # One found out for all: none of the other connections costs another call its deadline.
        for _ in range(80):
            await store.sessions.load("s")
        await store.connection.close()


async def test_a_redis_that_loads_its_file_is_waited_for_by_commits_and_refused_by_the_rest() -> None:
    with running_redis() as server:
        port, folder = server.port, ask(server, "CONFIG", "GET", "dir")[1].decode()
        store = Store.at(server.url, patience_seconds=60.0)
        await store.sessions.create(SessionInfo("s", b"hash", 1.0))
        await store.sessions.begin("s", 0, Intent("c0", None, b"", "r", 1.0))
        ask(server, "EVAL", "for _ = 1, 100000 do redis.call('INCR', 'filler') end", 0)
        server.kill()
        with loading(folder, port) as loader:
            refusals = await refusals_of_reads(store)
            assert any("LOADING" in refusal or "loading" in refusal for refusal in refusals), refusals
            refused = loading_errors(loader)
            commit = asyncio.create_task(store.sessions.commit("s", "c0", {"c0": b"zero"}))
            while loading_errors(loader) == refused and not commit.done():
                await asyncio.sleep(0.01)
            assert not commit.done()
        with running_redis("--dir", folder, port=port, wait=False):
            assert await commit == 1
            assert await store.sessions.load_intents("s") == []
        await store.connection.close()


@contextmanager
def loading(folder: str, port: int) -> Iterator[RedisServer]:
    """A Redis that would take seven seconds to load what is in the folder; its process is there before it answers."""
    with running_redis("--dir", folder, "--key-load-delay", "20", port=port, wait=False) as server:
        yield server


def loading_errors(server: RedisServer) -> int:
    """How many commands were refused because it loads."""
    found = re.search(rb"errorstat_LOADING:count=(\d+)", info(server, "errorstats"))
    return int(found[1]) if found else 0


async def refusals_of_reads(store: Store) -> list[str]:
    """What a read is told until it is told of loading."""
    refusals: list[str] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any("oading" in refusal for refusal in refusals):
        try:
            await store.sessions.load("s")
        except StoreUnavailable as error:
            refusals.append(error.message)
        await asyncio.sleep(0.02)
    return refusals


async def test_a_commit_that_can_never_be_taken_is_not_tried_again() -> None:
    with running_redis() as full:
        store = Store.at(full.url, patience_seconds=60.0)
        await store.sessions.create(SessionInfo("s", b"hash", 1.0))
        ask(full, "CONFIG", "SET", "maxmemory", "1")
        async with asyncio.timeout(30):
            with pytest.raises(StoreUnavailable, match=r"OOM|OutOfMemory"):
                await store.sessions.commit("s", "c", {"c": b"x"})
        await store.connection.close()


async def test_commits_of_one_record_over_a_wire_that_resets_count_once() -> None:
    """The answer is cut off at every length: the commit is repeated and finds its work done."""
    with running_redis() as server, FaultyWire(server.port) as wire:
        store = Store.at(wire.redis_url, patience_seconds=60.0)
        await store.sessions.create(SessionInfo("s", b"hash", 1.0))
        await store.sessions.commit("s", "c", {"c": b"x"})
        for length in range(len(":2\r\n")):
            before = wire.resets
            wire.reset_after(length)
            commit = asyncio.create_task(store.sessions.commit("s", f"c{length}", {f"c{length}": b"x"}))
            while wire.resets == before and not commit.done():
                await asyncio.sleep(0.005)
            wire.heal()
            assert await commit == length + 2
        assert len(await store.sessions.load_records("s")) == 5
        await store.connection.close()


def test_a_service_starts_while_its_store_hangs_and_serves_when_it_answers(connections: list[StoreConnection]) -> None:
    with running_redis() as redis, FaultyWire(redis.port) as wire, ScriptedEngine("qwen3") as engine:
        wire.half_open()
        with RunningService(engine.url, wire.redis_url, redis_timeout_seconds=0.5) as service:
            assert service.request("GET", "/healthz").status_code == 200
            assert service.request("GET", "/readyz").status_code == 503
            assert service.request("POST", "/sessions").status_code == 503
            wire.heal()
            wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "it is ready")
            connections[0].timeout_seconds = 30.0
            engine.say("hello")
            assert service.session().answer("q")["content"] == "hello"


async def test_a_store_at_a_port_where_nobody_listens_is_unavailable_at_once() -> None:
    store = Store.at(f"redis://127.0.0.1:{free_port()}", timeout_seconds=60.0)
    async with asyncio.timeout(30):
        with pytest.raises(StoreUnavailable):
            await store.sessions.ping()
    await store.connection.close()
