"""Which API an engine speaks is found by asking; no probe lets it sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import pytest
from pydantic import ValidationError

from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.probe import Probe
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.vllm import TOKEN_ROUTES
from proxy.engine.in_vllm.frames import PROTOCOL, ROUTE
from proxy.engine.pool.membership import replica_at
from proxy.engine.replica import Replica
from proxy.engine.wire.connections import open_channels
from proxy.engine.wire.http import EngineHttp
from proxy.errors import EngineUnavailable
from proxy.settings import Settings
from tests.support.engine.scripted_engine import Exchange, ScriptedEngine
from tests.support.engine.scripted_sampling import Fail
from tests.support.engine.shaped_sglang import ShapedSglang


class Vllm(ScriptedEngine):
    """vLLM of some version, started without --enable-scale-out."""

    def __init__(self, version: str | None) -> None:
        super().__init__("qwen3", updatable=False)
        self.version = version
        kept = {("GET", "/v1/models"), ("GET", "/version"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")}
        self._routes = {route: answer for route, answer in self._routes.items() if route in kept}


ENGINES: dict[str, Any] = {
    "scale-out": lambda: ScriptedEngine("qwen3"),
    "vllm 0.32": lambda: Vllm("0.32.0+cpu"),
    "vllm 0.10.1": lambda: Vllm("0.10.1.1"),
    "no version": lambda: Vllm(None),
    "sglang": lambda: ShapedSglang(),
    "sglang 0.5.5": lambda: ShapedSglang(newer=False),
    "chat only": lambda: ScriptedEngine(plain=True),
}


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[ScriptedEngine]:
    with ENGINES[request.param]() as engine:
        yield engine
        assert engine.generations == []
        assert {str(asked.body) for asked in engine.received} <= {"{}", "None"}


class Installed(ScriptedEngine):
    """vLLM that was started with the plugin, whose GET routes answer these."""

    def __init__(self, **answers: Any) -> None:
        super().__init__("qwen3")
        known = {"server_info": {"vllm_env": {"VLLM_PLUGINS": ["lora", "verbatim"]}}, "version": {"version": "0.34.1"}}
        for name, answer in {**known, **answers}.items():
            self._routes["GET", "/" + name] = partial(self._tell, answer)

    async def _tell(self, answer: Any, exchange: Exchange, body: Any) -> None:
        await exchange.answer(answer)


class Found(NamedTuple):
    api: str
    updatable: bool


def ignore_failure(replica: Replica, reason: str, refused: bool) -> None:
    pass


def kinds(session: aiohttp.ClientSession, renders: bool, probing: aiohttp.ClientSession | None = None) -> EngineKinds:
    http = EngineHttp(open_channels(Settings()), ignore_failure)
    http.open(session, probing)
    return EngineKinds(http, LocalRenderer("model" if renders else None, {}))


async def found(engine: ScriptedEngine, asked: str, renders: bool) -> Found:
    async with aiohttp.ClientSession() as http:
        probe = Probe(http, engine.url)
        kind = await kinds(http, renders).detect(probe, asked)
        return Found(kind.name, await kind.takes_weights(probe))


@pytest.mark.parametrize(
    ("engine", "renders", "expected"),
    [
        ("scale-out", True, Found("token", True)),
        ("scale-out", False, Found("token", True)),
        ("vllm 0.32", True, Found("completions", False)),
        ("vllm 0.32", False, Found("chat", False)),
        ("vllm 0.10.1", True, Found("chat", False)),
        ("no version", True, Found("chat", False)),
        ("sglang", True, Found("sglang", True)),
        ("sglang 0.5.5", True, Found("sglang", True)),
        ("sglang", False, Found("chat", False)),
        ("chat only", True, Found("chat", False)),
    ],
    indirect=["engine"],
)
async def test_the_api_that_keeps_most_is_taken(engine: ScriptedEngine, renders: bool, expected: Found) -> None:
    assert await found(engine, "auto", renders) == expected


@pytest.mark.parametrize(
    ("engine", "asked", "expected"),
    [
        ("scale-out", "completions", Found("completions", True)),
        ("vllm 0.10.1", "completions", Found("completions", False)),
        ("scale-out", "chat", Found("chat", True)),
        ("sglang", "sglang", Found("sglang", True)),
        ("sglang", "chat", Found("chat", False)),
    ],
    indirect=["engine"],
)
async def test_an_api_that_is_asked_for_is_taken(engine: ScriptedEngine, asked: str, expected: Found) -> None:
    assert await found(engine, asked, True) == expected


@pytest.mark.parametrize(
    ("engine", "asked", "reason"),
    [
        ("vllm 0.32", "token", "it has no /inference/v1/generate; start vLLM with --enable-scale-out"),
        ("no version", "token", "it has no /inference/v1/generate; start vLLM with --enable-scale-out"),
        ("vllm 0.10.1", "token", "it has no /inference/v1/generate, which vLLM has since 0.24"),
        ("chat only", "completions", "it has no /v1/completions"),
        ("vllm 0.32", "sglang", "it is no SGLang"),
    ],
    indirect=["engine"],
)
async def test_an_api_that_is_not_there_is_named(engine: ScriptedEngine, asked: str, reason: str) -> None:
    with pytest.raises(EngineUnavailable, match=reason):
        await found(engine, asked, True)


@pytest.mark.parametrize("asked", ["completions", "sglang"])
def test_an_api_without_messages_needs_a_renderer(asked: Any) -> None:
    with pytest.raises(ValidationError, match="name the model whose chat format to use"):
        Settings(engine_api=asked)


class Busy(ScriptedEngine):
    """Too busy for one of the token routes until it is `free`."""

    def __init__(self, route: str, status: int) -> None:
        super().__init__("qwen3")
        self.free, self._status = False, status
        self._usual = self._routes["POST", route]
        self._routes["POST", route] = self._answer_later

    async def _answer_later(self, exchange: Exchange, body: Any) -> None:
        if self.free:
            await self._usual(exchange, body)
        else:
            await exchange.fail(Fail(self._status))


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_too_busy_to_be_known_is_asked_again(status: int) -> None:
    for route in TOKEN_ROUTES:
        with Busy(route, status) as engine:
            with pytest.raises(EngineUnavailable, match=f"{route} answered HTTP {status}"):
                await found(engine, "auto", False)
            engine.free = True
            assert await found(engine, "auto", False) == Found("token", True)


NO_ROUTES = (
    "takes calls over vLLM's own routes: the plugin is installed, but it adds no routes to this vLLM 0.34.1 "
    "(it was checked with 0.32 and 0.33); the engine's log says why"
)
OTHER_PROTOCOL = (
    f"takes calls over vLLM's own routes: the plugin is installed, but it speaks protocol {PROTOCOL + 1} and this service {PROTOCOL}; "
    "install the same release of Verbatim on both sides"
)


@pytest.mark.parametrize(
    ("answers", "plugin", "note"),
    [
        ({}, False, NO_ROUTES),
        ({ROUTE.strip("/"): {"protocol": PROTOCOL + 1}}, False, OTHER_PROTOCOL),
        ({ROUTE.strip("/"): {"protocol": PROTOCOL}}, True, None),
        ({"server_info": {"vllm_env": {"VLLM_PLUGINS": ["lora"]}}}, False, None),
        ({"server_info": {"vllm_env": {}}}, False, None),
        ({"server_info": {}}, False, None),
    ],
)
@pytest.mark.usefixtures("unsampled")
async def test_a_plugin_that_is_installed_and_not_used_is_noted(answers: Any, plugin: bool, note: str | None) -> None:
    with Installed(**answers) as engine:
        replica = replica_at(engine.url)
        async with aiohttp.ClientSession() as http:
            await kinds(http, False).contact(replica, "auto")
        assert (replica.api, replica.plugin, replica.notes.get("plugin")) == ("token", plugin, note)


async def test_an_engine_that_tells_no_models_any_more_is_not_taken_for_one_without() -> None:
    """Its adapter forgotten, calls for the base model would go to the base model, under the adapter's version."""
    with ScriptedEngine("qwen3") as engine:
        replica = replica_at(engine.url)
        async with aiohttp.ClientSession() as http:
            await kinds(http, False).contact(replica, "auto")
            known = replica.names
            engine.fault("/v1/models", Fail(404))
            with pytest.raises(EngineUnavailable, match="HTTP 404"):
                await kinds(http, False).contact(replica, "auto")
            assert known == replica.names != ()
            await kinds(http, False).contact(replica, "auto")
