"""The response object: what the request asked for, repeated, and what the reply says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import Choice, Reply
from proxy.dialects.responses_ids import response_id
from proxy.dialects.responses_output import Event, Output
from proxy.dialects.responses_tools import Toolbox
from proxy.errors import RequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"

KEPT = (
    *("include", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "reasoning", "safety_identifier", "store", "temperature", "text", "tool_choice"),
    *("top_logprobs", "top_p", "truncation", "user"),
)
"""Body fields that a response repeats or that say how it looks; tools and instructions are kept elsewhere."""


@dataclass(slots=True)
class Wanted:
    """How the reply is to be shown. `fields` are those of the response object that repeat the request."""

    fields: dict[str, Any]
    toolbox: Toolbox
    summary: bool
    sealed: bool
    logprobs: int | None

    def output(self, call_id: str) -> Output:
        return Output(call_id, self.toolbox, summary=self.summary, sealed=self.sealed)


def wanted(body: Mapping[str, Any], tools: Sequence[Any], toolbox: Toolbox) -> Wanted:
    """What the body asks of the response's looks. Raises RequestError for a field of a wrong type."""
    include, reasoning = fields.strings(body, "include"), _reasoning(body)
    top_logprobs = fields.integer(body, "top_logprobs") or 0
    if not 0 <= top_logprobs <= 20:
        raise RequestError("'top_logprobs' must be an integer from 0 to 20", param="top_logprobs")
    repeated = {
        "instructions": fields.text(body, "instructions"),
        "max_output_tokens": fields.positive(body, "max_output_tokens"),
        "max_tool_calls": fields.positive(body, "max_tool_calls"),
        "metadata": fields.mapping(body, "metadata"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is None or fields.flag(body, "parallel_tool_calls"),
        "previous_response_id": fields.text(body, "previous_response_id"),
        "prompt_cache_key": fields.text(body, "prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "safety_identifier": fields.text(body, "safety_identifier"),
        "service_tier": "default",
        "store": is_stored(body),
        "temperature": fields.number(body, "temperature"),
        "text": {"format": {"type": "text"}, **fields.mapping(body, "text")},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": list(tools),
        "top_logprobs": top_logprobs,
        "top_p": fields.number(body, "top_p"),
        "truncation": _one_of(body, "truncation", ("auto", "disabled")) or "disabled",
        "user": fields.text(body, "user"),
    }
    shown_logprobs = top_logprobs if _LOGPROBS in include else None
    return Wanted(repeated, toolbox, reasoning.get("summary") is not None, _SEALED in include, shown_logprobs)


def is_stored(body: Mapping[str, Any]) -> bool:
    return body.get("store") is None or fields.flag(body, "store")


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = fields.mapping(body, "reasoning")
    _one_of(reasoning, "effort", EFFORTS)
    _one_of(reasoning, "summary", _SUMMARIES)
    return reasoning


def _one_of(body: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str | None:
    value = fields.text(body, key)
    if value is not None and value not in allowed:
        raise RequestError(f"'{key}' must be one of {', '.join(allowed)}, not '{value}'", param=key)
    return value


def response(wanted: Wanted, call_id: str, created: int, model: str, status: str, **said: Any) -> dict[str, Any]:
    """The response object; `said` holds output, usage, error and incomplete_details as far as there are any."""
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **wanted.fields,
        **said,
    }


@dataclass(frozen=True, slots=True)
class Said:
    """What a message says, or what of it is still to be told; calls as (position, name, arguments)."""

    reasoning: str
    text: str
    calls: Sequence[tuple[int, str, str]]


def said_in(message: Mapping[str, Any]) -> Said:
    """What a whole chat message says."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(position, function["name"], function["arguments"]) for position, function in enumerate(functions)]
    return Said(message.get("reasoning_content") or "", message.get("content") or "", calls)


def tell(output: Output, said: Said, finish_reason: str, logprobs: Sequence[Any] = ()) -> list[Event]:
    """Takes the rest of a reply into `output`, and ends it."""
    events: list[Event] = []
    if said.reasoning:
        events += output.reasoning(said.reasoning)
    if said.text:
        events += output.text(said.text, logprobs)
    for call in said.calls:
        events += output.call(*call)
    return [*events, *output.finish("incomplete" if finish_reason == "length" else "completed", logprobs)]


def ended(wanted: Wanted, reply: Reply, choice: Choice, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The response object of a reply."""
    cut = choice.finish_reason == "length"
    return response(
        wanted,
        choice.call_id,
        reply.created,
        reply.model,
        "incomplete" if cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=items,
        usage=usage(reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens),
    )


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + completion_tokens,
    }
