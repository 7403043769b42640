"""Real redis-servers for tests: one plain and one cluster of a single node, which refuses scripts that cross slots."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from proxy.store.connection import StoreConnection
from proxy.store.delivery import RedisDeliveryStore
from proxy.store.embedded import redis_server_binary
from proxy.store.sessions import RedisSessionStore
from proxy.store.weights import RedisWeightStore


@dataclass
class RedisServer:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, single_connection_client=True, protocol=2)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def running_redis(*flags: str, port: int | None = None) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="verbatim-test-"))
    port = port or free_port()
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes", "--save", ""]
    process = subprocess.Popen([str(redis_server_binary()), *where, *flags], stdout=subprocess.DEVNULL)
    server = RedisServer(port, process)
    try:
        wait_until_it_answers(server)
        yield server
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


@contextmanager
def running_cluster() -> Iterator[RedisServer]:
    with running_redis("--cluster-enabled", "yes") as server:
        with server.client() as client:
            for first in range(0, 16384, 4096):
                client.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + 4096))
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True):
                time.sleep(0.02)
        yield server


def free_port() -> int:
    """A port that is free together with its cluster bus port, 10,000 higher."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            try:
                bus.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


def wait_until_it_answers(server: RedisServer) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "redis-server ended at its start"
        try:
            with server.client() as client:
                client.ping()
            return
        except redis.ConnectionError:
            time.sleep(0.02)
    raise AssertionError("redis-server did not answer within 20 s")


@pytest.fixture(scope="session", params=["plain", "cluster"])
def redis_kind(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """The store's contract holds on both."""
    with running_redis() if request.param == "plain" else running_cluster() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty plain Redis."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@dataclass
class Store:
    connection: StoreConnection
    sessions: RedisSessionStore
    delivery: RedisDeliveryStore
    weights: RedisWeightStore

    @classmethod
    def at(cls, url: str, **options: float) -> Store:
        connection = StoreConnection(url, **options)  # type: ignore[arg-type]
        return cls(connection, RedisSessionStore(connection), RedisDeliveryStore(connection), RedisWeightStore(connection))


@pytest.fixture
async def store(redis_kind: RedisServer) -> AsyncIterator[Store]:
    """The three stores over an empty Redis, once plain and once as a cluster."""
    with redis_kind.client() as client:
        client.flushall()
    made = Store.at(redis_kind.url)
    yield made
    await made.connection.close()
