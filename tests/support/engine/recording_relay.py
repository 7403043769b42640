"""A reverse proxy between the service and its engine that notes what every sampling request was given and what came back.

It knows nothing of sessions, trees or records: what it noted is true whatever the service writes down.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web

from proxy.engine.in_vllm.frames import (
    ROUTE,
    SAMPLE,
    Ask,
    FrameDecoder,
    PieceFrame,
    PlanFrame,
    read_after,
    read_ask,
    read_ids,
    read_logprobs,
)
from reconstruct.records import pack_ids

GENERATE = "/inference/v1/generate"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Generated:
    """One sampling request: the ids it was to sample after, and per choice what the engine answered."""

    request_id: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    choices: dict[int, Choice] = field(default_factory=dict)

    def take_line(self, line: bytes) -> None:
        if line.startswith(b"data: {"):
            self.take(json.loads(line[6:]))

    def take(self, answer: dict[str, Any]) -> None:
        for part in answer.get("choices") or ():
            choice = self.choices.setdefault(part["index"], Choice())
            choice.token_ids += part.get("token_ids") or []
            choice.logprobs += [entry["logprob"] for entry in (part.get("logprobs") or {}).get("content") or ()]


class GeneratedByPlugin(Generated):
    """The same by the plugin inside vLLM, which is asked with the parent's ids and answers in frames."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask.request_id, [], ask.sampling)
        self._ask = ask
        self._decoder = FrameDecoder()

    def take_line(self, line: bytes) -> None:
        for frame in self._decoder.feed(line):
            if isinstance(frame, PlanFrame):
                parent = self._ask.parent
                ids = pack_ids(()) if parent is None or parent.ids is None else read_ids(parent.ids)
                self.prompt_ids = read_after(ids, frame.kept, frame.tail).tolist()
            elif isinstance(frame, PieceFrame):
                choice = self.choices.setdefault(frame.index, Choice())
                choice.token_ids += read_ids(frame.ids).tolist()
                choice.logprobs += read_logprobs(frame.logprobs).tolist()


class RecordingRelay:
    """Relays everything to `upstream` from a thread of its own, and records all but first contact; used in a `with` block. `generated` is
    by request id, `asked` counts the requests by path and `sent_bytes` their bodies. Without `plugin` it hides that the engine has one."""

    def __init__(self, upstream: str, *, plugin: bool = True) -> None:
        self.url = ""
        self.asked: Counter[str] = Counter()
        self.sent_bytes = 0
        self.plugin = plugin
        self.generated: dict[str, Generated] = {}
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._client: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(120)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()

    async def _start(self) -> None:
        # The engine may close an idle connection just as the next request goes out.
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=300)
        )
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._relay)
        # A handler must end when the service hangs up: so must the engine's request behind it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._client is not None:
            await self._client.close()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        assert self._client is not None
        body = await request.read()
        if request.path.startswith(ROUTE) and not self.plugin:
            return web.json_response({"detail": "Not Found"}, status=404)
        noted = None
        # What a service asks to find out whether the engine can be read is no call.
        if "x-verbatim-contact" not in request.headers:
            self.asked[request.path] += 1
            self.sent_bytes += len(body)
            noted = self._note(request.path, body)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = self._upstream + request.path_qs
        async with self._client.request(request.method, url, data=body, headers=headers) as answer:
            if request.path == SAMPLE or "event-stream" in answer.headers.get("content-type", ""):
                return await self._stream(request, answer, noted)
            content = await answer.read()
            if noted is not None and answer.status == 200:
                noted.take(json.loads(content))
            kind = {"content-type": answer.headers.get("content-type", "application/json")}
            return web.Response(body=content, status=answer.status, headers=kind)

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, noted: Generated | None
    ) -> web.StreamResponse:
        out = web.StreamResponse(status=answer.status, headers={"content-type": answer.headers["content-type"]})
        await out.prepare(request)
        lines = answer.content.iter_any() if request.path == SAMPLE else answer.content
        async for line in lines:
            if noted is not None and answer.status == 200:
                noted.take_line(line)
            await out.write(line)
        await out.write_eof()
        return out

    def _note(self, path: str, body: bytes) -> Generated | None:
        if path == SAMPLE:
            try:
                made = GeneratedByPlugin(read_ask(body))
            except msgspec.MsgspecError:
                return None  # a probe for the plugin
            self.generated[made.request_id] = made
            return made
        if path != GENERATE:
            return None
        asked = json.loads(body)
        if "token_ids" not in asked:
            return None  # a probe for the route
        noted = Generated(asked["request_id"], asked["token_ids"], asked["sampling_params"])
        self.generated[noted.request_id] = noted
        return noted
