"""OpenAI Responses: `/v1/responses`, streamed and whole, and the endpoints for stored responses.

Shapes as the openai SDK and Codex read them. The session store is the state: `previous_response_id` and GET find every response of the
session that was not created with `store: false`, even if another process answered it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import (
    Action,
    Divide,
    Endpoint,
    ErrorAnswer,
    HistoryMessage,
    Incoming,
    Past,
    Reply,
    Request,
    retry_headers,
    show_logprobs,
)
from proxy.dialects.chat import OpenAIDialect, choose_status, describe_error
from proxy.dialects.fields import decode, encode
from proxy.dialects.raw_history import SplitBody
from proxy.dialects.responses_reply import (
    ResponsesReplyOptions,
    ResponsesStream,
    complete_response,
    content_of,
    feed,
    parse_options,
)
from proxy.dialects.responses_request import ReadSystem, divider, kind_of
from proxy.dialects.responses_stored import find_call, load_conversation, record_marks, render_items, render_response
from proxy.dialects.responses_tools import Toolbox, build_toolbox, parse_tool_choice
from proxy.errors import ContextTooLong, RequestError, UnknownCall, VerbatimError
from reconstruct.records import Call

_SAMPLING = {"max_output_tokens": "max_tokens"} | {name: name for name in ("temperature", "top_p", "top_k", "seed", "stop")}
_FORWARDED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias", "ignore_eos")
"""Fields that OpenAI's endpoint does not have and engines do."""

_UNSUPPORTED = {
    "background": "responses cannot be made in the background: leave 'background' out and read the answer or its stream",
    "conversation": "there are no conversations: send the items, or 'previous_response_id'",
    "prompt": "there are no prompt templates: send 'instructions' and 'input'",
}

_EXAMPLE = {"model": "policy", "input": "Say hello."}

_FIRST_SYSTEM = ReadSystem("system")


class ResponsesDialect(OpenAIDialect):
    name = "responses"
    title = "OpenAI Responses (`/v1/responses`)"
    endpoints = (
        Endpoint(
            "call",
            "POST",
            "/v1/responses",
            "OpenAI Responses",
            "Items in, items out; `previous_response_id` names an earlier response of the session.",
            {**_EXAMPLE, "max_output_tokens": 32},
        ),
        Endpoint(
            "count",
            "POST",
            "/v1/responses/input_tokens",
            "Count tokens (OpenAI Responses)",
            "The number of input tokens, as the engine counts them. Nothing is recorded.",
            _EXAMPLE,
        ),
        Endpoint("stored", "GET", "/v1/responses/{response_id}", "Get an earlier response", "As it was answered."),
        Endpoint(
            "items",
            "GET",
            "/v1/responses/{response_id}/input_items",
            "Get the input of an earlier response",
            "As a list of items.",
        ),
    )
    paths = r"(?:/v1){0,2}/responses(?:/|\Z)"
    history_field = "input"

    def parse(self, incoming: Incoming, past: Past) -> Request:
        divide = divider(incoming.later_system_role)
        split = _split(incoming.body, past, divide)
        body = split.fields
        for key, message in _UNSUPPORTED.items():
            if body.get(key):
                raise RequestError(message, param=key)
        last = split.items(len(split) - 1) if len(split) else []
        if last and any(name in last[0] for name in (b'"prefix"', b'"partial"')):
            fields.refuse_prefill(decode(last[0]), "input")
        messages, aside = past.read(split, divide)
        tools = fields.objects(body, "tools")
        added = _added_tools(aside)
        box = build_toolbox([*tools, *added]) if added else past.convert(tools, build_toolbox)
        options = parse_options(body, tools, box)
        history, instructions = _history(body, messages, aside, past, incoming.later_system_role)
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=history,
            tools=box.tools,
            template_kwargs=fields.template_kwargs(body),
            sampling=fields.sampling(body, _SAMPLING),
            forward=_forward(body, box),
            stream=fields.flag(body, "stream"),
            top_logprobs=options.logprobs,
            echo=options,
            marks=record_marks(body, options, instructions),
            dropped_tools=box.dropped,
        )

    def render_count(self, tokens: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": tokens})

    def render(self, request: Request, reply: Reply) -> bytes:
        options: ResponsesReplyOptions = request.echo
        choice = reply.choices[0]
        output = options.output(choice.call_id)
        feed(output, content_of(choice.message), choice.finish_reason, show_logprobs(request, choice.logprobs) or ())
        return encode(complete_response(options, reply, choice, output.items))

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> ResponsesStream:
        return ResponsesStream(request, reply_id, created)

    def render_stored(self, response_id: str, action: Action, past: Past) -> tuple[Call, bytes]:
        call = find_call(response_id, past, what="Response")
        return call, encode(render_items(call, past) if action == "items" else render_response(call, past))

    def render_error(self, error: VerbatimError) -> ErrorAnswer:
        status, described = choose_status(error), describe_error(error)
        if isinstance(error, UnknownCall) and error.param == "previous_response_id":
            status, described = 400, {**described, "type": "invalid_request_error", "code": "previous_response_not_found"}
        return ErrorAnswer(status, retry_headers(error), encode({"error": described}))

    def is_streamed_error(self, error: VerbatimError) -> bool:
        # Codex takes a 400 for a broken request, and shortens its history only if a stream says that it is too long.
        return isinstance(error, ContextTooLong)


def _split(body: bytes, past: Past, divide: Divide) -> SplitBody:
    """The body with its raw input items; a text is one item."""
    try:
        return past.split(body, "input", divide)
    except RequestError as error:
        if error.param != "input":
            raise
    found = decode(body)
    text = found.pop("input")
    if not isinstance(text, str):
        raise RequestError("'input' must be a string or a list of items", param="input")
    return SplitBody(body, found, [encode({"role": "user", "content": text})])


def _added_tools(aside: Sequence[bytes]) -> list[Any]:
    """The tools that items of the input define."""
    return [tool for raw in aside if kind_of(raw) == "tools" for tool in fields.objects(decode(raw), "tools")]


def _history(
    body: Mapping[str, Any], new: list[HistoryMessage], aside: Sequence[bytes], past: Past, later_system_role: str
) -> tuple[list[HistoryMessage], int]:
    """The messages, system prompt first, and how many characters of that are the request's instructions. `new` are those of the
    input, `aside` has the system messages before them."""
    instructions = fields.text(body, "instructions") or ""
    prompts = [_system_text(past, encode({"content": instructions}))] if instructions else [""]
    leading = [raw for raw in aside if kind_of(raw) == "system"]
    history: list[HistoryMessage] = []
    previous = fields.text(body, "previous_response_id")
    if previous is not None:
        call = find_call(previous, past, what="Previous response", param="previous_response_id")
        system, history = load_conversation(call, past)
        prompts.append(system)
        read = ReadSystem(later_system_role)
        new = [*(seen for raw in leading for seen in past.read_item(raw, read)), *new]
    else:
        prompts += [_system_text(past, raw) for raw in leading]
    if previous is None and not new and not any(prompts[1:]):
        raise RequestError("'input' must hold a message", param="input")
    text = "\n\n".join(prompt for prompt in prompts if prompt)
    first = past.read_item(encode({"content": text}), _FIRST_SYSTEM) if text else []
    return [*first, *history, *new], len(prompts[0])


def _system_text(past: Past, raw: bytes) -> str:
    return "\n\n".join(str(seen.message["content"]) for seen in past.read_item(raw, _FIRST_SYSTEM))


def _forward(body: Mapping[str, Any], box: Toolbox) -> dict[str, Any]:
    """What engines take unchanged, under the chat body's names."""
    forward = {key: body[key] for key in _FORWARDED if body.get(key) is not None}
    choice = parse_tool_choice(body.get("tool_choice"), box)
    if choice is not None:
        forward["tool_choice"] = choice
    if box.functions and body.get("parallel_tool_calls") is not None:
        forward["parallel_tool_calls"] = body["parallel_tool_calls"]
    effort = fields.mapping(body, "reasoning").get("effort")
    if effort is not None:
        forward["reasoning_effort"] = fields.ENGINE_EFFORTS.get(effort, effort)
    response_format = _response_format(fields.mapping(fields.mapping(body, "text"), "format"))
    return {**forward, "response_format": response_format} if response_format else forward


def _response_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema" or not isinstance(form.get("schema"), dict):
        raise RequestError("'text.format' must be text, json_object or json_schema with a schema", param="text.format")
    known = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {key: form[key] for key in known if form.get(key) is not None}}
