"""One line in the log for each call: who, what became of it and how long it took. Never a word or token of what was said.

Every field is bounded, also where a harness chose it, so the line is. The fields are the record's `fields`, for a formatter that
writes them apart; its message says the most important ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from proxy.call_notes import CallNotes

log = logging.getLogger(__name__)

_LONGEST = 200
"""Characters of a text that a caller chose."""
_REQUEST_IDS = ("x-request-id", "x-client-request-id", "request-id")
"""Headers in which clients and what stands between them and the service name a request."""

Field = str | int | float | bool | None


def log_call(notes: CallNotes) -> None:
    """At level info; a call that failed by no fault of its harness at warning."""
    fields = fields_of(notes)
    level = logging.WARNING if notes.outcome != "aborted" and (notes.http_status or 0) >= 500 else logging.INFO
    log.log(level, "call %s", _line(fields), extra={"fields": {"event": "call", **fields}})


def fields_of(notes: CallNotes) -> dict[str, Field]:
    """What is known of the call; None where it did not come so far."""
    turn, reply, replica = notes.turn, notes.reply, notes.turn.replica if notes.turn else None
    now = time.perf_counter()
    return {
        "outcome": notes.outcome,
        "code": notes.code or None,
        "http_status": notes.http_status,
        "session_id": turn.session_id if turn else None,
        "call_id": turn.call_ids[0] if turn else None,
        "request_id": next((_cut(notes.headers[name]) for name in _REQUEST_IDS if name in notes.headers), None),
        "trace_id": notes.trace.trace_id if notes.trace else None,
        "dialect": notes.dialect,
        "model": _cut(turn.request.model) if turn else None,
        "stream": turn.request.stream if turn else None,
        "api": replica.api if replica else None,
        "replica": replica.name if replica else None,
        "finish_reason": _cut(reply.choices[0].finish_reason) if reply and reply.choices else None,
        "choices": turn.request.n if turn else None,
        "prompt_tokens": reply.prompt_tokens if reply else None,
        "sampled_tokens": reply.completion_tokens if reply else None,
        "seconds": round(now - notes.started, 4),
        "first_token_seconds": round(notes.first_token - notes.started, 4) if notes.first_token is not None else None,
        "engine_seconds": round(turn.engine_seconds, 4) if turn else None,
    }


def attributes_of(notes: CallNotes) -> dict[str, str | int | float | list[str]]:
    """The same for a trace, by OpenTelemetry's names where it has some (semantic conventions for generative AI and HTTP)."""
    fields = fields_of(notes)
    named = {f"verbatim.{name}": fields[name] for name in _OUR_OWN} | {theirs: fields[ours] for theirs, ours in _THEIRS.items()}
    found: dict[str, str | int | float | list[str]] = {name: value for name, value in named.items() if value is not None}
    if notes.turn is not None:
        info = notes.turn.tree.info
        kept = {"verbatim.group_id": info.group_id, "verbatim.task_id": info.task_id, "verbatim.role": notes.turn.purpose.role}
        found |= {name: value for name, value in kept.items() if value}
        found["gen_ai.operation.name"] = "text_completion" if notes.dialect == "completions" else "chat"
    if notes.reply is not None:
        found["gen_ai.response.finish_reasons"] = [_cut(choice.finish_reason) for choice in notes.reply.choices]
    return found


_OUR_OWN = ("outcome", "session_id", "call_id", "request_id", "dialect", "stream", "api", "replica", "engine_seconds")
_THEIRS: Mapping[str, str] = {
    "gen_ai.request.model": "model",
    "gen_ai.request.choice.count": "choices",
    "gen_ai.response.id": "call_id",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "sampled_tokens",
    "http.response.status_code": "http_status",
    "error.type": "code",
}


def _line(fields: Mapping[str, Field]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def _cut(text: str) -> str:
    """Its beginning, on one line and without blanks, so that one field cannot pass for two."""
    shown = "".join(letter if letter.isprintable() and not letter.isspace() else "_" for letter in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}..."
