"""At first contact an engine samples one token as a call would, so that one whose answers cannot be read is down and says the way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import pytest
from openai import InternalServerError

from proxy.engine.apis import contact
from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.probe import Unreadable, trace_connections
from proxy.engine.apis.versions import Versions
from proxy.engine.pool.membership import replica_at
from proxy.engine.replica import Replica, parse_version
from proxy.errors import EngineUnavailable
from tests.proxy.engine.test_detection import kinds
from tests.support.engine.altered_engine import AlteredEngine
from tests.support.engine.scripted_engine import Exchange, Fail, Hang, ScriptedEngine
from tests.support.engine.strict_server import StrictServer
from tests.support.service.running_service import RunningService, wait_until

GENERATE, RENDER, CHAT = "/inference/v1/generate", "/v1/chat/completions/render", "/v1/chat/completions"
PAGE = b"<html><body>Welcome</body></html>"


class Spoiled(ScriptedEngine):
    """Answers these paths with this, whatever is sampled; `streamed_alone`: where a stream is asked for."""

    def __init__(
        self, spoil: dict[str, tuple[int, bytes]] | None = None, *, streamed_alone: bool = False, **fields: Any
    ) -> None:
        super().__init__(**fields)
        self.spoil = spoil or {}
        self.shows_contact = True
        for (method, path), route in list(self._routes.items()):
            self._routes[method, path] = self._spoiled(path, route, streamed_alone)

    def _spoiled(self, path: str, route: Any, streamed_alone: bool) -> Any:
        async def answer(exchange: Exchange, body: Any) -> Any:
            asked = exchange.method == "GET" or bool(body)
            if path not in self.spoil or not asked or (streamed_alone and not body.get("stream")):
                return await route(exchange, body)
            status, content = self.spoil[path]
            headers = [(b"content-type", b"text/html"), (b"content-length", str(len(content)).encode())]
            await exchange._send({"type": "http.response.start", "status": status, "headers": headers})
            return await exchange._send({"type": "http.response.body", "body": content})

        return answer


@asynccontextmanager
async def meeting(engine: ScriptedEngine, base: str = "") -> AsyncIterator[tuple[EngineKinds, Replica]]:
    """The kinds, and a replica that is alive after each contact, as the pool's is. `base`: what its URL goes on with."""
    with engine:
        async with aiohttp.ClientSession() as http, aiohttp.ClientSession(trace_configs=[trace_connections()]) as probing:
            yield kinds(http, False, probing), replica_at(engine.url + base)


async def meet(engine: ScriptedEngine, asked: str = "auto") -> Replica:
    async with meeting(engine) as (known, replica):
        await known.contact(replica, asked)
        return replica


async def meet_unreadable(engine: ScriptedEngine, asked: str = "auto") -> str:
    async with meeting(engine) as (known, replica):
        with pytest.raises(Unreadable) as raised:
            await known.contact(replica, asked)
        return raised.value.message


@pytest.mark.parametrize("lists_models", [True, False])
@pytest.mark.parametrize(
    ("given", "base", "api_path"),
    [
        ("/v1beta/openai", "/v1beta/openai", ""),
        ("/api/paas/v4/", "/api/paas/v4", ""),
        ("", "", ""),
        ("/gateway", "/gateway/v1", "/v1"),
        ("/gateway/v1", "/gateway/v1", "/v1"),
    ],
)
async def test_the_openai_routes_are_found_under_the_base_with_v1_and_without(
    given: str, base: str, api_path: str, lists_models: bool
) -> None:
    """Without /v1 every call was answered 404."""
    server = StrictServer(key="", base=base, lists_models=lists_models)
    async with meeting(server, given) as (known, replica):
        await known.contact(replica, "auto")
        assert (replica.api, replica.api_path, replica.sample.was_read) == ("chat", api_path, True)
        assert replica.models == (("policy",) if lists_models else ())
        replica.alive, server.received = True, []
        await known.contact(replica, "auto")
        assert f"{base}/models" in server.paths() and not [path for path in server.paths() if path.endswith("completions")]


@pytest.mark.parametrize(
    ("base", "others", "api_path"),
    [("/api", ["/api/v1/models"], ""), ("/v1", ["/models"], "/v1")],
    ids=["a page where the list would be", "a list without calls"],
)
async def test_the_routes_stand_where_calls_are_taken(base: str, others: list[str], api_path: str) -> None:
    server = StrictServer(key="", base=base, lists_models=base != "/v1")
    for path in others:
        server._routes["GET", path] = _show_page if base != "/v1" else server._list
    async with meeting(server, base) as (known, replica):
        await known.contact(replica, "chat")
        assert (replica.api_path, replica.sample.was_read) == (api_path, True)


async def _show_page(exchange: Exchange, body: Any) -> None:
    await exchange.answer_text(PAGE.decode())


async def test_vllm_is_asked_for_its_models_once_and_nowhere_else() -> None:
    engine = ScriptedEngine("qwen3")
    await meet(engine)
    asked = [path for path in engine.paths() if path.endswith(("/models", "/chat/completions"))]
    assert asked == ["/v1/models"]


@pytest.mark.parametrize(("asked", "path"), [("token", GENERATE), ("chat", CHAT)])
async def test_one_token_is_sampled_the_way_a_call_is_and_only_at_first_contact(asked: str, path: str) -> None:
    engine = ScriptedEngine("qwen3")
    engine.shows_contact = True
    async with meeting(engine) as (known, replica):
        for _ in range(3):
            await known.contact(replica, asked)
            replica.alive = True
        (generation,) = engine.generations
        assert (generation.path, generation.sampling["max_tokens"], generation.stream) == (path, 1, True)
        assert replica.trainable and replica.notes == {}


NO_ID = b'{"choices": [{"index": 0, "token_ids": [5], "logprobs": {"content": [{"token": 5, "logprob": "much"}]}}]}'
UNREADABLE = [
    ((200, PAGE), "something unexpected: no event, but '<html>"),
    ((200, b"[1, 2]"), "something unexpected: no event, but '[1, 2]"),
    ((200, b'data: {"choices": 7}\n\ndata: [DONE]\n\n'), "streamed something unexpected"),
    ((500, PAGE), "failed with HTTP 500: <html>"),
    ((400, b'{"message": "Extra inputs are not permitted"}'), "Extra inputs are not permitted"),
    ((404, b'{"detail": "Not Found"}'), "does not know"),
]


@pytest.mark.parametrize(
    ("asked", "path", "spoiled", "said"),
    [
        *(("auto", GENERATE, *each) for each in UNREADABLE),
        *(("chat", CHAT, *each) for each in UNREADABLE),
        ("auto", GENERATE, (200, b"data: " + NO_ID + b"\n\ndata: [DONE]\n\n"), "at `$.choices[0].logprobs.content[0]"),
        ("auto", RENDER, (200, b"[]"), "answered /v1/chat/completions/render with something unexpected"),
    ],
)
async def test_an_engine_that_cannot_be_read_is_told_with_its_version_and_the_way_out(
    asked: str, path: str, spoiled: tuple[int, bytes], said: str
) -> None:
    engine = Spoiled({path: spoiled, "/v1/completions": spoiled})
    engine.version = "0.26.0"
    reason = await meet_unreadable(engine, asked)
    assert reason.startswith("a sample of one token could not be read (") and said in reason
    assert "version 0.26.0" in reason
    assert ("use --engine-api chat, or vLLM 0." in reason) == (asked == "auto")


async def test_an_unreadable_engine_is_not_sampled_from_at_each_visit_and_serves_once_it_can_be_read() -> None:
    engine = Spoiled({GENERATE: (200, PAGE)})
    async with meeting(engine) as (known, replica):
        for _ in range(3):
            with pytest.raises(Unreadable):
                await known.contact(replica, "auto")
            replica.alive = True
        # A stream was asked for, and then a whole answer.
        assert [asked.path for asked in engine.contacts].count(GENERATE) == 2
        engine.spoil.clear()
        replica.sample.again_at = 0.0
        await known.contact(replica, "auto")
        assert replica.sample.was_read and replica.trainable


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("banana", "tells no version that can be read, but 'banana'"),
        (["0.32.0"], """tells no version that can be read, but '{"version": ["0.32.0"]}'"""),
        ("9" * 300, "tells no version that can be read, but"),
        ("0.35.1", "is vLLM 0.35.1, and the token path is known to work on vLLM"),
        ("0.32.0+cpu", ""),
        (None, ""),
    ],
)
async def test_a_version_that_is_nonsense_or_not_known_is_noted_and_the_engine_serves(version: Any, told: str) -> None:
    engine = ScriptedEngine("qwen3")
    engine.version = version
    replica = await meet(engine)
    assert replica.trainable and replica.notes.get("version", "").startswith(told)
    assert replica.version == (version if version in ("0.35.1", "0.32.0+cpu") else "")


@pytest.mark.parametrize("content", [PAGE, b"[]", b"", b"\xff\xfe"])
async def test_a_page_in_place_of_a_version_is_noted(content: bytes) -> None:
    replica = await meet(Spoiled({"/version": (200, content)}))
    assert replica.version == "" and "tells no version that can be read" in replica.notes["version"]


def test_a_version_is_known_between_the_first_and_the_last_also_with_suffixes() -> None:
    versions = Versions("SGLang", run=(), first="0.5.5", last="0.5.23")
    assert [versions.knows(parse_version(text) or ()) for text in ("0.5.4", "0.5.5.post1", "0.5.23", "0.5.24", "1.0")] == [
        *(False, True, True),
        *(False, False),
    ]
    minor = Versions("vLLM", run=("0.32",), first="0.24", last="0.33")
    texts = ("0.23.9", "0.24.0", "v0.33.2rc1.dev7+g1234abc", "0.34.0")
    assert [minor.knows(parse_version(text) or ()) for text in texts] == [False, True, True, False]
    assert [parse_version(text) for text in ("", "1", "main", "0.x", "-1.2")] == [None] * 5
    assert str(versions) == "SGLang 0.5.5 to 0.5.23 (by its source, never run)"


def drop_ids(told: dict[str, Any]) -> None:
    for choice in told.get("choices") or ():
        choice.pop("token_ids", None)
    told.pop("prompt_token_ids", None)


def drop_logprobs(told: dict[str, Any]) -> None:
    for choice in told.get("choices") or ():
        choice.pop("logprobs", None)


@pytest.mark.parametrize("drop", [drop_ids, drop_logprobs])
@pytest.mark.parametrize("asked", ["token", "chat"])
async def test_an_engine_without_ids_or_logprobs_serves_untrained_and_says_why(
    asked: str, drop: Callable[[dict[str, Any]], None]
) -> None:
    engine = AlteredEngine("qwen3", alter=drop)
    engine.shows_contact = True
    replica = await meet(engine, asked)
    assert not replica.trainable
    assert replica.notes["ids"] == "returns no token ids, or no logprobs: its calls are served and never trained"


async def test_an_engine_whose_streams_cannot_be_read_serves_the_rest_and_says_so() -> None:
    refused = (400, b'{"message": "return_token_ids is not supported with streaming"}')
    replica = await meet(Spoiled({CHAT: refused}, streamed_alone=True), "chat")
    assert replica.trainable
    assert replica.notes["streams"] == "answers no stream that can be read: return_token_ids is not supported with streaming"


@pytest.mark.parametrize("asked", ["token", "chat"])
async def test_a_model_without_a_chat_template_serves_prompts_and_says_so(asked: str) -> None:
    refused = (400, b'{"message": "you must provide a chat template"}')
    replica = await meet(Spoiled({RENDER: refused, CHAT: refused}), asked)
    assert replica.trainable
    assert replica.notes["messages"] == "refuses messages (you must provide a chat template): it serves prompts alone"


class OneMessage(ScriptedEngine):
    """Its template takes no dialogue."""

    def __init__(self) -> None:
        super().__init__("qwen3")
        render = self._routes["POST", RENDER]

        async def refuse(exchange: Exchange, body: Any) -> None:
            dialogue = len(body.get("messages") or ()) > 1
            await (exchange.fail(Fail(400, "one message at most")) if dialogue else render(exchange, body))

        self._routes["POST", RENDER] = refuse


async def test_a_template_that_does_not_tell_where_a_turn_ends_is_noted_at_first_contact() -> None:
    assert "from which the end of a turn can be read" in (await meet(OneMessage())).notes["turn_end_unknown"]
    assert "turn_end_unknown" not in (await meet(ScriptedEngine("qwen3"))).notes


async def test_a_busy_engine_serves_unread_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "SAMPLE_SECONDS", 0.2)
    engine = ScriptedEngine("qwen3").fault(GENERATE, Hang())
    engine.shows_contact = True
    async with meeting(engine) as (known, replica):
        await known.contact(replica, "auto")
        assert "busy or hangs: it serves, and is asked again" in replica.notes["unread"] and not replica.sample.missing
        replica.alive = True
        # A slow machine may not have come as far as the fault.
        engine.clear_faults()
        monkeypatch.setattr(contact, "SAMPLE_SECONDS", 60.0)
        await known.contact(replica, "auto")
        assert replica.sample.was_read and replica.notes == {}


async def test_an_engine_that_says_how_long_to_wait_serves_unread_and_is_left_alone_until_then() -> None:
    """An API at its rate limit."""
    server = StrictServer(key="").busy("3600")
    server.shows_contact = True
    async with meeting(server) as (known, replica):
        for _ in range(3):
            await known.contact(replica, "chat")
            replica.alive = True
        assert len(server.bodies()) == 1 and "is too busy (HTTP 429)" in replica.notes["unread"]
        replica.sample.again_at = 0.0
        await known.contact(replica, "chat")
        assert replica.sample.was_read and "unread" not in replica.notes


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_too_busy_for_a_sample_is_down_until_it_takes_one(status: int) -> None:
    engine = ScriptedEngine("qwen3").fault(GENERATE, Fail(status))
    engine.shows_contact = True
    async with meeting(engine) as (known, replica):
        with pytest.raises(EngineUnavailable, match="too busy") as raised:
            await known.contact(replica, "auto")
        assert not isinstance(raised.value, Unreadable)
        await known.contact(replica, "auto")
        assert replica.sample.was_read


async def test_a_paused_engine_is_asked_once_it_runs() -> None:
    engine = ScriptedEngine("qwen3")
    async with meeting(engine) as (known, replica):
        async with aiohttp.ClientSession() as http:
            await (await http.post(f"{engine.url}/pause?mode=keep")).read()
            await known.contact(replica, "auto")
            assert replica.sample.missing and engine.contacts == []
            await (await http.post(f"{engine.url}/resume")).read()
        replica.alive = True
        await known.contact(replica, "auto")
        assert replica.sample.was_read and not replica.sample.missing


def change_version(engine: ScriptedEngine) -> None:
    engine.version = "0.33.0"


def change_model(engine: ScriptedEngine) -> None:
    engine.model = "another"


def restart_without_token_routes(engine: ScriptedEngine) -> None:
    for path in (GENERATE, RENDER):
        del engine._routes["POST", path]
    port = engine.port
    engine.stop()
    engine.start(port)


@pytest.mark.parametrize(
    ("change", "api"), [(change_version, "token"), (change_model, "token"), (restart_without_token_routes, "chat")]
)
async def test_an_engine_that_is_another_at_the_next_visit_is_met_again(
    change: Callable[[ScriptedEngine], None], api: str
) -> None:
    engine = ScriptedEngine("qwen3")
    engine.version = "0.32.0"
    async with meeting(engine) as (known, replica):
        await known.contact(replica, "auto")
        replica.alive = True
        asked, first = engine.paths().count(GENERATE), len(engine.contacts)
        await known.contact(replica, "auto")
        assert (engine.paths().count(GENERATE), len(engine.contacts)) == (asked, first)
        await asyncio.to_thread(change, engine)
        await known.contact(replica, "auto")
        assert len(engine.contacts) > first and replica.sample.was_read
        assert (replica.api, replica.version, replica.models) == (api, engine.version, (engine.model,))


async def test_an_engine_that_lists_no_models_and_refuses_the_sample_serves_and_says_so() -> None:
    replica = await meet(ScriptedEngine(plain=True))
    assert not replica.trainable and "it lists no models, and refuses a sample" in replica.notes["models"]


def test_an_unreadable_engine_is_down_with_the_reason_in_every_place_and_serves_when_it_was_mended(redis_url: str) -> None:
    engine = Spoiled({GENERATE: (200, PAGE)})
    engine.version = "0.40.0"
    with engine, RunningService(engine.url, redis_url) as service:
        said = "a sample of one token could not be read (token path, version 0.40.0)"
        answer = httpx.get(f"{service.url}/readyz")
        assert answer.status_code == 503 and said in answer.json()["reason"]
        (replica,) = service.request("GET", "/engines").json()["replicas"]
        assert (replica["status"], replica["version"]) == ("down", "0.40.0")
        assert said in replica["reason"] and replica["reason"].endswith("0.33)")
        session = service.session()
        with pytest.raises(InternalServerError, match="could not be read"):
            session.ask([{"role": "user", "content": "hi"}])
        engine.spoil.clear()
        port = engine.port
        engine.stop()
        engine.start(port)
        wait_until(lambda: httpx.get(f"{service.url}/readyz").status_code == 200, 120, "ready")
        assert session.ask([{"role": "user", "content": "hi"}]).choices
        (noted,) = httpx.get(f"{service.url}/readyz").json()["notes"]
        assert noted.startswith(
            f"engine {replica['name']} (version 0.40.0, path token, trainable, takes weights) is vLLM 0.40.0"
        )
        assert len(session.calls) == 1
