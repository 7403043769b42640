"""The messages that a call was asked with, put together from the records of its session."""

from __future__ import annotations

from typing import Any

import msgspec

from reconstruct.records import Call, Forest

_decode = msgspec.json.decode


def messages_of(call: Call, forest: Forest) -> list[Any]:
    """All messages of the request: the parent's, its reply, and the new ones."""
    own: list[Any] = _decode(call.messages)
    if not call.messages_from or call.call_id not in forest:
        return own
    parts = [own]
    for ancestor in forest.lineage(call.node.parent_id):
        parts.append([_decode(ancestor.reply)])
        parts.append(_decode(ancestor.messages))
    return [message for part in reversed(parts) for message in part]
