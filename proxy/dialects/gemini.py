"""Google generateContent: `/v1beta/models/{model}:generateContent`, `:streamGenerateContent`, `:countTokens` and `/v1beta/models`.

Shapes as the google-genai SDKs parse them. What binds a reply and where that was found stands beside each rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import (
    Dialect,
    Endpoint,
    ErrorAnswer,
    HistoryMessage,
    Incoming,
    Past,
    Reply,
    Request,
    retry_headers,
)
from proxy.dialects.fields import decode, encode
from proxy.dialects.gemini_contents import read_system, split_units
from proxy.dialects.gemini_fields import normalize, parse_generation, parse_tool_choice, parse_tools
from proxy.dialects.gemini_reply import Candidate, GeminiReplyOptions, GeminiStream, build_usage, describe_error
from proxy.dialects.raw_history import SplitBody
from proxy.errors import RequestError, VerbatimError

_ANY_VERSION = r"(?:/v1(?:beta|alpha)?){0,2}"
_BETA = r"(?:/v1(?:beta|alpha)?)?/v1(?:beta|alpha)"
"""Google's models are listed where OpenAI's are not."""

_EXAMPLE: dict[str, Any] = {
    "contents": [{"role": "user", "parts": [{"text": "Say hello."}]}],
    "generationConfig": {"maxOutputTokens": 32},
}


class GeminiDialect(Dialect):
    name = "gemini"
    title = "Google generateContent (`/v1beta/models/{model}:generateContent`)"
    endpoints = (
        Endpoint(
            "call",
            "POST",
            "/v1beta/models/{model}:generateContent",
            "Google generateContent",
            "Also under `/v1` and `/v1alpha`.",
            _EXAMPLE,
            _ANY_VERSION,
            {"method": "generateContent"},
        ),
        Endpoint(
            "call",
            "POST",
            "/v1beta/models/{model}:streamGenerateContent",
            "Google streamGenerateContent",
            "Server-sent events with `?alt=sse`, otherwise one JSON list.",
            _EXAMPLE,
            _ANY_VERSION,
            {"method": "streamGenerateContent"},
        ),
        Endpoint(
            "count",
            "POST",
            "/v1beta/models/{model}:countTokens",
            "Count tokens (Google)",
            "The number of prompt tokens. Nothing is recorded.",
            {"contents": _EXAMPLE["contents"]},
            _ANY_VERSION,
        ),
        Endpoint("models", "GET", "/v1beta/models", "List models (Google)", "In Google's shape.", versions=_BETA),
        Endpoint("model", "GET", "/v1beta/models/{model}", "Get a model (Google)", "In Google's shape.", versions=_BETA),
        Endpoint("models", "GET", "/v1/models", header="x-goog-api-key"),
        Endpoint("model", "GET", "/v1/models/{model}", header="x-goog-api-key"),
    )
    paths = rf"/v1(?:beta|alpha)/|{_ANY_VERSION}/models/[^:]+:"
    probes = ("/v1beta/?",)
    client = "gemini"
    history_field = "contents"

    def parse(self, incoming: Incoming, past: Past) -> Request:
        request = self._parse(incoming, past)
        if request.history[-1].message["role"] == "assistant":
            raise RequestError(
                "contents: the last one is the model's, and a reply is a turn of its own: end with one of the user or with the results of "
                "all function calls",
                param="contents",
            )
        return request

    def _parse(self, incoming: Incoming, past: Past) -> Request:
        split, body = _split(incoming.body, past)
        if "cachedContent" in body:
            raise RequestError(
                "'cachedContent' names a cache that this service does not have; send its contents", param="cachedContent"
            )
        history, _ = past.read(split, split_units)
        if not history:
            raise RequestError("'contents' must be a non-empty list", param="contents")
        generation = parse_generation(body)
        tools, dropped = past.convert(body.get("tools"), parse_tools)
        choice = parse_tool_choice(body, tools)
        streamed = incoming.path.get("method") == "streamGenerateContent"
        sse = incoming.query.get("alt") == "sse"
        request = Request(
            dialect=self.name,
            model=incoming.path["model"].removeprefix("models/"),
            history=[*_system(body, past), *history],
            tools=tools,
            template_kwargs=generation.template_kwargs,
            sampling=generation.sampling,
            forward=generation.forward if choice is None else {**generation.forward, "tool_choice": choice},
            n=generation.n,
            stream=streamed,
            include_usage=True,
            top_logprobs=generation.top_logprobs,
            echo=GeminiReplyOptions(generation.thoughts, generation.top_logprobs or 0, sse),
            dropped_tools=dropped,
        )
        if streamed and not sse:
            request.stream_type = "application/json"
        return request

    def parse_count(self, incoming: Incoming, past: Past) -> Request:
        """The request whose prompt is counted: the body, or the one under `generateContentRequest`. Its last content may be the model's."""
        _, body = _split(incoming.body, past)
        inner = body.get("generateContentRequest")
        return self._parse(incoming if inner is None else replace(incoming, body=encode(inner)), past)

    def render_count(self, tokens: int) -> bytes:
        return encode({"totalTokens": tokens})

    def render(self, request: Request, reply: Reply) -> bytes:
        candidates = [Candidate(choice.index, request.echo, choice.call_id).finish(choice) for choice in reply.choices]
        head = {"modelVersion": reply.model, "responseId": reply.reply_id}
        return encode({"candidates": candidates, "usageMetadata": build_usage(reply), **head})

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> GeminiStream:
        return GeminiStream(request, reply_id)

    def render_error(self, error: VerbatimError) -> ErrorAnswer:
        return ErrorAnswer(error.status, retry_headers(error), encode({"error": describe_error(error)}))

    def render_models(self, windows: Mapping[str, int | None], created: int) -> bytes:
        return encode({"models": [_model(name, window) for name, window in windows.items()]})

    def render_model(self, name: str, window: int | None, created: int) -> bytes:
        return encode(_model(name, window))


def _split(body: bytes, past: Past) -> tuple[SplitBody, dict[str, Any]]:
    """The body with its raw contents, a lone content being a list of one, and its fields, named in camel case."""
    try:
        split = past.split(body, "contents", split_units)
    except RequestError as error:
        if error.param != "contents":
            raise
        found = decode(body)
        if not isinstance(found["contents"], dict):
            raise
        contents = [encode(found.pop("contents"))]
        split = SplitBody(body, found, contents)
    fields.refuse_continuation(split.fields)
    return split, normalize(split.fields, "body")


def _system(body: Mapping[str, Any], past: Past) -> list[HistoryMessage]:
    """The system instruction as a message, unless it is empty."""
    if "systemInstruction" not in body:
        return []
    return [seen for seen in past.read_item(encode(body["systemInstruction"]), read_system) if seen.message["content"]]


def _model(name: str, window: int | None) -> dict[str, Any]:
    limits = {} if window is None else {"inputTokenLimit": window, "outputTokenLimit": window}
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "version": "1", "displayName": name, **limits, "supportedGenerationMethods": methods}
