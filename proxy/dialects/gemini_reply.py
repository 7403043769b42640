"""A reply in Google's shape, whole or streamed: candidates of parts, usage, logprobs; and Google's errors.

`Candidate` makes the parts of one choice, from deltas or from the finished choice alone, so that streamed and whole replies agree. A
thoughtSignature names the call. It stands on the first text and on the first function call, as some clients join text parts and keep
only the first one's. The signature minted last carries all of the reasoning, for clients that drop thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.dialects.base import Choice, Delta, Reply, Request, seal
from proxy.dialects.fields import TEXT, arguments_object, encode, split_event
from proxy.errors import ContextTooLong, VerbatimError

Part = dict[str, Any]

_FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_SILENT_DELTAS = 64
"""Deltas in a row that show nothing (unwanted thoughts, arguments in progress) before a keep-alive."""


@dataclass(frozen=True, slots=True)
class GeminiReplyOptions:
    """What the harness requested: thoughts, how many logprobs beside each token's own, server-sent events."""

    thoughts: bool
    top_logprobs: int
    sse: bool


class GeminiStream:
    """Renders one reply as server-sent events (`alt=sse`) or as one JSON array that grows."""

    def __init__(self, request: Request, reply_id: str) -> None:
        options: GeminiReplyOptions = request.echo
        self._head = {"modelVersion": request.model, "responseId": reply_id}
        self._sse = options.sse
        self._with_logprobs = request.top_logprobs is not None
        self._begun = False
        self._silent = 0
        # The calls of the other choices are not known yet.
        self._candidates = [Candidate(index, options, "" if index else reply_id) for index in range(request.n)]
        texts = (self._encode([_text_candidate(index, TEXT)]) for index in range(request.n))
        self._texts = [split_event(text) for text in texts]

    def open(self) -> bytes:
        """Google has no opening event; an empty text tells the client that the reply has begun."""
        return (b"" if self._sse else b"[") + self.keep_alive()

    def write(self, delta: Delta) -> bytes:
        candidate = self._candidates[delta.index]
        if candidate.text_sent and delta.content and not (delta.reasoning or delta.tool_calls or self._with_logprobs):
            # What nearly every token is: the first text has the signature.
            candidate.text_sent += len(delta.content)
            self._silent = 0
            body = encode(delta.content).join(self._texts[delta.index])
            return body if self._sse else self._separator() + body
        shown = candidate.take(delta)
        if shown is not None:
            self._silent = 0
            return self._chunk([shown])
        self._silent += 1
        return self.keep_alive() if self._silent % _SILENT_DELTAS == 0 else b""

    def keep_alive(self) -> bytes:
        """An empty text: google-genai's chats discard a turn if one of its chunks has no candidate or no part."""
        return self._chunk([_text_candidate(0, "")])

    def close(self, reply: Reply) -> bytes:
        rest = [self._candidates[choice.index].finish(choice) for choice in reply.choices]
        early = b"".join(self._chunk([piece]) for candidate in rest for piece in _split_parts(candidate))
        return early + self._chunk(rest, usageMetadata=build_usage(reply)) + (b"" if self._sse else b"]")

    def fail(self, error: VerbatimError) -> bytes:
        """Without `data:`, as Google sends it: its JavaScript SDK raises such a line and ignores an event."""
        body = encode({"error": describe_error(error)})
        return body if self._sse else self._separator() + body + b"]"

    def _chunk(self, candidates: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = self._encode(candidates, **more)
        return chunk if self._sse else self._separator() + chunk

    def _encode(self, candidates: list[dict[str, Any]], **more: Any) -> bytes:
        body = encode({"candidates": candidates, **more, **self._head})
        return b"data: " + body + b"\n\n" if self._sse else body

    def _separator(self) -> bytes:
        begun, self._begun = self._begun, True
        return b",\n" if begun else b""


def _text_candidate(index: int, text: str) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": [{"text": text}]}, "index": index}


def _split_parts(candidate: dict[str, Any]) -> list[dict[str, Any]]:
    """All parts but the last, which the candidate keeps, each as a separate candidate: a chunk holds one part."""
    content = candidate["content"]
    *early, last = content["parts"]
    content["parts"] = [last]
    return [{"content": {"role": "model", "parts": [part]}, "index": candidate["index"]} for part in early]


class Candidate:
    """One choice in progress; `call_id` is "" while unknown."""

    def __init__(self, index: int, options: GeminiReplyOptions, call_id: str = "") -> None:
        self._index = index
        self._options = options
        self._call_id = call_id
        self._reasoning: list[str] = []
        self._reasoning_sent = 0
        self.text_sent = 0
        """Characters of text."""
        self._sealed: str | None = None
        self._calls_sent = 0
        self._open_call: dict[str, Any] | None = None
        self._arguments: list[str] = []
        """Of the open call."""
        self._logprobs: list[Mapping[str, Any]] = []
        """Not sent yet."""
        self._logprobs_sent = 0

    def take(self, delta: Delta) -> dict[str, Any] | None:
        """What a delta adds, as a candidate of a chunk; None if it shows nothing. A call shows once it is complete."""
        parts = self._think(delta.reasoning) + self._say(delta.content)
        for piece in delta.tool_calls:
            parts += self._take_call(piece)
        self._logprobs += delta.logprobs
        return self._render(parts) if parts else None

    def finish(self, choice: Choice) -> dict[str, Any]:
        """What no delta showed, and the finish reason. There is always a part: clients take a chunk without one for a broken reply."""
        message, self._call_id = choice.message, choice.call_id
        reasoning, content = message.get("reasoning_content") or "", message.get("content") or ""
        parts = self._think(reasoning[self._reasoning_sent :])
        parts += self._say(content[self.text_sent :])
        parts += [self._call_part(call) for call in (message.get("tool_calls") or ())[self._calls_sent :]]
        if self._sealed != reasoning:
            parts.append(self._sign({"text": ""}))
        logprobs = choice.logprobs or ()
        self._logprobs = list(logprobs[self._logprobs_sent :])
        candidate = self._render(parts or [{"text": ""}])
        candidate["finishReason"] = _FINISH_REASONS.get(choice.finish_reason, "OTHER")
        if known := [entry["logprob"] for entry in logprobs if entry.get("logprob") is not None]:
            candidate["avgLogprobs"] = sum(known) / len(known)
        return candidate

    def _think(self, text: str) -> list[Part]:
        if not text:
            return []
        self._reasoning.append(text)
        self._reasoning_sent += len(text)
        return [{"text": text, "thought": True}] if self._options.thoughts else []

    def _say(self, text: str) -> list[Part]:
        if not text:
            return []
        first, self.text_sent = not self.text_sent, self.text_sent + len(text)
        return [self._sign({"text": text}) if first else {"text": text}]

    def _take_call(self, piece: Mapping[str, Any]) -> list[Part]:
        """The previous call, if `piece` belongs to the next one."""
        function = piece.get("function") or {}
        done: list[Part] = []
        if self._open_call is not None and self._open_call["index"] != piece.get("index", 0):
            self._open_call["function"]["arguments"] = "".join(self._arguments)
            done = [self._call_part(self._open_call)]
            self._open_call = None
        if self._open_call is None:
            self._open_call = {"index": piece.get("index", 0), "id": "", "function": {"name": ""}}
            self._arguments = []
        self._open_call["id"] = self._open_call["id"] or piece.get("id") or ""
        self._open_call["function"]["name"] += function.get("name") or ""
        self._arguments.append(function.get("arguments") or "")
        return done

    def _call_part(self, call: Mapping[str, Any]) -> Part:
        function = call.get("function") or {}
        arguments = arguments_object(function.get("arguments") or "")
        part: Part = {"functionCall": {"id": call["id"], "name": function["name"], "args": arguments}}
        self._calls_sent += 1
        return self._sign(part) if self._calls_sent == 1 else part

    def _sign(self, part: Part) -> Part:
        """The part with its signature, which omits the reasoning if all of it was sealed before."""
        if not self._call_id:
            return part
        reasoning = "".join(self._reasoning)
        part["thoughtSignature"] = seal(self._call_id, reasoning if self._sealed != reasoning else "")
        self._sealed = reasoning
        return part

    def _render(self, parts: list[Part]) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": self._index}
        if self._logprobs:
            candidate["logprobsResult"] = _logprobs_result(self._logprobs, self._options.top_logprobs)
            self._logprobs_sent += len(self._logprobs)
            self._logprobs = []
        return candidate


def _logprobs_result(entries: Sequence[Mapping[str, Any]], top: int) -> dict[str, Any]:
    """Chat-shaped logprobs in Google's shape, with the `top` likeliest tokens beside each sampled one."""
    result: dict[str, Any] = {"chosenCandidates": [_token(entry) for entry in entries]}
    if top:
        likeliest = [(entry.get("top_logprobs") or ())[:top] for entry in entries]
        result["topCandidates"] = [{"candidates": [_token(other) for other in tokens]} for tokens in likeliest]
    return result


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"token": entry.get("token") or ""}
    return shown if entry.get("logprob") is None else {**shown, "logProbability": entry["logprob"]}


def build_usage(reply: Reply) -> dict[str, Any]:
    counts = {
        "promptTokenCount": reply.prompt_tokens,
        "candidatesTokenCount": reply.completion_tokens,
        "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
    }
    return {**counts, "cachedContentTokenCount": reply.cached_tokens} if reply.cached_tokens else counts


# Errors: google.rpc.Status with a status name and details (google.rpc error model, AIP-193).

_STATUS_NAMES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    426: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE = "type.googleapis.com/google.rpc."


def describe_error(error: VerbatimError) -> dict[str, Any]:
    """The object under `error` in a body and in a stream."""
    fallback = "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL"
    name = _STATUS_NAMES.get(error.status, fallback)
    return {"code": error.status, "message": _message(error), "status": name, "details": _details(error)}


def _message(error: VerbatimError) -> str:
    if not isinstance(error, ContextTooLong):
        return error.message
    # Clients recognise an overflow by this sentence alone.
    if error.tokens is None or error.window is None:
        return f"The input token count exceeds the maximum number of tokens allowed. {error.message}"
    return f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed ({error.window})."


def _details(error: VerbatimError) -> list[dict[str, Any]]:
    details: list[dict[str, Any]] = [{"@type": _TYPE + "ErrorInfo", "reason": error.code.upper(), "domain": "verbatim"}]
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": _TYPE + "BadRequest", "fieldViolations": [violation]})
    if error.retry_after_seconds is not None:
        details.append({"@type": _TYPE + "RetryInfo", "retryDelay": f"{error.retry_after_seconds:g}s"})
    return details
