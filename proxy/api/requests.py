"""What all control routes share: role checks, parameters, request bodies, response encodings and error responses.

Handlers read `request.app.state.services`, which `create_app` sets, and return bytes they encoded themselves: the models named in
`responses=` describe an answer in the OpenAPI document and never validate it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive

from proxy.auth import Role, check_local, check_once, credential
from proxy.call import http
from proxy.dialects.fields import check_depth
from proxy.errors import NotFound, RequestError, VerbatimError
from proxy.projects import TOKEN
from proxy.services import Services
from proxy.store.projects import Project

log = logging.getLogger(__name__)


def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def require_admin(request: Request) -> None:
    _require(request, Role.ADMIN)


def require_trainer(request: Request) -> None:
    """Admit a trainer, or the admin, who may do whatever a trainer may."""
    _require(request, Role.TRAINER)


def require_node(request: Request) -> None:
    """Admit a node or the admin."""
    _require(request, Role.NODE)


async def require_opener(request: Request) -> Project | None:
    """Admit who may open sessions: the admin (None), or a project for itself."""
    services = get_services(request)
    secret = credential(request.headers, {})
    if secret is None or not secret.startswith(TOKEN):
        _require(request, Role.ADMIN)
        return None
    check_once(request.headers.raw)
    try:
        return await services.projects.admit(secret, TOKEN)
    except RequestError as error:
        services.metrics.count_refusal("control", error.code)
        raise


Opener = Annotated[Project | None, Depends(require_opener)]


async def require_owner(
    request: Request, session_id: Annotated[str, Path(description="The session's id.")], opener: Opener
) -> None:
    """Admit the admin, and the session's own project. To another project there is no such session."""
    if opener is not None:
        state = await get_services(request).sessions.load(session_id)
        if state is None or state.info.project != opener.name:
            raise NotFound(f"there is no session {session_id}")


def _require(request: Request, role: Role) -> None:
    """Raises `Unauthorized` or `Forbidden`."""
    services = get_services(request)
    check_once(request.headers.raw)
    try:
        # ?key= is not accepted here: URLs end up in logs.
        services.tokens.check(credential(request.headers, {}), role)
    except RequestError as error:
        if services.settings.open:
            return check_local(request.headers)
        services.metrics.count_refusal("control", error.code)
        raise


Served = Annotated[Services, Depends(get_services)]
SessionId = Annotated[str, Path(description="The session's id.")]
PageSize = Annotated[int, Query(ge=1, le=1000, description="Entries per page.")]
PageCursor = Annotated[str | None, Query(description="`cursor` of the previous page.")]


# Request bodies: JSON, read within the size limit and checked by a pydantic model. FastAPI's own parsing is not used: it answers 422 and
# rejects a body that has no content type.


class Body(BaseModel):
    """The JSON of a request or an answer: no unknown fields, no coercion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


T = TypeVar("T")
SMALL_BYTES = 2**16
"""Bodies up to this size are parsed on the event loop."""


@dataclass(frozen=True)
class JsonBody(Generic[T]):
    """Reads a request body; depend on `read` or `read_raw`. `model` is a pydantic model or a dataclass of `contract`; the OpenAPI document
    takes the body's schema from it."""

    model: type[T]

    def __post_init__(self) -> None:
        # Before the first request, and before there are threads: it reads source.
        read_adapter(cast(Hashable, self.model))

    async def read(self, request: Request) -> T:
        """The body as `model`. An empty body counts as `{}`."""
        return await parse_aside(await self.read_raw(request), self._parse)

    async def read_raw(self, request: Request) -> bytes:
        """The body's bytes, for a caller that validates them itself."""
        raw = await read_body(request, get_services(request).settings.max_body_bytes)
        await parse_aside(raw, check_depth)
        return raw

    def _parse(self, raw: bytes) -> T:
        try:
            adapter: TypeAdapter[T] = read_adapter(cast(Hashable, self.model))
            return adapter.validate_json(raw if raw.strip() else b"{}")
        except ValidationError as error:
            raise RequestError(describe(error)) from error


async def parse_aside(raw: bytes, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a body: in a thread where it is large, so that takes, heartbeats and calls go on meanwhile."""
    return parse(raw) if len(raw) <= SMALL_BYTES else await asyncio.to_thread(parse, raw)


@cache
def read_adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


async def read_body(request: Request, limit: int) -> bytes:
    """Raises `TooLarge` for a body of more than `limit` bytes, `RequestTimeout` for one that does not arrive in time."""
    http.refuse_encoding(request.headers.get("content-encoding", ""))
    return await http.read_body(request.receive, limit, get_services(request).limits.body_timeout_seconds)


@contextlib.asynccontextmanager
async def watch_disconnect(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that is done once the caller has hung up. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()


# Response encodings: JSON unless the caller accepts msgpack.


MSGPACK = "application/msgpack"
PACKED = "application/msgpack;arrays=packed"
ENCODINGS = (
    f"With `Accept: {MSGPACK}` the same as msgpack; with `{PACKED}` arrays of numbers are bytes: little-endian int32 (`token_ids`, "
    "`prompt_ids`, `completion_ids`), int8 (`loss_mask`) and float32 (`logprobs`)."
)
"""For the OpenAPI document; see `reconstruct.trajectory`."""


class Encoding(Enum):
    JSON = "application/json"
    MSGPACK = MSGPACK
    PACKED = PACKED

    @property
    def arrays(self) -> str:
        """The `arrays` argument of the `as_wire` functions: "list" or "bytes"."""
        return "bytes" if self is Encoding.PACKED else "list"


def choose_form(request: Request) -> Encoding:
    """The first supported form in the Accept header; JSON if there is none."""
    for choice in request.headers.get("accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in choice.split(";"))
        if kind in (MSGPACK, "application/x-msgpack"):
            return Encoding.PACKED if "arrays=packed" in parameters else Encoding.MSGPACK
        if kind == "application/json":
            return Encoding.JSON
    return Encoding.JSON


def encode_each(items: Iterable[Any], form: Encoding) -> list[msgspec.Raw]:
    """The items encoded one by one, to be encoded in a response: an encoder holds Python's lock until it returns."""
    encode = msgspec.json.encode if form is Encoding.JSON else msgspec.msgpack.encode
    return [msgspec.Raw(encode(item)) for item in items]


def encode_response(content: Any, form: Encoding, status: int = 200) -> Response:
    encode = msgspec.json.encode if form is Encoding.JSON else msgspec.msgpack.encode
    return Response(encode(content), status, media_type=form.value)


def json_response(content: Any, status: int = 200) -> Response:
    return encode_response(content, Encoding.JSON, status)


# Error responses.


UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls it, in a model and in a dataclass."""
MAX_PROBLEMS = 5
"""Validation problems listed in one message."""
CODES = {404: "not_found", 405: "method_not_allowed"}


class ErrorText(Body):
    code: str
    """A constant for programs to match on."""
    message: str
    """The problem, including the offending value."""
    param: str | None = None
    """The offending field."""


class ErrorBody(Body):
    """Every error of the control API."""

    error: ErrorText


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error as an `ErrorBody`, with the status and Retry-After that the error carries."""
    for kind in (VerbatimError, RequestValidationError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, _handle_error)


def describe(error: ValidationError | RequestValidationError) -> str:
    """One sentence that names each offending field and its problem."""
    problems = error.errors()
    text = "; ".join(_describe_problem(problem["loc"], problem["type"], problem["msg"]) for problem in problems[:MAX_PROBLEMS])
    return text if len(problems) <= MAX_PROBLEMS else f"{text}; and {len(problems) - MAX_PROBLEMS} more"


def _describe_problem(location: tuple[int | str, ...], kind: str, message: str) -> str:
    field = ".".join(str(part) for part in location if part not in ("body", "query", "path"))
    message = "there is no such field" if kind in UNKNOWN_FIELD else message.removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


async def _handle_error(request: Request, error: Exception) -> Response:
    match error:
        case VerbatimError(retry_after_seconds=seconds):
            retry = {} if seconds is None else {"retry-after": str(max(1, round(seconds)))}
            return _error_response(error.status, error.code, error.message, error.param, headers=retry)
        case RequestValidationError():
            return _error_response(400, "bad_request", describe(error))
        case HTTPException(status_code=status, headers=headers):
            code = CODES.get(status, "bad_request" if status < 500 else "internal_error")
            return _error_response(status, code, f"{request.method} {request.url.path}: {error.detail}", headers=headers)
        case RecursionError():
            return _error_response(400, "bad_request", "the body is nested too deeply")
        case _:
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
            return _error_response(500, "internal_error", "an internal error occurred; the service's log has the cause")


def _error_response(
    status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    error = {"code": code, "message": message} | ({} if param is None else {"param": param})
    response = json_response({"error": error}, status)
    response.headers.update(headers or {})
    return response
