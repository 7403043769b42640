"""The first form of tools in Chat Completions, as clients of 2023 speak it: `functions`, `function_call`, the role `function`."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.template_families import FAMILIES
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.conversations import TOOLS, assert_sampled_as_recorded, turn

FUNCTIONS = [TOOLS[0]["function"]]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "lookup", "arguments": {{"key": "b"}}}}\n</tool_call>'
ARGUMENTS = {"name": "lookup", "arguments": '{"key": "a"}'}


def result(content: str) -> dict[str, Any]:
    return {"role": "function", "name": "lookup", "content": content}


def post(session: Session, **fields: Any) -> httpx.Response:
    body = {"model": "policy", "messages": [turn("user", "q")], **fields}
    return session.post("/v1/chat/completions", body)


def streamed(session: Session, messages: list[Any]) -> tuple[dict[str, Any], str]:
    """The assistant message as clients of that time put it together, and the finish reason."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    finish_reason = ""
    for chunk in session.ask(messages, functions=FUNCTIONS, stream=True):
        (choice,) = chunk.choices
        delta, finish_reason = choice.delta, choice.finish_reason or finish_reason
        assert delta.tool_calls is None
        if delta.content:
            message["content"] = (message["content"] or "") + delta.content
        if delta.function_call is not None:
            called = message.setdefault("function_call", {"name": "", "arguments": ""})
            called["name"] += delta.function_call.name or ""
            called["arguments"] += delta.function_call.arguments or ""
    return message, finish_reason


def whole(session: Session, messages: list[Any]) -> tuple[dict[str, Any], str]:
    (choice,) = session.ask(messages, functions=FUNCTIONS).choices
    assert choice.message.tool_calls is None
    return choice.message.model_dump(exclude_none=True) | {"content": choice.message.content}, choice.finish_reason


@pytest.mark.parametrize("asked", [whole, streamed])
def test_a_loop_of_function_calls_is_one_row(service: RunningService, engine: ScriptedEngine, asked: Any) -> None:
    """`functions` was refused with 400. Nothing of such a history has an id: each call is found by what was said before it."""
    engine.say(CALL, CALL, "done")
    session = service.session()
    messages: list[Any] = [turn("user", "look a up, twice")]
    for answer in ("one", "two"):
        message, finish_reason = asked(session, messages)
        assert (message["function_call"], finish_reason) == (ARGUMENTS, "function_call")
        messages += [message, result(answer)]
    message, finish_reason = asked(session, messages)
    assert (message["content"], "function_call" in message, finish_reason) == ("done", False, "stop")
    calls = session.calls
    assert_sampled_as_recorded(engine, calls)
    assert [call["branch_reason"] for call in calls] == [None] * 3
    for before, after in itertools.pairwise(calls):
        said = [*before["prompt_ids"], *before["completion_ids"]]
        assert after["prompt_ids"][: len(said)] == said
    rows, accounting = session.trajectories()
    assert len(rows) == 1 and accounting["exported_tokens"] == sum(len(call["completion_ids"]) for call in calls)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_template_takes_a_history_without_ids(redis_server: RedisServer, family: str) -> None:
    """Mistral's refuses ids of other lengths than nine."""
    redis_server.flushall()
    speak = FAMILIES[family].speak
    with ScriptedEngine(family) as engine, RunningService(engine.url, redis_server.url, engine_api="token") as service:
        said = speak(calls=[("lookup", {"key": "a"})])
        engine.say(said, said, speak("done"))
        session, messages = service.session(), [turn("user", "q")]
        for answer in ("one", "two"):
            messages += [whole(session, messages)[0], result(answer)]
        assert whole(session, messages)[0]["content"].strip() == "done"
        assert len(session.trajectories()[0]) == 1


def test_functions_are_rendered_as_the_tools_they_are(service: RunningService, engine: ScriptedEngine) -> None:
    """The model sees the same ids, whichever form its harness speaks, in the request and in the history."""
    engine.say(CALL, "done", CALL, "done")
    old, new = service.session(), service.session()
    old.ask([turn("user", "q"), whole(old, [turn("user", "q")])[0], result("r")], functions=FUNCTIONS)
    told = new.answer("q", tools=TOOLS)
    answer = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "r"}
    new.ask([turn("user", "q"), told, answer], tools=TOOLS)
    assert [call["prompt_ids"] for call in old.calls] == [call["prompt_ids"] for call in new.calls]


@pytest.mark.parametrize("asked", [whole, streamed])
def test_of_several_calls_the_first_is_told_and_the_conversation_goes_on(
    token_service: RunningService, engine: ScriptedEngine, asked: Any
) -> None:
    """The sampled ids stay whole: the next call is sampled after both calls and the result of the first."""
    engine.say(TWO, "done")
    session = token_service.session()
    message, _ = asked(session, [turn("user", "q")])
    assert (message["function_call"], (message["content"] or "").strip()) == (ARGUMENTS, "I look.")
    asked(session, [turn("user", "q"), message, result("r")])
    assert len(session.trajectories()[0]) == 1


def test_a_function_may_be_chosen(service: RunningService, engine: ScriptedEngine) -> None:
    seen = []
    for choice in ("auto", "none", {"name": "lookup"}):
        engine.say("fine")
        assert post(service.session(), functions=FUNCTIONS, function_call=choice).status_code == 200
        (body,) = [each.body for each in engine.received if "messages" in (each.body or ())]
        seen.append(body.get("tool_choice"))
        engine.received.clear()
    assert seen == ["auto", "none", {"type": "function", "function": {"name": "lookup"}}]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions", "'functions' is an older form of 'tools'"),
        (
            {"functions": FUNCTIONS, "function_call": "auto", "tool_choice": "auto"},
            "function_call",
            "'function_call' is an older form of 'tool_choice'",
        ),
        ({"function_call": "auto"}, "function_call", "needs 'functions'"),
        ({"tools": TOOLS, "function_call": "auto"}, "function_call", "with 'tools' send 'tool_choice'"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call", "'auto', 'none' or an object"),
        ({"functions": FUNCTIONS, "function_call": {"name": "other"}}, "function_call", "one of 'functions'"),
        ({"functions": FUNCTIONS, "function_call": ["auto"]}, "function_call", "'auto', 'none' or an object"),
        ({"functions": "lookup"}, "functions", "must be a list of objects"),
        ({"functions": [{"parameters": {}}]}, "functions", "must have a 'name'"),
        ({"messages": [{"role": "function", "content": "r"}]}, "messages", "must have a 'name'"),
        ({"messages": [{"role": "assistant", "function_call": "lookup"}]}, "messages", "an object with 'name' and 'arguments'"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages", "'name' and 'arguments'"),
        ({"messages": [{"role": "user", "content": "q", "function_call": ARGUMENTS}]}, "messages", "an assistant's message"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "function_call": ARGUMENTS,
                        "tool_calls": [{"id": "x", "type": "function", "function": ARGUMENTS}],
                    }
                ]
            },
            "messages",
            "without 'tool_calls'",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    token_service: RunningService, engine: ScriptedEngine, fields: dict[str, Any], param: str, says: str
) -> None:
    session = token_service.session()
    answer = post(session, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"] and error["param"] == param
    assert session.calls == [] and engine.generations == []
