"""What a token of a streamed reply costs the service, by dialect and by the way to the engine, counted in its own process.

    python -m benchmarks.stream_cost [--tokens 128,1000,16000] [--together 1] [--only chat]

The engine's bytes are made beforehand and handed to the connection one event per turn of the loop (or `--together` of them), so
neither a socket nor another process is measured. CPU per token is what a reply of so many tokens takes beyond one of a few; functions
per token are those of the service that are entered, or resumed, for each event.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from benchmarks.application import Application, application, scripted_engine
from benchmarks.counting import OWN
from benchmarks.processes import redis_server
from benchmarks.replies import Size, chat_events, generate_events, parser_answer, plugin_steps
from proxy.call.http import EXTENSION
from proxy.engine.apis.vllm import VllmTokens
from proxy.engine.wire.channels import Channel, Channels, EngineResponse, WholeResponse

_FEW = 16
_QUESTION = "Say so many words."
_PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}),
    "completions": ("/v1/completions", {"prompt": _QUESTION}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 50_000}),
    "responses": ("/v1/responses", {"input": _QUESTION}),
    "gemini": (
        "/v1beta/models/policy:streamGenerateContent",
        {"contents": [{"role": "user", "parts": [{"text": _QUESTION}]}]},
    ),
}
_WAYS = ("chat", "token", "plugin")


class _Wire:
    """Stands in for the connections on which replies are streamed: what an engine of this way says of `tokens` tokens."""

    def __init__(self, way: str, together: int) -> None:
        self.way = way
        self._together = together
        self._reads: list[bytes] = []
        self._saying: asyncio.Task[None] | None = None
        self.asked_before = Channels.ask
        self.prepare(_FEW)

    def prepare(self, tokens: int, *, legacy: bool = False) -> None:
        """The reply of the calls to come."""
        size = Size("streamed", 64, tokens)
        if self.way == "chat":
            events = chat_events(size, legacy=legacy)
        else:
            events = generate_events(size) if self.way == "token" else plugin_steps(size)
        reads = (b"".join(events[at : at + self._together]) for at in range(0, len(events), self._together))
        self._reads = [b"%x\r\n%b\r\n" % (len(read), read) for read in reads]

    async def post(self, channels: Channels, url: str, body: bytes, headers: Any = None) -> EngineResponse:
        channel = Channel(lambda channel: None, 0.0)
        channel.connection_made(_Transport())  # type: ignore[arg-type]
        answer = EngineResponse(channel)
        channel.ask(body, answer)
        self._saying = asyncio.create_task(self._say(channel))
        await answer.wait_for_status()
        return answer

    async def _say(self, channel: Channel) -> None:
        channel.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for read in self._reads:
            await asyncio.sleep(0)
            channel.data_received(read)
        channel.data_received(b"0\r\n\r\n")

    async def ask(self, channels: Channels, url: str, body: bytes | None, *more: Any, **others: Any) -> WholeResponse:
        """What the parsers make of a reply's ids; all else is asked of the engine."""
        if not url.endswith("/derender") or body is None:
            return await self.asked_before(channels, url, body, *more, **others)
        return parser_answer(body)


class _Transport:
    def write(self, data: bytes) -> None:
        """The request: nobody reads it."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class _Harness:
    """Takes the answer as the service's own server does."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.status = 0
        self.writes = 0

    def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.write(message.get("body", b""))

    def write(self, body: bytes) -> None:
        self.writes += 1
        self.parts.append(body)

    async def flushed(self) -> bool:
        return True

    def on_leave(self, leave: Callable[[], None]) -> None: ...


async def _stream(app: Application, dialect: str) -> tuple[float, _Harness]:
    """CPU seconds of one call, and who got its answer."""
    path, body = _PATHS[dialect]
    _, key = await app.opened()
    harness = _Harness()
    content = json.dumps({"model": "policy", **body, "stream": True} if dialect != "gemini" else body).encode()
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"alt=sse",
    }
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("127.0.0.1", 80)}
    scope["extensions"] = {EXTENSION: harness}
    given = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return given.pop()

    gc.collect()
    began = time.process_time()
    await app.serve(scope, receive, None)
    seconds = time.process_time() - began
    assert harness.status == 200, harness.parts
    return seconds, harness


@contextmanager
def _entered() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


async def _measure(way: str, dialects: list[str], sizes: list[int], together: int, *, listed: bool) -> None:
    wire = _Wire(way, together)
    Channels.post = lambda self, *args: wire.post(self, *args)  # type: ignore[method-assign]
    Channels.ask = lambda self, *args, **more: wire.ask(self, *args, **more)  # type: ignore[method-assign]

    async def has_plugin(*_: Any) -> bool:
        return way == "plugin"

    VllmTokens.find_plugin = has_plugin  # type: ignore[method-assign,assignment]
    with scripted_engine(_FEW) as engine, redis_server() as store:
        async with application(engine, store, "chat" if way == "chat" else "token") as app:
            for dialect in dialects:
                if dialect == "completions" and way != "chat":
                    continue
                legacy = dialect == "completions"
                row = [f"{dialect:12}{way:8}"]
                for tokens in sizes:
                    rounds = 3 if tokens > 4_000 else 9
                    seconds = []
                    for length in (_FEW, tokens):
                        wire.prepare(length, legacy=legacy)
                        seconds.append(min([(await _stream(app, dialect))[0] for _ in range(rounds)]))
                    row.append(f"{(seconds[1] - seconds[0]) / (tokens - _FEW) * 1e6:8.1f}")
                counts, writes = [], []
                for length in (_FEW, _FEW + 1_000):
                    wire.prepare(length, legacy=legacy)
                    with _entered() as found:
                        harness = (await _stream(app, dialect))[1]
                    counts.append(found)
                    writes.append(harness.writes)
                entered = counts[1] - counts[0]
                row.append(f"{sum(entered.values()) / 1000:8.1f} entered{(writes[1] - writes[0]) / 1000:6.2f} writes")
                print("".join(row), flush=True)
                if listed:
                    print(*(f"  {count / 1000:7.2f} {name}" for name, count in entered.most_common(40)), sep="\n")
    Channels.ask = wire.asked_before  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="128,1000,16000", help="lengths of the replies")
    parser.add_argument("--together", type=int, default=1, help="events that arrive in one read")
    parser.add_argument("--only", default=",".join(_PATHS), help="dialects")
    parser.add_argument("--ways", default=",".join(_WAYS), help="to the engine")
    parser.add_argument("--list", action="store_true", help="also the functions that are entered per token")
    options = parser.parse_args()
    sizes = [int(each) for each in options.tokens.split(",") if each]
    print(f"{'dialect':12}{'way':8}" + "".join(f"{size:8}" for size in sizes) + "   CPU microseconds per token")
    for way in options.ways.split(","):
        uvloop.run(_measure(way, options.only.split(","), sizes, options.together, listed=options.list))


if __name__ == "__main__":
    main()
