"""A reply of the Messages dialect, whole or as server-sent events, and its errors.

A stream is message_start, the blocks one after the other, message_delta, message_stop. A block ends when another begins; the signature
is the last event of a thinking block. Thinking that the harness did not ask to see goes out as pings: the model is at work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from proxy.dialects.base import Choice, Delta, Reply, Request, seal, tool_call_id
from proxy.dialects.fields import TEXT, UNPARSED, arguments_object, encode, split_event
from proxy.dialects.messages_request import wire_id
from proxy.errors import ContextTooLong, EngineFailed, VerbatimError


def render_message(request: Request, reply: Reply) -> bytes:
    (choice,) = reply.choices
    content = _render_blocks(choice, request.echo)
    return encode(_message_body(reply.reply_id, reply.model, content, _ending(choice), _usage_of(reply)))


class MessagesStream:
    """Renders one reply; knows which block is open and whether anything was sent."""

    def __init__(self, request: Request, reply_id: str, prompt_tokens: int) -> None:
        self._model = request.model
        self._thinking: str = request.echo
        self._call_id = reply_id
        self._prompt_tokens = prompt_tokens
        self._begun = False
        self._open = ""
        self._template: list[bytes] = []
        """Of the events that carry the text of the open block."""
        self._index = -1
        self._calls = 0
        self._out_of_order = False

    def open(self) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = _message_body(self._call_id, self._model, [], nothing, _usage(self._prompt_tokens, 0, 0))
        return _event("message_start", {"message": message}) + _PING

    def keep_alive(self) -> bytes:
        return _PING

    def write(self, delta: Delta) -> bytes:
        if self._open == "text" and delta.content and not (delta.reasoning or delta.tool_calls):
            # What nearly every token is.
            return encode(delta.content).join(self._template)
        self._begun = True
        return b"".join((self._think(delta.reasoning), self._say(delta.content), *map(self._call, delta.tool_calls)))

    def close(self, reply: Reply) -> bytes:
        (choice,) = reply.choices
        if self._out_of_order:
            return self.fail(EngineFailed("the engine sent its tool calls out of order; retry without streaming"))
        rest = b"" if self._begun else self.write(_as_delta(choice))
        end = _event("message_delta", {"delta": _ending(choice), "usage": _usage_of(reply)})
        return rest + self._end_block() + end + _event("message_stop", {})

    def fail(self, error: VerbatimError) -> bytes:
        return _event("error", describe_error(error, new_request_id()))

    def _think(self, text: str) -> bytes:
        if not text:
            return b""
        if self._thinking == "none":
            return _PING
        block = {"type": "thinking", "thinking": "", "signature": ""}
        start = self._begin_block("thinking", block, {"type": "thinking_delta", "thinking": TEXT})
        return start + (_PING if self._thinking == "omitted" else self._piece(text))

    def _say(self, text: str) -> bytes:
        if not text:
            return b""
        start = self._begin_block("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": TEXT})
        return start + self._piece(text)

    def _call(self, call: Mapping[str, Any]) -> bytes:
        """A piece of a tool call: the first carries its name, all carry argument text as the model wrote it."""
        position, function = call.get("index", 0), call.get("function") or {}
        if position < self._calls and self._open != f"call {position}":
            # Its block is closed: the client may already have run the call.
            self._out_of_order = True
            return b""
        self._calls = position + 1
        identifier = wire_id(tool_call_id(self._call_id, position))
        block: dict[str, Any] = {"type": "tool_use", "id": identifier, "name": function.get("name") or "", "input": {}}
        start = self._begin_block(f"call {position}", block, {"type": "input_json_delta", "partial_json": TEXT})
        arguments = function.get("arguments")
        return start + (self._piece(arguments) if arguments else b"")

    def _begin_block(self, what: str, block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        """Nothing if that block is open already. `delta`: of a piece of it, whose text is TEXT."""
        if self._open == what:
            return b""
        end = self._end_block()
        self._open = what
        self._index += 1
        self._template = split_event(self._delta(delta))
        return end + _event("content_block_start", {"index": self._index, "content_block": block})

    def _piece(self, text: str) -> bytes:
        return encode(text).join(self._template)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": seal(self._call_id)})
        self._open = ""
        return signature + _event("content_block_stop", {"index": self._index})


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


_PING = _event("ping", {})


def _as_delta(choice: Choice) -> Delta:
    message = choice.message
    calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or ())]
    return Delta(choice.index, message.get("content") or "", message.get("reasoning_content") or "", calls)


def _message_body(
    reply_id: str, model: str, content: list[dict[str, Any]], ending: Mapping[str, Any], usage: Any
) -> dict[str, Any]:
    head = {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model}
    return {**head, "content": content, **ending, "usage": usage}


def _render_blocks(choice: Choice, thinking: str) -> list[dict[str, Any]]:
    """A finished choice as content blocks. `thinking`: shown, omitted (a block without its text) or none."""
    message = choice.message
    blocks: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content")
    if reasoning and thinking != "none":
        text = reasoning if thinking == "shown" else ""
        blocks.append({"type": "thinking", "thinking": text, "signature": seal(choice.call_id)})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = arguments_object(function["arguments"])
        blocks.append({"type": "tool_use", "id": wire_id(call["id"]), "name": function["name"], "input": arguments})
    return blocks


def _ending(choice: Choice) -> dict[str, Any]:
    """stop_reason and stop_sequence. A stop text wins over tool calls only if it cut one of them short: such a call must not run."""
    calls = choice.message.get("tool_calls") or ()
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    complete = all(UNPARSED not in arguments_object(call["function"]["arguments"]) for call in calls)
    if isinstance(choice.stop_reason, str) and not (calls and complete):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def _usage_of(reply: Reply) -> dict[str, int]:
    return _usage(reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens)


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Anthropic's input_tokens exclude cached ones."""
    return {
        "input_tokens": max(0, prompt_tokens - cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


# Errors: the SDK's exception follows the status; Claude Code also reads type and wording.

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def status_of(error: VerbatimError) -> int:
    """The HTTP status. A temporary failure is 529 here: its clients wait longer for it than for a 503."""
    return 529 if error.status == 503 else error.status


def new_request_id() -> str:
    return f"req_{os.urandom(12).hex()}"


def describe_error(error: VerbatimError, request_id: str) -> dict[str, Any]:
    status = status_of(error)
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _error_message(error)}, "request_id": request_id}


def _error_message(error: VerbatimError) -> str:
    """Clients recognise a prompt that does not fit by Anthropic's wording alone, and shorten it by the numbers in it."""
    if not isinstance(error, ContextTooLong):
        return error.message
    if error.tokens is None or error.window is None:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {error.tokens} tokens > {error.window} maximum"
