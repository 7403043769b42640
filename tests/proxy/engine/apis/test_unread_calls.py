"""A reply whose tool call is not one, or not whole, is marked, on its call and on its row, and trained all the same."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.call.labels import has_invalid_call
from proxy.dialects.base import Request
from proxy.dialects.fields import accepts
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.running_service import RunningService

TOOLS: list[Any] = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
USER: list[Any] = [{"role": "user", "content": "q"}]
GOOD = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'
BROKEN = 'I look.\n<tool_call>\n{"name": "lookup", "arguments": {"key": }}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_could_not_be_read_marks_its_call_and_its_row(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    session = service.session()
    engine.say(GOOD, BROKEN)
    for question in ("one", "two"):
        asked = [{"role": "user", "content": question}]
        answer = session.client.chat.completions.create(model="policy", messages=asked, tools=TOOLS, stream=stream)
        if stream:
            list(answer)
    good, broken = session.calls
    assert (good["invalid_tool_call"], broken["invalid_tool_call"]) == (False, True)
    assert good["reply"]["tool_calls"] and not broken["reply"].get("tool_calls")
    rows, accounting = session.trajectories()
    marked = {tuple(row["call_ids"]): row["metadata"].get("invalid_tool_calls") for row in rows}
    assert marked == {(good["call_id"],): None, (broken["call_id"],): [broken["call_id"]]}
    assert accounting["quarantined"] == []
    (row,) = [row for row in rows if row["metadata"]]
    start, end = row["metadata"]["per_call_spans"][broken["call_id"]]
    assert row["token_ids"][start:end] == broken["completion_ids"]


def test_a_reply_that_was_cut_in_its_call_is_not_marked(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    engine.say(Say(BROKEN))
    session.ask("q", tools=TOOLS, max_tokens=8)
    (call,) = session.calls
    assert (call["finish_reason"], call["invalid_tool_call"]) == ("length", False)


@pytest.mark.parametrize(
    ("message", "unread"),
    [
        ({"content": "hello"}, False),
        ({"content": None, "tool_calls": [{"function": {"name": "lookup", "arguments": '{"a": 1}'}}]}, False),
        ({"content": None, "tool_calls": [{"function": {"name": "lookup", "arguments": ""}}]}, False),
        ({"content": None, "tool_calls": [{"function": {"name": "lookup", "arguments": '{"a": '}}]}, True),
        ({"content": None, "tool_calls": [{"function": {"name": "lookup", "arguments": "[1]"}}]}, True),
        ({"content": 'ok [TOOL_CALLS][{"name": }]'}, True),
        ({"content": "<function=f>\n<parameter=a>1\n"}, True),
    ],
)
def test_what_counts_as_unread(message: dict[str, Any], unread: bool) -> None:
    assert has_invalid_call(Request("chat", "m", [], tools=TOOLS), message, "stop") is unread
    assert not has_invalid_call(Request("chat", "m", []), message, "stop"), "no tools were offered"
    forbidden = Request("chat", "m", [], tools=TOOLS, forward={"tool_choice": "none"})
    assert not has_invalid_call(forbidden, message, "stop")


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def judged(schema: Any, message: dict[str, Any], sampled: str | None = None) -> bool:
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    return has_invalid_call(Request("chat", "m", [], tools=tools), message, "stop", sampled)


KEY = {"type": "object", "properties": {"key": {"type": "string"}, "most": {"type": "integer"}}, "required": ["key"]}


def test_a_call_that_was_never_finished_lacks_what_its_tool_requires() -> None:
    """Parsers deliver such a call as a whole one without arguments."""
    assert judged(KEY, called("look", "{}"))
    assert not judged(KEY, called("look", '{"key": "a"}'))
    assert not judged({"type": "object", "properties": {}}, called("look", "{}"))


def test_a_call_of_a_tool_that_was_not_offered_is_marked() -> None:
    assert judged(KEY, called("open", '{"key": "a"}'))


@pytest.mark.parametrize(
    ("sampled", "invalid"),
    [
        ('<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>', False),
        ("<tool_call>\n<function=look>\n<parameter=key>\na", True),
        ("<tool_call>\n<function=look>\n<parameter=key>\na\n</parameter>\n</function>\n</tool_call>", False),
        ('<minimax:tool_call>\n<invoke name="look">\n<parameter name="key">a</parameter>', True),
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">', True),
        ('[TOOL_CALLS]look[ARGS]{"key": "a"}', False),
        (None, False),
    ],
)
def test_what_the_model_opened_it_must_have_closed(sampled: str | None, invalid: bool) -> None:
    assert judged(KEY, called("look", '{"key": "a"}'), sampled) is invalid


def test_an_opener_that_the_parser_dropped_shows_in_what_was_sampled() -> None:
    text = {"content": 'look{"key": '}
    assert not judged(KEY, text)
    assert judged(KEY, text, '[TOOL_CALLS]look{"key": ')


@pytest.mark.parametrize(
    ("schema", "value", "accepted"),
    [
        ({"type": "string"}, "a", True),
        ({"type": "string"}, 1, False),
        ({"type": "STRING"}, "a", True),
        ({"type": "integer"}, 2.0, True),
        ({"type": "integer"}, True, False),
        ({"type": "number"}, 2, True),
        ({"type": ["string", "null"]}, None, True),
        ({"type": "string", "nullable": True}, None, True),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1], False),
        ({"type": "object", "properties": {"a": {"type": "object", "required": ["b"]}}}, {"a": {}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 1, True),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, [], False),
        ({"type": "fantasy"}, 1, True),
        ({"required": "key"}, {}, True),
        ({"properties": []}, {"a": 1}, True),
        (None, {}, True),
        (True, {}, True),
    ],
)
def test_a_schema_is_held_against_arguments_as_to_required_and_types(schema: Any, value: Any, accepted: bool) -> None:
    assert accepts(schema, value) is accepted


def test_a_schema_that_nests_without_end_is_looked_at_to_a_bound() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    value: dict[str, Any] = {}
    for _ in range(90):
        value = {"a": value}
    assert accepts(schema, value)


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_reply_with_an_unfinished_call_is_marked_and_trained(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {**KEY}}}]
    session = service.session()
    engine.say('<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>')
    answer = session.ask("q", tools=tools, stream=stream)
    if stream:
        list(answer)
    (call,) = session.calls
    assert call["reply"]["tool_calls"] and call["invalid_tool_call"]
    ((row,), accounting) = session.trajectories()
    assert (row["metadata"]["invalid_tool_calls"], accounting["quarantined"]) == ([call["call_id"]], [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_its_parser_closed_for_the_model_is_marked(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    """The parser reads the call, and its schema takes it: only what was sampled shows that the model stopped within it."""
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": KEY}}]
    session = service.session()
    whole = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n'
    engine.say(whole, f"{whole}</tool_call>")
    for question in ("one", "two"):
        answer = session.ask(question, tools=tools, stream=stream)
        if stream:
            list(answer)
    unfinished, finished = session.calls
    assert unfinished["reply"]["tool_calls"] and finished["reply"]["tool_calls"]
    assert (unfinished["invalid_tool_call"], finished["invalid_tool_call"]) == (True, False)
