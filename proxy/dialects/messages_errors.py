"""Errors as Anthropic's API says them: the SDK's exception follows the status, Claude Code also reads type and words."""

from __future__ import annotations

import os
from typing import Any

from proxy.errors import ContextTooLong, VerbatimError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def status_of(error: VerbatimError) -> int:
    """The HTTP status; what may pass is 529 here, and its clients wait for it longer than for a 503."""
    return 529 if error.status == 503 else error.status


def new_request_id() -> str:
    return f"req_{os.urandom(12).hex()}"


def error_body(error: VerbatimError, request_id: str) -> dict[str, Any]:
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": request_id}


def _message(error: VerbatimError) -> str:
    """Its clients know a prompt that does not fit by the vendor's words alone, and shorten it by the numbers in them."""
    if not isinstance(error, ContextTooLong):
        return error.message
    if error.tokens is None or error.window is None:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {error.tokens} tokens > {error.window} maximum"
