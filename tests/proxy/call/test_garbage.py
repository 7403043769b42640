"""Calls leave no reference cycles, however they end, and nothing that stays: the garbage collector of a server looks for cycles rarely.

A cycle through a call keeps its body and its reply until the collector looks, and with it as many others as have come by then.
"""

from __future__ import annotations

import base64
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest

from benchmarks.application import Application, application
from benchmarks.processes import ADMIN, ROOT
from cli.serving.connection import HttpConnection, HttpTimeouts
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.engine.scripted_images import SEEING, picture, url_of
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

CALLS = 3
PATH = "/v1/chat/completions"
SAMPLED = {"token": "/inference/v1/generate", "chat": PATH}
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "q"}]}

IMAGE = picture()
_TEXT = base64.b64encode(IMAGE).decode()
_MORE: list[Any] = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
_SHOWN: dict[str, Any] = {
    "chat": {"type": "image_url", "image_url": {"url": url_of(IMAGE)}},
    "responses": {"type": "input_image", "image_url": url_of(IMAGE)},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _TEXT}},
}
_HISTORIES = {dialect: [{"role": "user", "content": [part]}, *_MORE] for dialect, part in _SHOWN.items()}
_CONTENTS = [
    {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": _TEXT}}]},
    {"role": "model", "parts": [{"text": "a"}]},
    {"role": "user", "parts": [{"text": "q"}]},
]
TURNS: dict[str, Any] = {
    PATH: {"model": "policy", "messages": _HISTORIES["chat"]},
    "/v1/responses": {"model": "policy", "input": _HISTORIES["responses"]},
    "/v1/messages": {"model": "policy", "max_tokens": 99, "messages": _HISTORIES["messages"]},
    "/v1beta/models/policy:generateContent": {"contents": _CONTENTS},
}
"""In each dialect, an image, a turn of the assistant and a question."""

REFUSED: dict[str, Any] = {"model": "", "generationConfig": {"temperature": "hot"}}
"""A field that every dialect refuses after it has read the history."""

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(SEEING, most_images=1) as engine:
        yield engine.say("hello world")


@pytest.fixture(params=["token", "chat"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def app(api: str, engine: ScriptedEngine, redis_server: RedisServer) -> AsyncIterator[Application]:
    redis_server.flushall()
    async with application(engine.url, redis_server.port, api) as app:
        yield app


def is_own(thing: Any) -> bool:
    """Whether it is the service's, or a frame of the service's, which holds what its function does."""
    if isinstance(thing, FrameType):
        return thing.f_code.co_filename.startswith(f"{ROOT}/proxy/")
    return str(type(thing).__module__).startswith(("cli.", "proxy.", "reconstruct."))


def own_kinds(things: list[Any]) -> Counter[str]:
    return Counter(_kind(thing) for thing in things if is_own(thing))


def _kind(thing: Any) -> str:
    return f"frame of {thing.f_code.co_qualname}" if isinstance(thing, FrameType) else type(thing).__qualname__


@contextmanager
def cycles() -> Iterator[Counter[str]]:
    """Counts the service's own things that the block leaves in cycles, by kind."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(own_kinds(gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def ask(
    app: Application, key: str, status: int, body: dict[str, Any], leaves_at: bytes | None = None, path: str = PATH
) -> None:
    for _ in range(CALLS):
        assert (await app.ask("POST", path, key, body, leaves_at))[0] == status


@STREAMED
async def test_an_answered_call_leaves_no_cycle(app: Application, stream: bool) -> None:
    _, key = await app.opened()
    body = {**BODY, "stream": stream}
    await ask(app, key, 200, body)
    with cycles() as found:
        await ask(app, key, 200, body)
    assert not found


@STREAMED
@pytest.mark.parametrize("failure", [Fail(400), Fail(500)], ids=["refused", "failed"])
async def test_a_call_that_its_engine_does_not_take_leaves_no_cycle(
    app: Application, api: str, engine: ScriptedEngine, stream: bool, failure: Fail
) -> None:
    _, key = await app.opened()
    with cycles() as found:
        for _ in range(CALLS):
            engine.fault(SAMPLED[api], failure)
            status, _ = await app.ask("POST", PATH, key, {**BODY, "stream": stream})
            assert status >= 400
    assert not found


async def test_a_refused_request_leaves_no_cycle(app: Application) -> None:
    _, key = await app.opened()
    with cycles() as found:
        await ask(app, key, 400, {"messages": 3})
        await ask(app, "wrong", 401, BODY)
    assert not found


@pytest.mark.parametrize("path", TURNS)
async def test_a_refused_turn_of_any_dialect_leaves_no_cycle(app: Application, path: str) -> None:
    """A Responses request was in a cycle with what it had read of the assistant, and stayed with its images."""
    _, key = await app.opened()
    with cycles() as found:
        await ask(app, key, 400, {**TURNS[path], **REFUSED}, path=path)
    assert not found


@pytest.mark.parametrize("path", TURNS)
async def test_the_tree_of_a_closed_session_goes_with_its_last_call(app: Application, path: str) -> None:
    """It remembered an assistant's turn of a Responses request together with the request, which holds the tree."""

    async def live() -> None:
        session_id, key = await app.opened()
        await ask(app, key, 200, TURNS[path], path=path)
        await app.post(f"/sessions/{session_id}/close", ADMIN, {"status": "completed", "reward": 1.0})

    await live()
    with cycles() as found:
        await live()
    assert not found


async def test_a_harness_that_hangs_up_leaves_no_cycle(app: Application, engine: ScriptedEngine) -> None:
    _, key = await app.opened()
    engine.say(Say("hello world", gate=threading.Event(), gate_after=2))
    with cycles() as found:
        await ask(app, key, 200, {**BODY, "stream": True}, leaves_at=b"hello")
    assert not found


@STREAMED
def test_the_servers_own_connection_leaves_no_cycle(engine: ScriptedEngine, redis_server: RedisServer, stream: bool) -> None:
    redis_server.flushall()
    own = partial(HttpConnection, patience=HttpTimeouts())
    with RunningService(engine.url, redis_server.url, protocol=own) as service:
        session = service.session()
        session.ask("q")
        with cycles() as found:
            for _ in range(CALLS):
                answer = session.ask("q", stream=stream)
                for _ in answer if stream else ():
                    pass
        assert not found


def test_control_requests_and_their_connections_leave_no_cycle(engine: ScriptedEngine, redis_server: RedisServer) -> None:
    """The scope of each held its connection: closing a thousand sessions left 58,000 objects, and finding them took 100 ms."""
    redis_server.flushall()
    own = partial(HttpConnection, patience=HttpTimeouts())
    with RunningService(engine.url, redis_server.url, protocol=own) as service:
        service.session()
        with cycles() as found:
            for _ in range(CALLS):
                service.session()
                assert service.request("GET", "/sessions").status_code == 200
                assert service.request("GET", "/nowhere").status_code == 404
        assert not found


async def test_calls_of_sessions_that_are_gone_leave_nothing(app: Application) -> None:
    async def live() -> Counter[str]:
        """What is there after a session's life."""
        session_id, key = await app.opened()
        await ask(app, key, 200, BODY)
        await app.post(f"/sessions/{session_id}/close", ADMIN, {"status": "completed", "reward": 1.0})
        assert (await app.ask("DELETE", f"/sessions/{session_id}", ADMIN, {}))[0] < 300
        gc.collect()
        return own_kinds(gc.get_objects())

    bounded = {"IdText", "_Known", "ObjectText", "_Written"}
    """JSON text of the most recent sessions, which `IdTexts` limits by number and bytes."""

    async def least() -> Counter[str]:
        """What is there after each of several lives. asyncio keeps a cancelled timer, and with it the call that it was made in, until
        there are a hundred or its time has come: a hundred are fewer than these lives make."""
        found = await live()
        for _ in range(7):
            found &= await live()
        return found

    # A connection that is opened during a call keeps the call's timeline as long as it lives; there are few, but a busy machine opens
    # one now and then. What calls leave is there each time.
    before = await least()
    for _ in range(4):
        grown, before = (after := await least()) - before, after
        if not grown.keys() - bounded:
            break
    assert not grown.keys() - bounded
