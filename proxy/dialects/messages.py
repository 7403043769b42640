"""Anthropic Messages: `/v1/messages`, `/v1/messages/count_tokens`, and `/v1/models` for its clients.

Shapes as the anthropic SDK parses them; errors as it and Claude Code tell them apart. Reasoning goes out as thinking blocks where
the harness asked for thinking, and stays in the record where it did not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import Asked, ErrorAnswer, Past, Reply, Request, retry_headers
from proxy.dialects.body import decode, split
from proxy.dialects.messages_blocks import SYSTEM_ROLES, read_message, reply_blocks, texts
from proxy.dialects.messages_errors import error_body, new_request_id, status_of
from proxy.dialects.messages_stream import MessagesStream, ending_of, message_body, usage_of
from proxy.dialects.messages_tools import choice_of_tools, offered
from proxy.errors import RequestError, VerbatimError
from proxy.history import Heard, Read, Seen

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
