"""The endpoints of the harness side, for the description: their shapes are their vendors', so they are named and not spelt out."""

from __future__ import annotations

from typing import Any

from proxy.api.description.operation import Answer, Operation

SESSION = {"session_id": "The session's id. Without the prefix `/s/{session_id}` the key alone says which session it is."}
MODEL = {"model": "A name of `/v1/models`."}
ASKED = [{"role": "user", "content": "Say hello."}]
REFUSED = (400, 401, 404, 405, 408, 409, 413, 429, 502, 503)
GOOGLE: dict[str, Any] = {
    "contents": [{"role": "user", "parts": [{"text": "Say hello."}]}],
    "generationConfig": {"maxOutputTokens": 32},
}


def _call(path: str, title: str, said: str, example: dict[str, Any]) -> Operation:
    return Operation(
        "post",
        f"/s/{{session_id}}{path}",
        "model calls",
        "session",
        title,
        f"{said} With `stream`, or the vendor's way to say it, server-sent events. Errors have the vendor's shape; 409: the session is "
        "closed. 429, 502 and 503 can be tried again and say when.",
        {200: Answer("the reply, in the vendor's shape")},
        dict,
        example,
        REFUSED,
        {**SESSION, **MODEL},
    )


def _look(path: str, title: str, said: str) -> Operation:
    names = {**SESSION, **MODEL, "response_id": "The id of a response that this session was given."}
    return Operation(
        "get",
        f"/s/{{session_id}}{path}",
        "model calls",
        "session",
        title,
        said,
        {200: Answer("in the vendor's shape")},
        refusals=(400, 401, 404, 409, 429, 503),
        parameters=names,
    )


HARNESS = (
    _call(
        "/v1/chat/completions",
        "OpenAI Chat",
        "Chat completions, with tools, reasoning, structured output and logprobs.",
        {"model": "policy", "messages": ASKED, "max_tokens": 32},
    ),
    _call(
        "/v1/completions",
        "OpenAI completions",
        "A prompt that is text or token ids.",
        {"model": "policy", "prompt": "Hello", "max_tokens": 32},
    ),
    _call(
        "/v1/responses",
        "OpenAI Responses",
        "Items in, items out; `previous_response_id` names an earlier response of the session.",
        {"model": "policy", "input": "Say hello.", "max_output_tokens": 32},
    ),
    _call(
        "/v1/messages",
        "Anthropic Messages",
        "Content blocks, tools and thinking.",
        {"model": "policy", "max_tokens": 32, "messages": ASKED},
    ),
    _call(
        "/v1/messages/count_tokens",
        "Count tokens (Anthropic)",
        "How many tokens the prompt would have, as the engine counts them. Nothing is recorded.",
        {"model": "policy", "messages": ASKED},
    ),
    _call(
        "/v1/responses/input_tokens",
        "Count tokens (OpenAI Responses)",
        "How many tokens the input would have, as the engine counts them. Nothing is recorded.",
        {"model": "policy", "input": "Say hello."},
    ),
    _call("/v1beta/models/{model}:generateContent", "Google generateContent", "Also under `/v1` and `/v1alpha`.", GOOGLE),
    _call(
        "/v1beta/models/{model}:streamGenerateContent",
        "Google streamGenerateContent",
        "Server-sent events with `?alt=sse`, else one JSON list.",
        GOOGLE,
    ),
    _call(
        "/v1beta/models/{model}:countTokens",
        "Count tokens (Google)",
        "How many tokens the prompt would have. Nothing is recorded.",
        {"contents": GOOGLE["contents"]},
    ),
    _look("/v1/models", "List models", "In the shape of the vendor whose headers came: OpenAI's, Anthropic's or Google's."),
    _look("/v1/models/{model}", "Look at a model", "In the same shapes."),
    _look("/v1beta/models", "List models (Google)", "In Google's shape."),
    _look("/v1beta/models/{model}", "Look at a model (Google)", "In Google's shape."),
    _look("/v1/responses/{response_id}", "An earlier response", "As it was answered."),
    _look("/v1/responses/{response_id}/input_items", "The input of an earlier response", "As a list of items."),
)
