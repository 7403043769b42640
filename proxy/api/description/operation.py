"""One endpoint as the description has it: who may call it, what it is for, takes and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

JSON = "application/json"
MSGPACK = (
    "With `Accept: application/msgpack` the same as msgpack; with `application/msgpack;arrays=packed` arrays of numbers are bytes: "
    "little-endian int32 (`token_ids`, `prompt_ids`, `completion_ids`), int8 (`loss_mask`) and float32 (`logprobs`)."
)
PAGE = {"limit": "Entries of one page.", "cursor": "`cursor` of the page before."}
SESSION_ID = {"session_id": "The session's id."}

Who = Literal["admin", "trainer", "node", "session", "anyone"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one status means. `model` None: a body of another kind than JSON, or none where `media` is empty."""

    said: str
    model: type[BaseModel] | None = None
    example: Any = None
    media: str = JSON


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. `body` is checked by its model, or any JSON object where it is `dict`; `refusals` are statuses of errors that it may
    have beside those of everybody."""

    method: str
    path: str
    group: str
    who: Who
    title: str
    said: str
    answers: Mapping[int, Answer]
    body: type[BaseModel] | type[dict[str, Any]] | None = None
    example: Any = None
    refusals: Sequence[int] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Name in path or query -> what it is."""
    body_media: str = JSON
