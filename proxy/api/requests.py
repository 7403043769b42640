"""What every control route needs first: the process's services, and a caller who may be there.

The routers read `request.app.state.services`, so `create_app` sets that and includes them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException

from proxy.auth import Role, check_local, check_once, credential
from proxy.call import http
from proxy.errors import RequestError, VerbatimError
from proxy.services import Services
from proxy.structure import check_depth


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def admin_only(request: Request) -> None:
    _check(request, Role.ADMIN)


def trainer_only(request: Request) -> None:
    """The trainer, or the admin, who may do all that a trainer may."""
    _check(request, Role.TRAINER)


def node_only(request: Request) -> None:
    """A node, or the admin."""
    _check(request, Role.NODE)


def _check(request: Request, role: Role) -> None:
    """Raises `Unauthorized` or `Forbidden`."""
    services = services_of(request)
    check_once(request.headers.raw)
    try:
        # No ?key= here: URLs end up in logs.
        services.tokens.check(credential(request.headers, {}), role)
    except RequestError as error:
        if services.settings.open:
            return check_local(request.headers)
        services.metrics.refused("control", error.code)
        raise


Served = Annotated[Services, Depends(services_of)]

# Answers in the form that a caller asked for.
#
# JSON by default. `Accept: application/msgpack` gives the same shape as msgpack. `Accept: application/msgpack;arrays=packed`
# gives `token_ids`, `loss_mask`, `logprobs` and the like as bytes: little-endian int32, int8 and float32 (see
# `reconstruct.trajectory`).


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


# Request bodies of the control side: JSON read within the size limit and checked by a pydantic model.
#
# FastAPI's own reading is not used: it answers 422, and refuses a body that lacks a content type.


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
    return await http.read_body(request.receive, limit, services_of(request).settings.body_timeout_seconds)


def _storable(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.msgpack.encode(metadata)
    except (OverflowError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be stored: {error}") from error
    return metadata


Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]
"""Any JSON object whose integers fit 64 bits."""

# Errors of the control side as `{"error": {"code", "message"}}`, with the status and Retry-After they carry.


log = logging.getLogger(__name__)

SHOWN = 5
"""Problems of one request that its message lists."""
CODES = {404: "not_found", 405: "method_not_allowed"}


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in the control side's shape. Harness routes answer theirs before it comes to this."""
    app.add_exception_handler(VerbatimError, _verbatim_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(Exception, _unexpected)


def error_response(error: VerbatimError) -> Response:
    response = _shaped(error.status, error.code, error.message, error.param)
    if error.retry_after_seconds is not None:
        response.headers["retry-after"] = str(max(1, round(error.retry_after_seconds)))
    return response


def describe(error: ValidationError | RequestValidationError) -> str:
    """One sentence: where in the request, what was wrong."""
    problems = error.errors()
    said = "; ".join(_problem(problem["loc"], problem["type"], problem["msg"]) for problem in problems[:SHOWN])
    return said if len(problems) <= SHOWN else f"{said}; and {len(problems) - SHOWN} more"


def _problem(place: tuple[int | str, ...], kind: str, said: str) -> str:
    where = ".".join(str(part) for part in place if part not in ("body", "query", "path"))
    said = "there is no such field" if kind == "extra_forbidden" else said.removeprefix("Value error, ")
    return f"{where}: {said}" if where else said


async def _verbatim_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, VerbatimError)
    return error_response(error)


async def _invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _shaped(400, "bad_request", describe(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "bad_request" if error.status_code < 500 else "internal_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = _shaped(error.status_code, code, message)
    response.headers.update(error.headers or {})
    return response


async def _too_deep(_: Request, error: Exception) -> Response:
    return _shaped(400, "bad_request", "the body is nested too deeply")


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _shaped(500, "internal_error", "an internal error occurred; the log of the service has its cause")


def _shaped(status: int, code: str, message: str, param: str | None = None) -> Response:
    error = {"code": code, "message": message} | ({} if param is None else {"param": param})
    return json_response({"error": error}, status)
