"""Google's `contents` as chat messages.

What the model said in a row is one assistant message: clients keep a streamed reply as one content per chunk. Function responses
become tool messages, before the text that came with them. Ids of calls and responses are optional; a response without one answers
the first open call of its name, so the model's turn and the responses to it are read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.body import decode
from proxy.dialects.gemini_json import named
from proxy.dialects.gemini_parts import Part, answered, called, media_part, parts_of, sealed, text_of
from proxy.dialects.tools import arguments_text, made_up_id, tool_call
from proxy.errors import RequestError
from proxy.history import Heard, Read
from proxy.minting import tool_call_id

_ROLES = frozenset({"user", "model", "function"})


class _Role(msgspec.Struct):
    role: str | None = None


_decode_role = msgspec.json.Decoder(_Role).decode


def units(items: Sequence[bytes]) -> Iterator[tuple[bytes, Read]]:
    """The raw contents as units that can be read without what is around them, and how each is read: a turn of the model with the
    responses to it, or one content."""
    spoken = [_is_model(item) for item in items]
    start = 0
    while start < len(items):
        end = _turn_end(items, spoken, start) if spoken[start] else start + 1
        yield (items[start], read_content) if end == start + 1 else (b"[" + b",".join(items[start:end]) + b"]", read_turn)
        start = end


def _is_model(item: bytes) -> bool:
    try:
        return _decode_role(item).role == "model"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _turn_end(items: Sequence[bytes], spoken: Sequence[bool], start: int) -> int:
    """Behind the model's contents from `start` on and the last content before its next turn that answers a call."""
    position = start
    while position < len(items) and spoken[position]:
        position += 1
    end = position
    while position < len(items) and not spoken[position]:
        position += 1
        if b'"functionResponse"' in items[position - 1] or b'"function_response"' in items[position - 1]:
            end = position
    return end


def read_content(raw: bytes) -> list[Heard]:
    return _read([decode(raw)])


def read_turn(raw: bytes) -> list[Heard]:
    return _read(decode(raw))


def read_system(raw: bytes) -> list[Heard]:
    """The system instruction: a string, a content or a list of parts, its texts one below the other."""
    said = decode(raw)
    if isinstance(said, str):
        return [Heard({"role": "system", "content": said})]
    texts = [
        text_of(part) for part in parts_of({"parts": said} if isinstance(said, list) else named(said, "systemInstruction"))
    ]
    if None in texts:
        raise RequestError("'systemInstruction' must hold text", param="systemInstruction")
    return [Heard({"role": "system", "content": "\n".join(filter(None, texts))})]


@dataclass(slots=True)
class _OpenCall:
    """A call of the turn that was not answered yet; `given`: its id is the client's."""

    call_id: str
    name: str
    given: bool


def _read(contents: list[Any]) -> list[Heard]:
    """The messages of contents, of which the model's come first."""
    turn = [named(content, "contents") for content in contents]
    for content in turn:
        if (fields.text(content, "role") or "user") not in _ROLES:
            raise RequestError(f"contents: a role must be user or model, not '{content['role']}'", param="contents")
    said = [part for content in turn if content.get("role") == "model" for part in parts_of(content)]
    spoken = any(content.get("role") == "model" for content in turn)
    heard, open_calls = _model_turn(said) if spoken else ([], [])
    for content in turn:
        if content.get("role") != "model":
            heard += _user_turn(parts_of(content), open_calls)
    return heard


def _model_turn(parts: Sequence[Part]) -> tuple[list[Heard], list[_OpenCall]]:
    """The assistant message, and the calls it makes."""
    call_id, reasoning = _named_by(parts)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[_OpenCall] = []
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for part in parts:
        text = text_of(part)
        if text is not None:
            (thoughts if fields.flag(part, "thought") else texts).append(text)
        elif "functionCall" in part:
            given, name, arguments = called(part)
            calls.append(_OpenCall(given or _id_of(call_id, len(calls)), name, bool(given)))
            message.setdefault("tool_calls", []).append(tool_call(calls[-1].call_id, name, arguments_text(arguments)))
        elif part.keys() & {"functionResponse", "inlineData", "fileData"}:
            raise RequestError("contents: the model's parts are text and function calls", param="contents")
    if texts or not calls:
        message["content"] = "".join(texts)
    if thought := "".join(thoughts) or reasoning:
        message["reasoning_content"] = thought
    return [Heard(message, call_id)], calls


def _named_by(parts: Sequence[Part]) -> tuple[str, str]:
    """(call id, reasoning) that signatures in the parts name; the last that carries reasoning has all of it."""
    call_id, reasoning = "", ""
    for part in parts:
        if (seal := sealed(part)) is not None:
            call_id, reasoning = seal[0], seal[1] or reasoning
    return call_id, reasoning


def _id_of(call_id: str, position: int) -> str:
    """The id of a call whose id the client dropped: as it was minted, where a signature tells whose call it is."""
    return tool_call_id(call_id, position) if call_id else made_up_id(position)


def _user_turn(parts: Sequence[Part], open_calls: list[_OpenCall]) -> list[Heard]:
    """Tool messages, then what the user says beside them."""
    heard: list[Heard] = []
    said: list[dict[str, Any]] = []
    for part in parts:
        text = text_of(part)
        if text is not None:
            said.append({"type": "text", "text": text})
        elif "functionResponse" in part:
            identifier, name, content = answered(part)
            call_id = _answers(identifier, name, open_calls)
            heard.append(Heard({"role": "tool", "tool_call_id": call_id, "content": content}))
        elif part.keys() & {"inlineData", "fileData"}:
            said.append(media_part(part))
        elif "functionCall" in part:
            raise RequestError("contents: only the model calls functions", param="contents")
    if said:
        plain = said[0]["text"] if len(said) == 1 and said[0]["type"] == "text" else said
        heard.append(Heard({"role": "user", "content": plain}))
    if not heard:
        raise RequestError("contents: a user's content must have parts", param="contents")
    return heard


def _answers(identifier: str, name: str, open_calls: list[_OpenCall]) -> str:
    """The id of the call that a response answers, which is open no longer; made up where there is no such call."""
    named_so = [call for call in open_calls if identifier and call.call_id == identifier]
    nameless = [call for call in open_calls if call.name == name and not (identifier and call.given)]
    for call in (*named_so, *nameless):
        open_calls.remove(call)
        return call.call_id
    return identifier or f"call_of_{name}"
