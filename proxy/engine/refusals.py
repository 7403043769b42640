"""Refusals: what an engine's HTTP errors mean to the caller."""

from __future__ import annotations

import re

import msgspec

from proxy.engine.replica import Replica
from proxy.errors import ContextTooLong, EngineFailed, EngineUnavailable, NotFound, RequestError, VerbatimError


class UnknownRoute(EngineFailed):
    """The engine has no such endpoint."""


def refusal(replica: Replica, path: str, status: int, data: bytes) -> VerbatimError:
    """The engine's HTTP error as ours: its 4xx is the caller's to mend, the rest is the engine's fault."""
    message, param = _message(data)
    if status == 404 and param == "model":
        return NotFound(message, param="model")
    if status in (400, 413, 422):
        if is_context_overflow(message):
            return _too_long(message)
        return RequestError(message, param=param)
    if status in (401, 403):
        return EngineUnavailable(f"engine {replica.name} refuses the service's own key (HTTP {status})")
    if status in (429, 503):
        return EngineUnavailable(f"engine {replica.name} is too busy (HTTP {status}): {message[:300]}")
    if status in (404, 405):
        return UnknownRoute(f"engine {replica.name} does not know {path}")
    return EngineFailed(f"engine {replica.name} failed with HTTP {status}: {message[:300]}")


def is_context_overflow(message: str) -> bool:
    """vLLM's wording for a prompt that does not fit, on its chat, render and generate endpoints, SGLang's and llama.cpp's."""
    wordings = (
        *("maximum context length", "longer than the maximum model length"),
        *("longer than the model's context length", "exceeds the available context size"),
    )
    return any(wording in message for wording in wordings)


_PROMPT_TOKENS = re.compile(
    r"(?:Input length \(|The input \(|prompt \(length |contains (?:at least )?|resulted in )(\d+)(?:\)| input tokens| tokens)"
)
_WINDOW_TOKENS = re.compile(r"(?:maximum (?:context|model)|model's context) length (?:is |of |\()(\d+)")


def _too_long(message: str) -> ContextTooLong:
    """With the prompt's tokens and the window where the engine names both."""
    tokens, window = _PROMPT_TOKENS.search(message), _WINDOW_TOKENS.search(message)
    if tokens is None or window is None:
        return ContextTooLong(message, param="messages")
    return ContextTooLong(message, param="messages", tokens=int(tokens[1]), window=int(window[1]))


def _message(data: bytes) -> tuple[str, str | None]:
    try:
        error = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:300].decode("utf-8", "replace"), None
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error), error.get("param")
    return str(error), None
