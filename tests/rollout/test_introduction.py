"""What a node makes sure of before it takes rollouts, and what it says of a service that does not see it."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import time
from pathlib import Path

import pytest

from cli import control as token_of
from cli.control import CommandClient, RequestFailed
from cli.node import await_admission, await_listing
from cli.refusal import CommandError
from contract.attempts import NodeState
from proxy.store.connection import StoreConnection
from proxy.store.tasks.work import WorkStore
from rollout.runtimes.local.runtime import LocalKind
from rollout.sessions import Sessions
from tests.support.runtimes.rollout_nodes import SECONDS
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import serving_tasks, submit
from tests.support.service.running_service import ADMIN, NODE, RunningService, kept
from tests.support.service.verbatim_process import COMMAND, environment, verbatim, wait_until


def test_a_node_with_a_wrong_token_takes_nothing(redis_server: RedisServer, tmp_path: Path) -> None:
    """It would fail every rollout of the queue, one attempt after another."""
    redis_server.flushall()
    with serving_tasks(redis_server.url) as service:
        submit(service, task_id="a", harness="shell")
        given = ["--redis", redis_server.url, "--url", service.url, "--data-dir", str(tmp_path), "--runtime", "local"]
        variables = {"VERBATIM_ADMIN_TOKEN": "another", "VERBATIM_LOCAL_SANDBOX": "none"}
        done = verbatim("node", *given, timeout_seconds=SECONDS, **variables)
        assert (done.returncode, done.stderr) == (
            1,
            f"verbatim: {service.url} does not know the token: set VERBATIM_ADMIN_TOKEN to the one that verbatim serve uses\n",
        )
        (rollout,) = service.request("GET", "/tasks/a/rollouts").json()["rollouts"]
    assert (rollout["status"], rollout["failures"]) == ("queued", [])


@pytest.mark.parametrize("variable", ["VERBATIM_NODE_TOKEN", "VERBATIM_ADMIN_TOKEN"])
async def test_a_node_is_let_in_with_a_token_of_its_own_or_the_admins(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in (token_of.NODE, token_of.ADMIN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, NODE if variable == token_of.NODE else ADMIN)
    with serving_tasks(redis_server.url) as service:
        control = CommandClient(service.url, variables=(token_of.NODE, token_of.ADMIN))
        await await_admission(control)
        if variable == token_of.NODE:
            for path in ("/tasks", "/sessions"):
                with pytest.raises(RequestFailed, match="the node token does not open this"):
                    await asyncio.to_thread(control.get, path)


async def test_a_rollouts_session_is_opened_rewarded_and_closed_with_a_nodes_token(redis_server: RedisServer) -> None:
    redis_server.flushall()
    with serving_tasks(redis_server.url) as service:
        async with Sessions(service.url, NODE) as sessions:
            opened = await sessions.create("t.0.1", task_id="t", group_id="t")
            assert await sessions.list_calls(opened.session_id) == []
            await sessions.reward(opened.session_id, 1.0)
            await sessions.close_session(opened.session_id, "completed")
            assert (await sessions.load(opened.session_id))["reward"] == 1.0
            assert await sessions.delete(opened.session_id)


def test_a_node_says_at_its_start_which_limits_hold(redis_server: RedisServer, tmp_path: Path) -> None:
    redis_server.flushall()
    told = f"runtimes of kind local: {LocalKind().describe_limits()}"
    log = tmp_path / "log"
    with serving_tasks(redis_server.url) as service, log.open("w") as written:
        given = ["--redis", redis_server.url, "--url", service.url, "--data-dir", str(tmp_path / "node"), "--runtime", "local"]
        variables = environment(
            VERBATIM_ADMIN_TOKEN=ADMIN, VERBATIM_LOCAL_SANDBOX="none", VERBATIM_LOCAL_DIR=str(tmp_path / "r")
        )
        with subprocess.Popen([*COMMAND, "node", *given], env=variables, stderr=written) as node:
            try:
                wait_until(lambda: told in log.read_text() or node.poll() is not None, SECONDS, "it says which limits hold")
            finally:
                node.kill()
    assert told in log.read_text()


async def test_a_service_that_is_away_is_waited_for(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with serving_tasks(redis_server.url) as first:
        url, adding = first.url, first.adding
    port = int(url.rpartition(":")[2])
    waiting = asyncio.create_task(await_admission(CommandClient(url, ADMIN)))
    with kept(port):
        async with asyncio.timeout(SECONDS):
            while "no rollouts are taken yet: no service at" not in caplog.text and not waiting.done():
                await asyncio.sleep(0.02)
            assert not waiting.done()
            with RunningService("http://127.0.0.1:9", redis_server.url, adding=adding, engine_api="chat").on(port):
                await waiting
    assert caplog.text.count("no rollouts are taken yet") == 1


def test_a_node_writes_its_log_as_json_where_it_is_told_to(redis_server: RedisServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = [
        "--redis",
        redis_server.url,
        "--url",
        "http://127.0.0.1:9",
        "--data-dir",
        str(tmp_path / "node"),
        "--runtime",
        "local",
    ]
    variables = environment(VERBATIM_ADMIN_TOKEN=ADMIN, VERBATIM_LOCAL_SANDBOX="none", VERBATIM_LOG_FORMAT="json")
    with log.open("w") as written, subprocess.Popen([*COMMAND, "node", *flags], env=variables, stderr=written) as node:
        try:
            wait_until(lambda: "no rollouts are taken yet" in log.read_text() or node.poll() is not None, SECONDS, "a line")
        finally:
            node.kill()
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert told and all({"time", "level", "logger", "message"} <= line.keys() for line in told)


async def test_what_is_no_service_is_not_waited_for() -> None:
    with pytest.raises(CommandError):
        await await_admission(CommandClient("ftp://127.0.0.1:9", ADMIN))


async def test_a_node_that_the_service_does_not_see_says_so_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its Redis may be another than the service's: it would wait for tasks for ever."""
    redis_server.flushall()
    connection = StoreConnection(redis_server.url)
    try:
        with serving_tasks(redis_server.url) as service:
            looking = asyncio.create_task(await_listing(CommandClient(service.url, ADMIN), "n", patience_seconds=0))
            async with asyncio.timeout(SECONDS):
                while "does not list this node" not in caplog.text:
                    await asyncio.sleep(0.02)
                state = NodeState("n", {}, ["local"], cpus=1.0, memory_mb=256, lease_seconds=30.0, seen_at=time.time())
                await WorkStore(connection).beat(state, [], time.time())
                await looking
    finally:
        await connection.close()
    assert [each.levelno for each in caplog.records if "does not list" in each.getMessage()] == [logging.WARNING]
