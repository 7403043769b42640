"""A reply in Google's shape: candidates of parts, usage, logprobs.

`Candidate` tells the parts of one choice, from deltas or from the finished choice alone, so that streamed and whole replies agree.
A thoughtSignature names the call: it stands on the first text and on the first function call, as some clients join text parts and
keep only the first one's. The one that is minted last carries all of the reasoning, for clients that drop thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.dialects.base import Choice, Delta, Reply, Request, seal
from proxy.dialects.fields import arguments_object
from proxy.errors import ContextTooLong, VerbatimError

Part = dict[str, Any]

_FINISHES = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the reply is wanted: with thoughts, with how many logprobs beside each token's, as server-sent events."""

    thoughts: bool
    top_logprobs: int
    sse: bool


class Candidate:
    """One choice on its way; `call_id` is "" while it is not known."""

    def __init__(self, index: int, wanted: Wanted, call_id: str = "") -> None:
        self._index = index
        self._wanted = wanted
        self._call_id = call_id
        self._reasoning: list[str] = []
        self._reasoning_told = 0
        self._content_told = 0
        self._sealed: str | None = None
        self._calls_told = 0
        self._open_call: dict[str, Any] | None = None
        self._waiting: list[Mapping[str, Any]] = []
        self._logprobs_told = 0

    def take(self, delta: Delta) -> dict[str, Any] | None:
        """What a delta makes certain as a candidate of a chunk, None when nothing shows. A call shows once it is whole."""
        parts = self._think(delta.reasoning) + self._say(delta.content)
        for piece in delta.tool_calls:
            parts += self._call(piece)
        self._waiting += delta.logprobs
        return self._shown(parts) if parts else None

    def rest(self, choice: Choice) -> dict[str, Any]:
        """What no delta showed, and how it ended. There is always a part: clients take a chunk without one for a broken reply."""
        message, self._call_id = choice.message, choice.call_id
        reasoning, content = message.get("reasoning_content") or "", message.get("content") or ""
        parts = self._think(reasoning[self._reasoning_told :])
        parts += self._say(content[self._content_told :])
        parts += [self._function(call) for call in (message.get("tool_calls") or ())[self._calls_told :]]
        if self._sealed != reasoning:
            parts.append(self._signed({"text": ""}))
        logprobs = choice.logprobs or ()
        self._waiting = list(logprobs[self._logprobs_told :])
        shown = self._shown(parts or [{"text": ""}])
        shown["finishReason"] = _FINISHES.get(choice.finish_reason, "OTHER")
        if known := [entry["logprob"] for entry in logprobs if entry.get("logprob") is not None]:
            shown["avgLogprobs"] = sum(known) / len(known)
        return shown

    def _think(self, text: str) -> list[Part]:
        self._reasoning.append(text)
        self._reasoning_told += len(text)
        return [{"text": text, "thought": True}] if text and self._wanted.thoughts else []

    def _say(self, text: str) -> list[Part]:
        if not text:
            return []
        first, self._content_told = not self._content_told, self._content_told + len(text)
        return [self._signed({"text": text}) if first else {"text": text}]

    def _call(self, piece: Mapping[str, Any]) -> list[Part]:
        """The call before the one that `piece` is of, if that ends it."""
        function = piece.get("function") or {}
        done: list[Part] = []
        if self._open_call is not None and self._open_call["index"] != piece.get("index", 0):
            done = [self._function(self._open_call)]
            self._open_call = None
        if self._open_call is None:
            self._open_call = {"index": piece.get("index", 0), "id": "", "function": {"name": "", "arguments": ""}}
        self._open_call["id"] = self._open_call["id"] or piece.get("id") or ""
        self._open_call["function"]["name"] += function.get("name") or ""
        self._open_call["function"]["arguments"] += function.get("arguments") or ""
        return done

    def _function(self, call: Mapping[str, Any]) -> Part:
        function = call.get("function") or {}
        told = {"id": call["id"], "name": function["name"], "args": arguments_object(function.get("arguments") or "")}
        self._calls_told += 1
        part: Part = {"functionCall": told}
        return self._signed(part) if self._calls_told == 1 else part

    def _signed(self, part: Part) -> Part:
        """The part with the signature; with no reasoning in it where all of it was sealed before."""
        if not self._call_id:
            return part
        reasoning = "".join(self._reasoning)
        part["thoughtSignature"] = seal(self._call_id, reasoning if self._sealed != reasoning else "")
        self._sealed = reasoning
        return part

    def _shown(self, parts: list[Part]) -> dict[str, Any]:
        shown: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": self._index}
        if self._waiting:
            shown["logprobsResult"] = logprobs_result(self._waiting, self._wanted.top_logprobs)
            self._logprobs_told += len(self._waiting)
            self._waiting = []
        return shown


def logprobs_result(entries: Sequence[Mapping[str, Any]], top: int) -> dict[str, Any]:
    """Chat-shaped logprobs in Google's shape, with the `top` likeliest tokens beside each chosen one."""
    result: dict[str, Any] = {"chosenCandidates": [_token(entry) for entry in entries]}
    if top:
        likeliest = [(entry.get("top_logprobs") or ())[:top] for entry in entries]
        result["topCandidates"] = [{"candidates": [_token(other) for other in tokens]} for tokens in likeliest]
    return result


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"token": entry.get("token") or ""}
    return shown if entry.get("logprob") is None else {**shown, "logProbability": entry["logprob"]}


def usage(reply: Reply) -> dict[str, Any]:
    counts = {
        "promptTokenCount": reply.prompt_tokens,
        "candidatesTokenCount": reply.completion_tokens,
        "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
    }
    return {**counts, "cachedContentTokenCount": reply.cached_tokens} if reply.cached_tokens else counts


# A reply as Google streams it: server-sent events for `alt=sse`, otherwise one JSON array that grows.


_encode = msgspec.json.Encoder().encode

_SILENT_DELTAS = 64
"""Deltas in a row that show nothing (thoughts that are not wanted, arguments on their way) before a sign of life."""


class GeminiStream:
    def __init__(self, request: Request, reply_id: str) -> None:
        wanted: Wanted = request.echo
        self._head = {"modelVersion": request.model, "responseId": reply_id}
        self._sse = wanted.sse
        self._begun = False
        self._silent = 0
        # Of the other choices no one knows the call yet.
        self._candidates = [Candidate(index, wanted, "" if index else reply_id) for index in range(request.n)]

    def open(self) -> bytes:
        """Google has no opening event; the empty text tells a client that the reply has begun before any of its text is certain."""
        return (b"" if self._sse else b"[") + self.keep_alive()

    def delta(self, delta: Delta) -> bytes:
        shown = self._candidates[delta.index].take(delta)
        if shown is not None:
            self._silent = 0
            return self._chunk([shown])
        self._silent += 1
        return self.keep_alive() if self._silent % _SILENT_DELTAS == 0 else b""

    def keep_alive(self) -> bytes:
        """An empty text: google-genai's chats give up a turn in which a chunk had no candidate or no part."""
        return self._chunk([{"content": {"role": "model", "parts": [{"text": ""}]}, "index": 0}])

    def close(self, reply: Reply) -> bytes:
        rest = [self._candidates[choice.index].rest(choice) for choice in reply.choices]
        early = b"".join(self._chunk([piece]) for candidate in rest for piece in _taken_apart(candidate))
        return early + self._chunk(rest, usageMetadata=usage(reply)) + (b"" if self._sse else b"]")

    def error(self, error: VerbatimError) -> bytes:
        """Without `data:`, as Google sends it: its JavaScript SDK raises what it finds so, and passes over an event."""
        body = _encode({"error": google_error(error)})
        return body if self._sse else self._separator() + body + b"]"

    def _chunk(self, candidates: list[dict[str, Any]], **more: Any) -> bytes:
        body = _encode({"candidates": candidates, **more, **self._head})
        return b"data: " + body + b"\n\n" if self._sse else self._separator() + body

    def _separator(self) -> bytes:
        begun, self._begun = self._begun, True
        return b",\n" if begun else b""


def _taken_apart(candidate: dict[str, Any]) -> list[dict[str, Any]]:
    """All parts but the last, which the candidate keeps, as a candidate each: a chunk tells one thing."""
    content = candidate["content"]
    *early, last = content["parts"]
    content["parts"] = [last]
    return [{"content": {"role": "model", "parts": [part]}, "index": candidate["index"]} for part in early]


# Errors as Google's APIs say them: google.rpc.Status with a status name and details (google.rpc error model, AIP-193).


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


def google_error(error: VerbatimError) -> dict[str, Any]:
    """The error's object, as it stands under `error` in a body and in a stream."""
    fallback = "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL"
    name = _STATUS_NAMES.get(error.status, fallback)
    return {"code": error.status, "message": _message(error), "status": name, "details": _details(error)}


def _message(error: VerbatimError) -> str:
    if not isinstance(error, ContextTooLong):
        return error.message
    # Clients know an overflow by this sentence alone.
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
