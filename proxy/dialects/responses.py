"""OpenAI Responses: `/v1/responses`, streamed and whole, and the answers about responses that are kept.

Shapes as the openai SDK and Codex read them. The session store is the state: `previous_response_id` and GET find every response of
the session that was not created with `store: false`, whichever process answered it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import Asked, ErrorAnswer, Past, Read, Reply, Request, Seen, retry_headers
from proxy.dialects.chat import openai_error
from proxy.dialects.fields import decode, split
from proxy.dialects.responses_reply import ResponsesStream, Wanted, ended, said_in, tell, wanted
from proxy.dialects.responses_request import ReadReply, ReadSystem, Section, read_message, read_output, sections
from proxy.dialects.responses_stored import conversation, marks, stored_call, stored_items, stored_response
from proxy.dialects.responses_tools import Toolbox, tool_choice, toolbox
from proxy.errors import ContextTooLong, RequestError, UnknownCall, VerbatimError

_encode = msgspec.json.Encoder().encode

_SAMPLING = {"max_output_tokens": "max_tokens"} | {name: name for name in ("temperature", "top_p", "top_k", "seed", "stop")}
_FORWARDED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias", "ignore_eos")
"""Fields that OpenAI's endpoint has not and engines have."""

_NOT_HERE = {
    "background": "responses cannot be made in the background: leave 'background' out and read the answer or its stream",
    "conversation": "there are no conversations: send the items, or 'previous_response_id'",
    "prompt": "there are no prompt templates: send 'instructions' and 'input'",
}

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that engines do not know, and the nearest that they do."""

_FIRST = ReadSystem("system")


class ResponsesDialect:
    name = "responses"

    def __init__(self, later_system_role: str = "user") -> None:
        self._later = ReadSystem(later_system_role)

    def parse(self, asked: Asked, past: Past) -> Request:
        """The canonical request. Raises RequestError naming the field and the rule it broke, UnknownCall for a previous response
        or a referenced item that the session does not know."""
        body, items = _opened(asked.body)
        _check_served(body)
        found = sections(items)
        offered = _definitions(body, found)
        box = toolbox(offered)
        how = wanted(body, _listed(body), box)
        history, instructions = self._history(body, found, past)
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=history,
            tools=box.tools,
            template_kwargs=fields.template_kwargs(body),
            sampling=fields.sampling(body, _SAMPLING),
            forward=_forward(body, box),
            stream=fields.flag(body, "stream"),
            top_logprobs=how.logprobs,
            echo=how,
            marks=marks(body, how, instructions),
            dropped_tools=box.dropped,
        )

    def parse_count(self, asked: Asked, past: Past) -> Request:
        return self.parse(asked, past)

    def count(self, tokens: int) -> bytes:
        return _encode({"object": "response.input_tokens", "input_tokens": tokens})

    def render(self, request: Request, reply: Reply) -> bytes:
        how: Wanted = request.echo
        choice = reply.choices[0]
        output = how.output(choice.call_id)
        tell(output, said_in(choice.message), choice.finish_reason, choice.logprobs or ())
        return _encode(ended(how, reply, choice, output.items))

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> ResponsesStream:
        return ResponsesStream(request, reply_id, created)

    def stored(self, response_id: str, what: str, past: Past) -> bytes:
        """A response as it was sent ("stored"), or what it answered ("items"). Raises UnknownCall."""
        call = stored_call(response_id, past, what="Response")
        return _encode(stored_items(call, past) if what == "items" else stored_response(call, past))

    def error(self, error: VerbatimError) -> ErrorAnswer:
        status, said = error.status, openai_error(error)
        if isinstance(error, UnknownCall) and error.param == "previous_response_id":
            status, said = 400, {**said, "type": "invalid_request_error", "code": "previous_response_not_found"}
        return ErrorAnswer(status, retry_headers(error), _encode({"error": said}))

    def errs_in_stream(self, error: VerbatimError) -> bool:
        # Codex takes a 400 for a broken request, and makes its history shorter only when a stream says that it is too long.
        return isinstance(error, ContextTooLong)

    def _history(self, body: Mapping[str, Any], found: list[Section], past: Past) -> tuple[list[Seen], int]:
        """The messages, system prompt first, and how many characters of it are the request's instructions."""
        instructions = fields.text(body, "instructions") or ""
        pieces = [_system_text(past, _encode({"content": instructions}))] if instructions else [""]
        history: list[Seen] = []
        previous = fields.text(body, "previous_response_id")
        if previous is not None:
            call = stored_call(previous, past, what="Previous response", param="previous_response_id")
            system, history = conversation(call, past)
            pieces.append(system)
        else:
            leading, found = _divided(found)
            pieces += [_system_text(past, section.raw) for section in leading]
        read = ReadReply(past)
        new = [seen for section in found for seen in self._seen(past, section, read)]
        if previous is None and not new and not any(pieces[1:]):
            raise RequestError("'input' must hold a message", param="input")
        text = "\n\n".join(piece for piece in pieces if piece)
        system_seen = past.see(_encode({"content": text}), _FIRST) if text else []
        return [*system_seen, *history, *new], len(pieces[0])

    def _seen(self, past: Past, section: Section, read: ReadReply) -> list[Seen]:
        if section.kind == "tools":
            return []
        readers: dict[str, Read] = {"system": self._later, "message": read_message, "output": read_output, "reply": read}
        return past.see(section.raw, readers[section.kind])


def _opened(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The body's fields and its raw input items; a text is one item."""
    try:
        return split(body, "input")
    except RequestError as error:
        if error.param != "input":
            raise
    whole = decode(body)
    text = whole.pop("input")
    if not isinstance(text, str):
        raise RequestError("'input' must be a string or a list of items", param="input")
    return whole, [_encode({"role": "user", "content": text})]


def _check_served(body: Mapping[str, Any]) -> None:
    for key, message in _NOT_HERE.items():
        if body.get(key):
            raise RequestError(message, param=key)


def _listed(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return fields.objects(body, "tools")


def _definitions(body: Mapping[str, Any], found: list[Section]) -> list[Any]:
    """The tools of the body and those that items of the input add."""
    added: list[Any] = list(_listed(body))
    for section in found:
        if section.kind == "tools":
            added += fields.objects(decode(section.raw), "tools")
    return added


def _divided(found: list[Section]) -> tuple[list[Section], list[Section]]:
    """The system messages before anything else is said, and what follows them."""
    end = next((at for at, section in enumerate(found) if section.kind not in ("system", "tools")), len(found))
    return [section for section in found[:end] if section.kind == "system"], found[end:]


def _system_text(past: Past, raw: bytes) -> str:
    return "\n\n".join(str(seen.message["content"]) for seen in past.see(raw, _FIRST))


def _forward(body: Mapping[str, Any], box: Toolbox) -> dict[str, Any]:
    """What engines take as it is, in the chat body's names."""
    forward = {key: body[key] for key in _FORWARDED if body.get(key) is not None}
    choice = tool_choice(body.get("tool_choice"), box)
    if choice is not None:
        forward["tool_choice"] = choice
    if box.functions and body.get("parallel_tool_calls") is not None:
        forward["parallel_tool_calls"] = body["parallel_tool_calls"]
    effort = fields.mapping(body, "reasoning").get("effort")
    if effort is not None:
        forward["reasoning_effort"] = _EFFORTS.get(effort, effort)
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
