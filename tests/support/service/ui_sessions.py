"""Sessions to look at: a group with rewards, one session with all that can happen in it, a hostile one, and two that are large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from reconstruct.codec import encode
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.calls import Talk

GROUP = "bug 7/a&b"
TOOLS = [
    {"type": "function", "function": {"name": "lookup", "description": "Looks a key up.", "parameters": {"type": "object"}}}
]
PROBE = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>\u202etxet'
LARGE_CALLS = 1000
LONG_TOKENS = 131_072

PAGES: dict[tuple[str, str], str] = {
    ("GET", "/ui/login"): "anyone",
    ("POST", "/ui/login"): "token",
    ("POST", "/ui/logout"): "page",
    ("GET", "/ui/static/{name}"): "anyone",
    ("GET", "/"): "anyone",
    ("GET", "/ui"): "page",
    ("GET", "/ui/"): "page",
    ("GET", "/ui/groups"): "page",
    ("GET", "/ui/group"): "page",
    ("GET", "/ui/compare"): "page",
    ("GET", "/ui/sessions/{session_id}"): "page",
    ("GET", "/ui/sessions/{session_id}/calls/{call_id}"): "page",
    ("GET", "/ui/sessions/{session_id}/rows/{trajectory_id}"): "page",
    ("GET", "/ui/sessions/{session_id}/{tree}/{name}/tokens"): "data",
    ("GET", "/ui/sessions/{session_id}/{tree}/{name}/next"): "data",
    ("GET", "/ui/sessions/{session_id}/calls/{call_id}/messages/{index}"): "data",
    ("GET", "/ui/sessions/{session_id}/download/{name}"): "data",
}
"""Every endpoint of the pages: those for the admin answer others with the log-in page, or as the control side does (data)."""


@pytest.fixture(scope="module", name="engine")
def shown_engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as engine:
        yield engine


@pytest.fixture(scope="module", name="service")
def shown_service(
    request: pytest.FixtureRequest, redis_server: RedisServer, engine: ScriptedEngine
) -> Iterator[RunningService]:
    """On an empty Redis, with the sessions that the module says in SHOWN."""
    redis_server.flushall()
    with RunningService(engine.url, redis_server.url, engine_api="token") as service:
        for put in request.module.SHOWN:
            put(service, engine)
        yield service


def rich_session(service: RunningService, engine: ScriptedEngine, session_id: str) -> Session:
    """Reasoning, tool calls, an edit that branches, and replies under two weight versions, the second of them in mid-session."""
    speak = engine.family.speak
    session = service.session(session_id=session_id, group_id=GROUP, group_size=4, task_id="bug-7", metadata={"split": "train"})
    asked: list[Any] = [
        {"role": "system", "content": "You mend bugs."},
        {"role": "user", "content": "The test of naïve 日本 🙂 fails."},
    ]
    engine.sampler.version = "3"
    engine.say(speak("", reasoning="First look the number up.", calls=[("lookup", {"key": "alpha"})]))
    first = session.answer(asked, tools=TOOLS)
    told = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "alpha is 42"}
    engine.say(speak("It is 42, naïve 日本 🙂.", reasoning="Now I know."))
    second = session.answer([*asked, first, told], tools=TOOLS)
    engine.sampler.version = "4"
    engine.say(speak("Mended."))
    session.answer([*asked, first, told, second, {"role": "user", "content": "Then mend it."}], tools=TOOLS)
    engine.say(speak("Another end of it."))
    session.answer([*asked, first, told, {**second, "content": "It is 41."}, {"role": "user", "content": "Sure?"}], tools=TOOLS)
    return session


def group_of_four(service: RunningService, engine: ScriptedEngine) -> list[str]:
    """Members with the rewards 1, 0 and 0.5, and one that failed; the ids in that order."""
    rich = rich_session(service, engine, "rich")
    rich.close(reward=1.0)
    for name, reward, said in (("poor", 0.0, "I give up."), ("fair", 0.5, "It may be 42.")):
        session = service.session(session_id=name, group_id=GROUP, group_size=4, task_id="bug-7")
        engine.say(engine.family.speak(said))
        session.ask(
            [{"role": "system", "content": "You mend bugs."}, {"role": "user", "content": "The test of naïve 日本 🙂 fails."}]
        )
        session.close(reward=reward)
    failed = service.session(session_id="failed", group_id=GROUP, group_size=4)
    failed.close("failed", error="the agent crashed")
    return ["rich", "poor", "fair", "failed"]


def hostile_session(service: RunningService, engine: ScriptedEngine) -> None:
    """One in which agent and model say what would be markup and script if anybody took it for that."""
    session = service.session(session_id="hostile", group_id=PROBE, task_id=PROBE, metadata={PROBE: PROBE})
    engine.say(engine.family.speak(PROBE, reasoning=PROBE, calls=[("lookup", {"key": PROBE})]))
    session.ask([{"role": "system", "content": PROBE}, {"role": "user", "content": PROBE}], tools=TOOLS)


def large_session(service: RunningService, engine: ScriptedEngine) -> None:
    """A thousand calls: one long run, and a branch at every fiftieth of them."""
    talk, vocabulary = Talk("large"), engine.family.tokenizer.get_vocab_size()
    talk.say("c1", [5, 6, 7], [8, 9], fields=_said(1, "call 1"))
    for number in range(2, LARGE_CALLS + 1):
        parent = f"c{number - 1}" if number % 50 else f"c{max(1, number - 30)}"
        reason = None if number % 50 else "forked"
        new, said = [number % vocabulary, 3], [number * 7 % vocabulary, 4]
        talk.go_on(
            f"c{number}", parent, new, said, version=number // 300, reason=reason, fields=_said(number, f"call {number}")
        )
    imported(service, talk, reward=0.25)


def long_session(service: RunningService, engine: ScriptedEngine) -> None:
    """One call of 131,072 tokens, the last thousand of which were sampled."""
    vocabulary = engine.family.tokenizer.get_vocab_size()
    ids = [11 + (at * 31 + at // 977) % (vocabulary - 11) for at in range(LONG_TOKENS)]
    talk = Talk("long")
    logprobs = [-((at * 37) % 90) / 10 for at in range(1000)]
    told = [{"role": "user", "content": "words of a large file " * 30_000}]
    talk.say("c1", ids[:-1000], ids[-1000:], logprobs=logprobs, version=2, fields=_said(0, "At last.", told))
    imported(service, talk, reward=0.75)


def imported(service: RunningService, talk: Talk, reward: float) -> None:
    """Put a told session into the store, as an archive does."""
    session = {
        "session_id": talk.session,
        "created_at": 1_750_000_000.0,
        "task_id": None,
        "group_id": None,
        "group_size": 1,
        "metadata": {},
        "sampling": {},
        "status": "completed",
        "calls": len(talk.calls),
        "reward": reward,
        "per_call": {},
        "per_branch": {},
        "reward_metadata": {},
        "error": None,
        "closed_at": 1_750_000_600.0,
        "updated_at": 1_750_000_600.0,
    }
    records = [(call.call_id, encode(call)) for call in talk.calls]
    part = {
        "session": session,
        "start": 0,
        "records": records,
        "last": True,
        "delivered": [call.call_id for call in talk.calls],
    }
    answer = service.request("POST", f"/sessions/{talk.session}/records", content=msgspec.msgpack.encode(part))
    assert answer.status_code == 200, answer.text


def _said(number: int, text: str, messages: list[Any] | None = None) -> dict[str, Any]:
    new = messages or [{"role": "user", "content": f"question {number}"}]
    return {
        "messages": json.dumps(new).encode(),
        "messages_from": 0 if number <= 1 else 1,
        "message_count": max(1, 2 * number - 1),
        "reply": json.dumps({"role": "assistant", "content": text}).encode(),
    }
