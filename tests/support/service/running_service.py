"""The real service in a thread of its own, over a real Redis, and one harness session of it as the openai SDK sees it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import uvicorn
from openai import OpenAI
from pydantic import SecretStr

from proxy.app import Adding, create_app
from proxy.limits import ProcessLimits
from proxy.settings import Settings
from tests.support.service import plain_http
from tests.support.service.prompt_server import PromptServer
from tests.support.service.verbatim_process import ADMIN, NODE, TRAINER, wait_until


class RunningService:
    """`create_app(settings, *adding)` on a free port; used in a `with` block. Settings and limits are keyword arguments. `protocol`:
    uvicorn's for HTTP. `send_bytes`: how much the system takes of an answer before the client does, or as much as it likes.
    `grace_seconds`: what answers that have no end are given when it ends."""

    def __init__(
        self,
        engine: str | list[str],
        redis_url: str | None,
        *,
        adding: Sequence[Adding] = (),
        protocol: Any = "auto",
        send_bytes: int | None = None,
        grace_seconds: int = 5,
        **settings: Any,
    ) -> None:
        self.adding = adding
        self._port = 0
        engines = [engine] if isinstance(engine, str) else engine
        tokens = {"admin_token": SecretStr(ADMIN), "trainer_token": SecretStr(TRAINER), "node_token": SecretStr(NODE)}
        # A service serves once it has met its engines, and after a while also without them: on a slow machine too early for a test.
        kept = {**tokens, "drain_seconds": 2.0, "engine_connect_seconds": 60.0, **settings}
        self.limits = ProcessLimits(
            **{field.name: kept.pop(field.name) for field in fields(ProcessLimits) if field.name in kept}
        )
        self.settings = Settings(engine=engines, redis=redis_url, **kept)
        self.url = ""
        self._protocol, self._send_bytes, self._grace_seconds = protocol, send_bytes, grace_seconds
        self._control = httpx.Client(verify=False, timeout=120)
        self._sessions: list[Session] = []

    def on(self, port: int) -> Self:
        """To be entered instead: where another service was."""
        self._port = port
        return self

    def __enter__(self) -> Self:
        listener = socket.socket()
        # Where another service was a moment ago, some of its connections still are.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._send_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_bytes)
        listener.bind(("127.0.0.1", self._port))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            create_app(self.settings, *self.adding, limits=self.limits),
            http=self._protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=self._grace_seconds,
            # httpx lets idle connections go after five seconds; a server that does so too may hang up on the next request.
            timeout_keep_alive=3600,
        )
        self._server = PromptServer(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, name="service")
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), 60, "the service has started")
        assert self._server.started, "the service could not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        for session in self._sessions:
            session.client.close()
        self._server.end()
        self._thread.join(120)
        assert not self._thread.is_alive(), "the service did not stop"

    def request(
        self, method: str, path: str, token: str = ADMIN, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        given = {"Authorization": f"Bearer {token}", **(headers or {})}
        return self._control.request(method, self.url + path, headers=given, **more)

    def await_ready(self, seconds: float = 120) -> None:
        wait_until(lambda: self.request("GET", "/readyz").status_code == 200, seconds, "ready")

    def session(self, *, max_retries: int = 0, **fields: Any) -> Session:
        self._sessions.append(Session(self, max_retries, fields))
        return self._sessions[-1]


class Session:
    """One session and its harness, which knows nothing but the openai SDK, a base URL and a key."""

    def __init__(self, service: RunningService, max_retries: int, fields: dict[str, Any]) -> None:
        created = service.request("POST", "/sessions", json=fields)
        assert created.status_code == 201, created.text
        answer = created.json()
        self._service = service
        self.session_id: str = answer["session_id"]
        self.base_url: str = answer["base_urls"]["openai"]
        self.api_key: str = answer["api_key"]
        # Nothing here speaks TLS, and reading the certificates would take a tenth of a second per client.
        http = httpx.Client(verify=False, timeout=120)
        self.client = OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=max_retries, http_client=http)

    def ask(self, messages: list[Any] | str, **fields: Any) -> Any:
        """The SDK's answer; a string asks one user question."""
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self.client.chat.completions.create(**{"model": "policy", **fields}, messages=asked)

    def answer(self, messages: list[Any] | str, **fields: Any) -> dict[str, Any]:
        """The assistant message as a harness keeps it for its next request."""
        message: dict[str, Any] = self.ask(messages, **fields).choices[0].message.model_dump(exclude_none=True)
        return message

    def post(self, path: str, body: Any, *, at: RunningService | None = None, **more: Any) -> httpx.Response:
        """What a harness without an SDK gets for a body, of bytes or as JSON. `path` follows the session's; `at`: another process."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, at=at, content=content, **more)

    def request(self, method: str, path: str, *, at: RunningService | None = None, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.api_key}", "content-type": "application/json", **more.pop("headers", {})}
        return plain_http.request(method, self.url_at(at or self._service) + path, headers=headers, **more)

    def url_at(self, service: RunningService) -> str:
        return f"{service.url}/s/{self.session_id}"

    def client_at(self, service: RunningService) -> OpenAI:
        """The same harness, which asks another process."""
        return self.client.with_options(base_url=f"{self.url_at(service)}/v1")

    @property
    def calls(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._get("calls")["calls"]
        return listed

    def trajectories(self, builder: str = "merged") -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(rows, accounting); sampled = exported + quarantined is checked on the way."""
        answer = self._get(f"trajectories?builder={builder}")
        accounting = answer["accounting"]
        quarantined = sum(item["tokens"] for item in accounting["quarantined"])
        assert accounting["sampled_tokens"] == accounting["exported_tokens"] + quarantined
        return answer["trajectories"], accounting

    def close(self, status: str = "completed", **fields: Any) -> None:
        answer = self._service.request("POST", f"/sessions/{self.session_id}/close", json={"status": status, **fields})
        assert answer.status_code == 200, answer.text

    def _get(self, what: str) -> Any:
        answer = self._service.request("GET", f"/sessions/{self.session_id}/{what}")
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def hanging_up(url: str, body: Any, key: str = "") -> Iterator[socket.socket]:
    """Sends the request on entry and closes the connection on exit; what is read of the answer is the caller's affair."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
    with socket.create_connection((parts.hostname, parts.port), timeout=120) as connection:
        connection.sendall(head.encode() + b"\r\n" + content)
        yield connection


@contextmanager
def kept(port: int) -> Iterator[None]:
    """The port of a server that is away, where nobody else is put meanwhile; the server itself may come back inside."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", port))
        yield


def streamed_text(stream: Any) -> tuple[str, list[Any]]:
    """The text of the first choice of an SDK stream, and all its chunks."""
    chunks = list(stream)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks
