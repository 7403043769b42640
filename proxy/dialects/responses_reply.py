"""The response object: what the request asked for, repeated, and what the reply says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import Choice, Delta, Reply, Request, seal
from proxy.dialects.responses_tools import FORMS, Kind, Toolbox, call_item, function_call, response_id
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
"""Body fields that a response repeats or that say how it looks; tools and instructions are kept elsewhere."""


@dataclass(slots=True)
class Wanted:
    """How the reply is to be shown. `fields` are those of the response object that repeat the request."""

    fields: dict[str, Any]
    toolbox: Toolbox
    summary: bool
    sealed: bool
    logprobs: int | None

    def output(self, call_id: str) -> Output:
        return Output(call_id, self.toolbox, summary=self.summary, sealed=self.sealed)


def wanted(body: Mapping[str, Any], tools: Sequence[Any], toolbox: Toolbox) -> Wanted:
    """What the body asks of the response's looks. Raises RequestError for a field of a wrong type."""
    include, reasoning = fields.strings(body, "include"), _reasoning(body)
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
        "store": is_stored(body),
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
    return Wanted(repeated, toolbox, reasoning.get("summary") is not None, _SEALED in include, shown_logprobs)


def is_stored(body: Mapping[str, Any]) -> bool:
    return body.get("store") is None or fields.flag(body, "store")


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = fields.mapping(body, "reasoning")
    _one_of(reasoning, "effort", EFFORTS)
    _one_of(reasoning, "summary", _SUMMARIES)
    return reasoning


def _one_of(body: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str | None:
    value = fields.text(body, key)
    if value is not None and value not in allowed:
        raise RequestError(f"'{key}' must be one of {', '.join(allowed)}, not '{value}'", param=key)
    return value


def response(wanted: Wanted, call_id: str, created: int, model: str, status: str, **said: Any) -> dict[str, Any]:
    """The response object; `said` holds output, usage, error and incomplete_details as far as there are any."""
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
        **wanted.fields,
        **said,
    }


@dataclass(frozen=True, slots=True)
class Said:
    """What a message says, or what of it is still to be told; calls as (position, name, arguments)."""

    reasoning: str
    text: str
    calls: Sequence[tuple[int, str, str]]


def said_in(message: Mapping[str, Any]) -> Said:
    """What a whole chat message says."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(position, function["name"], function["arguments"]) for position, function in enumerate(functions)]
    return Said(message.get("reasoning_content") or "", message.get("content") or "", calls)


def tell(output: Output, said: Said, finish_reason: str, logprobs: Sequence[Any] = ()) -> list[Event]:
    """Takes the rest of a reply into `output`, and ends it."""
    events: list[Event] = []
    if said.reasoning:
        events += output.reasoning(said.reasoning)
    if said.text:
        events += output.text(said.text, logprobs)
    for call in said.calls:
        events += output.call(*call)
    return [*events, *output.finish("incomplete" if finish_reason == "length" else "completed", logprobs)]


def ended(wanted: Wanted, reply: Reply, choice: Choice, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The response object of a reply."""
    cut = choice.finish_reason == "length"
    return response(
        wanted,
        choice.call_id,
        reply.created,
        reply.model,
        "incomplete" if cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=items,
        usage=usage(reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens),
    )


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + completion_tokens,
    }


# The output items of one reply, put together from its pieces, and the events that tell of them.
#
# Pieces are taken in the order they are sampled; each item is finished before the next begins, as clients expect. A whole reply is
# taken in the order reasoning, text, tool calls, which is the order of a stream: so both give the same items. Text of white space alone
# waits for more and is left out beside other items: templates put it between a thought and a call.


Event = dict[str, Any]


class _Item(Protocol):
    """An item that is being told: `done` gives its last events, the finished item in the last of them."""

    def opened(self) -> list[Event]: ...

    def done(self, status: str) -> list[Event]: ...


def _event(kind: str, index: int, **fields: Any) -> Event:
    return {"type": f"response.{kind}", "output_index": index, **fields}


class _Message:
    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._index = item_id, index
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> list[Event]:
        item = {"type": "message", "id": self._id, "role": "assistant", "status": "in_progress", "content": []}
        return [_event("output_item.added", self._index, item=item), self._told("content_part.added", part=_text_part("", []))]

    def add(self, text: str, logprobs: Sequence[Mapping[str, Any]]) -> list[Event]:
        shaped = [_logprob(entry) for entry in logprobs]
        self._text.append(text)
        self._logprobs += shaped
        return [self._told("output_text.delta", delta=text, logprobs=shaped)]

    def done(self, status: str) -> list[Event]:
        text = "".join(self._text)
        part = _text_part(text, self._logprobs)
        item = {"type": "message", "id": self._id, "role": "assistant", "status": status, "content": [part]}
        return [
            self._told("output_text.done", text=text, logprobs=self._logprobs),
            self._told("content_part.done", part=part),
            _event("output_item.done", self._index, item=item),
        ]

    def _told(self, kind: str, **fields: Any) -> Event:
        return _event(kind, self._index, item_id=self._id, content_index=0, **fields)


class _Reasoning:
    """As a summary where the harness asked for one, else as the text it is."""

    def __init__(self, item_id: str, index: int, call_id: str, *, summary: bool, sealed: bool) -> None:
        self._id, self._index, self._call_id, self._sealed = item_id, index, call_id, sealed
        self._where, self._kind = ("summary", "summary_text") if summary else ("content", "reasoning_text")
        self._events = "reasoning_summary_text" if summary else "reasoning_text"
        self._part = "reasoning_summary_part" if summary else "content_part"
        self._text: list[str] = []

    def opened(self) -> list[Event]:
        added = _event("output_item.added", self._index, item=self._item([], None))
        return [added, self._told(f"{self._part}.added", part={"type": self._kind, "text": ""})]

    def add(self, text: str) -> list[Event]:
        self._text.append(text)
        return [self._told(f"{self._events}.delta", delta=text)]

    def done(self, status: str) -> list[Event]:
        text = "".join(self._text)
        part = {"type": self._kind, "text": text}
        item = self._item([part], seal(self._call_id, text) if self._sealed else None)
        return [
            self._told(f"{self._events}.done", text=text),
            self._told(f"{self._part}.done", part=part),
            _event("output_item.done", self._index, item=item),
        ]

    def _item(self, parts: list[dict[str, Any]], sealed: str | None) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "reasoning", "id": self._id, "summary": [], self._where: parts}
        return {**item, "encrypted_content": sealed} if self._sealed else item

    def _told(self, kind: str, **fields: Any) -> Event:
        part = {"summary_index": 0} if self._where == "summary" else {"content_index": 0}
        return _event(kind, self._index, item_id=self._id, **part, **fields)


class _Call:
    """A tool call. A function's arguments are told as they come; any other kind's once they are whole, since what the item shows
    is read out of them."""

    def __init__(self, toolbox: Toolbox, index: int, call_id: str, position: int, name: str) -> None:
        self._index, self._call_id, self._position, self._name = index, call_id, position, name
        self._kind: Kind = toolbox.kind(name)
        self._live = self._kind.type not in FORMS
        self._arguments: list[str] = []

    def opened(self) -> list[Event]:
        if not self._live:
            return []
        item = function_call(self._kind, self._call_id, self._position, "", "in_progress")
        return [_event("output_item.added", self._index, item=item)]

    def add(self, arguments: str) -> list[Event]:
        self._arguments.append(arguments)
        return [self._told("function_call_arguments.delta", delta=arguments)] if self._live and arguments else []

    def done(self, status: str) -> list[Event]:
        arguments = "".join(self._arguments)
        item = call_item(self._kind, self._call_id, self._position, self._name, arguments, status)
        last = [_event("output_item.done", self._index, item=item)]
        if self._live:
            return [self._told("function_call_arguments.done", arguments=arguments), *last]
        return [*self._whole(item), *last]

    def _whole(self, item: dict[str, Any]) -> list[Event]:
        begun = {**item, "status": "in_progress", **({"input": ""} if "input" in item else {})}
        events = [_event("output_item.added", self._index, item=begun)]
        if "input" in item:
            events.append(self._told("custom_tool_call_input.delta", item["id"], delta=item["input"]))
            events.append(self._told("custom_tool_call_input.done", item["id"], input=item["input"]))
        elif item["type"] == "function_call":
            events[0]["item"] = {**begun, "arguments": ""}
            events.append(self._told("function_call_arguments.delta", delta=item["arguments"]))
            events.append(self._told("function_call_arguments.done", arguments=item["arguments"]))
        return events

    def _told(self, kind: str, item_id: str = "", **fields: Any) -> Event:
        return _event(kind, self._index, item_id=item_id or f"fc_{self._call_id}_{self._position}", **fields)


class Output:
    """Takes the pieces of one reply. Each method gives the events that tell of the piece; `items` are the finished ones."""

    def __init__(self, call_id: str, toolbox: Toolbox, *, summary: bool, sealed: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._call_id, self._toolbox = call_id, toolbox
        self._summary, self._sealed = summary, sealed
        self._open: _Item | None = None
        self._space = ""
        self._made = {"rs": 0, "msg": 0}
        self._naming: tuple[int, str] | None = None
        self._at = -1

    def reasoning(self, text: str) -> list[Event]:
        if isinstance(self._open, _Reasoning):
            return self._open.add(text)
        item_id = self._named("rs")
        events, index = self._next()
        item = _Reasoning(item_id, index, self._call_id, summary=self._summary, sealed=self._sealed)
        return [*events, *self._begin(item), *item.add(text)]

    def text(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        if isinstance(self._open, _Message):
            return self._open.add(text, logprobs)
        self._space += text
        return self._message(logprobs) if self._space.strip() else []

    def call(self, position: int, name: str, arguments: str) -> list[Event]:
        """A piece of the call at `position`; its name is whole when its arguments begin or another piece follows."""
        events: list[Event] = []
        if position != self._at:
            events, self._at = self._close("completed"), position
            self._naming = (position, "")
        if self._naming is not None:
            self._naming = (position, self._naming[1] + name)
        if arguments:
            events += self._called()
            assert isinstance(self._open, _Call)
            events += self._open.add(arguments)
        return events

    def finish(self, status: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        """The end of the reply; a reply that says nothing is an empty message. `status` is the last item's."""
        events = self._called()
        if self._open is None and not self.items:
            events += self._message(logprobs)
        return [*events, *self._close(status)]

    def _message(self, logprobs: Sequence[Mapping[str, Any]]) -> list[Event]:
        item_id = self._named("msg")
        events, index = self._next()
        item = _Message(item_id, index)
        text, self._space = self._space, ""
        return [*events, *self._begin(item), *item.add(text, logprobs)]

    def _called(self) -> list[Event]:
        """The call whose name was being told begins."""
        if self._naming is None:
            return []
        (position, name), self._naming = self._naming, None
        return self._begin(_Call(self._toolbox, len(self.items), self._call_id, position, name))

    def _next(self) -> tuple[list[Event], int]:
        """The end of what is open, and the place of the next item."""
        events = self._close("completed")
        return events, len(self.items)

    def _begin(self, item: _Item) -> list[Event]:
        self._open = item
        return item.opened()

    def _close(self, status: str) -> list[Event]:
        events = self._called()
        if self._open is not None:
            events += self._open.done(status)
            self.items.append(events[-1]["item"])
            self._open = None
        return events

    def _named(self, prefix: str) -> str:
        count, self._made[prefix] = self._made[prefix], self._made[prefix] + 1
        return f"{prefix}_{self._call_id}" + (f"_{count}" if count else "")


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A chat logprob entry in the shape of this dialect, which has no entry without bytes."""
    top = [_logprob(other) for other in entry.get("top_logprobs") or ()]
    shaped = {"token": entry.get("token") or "", "logprob": entry.get("logprob"), "bytes": entry.get("bytes") or []}
    return {**shaped, "top_logprobs": top} if "top_logprobs" in entry else shaped


# The events of one streamed response.


_encode = msgspec.json.Encoder().encode

_QUIET_SECONDS = 10.0
"""Longest time without an event while pieces come that nothing can be told of yet."""


class ResponsesStream:
    def __init__(self, request: Request, reply_id: str, created: int) -> None:
        self._wanted: Wanted = request.echo
        self._reply_id, self._created, self._model = reply_id, created, request.model
        self._output: Output = self._wanted.output(reply_id)
        self._number = 0
        self._told_at = time.monotonic()
        self._reasoning = self._text = ""
        self._calls: dict[int, tuple[str, str]] = {}
        # Logprobs belong to the text as a whole: pieces of it do not say which are a call's.
        self._waits = request.top_logprobs is not None

    def open(self) -> bytes:
        begun = self._response("in_progress")
        return self._write([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    def delta(self, delta: Delta) -> bytes:
        events = [] if self._waits else self._take(delta)
        quiet = not events and time.monotonic() - self._told_at > _QUIET_SECONDS
        return self.keep_alive() if quiet else self._write(events)

    def keep_alive(self) -> bytes:
        return self._write([{"type": "response.in_progress", "response": self._response("in_progress")}])

    def close(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        events = tell(self._output, self._rest(choice.message), choice.finish_reason, choice.logprobs or ())
        whole = ended(self._wanted, reply, choice, self._output.items)
        return self._write([*events, {"type": f"response.{whole['status']}", "response": whole}])

    def error(self, error: VerbatimError) -> bytes:
        said = {"code": _failure_code(error), "message": error.message}
        failed = self._response("failed", error=said, output=self._output.items)
        return self._write([{"type": "response.failed", "response": failed}])

    def _take(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            self._reasoning += delta.reasoning
            events += self._output.reasoning(delta.reasoning)
        if delta.content:
            self._text += delta.content
            events += self._output.text(delta.content)
        for call in delta.tool_calls:
            events += self._take_call(call)
        return events

    def _take_call(self, call: Mapping[str, Any]) -> list[Event]:
        position, function = call.get("index", 0), call.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        told = self._calls.get(position, ("", ""))
        self._calls[position] = (told[0] + name, told[1] + arguments)
        return self._output.call(position, name, arguments)

    def _rest(self, message: Mapping[str, Any]) -> Said:
        """What of the message no delta told."""
        whole = said_in(message)
        calls = []
        for position, name, arguments in whole.calls:
            told = self._calls.get(position)
            if told != (name, arguments):
                known = told or ("", "")
                calls.append((position, _after(name, known[0]), _after(arguments, known[1])))
        return Said(_after(whole.reasoning, self._reasoning), _after(whole.text, self._text), calls)

    def _response(self, status: str, **said: Any) -> dict[str, Any]:
        return response(self._wanted, self._reply_id, self._created, self._model, status, **said)

    def _write(self, events: list[Event]) -> bytes:
        written = []
        for event in events:
            self._told_at = time.monotonic()
            kind, number = event["type"], self._number
            self._number += 1
            written.append(f"event: {kind}\ndata: ".encode() + _encode({**event, "sequence_number": number}) + b"\n\n")
        return b"".join(written)


def _after(whole: str, told: str) -> str:
    return whole.removeprefix(told) if whole.startswith(told) else ""


def _failure_code(error: VerbatimError) -> str:
    """The codes that clients know: Codex tells a full context and a broken request by them, and asks again after all others."""
    if error.code == "context_length_exceeded":
        return error.code
    return "server_error" if error.status >= 500 else "invalid_prompt"
