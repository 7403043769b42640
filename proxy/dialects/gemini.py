"""Google generateContent: `/v1beta/models/{model}:generateContent`, `:streamGenerateContent`, `:countTokens` and `/v1beta/models`.

Shapes as the google-genai SDKs parse them. What is binding for them and where it was found stands beside each rule: contents
in gemini_contents, replies in gemini_reply, streams in gemini_stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import Asked, ErrorAnswer, Past, Reply, Request, Seen, retry_headers
from proxy.dialects.fields import decode, split
from proxy.dialects.gemini_reply import Candidate, GeminiStream, Wanted, google_error, usage
from proxy.dialects.gemini_request import generation_of, named, offered_tools, read_system, tool_choice, units
from proxy.errors import RequestError, VerbatimError

_encode = msgspec.json.Encoder().encode


class GeminiDialect:
    name = "gemini"

    def parse(self, asked: Asked, past: Past) -> Request:
        """The canonical request. Raises RequestError naming the field and the rule it broke."""
        try:
            return self._request(asked, past)
        except RecursionError as error:
            raise RequestError("the body is nested too deeply") from error

    def _request(self, asked: Asked, past: Past) -> Request:
        body, items = _taken_apart(asked.body)
        if "cachedContent" in body:
            raise RequestError("'cachedContent' names what is not here; send its contents", param="cachedContent")
        history = [seen for item, read in units(items) for seen in past.see(item, read)]
        if not history:
            raise RequestError("'contents' must be a non-empty list", param="contents")
        generation = generation_of(body)
        tools, left_out = offered_tools(body)
        choice = tool_choice(body, tools)
        streamed = asked.path.get("method") == "streamGenerateContent"
        sse = asked.query.get("alt") == "sse"
        request = Request(
            dialect=self.name,
            model=asked.path["model"].removeprefix("models/"),
            history=[*_system(body, past), *history],
            tools=tools,
            template_kwargs=generation.template_kwargs,
            sampling=generation.sampling,
            forward=generation.forward if choice is None else {**generation.forward, "tool_choice": choice},
            n=generation.n,
            stream=streamed,
            include_usage=True,
            top_logprobs=generation.top_logprobs,
            echo=Wanted(generation.thoughts, generation.top_logprobs or 0, sse),
            dropped_tools=left_out,
        )
        if streamed and not sse:
            request.stream_type = "application/json"
        return request

    def parse_count(self, asked: Asked, past: Past) -> Request:
        """The request whose prompt is counted: the body, or the one under `generateContentRequest`."""
        body, _ = _taken_apart(asked.body)
        inner = body.get("generateContentRequest")
        return self.parse(asked if inner is None else Asked(_encode(inner), asked.path, asked.query), past)

    def count(self, tokens: int) -> bytes:
        return _encode({"totalTokens": tokens})

    def render(self, request: Request, reply: Reply) -> bytes:
        candidates = [Candidate(choice.index, request.echo, choice.call_id).rest(choice) for choice in reply.choices]
        head = {"modelVersion": reply.model, "responseId": reply.reply_id}
        return _encode({"candidates": candidates, "usageMetadata": usage(reply), **head})

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> GeminiStream:
        return GeminiStream(request, reply_id)

    def error(self, error: VerbatimError) -> ErrorAnswer:
        return ErrorAnswer(error.status, retry_headers(error), _encode({"error": google_error(error)}))

    def errs_in_stream(self, error: VerbatimError) -> bool:
        return False

    def models(self, names: Mapping[str, int | None], created: int) -> bytes:
        return _encode({"models": [_model(name, window) for name, window in names.items()]})

    def model(self, name: str, window: int | None, created: int) -> bytes:
        return _encode(_model(name, window))


def _taken_apart(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The body's fields, named in camel case, and its raw contents; a lone content counts as a list of it."""
    try:
        found, items = split(body, "contents")
    except RequestError as error:
        if error.param != "contents":
            raise
        found = decode(body)
        if not isinstance(found["contents"], dict):
            raise
        items = [_encode(found.pop("contents"))]
    if isinstance(found, dict):
        fields.refuse_continuation(found)
    return named(found, "body"), items


def _system(body: Mapping[str, Any], past: Past) -> list[Seen]:
    """The system instruction as a message, where there is one that says something."""
    if "systemInstruction" not in body:
        return []
    seen = past.see(_encode(body["systemInstruction"]), read_system)
    return [message for message in seen if message.message["content"]]


def _model(name: str, window: int | None) -> dict[str, Any]:
    limits = {} if window is None else {"inputTokenLimit": window, "outputTokenLimit": window}
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "version": "1", "displayName": name, **limits, "supportedGenerationMethods": methods}
