"""The control API as the command line sees it: one request, one JSON answer, one sentence when it fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from cli.refusal import Refusal

TIMEOUT_SECONDS = 30.0
ADMIN, NODE = "VERBATIM_ADMIN_TOKEN", "VERBATIM_NODE_TOKEN"
UNTOLD_RETRY_SECONDS = 5.0
"""When to ask again where the service, or what stands before it, does not say."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    id: str
    kind: str
    data: dict[str, Any]


class HeldBack(Refusal):
    """The service does not take the request now (429), and may in `retry_after_seconds`."""

    def __init__(self, sentence: str, retry_after_seconds: float) -> None:
        super().__init__(sentence)
        self.retry_after_seconds = retry_after_seconds


class Declined(Refusal):
    """The service answered the request, and not as it was wanted. `status` is that of HTTP."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class Control:
    """Asks the service at `VERBATIM_URL` with the token of the first of `variables` that is set, as its admin where nothing else is said.
    A 429 raises `HeldBack`, which is a `Refusal`."""

    def __init__(self, url: str | None = None, token: str | None = None, variables: Sequence[str] = (ADMIN,)) -> None:
        self._url = (url or os.environ.get("VERBATIM_URL") or "http://127.0.0.1:8700").rstrip("/")
        self._variable = next((name for name in variables if os.environ.get(name)), variables[0])
        given = token or os.environ.get(self._variable)
        if not given:
            role = self._variable.split("_")[1].lower()
            raise Refusal(f"no {role} token: set {self._variable} to the one that verbatim serve uses", exit_code=2)
        self._token = given
        self._http: httpx.Client | None = None

    @property
    def url(self) -> str:
        return self._url

    @property
    def token(self) -> str:
        return self._token

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Within the block many requests go over one connection."""
        with httpx.Client() as self._http:
            try:
                yield
            finally:
                self._http = None

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The answer to GET `path`; parameters that are None are left out. Raises `Refusal`."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._ask("GET", path, params=given)

    def text(self, path: str) -> str:
        """The answer to GET `path` where it is no JSON. Raises `Refusal`."""
        return self._answered("GET", path).text

    def fetch(self, path: str) -> bytes:
        """The answer to GET `path` as it is. Raises `Refusal`."""
        return self._answered("GET", path).content

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to POST `path`. Raises `Refusal`."""
        return self._ask("POST", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        """The answer to DELETE `path`. Raises `Refusal`."""
        return self._ask("DELETE", path)

    def lines(self, path: str, body: dict[str, Any], *, silence_seconds: float) -> Iterator[dict[str, Any]]:
        """What POST `path` tells line by line, with at most so long between two. Raises `Refusal`."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/x-ndjson"}
        timeout = httpx.Timeout(TIMEOUT_SECONDS, read=silence_seconds)
        try:
            with httpx.stream("POST", self._url + path, json=body, headers=headers, timeout=timeout) as response:
                if response.is_error:
                    response.read()
                    raise Refusal(complaint(response, self._variable))
                for line in response.iter_lines():
                    yield json.loads(line)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refusal(f"the connection to {self._url} broke off: {error}") from error

    def events(self, path: str, after: str | None, *, silence_seconds: float) -> Iterator[ServerEvent]:
        """The server-sent events of GET `path`, those behind the one of id `after`, as they come; ends with the stream. Raises
        `Declined`, and `Refusal` when the connection breaks or is silent for so long."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "text/event-stream"}
        headers |= {"Last-Event-ID": after} if after else {}
        timeout = httpx.Timeout(TIMEOUT_SECONDS, read=silence_seconds)
        try:
            with httpx.stream("GET", self._url + path, headers=headers, timeout=timeout) as response:
                if response.is_error:
                    response.read()
                    raise Declined(complaint(response, self._variable), response.status_code)
                yield from _server_events(response.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refusal(f"the connection to {self._url} broke off: {error}") from error

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        response = self._answered(method, path, **more)
        try:
            answer: dict[str, Any] = response.json() if response.content else {}
        except ValueError as error:
            raise Refusal(f"what answers at {self._url} is no Verbatim service (set VERBATIM_URL to where it is)") from error
        return answer

    def _answered(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            send = self._http.request if self._http is not None else httpx.request
            response = send(method, self._url + path, headers=headers, timeout=TIMEOUT_SECONDS, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refusal(f"no service at {self._url} (set VERBATIM_URL to where it is): {error}") from error
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise HeldBack(complaint(response, self._variable), retry_after_seconds(response))
        if response.is_error:
            raise Declined(complaint(response, self._variable), response.status_code)
        return response


def _server_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            yield ServerEvent(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}


def complaint(response: httpx.Response, variable: str = ADMIN) -> str:
    """What the service said against the request, in one sentence. `variable` held the token."""
    if response.status_code == httpx.codes.UNAUTHORIZED:
        host = response.request.url.copy_with(path="/", query=None)
        return f"{str(host).rstrip('/')} does not know the token: set {variable} to the one that verbatim serve uses"
    try:
        error = response.json()["error"]
        said, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        said, code = f"{response.request.url} answered {response.status_code}", None
    # vLLM, whose codes are numbers, knows none of the paths of the control side either.
    if response.status_code == httpx.codes.NOT_FOUND and not isinstance(code, str):
        return f"what answers at {response.request.url} is no Verbatim service (set VERBATIM_URL to where it is)"
    return said


def retry_after_seconds(response: httpx.Response) -> float:
    """Seconds from now, between one and a minute: what stands before the service may name a date or any number."""
    try:
        return min(60.0, max(1.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return UNTOLD_RETRY_SECONDS
