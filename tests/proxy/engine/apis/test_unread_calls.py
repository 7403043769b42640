"""A reply whose tool call the engine's parser could not read is marked, on its call and on its row, and trained all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from proxy.call.record import has_unread_call
from proxy.dialects.base import Request
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running, both_paths
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

TOOLS: list[Any] = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
USER: list[Any] = [{"role": "user", "content": "q"}]
GOOD = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'
BROKEN = 'I look.\n<tool_call>\n{"name": "lookup", "arguments": {"key": }}\n</tool_call>'


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Running]:
    with both_paths(redis_server) as running:
        yield running


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
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}, False),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, False),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}, True),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, True),
        ({"content": 'ok [TOOL_CALLS][{"name": }]'}, True),
        ({"content": "<function=f>\n<parameter=a>1\n"}, True),
    ],
)
def test_what_counts_as_unread(message: dict[str, Any], unread: bool) -> None:
    assert has_unread_call(Request("chat", "m", [], tools=TOOLS), message, "stop") is unread
    assert not has_unread_call(Request("chat", "m", []), message, "stop"), "no tools were offered"
    forbidden = Request("chat", "m", [], tools=TOOLS, forward={"tool_choice": "none"})
    assert not has_unread_call(forbidden, message, "stop")
