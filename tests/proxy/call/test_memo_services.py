"""A service that remembers, forgets, is restarted and remembers again asks its engine for the same and records the same as one that
remembers nothing."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session

TURNS = 9
MINTED = re.compile(r"[0-9a-f]{24,}")
TIMES = ("started_at", "engine_seconds", "own_seconds")
"""What differs from run to run in a call, beside minted ids."""


class Agent:
    """A harness of one dialect: it sends its whole history, and sometimes goes back or changes what stands around it."""

    dialect: str
    path: str
    listed: str

    def __init__(self, session: Session, seed: int) -> None:
        self.session, self.random = session, random.Random(seed)
        self.history: list[Any] = []
        self.around: dict[str, Any] = {}

    def turn(self) -> None:
        kind = self.random.randrange(10)
        if kind == 0 and len(self.history) > 2:
            del self.history[-2:]
        elif kind == 1:
            self.around = {**self.around, **self.limit(self.random.randrange(20, 40))}
        elif kind == 2:
            self.around = {} if self.around else self.tools()
        self.history.append(self.say("word " * self.random.choice([1, 5, 1200])))
        body = {"model": "policy", **self.around, self.listed: self.history}
        answer = self.session.post(self.path, body)
        assert answer.status_code == 200, answer.text
        self.history += self.read(answer.json())

    def say(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def limit(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    def tools(self) -> dict[str, Any]:
        raise NotImplementedError

    def read(self, answer: Any) -> list[Any]:
        raise NotImplementedError


class Chat(Agent):
    dialect, path, listed = "chat", "/v1/chat/completions", "messages"

    def tools(self) -> dict[str, Any]:
        return {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}

    def read(self, answer: Any) -> list[Any]:
        return [answer["choices"][0]["message"]]


class Messages(Agent):
    dialect, path, listed = "messages", "/v1/messages", "messages"

    def tools(self) -> dict[str, Any]:
        return {"system": "be brief", "tools": [{"name": "f", "input_schema": {"type": "object"}}]}

    def read(self, answer: Any) -> list[Any]:
        return [{"role": "assistant", "content": answer["content"]}]


class Responses(Agent):
    dialect, path, listed = "responses", "/v1/responses", "input"

    def limit(self, tokens: int) -> dict[str, Any]:
        return {"max_output_tokens": tokens}

    def tools(self) -> dict[str, Any]:
        return {"instructions": "be brief", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}

    def read(self, answer: Any) -> list[Any]:
        return list(answer["output"])


class Gemini(Agent):
    dialect, path, listed = "gemini", "/v1beta/models/policy:generateContent", "contents"

    def say(self, text: str) -> Any:
        return {"role": "user", "parts": [{"text": text}]}

    def limit(self, tokens: int) -> dict[str, Any]:
        return {"generationConfig": {"maxOutputTokens": tokens}}

    def tools(self) -> dict[str, Any]:
        return {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}]}

    def read(self, answer: Any) -> list[Any]:
        return [answer["candidates"][0]["content"]]


AGENTS: list[Callable[[Session, int], Agent]] = [Chat, Messages, Responses, Gemini]


def play(engine: ScriptedEngine, redis_url: str, *, api: str, memo: bool) -> tuple[list[Any], list[Any]]:
    """What the engine was asked to sample after, and what was recorded, without ids and times. With a memo, one session is kept at a
    time, and the service is restarted in the middle."""
    engine.reset()
    engine.script = lambda generation, index: engine.family.speak(f"answer {len(engine.generations)}", reasoning="hm ")
    order, agents = random.Random(5), list[Agent]()
    names: dict[str, str] = {}
    settings: dict[str, Any] = {"session_memo": memo, **({"session_cache": 1} if memo else {})}

    def some_turns(service: RunningService) -> None:
        for _ in range(TURNS):
            order.choice(agents).turn()

    with RunningService(engine.url, redis_url, engine_api=api, **settings) as service:
        agents.extend(kind(service.session(), number) for number, kind in enumerate(AGENTS))
        some_turns(service)
    with RunningService(engine.url, redis_url, engine_api=api, **settings) as service:
        for agent in agents:
            agent.session._service = service
            agent.session.base_url = re.sub(r"http://[^/]*", service.url, agent.session.base_url)
        some_turns(service)
        calls = [call for agent in agents for call in agent.session.calls]
    asked = [(each.prompt, list(each.prompt_ids), each.body) for each in engine.generations]
    told = json.dumps([asked, [{name: value for name, value in call.items() if name not in TIMES} for call in calls]])
    found = json.loads(MINTED.sub(lambda each: names.setdefault(each[0], f"id {len(names)}"), told))
    return found[0], found[1]


@pytest.mark.parametrize("api", ["token", "chat"])
def test_a_service_that_forgets_and_remembers_samples_and_records_as_one_that_never_remembers(
    redis_server: RedisServer, api: str
) -> None:
    with ScriptedEngine("qwen3", max_model_len=100_000) as engine:
        asked, recorded = play(engine, redis_server.url, api=api, memo=True)
        wanted, expected = play(engine, redis_server.url, api=api, memo=False)
    assert len(asked) == 2 * TURNS and asked == wanted
    assert recorded == expected
