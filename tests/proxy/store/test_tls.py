"""Redis over TLS with a certificate authority of one's own and a password: one server, a cluster, and one that a Sentinel names."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import redis

from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from tests.cli.serving.test_tls import make
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer, free_port, running_redis, running_sentinel
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import Serving, wait_until

PASSWORD = "letters0and1digits"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def encrypted(kind: str, folder: Path) -> Iterator[tuple[str, list[TlsFront]]]:
    """The address of a Redis of that kind, and what stands before its servers."""
    certificate, key = make(folder / "authority")
    front_port = free_port()
    flags = ["--requirepass", PASSWORD]
    if kind == "cluster":
        flags += ["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port", str(front_port)]
    with ExitStack() as stack:
        server = stack.enter_context(running_redis(*flags, wait=False))
        wait_until(lambda: listens(server.port), 120, "a redis-server")
        fronts = [stack.enter_context(tls_front(front_port, server.port, certificate, key))]
        place = f":{PASSWORD}@127.0.0.1:{front_port}"
        if kind == "cluster":
            with redis.Redis(port=server.port, password=PASSWORD, protocol=2) as client:
                client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
                wait_until(
                    lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True),
                    120,
                    "a cluster",
                )
        if kind == "sentinel":
            sentinel = stack.enter_context(running_sentinel(RedisServer(front_port, server.process), PASSWORD))
            fronts.append(stack.enter_context(tls_front(watching := free_port(), sentinel.port, certificate, key)))
            place = f":{PASSWORD}@127.0.0.1:{watching}/store"
        scheme = {"single": "rediss", "cluster": "rediss+cluster", "sentinel": "rediss+sentinel"}[kind]
        yield f"{scheme}://{place}?ssl_ca_certs={certificate}", fronts


def test_calls_are_recorded_over_tls_by_the_service_as_it_is_run(tmp_path: Path) -> None:
    with ScriptedEngine() as engine, encrypted("single", tmp_path) as (url, fronts):
        with Serving("--engine", engine.url, "--redis", url, data_dir=tmp_path / "data") as service:
            wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
            assert_records(service)
            assert PASSWORD not in service.stdout + service.stderr
            assert service.stop() == 0
        (front,) = fronts
        assert front.encrypted > 0 and front.plain == 0


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_calls_are_recorded_over_tls_in_stores_of_several_servers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Sentinel knows its master by the port that clients are sent to, and speaks plainly to it."""
    caplog.set_level(logging.INFO)
    with ScriptedEngine() as engine, encrypted(kind, tmp_path) as (url, fronts):
        with RunningService(engine.url, url) as service:
            wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
            assert_records(service)
        assert all(front.encrypted for front in fronts)
        assert kind == "sentinel" or fronts[0].plain == 0
    assert PASSWORD not in caplog.text


def assert_records(service: Serving | RunningService) -> None:
    """Two calls of a session."""
    session = service.request("POST", "/sessions", json={"session_id": "s"}).json()
    body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
    for _ in range(2):
        answer = service.request("POST", "/s/s/v1/chat/completions", session["api_key"], json=body)
        assert answer.status_code == 200, answer.text
    assert len(service.request("GET", "/sessions/s/calls").json()["calls"]) == 2


def test_a_redis_whose_certificate_is_of_another_authority_is_not_used(tmp_path: Path) -> None:
    other, _ = make(tmp_path / "other")
    with encrypted("single", tmp_path) as (url, (front,)):
        asked = url.replace(str(tmp_path / "authority" / "tls.crt"), str(other))
        with Serving("--engine", "http://127.0.0.1:9", "--redis", asked, data_dir=tmp_path / "data", ready=False) as service:
            wait_until(lambda: front.refused > 0, 60, "a refusal")
            wait_until(lambda: "waiting up to" in service.stderr, 60, "it says so")
            assert "certificate" in service.stderr.lower() and PASSWORD not in service.stderr
        assert (front.encrypted, front.plain) == (0, 0)


KINDS = pytest.mark.parametrize(("kind", "path"), [("", ""), ("+cluster", ""), ("+sentinel", "/store")])


@KINDS
async def test_a_url_without_tls_to_a_port_with_it_says_so(kind: str, path: str, tmp_path: Path) -> None:
    """It said "Error UNKNOWN"."""
    certificate, key = make(tmp_path / "authority")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context) as encrypting:
        connection = StoreConnection(f"redis{kind}://127.0.0.1:{encrypting.sockets[0].getsockname()[1]}{path}")
        with pytest.raises(StoreUnavailable, match=re.escape(f"speaks TLS: its URL begins with rediss{kind}, not redis{kind}")):
            await connection.ping()
        await connection.close()


@KINDS
async def test_a_url_with_tls_to_a_port_without_it_says_so(kind: str, path: str, redis_server: RedisServer) -> None:
    """It timed out."""
    place = redis_server.url.removeprefix("redis://").partition("/")[0]
    connection = StoreConnection(f"rediss{kind}://{place}{path}", patience_seconds=600.0)
    with pytest.raises(
        StoreUnavailable, match=re.escape(f"does not speak TLS: its URL begins with redis{kind}, not rediss{kind}")
    ):
        await connection.ping(patient=True)
    await connection.close()


# TLS in front of a redis-server whose own build lacks it

HANDSHAKE = b"\x16"
"""What a client that speaks TLS begins with."""


class TlsFront:
    """Listens where it is told to, and carries each connection on to another port of this machine.

    Who speaks no TLS is carried on as it is, for servers of Redis know each other by the same port, and is counted.
    """

    def __init__(self, port: int, behind: int, certificate: Path, key: Path) -> None:
        self._behind = behind
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self.encrypted, self.plain, self.refused = 0, 0, 0

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            while True:
                accepted, _ = await loop.sock_accept(self._listener)
                connections.create_task(self._carry(accepted))

    def close(self) -> None:
        self._listener.close()

    async def _carry(self, accepted: socket.socket) -> None:
        is_encrypted = await self._first_byte(accepted) == HANDSHAKE
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            context = self._context if is_encrypted else None
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context)
        except OSError:
            # The client did not trust the certificate.
            self.refused += 1
            return
        self.encrypted, self.plain = self.encrypted + is_encrypted, self.plain + (not is_encrypted)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._behind)
        try:
            await asyncio.gather(_copy(reader, their_writer), _copy(their_reader, writer))
        finally:
            for each in (writer, their_writer):
                each.transport.abort()

    @staticmethod
    async def _first_byte(accepted: socket.socket) -> bytes:
        """Left where it is."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(accepted, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(accepted)
        with suppress(OSError):
            return accepted.recv(1, socket.MSG_PEEK)
        return b""


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextmanager
def tls_front(port: int, behind: int, certificate: Path, key: Path) -> Iterator[TlsFront]:
    """In a thread of its own."""
    front = TlsFront(port, behind, certificate, key)
    loop = asyncio.new_event_loop()
    task = loop.create_task(front.serve())

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        # What a transport has to say when it was aborted.
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield front
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(120)
        front.close()
