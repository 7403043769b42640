"""An engine's HTTP errors as ours, in the words of whichever server it is, and the fields that a server says it does not take."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from proxy.engine.replica import Replica
from proxy.errors import ContextTooLong, EngineBusy, EngineFailed, EngineUnavailable, NotFound, RequestError, VerbatimError


class UnknownRoute(EngineFailed):
    """The engine has no such endpoint. To ask again changes nothing."""

    status = 404
    code = "not_found"
    retry_after_seconds = None


class EngineError(EngineFailed):
    """It answered with an error of its own, not a gateway's."""


def refusal(replica: Replica, path: str, status: int, data: bytes, retry_after: float | None = None) -> VerbatimError:
    """The engine's HTTP error as ours: a 4xx is the caller's fault, the rest the engine's. `retry_after`: seconds that it asks to wait."""
    message, param = read_message(data)
    if status == 404 and message not in _NO_ROUTE and replica.adapter:
        # It was restarted, or the adapter taken out, since it was last visited.
        return EngineUnavailable(f"engine {replica.name} no longer has that version of the adapter {replica.adapter!r}")
    if status == 404 and message not in _NO_ROUTE:
        # A model, mostly: final, for as long as the engine has the models it has.
        return NotFound(f"engine {replica.name}: {message[:300]}", param=param)
    if status in (400, 413, 422) or (status == 403 and find_refused(message, param, _GUARDED)):
        return _context_error(message) if is_context_overflow(message) else RequestError(message, param=param)
    if status in (401, 403):
        # Without the server's words, which may repeat the key.
        return EngineUnavailable(f"engine {replica.name} refuses the service's own key (HTTP {status})")
    if status == 503 and is_pause(message):
        return paused(replica)
    if status in (429, 503):
        busy = f"engine {replica.name} is too busy (HTTP {status}): {message[:300]}"
        return EngineUnavailable(busy) if retry_after is None else EngineBusy(busy, retry_after)
    if status in (404, 405):
        return UnknownRoute(f"engine {replica.name} does not know {path}")
    failed = f"engine {replica.name} failed with HTTP {status}: {message[:300]}"
    return EngineError(failed) if status == 500 else EngineFailed(failed)


class FramesRefused(EngineUnavailable):
    """What answers there does not take the plugin's requests, or knows none. Nothing was sampled."""


_ABOUT_THE_CALL = (408, 413, 429)
"""Refusals that do not depend on what a request is written in."""


def frames_refusal(replica: Replica, path: str, status: int, data: bytes, retry_after: float | None = None) -> VerbatimError:
    """As `refusal`, of a request to the plugin inside vLLM: FramesRefused if it is not in vLLM's own words, with the status inside. Then it
    is a router's or a gateway's that reads JSON alone, or the route is gone."""
    error = refusal(replica, path, status, data, retry_after)
    if status in _ABOUT_THE_CALL or (status >= 500 and status != 501):
        return error
    try:
        told = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = None
    own = told.get("error") if isinstance(told, dict) else None
    return error if isinstance(own, dict) and own.get("code") == status else FramesRefused(error.message)


def is_pause(message: Any) -> bool:
    """Whether an engine says that it takes the call once it is resumed. Source: vLLM 0.33, v1/engine/core.py, which answers so in the
    modes `wait` and `abort` of a pause; before, the call waited in the engine."""
    return isinstance(message, str) and message.startswith("Generation is paused")


def paused(replica: Replica) -> EngineBusy:
    return EngineBusy(f"engine {replica.name} is paused while its weights change", 0.0)


_NO_ROUTE = ("", "{}", "Not Found", "File Not Found")
"""What servers say of a path that they do not have."""

_GUARDED = ("logprobs", "top_logprobs")
"""Fields that OpenAI answers 403 to, for models whose logprobs it keeps to itself."""


def is_context_overflow(message: str) -> bool:
    """Whether vLLM (chat, render, generate), SGLang or llama.cpp says that a prompt is too long."""
    wordings = (
        *("maximum context length", "longer than the maximum model length"),
        *("longer than the model's context length", "exceeds the available context size"),
    )
    return any(wording in message for wording in wordings)


_PROMPT_TOKENS = re.compile(
    r"(?:Input length \(|The input \(|prompt \(length |contains (?:at least )?|resulted in )(\d+)(?:\)| input tokens| tokens)"
)
_WINDOW_TOKENS = re.compile(r"(?:maximum (?:context|model)|model's context) length (?:is |of |\()(\d+)")


def _context_error(message: str) -> ContextTooLong:
    """With the lengths of prompt and window if the engine names both."""
    tokens, window = _PROMPT_TOKENS.search(message), _WINDOW_TOKENS.search(message)
    if tokens is None or window is None:
        return ContextTooLong(message, param="messages")
    return ContextTooLong(message, param="messages", tokens=int(tokens[1]), window=int(window[1]))


# The message of a server's error. OpenAI: `{"error": {"message", "param"}}`; Gemini: the same in a list of one; FastAPI: problems, each
# with `loc` and `msg`, as `detail`; Mistral: those in place of the message.


def read_message(data: bytes) -> tuple[str, str | None]:
    """What the error says, and the field that it names as its cause."""
    try:
        error = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:300].decode("utf-8", "replace"), None
    if isinstance(error, list) and len(error) == 1:
        error = error[0]
    if isinstance(error, dict):
        error = error.get("error", error)
    if not isinstance(error, dict):
        return str(error), None
    message = error.get("message") or error.get("detail") or error
    if isinstance(message, dict):
        message = message.get("detail") or message.get("message") or message
    param = error.get("param")
    return _as_text(message), param if isinstance(param, str) else None


def _as_text(message: Any) -> str:
    if isinstance(message, list) and message and all(isinstance(each, dict) and "msg" in each for each in message):
        return "\n".join(_describe_problem(each) for each in message)
    return str(message)


def _describe_problem(problem: Mapping[str, Any]) -> str:
    where = problem.get("loc")
    parts = [str(part) for part in where if part != "body"] if isinstance(where, list) else []
    return f"{'.'.join(parts)}: {problem['msg']}" if parts else str(problem["msg"])


# Fields that a server does not take. Each has its own words: OpenAI "Unrecognized request argument supplied: x", "Unknown parameter:
# 'x'." and "Unsupported parameter: 'x' is not supported with this model."; pydantic "Extra inputs are not permitted", with x before,
# behind or in a printed `loc`; Gemini 'Unknown name "x": Cannot find field.'; Groq "property 'x' is unsupported"; serde "unknown field
# `x`, expected one of ..."; Python "unexpected keyword argument 'x'"; JSON Schema "Additional properties are not allowed ('x' was
# unexpected)".

_DOES_NOT_TAKE = re.compile(
    r"""
    \b(?:unrecogni[sz]ed | unsupported | extraneous | extra_forbidden)\b
    | (?:\bnot | n['\u2019]t) \s (?:\w+\s)? (?:support(?:ed)? | permit(?:ted)? | allow(?:ed)? | accept(?:ed)? | recogni[sz]ed? | known)\b
    | \b(?:unknown | unexpected | extra) \s (?:\w+\s)?
      (?:names? | fields? | parameters? | arguments? | propert(?:y|ies) | keys? | options? | attributes? | inputs?)\b
    | \bcannot \s find \s field\b
    | \bnot \s an? \s (?:\w+\s)? (?:field | parameter | argument | property | key | option)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_PROPOSES = re.compile(
    r"""
    (?: \bexpected\b | \bdid\syou\smean\b
      | (?<!\bnot\s) (?<!\bnot\sa\s) (?<!\bnot\san\s) \b(?:supported | allowed | valid | permitted | known | available | accepted)\s
        (?:\w+\s)?(?:names? | fields? | parameters? | arguments? | properties | keys? | options?)\b
    ) [^\n]*
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""The fields that a server does take, to the end of the line."""
_NEXT_STATEMENT = re.compile(r"\n(?!\s)|;\s|(?<=\.)\s(?=[A-Z])|\}[,\s]*(?=\{)")
_MOST_READ = 4096


def find_refused(message: str, param: str | None, fields: Collection[str]) -> frozenset[str]:
    """Those of the fields that the server says it does not take. One that is only mentioned, or proposed, does not count."""
    refused: set[str] = set()
    for statement in _NEXT_STATEMENT.split(message[:_MOST_READ]):
        claim = _PROPOSES.sub("", statement)
        if _DOES_NOT_TAKE.search(claim):
            refused.update(field for field in fields if _mentions(claim, field))
    if param is not None and _DOES_NOT_TAKE.search(_PROPOSES.sub("", message[:_MOST_READ])):
        refused.update(field for field in fields if param.removeprefix("body.").partition(".")[0] == field)
    return frozenset(refused)


def _mentions(text: str, field: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(field)}(?![\w-])", text) is not None


def read_retry_after(text: str) -> float | None:
    """The seconds of a Retry-After header, a number or a date; None for anything else."""
    if re.fullmatch(r"\d{1,9}(\.\d*)?", text):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
