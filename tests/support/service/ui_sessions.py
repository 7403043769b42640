"""Sessions to show: a group with rewards, an agent's run with all that can happen in one, a hostile one, and two large ones."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from proxy.api.sessions import session_as_wire
from proxy.store.states import SessionInfo, SessionState
from proxy.ui.conversation import CallSummary
from reconstruct.codec import encode
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.calls import Talk

GROUP = "bug 7/a&b"
TOOLS: list[dict[str, Any]] = [
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
    ("GET", "/ui/groups/{group_id:path}"): "page",
    ("GET", "/ui/concepts"): "page",
    ("GET", "/ui/compare"): "page",
    ("GET", "/ui/tasks"): "page",
    ("GET", "/ui/tasks/{task_id}"): "page",
    ("GET", "/ui/run"): "page",
    ("POST", "/ui/run"): "page",
    ("GET", "/ui/run/{name}"): "page",
    ("GET", "/ui/sessions/{session_id}"): "page",
    ("POST", "/ui/sessions/{session_id}/review"): "page",
    ("GET", "/ui/sessions/{session_id}/turns"): "page",
    ("GET", "/ui/sessions/{session_id}/calls/{call_id}/details"): "page",
    ("GET", "/ui/sessions/{session_id}/{tree}/{name}/tokens"): "data",
    ("GET", "/ui/sessions/{session_id}/{tree}/{name}/next"): "data",
    ("GET", "/ui/sessions/{session_id}/calls/{call_id}/messages/{index}"): "data",
    ("GET", "/ui/sessions/{session_id}/calls/{call_id}/messages/{index}/images/{number}"): "data",
    ("GET", "/ui/sessions/{session_id}/media/{digest}"): "data",
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


FEEDBACK = """3 of 4 tests passed.
tests/test_roman.py::test_four: AssertionError: assert 'IIII' == 'IV'
  - IV
  + IIII"""
AGENT = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": name}} for name in ("bash", "task")]


def agent_session(service: RunningService, engine: ScriptedEngine) -> None:
    """A coding agent whose reward is 0, with the evaluator's feedback and the agent's log.

    Calls: 1 runs a tool, 2 starts a sub-agent, 3 and 4 are that sub-agent's, 5 continues 2, 6 is a compaction, which is quarantined,
    7 begins again after it, 8 branches from 7."""
    session, speak = (
        service.session(session_id="agent", task_id="roman", metadata={"harness": "claude-code"}),
        engine.family.speak,
    )

    def say(*reply: Any, **more: Any) -> None:
        engine.say(speak(*reply, **more))

    def answer(messages: list[Any], **headers: str) -> dict[str, Any]:
        return session.answer(messages, tools=AGENT, extra_headers=headers)

    def result(reply: dict[str, Any], text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": text}

    system = {"role": "system", "content": "You are a coding agent. " + "Work in small steps and run the tests. " * 20}
    asked = [system, {"role": "user", "content": "Implement to_roman(n) in roman.py. The tests are in tests/."}]
    say("I will look at the files first.", reasoning="The repository is unknown to me.", calls=[("bash", {"command": "ls"})])
    one = answer(asked)
    asked += [one, result(one, "roman.py\ntests/\n")]
    say("", calls=[("task", {"prompt": "Find the rules of Roman numerals."})])
    two = answer(asked)
    helper = [
        {"role": "system", "content": "You are a helper."},
        {"role": "user", "content": "Find the rules of Roman numerals."},
    ]
    say("", calls=[("bash", {"command": "grep -r IV docs"})])
    three = answer(helper, **{"x-claude-code-agent-id": "helper-1"})
    say("Four is written IV: a smaller sign before a larger one is subtracted.")
    four = answer([*helper, three, result(three, "docs/rules.md: IV is 4")], **{"x-claude-code-agent-id": "helper-1"})
    asked += [two, result(two, four["content"])]
    say("Now I write it.", calls=[("bash", {"command": "cat > roman.py <<EOF\ndef to_roman(n):\n    return 'I' * n\nEOF"})])
    five = answer(asked)
    say("The agent wrote roman.py and has yet to run the tests.")
    answer([*asked, five, result(five, ""), {"role": "user", "content": "Summarize."}], **{"x-openai-subagent": "compact"})
    again = [system, {"role": "user", "content": "So far: roman.py is written. Finish the work."}]
    say("All done: to_roman is implemented.", reasoning="The tests surely pass.")
    seven = answer(again)
    say("It is finished.")
    answer([*again, {**seven, "content": "All done."}, {"role": "user", "content": "Are you sure?"}])
    posted = {"reward": 0.0, "metadata": {"feedback": FEEDBACK, "tests": {"passed": 3, "failed": 1}}}
    assert service.request("POST", "/sessions/agent/reward", json=posted).status_code == 200
    stored = service.request(
        "PUT", "/sessions/agent/log", json={"text": "$ agent --print\nAll done: to_roman is implemented.\n"}
    )
    assert stored.status_code == 204
    session.close(reward=0.0)


IMAGE_WIDTH, IMAGE_HEIGHT = 48, 32


def picture_session(service: RunningService, engine: ScriptedEngine) -> None:
    """A call whose messages have a screenshot, an image by address, and one that claims to be SVG."""
    talk = Talk("picture")
    urls = [
        f"data:image/png;base64,{base64.b64encode(_png()).decode()}",
        "http://127.0.0.1:9/x.png",
        "data:image/svg+xml;base64,PHN2Zz4=",
    ]
    parts = [{"type": "text", "text": "What is here?"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    talk.say("c1", [5, 6, 7], [8, 9], fields=_said(0, "A gradient.", [{"role": "user", "content": parts}]))
    imported(service, talk, reward=1.0)


def _png() -> bytes:
    rows = b"".join(
        b"\0" + bytes(value for x in range(IMAGE_WIDTH) for value in (5 * x, 7 * y, 120)) for y in range(IMAGE_HEIGHT)
    )
    header = struct.pack(">IIBBBBB", IMAGE_WIDTH, IMAGE_HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def hostile_session(service: RunningService, engine: ScriptedEngine) -> None:
    """One in which agent and model say what would be markup and script if anybody took it for that."""
    session = service.session(session_id="hostile", group_id=PROBE, task_id=PROBE, metadata={PROBE: PROBE})
    engine.say(engine.family.speak(PROBE, reasoning=PROBE, calls=[("lookup", {"key": PROBE})]))
    session.ask([{"role": "system", "content": PROBE}, {"role": "user", "content": PROBE}], tools=TOOLS)
    posted = {"reward": 0.0, "metadata": {"feedback": PROBE}}
    assert service.request("POST", "/sessions/hostile/reward", json=posted).status_code == 200


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


def summary(number: int, parent: int | None, reason: str = "", **fields: Any) -> CallSummary:
    """What a page shows of call number `number`, c3 for instance, which started as the number says."""
    texts = ("role_source", "agent", "status", "finish_reason", "quarantine_reason", "preview")
    numbers = ("prompt_tokens", "sampled_tokens", "engine_seconds")
    values: dict[str, Any] = {
        **dict.fromkeys(texts, ""),
        **dict.fromkeys(numbers, 1),
        **{"role": "main", "versions": (), "mean_logprob": None, "delivered": True, "tools": (), "in_tree": True},
        **{"started_at": float(number), "parent_id": None if parent is None else f"c{parent}", "branch_reason": reason},
    }
    return CallSummary(number=number, call_id=f"c{number}", **{**values, **fields})


def imported(service: RunningService, talk: Talk, reward: float) -> None:
    """Put a told session into the store, as an archive does."""
    ended = 1_750_000_600.0
    info = SessionInfo(talk.session, b"", created_at=ended - 600.0)
    state = SessionState(info, status="completed", calls=len(talk.calls), reward=reward, closed_at=ended, updated_at=ended)
    records = [(call.call_id, encode(call)) for call in talk.calls]
    part = {
        "session": session_as_wire(state),
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
