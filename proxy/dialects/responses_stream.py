"""The events of one streamed response."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects.base import Delta, Reply, Request
from proxy.dialects.responses_output import Event, Output
from proxy.dialects.responses_reply import Said, Wanted, ended, response, said_in, tell
from proxy.errors import VerbatimError

_encode = msgspec.json.Encoder().encode

_QUIET_SECONDS = 10.0
"""Longest time without an event while pieces come that nothing can be told of yet."""


class ResponsesStream:
    def __init__(self, request: Request, reply_id: str, created: int) -> None:
        self._wanted: Wanted = request.echo
        self._reply_id, self._created, self._model = reply_id, created, request.model
        self._output: Output = self._wanted.output(reply_id)
        self._number = 0
        self._told_at = time.monotonic()
        self._reasoning = self._text = ""
        self._calls: dict[int, tuple[str, str]] = {}
        # Logprobs belong to the text as a whole: pieces of it do not say which are a call's.
        self._waits = request.top_logprobs is not None

    def open(self) -> bytes:
        begun = self._response("in_progress")
        return self._write([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    def delta(self, delta: Delta) -> bytes:
        events = [] if self._waits else self._take(delta)
        quiet = not events and time.monotonic() - self._told_at > _QUIET_SECONDS
        return self.keep_alive() if quiet else self._write(events)

    def keep_alive(self) -> bytes:
        return self._write([{"type": "response.in_progress", "response": self._response("in_progress")}])

    def close(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        events = tell(self._output, self._rest(choice.message), choice.finish_reason, choice.logprobs or ())
        whole = ended(self._wanted, reply, choice, self._output.items)
        return self._write([*events, {"type": f"response.{whole['status']}", "response": whole}])

    def error(self, error: VerbatimError) -> bytes:
        said = {"code": _failure_code(error), "message": error.message}
        failed = self._response("failed", error=said, output=self._output.items)
        return self._write([{"type": "response.failed", "response": failed}])

    def _take(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            self._reasoning += delta.reasoning
            events += self._output.reasoning(delta.reasoning)
        if delta.content:
            self._text += delta.content
            events += self._output.text(delta.content)
        for call in delta.tool_calls:
            events += self._take_call(call)
        return events

    def _take_call(self, call: Mapping[str, Any]) -> list[Event]:
        position, function = call.get("index", 0), call.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        told = self._calls.get(position, ("", ""))
        self._calls[position] = (told[0] + name, told[1] + arguments)
        return self._output.call(position, name, arguments)

    def _rest(self, message: Mapping[str, Any]) -> Said:
        """What of the message no delta told."""
        whole = said_in(message)
        calls = []
        for position, name, arguments in whole.calls:
            told = self._calls.get(position)
            if told != (name, arguments):
                known = told or ("", "")
                calls.append((position, _after(name, known[0]), _after(arguments, known[1])))
        return Said(_after(whole.reasoning, self._reasoning), _after(whole.text, self._text), calls)

    def _response(self, status: str, **said: Any) -> dict[str, Any]:
        return response(self._wanted, self._reply_id, self._created, self._model, status, **said)

    def _write(self, events: list[Event]) -> bytes:
        written = []
        for event in events:
            self._told_at = time.monotonic()
            kind, number = event["type"], self._number
            self._number += 1
            written.append(f"event: {kind}\ndata: ".encode() + _encode({**event, "sequence_number": number}) + b"\n\n")
        return b"".join(written)


def _after(whole: str, told: str) -> str:
    return whole.removeprefix(told) if whole.startswith(told) else ""


def _failure_code(error: VerbatimError) -> str:
    """The codes that clients know: Codex tells a full context and a broken request by them, and asks again after all others."""
    if error.code == "context_length_exceeded":
        return error.code
    return "server_error" if error.status >= 500 else "invalid_prompt"
