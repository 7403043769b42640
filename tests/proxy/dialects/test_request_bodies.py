"""Request bodies: taken apart without decoding what the session has sent before, and whatever JSON can write is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from proxy.call.draft import Draft
from proxy.call.session import Session
from proxy.dialects.base import Incoming
from proxy.dialects.catalogue import dialects
from proxy.dialects.fields import decode
from proxy.dialects.splitting import split_body
from proxy.errors import RequestError
from proxy.store.states import SessionInfo
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import RunningService
from tests.support.service.running_service import Session as HarnessSession


def test_the_fields_are_decoded_and_the_items_of_the_history_left_raw() -> None:
    split = split_body(b'{"model": "m", "n": 2, "messages": [{"a":  1}, {"b": [2]}]}', "messages")
    assert split.fields == {"model": "m", "n": 2}
    assert [json.loads(item) for item in split.items()] == [{"a": 1}, {"b": [2]}]


@pytest.mark.parametrize("body", [b"{}", b'{"messages": null}', b'{"messages": []}'])
def test_an_absent_history_is_empty(body: bytes) -> None:
    assert split_body(body, "messages").items() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{'a': 1}",
        b'{"a": tru}',
        b"\xff\xfe",
        b'{"messages": {}}',
        b'{"a": NaN}',
        b'{"messages": [NaN]}',
    ],
)
def test_what_is_no_json_object_with_a_list_is_the_callers_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        split_body(body, "messages")


def test_nesting_without_end_is_the_callers_error() -> None:
    with pytest.raises(RequestError):
        split_body(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "messages")


def test_a_lone_surrogate_becomes_the_replacement_character_and_a_pair_stays_a_character() -> None:
    assert decode(rb'{"content": "a\ud800b \ud83d\ude00"}') == {"content": "a\ufffdb \U0001f600"}


@pytest.mark.case(22)
def test_a_lone_surrogate_in_tool_output_is_taken_and_the_next_turn_continues(redis_url: str) -> None:
    """Harnesses cut tool output at a number of UTF-16 units, in the middle of an emoji where one stands there."""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url) as service:
        session = service.session()
        engine.say("hello")
        history: list[dict[str, Any]] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [_call("call_1")]},
            {"role": "tool", "tool_call_id": "call_1", "content": "SURROGATE"},
        ]
        assert _post(session, history).status_code == 200
        engine.say("again")
        history += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
        assert _post(session, history).status_code == 200
        first, second = session.calls
        assert second["parent_id"] == first["call_id"]


def _call(call_id: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": "read", "arguments": "{}"}}


def _post(session: HarnessSession, messages: list[dict[str, object]]) -> httpx.Response:
    body = json.dumps({"model": "policy", "messages": messages}).replace("SURROGATE", "cut \\ud83d")
    return session.post("/v1/chat/completions", body.encode())


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "format": "enum", "enum": ["x"], "nullable": True}}}
RICH: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stop": ["a"],
        "top_logprobs": 1,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    },
    "completions": {"model": "m", "prompt": [[1, 2]], "logprobs": 1, "stop": ["a"], "stream_options": {"include_usage": True}},
    "messages": {
        "model": "m",
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "display": "omitted"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "context_management": {"edits": [{"type": "clear_thinking_1", "keep": {"type": "all"}}]},
    },
    "responses": {
        "model": "m",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "t"},
            {"type": "apply_patch_call", "call_id": "e", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
            {"type": "agent_message", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "additional_tools", "tools": [{"type": "function", "name": "z"}]},
        ],
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
            {"type": "shell", "environment": {"type": "local"}},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "q"}, {"executableCode": {"language": "PYTHON", "code": "x"}}]},
            {
                "role": "model",
                "parts": [{"text": "t", "thought": True}, {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}}],
            },
            {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"output": "r"}}}]},
        ],
        "generationConfig": {
            "stopSequences": ["a"],
            "responseMimeType": "application/json",
            "responseSchema": SCHEMA,
            "thinkingConfig": {"includeThoughts": True, "thinkingLevel": "LOW"},
        },
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    },
}
WRONG: list[Any] = [None, True, 7, "x", [], {}, [None], {"x": None}]


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of a JSON value and those of all that it holds."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from list_paths(inner, (*path, key))


@pytest.mark.parametrize("name", sorted(RICH))
def test_a_value_of_another_type_anywhere_in_a_body_is_the_callers_error(name: str) -> None:
    """Anything but a RequestError would be a 500, for which a rollout is tried again."""
    dialect = dialects()[name]
    path = {"model": "m", "method": "generateContent"} if name == "gemini" else {}

    def parse(body: Any) -> None:
        dialect.parse(Incoming(json.dumps(body).encode(), path), Draft(Session(SessionInfo("s", b"", 0.0))))

    parse(RICH[name])
    for *above, last in list(list_paths(RICH[name]))[1:]:
        for wrong in WRONG:
            body: Any = deepcopy(RICH[name])
            holder = body
            for key in above:
                holder = holder[key]
            holder[last] = wrong
            try:
                parse(body)
            except RequestError as error:
                assert dialect.render_error(error).status == 400, (above, last, wrong)
