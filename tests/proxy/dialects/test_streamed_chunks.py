"""A chunk of a stream tells one thing, in every dialect: reasoning, text, or a piece of one tool call.

AutoGen takes the text of a chunk and passes over the calls beside it: half of the job was not done, and nothing said so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.dialects.base import Choice, Reply, Request
from proxy.dialects.gemini_reply import GeminiReplyOptions, GeminiStream
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import RunningService, Session

PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
QUESTION = "look up a and b"
REPLY = """<think>
Two keys.
</think>

I look them up.
<tool_call>
{"name": "lookup", "arguments": {"key": "a"}}
</tool_call>
<tool_call>
{"name": "lookup", "arguments": {"key": "b"}}
</tool_call>"""
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [{"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}],
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": QUESTION, "tools": [{"type": "function", "name": "lookup", "parameters": PARAMETERS}]},
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 500,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "lookup", "input_schema": PARAMETERS}],
        },
    ),
    "gemini": (
        "/v1beta/models/policy:streamGenerateContent?alt=sse",
        {
            "contents": [{"role": "user", "parts": [{"text": QUESTION}]}],
            "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
            "tools": [{"functionDeclarations": [{"name": "lookup", "parametersJsonSchema": PARAMETERS}]}],
        },
    ),
}


def events(session: Session, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer = session.post(path, body)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(each) for each in data]


def told_in_chat(event: Mapping[str, Any]) -> list[str]:
    delta = event["choices"][0]["delta"]
    told = [name for name in ("reasoning_content", "content") if delta.get(name)]
    return told + ["call" for _ in delta.get("tool_calls") or ()]


def told_in_gemini(event: Mapping[str, Any]) -> list[str]:
    told = []
    for part in event["candidates"][0]["content"]["parts"]:
        if "functionCall" in part:
            told.append("call")
        elif part["text"]:
            told.append("reasoning_content" if part.get("thought") else "content")
    return told


def told_by_kind(event: Mapping[str, Any]) -> list[str]:
    """Of a dialect whose events have a type: they tell one thing each by that."""
    kind = event.get("delta", {}).get("type") if event["type"] == "content_block_delta" else event["type"]
    kinds = {"thinking_delta": "reasoning_content", "text_delta": "content", "input_json_delta": "call"}
    kinds |= {"response.output_text.delta": "content", "response.function_call_arguments.delta": "call"}
    kinds |= {
        "response.reasoning_text.delta": "reasoning_content",
        "response.reasoning_summary_text.delta": "reasoning_content",
    }
    return [kinds[kind]] if kind in kinds else []


TOLD = {"chat": told_in_chat, "gemini": told_in_gemini, "messages": told_by_kind, "responses": told_by_kind}


@pytest.mark.case(38)
@pytest.mark.parametrize("dialect", REQUESTS)
def test_a_chunk_tells_one_thing(service: RunningService, engine: ScriptedEngine, dialect: str) -> None:
    """The end of the text and the calls come out of the engine's parser at the same time, with the end of the reply."""
    path, body = REQUESTS[dialect]
    engine.say(REPLY)
    session = service.session()
    told = [TOLD[dialect](event) for event in events(session, path, body | {"model": "policy", "stream": True})]
    assert max(len(kinds) for kinds in told) == 1
    in_order = [kind for kinds in told for kind in kinds]
    assert list(dict.fromkeys(in_order)) == ["reasoning_content", "content", "call"]
    assert len(session.calls[0]["reply"]["tool_calls"]) == 2


def test_a_gemini_reply_that_is_told_at_its_end_is_told_thing_by_thing() -> None:
    """Where no text goes out before the end, as with stop texts."""
    calls = [{"id": f"call_{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(2)]
    message = {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": calls}
    wanted = GeminiReplyOptions(thoughts=True, top_logprobs=0, sse=True)
    stream = GeminiStream(Request("gemini", "policy", [], echo=wanted), "0123456789abcdef01234567")
    stream.open()
    choice = Choice(0, "0123456789abcdef01234567", message, "tool_calls", 9)
    closing = stream.close(Reply("0123456789abcdef01234567", "policy", 0, 3, [choice]))
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in closing.splitlines() if line]
    assert [told_in_gemini(chunk) for chunk in chunks] == [["reasoning_content"], ["content"], ["call"], ["call"]]
    assert ["finishReason" in chunk["candidates"][0] for chunk in chunks] == [False, False, False, True]
    assert ["usageMetadata" in chunk for chunk in chunks] == [False, False, False, True]
