"""The control API as the command line sees it: one request, one JSON answer, one sentence when it fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

from cli.refusal import Refusal

TIMEOUT_SECONDS = 30.0
UNTOLD_RETRY_SECONDS = 5.0
"""When to ask again where the service, or what stands before it, does not say."""


class HeldBack(Refusal):
    """The service does not take the request now (429), and may in `retry_after_seconds`."""

    def __init__(self, sentence: str, retry_after_seconds: float) -> None:
        super().__init__(sentence)
        self.retry_after_seconds = retry_after_seconds


class Control:
    """Asks the service at `VERBATIM_URL` as the admin of `VERBATIM_ADMIN_TOKEN`. A 429 raises `HeldBack`, which is a `Refusal`."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._url = (url or os.environ.get("VERBATIM_URL") or "http://127.0.0.1:8700").rstrip("/")
        self._token = token or os.environ.get("VERBATIM_ADMIN_TOKEN")
        if not self._token:
            raise Refusal("no admin token: set VERBATIM_ADMIN_TOKEN to the one that verbatim serve uses", exit_code=2)

    @property
    def url(self) -> str:
        return self._url

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The answer to GET `path`; parameters that are None are left out. Raises `Refusal`."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._ask("GET", path, params=given)

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
                    raise Refusal(complaint(response))
                for line in response.iter_lines():
                    yield json.loads(line)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refusal(f"the connection to {self._url} broke off: {error}") from error

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            response = httpx.request(method, self._url + path, headers=headers, timeout=TIMEOUT_SECONDS, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Refusal(f"no service at {self._url} (set VERBATIM_URL to where it is): {error}") from error
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise HeldBack(complaint(response), retry_after_seconds(response))
        if response.is_error:
            raise Refusal(complaint(response))
        answer: dict[str, Any] = response.json()
        return answer


def complaint(response: httpx.Response) -> str:
    """What the service said against the request, in one sentence."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered {response.status_code}"


def retry_after_seconds(response: httpx.Response) -> float:
    """Seconds from now, between one and a minute: what stands before the service may name a date or any number."""
    try:
        return min(60.0, max(1.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return UNTOLD_RETRY_SECONDS
