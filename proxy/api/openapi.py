"""The OpenAPI description of the service: what FastAPI knows of the routes, and what a table of operations adds to it.

Routes answer with bytes they have encoded themselves and read bodies by themselves, so FastAPI sees neither. What is said here is held
against real answers by a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from proxy.api.description.operation import JSON, Answer, Operation, Who
from proxy.api.description.shape import Refused

REF = "#/components/schemas/{model}"
Json = Mapping[str, Any]

REFUSALS = {
    400: "the request cannot be read, or a field is wrong (`bad_request`)",
    401: "no token, or one that is not known (`invalid_api_key`)",
    403: "a token of another role (`forbidden`)",
    404: "there is no such thing (`not_found`)",
    405: "another method is meant",
    408: "the body did not come in time (`request_timeout`)",
    409: "what is there stands against it (`conflict`)",
    413: "the body is too large (`request_too_large`)",
    429: "too much at once; `Retry-After` says when to try again (`backpressure`, `too_many_calls`)",
    502: "an engine broke off or answered nonsense (`engine_failed`)",
    503: "store or engines are away; nothing was done (`store_unavailable`, `engine_unavailable`)",
}
OF_EVERYBODY: Mapping[str, Sequence[int]] = {
    "admin": (400, 401, 403, 503),
    "trainer": (400, 401, 403, 503),
    "node": (400, 401, 403, 503),
    "session": (),
    "anyone": (),
}
KEYS = {
    "admin": ("AdminToken",),
    "trainer": ("TrainerToken", "AdminToken"),
    "node": ("NodeToken", "AdminToken"),
    "session": ("SessionKey", "SessionKeyHeader", "SessionKeyGoogle"),
    "anyone": (),
}
SCHEMES: Json = {
    "AdminToken": {"type": "http", "scheme": "bearer", "description": "an admin token"},
    "TrainerToken": {"type": "http", "scheme": "bearer", "description": "a trainer token"},
    "NodeToken": {"type": "http", "scheme": "bearer", "description": "a node token"},
    "SessionKey": {"type": "http", "scheme": "bearer", "description": "the key of the session"},
    "SessionKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "the key of the session"},
    "SessionKeyGoogle": {"type": "apiKey", "in": "header", "name": "x-goog-api-key", "description": "the key of the session"},
}


def description(app: FastAPI, operations: Iterable[Operation], text: str) -> dict[str, Any]:
    """The document: each operation in its place, those of the harness side, which are no routes of `app`, among them."""
    operations = list(operations)
    made = get_openapi(title=app.title, version=app.version, description=text, routes=app.routes)
    components = made.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **_schemas(operations)}
    # FastAPI's own errors of validation are never answered here.
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    components["securitySchemes"] = dict(SCHEMES)
    for operation in operations:
        known = made["paths"].setdefault(operation.path, {}).get(operation.method, {})
        made["paths"][operation.path][operation.method] = _as_wire(operation, known)
    return made


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    models = {Refused: None} | dict.fromkeys(model for operation in operations for model in _models(operation))
    _, document = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    found: dict[str, Any] = document["$defs"]
    return found


def _models(operation: Operation) -> Iterator[type[BaseModel]]:
    for model in (operation.body, *(answer.model for answer in operation.answers.values())):
        if model is not None and issubclass(model, BaseModel):
            yield model


def _as_wire(operation: Operation, known: Json) -> dict[str, Any]:
    body = {} if operation.body is None else {"requestBody": _request_body(operation)}
    lost = (404, 405) if "{" in operation.path else ()
    refused = sorted({*OF_EVERYBODY[operation.who], *operation.refusals, *lost} - set(operation.answers))
    return {
        "tags": [operation.group],
        "summary": operation.title,
        "description": operation.said,
        "operationId": known.get("operationId") or f"{operation.method}_{operation.path}",
        "parameters": [_parameter(each, operation) for each in known.get("parameters") or _named(operation.path)],
        **body,
        "responses": {
            **{str(status): _response(answer) for status, answer in operation.answers.items()},
            **{str(status): _refusal(status, operation.who) for status in refused},
        },
        "security": [{key: []} for key in KEYS[operation.who]],
    }


def _request_body(operation: Operation) -> dict[str, Any]:
    assert operation.body is not None
    if issubclass(operation.body, BaseModel):
        schema = {"$ref": REF.format(model=operation.body.__name__)}
        needed = any(each.is_required() for each in operation.body.model_fields.values())
    else:
        schema, needed = {"type": "object"}, True
    example = {} if operation.example is None else {"example": operation.example}
    return {"required": needed, "content": {operation.body_media: {"schema": schema, **example}}}


def _response(answer: Answer) -> dict[str, Any]:
    if not answer.media:
        return {"description": answer.said}
    schema = {"schema": {"$ref": REF.format(model=answer.model.__name__)}} if answer.model else {}
    example = {} if answer.example is None else {"example": answer.example}
    return {"description": answer.said, "content": {answer.media: {**schema, **example}}}


def _refusal(status: int, who: Who) -> dict[str, Any]:
    """An error; of a model call it has the shape of its dialect."""
    content = {"schema": {"type": "object"} if who == "session" else {"$ref": REF.format(model="Refused")}}
    return {"description": REFUSALS[status], "content": {JSON: content}}


def _named(path: str) -> list[dict[str, Any]]:
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _parameter(known: Json, operation: Operation) -> dict[str, Any]:
    said = operation.parameters.get(known["name"])
    return {**known, **({"description": said} if said else {})}
