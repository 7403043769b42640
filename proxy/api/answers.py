"""Answers in the form that a caller asked for.

JSON by default. `Accept: application/msgpack` gives the same shape as msgpack. `Accept: application/msgpack;arrays=packed`
gives `token_ids`, `loss_mask`, `logprobs` and the like as bytes: little-endian int32, int8 and float32 (see
`reconstruct.trajectory`).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
from fastapi import Request, Response

MSGPACK = "application/msgpack"
PACKED = "application/msgpack;arrays=packed"


class Form(Enum):
    JSON = "application/json"
    MSGPACK = MSGPACK
    PACKED = PACKED

    @property
    def arrays(self) -> str:
        """What `as_wire` and its like call it: "list" or "bytes"."""
        return "bytes" if self is Form.PACKED else "list"


def form_of(request: Request) -> Form:
    """The first form of the Accept header that is known here."""
    for choice in request.headers.get("accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in choice.split(";"))
        if kind in (MSGPACK, "application/x-msgpack"):
            return Form.PACKED if "arrays=packed" in parameters else Form.MSGPACK
        if kind == "application/json":
            return Form.JSON
    return Form.JSON


def answer(content: Any, form: Form, status: int = 200) -> Response:
    encode = msgspec.json.encode if form is Form.JSON else msgspec.msgpack.encode
    return Response(encode(content), status, media_type=form.value)


def json_response(content: Any, status: int = 200) -> Response:
    return answer(content, Form.JSON, status)
