"""Real redis-servers for tests: one alone, with replicas, and clusters of several."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis

from proxy.store.connection import StoreConnection
from proxy.store.delivery import DeliveryStore
from proxy.store.programs import choose_program
from proxy.store.service import PeerStore, WeightStore
from proxy.store.sessions import SessionStore
from tests.support import machine

BINARY = os.environ.get("VERBATIM_TEST_REDIS") or str(choose_program().path)
"""The redis-server under the tests; the variable names another one, for example a newer."""
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**30 else None
"""Where the servers' files are, so that no test waits for a disk. None: in the temporary folder."""
SLOW = (
    "local t = redis.call('TIME')[1] * 1000000 + redis.call('TIME')[2]; local n = t; while n < t + %d do local now = "
    "redis.call('TIME'); n = now[1] * 1000000 + now[2] end; return 'slow'"
)
"""A script that takes so many microseconds."""


@dataclass
class RedisServer:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, single_connection_client=True, protocol=2)

    def flushall(self) -> None:
        with self.client() as client:
            client.flushall()

    def all_keys(self) -> set[bytes]:
        with self.client() as client:
            return set(client.scan_iter("*", count=1000))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class RedisKind(Protocol):
    """One server or a cluster."""

    @property
    def url(self) -> str: ...

    def flushall(self) -> None: ...

    def all_keys(self) -> set[bytes]: ...


@dataclass
class RedisCluster:
    """`primaries` hold a part of the slots each, in order; `replicas` follow them, by position."""

    primaries: list[RedisServer]
    replicas: list[RedisServer]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.primaries)

    def flushall(self) -> None:
        for server in self.primaries:
            server.flushall()

    def all_keys(self) -> set[bytes]:
        return set().union(*(server.all_keys() for server in self.primaries))


@dataclass
class SharedRedis(RedisServer):
    """The server of a whole run. `cluster`, three primaries beside it, is started when a test first asks for it: it takes two seconds to
    come up."""

    stack: ExitStack

    @cached_property
    def cluster(self) -> RedisCluster:
        return self.stack.enter_context(running_cluster())


@contextmanager
def running_redis(*flags: str, port: int | None = None, wait: bool = True, binary: str = BINARY) -> Iterator[RedisServer]:
    """`wait`: until it answers, which it does only when its file is loaded."""
    folder = Path(tempfile.mkdtemp(prefix="verbatim-test-", dir=IN_MEMORY))
    port = port or free_port()
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes", "--save", ""]
    process = subprocess.Popen([binary, *where, *flags], stdout=subprocess.DEVNULL)
    server = RedisServer(port, process)
    try:
        if wait:
            wait_until_it_answers(server)
        yield server
    finally:
        process.kill()
        process.wait()
        # A child of redis-server may still be writing there.
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_cluster(primaries: int = 3, *, replicated: bool = False, node_timeout: float = 5.0) -> Iterator[RedisCluster]:
    """A cluster whose nodes agree that all is well; `node_timeout` is how long, in seconds, a node may be away before its replica
    takes over."""
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(int(node_timeout * 1000)))
    with ExitStack() as stack:
        servers = [stack.enter_context(running_redis(*flags)) for _ in range(primaries * (1 + replicated))]
        cluster = RedisCluster(servers[:primaries], servers[primaries:])
        _assign_slots(cluster.primaries)
        _introduce(servers)
        for primary, replica in zip(cluster.primaries, cluster.replicas, strict=False):
            ask(replica, "CLUSTER", "REPLICATE", ask(primary, "CLUSTER", "MYID"))
        for server in servers:
            _await(partial(_sees, server, len(servers)), "the nodes agree")
        for replica in cluster.replicas:
            _await(partial(_follows, replica), "the replicas follow")
        yield cluster


@contextmanager
def moving_slot(cluster: RedisCluster, slot: int) -> Iterator[Callable[[int], int]]:
    """The slot is on its way to another server; the call inside moves so many of its keys, and says how many are left. Arrived at the
    end."""
    source = next(server for server in cluster.primaries if ask(server, "CLUSTER", "COUNTKEYSINSLOT", slot))
    target = next(server for server in cluster.primaries if server is not source)
    ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(source, "CLUSTER", "MYID"))
    ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(target, "CLUSTER", "MYID"))

    def move(count: int) -> int:
        for key in sorted(ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000))[:count]:
            ask(source, "MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        return int(ask(source, "CLUSTER", "COUNTKEYSINSLOT", slot))

    yield move
    move(1000)
    for server in (target, source, *cluster.primaries):
        ask(server, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID"))


def _assign_slots(servers: list[RedisServer]) -> None:
    bounds = [16384 * number // len(servers) for number in range(len(servers) + 1)]
    for server, (first, end) in zip(servers, pairwise(bounds), strict=True):
        ask(server, "CLUSTER", "ADDSLOTS", *range(first, end))


def _introduce(servers: list[RedisServer]) -> None:
    for number, server in enumerate(servers):
        # Of different age, so that two nodes never claim the same slots.
        ask(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for server in servers[1:]:
        ask(servers[0], "CLUSTER", "MEET", "127.0.0.1", server.port)
    # Before nobody knows its peers, a node cannot be told to follow one.
    for server in servers:
        _await(partial(_knows, server, len(servers)), "the nodes know each other")


def _follows(replica: RedisServer) -> bool:
    return b"master_link_status:up" in info(replica)


def _knows(server: RedisServer, count: int) -> bool:
    return len(_peers(server)) == count


def _sees(server: RedisServer, count: int) -> bool:
    state = ask(server, "CLUSTER", "INFO")
    slots = ask(server, "CLUSTER", "SLOTS")
    listed = sum(len(part) - 2 for part in slots)
    return b"cluster_state:ok" in state and listed == count


def _peers(server: RedisServer) -> list[bytes]:
    lines = ask(server, "CLUSTER", "NODES").splitlines()
    return [line for line in lines if b"handshake" not in line and b"noaddr" not in line]


def ask(server: RedisServer, *command: Any) -> Any:
    """The server's answer as bytes."""
    with server.client() as client:
        return client.execute_command(*command, NEVER_DECODE=True)


def info(server: RedisServer, *sections: str) -> bytes:
    with server.client() as client:
        client.response_callbacks.pop("INFO", None)
        answer: bytes = client.execute_command("INFO", *sections)
        return answer


def _await(happened: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@contextmanager
def running_sentinel(master: RedisServer, password: str = "") -> Iterator[RedisServer]:
    """One Sentinel that watches `master`, which wants that password, under the name "store", and needs nobody's consent to replace
    it."""
    folder = Path(tempfile.mkdtemp(prefix="verbatim-test-", dir=IN_MEMORY))
    port = free_port()
    (folder / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor store 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds store 500\nsentinel failover-timeout store 3000\n"
        + (f"sentinel auth-pass store {password}\n" if password else "")
    )
    command = [BINARY, str(folder / "sentinel.conf"), "--sentinel"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        server = RedisServer(port, process)
        wait_until_it_answers(server)
        yield server
    finally:
        process.kill()
        process.wait()
        # A child of redis-server may still be writing there.
        shutil.rmtree(folder, ignore_errors=True)


_PORTS = range(12_000, 20_000)
"""Below those that the system gives to whoever asks for any, and the bus ports too: what is free stays free until it is taken."""
_tried = count(random.SystemRandom().randrange(len(_PORTS)))
"""Where the next search begins: no port is given twice by one process, and another one is hardly ever at the same place."""


def free_port() -> int:
    """A port that is free together with its cluster bus port, 10,000 higher."""
    for place in islice(_tried, len(_PORTS)):
        port = _PORTS[place % len(_PORTS)]
        with socket.socket() as probe, socket.socket() as bus, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port
    raise AssertionError("no port is free")


def wait_until_it_answers(server: RedisServer) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "redis-server ended at its start"
        try:
            with server.client() as client:
                client.ping()
            return
        except redis.ConnectionError:
            time.sleep(0.02)
    raise AssertionError("redis-server did not answer within 60 s")


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[SharedRedis]:
    with ExitStack() as stack:
        server = stack.enter_context(running_redis())
        yield SharedRedis(server.port, server.process, stack)


@pytest.fixture(scope="module", params=["plain", "cluster", "valkey"])
def redis_kind(request: pytest.FixtureRequest, shared_redis: SharedRedis) -> Iterator[RedisKind]:
    """The store's contract holds on one server, on a cluster of three, and on Valkey."""
    if request.param == "plain":
        with running_redis() as server:
            yield server
    elif request.param == "valkey":
        with running_redis(binary=machine.require("valkey-server")) as server:
            yield server
    else:
        yield shared_redis.cluster


@pytest.fixture(scope="module")
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A plain Redis with nothing in it from the modules before: weights that they pushed would be wanted of every engine."""
    shared_redis.flushall()
    return shared_redis


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty plain Redis."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@dataclass
class Store:
    connection: StoreConnection
    sessions: SessionStore
    delivery: DeliveryStore
    weights: WeightStore
    peers: PeerStore

    @classmethod
    def at(cls, url: str, **options: float) -> Store:
        connection = StoreConnection(url, **options)  # type: ignore[arg-type]
        sessions, delivery = SessionStore(connection), DeliveryStore(connection)
        return cls(connection, sessions, delivery, WeightStore(connection), PeerStore(connection))


@pytest.fixture
async def store(redis_kind: RedisKind) -> AsyncIterator[Store]:
    """The stores over an empty Redis, once plain and once as a cluster."""
    redis_kind.flushall()
    made = Store.at(redis_kind.url, timeout_seconds=60.0)
    yield made
    await made.connection.close()
