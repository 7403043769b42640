"""Google's schemas, a subset of OpenAPI 3.0, as JSON Schema: what engines and chat templates read."""

from __future__ import annotations

from typing import Any

from proxy.dialects.gemini_json import named, shallow, whole_numbers

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
