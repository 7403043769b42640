"""The HTTP reference: the document that a service serves as /openapi.json, and the same as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from cells import in_a_cell

from cli.rollout_service import KNOWN, rollouts
from proxy.app import create_app
from proxy.settings import Settings

HEAD = """# HTTP

{about}

The same for programs: [openapi.json](openapi.json), which a service has at `/openapi.json` too. A test holds real answers to it. A field
with a question mark may be left out.

| role | credential |
|---|---|
| admin | an admin token as `Authorization: Bearer` |
| trainer | a trainer token, or an admin token |
| node | a node token, or an admin token |
| session | the key of the session, as `Authorization: Bearer`, `x-api-key`, `x-goog-api-key` or `?key=` |
| anyone | none |
"""
WHO = {"AdminToken": "admin", "TrainerToken": "trainer", "NodeToken": "node", "SessionKey": "session"}


@cache
def described() -> dict[str, Any]:
    """The description of a service that is made for it and never started."""
    settings = Settings(engine=[], redis="redis://127.0.0.1:1/0")
    app = create_app(settings, partial(rollouts, KNOWN))
    return app.description()


def document() -> str:
    return json.dumps(described(), indent=1)


def page() -> str:
    made = described()
    parts = [HEAD.format(about=made["info"]["description"])]
    for group in _groups(made):
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n")
        parts += [
            _operation(method, path, operation, made)
            for path, methods in made["paths"].items()
            for method, operation in methods.items()
            if operation["tags"] == [group]
        ]
    return "".join(parts)


def _groups(made: dict[str, Any]) -> list[str]:
    """In the order in which an agent, a trainer and an operator meet them."""
    order = ["sessions", "model calls", "batches", "weights", "tasks", "engines", "health", "archive"]
    found = {operation["tags"][0] for methods in made["paths"].values() for operation in methods.values()}
    assert found == set(order), found
    return order


def _operation(method: str, path: str, operation: dict[str, Any], made: dict[str, Any]) -> str:
    who = next((WHO[key] for need in operation["security"] for key in need), "anyone")
    parts = [f"\n### {operation['summary']}\n\n`{method.upper()} {path}` · {who}\n\n{operation['description']}\n"]
    parts += _parameters(operation)
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts += _fields(content["schema"], made, f"Body ({media})")
        parts += _example(content)
    parts.append("\n| status | |\n|---|---|\n")
    parts += [
        f"| {status} | {in_a_cell(answer['description'])} |\n" for status, answer in sorted(operation["responses"].items())
    ]
    for status, answer in sorted(operation["responses"].items()):
        for content in answer.get("content", {}).values():
            if int(status) < 300:
                parts += _fields(content.get("schema", {}), made, f"Answer {status}")
                parts += _example(content)
    return "".join(parts)


def _parameters(operation: dict[str, Any]) -> Iterator[str]:
    if operation["parameters"]:
        yield "\n| parameter | in | type | |\n|---|---|---|---|\n"
    for each in operation["parameters"]:
        yield f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | {in_a_cell(each.get('description', ''))} |\n"


def _fields(schema: dict[str, Any], made: dict[str, Any], title: str) -> Iterator[str]:
    """A table of the fields of an object, and of those of the objects in it; a question mark: it may be left out."""
    named = _resolved(schema, made)
    if not named.get("properties"):
        return
    yield f"\n| {title} | type | |\n|---|---|---|\n"
    yield from _rows(named, made, "")


def _rows(schema: dict[str, Any], made: dict[str, Any], prefix: str) -> Iterator[str]:
    needed = schema.get("required", ())
    for name, inner in schema["properties"].items():
        yield f"| `{prefix}{name}`{'' if name in needed else '?'} | {_type(inner)} | {_said(inner)} |\n"
        nested, mark = _nested(inner, made)
        if nested.get("properties"):
            yield from _rows(nested, made, f"{prefix}{name}{mark}.")


def _nested(schema: dict[str, Any], made: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The object that a field holds, or a list of it, or a map to it."""
    for each in (schema, *schema.get("anyOf", ())):
        if "$ref" in each:
            return _resolved(each, made), ""
        for inside, mark in (("items", "[]"), ("additionalProperties", "{}")):
            if isinstance(each.get(inside), dict) and "$ref" in each[inside]:
                return _resolved(each[inside], made), mark
    return {}, ""


def _resolved(schema: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = made["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "$ref" in schema:
        return "object"
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return kind + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    names = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}
    found = [f"{sign} {_number(schema[name])}" for name, sign in names.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _number(value: float) -> str:
    """As people write it; what the width of an integer bounds by its power of two."""
    size = int(abs(value))
    if size < 2**31:
        return f"{value:g}" if size < 10**6 else f"{value:,}"
    sign, power = "-" if value < 0 else "", (size - 1).bit_length()
    return f"{sign}2<sup>{power}</sup>" if size == 2**power else f"{sign}2<sup>{power}</sup> - {2**power - size}"


def _said(schema: dict[str, Any]) -> str:
    said = in_a_cell(str(schema.get("description", "")))
    default = schema.get("default")
    return said if default in (None, "", [], {}) else f"{said} Default: `{json.dumps(default)}`.".strip()


def _example(content: dict[str, Any]) -> Iterator[str]:
    if "example" in content:
        yield f"\n```json\n{json.dumps(content['example'], indent=2)}\n```\n"
