"""Judges the tool calls of a reply: against the tools that were offered, and by what the model sampled.

An engine's parser delivers a call that the model never finished as a whole one without arguments, or drops the markup that shows it. So a
call must be what it claims to be, a call of an offered tool with arguments that its schema accepts, and what the model opened it must have
closed. The verdict is a label for trainers (`invalid_tool_call`); it does not change what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.dialects.base import Request
from proxy.dialects.fields import UNPARSED, arguments_object

_MARKUP = (
    *(("<tool_call>", "</tool_call>"), ("<tool_calls>", "</tool_calls>"), ("<function=", "</function>")),
    *(
        ("<function_calls>", "</function_calls>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    *(
        ("<|tool_call|>", ""),
        ("<|tool_call>", "<tool_call|>"),
        ("[TOOL_CALLS]", ""),
        ("<|python_tag|>", ""),
        ("functools[", "]"),
    ),
    *(("<|action_start|>", "<|action_end|>"), ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    *(("<|tool_call_begin|>", "<|tool_call_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")),
    *(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),  # noqa: RUF001
    *(("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),  # noqa: RUF001
)
"""How a tool call begins and ends in the formats that vLLM 0.32 and SGLang parse (vllm/tool_parsers); "" where its arguments end it."""

_DEPTH = 16
"""Levels of a schema that arguments are held against."""


def has_invalid_call(request: Request, message: Mapping[str, Any], finish_reason: str, sampled: str | None = None) -> bool:
    """Whether the model meant to call a tool and its call is not one, or not whole: the engine's parser left it in the text; its tool was
    not offered; its arguments are no JSON object, or lack a required property, or have one of another type than their schema's; or
    the `sampled` text (None: not known) opens a call that it does not close. A truncated reply has none."""
    if not request.offers_calls or finish_reason not in ("stop", "tool_calls"):
        return False
    calls = message.get("tool_calls") or ()
    if not all(_is_accepted(request.schemas, call["function"]) for call in calls):
        return True
    content = message.get("content")
    if isinstance(content, str) and any(opener in content for opener, _ in _MARKUP):
        return True
    return sampled is not None and _is_unfinished(sampled, len(calls))


def _is_accepted(schemas: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    if function.get("name") not in schemas:
        return False
    given = arguments_object(function["arguments"])
    return UNPARSED not in given and accepts(schemas[function["name"]], given)


def _is_unfinished(sampled: str, calls: int) -> bool:
    """Whether the text opens more calls than it closes, or opens some of which the parser made none."""
    for opener, closer in _MARKUP:
        opened = sampled.count(opener)
        if opened and (not calls or (closer and opened > sampled.count(closer))):
            return True
    return False


def accepts(schema: Any, value: Any, depth: int = _DEPTH) -> bool:
    """Whether a JSON schema accepts the value as to required properties and types. What else it asks for, and what is no schema, is not
    looked at."""
    if not isinstance(schema, Mapping) or not depth:
        return True
    types = schema.get("type")
    wanted: Sequence[Any] = types if isinstance(types, list) else [types]
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
