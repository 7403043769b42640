"""Ids that the service mints into its replies, so that a replayed reply names the call it came from."""

from __future__ import annotations

import base64
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any

from proxy.dialects.base import Choice, Delta
from proxy.engine.base import Sampled

_SEAL = b"verbatim1:"
_CALL_ID_LENGTH = 24
_LONGEST_REASONING = 2**24
"""Bytes; what a seal may unfold to."""


def new_call_id() -> str:
    """24 hex digits, ordered by time of minting: 12 of milliseconds, 12 random."""
    return f"{int(time.time() * 1000):012x}{os.urandom(6).hex()}"


def tool_call_id(call_id: str, position: int) -> str:
    """`call_<call id>_<position>`: reconstruct.messages.minted_call_ids reads it back."""
    return f"call_{call_id}_{position}"


def seal(call_id: str, reasoning: str = "") -> str:
    """What a vendor's client carries along unread and brings back (a thinking signature, encrypted reasoning): the call's name,
    and the reasoning for clients that drop its text. Standard base64, as clients check."""
    return base64.b64encode(_SEAL + call_id.encode() + zlib.compress(reasoning.encode("utf-8", "replace"))).decode()


def unseal(sealed: Any) -> tuple[str, str] | None:
    """(call id, reasoning) of a seal; None for anything else, as another service's signature."""
    if not isinstance(sealed, str):
        return None
    try:
        content = base64.b64decode(sealed.encode(), validate=True)
        if not content.startswith(_SEAL):
            return None
        call_id = content[len(_SEAL) : len(_SEAL) + _CALL_ID_LENGTH].decode()
        opened = zlib.decompressobj().decompress(content[len(_SEAL) + _CALL_ID_LENGTH :], _LONGEST_REASONING)
        return call_id, opened.decode()
    except (ValueError, zlib.error):
        return None


def minted_delta(delta: Delta, call_ids: Sequence[str]) -> Delta:
    """The delta with tool-call ids that name its call; `call_ids` holds one per choice."""
    if delta.tool_calls:
        call_id = call_ids[delta.index]
        delta.tool_calls = [
            {**call, "id": tool_call_id(call_id, call.get("index", 0))} if call.get("id") else call for call in delta.tool_calls
        ]
    return delta


def minted_choice(sampled: Sampled, call_ids: Sequence[str], *, forced_tool: bool) -> Choice:
    """The choice as the harness gets it: ids minted, finish reason in the chat words. A tool that the request forced by name
    ends with "stop"; a reply the engine cut short reads as cut by length."""
    call_id = call_ids[sampled.index]
    message = dict(sampled.message)
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [{**call, "id": tool_call_id(call_id, at)} for at, call in enumerate(calls)]
    finish_reason = sampled.finish_reason
    if calls and finish_reason == "stop" and not forced_tool:
        finish_reason = "tool_calls"
    if finish_reason == "abort":
        finish_reason = "length"
    tokens = len(sampled.token_ids or ())
    return Choice(
        sampled.index,
        call_id,
        message,
        finish_reason,
        tokens,
        logprobs=sampled.logprob_content,
        stop_reason=sampled.stop_reason,
        token_ids=sampled.token_ids or (),
    )
