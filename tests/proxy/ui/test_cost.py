"""What the pages of /ui ask for and send, of a long call and of a session of many calls: what is shown, and not what there is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.ui_sessions import LONG_TOKENS, imported, large_session, long_session
from tests.support.sessions.calls import Talk

SHOWN = 400
"""Tokens that a page of them has."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as engine:
        yield engine


@pytest.fixture(scope="module")
def service(redis_server: RedisServer, engine: ScriptedEngine) -> Iterator[RunningService]:
    redis_server.flushall()
    # The engine is asked nothing but what the pages ask for: nobody looks at it meanwhile.
    with RunningService(engine.url, redis_server.url, engine_api="token", engine_watch_seconds=3600.0) as service:
        yield service


def sent(service: RunningService, path: str) -> int:
    """Bytes."""
    answer = service.request("GET", path)
    assert answer.status_code == 200, answer.text
    return len(answer.content)


def test_of_a_call_of_128k_tokens_no_more_is_spelled_and_sent_than_is_shown(
    service: RunningService, engine: ScriptedEngine
) -> None:
    long_session(service, engine)
    assert sent(service, "/ui/sessions/long") < 60_000
    for start in (0, LONG_TOKENS // 2, LONG_TOKENS - SHOWN):
        engine.reset()
        shown = service.request("GET", "/ui/sessions/long/calls/c1/tokens", params={"start": start}).json()
        assert (len(shown["ids"]), shown["total"]) == (SHOWN, LONG_TOKENS)
        assert len(json.dumps(shown)) < 40 * SHOWN
        # With a few ids around the page that begin or end its characters.
        spelled = [len(json.dumps(asked.body)) for asked in engine.received if asked.method == "POST"]
        assert 1 <= len(spelled) <= 4 and sum(spelled) < 100 * SHOWN
    engine.reset()
    service.request("GET", "/ui/sessions/long/calls/c1/next", params={"what": "surprise"})
    assert engine.received == []


def test_a_page_of_a_thousand_calls_is_as_large_as_one_of_two_hundred(service: RunningService, engine: ScriptedEngine) -> None:
    large_session(service, engine)
    talk = Talk("fewer")
    talk.say("c1", [5, 6, 7], [8, 9])
    for number in range(2, 201):
        talk.go_on(f"c{number}", f"c{number - 1}" if number % 50 else f"c{number - 30}", [number, 3], [number * 7, 4])
    imported(service, talk, reward=0.25)
    fewer, large = (sent(service, f"/ui/sessions/{name}") for name in ("fewer", "large"))
    # Turns come thirty at a time, and the tree is drawn in runs, of which the larger one has more.
    assert large < 2 * fewer
    assert sent(service, "/ui/sessions/large?at=c1000") < 1.1 * large
    assert sent(service, "/ui/sessions/large/turns?start=300") < large
    assert sent(service, "/ui/sessions/large/calls/c1000/details") < 20_000
