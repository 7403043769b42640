"""A real HTTP server that speaks vLLM 0.32's shapes, tokenises and renders for real, and samples what a script says.

    engine = ScriptedEngine("qwen3")                 # families: template_families.py
    engine.say("hello", Say(token_ids=[5, 6]))       # what the next calls sample, in turn; unscripted calls sample at random
    engine.script = lambda generation, index: ...    # or decide by the request: `generation.prompt`, `.messages`, `.prompt_ids`
    with engine: ...                                 # serves at engine.url from a thread of its own
    engine.generations                               # what it was asked to sample, with the ids it was given
    engine.contacts                                  # what it was asked when a service met it; see `shows_contact`

Alone, for benchmarks: `python -m tests.support.engine.scripted_engine --port 0 --tokens 128`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.support.engine.scripted_completions import CompletionCalls
from tests.support.engine.scripted_sampling import Drop, Fail, Generation, Hang, Reply, Sampler, Say, logprobs_of, random_reply
from tests.support.engine.scripted_weights import ScriptedWeights
from tests.support.engine.scripted_wire import error_body, model_list
from tests.support.engine.template_families import FAMILIES, Family
from tests.support.service.prompt_server import PromptServer

__all__ = ["Drop", "Fail", "Generation", "Hang", "Received", "Reply", "Say", "ScriptedEngine", "logprobs_of"]

MODEL = "policy"
BLOCK = 16
"""Ids that its prefix cache keeps together."""


@dataclass(frozen=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    query: dict[str, str]
    body: Any
    at: float


class Exchange:
    """One request and the way to answer it."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.query = dict(parse_qsl(scope["query_string"].decode()))
        self._transport: asyncio.Transport = scope["transport"]
        self._receive = receive
        self._send = send

    async def read(self) -> bytes:
        content, more = b"", True
        while more:
            message = await self._receive()
            content, more = content + message.get("body", b""), message.get("more_body", False)
        return content

    async def answer(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        told = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in told.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": content})

    async def answer_text(self, text: str) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await self._send({"type": "http.response.body", "body": text.encode()})

    async def answer_empty(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, fault: Fail) -> None:
        await self.answer(error_body(fault.status, fault.message, fault.type, fault.param), fault.status)

    async def open_stream(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await self._send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

    async def close_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def gone(self) -> None:
        """Returns when the client has hung up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def break_off(self) -> None:
        self._transport.abort()


class _Protocol(HttpToolsProtocol):
    """Lets the application break a connection, which ASGI alone has no word for."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]


Route = Callable[[Exchange, Any], Awaitable[None]]


class ScriptedEngine:
    """`plain`: knows only /v1/chat/completions and returns neither ids nor logprobs. `ids=False`: vLLM's routes but no
    ids on the chat route. `updatable=False`: no routes for weights. `model` is the one name that its base model is served under.
    `adapters`: the names of the LoRA adapters that it was started with, each from the folder `/adapters/NAME`."""

    def __init__(
        self,
        family: str | Family = "qwen3",
        *,
        plain: bool = False,
        ids: bool = True,
        updatable: bool = True,
        model: str = MODEL,
        adapters: Sequence[str] = (),
        max_model_len: int = 8192,
        names_window: bool = True,
        most_images: int = 0,
        default: Callable[[Generation, int], Reply] | None = None,
    ) -> None:
        self.family = FAMILIES[family] if isinstance(family, str) else family
        self.model = model
        self.url = ""
        self.received: list[Received] = []
        self.generations: list[Generation] = []
        self.contacts: list[Received] = []
        """What was asked to find out whether it can be read."""
        self.shows_contact = False
        """Whether that is received as calls are: listed, scripted and struck by faults. Otherwise a token is sampled at random."""
        self.script: Callable[[Generation, int], Reply | str | None] | None = None
        self.version: Any = None
        """What it says its version is; None: it has no /version."""
        self.max_model_len = max_model_len
        self.names_window = names_window
        self.cached_tokens = 0
        """What the engine says of every prompt that it had cached."""
        self.bend_scores: Callable[[Generation, list[Any]], list[Any]] | None = None
        """What it makes of the logprobs of a prompt that it was asked to score."""
        self.most_images = most_images
        """How many images a prompt may have; 0: the model takes none."""
        self.routes = False
        """Whether it tells which experts each token was routed to."""
        self.parses_itself = False
        """As vLLM 0.33: renderings say how to parse, and generate does if it is asked to."""
        self.adds: dict[str, Any] = {}
        """Sampling parameters that it gives every rendering of messages, whatever was asked."""
        self.counts = True
        """Whether it tells how many tokens it has sampled."""
        self._default = default or (lambda generation, index: random_reply(self.family, generation, index))
        self._replies: deque[Reply | str] = deque()
        self._faults: dict[str, deque[Fail | Drop | Hang]] = defaultdict(deque)
        self.sampler = Sampler(self.family)
        self.weights = ScriptedWeights(self.sampler)
        self.weights.adapters |= {name: f"/adapters/{name}" for name in adapters}
        calls = CompletionCalls(self, ids=ids and not plain)
        self._routes: dict[tuple[str, str], Route] = {("POST", "/v1/chat/completions"): calls.chat}
        if not plain:
            self._routes |= calls.routes | {
                ("GET", "/v1/models"): self._models,
                ("GET", "/health"): self._health,
                ("GET", "/metrics/"): self._metrics,
                ("GET", "/version"): self._tell_version,
                ("GET", "/metrics"): self._metrics,
            }
        if updatable and not plain:
            self._routes |= self.weights.routes
        self._started_at = 0.0
        self.tls: tuple[Path, Path] | None = None
        """Certificate and key to serve with."""
        self._server: PromptServer | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: set[int] = set()

    def say(self, *replies: Reply | str) -> Self:
        """What the next choices sample, in the order they are asked for."""
        self._replies.extend(replies)
        return self

    def fault(self, path: str, *faults: Fail | Drop | Hang) -> Self:
        """What happens to the next requests to `path`."""
        self._faults[path].extend(faults)
        return self

    def clear_faults(self) -> None:
        """Forget those that no request has met."""
        self._faults.clear()

    def is_aside(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these is of first contact, and kept out of what a test sees of calls."""
        return "x-verbatim-contact" in headers and not self.shows_contact

    def reply_to(self, generation: Generation, index: int) -> Reply:
        if self.is_aside(generation.headers):
            return Say(token_ids=[self.family.end_id])
        reply: Reply | str | None = self.script(generation, index) if self.script else None
        if reply is None and self._replies:
            reply = self._replies.popleft()
        if reply is None:
            reply = self._default(generation, index)
        return Say(reply) if isinstance(reply, str) else reply

    def find_cached(self, ids: Sequence[int]) -> int:
        """How many of these ids it has computed before, in whole blocks; never all of them."""
        before = [generation.prompt_ids for generation in self.generations]
        shared = max((_count_shared(ids, known) for known in before), default=0)
        return min(shared, len(ids) - 1) // BLOCK * BLOCK

    @property
    def names(self) -> list[str]:
        """What it is asked for."""
        return [self.model, *self.weights.adapters]

    @property
    def last(self) -> Generation:
        return self.generations[-1]

    def paths(self) -> list[str]:
        return [request.path for request in self.received]

    def reset(self) -> Self:
        """Forget scripts and records; the weights and their label stay."""
        self.received, self.generations, self.script, self.cached_tokens, self.bend_scores = [], [], None, 0, None
        self.routes, self.adds, self.contacts, self.shows_contact = False, {}, [], False
        self.parses_itself = False
        self._replies.clear()
        self.clear_faults()
        return self

    def wait_for(self, happened: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"not within {seconds} s; the engine got {self.paths()}"
            time.sleep(0.005)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        content = await exchange.read()
        body: Any = json.loads(content) if content else None
        request = Received(exchange.method, exchange.path, exchange.headers, exchange.query, body, time.monotonic())
        is_aside = self.is_aside(exchange.headers)
        if "x-verbatim-contact" in exchange.headers:
            self.contacts.append(request)
        if not is_aside:
            self.received.append(request)
        route = self._routes.get((exchange.method, exchange.path))
        if route is None:
            await exchange.answer({"detail": "Not Found"}, 404)
        elif self._faults[exchange.path] and body != {} and not is_aside:
            await misfortune(exchange, self._faults[exchange.path].popleft())
        else:
            try:
                await route(exchange, body if body is not None else {})
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                # vLLM holds every body against its schema first.
                await exchange.fail(Fail(400, f"malformed request: {error!r}", "BadRequestError"))

    async def _models(self, exchange: Exchange, body: Any) -> None:
        answer = model_list(self.model, self.max_model_len if self.names_window else None)
        for name, root in self.weights.adapters.items():
            card = {**answer["data"][0], "id": name, "root": root, "parent": self.model, "max_model_len": None}
            answer["data"].append(card)
        await exchange.answer(answer)

    async def _tell_version(self, exchange: Exchange, body: Any) -> None:
        if self.version is None:
            await exchange.answer({"detail": "Not Found"}, 404)
        else:
            await exchange.answer({"version": self.version})

    async def _metrics(self, exchange: Exchange, body: Any) -> None:
        page = f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self._started_at}\n"
        tokens = sum(len(ids) for generation in self.generations for ids in generation.sampled.values())
        running = len(self.sampler.running)
        counted = {"generation_tokens_total": tokens, "num_requests_running": running, "num_requests_waiting": 0}
        for name, value in counted.items() if self.counts else ():
            page += f'# TYPE vllm:{name} gauge\nvllm:{name}{{engine="0",model_name="{self.model}"}} {float(value)}\n'
        await exchange.answer_text(page)

    def stop_sampling(self) -> None:
        """From here on nothing is sampled, and everything else answered: as when the process behind vLLM's server is stopped."""
        self.sampler.going.clear()

    def go_on_sampling(self) -> None:
        self.sampler.going.set()

    async def _health(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer(None)

    def start(self, port: int = 0) -> Self:
        # asyncio sends small pieces at once (TCP_NODELAY) only on sockets that name their protocol; others wait 40 ms for an ACK.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        self._keep(listener.getsockname())
        # From here on clients wait in line instead of being refused while the server comes up.
        listener.listen(128)
        self._started_at = time.time()
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
        certificate, key = self.tls or (None, None)
        config = uvicorn.Config(
            self,
            http=_Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self._server = PromptServer(config)
        self._thread = threading.Thread(target=self._run, args=(self._server, listener), name="scripted-engine")
        self._thread.start()
        return self

    def _keep(self, address: tuple[str, int]) -> None:
        """Nobody is given the port while the engine is down; who asks for it may have it, and nobody answers there."""
        if address[1] in self._kept:
            return
        self._kept.add(address[1])
        place = socket.socket()
        weakref.finalize(self, place.close)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)

    def _run(self, server: PromptServer, listener: socket.socket) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await server.serve(sockets=[listener])
            # Connections that came after the others were broken: it takes three turns of the loop to make one, and another to abort it.
            for _ in range(5):
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
                await asyncio.sleep(0)

        asyncio.run(serve())

    def stop(self) -> None:
        """End at once, breaking every open connection: what clients see when the engine is killed."""
        if self._server is None or self._thread is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._break_everything)
        self._server.end(force=True)
        self._thread.join()
        self._server = self._thread = self._loop = None

    def _break_everything(self) -> None:
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def __enter__(self) -> Self:
        """Starts it unless it was started already, on a port of its own."""
        return self if self._thread is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _count_shared(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


async def misfortune(exchange: Exchange, fault: Fail | Drop | Hang) -> None:
    if isinstance(fault, Fail):
        await exchange.fail(fault)
    elif isinstance(fault, Drop):
        exchange.break_off()
    else:
        await exchange.gone()


def main() -> None:
    parser = argparse.ArgumentParser(description="An engine that samples at random, from a fixed seed, without a model.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3")
    parser.add_argument("--tokens", type=int, default=128, help="length of every reply")
    parser.add_argument("--window", type=int, default=65536, help="context window in tokens")
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="know only /v1/chat/completions, return no ids")
    options = parser.parse_args()

    def reply(generation: Generation, index: int) -> Reply:
        said = random_reply(engine.family, generation, index, tokens=options.tokens)
        return Say(token_ids=said.token_ids, seconds_per_token=options.seconds_per_token)

    engine = ScriptedEngine(options.family, plain=options.plain, max_model_len=options.window, default=reply)
    with engine.start(options.port):
        print(engine.url, flush=True)  # noqa: T201
        threading.Event().wait()


if __name__ == "__main__":
    main()
