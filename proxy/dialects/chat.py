"""OpenAI Chat Completions: `/v1/chat/completions` and `/v1/models`.

Shapes as the openai SDK parses them; errors as it maps them to its exceptions (status, `error.code`). Reasoning travels as
`reasoning_content`, the field that chat harnesses read and replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects.base import Choice, Delta, ErrorAnswer, Reply, Request, See
from proxy.dialects.body import decode, split
from proxy.errors import RequestError, VerbatimError
from proxy.trees import Seen

_encode = msgspec.json.Encoder().encode

_SAMPLING = ("temperature", "top_p", "top_k", "seed")
"""Sampling fields that a session may override; the rest of the body is forwarded as it is."""

_CONSUMED = frozenset(
    {"model", "messages", "tools", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens"}
    | {"logprobs", "top_logprobs", "chat_template_kwargs", "stop", *_SAMPLING}
    | {"store", "metadata", "user", "service_tier", "return_token_ids", "return_tokens_as_token_ids", "request_id"}
    | {"add_generation_prompt", "continue_final_message", "prompt_logprobs", "echo", "functions", "function_call"}
)
"""Body fields that are parsed, or that mean nothing to an engine, or that would change what is recorded."""

_MOST_CHOICES = 128

_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ChatDialect:
    name = "chat"

    def parse(self, body: bytes, see: See) -> Request:
        """The canonical request. Raises RequestError naming the field and the rule it broke."""
        fields, items = split(body, "messages")
        return self._request(fields, [see(item, _message) for item in items])

    def _request(self, body: Mapping[str, Any], history: list[Seen]) -> Request:
        if not history:
            raise RequestError("'messages' must be a non-empty list", param="messages")
        sampling = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
        for key in ("temperature", "top_p"):
            if key in sampling and not _is_number(sampling[key]):
                raise RequestError(f"'{key}' must be a number", param=key)
        for key in ("top_k", "seed"):
            if key in sampling and not _is_int(sampling[key]):
                raise RequestError(f"'{key}' must be an integer", param=key)
        limit = _positive(body, "max_completion_tokens") or _positive(body, "max_tokens")
        if limit is not None:
            sampling["max_tokens"] = limit
        stop = body.get("stop")
        if stop:
            sampling["stop"] = [stop] if isinstance(stop, str) else _strings(stop, "stop")
        return Request(
            dialect=self.name,
            model=_model(body),
            history=history,
            tools=_objects(body, "tools"),
            template_kwargs=_template_kwargs(body),
            sampling=sampling,
            forward={key: value for key, value in body.items() if key not in _CONSUMED and value is not None},
            n=_choices(body),
            stream=_flag(body, "stream"),
            include_usage=_include_usage(body),
            top_logprobs=_top_logprobs(body),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        return _encode(
            {
                "id": f"chatcmpl-{reply.reply_id}",
                "object": "chat.completion",
                "created": reply.created,
                "model": reply.model,
                "choices": [_choice(choice) for choice in reply.choices],
                "usage": _usage(reply),
            }
        )

    def open_stream(self, request: Request, reply_id: str, created: int) -> ChatStream:
        return ChatStream(request, reply_id, created)

    def error(self, error: VerbatimError) -> ErrorAnswer:
        headers = {}
        if error.retry_after_seconds is not None:
            headers["retry-after"] = str(max(1, round(error.retry_after_seconds)))
        return ErrorAnswer(error.status, headers, _encode({"error": _error(error)}))

    def models(self, names: Mapping[str, int | None], created: int) -> bytes:
        """The answer of GET /v1/models: name -> context window in tokens."""
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": "verbatim", "max_model_len": window}
            for name, window in names.items()
        ]
        return _encode({"object": "list", "data": data})


class ChatStream:
    """Renders one reply as server-sent chat chunks; remembers which choices have begun and what they already said."""

    def __init__(self, request: Request, reply_id: str, created: int) -> None:
        self._head = {
            "id": f"chatcmpl-{reply_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        self._include_usage = request.include_usage
        self._n = request.n
        self._spoken: set[int] = set()
        self._with_logprobs = request.top_logprobs is not None

    def open(self) -> bytes:
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._n))

    def delta(self, delta: Delta) -> bytes:
        self._spoken.add(delta.index)
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content:
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = delta.tool_calls
        return self._chunk(delta.index, fields, logprobs=delta.logprobs)

    def keep_alive(self) -> bytes:
        return self._chunk(0, {})

    def close(self, reply: Reply) -> bytes:
        events: list[bytes] = []
        for choice in reply.choices:
            if choice.index not in self._spoken:
                events.extend(self.delta(piece) for piece in _whole(choice))
            events.append(self._chunk(choice.index, {}, finish_reason=choice.finish_reason))
        if self._include_usage:
            events.append(_event({**self._head, "choices": [], "usage": _usage(reply)}))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def error(self, error: VerbatimError) -> bytes:
        return _event({"error": _error(error)})

    def _chunk(self, index: int, fields: Any, *, finish_reason: str | None = None, logprobs: Any = ()) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": fields, "finish_reason": finish_reason}
        choice["logprobs"] = {"content": list(logprobs)} if self._with_logprobs and logprobs else None
        return _event({**self._head, "choices": [choice]})


def _whole(choice: Choice) -> list[Delta]:
    """A finished choice as deltas, in the order a stream would have brought them."""
    message = choice.message
    pieces = []
    if message.get("reasoning_content"):
        pieces.append(Delta(choice.index, reasoning=message["reasoning_content"]))
    if message.get("content") or choice.logprobs:
        pieces.append(Delta(choice.index, content=message.get("content") or "", logprobs=choice.logprobs or ()))
    for position, call in enumerate(message.get("tool_calls") or ()):
        pieces.append(Delta(choice.index, tool_calls=[{"index": position, **call}]))
    return pieces


def _event(payload: Any) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


def _choice(choice: Choice) -> dict[str, Any]:
    message = {"refusal": None, **choice.message}
    message.setdefault("content", None)
    logprobs = {"content": list(choice.logprobs), "refusal": None} if choice.logprobs is not None else None
    return {"index": choice.index, "message": message, "finish_reason": choice.finish_reason, "logprobs": logprobs}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _error(error: VerbatimError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError("'model' must be a non-empty string", param="model")
    return model


def _message(raw: bytes) -> dict[str, Any]:
    """One message, checked as far as the service looks at it."""
    message = decode(raw)
    if not isinstance(message, dict):
        raise RequestError("'messages' must be a list of objects", param="messages")
    if not isinstance(message.get("role"), str):
        raise RequestError("a message's 'role' must be a string", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, (str, dict)) for part in content):
            raise RequestError("a message's 'content' must be a string or a list of parts", param="messages")
    elif content is not None and not isinstance(content, str):
        raise RequestError("a message's 'content' must be a string or a list of parts", param="messages")
    for call in _objects(message, "tool_calls"):
        if not isinstance(call.get("function", {}), dict):
            raise RequestError("a tool call's 'function' must be an object", param="messages")
    return message


def _objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"'{key}' must be a list of objects", param=key)
    return value


def _strings(value: Any, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestError(f"'{key}' must be a string or a list of strings", param=key)
    return value


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = body.get("chat_template_kwargs")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise RequestError("'chat_template_kwargs' must be an object", param="chat_template_kwargs")
    return kwargs


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError("'stream_options' must be an object", param="stream_options")
    return bool(options and options.get("include_usage"))


def _top_logprobs(body: Mapping[str, Any]) -> int | None:
    if not body.get("logprobs"):
        return None
    count = body.get("top_logprobs") or 0
    if not _is_int(count) or not 0 <= count <= 20:
        raise RequestError("'top_logprobs' must be an integer from 0 to 20", param="top_logprobs")
    return int(count)


def _choices(body: Mapping[str, Any]) -> int:
    count = _positive(body, "n") or 1
    if count > _MOST_CHOICES:
        raise RequestError(f"'n' must be at most {_MOST_CHOICES}", param="n")
    return count


def _positive(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not _is_int(value) or value < 1:
        raise RequestError(f"'{key}' must be a positive integer", param=key)
    return int(value)


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"'{key}' must be true or false", param=key)
    return bool(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
