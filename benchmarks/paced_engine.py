"""An engine that streams as engines do, one event per token at a pace, or refuses: vLLM's chat route, its three token routes, and
below `nginx.WITH_PLUGIN` the plugin's.

A stream's first token comes one pace after its request, and what the plugin is asked for whole comes at once. Streams that begin in
the same few milliseconds then step together, as the sequences of one batch do. `python -m benchmarks.paced_engine` prints its URL.
`POST /behave` says how later requests are answered (`Behavior`); `GET /counted` returns what was asked and sent since then (`Counted`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import httptools
import msgspec
import uvloop

from benchmarks.cores import Side
from benchmarks.nginx import WITH_PLUGIN
from benchmarks.processes import request, started
from benchmarks.replies import MODEL, WORD, Size, answers, plugin_steps
from proxy.engine.in_vllm.frames import ROUTE, SAMPLE, read_ask

STEP_SECONDS = 0.005
Refusal = Literal["400", "503", "503 before the body", "cut after the head"]
REFUSALS: tuple[Refusal, ...] = get_args(Refusal)

_PLUGIN = WITH_PLUGIN + SAMPLE
_SAMPLING = {"/v1/chat/completions": "chat.sse", "/inference/v1/generate": "generate.sse", _PLUGIN: "sample.frames"}
_RENDER, _DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


class Behavior(msgspec.Struct):
    """Replies of `sampled` tokens, `pace_ms` apart, after prompts of `prompt` tokens; or a refusal of whatever samples."""

    prompt: int
    sampled: int
    pace_ms: int
    refusal: Refusal | None = None


class Counted(msgspec.Struct):
    """`replies`: requests for sampling; `bytes_in`: of all requests, their heads included; `tokens`: sent."""

    replies: int = 0
    requests: int = 0
    bytes_in: int = 0
    tokens: int = 0


@contextmanager
def paced_engine(side: Side = "load") -> Iterator[str]:
    """The URL of one in a process of its own."""
    with started([sys.executable, "-m", "benchmarks.paced_engine"], side=side) as engine:
        assert engine.stdout is not None
        yield engine.stdout.readline().strip()


def behave(url: str, behavior: Behavior) -> None:
    """From now on; counts anew."""
    request(url, "POST", "/behave", msgspec.to_builtins(behavior))


def counted(url: str) -> Counted:
    return msgspec.convert(request(url, "GET", "/counted"), Counted)


class _Pieces(msgspec.Struct):
    token_ids: list[int]


class _Choices(msgspec.Struct):
    choices: list[_Pieces]


class _Derender(msgspec.Struct):
    generate_chunk: _Choices | None = None
    generate_response: _Choices | None = None


class Engine:
    """What all connections share: the behavior, its replies, the counts and the clock of the streams."""

    def __init__(self) -> None:
        self.counted = Counted()
        self._slots: list[list[_Stream]] = [[]]
        self._at = 0
        self.behave(Behavior(1_000, 4, 5))

    def behave(self, behavior: Behavior) -> None:
        """Streams under way go on in the new pace."""
        self.behavior, self.counted = behavior, Counted()
        made = answers(Size("paced", behavior.prompt, behavior.sampled), stream=True)
        self.whole = {name: content for name, content in made.items() if name.endswith(".json")}
        self.streams = {
            name: frame_events(content, behavior.sampled) for name, content in made.items() if name.endswith(".sse")
        } | {"sample.frames": _frame_steps([*map(_chunk, plugin_steps(Size("paced", behavior.prompt, behavior.sampled)))])}
        self.unstreamed = answers(Size("paced", behavior.prompt, behavior.sampled), stream=False)["sample.frames"]
        under_way = [stream for slot in self._slots for stream in slot]
        self._slots = [[] for _ in range(max(1, round(behavior.pace_ms / 1000 / STEP_SECONDS)))]
        self._slots[0] = under_way
        self._at = 0

    def begin(self, transport: asyncio.Transport, name: str) -> None:
        self._slots[self._at % len(self._slots)].append(_Stream(transport, self.streams[name]))

    async def run(self) -> None:
        """Steps the streams of one slot after the other, each slot once per pace. Never returns."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += STEP_SECONDS
            await asyncio.sleep(due - loop.time())
            self._at += 1
            slot = self._at % len(self._slots)
            self.counted.tokens += len(self._slots[slot])
            self._slots[slot] = [stream for stream in self._slots[slot] if stream.step()]


class _Stream:
    __slots__ = ("_at", "_events", "_transport")

    def __init__(self, transport: asyncio.Transport, events: list[bytes]) -> None:
        self._transport, self._events, self._at = transport, events, 0

    def step(self) -> bool:
        """Sends the next token; returns whether there are more."""
        if self._transport.is_closing():
            return False
        self._transport.write(self._events[self._at])
        self._at += 1
        return self._at < len(self._events)


def frame_events(stream: bytes, sampled: int) -> list[bytes]:
    """What goes over the wire per token: the first with the head of the answer, the last with its end."""
    events = [event + b"\n\n" for event in stream.split(b"\n\n") if event]
    before = len(events) - sampled - 2  # usage and [DONE] follow the last token
    steps = [_chunk(b"".join(events[: before + 1])), *map(_chunk, events[before + 1 : before + sampled])]
    steps[-1] += _chunk(b"".join(events[before + sampled :]))
    return _frame_steps(steps)


def _frame_steps(steps: list[bytes]) -> list[bytes]:
    return [_STREAM_HEAD + steps[0], *steps[1:-1], steps[-1] + _END]


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


class _Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body, self._received, self._has_plugin = "", bytearray(), 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of a class of their own

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if not self._transport.is_closing():
            self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        path = url.decode()
        # The plugin's engine has all the other routes as well.
        self._path = path if path == _PLUGIN else path.removeprefix(WITH_PLUGIN)
        self._has_plugin, self._body = path.startswith(WITH_PLUGIN), bytearray()

    def on_headers_complete(self) -> None:
        if self._path in _SAMPLING and self._engine.behavior.refusal == "503 before the body":
            self._count()
            self._refuse(503)
            self._transport.close()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._transport.is_closing():
            self._count()
            self._answer()
        self._received = 0

    def _count(self) -> None:
        if self._path in _SAMPLING or self._path in (_RENDER, _DERENDER):
            counted = self._engine.counted
            counted.requests += 1
            counted.bytes_in += self._received
            counted.replies += self._path in _SAMPLING

    def _answer(self) -> None:
        engine, path, body = self._engine, self._path, bytes(self._body)
        if path == "/behave":
            engine.behave(msgspec.json.decode(body, type=Behavior))
            self._write(b"{}")
        elif path == "/counted":
            self._write(msgspec.json.encode(engine.counted))
        elif path == "/v1/models":
            self._write(engine.whole["models.json"])
        elif path == "/health":
            self._write(b"")
        elif path == ROUTE and self._has_plugin:
            self._write(engine.whole["about.json"])
        elif path not in (*_SAMPLING, _RENDER, _DERENDER):
            self._refuse(404)
        elif body in (b"{}", b"\xc0"):  # the service asks so whether the route is there
            self._refuse(400)
        elif path == _RENDER:
            self._write(engine.whole["render.json"])
        elif path == _DERENDER:
            self._write(msgspec.json.encode(derender(body)))
        elif engine.behavior.refusal == "cut after the head":
            self._transport.write(_STREAM_HEAD)
            self._transport.close()
        elif engine.behavior.refusal is not None:
            self._refuse(int(engine.behavior.refusal))
        elif path == _PLUGIN and not read_ask(body).stream:
            self._transport.write(_STREAM_HEAD + _chunk(engine.unstreamed) + _END)
        else:
            engine.begin(self._transport, _SAMPLING[path])

    def _refuse(self, status: int) -> None:
        said = {"message": "refused by the benchmark's engine", "type": "refused", "param": None, "code": status}
        self._write(msgspec.json.encode({"error": said}), status)

    def _write(self, content: bytes, status: int = 200) -> None:
        head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._transport.write(head.encode() + content)


def derender(body: bytes) -> dict[str, Any]:
    """As many words as there are ids, of a step or of the whole reply."""
    asked = msgspec.json.decode(body, type=_Derender)
    if asked.generate_chunk is not None:
        delta = {"content": WORD * len(asked.generate_chunk.choices[0].token_ids)}
        return {"chunk": {"choices": [{"index": 0, "delta": delta}]}, "stream_state": {}}
    assert asked.generate_response is not None
    message = {"role": "assistant", "content": WORD * len(asked.generate_response.choices[0].token_ids), "tool_calls": []}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": MODEL}
    return head | {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


async def serve() -> None:
    engine = Engine()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await engine.run()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    uvloop.run(serve())


if __name__ == "__main__":
    main()
