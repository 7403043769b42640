"""The connections that calls go over: an answer is the same however it is sent and cut, a connection carries the next request only
where it can, and what breaks is told apart by what was sent."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from aiohappyeyeballs import AddrInfoType
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.base import Request
from proxy.engine.apis.base import SamplingJob
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.vllm import VllmTokens
from proxy.engine.pool.membership import replica_at
from proxy.engine.replica import Replica
from proxy.engine.wire.channels import BrokenOff, CannotConnect, Channels, EngineResponse, Unanswered
from proxy.engine.wire.http import EngineAnswer, EngineHttp
from proxy.errors import EngineUnavailable
from proxy.timeline import CancelScope
from tests.cli.serving.test_tls import make
from tests.support.service.redis_server import free_port

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ignore_failure(replica: Replica, reason: str, refused: bool) -> None:
    pass


class Engine:
    """A server that answers a connection's requests by its script; `connections` were made, `requests` came in."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.url = ""
        self.connections = 0
        self.requests: list[bytes] = []
        self.left = asyncio.Event()
        self._handlers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Engine]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self
            for handler in self._handlers:
                handler.cancel()
            await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                self.requests.append(head + await reader.readexactly(int(lengths[0][15:]) if lengths else 0))
                await self._script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def plain(address: AddrInfoType) -> socket.socket:
    return socket.socket(*address[:3])


@asynccontextmanager
async def channels(
    read_seconds: float = 30.0, idle_seconds: float = 30.0, connect_seconds: float = 30.0
) -> AsyncIterator[Channels]:
    made = Channels(
        "sesame", connect_seconds=connect_seconds, read_seconds=read_seconds, idle_seconds=idle_seconds, socket_factory=plain
    )
    try:
        yield made
    finally:
        made.close()


Answer = Callable[[Channels, str], Coroutine[Any, Any, bytes]]


async def read_all(got: EngineResponse) -> bytes:
    taken = b""
    while piece := await got.read_piece():
        taken += piece
    return taken


async def read_as_it_arrives(made: Channels, url: str) -> bytes:
    async with await made.post(url + "/v1/x", b"{}", {"x-request-id": "7"}) as got:
        assert got.status == 200
        return await read_all(got)


async def read_whole(made: Channels, url: str) -> bytes:
    got = await made.ask(url + "/v1/x", b"{}", {"x-request-id": "7"})
    assert got.status == 200
    return got.body


@pytest.fixture(params=[read_as_it_arrives, read_whole], ids=["as it arrives", "whole"])
def answer(request: pytest.FixtureRequest) -> Answer:
    """Each way to read an answer."""
    return cast(Answer, request.param)


def measured(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    told = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + told + b"0\r\n\r\n"


def telling(*pieces: bytes) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=3000), st.integers(0, 700), st.lists(st.integers(1, 3000), max_size=12), st.booleans())
def test_an_answer_is_the_same_however_it_is_sent_and_cut(body: bytes, size: int, cuts: list[int], interim: bool) -> None:
    whole = (b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"") + (chunked(body, size) if size else measured(body))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]

    async def asked_twice() -> None:
        pieces = [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
        async with Engine(telling(*pieces)).serving() as engine, channels() as made:
            assert [await read(made, engine.url) for read in (read_as_it_arrives, read_whole, read_whole)] == [body] * 3
            assert engine.connections == 1

    asyncio.run(asked_twice())


async def test_a_request_has_its_body_its_key_and_its_headers(answer: Answer) -> None:
    async with Engine(telling(measured(b"ok"))).serving() as engine, channels() as made:
        await answer(made, engine.url)
        head, _, body = engine.requests[0].partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /v1/x HTTP/1.1"
        assert {"Authorization: Bearer sesame", "x-request-id: 7", "Content-Type: application/json"} <= set(lines)
        assert f"Host: {engine.url.removeprefix('http://')}" in lines
        assert json.loads(body) == {}


@asynccontextmanager
async def refusing(told: bytes, *, read: int = 0) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The address of a server that answers a request's head and `read` bytes of its body with `told`, and closes the connection; and
    whether it has."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(read)
        writer.write(told)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", closed


REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Length: 4\r\n\r\nlate"
CUT_REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 400\r\n\r\nlate"


@pytest.mark.case(68)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("told", [REFUSED, CUT_REFUSAL], ids=["whole", "cut"])
@pytest.mark.parametrize("size", [2, 4 << 20], ids=["small", "large"])
@pytest.mark.parametrize("read", [0, 2], ids=["its head", "some of its body"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_engine_that_refuses_a_request_and_closes_has_refused_it(
    run: Callable[[Any], None], told: bytes, size: int, read: int, stream: bool
) -> None:
    """Harnesses get its refusal with Retry-After, and not the error of a connection that broke while the rest was sent. Nginx refuses
    this way, at a request's head."""

    async def ask() -> None:
        async with refusing(told, read=read) as (url, _), channels() as made:
            with pytest.raises(EngineUnavailable, match=r"too busy \(HTTP 429\): late"):
                body, http, scope = "x" * (size - 2), EngineHttp(made, ignore_failure), CancelScope("s", "c")
                async with http.receive(replica_at(url), "/v1/x", body, EngineAnswer, scope, stream=stream):
                    pass
            assert not made.idle

    run(ask())


async def test_a_connection_on_which_a_request_was_answered_before_it_was_sent_whole_carries_no_other() -> None:
    """The rest of the first would be read as the second."""
    async with refusing(measured(b"no")) as (url, _), channels() as made, await made.post(url, bytes(16 << 20), {}) as got:
        assert (got.status, await read_all(got)) == (200, b"no")
        assert not made.idle


async def test_a_request_to_end_a_call_is_repeated_over_new_connections(answer: Answer) -> None:
    """Behind vLLM's address there may be several API servers: repeated over a kept connection, an abort reached the same wrong one."""
    async with Engine(telling(measured(b"{}"))).serving() as engine, channels() as made:
        await answer(made, engine.url)
        kind, replica = VllmTokens(EngineHttp(made, ignore_failure), LocalRenderer(None, {})), replica_at(engine.url)
        job = SamplingJob("c", Request("chat", "m", []), {}, CancelScope("s", "c"))
        seen = []
        for again in (False, True, True):
            assert await kind.abort(replica, job, again=again)
            seen.append(engine.connections)
        assert seen == [1, 2, 3]


async def test_a_connection_that_a_request_asked_to_close_carries_no_other(answer: Answer) -> None:
    """An engine that left it open got the next call over it, refused that as data after the end, and was taken for broken."""
    async with Engine(telling(measured(b"{}"))).serving() as engine, channels() as made:
        await made.ask(engine.url, None, {"Connection": "close"})
        assert not made.idle
        await answer(made, engine.url)
        assert engine.connections == 2


async def test_pieces_come_as_they_are_sent() -> None:
    gate = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await gate.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with Engine(script).serving() as engine, channels() as made, await made.post(engine.url, b"", {}) as got:
        assert await got.read_piece() == b"one"
        gate.set()
        assert await got.read_piece() == b"two"
        assert await got.read_piece() == b""


async def test_a_reader_that_has_heard_enough_leaves_the_connection_to_the_next_request(answer: Answer) -> None:
    """As after [DONE]: the end of the answer comes when nobody reads any more."""
    gate = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nend\r\n")
        await gate.wait()
        writer.write(b"0\r\n\r\n")

    async with Engine(script).serving() as engine, channels() as made:
        async with await made.post(engine.url, b"", {}) as got:
            assert await got.read_piece() == b"end"
        gate.set()
        while not made.idle:
            await asyncio.sleep(0.01)
        assert await answer(made, engine.url) == b"end"
        assert engine.connections == 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
async def test_an_answer_may_end_with_its_connection(answer: Answer, head: bytes) -> None:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"all of it")
        await writer.drain()
        writer.close()

    async with Engine(script).serving() as engine, channels() as made:
        assert [await answer(made, engine.url) for _ in range(2)] == [b"all of it", b"all of it"]
        assert engine.connections == 2


async def test_a_connection_that_the_engine_closed_or_that_was_idle_for_long_is_not_used_again(answer: Answer) -> None:
    async def closing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(measured(b"ok"))
        await writer.drain()
        writer.close()

    async with Engine(closing).serving() as engine, channels() as made:
        await answer(made, engine.url)
        while any(not channel.lost for channel in made.idle):
            await asyncio.sleep(0.01)
        assert await answer(made, engine.url) == b"ok"
    async with Engine(telling(measured(b"ok"))).serving() as engine, channels(idle_seconds=0.0) as made:
        assert [await answer(made, engine.url) for _ in range(2)] == [b"ok", b"ok"]
        assert engine.connections == 2


async def test_a_weight_label_is_asked_for_again_over_a_new_connection_when_the_engine_had_just_closed_the_old_one() -> None:
    """Without a label nothing that was sampled is trained."""
    served: set[asyncio.StreamWriter] = set()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer in served:
            writer.close()
        else:
            writer.write(measured(b'{"weight_version": "7"}'))
        served.add(writer)

    async with Engine(script).serving() as engine, channels() as made:
        http, replica = EngineHttp(made, ignore_failure), replica_at(engine.url)
        assert [await http.read_label(replica, ("/weight_info",)) for _ in range(2)] == ["7", "7"]
        assert engine.connections == 2


async def test_words_that_nobody_asked_for_end_the_connection(answer: Answer) -> None:
    async with Engine(telling(measured(b"ok") + measured(b"more"))).serving() as engine, channels() as made:
        assert [await answer(made, engine.url) for _ in range(2)] == [b"ok", b"ok"]
        assert engine.connections == 2


async def closed(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    ("script", "error"), [(closed, Unanswered), (cut, BrokenOff), (telling(b"SSH-2.0-OpenSSH_9.2\r\n"), BrokenOff)]
)
async def test_what_breaks_says_how_far_it_came(answer: Answer, script: Script, error: type[Exception]) -> None:
    async with Engine(script).serving() as engine, channels() as made:
        with pytest.raises(error):
            await answer(made, engine.url)


async def test_where_nothing_listens_nothing_was_sent(answer: Answer) -> None:
    async with channels() as made:
        for url in (
            f"http://127.0.0.1:{free_port()}",
            "http://no.such.host.invalid",
            "ftp://127.0.0.1",
            "http://127.0.0.1:99999",
        ):
            with pytest.raises(CannotConnect):
                await answer(made, url)


async def test_an_engine_that_says_nothing_for_too_long_is_hung_up_on(answer: Answer) -> None:
    async with Engine(telling(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")).serving() as engine:
        async with channels(read_seconds=0.2) as made:
            with pytest.raises(TimeoutError):
                await answer(made, engine.url)
        await asyncio.wait_for(engine.left.wait(), 30)


async def test_an_answer_that_does_not_come_whole_in_its_time_is_hung_up_on_though_the_engine_goes_on() -> None:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"1\r\n.\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)

    async with Engine(script).serving() as engine, channels() as made:
        with pytest.raises(TimeoutError):
            await made.ask(engine.url, b"", seconds=0.2)
        await asyncio.wait_for(engine.left.wait(), 30)


async def test_a_connection_is_watched_for_each_of_its_requests() -> None:
    """One timer serves them all: the one that the first request set is for a later time than the last has."""
    answers = iter([measured(b"ok"), measured(b"ok"), b""])

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(next(answers))

    async with Engine(script).serving() as engine, channels() as made:
        assert [(await made.ask(engine.url, b"")).body for _ in range(2)] == [b"ok", b"ok"]
        with pytest.raises(TimeoutError):
            await made.ask(engine.url, b"", seconds=0.2)
        assert engine.connections == 1


async def test_a_reader_that_goes_away_hangs_up(answer: Answer) -> None:
    async with Engine(telling(b"")).serving() as engine, channels() as made:
        asking = asyncio.create_task(answer(made, engine.url))
        while not engine.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(engine.left.wait(), 30)
        assert not made.idle


async def test_closing_hangs_up_also_where_the_rest_of_an_answer_is_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that ended just after a streamed reply left the connection open that waited for the end of it."""
    monkeypatch.setattr("proxy.engine.wire.channels._REST_SECONDS", 3600)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nend\r\n")
        await reader.readexactly(1)

    async with Engine(script).serving() as engine, channels() as made:
        async with await made.post(engine.url, b"", {}) as got:
            assert await got.read_piece() == b"end"
        made.close()
        await asyncio.wait_for(engine.left.wait(), 120)


async def test_a_connection_that_is_over_leaves_no_cycle(answer: Answer) -> None:
    async with Engine(telling(measured(b"{}"))).serving() as engine, channels() as made:
        await answer(made, engine.url)
        (channel,) = made.idle
        left = weakref.ref(channel)
        gc.disable()
        try:
            made.close()
            del channel
            async with asyncio.timeout(30):
                while left() is not None:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_closing_an_answer_ends_its_reader() -> None:
    async with Engine(telling(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")).serving() as engine, channels() as made:
        got = await made.post(engine.url, b"", {})
        reading = asyncio.create_task(read_all(got))
        await asyncio.sleep(0)
        got.close()
        with pytest.raises(BrokenOff):
            await reading
        await asyncio.wait_for(engine.left.wait(), 30)


async def test_an_answer_that_was_hung_up_on_is_not_whole_though_it_would_have_ended_with_its_connection() -> None:
    script = telling(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nsome of it")
    async with Engine(script).serving() as engine, channels() as made:
        got = await made.post(engine.url, b"", {})
        assert await got.read_piece() == b"some of it"
        got.close()
        await engine.left.wait()
        with pytest.raises(BrokenOff):
            await got.read_piece()


async def test_an_engine_waits_for_a_reader_that_is_slow() -> None:
    size, sent = 32 << 20, []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(32):
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent.append(1 << 20)

    async with Engine(script).serving() as engine, channels() as made, await made.post(engine.url, b"", {}) as got:
        before = -1
        while len(sent) > before:
            before = len(sent)
            await asyncio.sleep(0.3)
        assert sum(sent) < size / 2
        assert len(await read_all(got)) == size


async def test_an_address_with_a_name_and_a_password_is_asked_with_those(answer: Answer) -> None:
    async with Engine(telling(measured(b"ok"))).serving() as engine, channels() as made:
        await answer(made, engine.url.replace("//", "//me:p%40ss@"))
        assert b"Authorization: Basic bWU6cEBzcw==\r\n" in engine.requests[0]
        assert b"sesame" not in engine.requests[0]


async def test_an_address_that_takes_no_connection_does_not_keep_from_the_next(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with an IPv6 address that leads nowhere: all the seconds for connecting went into that."""
    async with Engine(telling(measured(b"ok"))).serving() as engine, channels(connect_seconds=5.0) as made:
        port = int(engine.url.rpartition(":")[2])

        async def found(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
        with socket.socket() as full:
            full.bind(("127.0.0.2", port))
            full.listen(0)
            with socket.create_connection(("127.0.0.2", port)):
                assert await answer(made, engine.url) == b"ok"


async def test_every_socket_is_of_the_factory(answer: Answer) -> None:
    prepared: list[socket.socket] = []

    def factory(address: AddrInfoType) -> socket.socket:
        prepared.append(plain(address))
        return prepared[-1]

    made = Channels(None, connect_seconds=30, read_seconds=30, idle_seconds=30, socket_factory=factory)
    async with Engine(telling(measured(b"ok"))).serving() as engine:
        assert await answer(made, engine.url) == b"ok"
        assert len(prepared) == 1
        assert b"Authorization" not in engine.requests[0]
    made.close()


async def test_an_engine_behind_https_must_have_a_certificate_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = make(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    async with Engine(telling(measured(b"secret"))).serving(tls) as engine:
        async with channels() as made:
            with pytest.raises(CannotConnect, match="certificate"):
                await read_as_it_arrives(made, engine.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        async with channels() as made:
            assert [await read_as_it_arrives(made, engine.url) for _ in range(2)] == [b"secret", b"secret"]
        assert len(engine.requests) == 2
