"""Errors of the control side as `{"error": {"code", "message"}}`, with the status and Retry-After they carry."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from proxy.api.answers import json_response
from proxy.errors import VerbatimError

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
