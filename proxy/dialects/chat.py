"""OpenAI Chat Completions: `/v1/chat/completions` and `/v1/models`.

Shapes as the openai SDK parses them; errors as it maps them to its exceptions (status, `error.code`). Reasoning travels under both of
its names, `reasoning_content` and `reasoning`: of harnesses, some read and replay the one and some the other.

`return_token_ids` returns the ids of prompt and completion in vLLM's fields: `prompt_token_ids`, and `token_ids` of a choice; null where
the engine told none. A stream has them in the chunk with the finish reason: by then they are recorded, and they are what is recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import (
    Choice,
    Delta,
    Dialect,
    Endpoint,
    ErrorAnswer,
    Incoming,
    ParsedMessage,
    Past,
    Reply,
    Request,
    one_by_one,
    retry_headers,
    show_logprobs,
)
from proxy.dialects.fields import TEXT, decode, encode, placeholder_id, split_event, tool_call
from proxy.errors import BudgetExhausted, RequestError, VerbatimError

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")}

_CONSUMED = frozenset(
    {"model", "messages", "tools", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens"}
    | {"logprobs", "top_logprobs", "chat_template_kwargs", *_SAMPLING}
    | {"store", "metadata", "user", "service_tier", "return_token_ids", "return_tokens_as_token_ids", "request_id"}
    | {"add_generation_prompt", "continue_final_message", "prompt_logprobs", "echo", "functions", "function_call"}
)
"""Body fields that are not forwarded: they are parsed here, mean nothing to an engine, or would change the record."""

_FUNCTION_CALL = "function_call"
"""The `echo` of a request that offers `functions`; also the reply's field and its finish reason."""

_EXAMPLE = {"model": "policy", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}

_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class OpenAIDialect(Dialect):
    """What OpenAI's three APIs share."""

    client = "openai"
    base_url_suffix = "/v1"

    def render_error(self, error: VerbatimError) -> ErrorAnswer:
        return ErrorAnswer(choose_status(error), retry_headers(error), encode({"error": describe_error(error)}))


class ChatDialect(OpenAIDialect):
    name = "chat"
    title = "OpenAI Chat (`/v1/chat/completions`)"
    endpoints = (
        Endpoint(
            "call",
            "POST",
            "/v1/chat/completions",
            "OpenAI Chat",
            "Chat completions, with tools, reasoning, structured output and logprobs.",
            _EXAMPLE,
        ),
        Endpoint(
            "models",
            "GET",
            "/v1/models",
            "List models",
            "In the shape of the vendor whose headers were sent: OpenAI's, Anthropic's or Google's. Each with the smallest context window "
            "of the engines that may answer for it, in tokens: `max_model_len`, `max_input_tokens` or `inputTokenLimit`; null or missing "
            "if none reports one.",
        ),
        Endpoint("model", "GET", "/v1/models/{model}", "Get a model", "In the same shapes."),
    )
    paths = r"/v1/|/(?:chat/completions|completions|models)(?:/|\Z)"
    probes = ("/v1/?",)
    is_one_to_one = True

    def parse(self, incoming: Incoming, past: Past) -> Request:
        split = past.split(incoming.body, "messages", _DIVIDE)
        body = split.fields
        history, _ = past.read(split, _DIVIDE)
        if not history:
            raise RequestError("'messages' must be a non-empty list", param="messages")
        fields.refuse_prefill(history[-1].message)
        sampling = fields.sampling(body, _SAMPLING)
        limit = fields.positive(body, "max_completion_tokens")
        if limit is not None:
            sampling["max_tokens"] = limit
        functions = parse_functions(body) if "functions" in body or "function_call" in body else []
        forward = {key: value for key, value in body.items() if key not in _CONSUMED and value is not None}
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=history,
            tools=functions or fields.objects(body, "tools"),
            template_kwargs=fields.template_kwargs(body),
            sampling=sampling,
            forward={**forward, **parse_function_choice(body, functions)} if functions else forward,
            n=fields.choices(body, "n"),
            stream=fields.flag(body, "stream"),
            include_usage=bool(fields.mapping(body, "stream_options").get("include_usage")),
            top_logprobs=_top_logprobs(body),
            echo=_FUNCTION_CALL if functions else None,
            wants_ids=fields.flag(body, "return_token_ids"),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        return encode(
            {
                "id": f"chatcmpl-{reply.reply_id}",
                "object": "chat.completion",
                "created": reply.created,
                "model": reply.model,
                "choices": [_render_choice(request, choice) for choice in reply.choices],
                "usage": build_usage(reply),
                **_prompt_ids(request, reply),
            }
        )

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> ChatStream:
        return ChatStream(request, reply_id, created)

    def render_models(self, windows: Mapping[str, int | None], created: int) -> bytes:
        return encode({"object": "list", "data": [_model(name, window, created) for name, window in windows.items()]})

    def render_model(self, name: str, window: int | None, created: int) -> bytes:
        return encode(_model(name, window, created))


class ChunkStream(ABC):
    """What the streams of chat and completions share: chunks in server-sent events, and how they end."""

    def __init__(self, request: Request, head: dict[str, Any]) -> None:
        self._request = request
        self._head = head
        self._prefix = b"data: " + encode(head)[:-1] + b',"choices":['
        self._begun: set[int] = set()
        """Choices of which something was sent."""

    @abstractmethod
    def _finish(self, reply: Reply, choice: Choice) -> list[bytes]:
        """What no delta carried of the choice, and its finish reason."""

    def close(self, reply: Reply) -> bytes:
        events = [event for choice in reply.choices for event in self._finish(reply, choice)]
        if self._request.include_usage:
            events.append(_event({**self._head, "choices": [], "usage": build_usage(reply)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def fail(self, error: VerbatimError) -> bytes:
        return _event({"error": describe_error(error)})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return b"%b%b]}\n\n" % (self._prefix, encode(choice))


def _event(payload: Any) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


class ChatStream(ChunkStream):
    def __init__(self, request: Request, reply_id: str, created: int) -> None:
        head = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk", "created": created}
        super().__init__(request, {**head, "model": request.model})
        self._with_logprobs = request.top_logprobs is not None
        self._texts = [split_event(self._delta(index, {"content": TEXT})) for index in range(request.n)]
        self._thoughts = [split_event(self._delta(index, _reasoning(TEXT))) for index in range(request.n)]

    def open(self) -> bytes:
        return b"".join(self._delta(index, {"role": "assistant", "content": ""}) for index in range(self._request.n))

    def write(self, delta: Delta) -> bytes:
        self._begun.add(delta.index)
        if not (delta.tool_calls or self._with_logprobs):
            # What nearly every token is.
            if delta.content and not delta.reasoning:
                return encode(delta.content).join(self._texts[delta.index])
            if delta.reasoning and not delta.content:
                return encode(delta.reasoning).join(self._thoughts[delta.index])
        fields: dict[str, Any] = _reasoning(delta.reasoning) if delta.reasoning else {}
        if delta.content:
            fields["content"] = delta.content
        if delta.tool_calls:
            fields["tool_calls"] = delta.tool_calls
        if self._request.echo == _FUNCTION_CALL:
            fields = as_function_call(fields)
        return self._delta(delta.index, fields, logprobs=delta.logprobs)

    def keep_alive(self) -> bytes:
        return self._delta(0, {})

    def _finish(self, reply: Reply, choice: Choice) -> list[bytes]:
        rest = [] if choice.index in self._begun else [self.write(delta) for delta in _deltas(choice)]
        finish_reason = _finish_reason(choice, self._request.echo)
        if not self._request.wants_ids:
            return [*rest, self._delta(choice.index, {}, finish_reason=finish_reason)]
        end = {"index": choice.index, "delta": {}, "finish_reason": finish_reason, "logprobs": None}
        told = _prompt_ids(self._request, reply) if choice is reply.choices[0] else {}
        return [*rest, _event({**self._head, "choices": [end | _token_ids(self._request, choice)], **told})]

    def _delta(self, index: int, fields: Any, *, finish_reason: str | None = None, logprobs: Any = ()) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": fields, "finish_reason": finish_reason}
        choice["logprobs"] = {"content": show_logprobs(self._request, logprobs)} if self._with_logprobs and logprobs else None
        return self._chunk(choice)


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text, "reasoning": text}


def build_usage(reply: Reply) -> dict[str, Any]:
    sampled = reply.completion_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": reply.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def choose_status(error: VerbatimError) -> int:
    """The status that OpenAI's clients end on. LiteLLM, and the agents on it, repeat a 403 for minutes, and a 401 never."""
    return 401 if isinstance(error, BudgetExhausted) else error.status


def describe_error(error: VerbatimError) -> dict[str, Any]:
    """The error object of all of OpenAI's endpoints."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def _deltas(choice: Choice) -> list[Delta]:
    """A finished choice as deltas, in the order of a stream."""
    message = choice.message
    deltas = []
    if message.get("reasoning_content"):
        deltas.append(Delta(choice.index, reasoning=message["reasoning_content"]))
    if message.get("content") or choice.logprobs:
        deltas.append(Delta(choice.index, content=message.get("content") or "", logprobs=choice.logprobs or ()))
    for position, call in enumerate(message.get("tool_calls") or ()):
        deltas.append(Delta(choice.index, tool_calls=[{"index": position, **call}]))
    return deltas


def _model(name: str, window: int | None, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "verbatim", "max_model_len": window}


def _render_choice(request: Request, choice: Choice) -> dict[str, Any]:
    echo, message = request.echo, {"refusal": None, **choice.message}
    if echo == _FUNCTION_CALL:
        message = as_function_call(message)
    message.setdefault("content", None)
    if message.get("reasoning_content"):
        message["reasoning"] = message["reasoning_content"]
    shown = show_logprobs(request, choice.logprobs)
    logprobs = {"content": shown, "refusal": None} if shown is not None else None
    shape = {"index": choice.index, "message": message, "finish_reason": _finish_reason(choice, echo), "logprobs": logprobs}
    return shape | _token_ids(request, choice)


def _token_ids(request: Request, choice: Choice) -> dict[str, Any]:
    return {"token_ids": choice.token_ids or None} if request.wants_ids else {}


def _prompt_ids(request: Request, reply: Reply) -> dict[str, Any]:
    return {"prompt_token_ids": reply.prompt_ids or None} if request.wants_ids else {}


def _finish_reason(choice: Choice, echo: str | None) -> str:
    return _FUNCTION_CALL if echo == _FUNCTION_CALL and choice.finish_reason == "tool_calls" else choice.finish_reason


def _read_message(raw: bytes, _: Past) -> list[ParsedMessage]:
    """One message, checked as far as the service reads it."""
    message = decode(raw)
    if not isinstance(message, dict):
        raise RequestError("'messages' must be a list of objects", param="messages")
    if fields.check_role(message) == "developer":
        # OpenAI's newer word for system; chat templates know only the older one.
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, (str, dict)) for part in content):
            raise RequestError("a message's 'content' must be a string or a list of parts", param="messages")
    elif content is not None and not isinstance(content, str):
        raise RequestError("a message's 'content' must be a string or a list of parts", param="messages")
    for name in ("tool_call_id", "reasoning_content", "reasoning", "name"):
        if not isinstance(message.get(name), (str, NoneType)):
            raise RequestError(f"a message's '{name}' must be a string", param="messages")
    if reasoning := message.pop("reasoning", None):
        message["reasoning_content"] = message.get("reasoning_content") or reasoning
    convert_functions(message)
    for call in fields.objects(message, "tool_calls"):
        _check_tool_call(call)
    return [ParsedMessage(message)]


_DIVIDE = one_by_one(_read_message)


def _check_tool_call(call: Mapping[str, Any]) -> None:
    function = call.get("function") or {}
    if not isinstance(function, dict):
        raise RequestError("a tool call's 'function' must be an object", param="messages")
    if not isinstance(call.get("id"), (str, NoneType)) or not isinstance(function.get("name"), (str, NoneType)):
        raise RequestError("a tool call's 'id' and its function's 'name' must be strings", param="messages")


def _top_logprobs(body: Mapping[str, Any]) -> int | None:
    if not body.get("logprobs"):
        return None
    count = body.get("top_logprobs") or 0
    if not fields.is_integer(count) or not 0 <= count <= 20:
        raise RequestError("'top_logprobs' must be an integer from 0 to 20", param="top_logprobs")
    return int(count)


# The legacy form of tools: `functions` and `function_call` of a request, `function_call` of a reply, results under the role `function`.
# OpenAI deprecated it at the end of 2023; older clients still use it. Such a call has no id and a reply makes at most one, so inside it
# gets the id of the first call of a turn, as in any dialect without ids: call and result match wherever they stand in a history.

_ONLY_CALL = placeholder_id(0)


def parse_functions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The body's `functions` as chat tools. Raises RequestError, also if a body mixes both forms."""
    functions = fields.objects(body, "functions")
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(old) is not None and body.get(new) is not None:
            raise RequestError(f"'{old}' is an older form of '{new}': send one of the two", param=old)
    if body.get("function_call") is not None and not functions:
        raise RequestError(
            "'function_call' needs 'functions' to choose from; with 'tools' send 'tool_choice'", param="function_call"
        )
    for function in functions:
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("each of 'functions' must have a 'name'", param="functions")
    return [{"type": "function", "function": function} for function in functions]


def parse_function_choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` for a body that offers `functions`. Raises RequestError."""
    # The reply has room for one call: an engine can be made to drop the sampled text after it.
    chosen: dict[str, Any] = {"parallel_tool_calls": False}
    choice = body.get("function_call")
    if isinstance(choice, dict):
        if choice.get("name") not in [tool["function"]["name"] for tool in tools]:
            raise RequestError("'function_call' must name one of 'functions'", param="function_call")
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif choice in ("auto", "none"):
        chosen["tool_choice"] = choice
    elif choice is not None:
        raise RequestError("'function_call' must be 'auto', 'none' or an object with a 'name'", param="function_call")
    return chosen


def convert_functions(message: dict[str, Any]) -> None:
    """Rewrite a history message of the legacy form in place, as a tool call or a tool's result. Raises RequestError."""
    call = message.pop("function_call", None)
    if call is not None:
        if message.get("role") != "assistant" or message.get("tool_calls"):
            raise RequestError("'function_call' belongs to an assistant's message without 'tool_calls'", param="messages")
        if not isinstance(call, dict) or not all(isinstance(call.get(name), str) for name in ("name", "arguments")):
            raise RequestError(
                "a message's 'function_call' must be an object with 'name' and 'arguments', two strings", param="messages"
            )
        message["tool_calls"] = [tool_call(_ONLY_CALL, call["name"], call["arguments"])]
    if message.get("role") == "function":
        if not isinstance(message.get("name"), str):
            raise RequestError("a message of the role 'function' must have a 'name'", param="messages")
        message |= {"role": "tool", "tool_call_id": _ONLY_CALL}


def as_function_call(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply's message, or a piece of one, with its first tool call as a `function_call`."""
    calls = reply.pop("tool_calls", None) or ()
    # Only the calls of a stream have an index.
    first = next((call for at, call in enumerate(calls) if call.get("index", at) == 0), None)
    return reply if first is None else {**reply, "function_call": first["function"]}
