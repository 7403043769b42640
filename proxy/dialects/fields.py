"""Reading a request body: checked fields, JSON decoded only as far as it is new, and tool arguments.

Each checking function returns the field's value or raises RequestError with the field's name and the rule it broke.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import msgpack
import msgspec
import numpy as np

from proxy.errors import RequestError

_GRAMMARS = ("response_format", "structured_outputs")
"""Fields whose schemas may hold any number: what no record can hold of them is recorded by its digest."""

MAX_CHOICES = 128


def text(body: Mapping[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _wrong(key, "a string")


def model(body: Mapping[str, Any]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise RequestError("'model' must be a non-empty string", param="model")
    return name


def number(body: Mapping[str, Any], key: str) -> float | None:
    value = body.get(key)
    if value is None or isinstance(value, float):
        return value
    if not is_integer(value):
        raise _wrong(key, "a number")
    return _check_range(value, key)


def integer(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not is_integer(value):
        raise _wrong(key, "an integer")
    return _check_range(value, key)


def positive(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not is_integer(value) or value < 1:
        raise _wrong(key, "a positive integer")
    return _check_range(value, key)


def flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _wrong(key, "true or false")


def mapping(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if value is None or isinstance(value, dict):
        return value or {}
    raise _wrong(key, "an object")


def objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = body.get(key)
    if value is None or _is_list_of(dict, value):
        return value or []
    raise _wrong(key, "a list of objects")


def strings(body: Mapping[str, Any], key: str) -> list[str]:
    """A lone string counts as a list of one."""
    value = body.get(key)
    if isinstance(value, str):
        return [value]
    if value is None or _is_list_of(str, value):
        return value or []
    raise _wrong(key, "a string or a list of strings")


def choices(body: Mapping[str, Any], key: str) -> int:
    """The number of choices; 1 if the field is absent."""
    count = positive(body, key) or 1
    if count > MAX_CHOICES:
        raise RequestError(f"'{key}' must be at most {MAX_CHOICES}", param=key)
    return count


def sampling(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling fields that a session may override, by canonical name; `names`: the dialect's name -> the canonical one. temperature
    and top_p are numbers, top_k, seed and max_tokens integers, stop is a list of strings."""
    found: dict[str, Any] = {}
    for key, name in names.items():
        if body.get(key) is None:
            continue
        if name == "stop":
            value: Any = strings(body, key) or None
        elif name == "max_tokens":
            value = positive(body, key)
        else:
            value = number(body, key) if name in ("temperature", "top_p") else integer(body, key)
        if value is not None:
            found[name] = value
    return found


ENGINE_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Reasoning efforts that vendors have and engines do not know, with the nearest one they do: low, medium or high."""


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body's `chat_template_kwargs`. Raises as `refuse_continuation` does."""
    refuse_continuation(body)
    return mapping(body, "chat_template_kwargs")


_NEW_TURN = {"continue_final_message": False, "add_generation_prompt": True}
"""Fields of vLLM's chat API that say how a reply begins, with their values for a separate turn."""


def refuse_continuation(body: Mapping[str, Any]) -> None:
    """Raise RequestError if the last message is to be continued instead of answered: here a reply is always a new turn."""
    kwargs = mapping(body, "chat_template_kwargs")
    for name, usual in _NEW_TURN.items():
        for holder, where in ((body, name), (kwargs, f"chat_template_kwargs.{name}")):
            if holder.get(name) not in (None, usual):
                raise RequestError(
                    f"'{where}' can only be {str(usual).lower()}: a reply is a turn of its own; to have a text continued, send it as "
                    "the 'prompt' of /v1/completions",
                    param=where,
                )


_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_PREFILLS = ("prefix", "partial")
"""Fields of vendors by which a message of the assistant at the end of a history is continued instead of answered."""


def check_role(message: Mapping[str, Any], param: str = "messages") -> str:
    """The message's role: a word, since templates have roles of their own. Raises RequestError."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("a message's 'role' must be a string", param=param)
    if not _ROLE.fullmatch(role):
        raise RequestError(f"a message's 'role' must be a word of letters and digits, not {role[:40]!a}", param=param)
    return role


def refuse_prefill(message: Mapping[str, Any], param: str = "messages") -> None:
    """Raise RequestError if a history's last message is to be continued, as `refuse_continuation` does for the body's fields."""
    for name in _PREFILLS:
        if message.get("role") == "assistant" and message.get(name):
            raise RequestError(
                f"the last message has '{name}', which is not supported: a reply is a turn of its own; to have a text continued, send it "
                "as the 'prompt' of /v1/completions",
                param=param,
            )


def check_recordable(forward: Mapping[str, Any]) -> None:
    """Raise RequestError if a field that may be recorded does not fit a record, such as an integer of more than 64 bits. Once the reply
    is sampled it is too late."""
    for key in forward.keys() - _GRAMMARS:
        try:
            msgpack.packb(forward[key])
        except (OverflowError, ValueError) as error:
            raise RequestError(f"'{key}' cannot be recorded: {error}", param=key) from error


def check_tools(tools: Sized) -> None:
    """Raise RequestError for more tools than one request may offer."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"'tools' holds {len(tools)} tools, of at most {MAX_TOOLS}", param="tools")


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _wrong(key: str, rule: str) -> RequestError:
    return RequestError(f"'{key}' must be {rule}", param=key)


def _check_range(value: int, key: str) -> int:
    if -(2**63) <= value < 2**63:
        return value
    raise RequestError(f"'{key}' must be an integer of at most 64 bits", param=key)


# JSON. A body with a history is taken apart by `proxy.dialects.splitting`.

encode = msgspec.json.Encoder().encode

TEXT = f"text {secrets.token_hex(16)}"
"""Stands for the text in an event of which a template is made; nobody else can know it."""


def split_event(event: bytes) -> list[bytes]:
    """A template: the event is that with TEXT, and `encode(text).join(template)` that with `text` in its place."""
    return event.split(encode(TEXT))


def decode(raw: bytes) -> Any:
    """One JSON value, lone surrogates replaced. Raises RequestError for invalid JSON and for deep nesting."""
    check_depth(raw)
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return msgspec.json.decode(replace_surrogates(raw, error))


def replace_surrogates(raw: bytes, error: Exception) -> bytes:
    """The same JSON with replacement characters for lone surrogates; raises RequestError from `error` if they are not the problem."""
    try:
        text = json.dumps(json.loads(raw), ensure_ascii=False, allow_nan=False)
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        msgspec.json.decode(clean)
        return clean
    except (ValueError, RecursionError, msgspec.DecodeError):
        raise RequestError(f"the body is not valid JSON: {error}") from error


# Tools and their arguments. Chat arguments are text that the model wrote, other vendors' are objects. Text that is no JSON object travels
# in a wrapper, the one Claude Code puts around a call it cannot read, and is read back unchanged: a replay still names its exact call.

UNPARSED = "__unparsedToolInput"


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A chat function tool; without `parameters` it takes none."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = dict(parameters) if parameters else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def placeholder_id(position: int) -> str:
    """The id of a call that came without one, by its position in its turn: nine letters and digits, as Mistral's templates require."""
    return f"call{position:05d}"


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments as the object that other vendors' clients expect."""
    if not arguments.strip():
        return {}
    try:
        value = decode(arguments.encode("utf-8", "replace"))
    except RequestError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def arguments_text(value: Any) -> str:
    """The text that `arguments_object` was given; for an object that a client wrote, its JSON."""
    if isinstance(value, dict) and value.keys() == {UNPARSED}:
        inner = value[UNPARSED]
        # Claude Code 2.1 writes {"raw": text, "len": number} if it read such a text itself.
        raw = inner.get("raw") if isinstance(inner, dict) else inner
        if isinstance(raw, str):
            return raw
    return json.dumps(value if value is not None else {}, ensure_ascii=False)


_SCHEMA_DEPTH = 16
"""Levels of a schema that arguments are held against."""


def accepts(schema: Any, value: Any, depth: int = _SCHEMA_DEPTH) -> bool:
    """Whether a JSON schema accepts the value as to required properties and types. What else it asks for, and what is no schema, is not
    looked at."""
    if not isinstance(schema, Mapping) or not depth:
        return True
    types = schema.get("type")
    wanted: list[Any] = types if isinstance(types, list) else [types]
    nothing = value is None and schema.get("nullable") is True
    if types is not None and not nothing and not any(_is_of(kind, value) for kind in wanted):
        return False
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        if isinstance(choices, list) and choices and not any(accepts(each, value, depth - 1) for each in choices):
            return False
    if isinstance(value, dict):
        return _accepts_object(schema, value, depth)
    if isinstance(value, list):
        return all(accepts(schema.get("items"), each, depth - 1) for each in value)
    return True


def _accepts_object(schema: Mapping[str, Any], value: dict[str, Any], depth: int) -> bool:
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and any(isinstance(name, str) and name not in value for name in required):
        return False
    if not isinstance(properties, Mapping):
        return True
    return all(accepts(properties[name], each, depth - 1) for name, each in value.items() if name in properties)


def _is_of(kind: Any, value: Any) -> bool:
    """Whether the value is of a schema's type; of an unknown type every value is. Gemini writes types in capitals."""
    kind = kind.lower() if isinstance(kind, str) else kind
    if kind in ("number", "integer"):
        whole = kind == "number" or isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return isinstance(value, (int, float)) and not isinstance(value, bool) and whole
    known: Mapping[Any, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
    }
    return kind not in known or isinstance(value, known[kind])


# Bounds on the structure of a JSON text, checked before it is decoded: nesting and number of values.
#
# What a body costs follows from its values, not from its bytes: 56 MB of empty objects take a hundred times the memory and time of one
# text as long. A text is scanned a piece at a time, so that threads that share the interpreter wait for one piece at most. What stands
# inside strings is distinguished only if the first scan fails, since that costs more than decoding.

MAX_DEPTH = 100
"""Levels of nesting in a JSON value. Templates, engines and this process recurse into it."""

MAX_VALUES = 250_000
"""Values in a request: messages, their parts, and the members of both."""

MAX_FIELD_VALUES = 50_000
"""Values in one field beside the history, such as the tools: they are compared with every call."""

MAX_TOOLS = 2_048

PIECE_BYTES = 2**19

_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_QUOTE, _BACKSLASH = ord('"'), b"\\"
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_NOT_VALUES = bytes(byte for byte in range(256) if byte not in b"[{,:")


def check_depth(raw: bytes) -> None:
    """Raise RequestError if the JSON text is nested more than `MAX_DEPTH` levels deep. Depth hidden behind text that is no JSON hits the
    recursion limit, which is answered the same way."""
    brackets = raw.translate(None, _NOT_BRACKETS) if len(raw) <= PIECE_BYTES else raw
    if len(brackets) > MAX_DEPTH and _depth(_pieces(brackets)) > MAX_DEPTH and _depth(_outside_strings(raw)) > MAX_DEPTH:
        raise RequestError(f"the body is nested too deeply: more than {MAX_DEPTH} levels")


def check_values(raw: bytes, most: int, what: str, param: str | None = None) -> None:
    """Raise RequestError if the JSON text, called `what`, holds more than `most` values, names of members included."""
    # A value takes at least two bytes: its own and a comma.
    if len(raw) > 2 * most and _has_more(_pieces(raw), most) and _has_more(_outside_strings(raw), most):
        raise RequestError(f"{what} holds more than {most} values", param=param)


def count_values(raw: bytes) -> int:
    """How many values the JSON text holds at most: what stands inside strings is counted, too."""
    return sum(len(piece.translate(None, _NOT_VALUES)) for piece in _pieces(raw))


def _depth(pieces: Iterator[bytes]) -> int:
    level = deepest = 0
    for piece in pieces:
        # To drop the other bytes first takes a fifth of the time.
        brackets = np.frombuffer(piece.translate(None, _NOT_BRACKETS), np.uint8)
        steps = np.cumsum(_STEPS[brackets], dtype=np.int32)
        if len(steps):
            deepest = max(deepest, level + int(steps.max()))
            level += int(steps[-1])
        if deepest > MAX_DEPTH:
            break
    return deepest


def _has_more(pieces: Iterator[bytes], most: int) -> bool:
    values = 0
    for piece in pieces:
        values += len(piece.translate(None, _NOT_VALUES))
        if values > most:
            return True
    return False


def _pieces(raw: bytes) -> Iterator[bytes]:
    for start in range(0, len(raw), PIECE_BYTES):
        yield raw[start : start + PIECE_BYTES]


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """The bytes of the text that are not part of a string."""
    inside, start = False, 0
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        start += len(piece)
        # A backslash and what it escapes must stay in one piece.
        if (len(piece) - len(piece.rstrip(_BACKSLASH))) % 2:
            piece += raw[start : start + 1]
            start += 1
        found = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        strings = np.logical_xor.accumulate(found == _QUOTE) ^ inside
        if len(strings):
            inside = bool(strings[-1])
        yield found[~strings].tobytes()
