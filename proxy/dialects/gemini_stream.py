"""A reply as Google streams it: server-sent events for `alt=sse`, otherwise one JSON array that grows."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.dialects.base import Delta, Reply, Request
from proxy.dialects.gemini_errors import google_error
from proxy.dialects.gemini_reply import Candidate, Wanted, usage
from proxy.errors import VerbatimError

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
