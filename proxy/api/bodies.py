"""Request bodies of the control side: JSON read within the size limit and checked by a pydantic model.

FastAPI's own reading is not used: it answers 422, and refuses a body that lacks a content type.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from proxy import limits
from proxy.api.access import services_of
from proxy.api.errors import describe
from proxy.errors import RequestError
from proxy.structure import check_depth


class Body(BaseModel):
    """No unknown field, no coercion of one type into another."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


T = TypeVar("T", bound=Body)


def body_of(kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """A dependency that gives the request's body as `kind`. An empty body counts as `{}`."""

    async def read(request: Request) -> T:
        raw = await read_body(request, services_of(request).settings.max_body_bytes)
        check_depth(raw)
        try:
            return kind.model_validate_json(raw if raw.strip() else b"{}")
        except ValidationError as error:
            raise RequestError(describe(error)) from error

    return read


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises TooLarge for one of more than `limit` bytes, RequestTimeout for one that does not come in time."""
    return await limits.read_body(request.receive, limit, services_of(request).settings.body_timeout_seconds)


def _storable(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.msgpack.encode(metadata)
    except (OverflowError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be stored: {error}") from error
    return metadata


Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]
"""Any JSON object whose integers fit 64 bits."""
