"""A session that is stripped or dropped from memory, at whatever moment, gives the engine and the store the very same as one that stays."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import redis

from proxy.call.cache import SessionCache
from proxy.store import keys
from reconstruct.codec import decode
from reconstruct.records import Call
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_images import SEEING, picture, url_of
from tests.support.engine.scripted_sampling import Generation
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.random_harness import RandomHarness

Processes = tuple[RunningService, RunningService]
NAMED_BY_CALL = {"request_id", "cache_salt"}
NOT_COMPARED = ("started_at", "engine_seconds", "own_seconds", "digest")
"""Times, and the digest of a body that has ids of calls in it."""
PICTURES = [url_of(picture(colour), "image/png") for colour in ("red", "blue")]


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(SEEING, most_images=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def processes(engine: ScriptedEngine, redis_server: RedisServer) -> Iterator[dict[str, Processes]]:
    """By path to the engine, two processes over one store."""
    with (
        RunningService(engine.url, redis_server.url, engine_api="token", strict_models=True) as token,
        RunningService(engine.url, redis_server.url, engine_api="token", strict_models=True) as other_token,
        RunningService(engine.url, redis_server.url, engine_api="chat", strict_models=True) as chat,
        RunningService(engine.url, redis_server.url, engine_api="chat", strict_models=True) as other_chat,
    ):
        yield {"token": (token, other_token), "chat": (chat, other_chat)}


class Evictions:
    """What becomes of the sessions that the processes keep: at each moment as the seed says."""

    def __init__(self, processes: Processes, seed: int) -> None:
        self._processes = processes
        self._random = random.Random(seed)
        self.stripped = self.dropped = 0

    def strike(self) -> None:
        for process in self._processes:
            done, loop = threading.Event(), process._server._loop
            assert loop is not None
            loop.call_soon_threadsafe(self._evict, process, done.set)
            done.wait()

    def _evict(self, process: RunningService, done: Callable[[], None]) -> None:
        app: Any = process._server.config.app
        cache: SessionCache = app._services.cache
        try:
            for session_id in list(cache._kept):
                fate = self._random.random()
                if fate < 0.7:
                    cache._strip(session_id)
                    self.stripped += 1
                elif fate < 0.8:
                    cache._drop(session_id)
                    self.dropped += 1
        finally:
            done()


class Walk(RandomHarness):
    """A harness whose course depends on its seed and on the replies alone. Each request goes to one of two processes, and it also sends
    pictures, text to complete and responses that continue others."""

    def __init__(self, session: Session, other: RunningService, seed: int, strike: Callable[[], None]) -> None:
        super().__init__(session.base_url, session.api_key, seed)
        self._strike = strike
        self._routes = random.Random(seed)
        self._clients = [self._client, self._client.with_options(base_url=f"{other.url}/s/{session.session_id}/v1")]
        self._texts = [""]
        self._responses: list[str | None] = [None]

    def steps(self) -> dict[str, tuple[int, Callable[[], None]]]:
        steps = {name: step for name, step in super().steps().items() if name not in ("walk_away", "at_once")}
        return {**steps, "look": (2, self.look), "complete": (3, self.complete), "respond": (3, self.respond)}

    def look(self) -> None:
        talk = self._pick()
        seen = {"type": "image_url", "image_url": {"url": self.random.choice(PICTURES)}}
        talk.messages.append({"role": "user", "content": [{"type": "text", "text": self._text()}, seen]})
        self._reply(talk)

    def complete(self) -> None:
        prompt = self.random.choice(self._texts) + self._text()
        answer = self._route().completions.create(model="policy", prompt=prompt, max_tokens=16)
        self._texts.append(prompt + answer.choices[0].text)
        self.done.calls += 1

    def respond(self) -> None:
        before = self.random.choice(self._responses)
        for _ in range(3):
            after = {} if before is None else {"previous_response_id": before}
            answer = self._route().responses.create(model="policy", input=self._text(), max_output_tokens=16, **after)
            before = answer.id
            self._responses.append(before)
            self.done.calls += 1

    def _sent(self, request: dict[str, Any]) -> Any:
        self._client = self._route()
        return super()._sent(request)

    def _route(self) -> Any:
        self._strike()
        return self._routes.choice(self._clients)


def say(generation: Generation, index: int) -> str:
    """Depends on the request alone."""
    family = SEEING
    ids = zlib.crc32(np.asarray(generation.prompt_ids, dtype=np.int32).tobytes())
    draw = random.Random(f"{ids} {generation.sampling.get('seed')} {index}")
    words = " ".join(draw.choices(["door", "red", "é", "漢", "key", "7"], k=draw.randint(1, 6)))
    if generation.tools and draw.random() < 0.5:
        arguments = {"door": draw.choice(["red", "blue"]), "coats": draw.choice([1, 2])}
        return family.speak(words, calls=[("paint", arguments)] * draw.choice([1, 2]))
    return family.speak(words, reasoning=draw.choice(["", words]))


def play(
    engine: ScriptedEngine, processes: Processes, redis_url: str, seed: int, *, evicted: bool
) -> tuple[list[Any], list[Any]]:
    """(what the engine was asked to sample, the records), without the names of calls and the times."""
    engine.reset()
    evictions = Evictions(processes, seed)
    strike = evictions.strike if evicted else lambda: None

    def script(generation: Generation, index: int) -> str:
        strike()
        return say(generation, index)

    engine.script = script
    policy = ("strict", "minted")[seed % 2]
    session = processes[0].session(echo_policy=policy)
    harness = Walk(session, processes[1], seed, strike)
    try:
        harness.run(14)
    finally:
        harness.close()
    assert not evicted or (evictions.stripped and evictions.dropped)
    with redis.Redis.from_url(redis_url) as store:
        records = [decode(record) for record in store.lrange(keys.calls(session.session_id), 0, -1)]
    names = {call.call_id: f"call{number}" for number, call in enumerate(records)} | {session.session_id: "session"}
    names |= {theirs: f"tool{number}" for number, call in enumerate(records) for theirs in call.engine_tool_call_ids}
    asked = [{name: value for name, value in made.body.items() if name not in NAMED_BY_CALL} for made in engine.generations]
    return _rename(asked, names), _rename([_show(call) for call in records], names)


def _show(call: Call) -> dict[str, Any]:
    shown = {name: getattr(call, name) for name in Call.__dataclass_fields__ if name not in NOT_COMPARED}
    return {**shown, **{name: shown[name].decode() for name in ("messages", "reply", "preamble")}}


def _rename(found: Any, names: dict[str, str]) -> list[Any]:
    text = msgspec.json.encode(found, enc_hook=np.ndarray.tolist).decode()
    for name, other in names.items():
        text = text.replace(name, other)
    return list(msgspec.json.decode(text))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("api", ["token", "chat"])
def test_evictions_at_any_moment_change_no_request_to_the_engine_and_no_record(
    engine: ScriptedEngine, processes: dict[str, Processes], redis_server: RedisServer, api: str, seed: int
) -> None:
    asked, records = play(engine, processes[api], redis_server.url, seed, evicted=False)
    asked_then, records_then = play(engine, processes[api], redis_server.url, seed, evicted=True)
    assert asked_then == asked
    assert records_then == records
