"""The ids of the Responses dialect: each names its call, so that a replayed item finds the reply it comes from.

| what | id |
|---|---|
| response | `resp_<call id>` |
| reasoning, message | `rs_<call id>`, `msg_<call id>`; a further one of the same reply `…_<n>` |
| function, custom, local shell, shell and patch call | `fc_`, `ctc_`, `lsh_`, `sh_`, `apc_` `<call id>_<position>` |
| what answers a call | `call_<call id>_<position>` (see proxy.minting) |
| item of a request that had no such id | `in_<call id>_<number>` |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ITEM = re.compile(r"(rs|msg|fc|ctc|lsh|sh|apc|call)_([0-9a-f]{24})(?:_(\d{1,6}))?")
_RESPONSE = re.compile(r"resp_([0-9a-f]{24})")


@dataclass(frozen=True, slots=True)
class Named:
    """What an item's id says: which call, and for a tool call its position there. `kind` is the id's prefix."""

    kind: str
    call_id: str
    position: int = 0


def response_id(call_id: str) -> str:
    return f"resp_{call_id}"


def answering_call(response: str) -> str | None:
    """The call behind a response's id; None where this service minted no such id."""
    match = _RESPONSE.fullmatch(response)
    return match[1] if match else None


def named(*identifiers: object) -> Named | None:
    """What the first of the ids that this service minted says; None when there is none among them."""
    for identifier in identifiers:
        match = _ITEM.fullmatch(identifier) if isinstance(identifier, str) else None
        if match:
            return Named(match[1], match[2], int(match[3] or 0))
    return None
