"""What goes on from a call whose ids no engine told: it is sampled after the whole history, rendered afresh, and its row is true.

A session may move between replicas, of which some tell ids, some only those that were sampled, and some none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engine.altered_engine import AlteredEngine
from tests.support.engine.scripted_engine import ScriptedEngine, logprobs_of
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.conversations import TOOLS, tool_result, turn

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "alpha"}}\n</tool_call>'
SYSTEM = turn("system", "You look keys up until you know the answer, and say it. " * 4)


def without_prompt_ids(told: dict[str, Any]) -> None:
    for holder in (told, *(told.get("choices") or ())):
        holder.pop("prompt_token_ids", None)


Services = dict[str, RunningService]


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[tuple[ScriptedEngine, Services, dict[str, ScriptedEngine]]]:
    """One store, one engine that tells ids and two that do not: services by what their engine tells."""
    redis_server.flushall()
    with (
        ScriptedEngine("qwen3") as engine,
        ScriptedEngine("qwen3", ids=False) as silent,
        AlteredEngine("qwen3", alter=without_prompt_ids) as half,
        RunningService(engine.url, redis_server.url, engine_api="token") as token,
        RunningService(engine.url, redis_server.url, engine_api="chat") as chat,
        RunningService(silent.url, redis_server.url, engine_api="chat") as no_ids,
        RunningService(half.url, redis_server.url, engine_api="chat") as sampled_only,
    ):
        services = {"token": token, "chat": chat, "none": no_ids, "sampled": sampled_only}
        yield engine, services, {"token": engine, "chat": engine, "none": silent, "sampled": half}


def ask(running: Any, session: Session, at: str, said: str, messages: list[Any]) -> dict[str, Any]:
    """The session's next call, at the service of that name."""
    _, services, engines = running
    engines[at].say(said)
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    answer = session.post("/v1/chat/completions", body, at=services[at])
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


@pytest.mark.case(54)
@pytest.mark.parametrize("unknown", ["none", "sampled"])
@pytest.mark.parametrize("goes_on", ["token", "chat"])
def test_what_follows_a_call_without_ids_is_sampled_after_the_whole_history(running: Any, unknown: str, goes_on: str) -> None:
    """It was sampled after the new messages alone, and trained so."""
    engine: ScriptedEngine = running[0]
    session = running[1]["token"].session()
    asked: list[Any] = [SYSTEM, turn("user", "Find alpha.")]
    for at, said in ((goes_on, CALL), (unknown, CALL), (goes_on, CALL), (goes_on, "it is sunny")):
        reply = ask(running, session, at, said, asked)
        asked += [reply, tool_result(reply, "7")] if reply.get("tool_calls") else [reply]
    first, second, third, fourth = session.calls
    assert [call["parent_id"] for call in session.calls] == [None, *(call["call_id"] for call in (first, second, third))]
    assert [call["branch_reason"] for call in (second, third)] == ["ids_unknown", "ids_unknown"]
    assert third["prompt_ids"] == engine.family.render(asked[:6], TOOLS)
    assert fourth["prompt_ids"][: len(third["prompt_ids"])] == third["prompt_ids"]
    rows, accounting = session.trajectories()
    assert [item["reason"] for item in accounting["quarantined"]] == ["no_token_ids"]
    # The row of the first call ends there; the other begins with all that the third was sampled after.
    assert [row["call_ids"] for row in rows] == [[first["call_id"]], [third["call_id"], fourth["call_id"]]]
    assert rows[1]["token_ids"] == [*fourth["prompt_ids"], *fourth["completion_ids"]]
    assert third["logprobs"] == logprobs_of(third["prompt_ids"], third["completion_ids"])


@pytest.mark.case(54)
def test_a_prompt_of_text_goes_on_from_a_reply_without_prompt_ids_afresh(running: Any) -> None:
    """The completions endpoint: the reply's ids are known, what they were sampled after is not."""
    engine, services, engines = running
    session = services["token"].session()
    text = "first second third"
    for at, said in (("sampled", " fourth"), ("token", " value")):
        engines[at].say(said)
        body = {"model": "policy", "prompt": text, "max_tokens": 20}
        answer = session.post("/v1/completions", body, at=services[at])
        assert answer.status_code == 200, answer.text
        text += answer.json()["choices"][0]["text"]
    first, second = session.calls
    assert (second["parent_id"], second["branch_reason"]) == (first["call_id"], "ids_unknown")
    assert second["prompt_ids"] == engine.family.encode("first second third fourth")
    ((row,), _) = session.trajectories()
    assert row["call_ids"] == [second["call_id"]]
