"""The response object, whole or as events: the request's fields repeated, and the reply's items."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import Choice, Delta, Reply, Request, show_logprobs
from proxy.dialects.fields import TEXT, encode, split_event
from proxy.dialects.responses_items import response_id
from proxy.dialects.responses_output import Event, ItemWriter
from proxy.dialects.responses_tools import Toolbox
from proxy.errors import RequestError, VerbatimError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"

KEPT = (
    *("include", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "reasoning", "safety_identifier", "store", "temperature", "text", "tool_choice"),
    *("top_logprobs", "top_p", "truncation", "user"),
)
"""Body fields that a response repeats or that shape it; tools and instructions are stored elsewhere."""


@dataclass(slots=True)
class ResponsesReplyOptions:
    """How the reply is to be rendered. `fields`: those of the response object that repeat the request."""

    fields: dict[str, Any]
    toolbox: Toolbox
    summary: bool
    sealed: bool
    logprobs: int | None

    def output(self, call_id: str) -> ItemWriter:
        return ItemWriter(call_id, self.toolbox, summary=self.summary, sealed=self.sealed)


def parse_options(body: Mapping[str, Any], tools: Sequence[Any], toolbox: Toolbox) -> ResponsesReplyOptions:
    """Raises RequestError for a field of a wrong type."""
    include, reasoning = fields.strings(body, "include"), fields.mapping(body, "reasoning")
    _one_of(reasoning, "effort", EFFORTS)
    _one_of(reasoning, "summary", _SUMMARIES)
    top_logprobs = fields.integer(body, "top_logprobs") or 0
    if not 0 <= top_logprobs <= 20:
        raise RequestError("'top_logprobs' must be an integer from 0 to 20", param="top_logprobs")
    repeated = {
        "instructions": fields.text(body, "instructions"),
        "max_output_tokens": fields.positive(body, "max_output_tokens"),
        "max_tool_calls": fields.positive(body, "max_tool_calls"),
        "metadata": fields.mapping(body, "metadata"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is None or fields.flag(body, "parallel_tool_calls"),
        "previous_response_id": fields.text(body, "previous_response_id"),
        "prompt_cache_key": fields.text(body, "prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "safety_identifier": fields.text(body, "safety_identifier"),
        "service_tier": "default",
        "store": body.get("store") is None or fields.flag(body, "store"),
        "temperature": fields.number(body, "temperature"),
        "text": {"format": {"type": "text"}, **fields.mapping(body, "text")},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": list(tools),
        "top_logprobs": top_logprobs,
        "top_p": fields.number(body, "top_p"),
        "truncation": _one_of(body, "truncation", ("auto", "disabled")) or "disabled",
        "user": fields.text(body, "user"),
    }
    shown_logprobs = top_logprobs if _LOGPROBS in include else None
    return ResponsesReplyOptions(repeated, toolbox, reasoning.get("summary") is not None, _SEALED in include, shown_logprobs)


def _one_of(body: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str | None:
    value = fields.text(body, key)
    if value is not None and value not in allowed:
        raise RequestError(f"'{key}' must be one of {', '.join(allowed)}, not '{value}'", param=key)
    return value


def build_response(
    options: ResponsesReplyOptions, call_id: str, created: int, model: str, status: str, **result: Any
) -> dict[str, Any]:
    """The response object; `result` holds output, usage, error and incomplete_details, as far as there are any."""
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **options.fields,
        **result,
    }


def complete_response(
    options: ResponsesReplyOptions, reply: Reply, choice: Choice, items: list[dict[str, Any]]
) -> dict[str, Any]:
    """The response object of a finished reply."""
    cut = choice.finish_reason == "length"
    return build_response(
        options,
        choice.call_id,
        reply.created,
        reply.model,
        "incomplete" if cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=items,
        usage=build_usage(reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens),
    )


def build_usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a message, or what of it is still to be sent; calls as (position, name, arguments)."""

    reasoning: str
    text: str
    calls: Sequence[tuple[int, str, str]]


def content_of(message: Mapping[str, Any]) -> Content:
    """Of a whole chat message."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(position, function["name"], function["arguments"]) for position, function in enumerate(functions)]
    return Content(message.get("reasoning_content") or "", message.get("content") or "", calls)


def feed(output: ItemWriter, content: Content, finish_reason: str, logprobs: Sequence[Any] = ()) -> list[Event]:
    """Put the rest of a reply into `output` and finish it."""
    events: list[Event] = []
    if content.reasoning:
        events += output.add_reasoning(content.reasoning)
    if content.text:
        events += output.add_text(content.text, logprobs)
    for call in content.calls:
        events += output.add_call(*call)
    return [*events, *output.finish("incomplete" if finish_reason == "length" else "completed", logprobs)]


_QUIET_SECONDS = 10.0
"""Longest time without an event while deltas come that no event can show yet."""


class ResponsesStream:
    """Renders one reply as server-sent events with sequence numbers."""

    def __init__(self, request: Request, reply_id: str, created: int) -> None:
        self._request = request
        self._options: ResponsesReplyOptions = request.echo
        self._reply_id, self._created, self._model = reply_id, created, request.model
        self._output: ItemWriter = self._options.output(reply_id)
        self._number = 0
        self._written_at = time.monotonic()
        # What was sent; calls by position, as (name, arguments).
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: dict[int, tuple[str, list[str]]] = {}
        self._template: list[bytes] = []
        """Of the events that carry the pieces of the item `_shown`, up to their number."""
        self._shown: Any = None
        # Logprobs belong to the text as a whole: deltas do not say which of them are a call's.
        self._waits = request.top_logprobs is not None

    def open(self) -> bytes:
        begun = self._response("in_progress")
        return self._encode([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    def write(self, delta: Delta) -> bytes:
        item, is_plain = self._output.prose, not (delta.tool_calls or self._waits)
        # What nearly every token is.
        if is_plain and item is not None and bool(delta.content) is not bool(delta.reasoning) is item.is_reasoning:
            return self._add_prose(item, delta.content or delta.reasoning)
        events = [] if self._waits else self._take(delta)
        quiet = not events and time.monotonic() - self._written_at > _QUIET_SECONDS
        return self.keep_alive() if quiet else self._encode(events)

    def _add_prose(self, item: Any, text: str) -> bytes:
        if item is not self._shown:
            self._template, self._shown = _make_template(item.carry(TEXT)), item
        item.text.append(text)
        (self._reasoning if item.is_reasoning else self._text).append(text)
        self._written_at = time.monotonic()
        number, self._number = self._number, self._number + 1
        return b"%b%d}\n\n" % (encode(text).join(self._template), number)

    def keep_alive(self) -> bytes:
        return self._encode([{"type": "response.in_progress", "response": self._response("in_progress")}])

    def close(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        shown = show_logprobs(self._request, choice.logprobs) or ()
        events = feed(self._output, self._rest(choice.message), choice.finish_reason, shown)
        complete = complete_response(self._options, reply, choice, self._output.items)
        return self._encode([*events, {"type": f"response.{complete['status']}", "response": complete}])

    def fail(self, error: VerbatimError) -> bytes:
        described = {"code": _failure_code(error), "message": error.message}
        failed = self._response("failed", error=described, output=self._output.items)
        return self._encode([{"type": "response.failed", "response": failed}])

    def _take(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
            events += self._output.add_reasoning(delta.reasoning)
        if delta.content:
            self._text.append(delta.content)
            events += self._output.add_text(delta.content)
        for call in delta.tool_calls:
            position, function = call.get("index", 0), call.get("function") or {}
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            known, pieces = self._calls.get(position, ("", []))
            self._calls[position] = known + name, pieces
            pieces.append(arguments)
            events += self._output.add_call(position, name, arguments)
        return events

    def _rest(self, message: Mapping[str, Any]) -> Content:
        """What no delta carried of the message."""
        whole = content_of(message)
        calls = []
        for position, name, arguments in whole.calls:
            known, pieces = self._calls.get(position, ("", []))
            sent = "".join(pieces)
            if position not in self._calls or (known, sent) != (name, arguments):
                calls.append((position, _after(name, known), _after(arguments, sent)))
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        return Content(_after(whole.reasoning, reasoning), _after(whole.text, text), calls)

    def _response(self, status: str, **result: Any) -> dict[str, Any]:
        return build_response(self._options, self._reply_id, self._created, self._model, status, **result)

    def _encode(self, events: list[Event]) -> bytes:
        encoded = []
        for event in events:
            self._written_at = time.monotonic()
            encoded.append(_encode_event(event, self._number))
            self._number += 1
        return b"".join(encoded)


def _encode_event(event: Event, number: int) -> bytes:
    head = f"event: {event['type']}\ndata: ".encode()
    return head + encode({**event, "sequence_number": number}) + b"\n\n"


_END = len(b"0}\n\n")


def _make_template(event: Event) -> list[bytes]:
    """Of an event with TEXT, up to its number."""
    return split_event(_encode_event(event, 0)[:-_END])


def _after(whole: str, sent: str) -> str:
    return whole.removeprefix(sent) if whole.startswith(sent) else ""


def _failure_code(error: VerbatimError) -> str:
    """A code that clients know: Codex recognises a full context and a broken request by it, and retries after any other."""
    if error.code == "context_length_exceeded":
        return error.code
    return "server_error" if error.status >= 500 else "invalid_prompt"
