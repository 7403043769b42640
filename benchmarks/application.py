"""The service's ASGI application, called in this thread, behind it a scripted engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pydantic import SecretStr

from benchmarks.processes import ADMIN, started
from proxy.app import create_app
from proxy.call.door import HarnessApp
from proxy.settings import Settings
from proxy.store import outcomes


class Application:
    """Calls to it that return when all that belongs to them is done."""

    def __init__(self, app: HarnessApp) -> None:
        self._app = app

    async def opened(self) -> tuple[str, str]:
        """(session id, key) of a new session."""
        made = json.loads(await self.post("/sessions", ADMIN, {}))
        return made["session_id"], made["api_key"]

    async def ready(self) -> None:
        """Returns once an engine serves."""
        while (await self.ask("GET", "/readyz", ADMIN, {}))[0] != 200:  # noqa: ASYNC110  it is another process that is waited for
            await asyncio.sleep(0.1)

    async def post(self, path: str, key: str, body: Any) -> bytes:
        """The body of the answer."""
        status, answer = await self.ask("POST", path, key, body)
        assert status < 300, answer
        return answer

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        """One request of ASGI."""
        await self._app(scope, receive, send)
        # What is told to the store behind the answer belongs to the call.
        await self._app.settle()

    async def ask(self, method: str, path: str, key: str, body: Any, leaves_at: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer. Whoever asks hangs up once a part of it holds `leaves_at`."""
        content = json.dumps(body).encode()
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("127.0.0.1", 80)}
        given = [{"type": "http.request", "body": content, "more_body": False}]
        sent: list[Any] = []
        left = asyncio.Event()

        async def receive() -> Any:
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if leaves_at is not None and leaves_at in message.get("body", b""):
                left.set()

        await self.serve(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@asynccontextmanager
async def application(engine_url: str, redis_port: int, api: str) -> AsyncIterator[Application]:
    tokens = {"admin_token": SecretStr(ADMIN), "trainer_token": SecretStr(ADMIN + "-trainer")}
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    app = create_app(Settings(engine=[engine_url], redis=redis_url, engine_api=api, **tokens))  # type: ignore[arg-type]
    before, carried_within = asyncio.all_tasks(), outcomes.CARRIED_WITHIN_SECONDS
    told: asyncio.Queue[Any] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, told.get, said.put))
    told.put_nowait({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    served = Application(app)
    try:
        await served.ready()
        # What a process does beside its calls, by the clock, would be counted with a call that takes its time.
        beside = asyncio.all_tasks() - before - {running}
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        outcomes.CARRIED_WITHIN_SECONDS = 1e6
        yield served
    finally:
        outcomes.CARRIED_WITHIN_SECONDS = carried_within
        told.put_nowait({"type": "lifespan.shutdown"})
        await running


@contextmanager
def scripted_engine(tokens: int) -> Iterator[str]:
    """The URL of an engine whose replies, of so many tokens, depend on the prompt alone."""
    with started([sys.executable, "-m", "tests.support.engine.scripted_engine", "--tokens", str(tokens)]) as engine:
        assert engine.stdout is not None
        yield engine.stdout.readline().strip()
