"""What a node makes sure of before it takes rollouts, and what it says of a service that does not see it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from cli import control as token_of
from cli.control import CommandClient, RequestFailed
from cli.node import await_admission
from cli.refusal import CommandError
from contract.attempts import Failure, FailureRecord, NodeState, Superseded
from contract.client import AsyncServiceClient
from contract.errors import ResourceConflict
from rollout.attempts_client import AttemptsClient
from rollout.runtimes.local.runtime import LocalKind
from tests.support.runtimes.rollout_nodes import SECONDS, key_of
from tests.support.runtimes.rollout_stores import ROOM, WELL
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import serving_tasks, submit
from tests.support.service.running_service import ADMIN, NODE, RunningService, kept
from tests.support.service.verbatim_process import COMMAND, environment, verbatim, wait_until

STATE = NodeState("owner", {}, ["local"], 4.0, 4096, lease_seconds=30.0)
PARTS = (("GET", ""), ("DELETE", ""), ("POST", "/reward"), ("POST", "/close"), ("PUT", "/log"), ("GET", "/calls"))


def test_a_node_with_a_wrong_token_takes_nothing(redis_server: RedisServer, tmp_path: Path) -> None:
    """It would fail every rollout of the queue, one attempt after another."""
    redis_server.flushall()
    with serving_tasks(redis_server.url) as service:
        submit(service, task_id="a", harness="shell")
        given = ["--url", service.url, "--data-dir", str(tmp_path), "--runtime", "local"]
        variables = {"VERBATIM_ADMIN_TOKEN": "another", "VERBATIM_LOCAL_SANDBOX": "none"}
        done = verbatim("node", *given, timeout_seconds=SECONDS, **variables)
        assert (done.returncode, done.stderr) == (
            1,
            f"verbatim: {service.url} does not know the token: set VERBATIM_ADMIN_TOKEN to the one that verbatim serve uses\n",
        )
        (rollout,) = service.request("GET", "/tasks/a/rollouts").json()["rollouts"]
    assert (rollout["status"], rollout["failures"]) == ("queued", [])


@pytest.mark.parametrize("variable", ["VERBATIM_NODE_TOKEN", "VERBATIM_ADMIN_TOKEN"])
async def test_a_node_is_let_in_with_its_own_token_or_the_admins(
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


async def test_a_nodes_token_opens_no_session_but_those_of_the_rollouts_that_the_node_has(redis_server: RedisServer) -> None:
    redis_server.flushall()
    with serving_tasks(redis_server.url) as service:
        service.request("POST", "/sessions", json={"session_id": "another's"})
        submit(service, task_id="t", harness="shell")
        asked = [("POST", "/sessions"), *((method, "/sessions/another's" + part) for method, part in PARTS)]
        for method, path in asked:
            answer = service.request(method, path, NODE, json={})
            assert answer.status_code == 403, path
        async with AsyncServiceClient(service.url, NODE) as http:
            owner, thief, forger = [
                AttemptsClient(http, name, key_of(key))
                for name, key in (("owner", "owner"), ("thief", "thief"), ("owner", "thief"))
            ]
            await owner.extend(STATE, [])
            taken = await owner.take(ROOM, 30.0, "token-of-it", 0)
            await owner.open(taken.attempt, (), "")
            assert (await owner.load_session(taken.attempt))["status"] == "open" and await owner.list_calls(taken.attempt) == []
            forgeries = [taken.attempt, replace(taken.attempt, attempt=2), replace(taken.attempt, task_id="none")]
            for node, forged in [*((thief, each) for each in forgeries), (forger, taken.attempt)]:
                for act in (
                    node.load_session(forged),
                    node.list_calls(forged),
                    node.store_log(forged, "mine"),
                    node.open_judge(forged),
                    node.open(forged, (), ""),
                    node.report(forged, "ready"),
                    node.finish(forged, WELL),
                    node.put_back(forged),
                    node.give_way(forged),
                    node.give_up(forged, FailureRecord(Failure.NODE_FAILED, "")),
                ):
                    with pytest.raises(Superseded):
                        await act
            for claim in (forger.take(ROOM, 0.001, "a-thiefs-token", 0), forger.extend(STATE, [taken.attempt]), forger.leave()):
                with pytest.raises(ResourceConflict, match="the name 'owner' is another node's"):
                    await claim
            assert await owner.extend(STATE, [taken.attempt]) == ([], ANY)
            assert (await owner.load_session(taken.attempt))["status"] == "open"


def test_a_node_says_at_its_start_which_limits_hold(redis_server: RedisServer, tmp_path: Path) -> None:
    redis_server.flushall()
    told = f"runtimes of kind local: {LocalKind().describe_limits()}"
    log = tmp_path / "log"
    with serving_tasks(redis_server.url) as service, log.open("w") as written:
        given = ["--url", service.url, "--data-dir", str(tmp_path / "node"), "--runtime", "local"]
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
    flags = ["--url", "http://127.0.0.1:9", "--data-dir", str(tmp_path / "node"), "--runtime", "local"]
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
