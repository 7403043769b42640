"""Google's JSON: fields in two spellings, a lone object for a list of one, whole numbers in three.

The API is protobuf's JSON mapping: `systemInstruction` and `system_instruction` are one field, null is absent, an integer may come
as `5`, `5.0` or `"5"`. Names that the caller made up (arguments, a schema's properties) are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.errors import RequestError

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
