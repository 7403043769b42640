"""The embedded store: a real redis-server as a child, killed and restarted in every way a service can be."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from proxy.store.embedded import EmbeddedRedis, StoreStartError
from proxy.store.states import Intent, SessionInfo
from tests.support.service.redis_server import Store

SERVICE = """
import sys
from proxy.store.embedded import EmbeddedRedis
redis = EmbeddedRedis(sys.argv[1])
print(redis.start(), redis.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is started again, and its file synced, within a moment."""
    monkeypatch.setattr("proxy.store.embedded.RESTART_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("proxy.store.embedded.SYNC_SECONDS", 0.05)


@contextmanager
def embedded(path: Path) -> Iterator[tuple[EmbeddedRedis, str]]:
    server = EmbeddedRedis(path)
    try:
        yield server, server.start()
    finally:
        server.stop()


async def record(url: str, *call_ids: str) -> None:
    store = Store.at(url)
    await store.sessions.create(SessionInfo("s", b"hash", 1.0))
    await store.sessions.begin("s", 0, Intent("dangling", None, b"", "r", 1.0))
    for call_id in call_ids:
        await store.sessions.commit("s", call_id, {call_id: call_id.encode() * 1000})
    await store.connection.close()


async def recorded(url: str) -> list[str]:
    store = Store.at(url)
    records = await store.sessions.load_records("s")
    assert [intent.call_id for intent in await store.sessions.load_intents("s")] == ["dangling"]
    await store.connection.close()
    return [record[:2].decode() for record in records]


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def answers(url: str) -> bool:
    with redis.Redis.from_url(url, protocol=2) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def kill_and_await(server: EmbeddedRedis, url: str) -> None:
    """Returns when the next one answers."""
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    eventually(lambda: server.pid != first)
    eventually(lambda: answers(url))


def ended(pid: int) -> bool:
    """Gone, or a zombie that only its new parent has still to bury."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_data_survives_a_restart(tmp_path: Path) -> None:
    with embedded(tmp_path / "made" / "here") as (_, url):
        await record(url, "c1", "c2")
    with embedded(tmp_path / "made" / "here") as (_, url):
        assert await recorded(url) == ["c1", "c2"]


def test_nothing_is_left_running_or_lying_about_after_stop(tmp_path: Path) -> None:
    with embedded(tmp_path) as (server, _):
        pid = server.pid
        assert pid is not None
    assert ended(pid)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["appendonly.aof", "redis.log", "verbatim.lock"]
    server.stop()


def test_a_stop_signal_while_redis_is_started_leaves_none_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler raises as soon as the server knows of the process, also where another thread takes the signal, as one of numpy's does."""
    server, over = EmbeddedRedis(tmp_path), threading.Event()
    launched: list[subprocess.Popen[bytes]] = []
    launch = server._launch

    def launch_and_stop(*given: Any) -> subprocess.Popen[bytes]:
        launched.append(launch(*given))
        os.kill(os.getpid(), signal.SIGTERM)
        return launched[0]

    monkeypatch.setattr(server, "_launch", launch_and_stop)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=over.wait, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            server.start()
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        assert launched[0].poll() is not None
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)
        launched[0].kill()


async def test_a_data_directory_may_have_any_name(tmp_path: Path) -> None:
    with embedded(tmp_path / "a b%20?#ä") as (_, url):
        await record(url, "c1")
        assert await recorded(url) == ["c1"]


async def test_a_data_directory_with_a_long_path_has_its_socket_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 25)
    with embedded(deep) as (_, url):
        folder = Path(url.removeprefix("unix://")).parent
        assert deep not in folder.parents
        assert folder.stat().st_mode & 0o077 == 0
        await record(url, "c1")
    assert not folder.exists()


async def test_a_killed_redis_is_started_again_with_everything_committed(tmp_path: Path) -> None:
    with embedded(tmp_path) as (server, url):
        await record(url, "c1", "c2", "c3")
        kill_and_await(server, url)
        assert await recorded(url) == ["c1", "c2", "c3"]


async def test_a_redis_that_is_killed_while_a_sync_takes_long_had_written_what_it_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis's own syncing once a second lets answers go out before they are written while a sync is under way."""
    syncing, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        go_on.wait(60.0)

    monkeypatch.setattr("proxy.store.embedded.os.fsync", slow)
    with embedded(tmp_path) as (server, url):
        await record(url, "c1")
        assert syncing.wait(60.0)
        await record(url, "c2", "c3")
        kill_and_await(server, url)
        assert await recorded(url) == ["c1", "c2", "c3"]
        with redis.Redis.from_url(url, protocol=2) as client:
            assert client.config_get("appendfsync") == {"appendfsync": "no"}
        go_on.set()


async def test_what_was_recorded_is_synced_within_a_second_or_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        found = os.fstat(descriptor)
        sync(descriptor)
        synced.append((found.st_ino, found.st_size))

    monkeypatch.setattr("proxy.store.embedded.os.fsync", noted)
    with embedded(tmp_path) as (_, url):
        await record(url, "c1", "c2")
        found = (tmp_path / "appendonly.aof").stat()
        eventually(lambda: (found.st_ino, found.st_size) in synced)


async def test_a_file_that_cannot_be_synced_is_left_to_redis_which_refuses_records_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def left_to_it() -> bool:
        with redis.Redis.from_url(url, protocol=2) as client:
            return bool(client.config_get("appendfsync") == {"appendfsync": "everysec"})

    monkeypatch.setattr("proxy.store.embedded.os.fsync", fail)
    with embedded(tmp_path) as (server, url):
        await record(url, "c1")
        eventually(left_to_it)
        kill_and_await(server, url)
        eventually(left_to_it)
    assert caplog.text.count("cannot be synced; redis-server syncs it instead") == 1


def test_two_services_on_one_data_directory_fail_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.embedded.HANDOVER_SECONDS", 120.0)
    with embedded(tmp_path):
        started = time.monotonic()
        with pytest.raises(StoreStartError) as refused:
            EmbeddedRedis(tmp_path).start()
        assert refused.value.message == (f"the data directory {tmp_path} is in use by another service (process {os.getpid()})")
        assert time.monotonic() - started < 60.0, "it waits for none that is at work"
    with embedded(tmp_path):
        pass


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Also for root, who may write anywhere but below a file and in /proc."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/verbatim-data")):
        with pytest.raises(StoreStartError, match="is not writable") as refused:
            EmbeddedRedis(path).start()
        assert str(path) in refused.value.message
        assert "\n" not in refused.value.message


def test_a_damaged_file_is_refused_with_the_reason_redis_gives(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"this is no append-only file\r\n" * 100)
    with pytest.raises(StoreStartError, match=r"redis-server ended at its start: .*append only file"):
        EmbeddedRedis(tmp_path).start()
    (tmp_path / "appendonly.aof").unlink()
    with embedded(tmp_path):
        pass


def test_redis_ends_with_a_killed_service_and_the_next_one_takes_over_its_data(tmp_path: Path) -> None:
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with service:
        assert service.stdout is not None
        url, pid = service.stdout.readline().split()
        asyncio.run(record(url, "c1", "c2"))
        service.kill()
    with embedded(tmp_path) as (_, url):
        assert asyncio.run(recorded(url)) == ["c1", "c2"]
        assert ended(int(pid)), "the old redis-server ended before the new one opened its file"


def test_ctrl_c_in_the_terminal_does_not_reach_redis(tmp_path: Path) -> None:
    with embedded(tmp_path) as (server, _):
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert os.getsid(server.pid) != os.getsid(0)
