"""Sessions taken out and put back as the store holds them, for the description."""

from __future__ import annotations

from typing import Literal

from proxy.api.description.operation import SESSION_ID, Answer, Operation
from proxy.api.description.shape import Shape


class RestoredPart(Shape):
    session_id: str
    outcome: Literal["part", "restored", "present"]
    group: str | None


ARCHIVE = (
    Operation(
        "get",
        "/sessions/{session_id}/records",
        "archive",
        "admin",
        "Records of a session, for an export",
        "Answers msgpack: `session`, `delivered`, `intents`, `records` as the store holds them, and `next_start`.",
        {200: Answer("a part of the session", media="application/msgpack")},
        refusals=(404,),
        parameters={**SESSION_ID, "start": "Number of the first record.", "limit": "Records of one part."},
    ),
    Operation(
        "post",
        "/sessions/{session_id}/records",
        "archive",
        "admin",
        "Put a session back, for an import",
        "Takes msgpack: a part as an export gave it. The last part closes the session.",
        {200: Answer("taken", RestoredPart, {"session_id": "first", "outcome": "restored", "group": None})},
        dict,
        refusals=(408, 409, 413),
        parameters=SESSION_ID,
        body_media="application/msgpack",
    ),
)
