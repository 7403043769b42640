"""The OpenAPI document: FastAPI's description of the control routes, completed, and that of the model calls.

Routes declare their summary, answers, parameters and specific errors. Added here: bodies, which routes read themselves (`JsonBody`); the
security and the common errors that follow from a route's role, body and path; and the paths that are not FastAPI routes. Tests hold real
answers to the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from proxy.api.model_calls import describe_model_calls
from proxy.api.requests import ErrorBody, JsonBody, require_admin, require_node, require_trainer

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
}
SECURITY_SCHEMES: Json = {
    "AdminToken": {"type": "http", "scheme": "bearer", "description": "an admin token"},
    "TrainerToken": {"type": "http", "scheme": "bearer", "description": "a trainer token"},
    "NodeToken": {"type": "http", "scheme": "bearer", "description": "a node token"},
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
    models: dict[type[BaseModel], None] = dict.fromkeys([ErrorBody, *(model for route in routes for model in _models(route))])
    # FastAPI's own schemas lack the models of bodies and every value that is null, and include its validation errors.
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    for schema in schemas["$defs"].values():
        schema.pop("example", None)
    document["components"] = {"schemas": schemas["$defs"], "securitySchemes": SECURITY_SCHEMES}
    examples = {REF.format(model=model.__name__): example for model in models if (example := _example(model))}
    for route in routes:
        for method in route.methods:
            operation = document["paths"][route.path_format][method.lower()]
            _complete(operation, route)
            _add_examples(operation, examples)
    document["paths"] |= describe_model_calls() | {"/ui": {"get": UI}}
    return document


def _models(route: APIRoute) -> Iterator[type[BaseModel]]:
    if body := _body_model(route):
        yield body
    for response in route.responses.values():
        if "model" in response:
            yield response["model"]


def _body_model(route: APIRoute) -> type[BaseModel] | None:
    readers = (getattr(dependency.call, "__self__", None) for dependency in route.dependant.dependencies)
    return next((reader.model for reader in readers if isinstance(reader, JsonBody)), None)


def _example(model: type[BaseModel]) -> Any:
    extra = model.model_config.get("json_schema_extra")
    return extra.get("example") if isinstance(extra, dict) else None


def _complete(operation: Json, route: APIRoute) -> None:
    operation |= {"operationId": route.name, "summary": route.name.replace("_", " ").capitalize()}
    operation.setdefault("parameters", [])
    tokens = next((TOKENS[each.dependency] for each in route.dependencies if each.dependency in TOKENS), ())
    operation["security"] = [{token: []} for token in tokens]
    if model := _body_model(route):
        body = operation.setdefault("requestBody", {"content": {"application/json": {}}})
        body["required"] = any(field.is_required() for field in model.model_fields.values())
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
