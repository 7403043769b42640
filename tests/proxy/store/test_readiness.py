"""What a store that is partly away, or whose disk fills, means for calls, for /readyz and for the engines."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError
from redis.crc import key_slot

from cli.doctor import check_redis
from proxy.store import keys
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import (
    BINARY,
    RedisCluster,
    RedisServer,
    ask,
    free_port,
    running_cluster,
    running_redis,
    wait_until_it_answers,
)
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import wait_until

pytestmark = pytest.mark.usefixtures("often_visited")


def holder(cluster: RedisCluster, key: str) -> RedisServer:
    bounds = [16384 * number // len(cluster.primaries) for number in range(len(cluster.primaries) + 1)]
    slot = key_slot(key.encode())
    return next(server for server, end in zip(cluster.primaries, bounds[1:], strict=True) if slot < end)


def session_at(cluster: RedisCluster, server: RedisServer) -> str:
    return next(f"s{number}" for number in count() if holder(cluster, keys.state(f"s{number}")) is server)


def refusal(asked: APIStatusError) -> tuple[int, str]:
    return asked.status_code, str(asked.body["code"] if isinstance(asked.body, dict) else asked.body)


def test_a_part_of_a_cluster_that_is_away_takes_neither_the_rest_nor_an_engine_out_of_service() -> None:
    """/readyz asked every primary, and a store error while weights were read took the engine out: every call was refused."""
    with running_cluster() as cluster:
        for server in cluster.primaries:
            ask(server, "CONFIG", "SET", "cluster-require-full-coverage", "no")
        lost = holder(cluster, keys.weights("current", ""))
        kept = next(server for server in cluster.primaries if server is not lost)
        with (
            ScriptedEngine() as engine,
            RunningService(engine.url, cluster.url, engine_api="token", redis_retry_seconds=0) as service,
        ):
            there, here = (service.session(session_id=session_at(cluster, server)) for server in (lost, kept))
            for session in (there, here):
                engine.say("before")
                assert session.answer("q")["content"] == "before"
            lost.kill()

            def seen() -> bool:
                return bool(service.request("GET", "/readyz").json().get("notes"))

            wait_until(seen, 60, "the part is missed")
            ready = service.request("GET", "/readyz")
            (note,) = ready.json()["notes"]
            assert any(
                check.state == "note" and "a part of the store is away" in check.found
                for check in asyncio.run(check_redis(cluster.url))
            )
            assert ready.status_code == 200 and f"127.0.0.1:{lost.port}" in note and "of 16384 slots" in note
            engine.say("after")
            assert here.answer("q2")["content"] == "after"
            with pytest.raises(APIStatusError) as refused:
                there.answer("q2")
            assert refusal(refused.value) == (503, "store_unavailable")
            (replica,) = service.request("GET", "/engines").json()["replicas"]
            assert replica["status"] == "serving"
        with (
            ScriptedEngine() as engine,
            RunningService(
                engine.url, cluster.url, engine_api="token", redis_retry_seconds=0, engine_connect_seconds=1.0
            ) as service,
        ):
            # A service that starts now cannot know the weights: that is the store's fault, too.
            wait_until(lambda: "not known" in service.request("GET", "/readyz").text, 60, "the engine was met")
            asked = httpx.post(
                f"{service.url}/s/{here.session_id}/v1/chat/completions",
                headers={"Authorization": f"Bearer {here.api_key}"},
                json={"model": "policy", "messages": [{"role": "user", "content": "q3"}]},
                timeout=120,
            )
            assert (asked.status_code, asked.json()["error"]["code"]) == (503, "store_unavailable")


@contextmanager
def redis_on_a_disk_of(kibibytes: int, folder: Path) -> Iterator[RedisServer]:
    """Its files may be so large; beyond that a write fails as on a full disk."""
    port = free_port()
    shell = f'trap "" XFSZ; ulimit -f {kibibytes}; exec "$@"'
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes", "--save", ""]
    process = subprocess.Popen(["bash", "-c", shell, "bash", BINARY, *flags], stdout=subprocess.DEVNULL)
    server = RedisServer(port, process)
    try:
        wait_until_it_answers(server)
        yield server
    finally:
        server.kill()


def test_a_full_disk_is_not_ready_and_no_message_quotes_a_script(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """/readyz said ready while every call was 503, and the harness read frames of Lua."""
    with ExitStack() as stack:
        server, engine = stack.enter_context(redis_on_a_disk_of(256, tmp_path)), stack.enter_context(ScriptedEngine())
        with RunningService(engine.url, server.url, engine_api="token", redis_retry_seconds=0) as service:
            session = service.session()
            engine.say("before")
            assert session.answer("q")["content"] == "before"
            assert service.request("GET", "/readyz").status_code == 200
            with server.client() as client:
                client.set("ballast", os.urandom(2**19))
                wait_until(lambda: client.info()["aof_last_write_status"] == "err", 60, "a write has failed")
            (check,) = asyncio.run(check_redis(server.url))
            assert check.state == "fix" and "cannot write to its disk" in check.found
            ready = service.request("GET", "/readyz")
            assert ready.status_code == 503 and "cannot write to its disk (MISCONF)" in ready.json()["reason"]
            with pytest.raises(APIStatusError) as refused:
                session.answer("q2")
            assert refusal(refused.value) == (503, "store_unavailable")
            assert "cannot write to its disk" in refused.value.message
            assert not re.search(r"script|user_|f_[0-9a-f]{40}|call to", refused.value.message)
            wait_until(lambda: "cannot write to its disk" in caplog.text, 60, "the log says it")


def test_little_room_on_the_stores_disk_is_said_while_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "redis.sock"
    with running_redis("--unixsocket", str(path)), ScriptedEngine() as engine, caplog.at_level(logging.WARNING):
        with RunningService(engine.url, f"unix://{path}", engine_api="token") as service:
            assert service.request("GET", "/readyz").json() == {"status": "ready"}
            free = re.search(r"^verbatim_store_free_bytes (\S+)$", service.request("GET", "/metrics").text, re.MULTILINE)
            assert free is not None and float(free[1]) > 2**20
        monkeypatch.setattr("proxy.store.connection.LOW_BYTES", 2**60)
        with RunningService(engine.url, f"unix://{path}", engine_api="token") as service:
            ready = service.request("GET", "/readyz")
            assert ready.status_code == 200 and "MiB is free where the Redis at" in ready.json()["notes"][0]
            wait_until(lambda: "MiB is free where" in caplog.text, 60, "the log says it")
