"""The pool over engines that come and go: who serves, why not, which replica a session gets, what a failed update leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from examples.vllm_server import free_port
from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.errors import Conflict, EngineUnavailable, RequestError
from proxy.settings import Settings
from proxy.store.service import WeightState, WeightStore
from tests.support.engine.weight_fixtures import Service, generate, serving

pytestmark = pytest.mark.usefixtures("often_visited", "unsampled")

Answer = tuple[int, Any]

MODELS: Answer = (200, {"data": [{"id": "policy", "max_model_len": 4096}]})
UNPROCESSABLE: Answer = (422, {"error": {"message": "Field required"}})
TOKEN_ROUTES = {
    "/inference/v1/generate": UNPROCESSABLE,
    "/v1/chat/completions/render": UNPROCESSABLE,
    "/v1/chat/completions/derender": UNPROCESSABLE,
}


@dataclass
class ScriptedEngine:
    """Answers each path with what the script says, 404 where it says nothing, and keeps what it was asked."""

    script: dict[str, Answer]
    port: int = field(default_factory=free_port)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path_qs, body))
        status, answer = self.script.get(request.path, (404, {"detail": "Not Found"}))
        return web.json_response(answer(body) if callable(answer) else answer, status=status)


class ScriptedWeights:
    """The weight routes of a vLLM with our backend, over a dict: `loaded` is what its worker reports."""

    def __init__(self, label: str = "default") -> None:
        self.label = label
        self.paused = False
        self.loaded = {"whole": True, "path": None, "version": None, "updates": 0, "error": None}
        self.tears = False
        self.refuses: str | None = None

    def script(self) -> dict[str, Answer]:
        return {
            "/v1/models": MODELS,
            **TOKEN_ROUTES,
            "/weight_info": (200, lambda _: {"weight_version": self.label}),
            "/is_paused": (200, lambda _: {"is_paused": self.paused}),
            "/update_weight_version": (200, self._set_label),
            "/pause": (200, lambda _: self._pause(True)),
            "/resume": (200, lambda _: self._pause(False)),
            "/start_weight_update": (200, {}),
            "/update_weights": (200, self._load),
            "/finish_weight_update": (200, self._finish),
            "/collective_rpc": (200, self._call),
            "/abort_requests": (200, {}),
        }

    def _set_label(self, body: dict[str, Any]) -> dict[str, Any]:
        self.label = body["new_version"]
        return {}

    def _pause(self, paused: bool) -> dict[str, Any]:
        self.paused = paused
        return {}

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.paused, "vLLM breaks when weights change while it runs"
        if self.tears:
            self.loaded |= {"whole": False, "error": "reading broke off, the weights are torn"}
        else:
            updates = self.loaded["updates"] + 1
            self.loaded = {"whole": True, **body["update_info"], "updates": updates, "error": None}
        return {}

    def _finish(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._set_label({"new_version": body["weight_version"]})

    def _call(self, body: dict[str, Any]) -> dict[str, Any]:
        worker = (
            self.loaded
            if body["method"] == "verbatim_weights"
            else {"done": True, "error": self.refuses if body["method"] == "verbatim_prepare" else None}
        )
        return {"results": [worker]}


@pytest.fixture
async def engines() -> AsyncIterator[Callable[..., Any]]:
    """Starts scripted engines that are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(script: dict[str, Answer]) -> ScriptedEngine:
            engine = ScriptedEngine(script)
            await engine.start()
            stack.push_async_callback(engine.stop)
            return engine

        yield start


async def until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_an_engine_may_come_late_die_and_return(weights: WeightStore) -> None:
    engine = ScriptedEngine({"/v1/models": MODELS})
    async with serving(weights, engine.url) as service:
        ready, reason = service.pool.ready()
        assert not ready
        assert str(engine.port) in reason
        with pytest.raises(EngineUnavailable, match="no engine can take the call"):
            service.pool.pick("s")
        for _ in range(2):
            await engine.start()
            await until(lambda: service.pool.ready() == (True, ""), "the engine came up")
            assert service.pool.pick("s").url == engine.url
            assert list(service.pool.catalogue()) == ["policy"]
            await engine.stop()
            await until(lambda: not service.pool.ready()[0], "the engine died")
            assert list(service.pool.catalogue()) == []


async def test_a_pool_without_engines_says_so(weights: WeightStore) -> None:
    async with serving(weights) as service:
        assert service.pool.ready() == (False, "no engine is configured")


async def test_a_failed_call_takes_the_replica_out_until_it_answers_again(
    engines: Callable[..., Any], weights: WeightStore
) -> None:
    engine = await engines({"/v1/models": MODELS})
    async with serving(weights, engine.url) as service:
        service.pool.mark_failed(service.pool.pick("s"), "it broke off")
        assert service.pool.ready() == (False, f"127.0.0.1:{engine.port}: it broke off")
        await until(lambda: service.pool.ready()[0], "it answers, so it serves")


@pytest.mark.parametrize(
    ("script", "engine_api", "expected"),
    [
        ({"/v1/models": MODELS, **TOKEN_ROUTES}, "auto", "token"),
        ({"/v1/models": MODELS, **TOKEN_ROUTES}, "chat", "chat"),
        ({"/v1/models": MODELS}, "auto", "chat"),
        ({"/v1/chat/completions": UNPROCESSABLE}, "chat", "chat"),
        ({"/v1/chat/completions": UNPROCESSABLE}, "auto", "chat"),
    ],
    ids=["full vLLM", "full vLLM, chat wanted", "plain vLLM", "chat only", "chat only, probed"],
)
async def test_the_api_is_found_by_asking(
    script: dict[str, Answer], engine_api: str, expected: str, engines: Callable[..., Any], weights: WeightStore
) -> None:
    engine = await engines(script)
    async with serving(weights, engine.url, engine_api=engine_api) as service:
        assert service.pool.pick("s").api == expected


async def test_a_wanted_api_that_is_not_there_is_named(engines: Callable[..., Any], weights: WeightStore) -> None:
    engine = await engines({"/v1/models": MODELS})
    async with serving(weights, engine.url, engine_api="token") as service:
        assert "it has no /inference/v1/generate; start vLLM with --enable-scale-out" in service.pool.ready()[1]


async def test_a_refused_key_is_named(engines: Callable[..., Any], weights: WeightStore) -> None:
    engine = await engines({"/v1/models": (401, {"error": "Unauthorized"})})
    async with serving(weights, engine.url) as service:
        assert "refuses the engine API key (HTTP 401)" in service.pool.ready()[1]


@pytest.mark.engine
async def test_a_real_engine_is_known_by_its_models_and_window(vllm_url: str, weights: WeightStore) -> None:
    async with serving(weights, f"{vllm_url}/v1/") as service:
        replica = service.pool.pick("s")
        assert (replica.url, replica.api, replica.models, replica.max_model_len) == (vllm_url, "token", ("policy",), 8192)
        assert replica.updatable
        assert replica.weight_version == (await weights.current()).version


async def test_a_session_stays_and_only_those_of_a_dead_replica_move(engines: Callable[..., Any], weights: WeightStore) -> None:
    running = [await engines({"/v1/models": MODELS}) for _ in range(3)]
    async with serving(weights, *(engine.url for engine in running)) as service:
        sessions = [f"session-{number}" for number in range(300)]
        before = {session: service.pool.pick(session) for session in sessions}
        counts = [list(before.values()).count(replica) for replica in service.pool.replicas]
        assert min(counts) > 60
        dead = service.pool.replicas[1]
        await running[1].stop()
        service.pool.mark_failed(dead, "gone")
        for session, replica in before.items():
            after = service.pool.pick(session)
            assert after is not dead
            assert replica is dead or after is replica


async def test_calls_that_arrive_wait_while_the_gate_is_held() -> None:
    pool = EnginePool(Settings(engine=[]))
    await asyncio.wait_for(pool.wait_for_gate(), 30)
    with pool.hold():
        waiting = asyncio.create_task(pool.wait_for_gate())
        with pool.hold():
            await asyncio.sleep(0.01)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 30)


async def test_an_engine_that_takes_no_weights_is_version_0_until_others_were_pushed(
    engines: Callable[..., Any], weights: WeightStore
) -> None:
    """Its tokens are versioned, by what it was started with; it never serves as if it had followed a push."""
    plain, updated = await engines({"/v1/models": MODELS}), await engines(ScriptedWeights().script())
    async with serving(weights, plain.url, updated.url) as service:
        first, second = service.pool.replicas
        assert (first.weight_version, first.version_of(None), first.version_of("default")) == (0, 0, 0)
        assert (second.weight_version, second.version_of("7"), second.version_of("default")) == (0, 7, None)
        answer = await service.updater.push(1, "/weights/1")
        assert answer["applied"]
        assert answer["replicas"][second.name]["ok"]
        assert "the engine has no routes for weights" in answer["replicas"][first.name]["error"]
        assert (first.healthy, second.healthy, second.weight_version) == (False, True, 1)
        await until(lambda: "weights 1 were pushed and it cannot take them" in first.reason, "its visit says why")


@pytest.mark.parametrize("updatable", [False, True])
def test_a_label_that_is_no_number_is_no_version_and_is_told_once(updatable: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever loads other weights into an engine labels them; by what they call them nobody knows which are newer."""
    replica = Replica("r", "http://r", updatable=updatable, weight_version=0)
    labels = ("step-120", "step-120", "4", "step-121", "-1", "")
    assert [replica.version_of(label) for label in labels] == [None, None, 4, None, None, None]
    told = [record.getMessage() for record in caplog.records]
    assert [message.split("weights ")[1].split(",")[0] for message in told] == ["'step-120'", "'step-121'", "'-1'", "''"]


async def test_when_no_engine_takes_the_weights_nothing_changes(engines: Callable[..., Any], weights: WeightStore) -> None:
    plain = await engines({"/v1/models": MODELS})
    async with serving(weights, plain.url) as service:
        answer = await service.updater.push(1, "/weights/1")
        assert not answer["applied"]
        assert "start vLLM with VLLM_SERVER_DEV_MODE=1" in answer["error"]
        assert (await weights.current()).version == 0
        assert service.pool.ready() == (True, "")


async def test_a_version_that_is_taken_is_refused_before_any_engine_hears_of_it(
    engines: Callable[..., Any], weights: WeightStore
) -> None:
    loaded = ScriptedWeights()
    engine = await engines(loaded.script())
    async with serving(weights, engine.url) as service:
        assert (await service.updater.push(2, "/weights/2"))["applied"]
        before = [path for path, _ in engine.asked if path.startswith("/pause")]
        for version in (1, 2):
            with pytest.raises(Conflict, match=f"version {version} is not greater than the current 2"):
                await service.updater.push(version, "/weights/other")
        assert [path for path, _ in engine.asked if path.startswith("/pause")] == before
        assert (loaded.label, loaded.paused, service.pool.ready()) == ("2", False, (True, ""))


async def test_a_push_without_any_engine_is_refused(weights: WeightStore) -> None:
    async with serving(weights, f"http://127.0.0.1:{free_port()}") as service:
        with pytest.raises(EngineUnavailable, match="no engine can take the weights"):
            await service.updater.push(1, "/weights/1")


async def test_torn_weights_serve_no_one_until_a_whole_update(engines: Callable[..., Any], weights: WeightStore) -> None:
    """Its calls in flight are cut rather than left waiting, it stays paused, and the next good push brings it back."""
    torn, good = ScriptedWeights(), ScriptedWeights()
    torn.tears = True
    first, second = await engines(torn.script()), await engines(good.script())
    async with serving(weights, first.url, second.url) as service:
        answer = await service.updater.push(1, "/weights/1")
        assert answer["applied"]
        failed = service.pool.replicas[0]
        assert answer["replicas"][failed.name]["error"] == "reading broke off, the weights are torn"
        assert torn.paused
        assert ("/abort_requests", {}) in first.asked
        assert {service.pool.pick(f"s{number}").url for number in range(50)} == {second.url}
        torn.tears = False
        answer = await service.updater.push(2, "/weights/2")
        assert answer["replicas"][failed.name]["ok"]
        assert (torn.paused, torn.label, failed.healthy, failed.weight_version) == (False, "2", True, 2)


async def test_a_replica_that_refused_goes_on_alone_but_not_beside_one_that_took_the_weights(
    engines: Callable[..., Any], weights: WeightStore
) -> None:
    picky, willing = ScriptedWeights(), ScriptedWeights()
    picky.refuses = "/weights/1 does not exist on the engine's machine"
    first, second = await engines(picky.script()), await engines(willing.script())
    async with serving(weights, first.url) as service:
        assert not (await service.updater.push(1, "/weights/1"))["applied"]
        assert service.pool.ready() == (True, "")
        assert ("/pause?mode=keep&clear_cache=true", None) not in first.asked, "a refused checkpoint costs no pause"
    async with serving(weights, first.url, second.url) as service:
        assert (await service.updater.push(1, "/weights/1"))["applied"]
        late = service.pool.replicas[0]
        assert not late.healthy
        await until(lambda: late.reason.startswith("it lacks weights 1, and loading them failed"), "repair was tried")
        assert picky.label == "0"


async def test_an_engine_that_joins_late_gets_the_current_weights_first(
    engines: Callable[..., Any], weights: WeightStore
) -> None:
    await weights.advance(WeightState(3, "/weights/3"))
    fresh = ScriptedWeights()
    engine = await engines(fresh.script())
    async with serving(weights, engine.url) as service:
        await until(lambda: service.pool.ready()[0], "it was given the weights")
        assert (fresh.loaded["path"], fresh.label, fresh.paused) == ("/weights/3", "3", False)


async def test_an_engine_that_outlived_the_store_keeps_its_version(engines: Callable[..., Any], weights: WeightStore) -> None:
    engine = await engines(ScriptedWeights(label="7").script())
    async with serving(weights, engine.url) as service:
        assert service.pool.pick("s").weight_version == 7
        assert (await weights.current()).version == 7


async def test_a_push_is_seen_by_the_other_processes(engines: Callable[..., Any], weights: WeightStore) -> None:
    engine = await engines(ScriptedWeights().script())
    async with serving(weights, engine.url) as one, serving(weights, engine.url) as other:
        assert (await one.updater.push(1, "/weights/1"))["applied"]
        await until(lambda: other.pool.replicas[0].weight_version == 1, "its next visit")
        assert other.pool.ready() == (True, "")


@pytest.mark.parametrize(
    ("push", "says"),
    [
        ({"version": 0, "path": "/w"}, "version is 0, must be 1 or more"),
        ({"version": 1, "path": "w"}, "must be absolute"),
        ({"version": 1, "path": "/w", "kind": "diff"}, "kind is 'diff', must be one of full, delta, lora"),
        ({"version": 1, "path": "/w", "mode": "later"}, "mode is 'later', must be one of keep, wait, abort"),
    ],
)
async def test_a_push_that_makes_no_sense_is_refused(push: dict[str, Any], says: str, weights: WeightStore) -> None:
    async with serving(weights) as service:
        with pytest.raises(RequestError, match=says):
            await service.updater.push(**push)


@pytest.mark.engine
async def test_a_plain_server_beside_a_real_one_leaves_the_pool_at_the_first_push(
    vllm_url: str, tiny_model: Path, engines: Callable[..., Any], weights: WeightStore
) -> None:
    async with serving(weights, vllm_url) as service:
        version = await service.next_version()
        await push_ok(service, version, tiny_model)
    plain = await engines({"/v1/models": MODELS})
    async with serving(weights, vllm_url, plain.url) as service:
        assert service.pool.pick("s").url == vllm_url
        assert "cannot take them" in service.pool.replicas[1].reason
        said = await generate(vllm_url, [20, 21, 22], 4)
        assert said.spans == [(str(version), 0, 4)]


async def push_ok(service: Service, version: int, path: Path) -> None:
    assert (await service.updater.push(version, str(path)))["applied"]
