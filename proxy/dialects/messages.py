"""Anthropic Messages: `/v1/messages`, `/v1/messages/count_tokens`, and `/v1/models` for its clients.

Shapes as the anthropic SDK parses them; errors as it and Claude Code distinguish them. Reasoning goes out as thinking blocks if the
harness requested thinking, and otherwise stays in the record.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import (
    Dialect,
    Divide,
    Endpoint,
    ErrorAnswer,
    HistoryMessage,
    Incoming,
    ParsedMessage,
    Past,
    Reply,
    Request,
    Unit,
    retry_headers,
)
from proxy.dialects.fields import decode, encode
from proxy.dialects.messages_reply import (
    MessagesStream,
    describe_error,
    new_request_id,
    render_message,
    status_of,
)
from proxy.dialects.messages_request import SYSTEM_ROLES, read_message, read_texts
from proxy.dialects.messages_tools import parse_tool_choice, parse_tools
from proxy.errors import RequestError, VerbatimError

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")} | {"stop_sequences": "stop"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")

_EXAMPLE = {"model": "policy", "messages": [{"role": "user", "content": "Say hello."}]}


class MessagesDialect(Dialect):
    name = "messages"
    title = "Anthropic Messages (`/v1/messages`)"
    endpoints = (
        Endpoint(
            "call",
            "POST",
            "/v1/messages",
            "Anthropic Messages",
            "Content blocks, tools and thinking.",
            {**_EXAMPLE, "max_tokens": 32},
        ),
        Endpoint(
            "count",
            "POST",
            "/v1/messages/count_tokens",
            "Count tokens (Anthropic)",
            "The number of prompt tokens, as the engine counts them. Nothing is recorded.",
            _EXAMPLE,
        ),
        Endpoint("models", "GET", "/v1/models", header="anthropic-version"),
        Endpoint("model", "GET", "/v1/models/{model}", header="anthropic-version"),
    )
    paths = r"(?:/v1){0,2}/messages(?:/|\Z)|/api/hello\Z"
    probes = ("/api/hello",)
    """Where Claude Code looks whether anyone answers."""
    client = "anthropic"

    def parse(self, incoming: Incoming, past: Past) -> Request:
        request = self.parse_count(incoming, past)
        if request.messages[-1]["role"] == "assistant":
            raise RequestError(
                "This model does not support assistant message prefill. The conversation must end with a user message.",
                param="messages",
            )
        return request

    def parse_count(self, incoming: Incoming, past: Past) -> Request:
        """As `parse`, but the history may end in a message of the assistant."""
        divide = _divider(incoming.later_system_role)
        split = past.split(incoming.body, "messages", divide)
        body, (messages, leading) = split.fields, past.read(split, divide)
        history = [*_system(body, leading, past), *messages]
        if not messages:
            raise RequestError("messages: at least one message is required", param="messages")
        functions, dropped = parse_tools(body, past)
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=history,
            tools=functions,
            template_kwargs=_template_kwargs(body),
            sampling=fields.sampling(body, _SAMPLING),
            forward={**parse_tool_choice(body, functions), **_output(body)},
            stream=fields.flag(body, "stream"),
            echo=_thinking(body),
            dropped_tools=dropped,
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        return render_message(request, reply)

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> MessagesStream:
        return MessagesStream(request, reply_id, prompt_tokens)

    def render_error(self, error: VerbatimError) -> ErrorAnswer:
        request_id = new_request_id()
        headers = {**retry_headers(error), "request-id": request_id}
        return ErrorAnswer(status_of(error), headers, encode(describe_error(error, request_id)))

    def render_count(self, tokens: int) -> bytes:
        return encode({"input_tokens": tokens})

    def render_models(self, windows: Mapping[str, int | None], created: int) -> bytes:
        data = [_model(name, window, created) for name, window in windows.items()]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return encode({"data": data, "has_more": False, **ends})

    def render_model(self, name: str, window: int | None, created: int) -> bytes:
        return encode(_model(name, window, created))


@functools.cache
def _divider(later_system_role: str) -> Divide:
    """Each message on its own; those of the system at the head are part of its prompt."""
    read = functools.partial(read_message, later_system_role=later_system_role)

    def divide(items: Sequence[bytes]) -> Iterator[Unit]:
        leads = True
        for at, item in enumerate(items):
            is_system = _role(item) in SYSTEM_ROLES
            leads = leads and is_system
            # From a system message on, items would be divided as if it were at the head.
            yield Unit(at, item, None if leads else read, not is_system)

    return divide


class _Head(msgspec.Struct):
    role: Any = None


def _role(item: bytes) -> Any:
    """The role of a raw message; the rest is not decoded."""
    try:
        return msgspec.json.decode(item, type=_Head).role
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = decode(item)
        return message.get("role") if isinstance(message, dict) else None


def _system(body: Mapping[str, Any], leading: Sequence[bytes], past: Past) -> list[HistoryMessage]:
    """The system message: the texts of the body's and of the leading messages, without the session's volatile lines, joined by line ends.

    Each text goes through `past.see`, which drops volatile lines, before the whole does: a line that changes with every request then
    neither leaves an empty line behind nor makes a different prompt.
    """
    prompt = read_texts(body["system"]) if body.get("system") is not None else []
    prompt += [text for item in leading for text in read_texts(decode(item).get("content"))]
    lasting = [
        text for part in prompt for seen in past.read_item(encode(part), _read_system) if (text := seen.message["content"])
    ]
    return past.read_item(encode("\n".join(lasting)), _read_system) if lasting else []


def _read_system(raw: bytes, _: Past) -> list[ParsedMessage]:
    return [ParsedMessage({"role": "system", "content": decode(raw)})]


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
    """Reasoning effort and response format as chat body fields."""
    output: dict[str, Any] = {}
    config = fields.mapping(body, "output_config")
    effort = fields.text(config, "effort")
    if effort is not None:
        if effort not in _EFFORTS:
            raise RequestError(f"output_config: 'effort' must be one of {', '.join(_EFFORTS)}", param="output_config")
        output["reasoning_effort"] = fields.ENGINE_EFFORTS.get(effort, effort)
    shape = fields.mapping(config, "format") or fields.mapping(body, "output_format")
    if shape:
        if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
            raise RequestError("the output format must be a json_schema with its 'schema'", param="output_config")
        schema = {"name": "output", "schema": shape["schema"], "strict": True}
        output["response_format"] = {"type": "json_schema", "json_schema": schema}
    return output


def _model(name: str, window: int | None, created: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": window,
        "max_tokens": window,
    }
