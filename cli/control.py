"""The control API as commands use it: `contract.client`, with every failure turned into a one-sentence `CommandError`."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.refusal import CommandError
from contract.client import ONCE, ServiceClient, check_token
from contract.errors import HeldBack, NoAnswer, ServiceError

TIMEOUT_SECONDS = 30.0
ADMIN, NODE = "VERBATIM_ADMIN_TOKEN", "VERBATIM_NODE_TOKEN"
HEALTH = "/healthz"
GATEWAY_ERRORS = (502, 503, 504)
"""Statuses of what stands before a service that it cannot reach. The service's own 503 gives a reason."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    id: str
    kind: str
    data: dict[str, Any]


class RequestFailed(CommandError):
    """The service did not fulfil a request, and `error` says how. `status` is the HTTP status, None without an answer."""

    def __init__(self, sentence: str, error: ServiceError) -> None:
        super().__init__(sentence)
        self.error = error
        self.status = error.status

    @property
    def is_final(self) -> bool:
        """Whether the service will never accept the request."""
        return self.status is not None and self.status < 500 and not isinstance(self.error, HeldBack)


class CommandClient:
    """Requests to the service at `url` (default: VERBATIM_URL, then http://127.0.0.1:8700), authenticated with `token` or with the first
    of the environment `variables` that is set, itself or as `<variable>_FILE`. Requests are not retried.

    Every method raises `RequestFailed`."""

    timeout_seconds = TIMEOUT_SECONDS
    retry = ONCE
    retry_seconds = 0.0

    def __init__(self, url: str | None = None, token: str | None = None, variables: Sequence[str] = (ADMIN,)) -> None:
        self.url = (url or os.environ.get("VERBATIM_URL") or "http://127.0.0.1:8700").rstrip("/")
        self._variable, found = find_token(variables)
        self.token = token or found
        if not self.token:
            role = self._variable.split("_")[1].lower()
            raise CommandError(f"no {role} token: set {self._variable} to the one that verbatim serve uses", exit_code=2)
        try:
            if httpx.URL(self.url).scheme not in ("http", "https"):
                raise httpx.InvalidURL("it does not start with http:// or https://")
            self._service = ServiceClient(
                self.url, self.token, timeout_seconds=self.timeout_seconds, retry_seconds=self.retry_seconds
            )
        except httpx.InvalidURL as error:
            raise CommandError(f"{self.url!r} is not the URL of a service (set VERBATIM_URL): {error}", exit_code=2) from error
        self.close = weakref.finalize(self, self._service.close)

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON answer to GET `path`; parameters that are None are left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._request_json("GET", path, params=given or None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request_json("POST", path, body=body)

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request_json("PUT", path, body=body)

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request_json("PATCH", path, body=body)

    def delete(self, path: str) -> dict[str, Any]:
        return self._request_json("DELETE", path)

    def check_health(self) -> httpx.Response:
        """The answer of a service that is alive."""
        response = self.fetch(HEALTH)
        try:
            named = response.json()["service"]
        except (ValueError, KeyError, TypeError):
            named = None
        if named != "verbatim":
            raise CommandError(self._describe_stranger(HEALTH, response.status_code))
        return response

    def fetch(self, path: str) -> httpx.Response:
        """The answer to GET `path`, whatever its content type."""
        return self._request("GET", path)

    def stream_lines(self, path: str, body: dict[str, Any], *, silence_seconds: float) -> Iterator[dict[str, Any]]:
        """The JSON lines that POST `path` streams, at most `silence_seconds` apart."""
        with self._translate_errors(path):
            lines = self._service.stream(
                "POST", path, body=body, accept="application/x-ndjson", silence_seconds=silence_seconds
            )
            for line in lines:
                yield json.loads(line)

    def stream_events(self, path: str, after: str | None, *, silence_seconds: float) -> Iterator[ServerEvent]:
        """The server-sent events of GET `path` that follow the one with id `after`, at most `silence_seconds` apart."""
        headers = {"Last-Event-ID": after} if after else {}
        with self._translate_errors(path):
            lines = self._service.stream(
                "GET", path, accept="text/event-stream", headers=headers, silence_seconds=silence_seconds
            )
            yield from _parse_events(lines)

    def _request_json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        response = self._request(method, path, **more)
        try:
            answer: dict[str, Any] = response.json() if response.content else {}
        except ValueError as error:
            raise CommandError(self._describe_stranger(path, response.status_code)) from error
        return answer

    def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        with self._translate_errors(path):
            return self._service.request(method, path, retry=self.retry, **more)

    @contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except NoAnswer as error:
            cause = error.__cause__ or error
            missing = f"no service at {self.url} (set VERBATIM_URL to where it is): {cause}"
            raise RequestFailed(f"the connection to {self.url} broke: {cause}" if error.lost else missing, error) from error
        except ServiceError as error:
            raise RequestFailed(self._explain(path, error), error) from error

    def _explain(self, path: str, error: ServiceError) -> str:
        if error.status == httpx.codes.UNAUTHORIZED:
            return f"{self.url} does not know the token: set {self._variable} to the one that verbatim serve uses"
        # An engine has none of these paths either; vLLM's error codes are numbers.
        unknown = error.status == httpx.codes.NOT_FOUND and (not error.code or error.code.isdecimal())
        if error.status is not None and (unknown or (error.status in GATEWAY_ERRORS and not error.reason)):
            return self._describe_stranger(path, error.status)
        return error.reason or (f"{self.url}{path} answered {error.status}" if error.status else str(error))

    def _describe_stranger(self, path: str, status: int) -> str:
        """Why something other than a service's control side answered. /healthz tells whether a service is behind it."""
        if path != HEALTH and self._reaches_service():
            return (
                f"{path} is not served at {self.url} (status {status}), though a Verbatim service answers there: "
                "route this path in the ingress or gateway before it, or set VERBATIM_URL to the control side"
            )
        if status in GATEWAY_ERRORS:
            return (
                f"{self.url}{path} answered {status}, but no Verbatim service did: "
                "an ingress or load balancer without a service that is ready behind it, or another program"
            )
        return f"what answers at {self.url}{path} is no Verbatim service (set VERBATIM_URL to where it is)"

    def _reaches_service(self) -> bool:
        try:
            self.check_health()
        except CommandError:
            return False
        return True


def find_token(variables: Sequence[str] = (ADMIN,)) -> tuple[str, str]:
    """The first of the variables that has a token, itself or in the file that `<variable>_FILE` names, and the token; the first variable
    and "" if none has. Raises `CommandError` (exit code 2) if the file cannot be read, or for what cannot be sent as a token."""
    for name in variables:
        # A file's content in a variable, as a Secret's often is, ends in a line end.
        if token := os.environ.get(name, "").strip():
            return name, _check_token(name, token)
        if path := os.environ.get(f"{name}_FILE"):
            try:
                lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise CommandError(f"{name}_FILE {path} cannot be read: {error}", exit_code=2) from error
            # As the service reads it: a token per line.
            if tokens := [line for line in lines if line and not line.startswith("#")]:
                return f"{name}_FILE", _check_token(f"{name}_FILE", tokens[0])
    return variables[0], ""


def _check_token(variable: str, token: str) -> str:
    try:
        return check_token(token)
    except ValueError as error:
        raise CommandError(f"{variable} holds no token: {error}", exit_code=2) from error


def _parse_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            yield ServerEvent(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}
