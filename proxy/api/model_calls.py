"""The endpoints of the harness side for the OpenAPI document. Their shapes are their vendors', so they are named and not spelled out."""

from __future__ import annotations

from typing import Any

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
GET_ERRORS = (400, 401, 404, 405, 409, 429, 503)
MESSAGES = [{"role": "user", "content": "Say hello."}]
CONTENTS = [{"role": "user", "parts": [{"text": "Say hello."}]}]
GENERATE: Json = {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 32}}

POSTS: dict[str, tuple[str, str, Json]] = {
    "/v1/chat/completions": (
        "OpenAI Chat",
        "Chat completions, with tools, reasoning, structured output and logprobs.",
        {"model": "policy", "messages": MESSAGES, "max_tokens": 32},
    ),
    "/v1/completions": (
        "OpenAI completions",
        "A prompt of text or token ids.",
        {"model": "policy", "prompt": "Hello", "max_tokens": 32},
    ),
    "/v1/responses": (
        "OpenAI Responses",
        "Items in, items out; `previous_response_id` names an earlier response of the session.",
        {"model": "policy", "input": "Say hello.", "max_output_tokens": 32},
    ),
    "/v1/messages": (
        "Anthropic Messages",
        "Content blocks, tools and thinking.",
        {"model": "policy", "max_tokens": 32, "messages": MESSAGES},
    ),
    "/v1/messages/count_tokens": (
        "Count tokens (Anthropic)",
        "The number of prompt tokens, as the engine counts them. Nothing is recorded.",
        {"model": "policy", "messages": MESSAGES},
    ),
    "/v1/responses/input_tokens": (
        "Count tokens (OpenAI Responses)",
        "The number of input tokens, as the engine counts them. Nothing is recorded.",
        {"model": "policy", "input": "Say hello."},
    ),
    "/v1beta/models/{model}:generateContent": ("Google generateContent", "Also under `/v1` and `/v1alpha`.", GENERATE),
    "/v1beta/models/{model}:streamGenerateContent": (
        "Google streamGenerateContent",
        "Server-sent events with `?alt=sse`, otherwise one JSON list.",
        GENERATE,
    ),
    "/v1beta/models/{model}:countTokens": (
        "Count tokens (Google)",
        "The number of prompt tokens. Nothing is recorded.",
        {"contents": CONTENTS},
    ),
}
GETS = {
    "/v1/models": ("List models", "In the shape of the vendor whose headers were sent: OpenAI's, Anthropic's or Google's."),
    "/v1/models/{model}": ("Get a model", "In the same shapes."),
    "/v1beta/models": ("List models (Google)", "In Google's shape."),
    "/v1beta/models/{model}": ("Get a model (Google)", "In Google's shape."),
    "/v1/responses/{response_id}": ("Get an earlier response", "As it was answered."),
    "/v1/responses/{response_id}/input_items": ("Get the input of an earlier response", "As a list of items."),
}


def describe_model_calls() -> Json:
    """OpenAPI paths."""
    paths: Json = {}
    for path, (summary, text, example) in POSTS.items():
        text += " With `stream`, or the vendor's equivalent, server-sent events. 429, 502 and 503 may be retried."
        operation = _describe("post", path, summary, text, tuple(ERRORS))
        content = {"application/json": {"schema": {"type": "object"}, "example": example}}
        paths[f"/s/{{session_id}}{path}"] = {"post": {**operation, "requestBody": {"required": True, "content": content}}}
    for path, (summary, text) in GETS.items():
        paths[f"/s/{{session_id}}{path}"] = {"get": _describe("get", path, summary, text, GET_ERRORS)}
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
