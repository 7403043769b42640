"""Well-formed bodies of each dialect with something broken in them: never a 500, never a record of what was refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import RunningService

HARNESS_ROUNDS = 80

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    1e308,
    "",
    "x",
    "\x00",
    "é\ud83d\udeaa",
    "../..",
    [],
    [[]],
    {},
    {"": {}},
    [None],
]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "t",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "tool_choice": "auto",
        "stop": ["x"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "n": 1,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "text"},
    },
    "/v1/completions": {
        "model": "policy",
        "prompt": "q",
        "max_tokens": 4,
        "n": 1,
        "echo": False,
        "logprobs": 1,
        "stream": False,
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {
                "type": "reasoning",
                "id": "rs_x",
                "summary": [{"type": "summary_text", "text": "t"}],
                "encrypted_content": "eA==",
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "item_reference", "id": "msg_x"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g", "parameters": {}}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": "resp_x",
        "store": False,
        "stream": False,
        "metadata": {"a": "b"},
        "max_output_tokens": 4,
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "eA=="},
                    {"type": "tool_use", "id": "toolu_x", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_x", "content": [{"type": "text", "text": "r"}]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
        "output_config": {"effort": "low"},
        "stream": False,
    },
    "/v1beta/models/policy:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "q"}, {"inlineData": {"mimeType": "image/png", "data": "eA=="}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}, "id": "c"}, "thoughtSignature": "eA=="}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "r"}, "id": "c"}}]},
        ],
        "tools": [
            {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {}}}]},
            {"googleSearch": {}},
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "temperature": 1,
            "maxOutputTokens": 4,
            "candidateCount": 1,
            "stopSequences": ["x"],
            "responseSchema": {"type": "OBJECT"},
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
        },
    },
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
BODIES["/v1beta/models/policy:countTokens"] = BODIES["/v1beta/models/policy:generateContent"]


SETTINGS = {"max_model_len": 2048}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def broken(dice: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """The body with a few values taken away, replaced or wrapped."""
    body = deepcopy(body)
    for _ in range(dice.randint(1, 3)):
        *folders, last = dice.choice(list(places(body)) or [("x",)])
        holder: Any = body
        for name in folders:
            holder = holder[name]
        if dice.random() < 0.3:
            holder.pop(last, None) if isinstance(holder, dict) else holder.pop(last)
        elif dice.random() < 0.2 and isinstance(holder, dict):
            holder[last] = [holder.get(last)]
        else:
            holder[last] = deepcopy(dice.choice(ODD))
    return body


@pytest.mark.parametrize("path", BODIES)
def test_a_broken_body_is_answered_or_refused_and_only_an_answer_is_recorded(
    engine: ScriptedEngine, service: RunningService, path: str
) -> None:
    dice = random.Random(path)
    for _ in range(HARNESS_ROUNDS // 10):
        session, answered = service.session(), 0
        for _ in range(10):
            body = broken(dice, BODIES[path])
            answer = session.post(path, body)
            assert answer.status_code < 500, (answer.status_code, answer.text, body)
            answered += answer.status_code == 200 and "count" not in path
        recorded = session.calls
        assert (len(recorded) >= answered) if answered else recorded == []
        assert all(call["status"] == "finished" for call in recorded)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a":' * 400 + b"1" + b"}" * 400, b"[" * 100_000, b'{"model": "\\ud800"}'],
    ids=["nothing", "half", "list", "null", "text", "bytes", "deep", "very deep", "surrogate"],
)
def test_what_is_no_request_is_400_and_leaves_no_record(token_service: RunningService, path: str, content: bytes) -> None:
    """It is refused before anything depends on the path to the engine."""
    session = token_service.session()
    answer = session.post(path, content)
    assert answer.status_code == 400, answer.text
    assert session.calls == []


USER = [{"role": "user", "content": "q"}]
NUMBERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ({"messages": USER}, ("top_k", "seed", "temperature", "max_tokens", "logit_bias", "min_p")),
    "/v1/completions": ({"prompt": "q"}, ("top_k", "max_tokens", "logit_bias")),
    "/v1/responses": ({"input": "q"}, ("top_p", "max_output_tokens", "logit_bias", "repetition_penalty")),
    "/v1/messages": ({"messages": USER, "max_tokens": 9}, ("top_k", "max_tokens", "temperature")),
}
GEMINI = "/v1beta/models/policy:generateContent"


@pytest.mark.parametrize("number", [2**64, -(10**30)], ids=["65 bits", "low"])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((path, name) for path, (_, names) in NUMBERS.items() for name in names),
        *((GEMINI, name) for name in ("seed", "topK", "maxOutputTokens", "presencePenalty")),
    ],
)
def test_a_number_that_no_record_can_hold_is_refused_before_anything_is_sampled(
    engine: ScriptedEngine, service: RunningService, path: str, field: str, number: int
) -> None:
    """The record was made after the reply was sampled, and could not be written: 500, and an intent without an end."""
    body: dict[str, Any]
    session, value = service.session(), {"7": number} if field == "logit_bias" else number
    if path == GEMINI:
        body = {"contents": [{"parts": [{"text": "q"}]}], "generationConfig": {field: value}}
    else:
        body = {"model": "policy", **NUMBERS[path][0], field: value}
    answer = session.post(path, body)
    assert answer.status_code == 400 and f"'{field}'" in answer.text, answer.text
    assert session.calls == [] and engine.generations == []


def test_a_whole_number_that_google_writes_as_a_float_is_no_less_bounded(service: RunningService) -> None:
    session = service.session()
    body = {"contents": [{"parts": [{"text": "q"}]}], "generationConfig": {"seed": 1e308}}
    answer = session.post(GEMINI, body)
    assert answer.status_code == 400 and "'seed' must be an integer of at most 64 bits" in answer.text, answer.text
    assert session.calls == []
