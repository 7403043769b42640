"""Anthropic Messages: `/v1/messages`, `/v1/messages/count_tokens`, and `/v1/models` for its clients.

Shapes as the anthropic SDK parses them; errors as it and Claude Code tell them apart. Reasoning goes out as thinking blocks where
the harness asked for thinking, and stays in the record where it did not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import (
    Asked,
    Choice,
    Delta,
    ErrorAnswer,
    Heard,
    Past,
    Read,
    Reply,
    Request,
    Seen,
    retry_headers,
    seal,
    tool_call_id,
)
from proxy.dialects.fields import UNPARSED, arguments_object, decode, split
from proxy.dialects.messages_request import SYSTEM_ROLES, choice_of_tools, offered, read_message, reply_blocks, texts, wire_id
from proxy.errors import ContextTooLong, EngineFailed, RequestError, VerbatimError

_encode = msgspec.json.Encoder().encode

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")} | {"stop_sequences": "stop"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Chat engines know three of the five."""


class _Head(msgspec.Struct):
    role: Any = None


class MessagesDialect:
    name = "messages"

    def __init__(self, later_system_role: str = "user") -> None:
        self._read: Read = functools.partial(read_message, later_system_role=later_system_role)

    def parse(self, asked: Asked, past: Past) -> Request:
        """The canonical request. Raises RequestError naming the field and the rule it broke."""
        request = self.parse_count(asked, past)
        if request.messages[-1]["role"] == "assistant":
            raise RequestError(
                "This model does not support assistant message prefill. The conversation must end with a user message.",
                param="messages",
            )
        return request

    def parse_count(self, asked: Asked, past: Past) -> Request:
        """The canonical request, of which only the prompt matters: it may end in a message of the assistant."""
        body, items = split(asked.body, "messages")
        history = self._history(body, items, past)
        functions, dropped = offered(body)
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=history,
            tools=functions,
            template_kwargs=_template_kwargs(body),
            sampling=fields.sampling(body, _SAMPLING),
            forward={**choice_of_tools(body, functions), **_output(body)},
            stream=fields.flag(body, "stream"),
            echo=_thinking(body),
            dropped_tools=dropped,
        )

    def _history(self, body: Mapping[str, Any], items: list[bytes], past: Past) -> list[Seen]:
        prompt = texts(body["system"]) if body.get("system") is not None else []
        begin = 0
        while begin < len(items) and _role(items[begin]) in SYSTEM_ROLES:
            prompt += texts(decode(items[begin]).get("content"))
            begin += 1
        system = _system(prompt, past)
        history = [*system, *(seen for item in items[begin:] for seen in past.see(item, self._read))]
        if len(history) == len(system):
            raise RequestError("messages: at least one message is required", param="messages")
        return history

    def render(self, request: Request, reply: Reply) -> bytes:
        (choice,) = reply.choices
        usage = usage_of(reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens)
        content = reply_blocks(choice, request.echo)
        return _encode(message_body(reply.reply_id, reply.model, content, ending_of(choice), usage))

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> MessagesStream:
        return MessagesStream(request, reply_id, prompt_tokens)

    def error(self, error: VerbatimError) -> ErrorAnswer:
        request_id = new_request_id()
        headers = {**retry_headers(error), "request-id": request_id}
        return ErrorAnswer(status_of(error), headers, _encode(error_body(error, request_id)))

    def errs_in_stream(self, error: VerbatimError) -> bool:
        return False

    def count(self, tokens: int) -> bytes:
        return _encode({"input_tokens": tokens})

    def models(self, names: Mapping[str, int | None], created: int) -> bytes:
        data = [_model(name, window, created) for name, window in names.items()]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return _encode({"data": data, "has_more": False, **ends})

    def model(self, name: str, window: int | None, created: int) -> bytes:
        return _encode(_model(name, window, created))


def _role(item: bytes) -> Any:
    """The role of a raw message, the rest of it not decoded."""
    try:
        return msgspec.json.decode(item, type=_Head).role
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = decode(item)
        return message.get("role") if isinstance(message, dict) else None


def _system(prompt: list[str], past: Past) -> list[Seen]:
    """The system message: the texts without the session's volatile lines, joined by line ends.

    Each text is looked up alone before the whole is: a line that changes with every request then neither leaves an empty line behind
    nor makes the prompt another one.
    """
    lasting = [text for part in prompt for seen in past.see(_encode(part), _read_system) if (text := seen.message["content"])]
    return past.see(_encode("\n".join(lasting)), _read_system) if lasting else []


def _read_system(raw: bytes) -> list[Heard]:
    return [Heard({"role": "system", "content": decode(raw)})]


def _thinking(body: Mapping[str, Any]) -> str:
    """What the harness sees of the reasoning: shown, omitted (a block without its text) or none."""
    thinking = fields.mapping(body, "thinking")
    kind = thinking.get("type", "disabled")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise RequestError("thinking: 'type' must be enabled, adaptive or disabled", param="thinking")
    if kind == "disabled":
        return "none"
    return "omitted" if thinking.get("display") == "omitted" else "shown"


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    off = {"enable_thinking": False} if fields.mapping(body, "thinking").get("type") == "disabled" else {}
    return {**off, **fields.template_kwargs(body)}


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    """How hard to think and in what shape to answer, as chat body fields."""
    output: dict[str, Any] = {}
    config = fields.mapping(body, "output_config")
    effort = fields.text(config, "effort")
    if effort is not None:
        if effort not in _EFFORTS:
            raise RequestError(f"output_config: 'effort' must be one of {', '.join(_EFFORTS)}", param="output_config")
        output["reasoning_effort"] = _EFFORTS[effort]
    shape = fields.mapping(config, "format") or fields.mapping(body, "output_format")
    if shape:
        if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
            raise RequestError("the output format must be a json_schema with its 'schema'", param="output_config")
        named = {"name": "output", "schema": shape["schema"], "strict": True}
        output["response_format"] = {"type": "json_schema", "json_schema": named}
    return output


def _model(name: str, window: int | None, created: int) -> dict[str, Any]:
    made = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": made,
        "lifecycle": "active",
        "max_input_tokens": window,
        "max_tokens": window,
    }


# Errors as Anthropic's API says them: the SDK's exception follows the status, Claude Code also reads type and words.


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def status_of(error: VerbatimError) -> int:
    """The HTTP status; what may pass is 529 here, and its clients wait for it longer than for a 503."""
    return 529 if error.status == 503 else error.status


def new_request_id() -> str:
    return f"req_{os.urandom(12).hex()}"


def error_body(error: VerbatimError, request_id: str) -> dict[str, Any]:
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": request_id}


def _message(error: VerbatimError) -> str:
    """Its clients know a prompt that does not fit by the vendor's words alone, and shorten it by the numbers in them."""
    if not isinstance(error, ContextTooLong):
        return error.message
    if error.tokens is None or error.window is None:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {error.tokens} tokens > {error.window} maximum"


# A reply of the Messages dialect as server-sent events: message_start, the blocks one after the other, message_delta, message_stop.
#
# A block ends when something else begins; a thinking block's signature is the last thing in it. Thinking that the harness did not
# ask to see goes out as pings: the model is at work.


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
