"""Several engines behind one URL: they are found at contact or later, no weights are pushed through, and calls go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError

from proxy.engine.in_vllm.frames import PROTOCOL, ROUTE, SAMPLE
from tests.support.engine.routers import Balancer, running_router
from tests.support.engine.scripted_engine import Exchange, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, streamed_text, wait_until


@pytest.fixture
def engines(redis_server: RedisServer) -> Iterator[Sequence[ScriptedEngine]]:
    redis_server.flushall()
    with ExitStack() as running:
        yield [running.enter_context(ScriptedEngine("qwen3")) for _ in range(2)]


def replica_of(service: RunningService) -> dict[str, Any]:
    (replica,) = service.request("GET", "/engines").json()["replicas"]
    return dict(replica)


def push(service: RunningService, folder: Path, version: int = 1) -> dict[str, Any]:
    return dict(service.request("POST", "/weights", json={"version": version, "path": str(folder)}).json())


def check_refused(service: RunningService, engines: Sequence[ScriptedEngine], folder: Path) -> None:
    """A push changes nothing, and says what to do; calls go on."""
    # Chance decides which engine is asked; more are at every visit.
    wait_until(lambda: replica_of(service)["router"], 120, "the router is found")
    replica = replica_of(service)
    assert (replica["status"], replica["router"], replica["takes_weights"], replica["plugin"]) == (
        "serving",
        True,
        False,
        False,
    )
    (note,) = [note for note in replica["notes"] if note.startswith("is a router")]
    assert "--engine" in note and "dns://" in note
    labels = [engine.weights.label for engine in engines]
    answer = push(service, folder, 5)
    assert (answer["applied"], answer["error"]) == (False, f"it {note}")
    for engine in engines:
        assert not {"/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"} & set(engine.paths())
    assert [engine.weights.label for engine in engines] == labels
    session = service.session()
    assert session.ask("hello").choices[0].message.content is not None
    streamed_text(session.ask("hello again", stream=True))


@pytest.mark.parametrize("how", ["", "least_conn;", "random;", "hash $http_x_session_id consistent;", "hash $request_uri;"])
def test_engines_behind_a_balancer_are_told_apart(
    redis_server: RedisServer, engines: Sequence[ScriptedEngine], tmp_path: Path, how: str
) -> None:
    """A push paused one engine and updated the other."""
    with (
        Balancer(tmp_path, [engine.url for engine in engines], how) as balancer,
        RunningService(balancer.url, redis_server.url, engine_router={"session_header": "X-Session-ID"}) as service,
    ):
        check_refused(service, engines, tmp_path)


@pytest.mark.parametrize("policy", ["cache_aware", "consistent_hash"])
def test_calls_work_through_vllms_router_and_pushes_are_refused(
    redis_server: RedisServer, engines: Sequence[ScriptedEngine], tmp_path: Path, policy: str
) -> None:
    """Its default policy sends every question about an engine to the same one. All requests of a session go to one engine where the
    policy goes by sessions."""
    urls = [engine.url for engine in engines]
    with (
        running_router("vllm_router", *urls, policy=policy) as router,
        RunningService(router, redis_server.url, engine_router={"session_header": "X-Session-ID"}) as service,
    ):
        assert replica_of(service)["api"] == "token"
        check_refused(service, engines, tmp_path)
        (note,) = [note for note in replica_of(service)["notes"] if note.startswith("is a router")]
        assert all(f"--engine {url}" in note for url in urls)
        if policy == "consistent_hash":
            session = service.session()
            for text in ("one", "two", "three"):
                session.ask(text)
            asked = [{request.headers.get("x-session-id") for request in engine.received} for engine in engines]
            assert sum(session.session_id in sessions for sessions in asked) == 1


def test_sglangs_router_serves_calls_that_name_the_engines_model(
    redis_server: RedisServer, engines: Sequence[ScriptedEngine], tmp_path: Path
) -> None:
    """Of engines of vLLM it lists one model, `unknown`, and forwards the name that is asked for; it was asked for `unknown`, and each call
    got 404. It drops the token ids: nothing is trained."""
    with (
        running_router("sglang_router", *[engine.url for engine in engines], policy="round_robin") as router,
        RunningService(router, redis_server.url) as service,
    ):
        replica = replica_of(service)
        assert (replica["api"], replica["models"]) == ("chat", [])
        check_refused(service, engines, tmp_path)
        session = service.session()
        with pytest.raises(NotFoundError, match="`other` does not exist"):
            session.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hello"}])


def test_a_router_that_comes_later_is_found(
    redis_server: RedisServer, engines: Sequence[ScriptedEngine], tmp_path: Path
) -> None:
    """One engine at first: pushes go through. Then another one behind the same URL."""
    first, second = engines
    with Balancer(tmp_path, [first.url]) as balancer, RunningService(balancer.url, redis_server.url) as service:
        assert push(service, tmp_path)["applied"] is True
        assert replica_of(service)["router"] is False
        balancer.balance([first.url, second.url])
        wait_until(lambda: replica_of(service)["router"], 120, "the router is found")
        answer = push(service, tmp_path, 2)
        assert answer["applied"] is False and "is a router" in answer["error"]
        assert (first.weights.label, second.weights.label) == ("1", "default")
        wait_until(lambda: replica_of(service)["status"] == "down", 120, "engines of which one lacks the weights do not serve")
        assert "is a router" in replica_of(service)["reason"]


def test_an_engine_that_is_added_to_vllms_router_is_found(
    redis_server: RedisServer, engines: Sequence[ScriptedEngine], tmp_path: Path
) -> None:
    first, second = engines
    with (
        running_router("vllm_router", first.url, policy="round_robin") as router,
        RunningService(router, redis_server.url) as service,
    ):
        assert replica_of(service)["router"] is False
        httpx.post(f"{router}/add_worker", params={"url": second.url}).raise_for_status()
        assert "is a router" in push(service, tmp_path)["error"]
        check_refused(service, engines, tmp_path)


def test_an_engine_that_starts_again_is_no_router(redis_server: RedisServer, tmp_path: Path) -> None:
    redis_server.flushall()
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_server.url) as service:
        for version in (1, 2):
            assert push(service, tmp_path, version)["applied"] is True
            engine.stop()
            engine.weights._relabel("default")
            engine.start(engine.port)
            wait_until(lambda: engine.weights.label == str(version), 120, "it has the weights again")  # noqa: B023
        wait_until(lambda: replica_of(service)["status"] == "serving", 120, "it serves")
        assert replica_of(service)["router"] is False


OWN = {"error": {"message": "temperature must be positive", "type": "BadRequestError", "param": "temperature", "code": 400}}


class WithPlugin(ScriptedEngine):
    """An engine whose plugin refuses everything, in its own words, until what stands before it does: `refusal`."""

    def __init__(self) -> None:
        super().__init__("qwen3")
        self.refusal: tuple[int, Any] = (400, OWN)
        self.refused = 0
        self._routes |= {("GET", ROUTE): self._about}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        if scope["path"] != SAMPLE:
            return await super().__call__(scope, receive, send)
        exchange = Exchange(scope, receive, send)
        await exchange.read()
        if "x-verbatim-contact" in exchange.headers:
            # The sample of first contact: later.
            await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"3600")]})
            return await send({"type": "http.response.body", "body": b""})
        self.refused += 1
        status, body = self.refusal
        await exchange.answer(body, status)
        return None

    async def _about(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"protocol": PROTOCOL, "vllm": "0.32.0", "engine": "e"})


REFUSALS: dict[str, tuple[int, Any]] = {
    "vllm-router": (400, "Invalid JSON body: expected value at line 1 column 1"),
    "a gateway's JSON": (400, {"error": {"message": "not JSON", "type": "invalid_request_error", "code": "invalid_json"}}),
    "a schema": (422, {"detail": [{"loc": ["body"], "msg": "invalid JSON"}]}),
    "media type": (415, {"message": "Unsupported Media Type"}),
    "method": (405, {"detail": "Method Not Allowed"}),
    "no route": (404, {"detail": "Not Found"}),
    "a firewall": (403, "<html>blocked</html>"),
    "not implemented": (501, ""),
}


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_call_whose_plugin_request_is_refused_on_the_way_is_made_over_vllms_routes(
    redis_server: RedisServer, refusal: str, met: bool
) -> None:
    """The harness read the refusal, as if it were its own request's fault. It is refused once: at contact, or in the first call where the
    engine was `met` before."""
    redis_server.flushall()
    with WithPlugin() as engine:
        engine.refusal = (400, OWN) if met else REFUSALS[refusal]
        with RunningService(engine.url, redis_server.url) as service:
            assert replica_of(service)["plugin"] is met
            engine.refusal, engine.refused = REFUSALS[refusal], 0
            session = service.session()
            assert session.ask("hello").choices[0].message.content is not None
            streamed_text(session.ask("hello again", stream=True))
            session.client.completions.create(model="policy", prompt="once upon", max_tokens=2)
            assert engine.refused == met and replica_of(service)["plugin"] is False
            assert any("the plugin's requests are refused" in note for note in replica_of(service)["notes"])
            assert len(session.calls) == 3


def test_what_the_plugin_itself_refuses_is_the_calls_fault(redis_server: RedisServer) -> None:
    redis_server.flushall()
    with WithPlugin() as engine, RunningService(engine.url, redis_server.url) as service:
        with pytest.raises(BadRequestError, match="temperature must be positive"):
            service.session().ask("hello")
        assert replica_of(service)["plugin"] is True
