"""The OpenAPI document: FastAPI's description of the control routes, completed, and that of the model calls.

Routes declare their summary, answers, parameters and specific errors. Added here: bodies, which routes read themselves (`JsonBody`); the
security and the common errors that follow from a route's role, body and path; and the paths that are not FastAPI routes. Tests hold real
answers to the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from proxy.api.model_calls import describe_model_calls
from proxy.api.requests import (
    ErrorBody,
    JsonBody,
    read_adapter,
    require_admin,
    require_node,
    require_opener,
    require_owner,
    require_trainer,
)

Json = dict[str, Any]

ABOUT = (
    "Harnesses call a model under `/s/{session_id}/…` with the key of their session; trainers lease batches and push weights; whoever "
    "runs harnesses opens and closes sessions, or submits tasks. Bodies and answers are JSON. Errors of the control API are "
    '`{"error": {"code", "message", "param"?}}`; those of model calls have the shape of their dialect.'
)
REF = "#/components/schemas/{model}"
ERRORS = {
    400: "the request cannot be read, or a field is wrong (`bad_request`)",
    401: "no token, or an unknown one (`invalid_api_key`)",
    403: "a token of another role (`forbidden`)",
    404: "not found (`not_found`)",
    405: "the path does not take this method (`method_not_allowed`)",
    408: "the body did not arrive in time (`request_timeout`)",
    413: "the body is too large (`request_too_large`)",
    503: "the store or the engines are unavailable; nothing was done (`store_unavailable`, `engine_unavailable`)",
}
TOKENS: Mapping[Any, tuple[str, ...]] = {
    require_admin: ("AdminToken",),
    require_trainer: ("TrainerToken", "AdminToken"),
    require_node: ("NodeToken", "AdminToken"),
    require_opener: ("ProjectToken", "AdminToken"),
    require_owner: ("ProjectToken", "AdminToken"),
}
SECURITY_SCHEMES: Json = {
    "AdminToken": {"type": "http", "scheme": "bearer", "description": "an admin token"},
    "TrainerToken": {"type": "http", "scheme": "bearer", "description": "a trainer token"},
    "NodeToken": {"type": "http", "scheme": "bearer", "description": "a node token"},
    "ProjectToken": {"type": "http", "scheme": "bearer", "description": "the token of the session's project"},
    "SessionKey": {"type": "http", "scheme": "bearer", "description": "the key of the session"},
    "SessionKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "the key of the session"},
    "SessionKeyGoogle": {"type": "apiKey", "in": "header", "name": "x-goog-api-key", "description": "the key of the session"},
}
HTML: Json = {"text/html; charset=utf-8": {}}
UI: Json = {
    "tags": ["health"],
    "summary": "The web pages",
    "description": "Sessions, groups, trees and tokens for people. A browser without a token gets the login page.",
    "operationId": "get_ui",
    "parameters": [],
    "responses": {
        "200": {"description": "the first page", "content": HTML},
        "400": {"description": "a page that says what is wrong", "content": HTML},
        "401": {"description": "the login page", "content": HTML},
        "403": {"description": "the login page, for a token of another role", "content": HTML},
        "503": {"description": "a page that says that the store is unavailable", "content": HTML},
    },
    "security": [{"AdminToken": []}],
}


def build_document(app: FastAPI) -> Json:
    document = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    models: dict[type, None] = dict.fromkeys([ErrorBody, *(model for route in routes for model in _models(route))])
    bodies = {model for route in routes if (model := _body_model(route))}
    # FastAPI's own schemas lack the models of bodies and every value that is null, and include its validation errors.
    inputs = [(model, _mode(model, model in bodies), read_adapter(model)) for model in models]
    _, schemas = TypeAdapter.json_schemas(inputs, ref_template=REF, schema_generator=Schemas)
    document["components"] = {"schemas": schemas["$defs"], "securitySchemes": SECURITY_SCHEMES}
    examples = {
        REF.format(model=name): schema.pop("example") for name, schema in schemas["$defs"].items() if "example" in schema
    }
    for route in routes:
        for method in route.methods:
            operation = document["paths"][route.path_format][method.lower()]
            _complete(operation, route)
            _add_examples(operation, examples)
    document["paths"] |= describe_model_calls() | {"/ui": {"get": UI}}
    return document


class Schemas(GenerateJsonSchema):
    """Describes the fields that a dataclass inherits as its bases do, and shows no defaults of answers, which have all of their fields."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        found = super().dataclass_schema(schema)
        spelt = getattr(schema["cls"], "__pydantic_config__", {}).get("alias_generator", str)
        for base in filter(is_dataclass, schema["cls"].__mro__[1:]):
            for name, described in _describe_fields(base).items():
                found["properties"][spelt(name)].setdefault("description", described)
        return found

    def encode_default(self, dft: Any) -> Any:
        return (
            TypeAdapter(type(dft)).dump_python(dft, mode="json", by_alias=True)
            if is_dataclass(dft)
            else super().encode_default(dft)
        )

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"]) if self.mode == "serialization" else super().default_schema(schema)


@cache
def _describe_fields(kind: type) -> dict[str, str]:
    shown = TypeAdapter(kind).json_schema().get("properties", {})
    return {name: field["description"] for name, field in shown.items() if "description" in field}


def _mode(model: type, is_body: bool) -> JsonSchemaMode:
    return "serialization" if is_dataclass(model) and not is_body else "validation"


def _models(route: APIRoute) -> Iterator[type]:
    if body := _body_model(route):
        yield body
    for response in route.responses.values():
        if "model" in response:
            yield response["model"]


def _body_model(route: APIRoute) -> type | None:
    readers = (getattr(dependency.call, "__self__", None) for dependency in route.dependant.dependencies)
    return next((reader.model for reader in readers if isinstance(reader, JsonBody)), None)


def _complete(operation: Json, route: APIRoute) -> None:
    operation |= {"operationId": route.name, "summary": route.name.replace("_", " ").capitalize()}
    operation.setdefault("parameters", [])
    tokens = next((TOKENS[each.dependency] for each in route.dependencies if each.dependency in TOKENS), ())
    operation["security"] = [{token: []} for token in tokens]
    if model := _body_model(route):
        body = operation.setdefault("requestBody", {"content": {"application/json": {}}})
        schema = read_adapter(model).json_schema()
        body["required"] = "required" in schema.get("$defs", {}).get(schema.get("$ref", "").rpartition("/")[2], schema)
        body["content"]["application/json"]["schema"] = {"$ref": REF.format(model=model.__name__)}
    responses = operation["responses"]
    responses.pop("422", None)
    for status in _implied_errors(route, bool(tokens), "requestBody" in operation):
        responses.setdefault(str(status), {"description": ERRORS[status]})
    for status, response in responses.items():
        if int(status) >= 400:
            response.setdefault("content", {"application/json": {"schema": {"$ref": REF.format(model=ErrorBody.__name__)}}})


def _add_examples(operation: Json, examples: Json) -> None:
    """Beside each reference to a model that has one."""
    for holder in (operation.get("requestBody", {}), *operation["responses"].values()):
        for content in holder.get("content", {}).values():
            ref = content.get("schema", {}).get("$ref")
            if ref in examples:
                content.setdefault("example", examples[ref])


def _implied_errors(route: APIRoute, has_role: bool, has_body: bool) -> Iterator[int]:
    if has_role:
        yield from (400, 401, 403, 503)
    if has_body:
        yield from (408, 413)
    if "{" in route.path_format:
        yield from (404, 405)
