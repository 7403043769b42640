"""The events of a token's text are made of bytes prepared once: they are what msgspec writes of the whole event, for every text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.base import Delta, Request, StreamRenderer
from proxy.dialects.chat import ChatStream
from proxy.dialects.completions import CompletionsStream
from proxy.dialects.gemini_reply import GeminiReplyOptions, GeminiStream
from proxy.dialects.messages_reply import MessagesStream
from proxy.dialects.responses_reply import ResponsesReplyOptions, ResponsesStream
from proxy.dialects.responses_tools import Toolbox

CALL_ID = "0123456789abcdef01234567"
encode = msgspec.json.Encoder().encode
texts = st.text('aé"\\\n\x7f\u2028😀', min_size=1)


def request(dialect: str, echo: Any = None) -> Request:
    return Request(dialect, 'a "policy"', [], stream=True, n=2, echo=echo)


def data(event: Any, kind: str = "") -> bytes:
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + encode(event) + b"\n\n"


def chat_chunk(text: str, number: int) -> bytes:
    choice = {"index": 1, "delta": {"content": text}, "finish_reason": None, "logprobs": None}
    head = {"id": f"chatcmpl-{CALL_ID}", "object": "chat.completion.chunk", "created": 7, "model": 'a "policy"'}
    return data({**head, "choices": [choice]})


def completions_chunk(text: str, number: int) -> bytes:
    choice = {"index": 1, "text": text, "logprobs": None, "finish_reason": None}
    head = {"id": f"cmpl-{CALL_ID}", "object": "text_completion", "created": 7, "model": 'a "policy"'}
    return data({**head, "choices": [choice]})


def messages_event(text: str, number: int) -> bytes:
    event = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return data(event, "content_block_delta")


def gemini_chunk(text: str, number: int) -> bytes:
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "index": 1}
    return data({"candidates": [candidate], "modelVersion": 'a "policy"', "responseId": CALL_ID})


def responses_event(text: str, number: int) -> bytes:
    kind = "response.output_text.delta"
    where = {"output_index": 0, "item_id": f"msg_{CALL_ID}", "content_index": 0}
    event = {"type": kind, **where, "delta": text, "logprobs": [], "sequence_number": number}
    return data(event, kind)


STREAMS: dict[str, tuple[Callable[[], StreamRenderer], Callable[[str, int], bytes]]] = {
    "chat": (lambda: ChatStream(request("chat"), CALL_ID, 7), chat_chunk),
    "completions": (lambda: CompletionsStream(request("completions", ""), CALL_ID, 7), completions_chunk),
    "messages": (lambda: MessagesStream(request("messages", "shown"), CALL_ID, 3), messages_event),
    "gemini": (lambda: GeminiStream(request("gemini", GeminiReplyOptions(False, 0, True)), CALL_ID), gemini_chunk),
    "responses": (
        lambda: ResponsesStream(request("responses", ResponsesReplyOptions({}, Toolbox(), False, False, None)), CALL_ID, 7),
        responses_event,
    ),
}


@pytest.mark.parametrize("dialect", STREAMS)
@settings(max_examples=30)
@given(st.lists(texts, min_size=1, max_size=4))
def test_a_text_is_written_as_msgspec_writes_its_event(dialect: str, said: list[str]) -> None:
    open_stream, write = STREAMS[dialect]
    stream = open_stream()
    # In some dialects the first text opens something.
    begun = stream.open() + stream.write(Delta(1, "first"))
    number = begun.count(b"sequence_number")
    for text in said:
        assert stream.write(Delta(1, text)) == write(text, number)
        number += 1


@settings(max_examples=30)
@given(texts, texts)
def test_thoughts_and_arguments_are_written_as_msgspec_writes_their_events(thought: str, arguments: str) -> None:
    messages, chat, responses = (STREAMS[dialect][0]() for dialect in ("messages", "chat", "responses"))
    for stream in (messages, chat, responses):
        stream.open()
        stream.write(Delta(1, reasoning="first"))
    delta = Delta(1, reasoning=thought)
    piece: dict[str, Any] = {"type": "thinking_delta", "thinking": thought}
    event: dict[str, Any] = {"type": "content_block_delta", "index": 0, "delta": piece}
    assert messages.write(delta) == data(event, event["type"])
    fields = {"reasoning_content": thought, "reasoning": thought}
    choice = {"index": 1, "delta": fields, "finish_reason": None, "logprobs": None}
    head = {"id": f"chatcmpl-{CALL_ID}", "object": "chat.completion.chunk", "created": 7, "model": 'a "policy"'}
    assert chat.write(delta) == data({**head, "choices": [choice]})
    event = {"type": "response.reasoning_text.delta", "output_index": 0, "item_id": f"rs_{CALL_ID}", "content_index": 0}
    assert responses.write(delta) == data({**event, "delta": thought, "sequence_number": 5}, event["type"])
    call: dict[str, Any] = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    messages.write(Delta(1, tool_calls=[call]))
    piece = {"type": "input_json_delta", "partial_json": arguments}
    event = {"type": "content_block_delta", "index": 1, "delta": piece}
    written = messages.write(Delta(1, tool_calls=[{"index": 0, "function": {"arguments": arguments}}]))
    assert written == data(event, event["type"])
