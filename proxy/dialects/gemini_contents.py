"""Google's `contents` as chat messages.

Consecutive contents of the model are one assistant message: clients keep a streamed reply as one content per chunk. Function responses
become tool messages, before the text that came with them. Ids of calls and responses are optional; a response without one answers the
first open call of its name, so the model's turn and the responses to it are read together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import ParsedMessage, Past, Seals, Unit, tool_call_id
from proxy.dialects.fields import arguments_text, decode, placeholder_id, tool_call
from proxy.dialects.gemini_fields import check_depth, get_object, get_objects, normalize
from proxy.errors import RequestError
from proxy.images import SCHEME, refuse_url

Part = dict[str, Any]

_ROLES = frozenset({"user", "model", "function"})


class _Role(msgspec.Struct):
    role: str | None = None


_decode_role = msgspec.json.Decoder(_Role).decode


def split_units(items: Sequence[bytes]) -> Iterator[Unit]:
    """The raw contents as units that can be read on their own: a turn of the model with the responses to it, or one content."""
    is_models = [_is_model(item) for item in items]
    start, after_model = 0, False
    while start < len(items):
        after_model = after_model or is_models[start]
        end = _turn_end(items, is_models, start) if is_models[start] else start + 1
        # What the user says after a turn of the model is of that turn as soon as a response follows it.
        fresh = is_models[start] or not after_model
        if end == start + 1:
            yield Unit(start, items[start], read_content, fresh)
        else:
            yield Unit(start, b"[" + b",".join(items[start:end]) + b"]", read_turn, fresh)
        start = end


def read_content(raw: bytes, past: Past) -> list[ParsedMessage]:
    return _read([decode(raw)], past.seals)


def read_turn(raw: bytes, past: Past) -> list[ParsedMessage]:
    return _read(decode(raw), past.seals)


def read_system(raw: bytes, _: Past) -> list[ParsedMessage]:
    """The system instruction: a string, a content or a list of parts; texts are joined by line ends."""
    system = decode(raw)
    if isinstance(system, str):
        return [ParsedMessage({"role": "system", "content": system})]
    holder = {"parts": system} if isinstance(system, list) else normalize(system, "systemInstruction")
    texts = [_text_of(part) for part in _parts_of(holder)]
    if None in texts:
        raise RequestError("'systemInstruction' must hold text", param="systemInstruction")
    return [ParsedMessage({"role": "system", "content": "\n".join(filter(None, texts))})]


def _is_model(item: bytes) -> bool:
    try:
        return _decode_role(item).role == "model"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _turn_end(items: Sequence[bytes], is_models: Sequence[bool], start: int) -> int:
    """The end of the model's contents from `start` on and of those that answer its calls before its next turn."""
    position = start
    while position < len(items) and is_models[position]:
        position += 1
    end = position
    while position < len(items) and not is_models[position]:
        position += 1
        if b'"functionResponse"' in items[position - 1] or b'"function_response"' in items[position - 1]:
            end = position
    return end


@dataclass(slots=True)
class _OpenCall:
    """A call of the turn that is not answered yet. `has_id`: the client sent its id."""

    call_id: str
    name: str
    has_id: bool


def _read(contents: list[Any], seals: Seals) -> list[ParsedMessage]:
    """The messages of contents, the model's first."""
    turn = [normalize(content, "contents") for content in contents]
    for content in turn:
        if (fields.text(content, "role") or "user") not in _ROLES:
            raise RequestError(f"contents: a role must be user or model, not '{content['role']}'", param="contents")
    model_parts = [part for content in turn if content.get("role") == "model" for part in _parts_of(content)]
    has_model = any(content.get("role") == "model" for content in turn)
    messages, open_calls = _model_turn(model_parts, seals) if has_model else ([], [])
    for content in turn:
        if content.get("role") != "model":
            messages += _user_turn(_parts_of(content), open_calls)
    return messages


def _model_turn(parts: Sequence[Part], seals: Seals) -> tuple[list[ParsedMessage], list[_OpenCall]]:
    """The assistant message and the calls it makes."""
    call_id, reasoning = _unseal_parts(parts, seals)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[_OpenCall] = []
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for part in parts:
        text = _text_of(part)
        if text is not None:
            (thoughts if fields.flag(part, "thought") else texts).append(text)
        elif "functionCall" in part:
            identifier, name, arguments = _parse_call(part)
            # The client dropped the id: minted anew if a signature names the call, else by its place.
            missing = tool_call_id(call_id, len(calls)) if call_id else placeholder_id(len(calls))
            calls.append(_OpenCall(identifier or missing, name, bool(identifier)))
            message.setdefault("tool_calls", []).append(tool_call(calls[-1].call_id, name, arguments_text(arguments)))
        elif part.keys() & {"functionResponse", "inlineData", "fileData"}:
            raise RequestError("contents: the model's parts are text and function calls", param="contents")
    if texts or not calls:
        message["content"] = "".join(texts)
    if thought := "".join(thoughts) or reasoning:
        message["reasoning_content"] = thought
    return [ParsedMessage(message, call_id)], calls


def _user_turn(parts: Sequence[Part], open_calls: list[_OpenCall]) -> list[ParsedMessage]:
    """Tool messages, then what the user says beside them."""
    messages: list[ParsedMessage] = []
    content: list[dict[str, Any]] = []
    for part in parts:
        text = _text_of(part)
        if text is not None:
            content.append({"type": "text", "text": text})
        elif "functionResponse" in part:
            identifier, name, result = _parse_response(part)
            call_id = _take_call(identifier, name, open_calls)
            messages.append(ParsedMessage({"role": "tool", "tool_call_id": call_id, "content": result}))
        elif part.keys() & {"inlineData", "fileData"}:
            content.append(_media_part(part))
        elif "functionCall" in part:
            raise RequestError("contents: only the model calls functions", param="contents")
    if content:
        plain = content[0]["text"] if len(content) == 1 and content[0]["type"] == "text" else content
        messages.append(ParsedMessage({"role": "user", "content": plain}))
    if not messages:
        raise RequestError("contents: a user's content must have parts", param="contents")
    return messages


def _take_call(identifier: str, name: str, open_calls: list[_OpenCall]) -> str:
    """The id of the call that a response answers, which is closed by it; a placeholder if there is no such call."""
    by_id = [call for call in open_calls if identifier and call.call_id == identifier]
    by_name = [call for call in open_calls if call.name == name and not (identifier and call.has_id)]
    for call in (*by_id, *by_name):
        open_calls.remove(call)
        return call.call_id
    return identifier or f"call_of_{name}"


# One part of a content.

_KINDS = frozenset(
    {"text", "functionCall", "functionResponse", "inlineData", "fileData", "executableCode", "codeExecutionResult"}
)

_ANNOTATIONS = frozenset({"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"})
"""Fields of a part beside its content."""

_URL_SAFE = str.maketrans("-_", "+/")

_MINTED_ID = re.compile(r"(?:.*__)?(call_[0-9a-f]{24}_[0-9]+)", re.DOTALL)
"""A function-call id of this service; some clients put the function's name before ids."""


def _parts_of(content: Mapping[str, Any]) -> list[Part]:
    """The content's parts with camel-case field names. Raises RequestError for a part of an unknown kind."""
    parts = get_objects(content, "parts")
    for part in parts:
        kinds = part.keys() - _ANNOTATIONS
        if len(kinds) > 1 or not kinds <= _KINDS:
            raise RequestError(f"contents: a part holds one of {', '.join(sorted(_KINDS))}", param="contents")
    return parts


def _text_of(part: Part) -> str | None:
    """The text of a text part, of code or of its output; None for any other part."""
    if "text" in part:
        return fields.text(part, "text")
    if "executableCode" in part:
        code = get_object(part, "executableCode")
        return f"```{(fields.text(code, 'language') or '').lower()}\n{fields.text(code, 'code') or ''}\n```\n"
    if "codeExecutionResult" in part:
        return f"```\n{fields.text(get_object(part, 'codeExecutionResult'), 'output') or ''}\n```\n"
    return None


def _media_part(part: Part) -> dict[str, Any]:
    """An image as a chat content part. Raises RequestError for other media and for a URI that is no digest."""
    if "fileData" in part:
        uri = fields.text(get_object(part, "fileData"), "fileUri") or ""
        if not uri.startswith(SCHEME):
            raise refuse_url("media", "contents")
        return {"type": "image_url", "image_url": {"url": uri}}
    data = get_object(part, "inlineData")
    kind, content = fields.text(data, "mimeType") or "", fields.text(data, "data") or ""
    if not kind.startswith("image/"):
        raise RequestError(f"contents: inlineData of type '{kind}' is not taken, only images are", param="contents")
    url = f"data:{kind};base64,{content.translate(_URL_SAFE)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _parse_call(part: Part) -> tuple[str, str, dict[str, Any]]:
    """(id or "", name, arguments) of a function call."""
    call = get_object(part, "functionCall")
    return _id(call), _name(call, "functionCall"), check_depth(fields.mapping(call, "args"), "args")


def _parse_response(part: Part) -> tuple[str, str, Any]:
    """(id or "", name, content of the tool message) of a function response."""
    response = get_object(part, "functionResponse")
    text = _response_text(check_depth(fields.mapping(response, "response"), "response"))
    media = [_media_part(item) for item in get_objects(response, "parts")]
    content: Any = [{"type": "text", "text": text}, *media] if media else text
    return _id(response), _name(response, "functionResponse"), content


def _response_text(response: Mapping[str, Any]) -> str:
    """What the model reads of a function's response: the text alone if `output` or `result` is all there is, as SDKs wrap it, otherwise
    the object's JSON."""
    if len(response) == 1:
        ((name, value),) = response.items()
        if name in ("output", "result") and isinstance(value, str):
            return value
    return json.dumps(response, ensure_ascii=False)


def _id(holder: Mapping[str, Any]) -> str:
    identifier = fields.text(holder, "id") or ""
    minted = _MINTED_ID.fullmatch(identifier)
    return minted[1] if minted else identifier


def _name(holder: Mapping[str, Any], where: str) -> str:
    name = fields.text(holder, "name")
    if not name:
        raise RequestError(f"contents: a {where} must have a 'name'", param="contents")
    return name


def _unseal_parts(parts: Sequence[Part], seals: Seals) -> tuple[str, str]:
    """(call id, reasoning) that signatures in the parts hold, "" for none. The last one that carries reasoning has all of it."""
    call_id, reasoning = "", ""
    for part in parts:
        signature = part.get("thoughtSignature")
        if not isinstance(signature, str):
            continue
        # Python's SDK writes bytes in the URL-safe alphabet, whatever it read.
        plain = signature.translate(_URL_SAFE).rstrip("=")
        if (opened := seals.open(plain + "=" * (-len(plain) % 4))) is not None:
            call_id, reasoning = opened[0], opened[1] or reasoning
    return call_id, reasoning
