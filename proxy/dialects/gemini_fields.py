"""The fields of a Google request beside its contents, as the chat API has them: generation config, tools and their schemas.

Also how Google spells JSON. The API is protobuf's JSON mapping: `systemInstruction` and `system_instruction` are one field, null is
absent, a lone object counts as a list of one, an integer may come as `5`, `5.0` or `"5"`. Names that the caller generation up (arguments, a
schema's properties) are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects import fields
from proxy.dialects.fields import function_tool
from proxy.errors import RequestError

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
_MAX_LOGPROBS = 20


@dataclass(slots=True)
class GenerationConfig:
    """A parsed generationConfig. `forward`: fields of a chat body; `thoughts`: whether thought parts are wanted."""

    sampling: dict[str, Any]
    n: int
    top_logprobs: int | None
    forward: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thoughts: bool = False


def parse_generation(body: Mapping[str, Any]) -> GenerationConfig:
    """Raises RequestError naming the field and the rule it broke."""
    config = convert_integers(get_object(body, "generationConfig"), *_INTEGERS)
    for modality in fields.strings(config, "responseModalities"):
        if modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise RequestError(f"responseModalities: only TEXT can be sampled, not '{modality}'", param="responseModalities")
    generation = GenerationConfig(
        fields.sampling(config, _SAMPLING), fields.choices(config, "candidateCount"), _top_logprobs(config)
    )
    for key, name in (("presencePenalty", "presence_penalty"), ("frequencyPenalty", "frequency_penalty")):
        if (penalty := fields.number(config, key)) is not None:
            generation.forward[name] = penalty
    generation.forward |= _response_format(config)
    _add_thinking(generation, convert_integers(get_object(config, "thinkingConfig"), "thinkingBudget"))
    return generation


def _top_logprobs(config: Mapping[str, Any]) -> int | None:
    count = fields.integer(config, "logprobs") or 0
    if not 0 <= count <= _MAX_LOGPROBS:
        raise RequestError(f"'logprobs' must be an integer from 0 to {_MAX_LOGPROBS}", param="logprobs")
    return count if fields.flag(config, "responseLogprobs") else None


def _response_format(config: Mapping[str, Any]) -> dict[str, Any]:
    """Structured output. A bare enum value is not JSON, so it is requested as vLLM's choice rather than as a schema."""
    kind = fields.text(config, "responseMimeType") or "text/plain"
    schema = _response_schema(config)
    if kind == "text/x.enum":
        values = fields.strings(schema, "enum") if schema is not None else []
        if not values:
            raise RequestError("responseMimeType text/x.enum needs a responseSchema with 'enum'", param="responseSchema")
        return {"structured_outputs": {"choice": values}}
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


def _response_schema(config: Mapping[str, Any]) -> dict[str, Any] | None:
    if "responseJsonSchema" in config:
        return dict(check_depth(fields.mapping(config, "responseJsonSchema"), "responseJsonSchema"))
    return json_schema(config["responseSchema"], "responseSchema") if "responseSchema" in config else None


def _add_thinking(generation: GenerationConfig, config: Mapping[str, Any]) -> None:
    generation.thoughts = fields.flag(config, "includeThoughts")
    if fields.integer(config, "thinkingBudget") == 0:
        generation.template_kwargs["enable_thinking"] = False
    level = (fields.text(config, "thinkingLevel") or "THINKING_LEVEL_UNSPECIFIED").upper()
    if level in _EFFORTS:
        effort = level.lower()
        generation.forward["reasoning_effort"] = fields.ENGINE_EFFORTS.get(effort, effort)
    elif level != "THINKING_LEVEL_UNSPECIFIED":
        raise RequestError(f"thinkingLevel must be one of {', '.join(sorted(_EFFORTS))}, not '{level}'", param="thinkingLevel")


# Tools. Those that Google runs itself (search, code execution, ...) are dropped: no engine can serve them.

_GOOGLE_TOOLS = frozenset(
    {"googleSearch", "googleSearchRetrieval", "enterpriseWebSearch", "urlContext", "codeExecution", "googleMaps"}
    | {"computerUse", "fileSearch", "retrieval", "mcpServers"}
)

_AUTO_MODES = frozenset({"AUTO", "VALIDATED", "MODE_UNSPECIFIED"})


def parse_tools(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """(chat tools, kinds of the dropped tools) of the field `tools`."""
    tools, dropped = [], []
    for tool in get_objects({"tools": given} if given is not None else {}, "tools"):
        for kind in tool:
            if kind == "functionDeclarations":
                tools += [_function(declared) for declared in get_objects(tool, kind)]
            else:
                # The kind labels a metric: a caller must not be able to add labels without end.
                dropped.append(kind if kind in _GOOGLE_TOOLS else "other")
    return tools, dropped


def _function(declared: Mapping[str, Any]) -> dict[str, Any]:
    name = fields.text(declared, "name")
    if not name:
        raise RequestError("a function declaration must have a 'name'", param="functionDeclarations")
    if "parametersJsonSchema" in declared:
        parameters = check_depth(fields.mapping(declared, "parametersJsonSchema"), "parametersJsonSchema")
    else:
        parameters = json_schema(declared.get("parameters", {}), "parameters")
    return function_tool(name, fields.text(declared, "description"), parameters)


def parse_tool_choice(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Any:
    """The chat request's `tool_choice`, None for the default. Several allowed names under ANY become "required": engines can force one
    function or any of all."""
    config = get_object(get_object(body, "toolConfig"), "functionCallingConfig")
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


# Google's schemas, a subset of OpenAPI 3.0, as the JSON Schema that engines and chat templates read.

_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_OPENAPI_FORMATS = ("int32", "int64", "float", "double", "enum")
"""Unknown to JSON Schema and redundant: the type already says it."""


def json_schema(schema: Any, where: str) -> dict[str, Any]:
    """The schema as JSON Schema: types in lower case, `nullable` as a type, counts as integers, properties in the requested order. Shared
    keywords are kept. Raises RequestError naming `where`."""
    return _convert_schema(normalize(check_depth(schema, where), where), where)


def _convert_schema(schema: dict[str, Any], where: str) -> dict[str, Any]:
    converted = {key: _convert_value(key, value, where) for key, value in convert_integers(schema, *_COUNTS).items()}
    if converted.get("format") in _OPENAPI_FORMATS:
        del converted["format"]
    if converted.get("type") == "type_unspecified":
        del converted["type"]
    order, properties = converted.pop("propertyOrdering", None), converted.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = [name for name in order if isinstance(name, str) and name in properties]
        converted["properties"] = {name: properties[name] for name in dict.fromkeys([*first, *properties])}
    return _as_nullable(converted) if converted.pop("nullable", False) is True else converted


def _convert_value(key: str, value: Any, where: str) -> Any:
    if key == "type":
        return _lower(value)
    if key in ("properties", "defs", "$defs") and isinstance(value, dict):
        return {name: _convert_nested(item, where) for name, item in value.items()}
    if key in ("items", "additionalProperties", "not"):
        return _convert_nested(value, where)
    if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
        return [_convert_nested(item, where) for item in value]
    return value


def _lower(value: Any) -> Any:
    if isinstance(value, list):
        return [_lower(item) for item in value]
    return value.lower() if isinstance(value, str) else value


def _convert_nested(value: Any, where: str) -> Any:
    # `additionalProperties` may be a boolean.
    return _convert_schema(normalize(value, where), where) if isinstance(value, dict) else value


def _as_nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


# Google's spelling of JSON.

_MAX_DEPTH = 64
"""Levels of nesting; deeper values would hit the recursion limit."""


def normalize(value: Any, where: str) -> dict[str, Any]:
    """The object with camel-case field names and without nulls. Raises RequestError if it is no object."""
    if not isinstance(value, dict):
        raise RequestError(f"'{where}' must be an object", param=where)
    return {_camel(name): item for name, item in value.items() if item is not None}


def _camel(name: str) -> str:
    head, *rest = name.lstrip("_").split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest)


def get_object(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The normalized object under `key`; empty if absent."""
    return normalize(body[key], key) if key in body else {}


def get_objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The normalized objects under `key`, none if absent; a lone object counts as a list of one."""
    value = body.get(key, [])
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise RequestError(f"'{key}' must be a list of objects", param=key)
    return [normalize(item, key) for item in items]


def convert_integers(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`body` with the integers under `keys` as int, however they are spelt; anything else stays for a check to refuse."""
    return {name: _integer(value) if name in keys else value for name, value in body.items()}


def _integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) < 20:
        return int(value)
    return value


def check_depth(value: Any, where: str) -> Any:
    """`value` itself. Raises RequestError if it is nested too deeply to recurse into."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for holder in level
            if isinstance(holder, (dict, list))
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return value
    raise RequestError(f"'{where}' is nested more than {_MAX_DEPTH} levels deep", param=where)
