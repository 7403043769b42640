"""A reply of the Messages dialect as server-sent events: message_start, the blocks one after the other, message_delta, message_stop.

A block ends when something else begins; a thinking block's signature is the last thing in it. Thinking that the harness did not
ask to see goes out as pings: the model is at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects.base import Choice, Delta, Reply, Request
from proxy.dialects.messages_blocks import wire_id
from proxy.dialects.messages_errors import error_body, new_request_id
from proxy.dialects.tools import UNPARSED, arguments_object
from proxy.errors import EngineFailed, VerbatimError
from proxy.minting import seal, tool_call_id

_encode = msgspec.json.Encoder().encode


def message_body(
    reply_id: str, model: str, content: list[dict[str, Any]], ending: Mapping[str, Any], usage: Any
) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **ending,
        "usage": usage,
    }


def usage_of(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """The vendor counts cached tokens apart from the others."""
    return {
        "input_tokens": max(0, prompt_tokens - cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def ending_of(choice: Choice) -> dict[str, Any]:
    """stop_reason and stop_sequence. A stop text wins over tool calls only where it cut one of them: such a call must not run."""
    calls = choice.message.get("tool_calls") or ()
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    whole = all(UNPARSED not in arguments_object(call["function"]["arguments"]) for call in calls)
    if isinstance(choice.stop_reason, str) and not (calls and whole):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


class MessagesStream:
    """Renders one reply; remembers which block is open and whether anything was told."""

    def __init__(self, request: Request, reply_id: str, prompt_tokens: int) -> None:
        self._model = request.model
        self._thinking: str = request.echo
        self._call_id = reply_id
        self._prompt_tokens = prompt_tokens
        self._told = False
        self._open = ""
        self._index = -1
        self._calls = 0
        self._out_of_order = False

    def open(self) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = message_body(self._call_id, self._model, [], nothing, usage_of(self._prompt_tokens, 0, 0))
        return _event("message_start", {"message": message}) + _PING

    def keep_alive(self) -> bytes:
        return _PING

    def delta(self, delta: Delta) -> bytes:
        self._told = True
        return b"".join((self._think(delta.reasoning), self._say(delta.content), *map(self._call, delta.tool_calls)))

    def close(self, reply: Reply) -> bytes:
        (choice,) = reply.choices
        if self._out_of_order:
            return self.error(EngineFailed("the engine told its tool calls in a mixed order; ask again without streaming"))
        rest = b"" if self._told else self.delta(_whole(choice))
        usage = usage_of(reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens)
        ended = _event("message_delta", {"delta": ending_of(choice), "usage": usage})
        return rest + self._stop() + ended + _event("message_stop", {})

    def error(self, error: VerbatimError) -> bytes:
        return _event("error", error_body(error, new_request_id()))

    def _think(self, text: str) -> bytes:
        if not text:
            return b""
        if self._thinking == "none":
            return _PING
        started = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if self._thinking == "omitted":
            return started + _PING
        return started + self._piece({"type": "thinking_delta", "thinking": text})

    def _say(self, text: str) -> bytes:
        if not text:
            return b""
        return self._begin("text", {"type": "text", "text": ""}) + self._piece({"type": "text_delta", "text": text})

    def _call(self, call: Mapping[str, Any]) -> bytes:
        """A piece of a tool call: the first names it, all bring the model's own argument text."""
        position, function = call.get("index", 0), call.get("function") or {}
        if position < self._calls and self._open != f"call {position}":
            # Its block is closed: the client may have run it already.
            self._out_of_order = True
            return b""
        self._calls = position + 1
        identifier = wire_id(tool_call_id(self._call_id, position))
        block: dict[str, Any] = {"type": "tool_use", "id": identifier, "name": function.get("name") or "", "input": {}}
        started = self._begin(f"call {position}", block)
        arguments = function.get("arguments")
        return started + (self._piece({"type": "input_json_delta", "partial_json": arguments}) if arguments else b"")

    def _begin(self, what: str, block: Mapping[str, Any]) -> bytes:
        """The start of a block, unless it is the one that is open."""
        if self._open == what:
            return b""
        ended = self._stop()
        self._open = what
        self._index += 1
        return ended + _event("content_block_start", {"index": self._index, "content_block": block})

    def _piece(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._piece({"type": "signature_delta", "signature": seal(self._call_id)})
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._index})


def _whole(choice: Choice) -> Delta:
    message = choice.message
    calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or ())]
    return Delta(choice.index, message.get("content") or "", message.get("reasoning_content") or "", calls)


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"


_PING = _event("ping", {})
