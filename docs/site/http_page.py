"""The HTTP reference: the OpenAPI document that a service serves at /openapi.json, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from cells import escape_cell

from cli.rollout_service import KNOWN, add_rollouts
from proxy.app import create_app
from proxy.settings import Settings

HEAD = """# HTTP

{about}

For programs: [openapi.json](openapi.json), which a service also serves at `/openapi.json`. A test checks real responses against it. A field
with a question mark is optional.

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
def describe_service() -> dict[str, Any]:
    """The OpenAPI document of a service that is created for it and never started."""
    settings = Settings(engine=[], redis="redis://127.0.0.1:1/0")
    app = create_app(settings, partial(add_rollouts, KNOWN))
    return app.description()


def render_json() -> str:
    return json.dumps(describe_service(), indent=1)


def render() -> str:
    document = describe_service()
    parts = [HEAD.format(about=document["info"]["description"])]
    for group in _list_groups(document):
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n")
        parts += [
            _render_operation(method, path, operation, document)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if operation["tags"] == [group]
        ]
    return "".join(parts)


def _list_groups(document: dict[str, Any]) -> list[str]:
    """The groups of operations, in the order in which an agent, a trainer and an operator need them."""
    order = [
        "sessions",
        "model calls",
        "batches",
        "weights",
        "groups",
        "run",
        "tasks",
        "attempts",
        "engines",
        "health",
        "archive",
    ]
    found = {operation["tags"][0] for methods in document["paths"].values() for operation in methods.values()}
    assert found == set(order), found
    return order


def _render_operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    who = next((WHO[key] for need in operation["security"] for key in need), "anyone")
    parts = [f"\n### {operation['summary']}\n\n`{method.upper()} {path}` · {who}\n\n{operation['description']}\n"]
    parts += _render_parameters(operation)
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts += _render_fields(content["schema"], document, f"Body ({media})")
        parts += _render_example(content)
    parts.append("\n| status | |\n|---|---|\n")
    parts += [
        f"| {status} | {escape_cell(answer['description'])} |\n" for status, answer in sorted(operation["responses"].items())
    ]
    for status, answer in sorted(operation["responses"].items()):
        for content in answer.get("content", {}).values():
            if int(status) < 300:
                parts += _render_fields(content.get("schema", {}), document, f"Response {status}")
                parts += _render_example(content)
    return "".join(parts)


def _render_parameters(operation: dict[str, Any]) -> Iterator[str]:
    if operation["parameters"]:
        yield "\n| parameter | in | type | |\n|---|---|---|---|\n"
    for each in operation["parameters"]:
        yield f"| `{each['name']}` | {each['in']} | {_format_type(each['schema'])} | {escape_cell(each.get('description', ''))} |\n"


def _render_fields(schema: dict[str, Any], document: dict[str, Any], title: str) -> Iterator[str]:
    """A table of the fields of an object and of its nested objects; a question mark: optional."""
    named = _resolve(schema, document)
    if not named.get("properties"):
        return
    yield f"\n| {title} | type | |\n|---|---|---|\n"
    yield from _render_rows(named, document, "")


def _render_rows(schema: dict[str, Any], document: dict[str, Any], prefix: str) -> Iterator[str]:
    needed = schema.get("required", ())
    for name, inner in schema["properties"].items():
        yield f"| `{prefix}{name}`{'' if name in needed else '?'} | {_format_type(inner)} | {_format_description(inner)} |\n"
        nested, mark = _find_nested(inner, document)
        if nested.get("properties"):
            yield from _render_rows(nested, document, f"{prefix}{name}{mark}.")


def _find_nested(schema: dict[str, Any], document: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The object that a field holds, or a list of it, or a map to it."""
    for each in (schema, *schema.get("anyOf", ())):
        if "$ref" in each:
            return _resolve(each, document), ""
        for inside, mark in (("items", "[]"), ("additionalProperties", "{}")):
            if isinstance(each.get(inside), dict) and "$ref" in each[inside]:
                return _resolve(each[inside], document), mark
    return {}, ""


def _resolve(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _format_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_format_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "$ref" in schema:
        return "object"
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_format_type(schema.get('items', {}))}"
    return kind + _format_bounds(schema)


def _format_bounds(schema: dict[str, Any]) -> str:
    names = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}
    found = [f"{sign} {_format_number(schema[name])}" for name, sign in names.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _format_number(value: float) -> str:
    """The number as people write it; a bound of an integer type as its power of two."""
    size = int(abs(value))
    if size < 2**31:
        return f"{value:g}" if size < 10**6 else f"{value:,}"
    sign, power = "-" if value < 0 else "", (size - 1).bit_length()
    return f"{sign}2<sup>{power}</sup>" if size == 2**power else f"{sign}2<sup>{power}</sup> - {2**power - size}"


def _format_description(schema: dict[str, Any]) -> str:
    text = escape_cell(str(schema.get("description", "")))
    default = schema.get("default")
    return text if default in (None, "", [], {}) else f"{text} Default: `{json.dumps(default)}`.".strip()


def _render_example(content: dict[str, Any]) -> Iterator[str]:
    if "example" in content:
        yield f"\n```json\n{json.dumps(content['example'], indent=2)}\n```\n"
