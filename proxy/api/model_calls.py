"""The endpoints of the harness side for the OpenAPI document. Their shapes are their vendors', so they are named and not spelled out."""

from __future__ import annotations

from typing import Any

from proxy.dialects.catalogue import dialects

Json = dict[str, Any]

PARAMETERS = {
    "session_id": "The session's id. Without the prefix `/s/{session_id}` the key alone identifies the session.",
    "model": "A name from `/v1/models`.",
    "response_id": "The id of an earlier response of this session.",
}
ERRORS = {
    400: "the request cannot be read, or a field is wrong (`bad_request`)",
    401: "no key, or an unknown one (`invalid_api_key`)",
    404: "there is no such session, model or response (`not_found`)",
    405: "the path does not take this method (`method_not_allowed`)",
    408: "the body did not arrive in time (`request_timeout`)",
    409: "the session is closed (`conflict`)",
    413: "the body is too large (`request_too_large`)",
    429: "too many calls at once; `Retry-After` says when to retry (`too_many_calls`)",
    502: "an engine broke off or answered nonsense (`engine_failed`)",
    503: "the store or the engines are unavailable (`store_unavailable`, `engine_unavailable`)",
}
GET_ERRORS: tuple[int, ...] = (400, 401, 404, 405, 409, 429, 503)


def describe_model_calls() -> Json:
    """OpenAPI paths. Endpoints that a header chooses share the description of their path."""
    paths: Json = {}
    for endpoint in (each for dialect in dialects().values() for each in dialect.endpoints if each.header is None):
        method, text, errors = endpoint.method.lower(), endpoint.summary, GET_ERRORS
        if method == "post":
            text += " With `stream`, or the vendor's equivalent, server-sent events. 429, 502 and 503 may be retried."
            errors = tuple(ERRORS)
        operation = _describe(method, endpoint.path, endpoint.title, text, errors)
        if method == "post":
            content = {"application/json": {"schema": {"type": "object"}, "example": endpoint.example}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(f"/s/{{session_id}}{endpoint.path}", {})[method] = operation
    return paths


def _describe(method: str, path: str, summary: str, text: str, errors: tuple[int, ...]) -> Json:
    names = [name for name in PARAMETERS if name == "session_id" or f"{{{name}}}" in path]
    named = {"in": "path", "required": True, "schema": {"type": "string"}}
    error = {"application/json": {"schema": {"type": "object"}}}
    return {
        "tags": ["model calls"],
        "summary": summary,
        "description": text,
        "operationId": f"{method}_/s/{{session_id}}{path}",
        "parameters": [{"name": name, **named, "description": PARAMETERS[name]} for name in names],
        "responses": {
            "200": {"description": "in the vendor's shape", "content": {"application/json": {}}},
            **{str(status): {"description": ERRORS[status], "content": error} for status in errors},
        },
        "security": [{"SessionKey": []}, {"SessionKeyHeader": []}, {"SessionKeyGoogle": []}],
    }
