"""A real HTTP server on loopback that answers as it is told, and remembers what it was asked.

It stands for the service where a test is about the client's side of the wire: lost answers, errors, encodings, timing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import uvicorn

from tests.support.service.prompt_server import PromptServer


@dataclass(frozen=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """`drop`: close the connection without a word; `cut`: behind the content, before the answer has ended. `delay_seconds` comes first."""

    status: int = 200
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    drop: bool = False
    cut: bool = False


def json_answer(body: Any, status: int = 200, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, json.dumps(body).encode(), {"content-type": "application/json", **named})


def error_answer(status: int, code: str, message: str, **headers: str) -> Answer:
    return json_answer({"error": {"code": code, "message": message}}, status, **headers)


class ScriptedService:
    """Answers `METHOD /path` with the scripted answers in turn; the last one stays. Unscripted: 404.

    A service's first contact is answered by the next answer at once; it takes none away, and is kept out of what was received."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[Received] = []
        self.ended = False
        """No answer is waited for any more: one that is delayed comes now."""
        self._answers: dict[str, deque[Answer]] = defaultdict(deque)
        self._arrived = threading.Condition()

    def reset(self) -> Self:
        self.received, self._answers = [], defaultdict(deque)
        return self

    def script(self, line: str, *answers: Answer) -> None:
        self._answers[line] = deque(answers)

    def paths(self) -> list[str]:
        return [request.path for request in self.received]

    def wait_for(self, happened: Callable[[], bool], seconds: float = 120.0) -> None:
        with self._arrived:
            assert self._arrived.wait_for(happened, seconds), f"only {self.paths()} after {seconds} s"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content, more = b"", True
        while more:
            message = await receive()
            content, more = content + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        request = Received(scope["method"], scope["path"], headers, json.loads(content) if content else None)
        queue, aside = self._answers[f"{request.method} {request.path}"], "x-verbatim-contact" in headers
        takes = len(queue) > 1 and not aside
        answer = queue.popleft() if takes else queue[0] if queue else error_answer(404, "not_found", "no script")
        if not aside:
            with self._arrived:
                self.received.append(request)
                self._arrived.notify_all()
            await self._delay(answer.delay_seconds)
        if answer.drop:
            # A response that is begun and never completed makes uvicorn close the connection.
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            return
        raw = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": raw})
        await send({"type": "http.response.body", "body": answer.content, "more_body": answer.cut})

    async def _delay(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.ended:
            await asyncio.sleep(min(left, 0.05))


@contextmanager
def serving(service: ScriptedService) -> Iterator[ScriptedService]:
    # Protocol named: asyncio sets TCP_NODELAY only then.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    # From here on clients wait in line instead of being refused while the server comes up.
    listener.listen(128)
    service.url, service.ended = f"http://127.0.0.1:{listener.getsockname()[1]}", False
    server = PromptServer(
        uvicorn.Config(service, lifespan="off", ws="none", loop="asyncio", log_level="critical", access_log=False)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield service
    finally:
        service.ended = True
        server.end()
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[ScriptedService]:
    """One for all tests of a module: `reset` it."""
    with serving(ScriptedService()) as scripted:
        yield scripted
