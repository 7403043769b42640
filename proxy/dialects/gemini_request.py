"""Google's `contents` as chat messages.

What the model said in a row is one assistant message: clients keep a streamed reply as one content per chunk. Function responses
become tool messages, before the text that came with them. Ids of calls and responses are optional; a response without one answers
the first open call of its name, so the model's turn and the responses to it are read together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import Heard, Read, tool_call_id, unseal
from proxy.dialects.fields import arguments_text, decode, function_tool, made_up_id, tool_call
from proxy.errors import RequestError

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


# One part of a Google content, read: what kind it is, and what chat messages call it.


Part = dict[str, Any]

_KINDS = frozenset(
    {"text", "functionCall", "functionResponse", "inlineData", "fileData", "executableCode", "codeExecutionResult"}
)

_BESIDE = frozenset({"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"})
"""Fields of a part that say something about what it holds."""

_URL_SAFE = str.maketrans("-_", "+/")

_MINTED_ID = re.compile(r"(?:.*__)?(call_[0-9a-f]{24}_[0-9]+)", re.DOTALL)
"""A function-call id of this service; some clients put the function's name before ids."""


def parts_of(content: Mapping[str, Any]) -> list[Part]:
    """The content's parts with their field names in camel case. Raises RequestError for a part of an unknown kind."""
    parts = many(content, "parts")
    for part in parts:
        kinds = part.keys() - _BESIDE
        if len(kinds) > 1 or not kinds <= _KINDS:
            raise RequestError(f"contents: a part holds one of {', '.join(sorted(_KINDS))}", param="contents")
    return parts


def text_of(part: Part) -> str | None:
    """The text of a part that is one, code and its output included; None for any other."""
    if "text" in part:
        return fields.text(part, "text")
    if "executableCode" in part:
        code = one(part, "executableCode")
        return f"```{(fields.text(code, 'language') or '').lower()}\n{fields.text(code, 'code') or ''}\n```\n"
    if "codeExecutionResult" in part:
        return f"```\n{fields.text(one(part, 'codeExecutionResult'), 'output') or ''}\n```\n"
    return None


def media_part(part: Part) -> dict[str, Any]:
    """An image as a chat content part. Raises RequestError for other media, and for files that Google would hold."""
    if "fileData" in part:
        raise RequestError("contents: fileData names a file that is not here; send it as inlineData", param="contents")
    data = one(part, "inlineData")
    kind, content = fields.text(data, "mimeType") or "", fields.text(data, "data") or ""
    if not kind.startswith("image/"):
        raise RequestError(f"contents: inlineData of type '{kind}' is not taken, only images are", param="contents")
    url = f"data:{kind};base64,{content.translate(_URL_SAFE)}"
    return {"type": "image_url", "image_url": {"url": url}}


def called(part: Part) -> tuple[str, str, dict[str, Any]]:
    """(id, name, arguments) of a function call; the id is "" where there is none."""
    call = one(part, "functionCall")
    return _id(call), _name(call, "functionCall"), shallow(fields.mapping(call, "args"), "args")


def answered(part: Part) -> tuple[str, str, Any]:
    """(id, name, content of a tool message) of a function response; the id is "" where there is none."""
    response = one(part, "functionResponse")
    text = response_text(shallow(fields.mapping(response, "response"), "response"))
    media = [media_part(item) for item in many(response, "parts")]
    content: Any = [{"type": "text", "text": text}, *media] if media else text
    return _id(response), _name(response, "functionResponse"), content


def response_text(response: Mapping[str, Any]) -> str:
    """What the model reads of a function's response: the text alone where `output` or `result` holds nothing else, as SDKs wrap
    it, otherwise the JSON of the object."""
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


def sealed(part: Part) -> tuple[str, str] | None:
    """(call id, reasoning) of a signature that this service minted into the part; see proxy.minting.unseal."""
    signature = part.get("thoughtSignature")
    if not isinstance(signature, str):
        return None
    # Python's SDK writes bytes in the URL's alphabet, whatever it read.
    plain = signature.translate(_URL_SAFE).rstrip("=")
    return unseal(plain + "=" * (-len(plain) % 4))


# `generationConfig`: how Google's callers say what to sample, in the words engines know.


_SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
}
_INTEGERS = ("topK", "seed", "maxOutputTokens", "candidateCount", "logprobs")
_EFFORTS = frozenset({"MINIMAL", "LOW", "MEDIUM", "HIGH", "XHIGH"})
_MOST_LOGPROBS = 20


@dataclass(slots=True)
class Generation:
    """What a generationConfig asks for. `forward`: fields of a chat body; `thoughts`: whether thought parts are wanted."""

    sampling: dict[str, Any]
    n: int
    top_logprobs: int | None
    forward: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thoughts: bool = False


def generation_of(body: Mapping[str, Any]) -> Generation:
    """Raises RequestError naming the field and the rule it broke."""
    config = whole_numbers(one(body, "generationConfig"), *_INTEGERS)
    _text_only(config)
    made = Generation(fields.sampling(config, _SAMPLING), fields.choices(config, "candidateCount"), _top_logprobs(config))
    for key, name in (("presencePenalty", "presence_penalty"), ("frequencyPenalty", "frequency_penalty")):
        if (penalty := fields.number(config, key)) is not None:
            made.forward[name] = penalty
    made.forward |= _shape(config)
    _think(made, whole_numbers(one(config, "thinkingConfig"), "thinkingBudget"))
    return made


def _text_only(config: Mapping[str, Any]) -> None:
    for modality in fields.strings(config, "responseModalities"):
        if modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise RequestError(f"responseModalities: only TEXT can be sampled, not '{modality}'", param="responseModalities")


def _top_logprobs(config: Mapping[str, Any]) -> int | None:
    count = fields.integer(config, "logprobs") or 0
    if not 0 <= count <= _MOST_LOGPROBS:
        raise RequestError(f"'logprobs' must be an integer from 0 to {_MOST_LOGPROBS}", param="logprobs")
    return count if fields.flag(config, "responseLogprobs") else None


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Structured output. A bare enum value is no JSON, so it is asked for as vLLM's choice rather than as a schema."""
    kind = fields.text(config, "responseMimeType") or "text/plain"
    schema = _schema(config)
    if kind == "text/x.enum":
        return {"structured_outputs": {"choice": _values(schema)}}
    if kind == "application/json":
        if schema is None:
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}
    if kind != "text/plain":
        raise RequestError(
            f"responseMimeType must be text/plain, application/json or text/x.enum, not '{kind}'", param="responseMimeType"
        )
    if schema is not None:
        raise RequestError("a response schema needs responseMimeType application/json or text/x.enum", param="responseMimeType")
    return {}


def _schema(config: Mapping[str, Any]) -> dict[str, Any] | None:
    if "responseJsonSchema" in config:
        return dict(shallow(fields.mapping(config, "responseJsonSchema"), "responseJsonSchema"))
    return json_schema(config["responseSchema"], "responseSchema") if "responseSchema" in config else None


def _values(schema: Mapping[str, Any] | None) -> list[str]:
    values = fields.strings(schema, "enum") if schema is not None else []
    if not values:
        raise RequestError("responseMimeType text/x.enum needs a responseSchema with 'enum'", param="responseSchema")
    return values


def _think(made: Generation, config: Mapping[str, Any]) -> None:
    made.thoughts = fields.flag(config, "includeThoughts")
    if fields.integer(config, "thinkingBudget") == 0:
        made.template_kwargs["enable_thinking"] = False
    level = (fields.text(config, "thinkingLevel") or "THINKING_LEVEL_UNSPECIFIED").upper()
    if level in _EFFORTS:
        made.forward["reasoning_effort"] = level.lower()
    elif level != "THINKING_LEVEL_UNSPECIFIED":
        raise RequestError(f"thinkingLevel must be one of {', '.join(sorted(_EFFORTS))}, not '{level}'", param="thinkingLevel")


# Google's tools as chat tools: function declarations, and which of them may or must be called.
#
# Tools that Google runs itself (search, code execution, ...) are left out: no engine can serve them.


_SERVED_BY_GOOGLE = frozenset(
    {"googleSearch", "googleSearchRetrieval", "enterpriseWebSearch", "urlContext", "codeExecution", "googleMaps"}
    | {"computerUse", "fileSearch", "retrieval", "mcpServers"}
)

_AUTO_MODES = frozenset({"AUTO", "VALIDATED", "MODE_UNSPECIFIED"})


def offered_tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(chat tools, the kinds of tools that were left out)."""
    offered, left_out = [], []
    for tool in many(body, "tools"):
        for kind in tool:
            if kind == "functionDeclarations":
                offered += [_function(declared) for declared in many(tool, kind)]
            else:
                # The kind becomes a metric's label: a caller must not be able to make up ever more of them.
                left_out.append(kind if kind in _SERVED_BY_GOOGLE else "other")
    return offered, left_out


def _function(declared: Mapping[str, Any]) -> dict[str, Any]:
    name = fields.text(declared, "name")
    if not name:
        raise RequestError("a function declaration must have a 'name'", param="functionDeclarations")
    if "parametersJsonSchema" in declared:
        parameters = shallow(fields.mapping(declared, "parametersJsonSchema"), "parametersJsonSchema")
    else:
        parameters = json_schema(declared.get("parameters", {}), "parameters")
    return function_tool(name, fields.text(declared, "description"), parameters)


def tool_choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Any:
    """The chat request's `tool_choice`, None where it is the default. Several allowed names under ANY become "required": engines
    can force one function or any of all."""
    config = one(one(body, "toolConfig"), "functionCallingConfig")
    mode = (fields.text(config, "mode") or "AUTO").upper()
    if mode not in _AUTO_MODES and mode not in ("ANY", "NONE"):
        raise RequestError(f"functionCallingConfig.mode must be AUTO, ANY, VALIDATED or NONE, not '{mode}'", param="mode")
    allowed = fields.strings(config, "allowedFunctionNames")
    known = {tool["function"]["name"] for tool in tools}
    if unknown := [name for name in allowed if name not in known]:
        raise RequestError(f"allowedFunctionNames names '{unknown[0]}', which is not declared", param="allowedFunctionNames")
    if mode == "ANY" and not tools:
        raise RequestError("functionCallingConfig.mode ANY needs function declarations", param="mode")
    if mode == "NONE":
        return "none" if tools else None
    if mode != "ANY":
        return None
    return {"type": "function", "function": {"name": allowed[0]}} if len(allowed) == 1 else "required"


# Google's schemas, a subset of OpenAPI 3.0, as JSON Schema: what engines and chat templates read.


_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_OPENAPI_FORMATS = frozenset({"int32", "int64", "float", "double", "enum"})
"""Formats that JSON Schema does not know; what they say is in the type already."""


def json_schema(schema: Any, where: str) -> dict[str, Any]:
    """The schema as JSON Schema: types in lower case, `nullable` as a type, counts as integers, properties in the order asked
    for. Keywords the two share are kept. Raises RequestError naming `where`."""
    return _translated(named(shallow(schema, where), where), where)


def _translated(schema: dict[str, Any], where: str) -> dict[str, Any]:
    made = {key: _value(key, value, where) for key, value in whole_numbers(schema, *_COUNTS).items()}
    if made.get("format") in _OPENAPI_FORMATS:
        del made["format"]
    if made.get("type") == "type_unspecified":
        del made["type"]
    order = made.pop("propertyOrdering", None)
    if isinstance(order, list) and isinstance(made.get("properties"), dict):
        made["properties"] = _ordered(made["properties"], order)
    return _nullable(made) if made.pop("nullable", False) is True else made


def _value(key: str, value: Any, where: str) -> Any:
    if key == "type":
        return _type(value)
    if key in ("properties", "defs", "$defs") and isinstance(value, dict):
        return {name: _inner(item, where) for name, item in value.items()}
    if key in ("items", "additionalProperties", "not"):
        return _inner(value, where)
    if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
        return [_inner(item, where) for item in value]
    return value


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return [_type(item) for item in value]
    return value.lower() if isinstance(value, str) else value


def _inner(value: Any, where: str) -> Any:
    # `additionalProperties` may be true or false.
    return _translated(named(value, where), where) if isinstance(value, dict) else value


def _ordered(properties: dict[str, Any], order: list[Any]) -> dict[str, Any]:
    first = [name for name in order if isinstance(name, str) and name in properties]
    return {name: properties[name] for name in dict.fromkeys([*first, *properties])}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


# Google's JSON: fields in two spellings, a lone object for a list of one, whole numbers in three.
#
# The API is protobuf's JSON mapping: `systemInstruction` and `system_instruction` are one field, null is absent, an integer may come
# as `5`, `5.0` or `"5"`. Names that the caller made up (arguments, a schema's properties) are never touched.


_DEEPEST = 64
"""Levels of nesting; what is deeper would end in this process's recursion limit."""


def camel(name: str) -> str:
    head, *rest = name.lstrip("_").split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest)


def named(value: Any, where: str) -> dict[str, Any]:
    """The object with its field names in camel case, null fields left out. Raises RequestError when it is no object."""
    if not isinstance(value, dict):
        raise RequestError(f"'{where}' must be an object", param=where)
    return {camel(name): item for name, item in value.items() if item is not None}


def one(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`; empty when there is none."""
    return named(body[key], key) if key in body else {}


def many(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects under `key`, none when it is absent; a lone object counts as a list of it."""
    value = body.get(key, [])
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise RequestError(f"'{key}' must be a list of objects", param=key)
    return [named(item, key) for item in items]


def whole_numbers(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`body` with the integers under `keys` as integers, however they are spelt; anything else stays for a check to refuse."""
    return {name: _whole(value) if name in keys else value for name, value in body.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) < 20:
        return int(value)
    return value


def shallow(value: Any, where: str) -> Any:
    """`value` itself. Raises RequestError when it is nested more deeply than the service follows."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for holder in level
            if isinstance(holder, (dict, list))
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return value
    raise RequestError(f"'{where}' is nested more than {_DEEPEST} levels deep", param=where)
