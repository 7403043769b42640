"""The engine gets a call's request once its intent is in the store, and never before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from openai import ConflictError, InternalServerError

from proxy.store import keys
from proxy.timeline import CancelScope, Inflight
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.faulty_wire import FaultyWire
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, hanging_up, wait_until


@dataclass
class Path:
    """Engine, a wire to the store, and a service on one path to the engine. `begun` is set when a call is under way there, `cut` when one
    has been cut."""

    engine: ScriptedEngine
    wire: FaultyWire
    service: RunningService
    redis: RedisServer
    begun: threading.Event = field(default_factory=threading.Event)
    cut: threading.Event = field(default_factory=threading.Event)

    def session(self) -> Session:
        """One that the service has in memory, with one call."""
        self.engine.say("hello")
        session = self.service.session()
        assert session.answer("q")["content"] == "hello"
        self.engine.reset()
        self.begun.clear()
        return session

    def intents(self, session: Session) -> int:
        with self.redis.client() as client:
            return int(client.hlen(keys.intents(session.session_id)))


@pytest.fixture(params=["token", "chat"])
def path(request: pytest.FixtureRequest, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with (
        ScriptedEngine("qwen3") as engine,
        FaultyWire(redis_server.port) as wire,
        RunningService(engine.url, wire.redis_url, engine_api=request.param) as service,
    ):
        made = Path(engine, wire, service, redis_server)
        enter, cancel = Inflight.enter, CancelScope.cancel

        def enter_and_tell(inflight: Inflight, scope: CancelScope) -> None:
            enter(inflight, scope)
            made.begun.set()

        def cancel_and_tell(scope: CancelScope) -> None:
            # The server says at the end of an answer, too, that its client has left.
            goes_on = not scope.done.is_set()
            cancel(scope)
            if goes_on:
                made.cut.set()

        monkeypatch.setattr(Inflight, "enter", enter_and_tell)
        monkeypatch.setattr(CancelScope, "cancel", cancel_and_tell)
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_is_not_asked_while_the_intent_is_on_its_way(path: Path, stream: bool) -> None:
    session = path.session()
    path.engine.say("hello")
    path.wire.black_hole()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.ask, "more", stream=stream)
        assert path.begun.wait(120)
        time.sleep(0.2)
        assert not path.engine.generations
        path.wire.heal()
        assert list(answer.result(120) if stream else [answer.result(120)])
    assert len(path.engine.generations) == 1
    assert [call["status"] for call in session.calls] == ["finished", "finished"]
    assert path.intents(session) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_harness_that_goes_away_meanwhile_has_asked_nothing_of_the_engine(path: Path, stream: bool) -> None:
    session = path.session()
    path.wire.black_hole()
    body = {"model": "policy", "messages": [{"role": "user", "content": "more"}], "stream": stream}
    with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key):
        assert path.begun.wait(120)
    assert path.cut.wait(120), "the service has noticed that the harness is gone"
    path.wire.heal()
    wait_until(lambda: path.service.request("GET", "/readyz").status_code == 200, 120, "the store is there again")
    path.engine.say("hello")
    assert session.answer("again")["content"] == "hello"
    wait_until(lambda: path.intents(session) == 0, 120, "no intent is left of the call that was not made")
    assert len(path.engine.generations) == 1
    assert [call["status"] for call in session.calls] == ["finished", "finished"]


def test_a_call_whose_intent_cannot_be_written_is_not_given_to_the_engine(path: Path) -> None:
    session = path.session()
    path.wire.reset()
    with pytest.raises(InternalServerError) as failed:
        session.ask("more")
    assert failed.value.status_code == 503
    path.wire.heal()
    wait_until(lambda: path.service.request("GET", "/readyz").status_code == 200, 120, "the store is there again")
    assert not path.engine.generations
    path.engine.say("hello")
    assert session.answer("again")["content"] == "hello"
    assert path.intents(session) == 0


def test_a_call_of_a_session_that_was_closed_elsewhere_is_not_given_to_the_engine(
    path: Path, redis_server: RedisServer
) -> None:
    session = path.session()
    with RunningService(path.engine.url, redis_server.url) as elsewhere:
        closed = elsewhere.request("POST", f"/sessions/{session.session_id}/close", json={"status": "cancelled"})
        assert closed.status_code == 200, closed.text
    with pytest.raises(ConflictError):
        session.ask("more")
    assert not path.engine.generations
    assert path.intents(session) == 0
