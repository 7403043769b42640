"""The HTTP reference: the OpenAPI document that a service serves at /openapi.json, as JSON and as a page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from cli.rollout_service import KNOWN, add_rollouts
from proxy.app import create_app
from proxy.settings import Settings

HEAD = """# HTTP

{about}

For programs: a service serves this description at `/openapi.json`. A test checks real responses against it. A field with a question mark is
optional. Under each address stand the role that may ask, and the statuses that are its own.

- admin: an admin token as `Authorization: Bearer`
- trainer: a trainer token, or an admin token
- node: a node token, or an admin token
- project: the token of the session's project, or an admin token
- session: the key of the session, as `Authorization: Bearer`, `x-api-key`, `x-goog-api-key` or `?key=`
- anyone: nothing

## Statuses of many addresses

{shared}
"""
MANY = 5
"""A status with the same meaning at so many operations is explained once."""
WHO = {
    "AdminToken": "admin",
    "TrainerToken": "trainer",
    "NodeToken": "node",
    "ProjectToken": "project",
    "SessionKey": "session",
}


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
    shared = _find_shared(document)
    # Sorted by status, for nothing else orders them.
    known = "\n".join(f"- {status}: {text}" for status, text in sorted(shared))
    parts = [HEAD.format(about=document["info"]["description"], shared=known)]
    for group in _list_groups(document):
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n")
        parts += [
            _render_operation(method, path, operation, document, shared)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if operation["tags"] == [group]
        ]
    parts.append("\n## Objects\n")
    parts += [
        f"\n### {name}\n\n" + "".join(_render_fields(schema))
        for name, schema in document["components"]["schemas"].items()
        if schema.get("properties") and name not in _find_single(document)
    ]
    return "".join(parts)


def _list_operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]


def _find_shared(document: dict[str, Any]) -> set[tuple[str, str]]:
    """Statuses with their meanings that many operations have."""
    found = Counter(
        (status, answer["description"]) for each in _list_operations(document) for status, answer in each["responses"].items()
    )
    return {each for each, count in found.items() if count >= MANY and int(each[0]) >= 300}


@cache
def _count_uses(text: str) -> Counter[str]:
    return Counter(re.findall(r'"#/components/schemas/([^"]+)"', text))


def _find_single(document: dict[str, Any]) -> set[str]:
    """Schemas that one operation uses and nothing else: they stand with it. Those that only errors use are left out, too."""
    uses = _count_uses(json.dumps(document))
    bodies = {
        content["schema"]["$ref"].rpartition("/")[2]
        for each in _list_operations(document)
        for holder in (each.get("requestBody", {}), *(a for s, a in each["responses"].items() if int(s) < 300))
        for content in holder.get("content", {}).values()
        if "$ref" in content.get("schema", {})
    }
    errors = {
        content["schema"]["$ref"].rpartition("/")[2]
        for each in _list_operations(document)
        for status, answer in each["responses"].items()
        if int(status) >= 300
        for content in answer.get("content", {}).values()
        if "$ref" in content.get("schema", {})
    }
    return {name for name in bodies if uses[name] == 1} | (errors - bodies)


def _list_groups(document: dict[str, Any]) -> list[str]:
    """The groups of operations, in the order in which an agent, a trainer and an operator need them."""
    order = [
        "sessions",
        "model calls",
        "projects",
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


def _render_operation(
    method: str, path: str, operation: dict[str, Any], document: dict[str, Any], shared: set[tuple[str, str]]
) -> str:
    who = next((WHO[key] for need in operation["security"] for key in need), "anyone")
    parts = [f"\n### {operation['summary']}\n\n`{method.upper()} {path}` · {who}\n\n{operation['description']}\n"]
    asked = [each for each in operation["parameters"] if each["in"] != "path"]
    parts += ["\n"] if asked else []
    parts += [_render_field(each["name"], each["schema"], each.get("description", "")) for each in asked]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        parts += _render_body("Body", content.get("schema", {}), document)
    for status, answer in sorted(operation["responses"].items()):
        if int(status) < 300:
            for content in answer.get("content", {}).values():
                parts += _render_body(f"{status}, {answer['description']}", content.get("schema", {}), document)
    own = [
        f"{status}: {' '.join(answer['description'].split())}"
        for status, answer in sorted(operation["responses"].items())
        if (status, answer["description"]) not in shared and int(status) >= 300
    ]
    parts += [f"\n{'; '.join(own)}.\n"] if own else []
    return "".join(parts)


def _render_body(title: str, schema: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    name = schema.get("$ref", "").rpartition("/")[2]
    named = document["components"]["schemas"].get(name, schema)
    if not named.get("properties"):
        return
    if name and name not in _find_single(document):
        yield f"\n{title}: [{name}](#{name.lower()})\n"
    else:
        yield f"\n{title}:\n\n"
        yield from _render_fields(named)


def _render_fields(schema: dict[str, Any]) -> Iterator[str]:
    """A line for each field; a question mark: optional."""
    needed = schema.get("required", ())
    for name, inner in schema["properties"].items():
        yield _render_field(f"{name}{'' if name in needed else '?'}", inner, _format_description(inner))


def _render_field(name: str, schema: dict[str, Any], text: str) -> str:
    mark = "?" if name.endswith("?") else ""
    about = " ".join(text.split())
    return f"- `{name.removesuffix('?')}`{mark} {_format_type(schema)}{f': {about}' if about else ''}\n"


def _format_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_format_type(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "enum" in schema:
        return "/".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        named = describe_service()["components"]["schemas"][name]
        return f"[{name}](#{name.lower()})" if named.get("properties") else _format_type(named)
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_format_type(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), dict) and "$ref" in schema["additionalProperties"]:
        return f"map of {_format_type(schema['additionalProperties'])}"
    return kind + _format_bounds(schema)


def _format_bounds(schema: dict[str, Any]) -> str:
    names = {"minimum": "≥", "exclusiveMinimum": "\\>", "maximum": "≤", "exclusiveMaximum": "\\<", "maxLength": "length≤"}
    found = [f"{sign}{_format_number(schema[name])}" for name, sign in names.items() if name in schema]
    return f" ({','.join(found)})" if found else ""


def _format_number(value: float) -> str:
    """The number as people write it; a bound of an integer type as its power of two."""
    size = int(abs(value))
    if size < 2**31:
        return f"{value:g}" if size < 10**6 else f"{value:,}"
    sign, power = "-" if value < 0 else "", (size - 1).bit_length()
    return f"{sign}2<sup>{power}</sup>" if size == 2**power else f"{sign}2<sup>{power}</sup>-{2**power - size}"


def _format_description(schema: dict[str, Any]) -> str:
    text = str(schema.get("description", ""))
    default = schema.get("default")
    return text if default in (None, "", [], {}) else f"{text} Default: `{json.dumps(default)}`.".strip()
