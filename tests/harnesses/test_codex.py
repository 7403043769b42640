"""Codex does its work through the service: responses, streamed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.conftest import KEEPALIVE_SECONDS
from tests.harnesses.every_harness import *  # noqa: F403
from tests.harnesses.player import Act, Step
from tests.harnesses.stage import Stage
from tests.harnesses.truths import check_done, check_truths
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

TOOLS = Tools(
    read=lambda path: ("exec_command", {"cmd": f"cat {path.name}"}),
    edit=lambda path, old, new: ("exec_command", {"cmd": f"sed -i 's/{old}/{new}/' {path.name}"}),
    shell=lambda command: ("exec_command", {"cmd": command}),
)
CLI = Cli.using(
    *("codex", "responses", TOOLS),
    # The cut text comes back as it was, with the error that it made.
    malformed=(None, None, None, None, None),
    # Each result of a command names its chunk by a random id, and says how long it took.
    fork_policy="minted",
)

ERRAND = "Read the file with the notes and report the number that it asks for."


def test_a_sub_agent_is_a_row_of_its_own(stage: Stage) -> None:
    """It is told apart by its headers; its turns are one conversation, and the main one goes on undisturbed around it."""
    before, read, change, *rest = CLI.steps(stage.workdir(CLI, "errand"))

    def wait(prompt: str) -> Step:
        (agent,) = set(re.findall(r'"agent_id\W+([0-9a-f-]{36})', prompt))
        return Step("", "", [("multi_agent_v1__wait_agent", {"targets": [agent], "timeout_ms": 60_000})])

    acts: list[Act] = [
        read,
        Step("I have it looked up.", "", [("multi_agent_v1__spawn_agent", {"message": ERRAND})]),
        wait,
        change,
        *rest,
    ]
    played = stage.play(CLI, acts, "errand", helper=[before, Step("It asks for 42.", "There it is.")])
    check_done(played)
    check_truths(played)
    assert played.side_roles == ["subagent", "subagent"]
    assert sorted((row["role"], len(row["call_ids"])) for row in played.rows) == [("main", 6), ("subagent", 2)]
    assert len({row["agent"] for row in played.rows}) == 2
    assert played.accounting["quarantined"] == []


IDLE_SECONDS = 4 * KEEPALIVE_SECONDS


def test_signs_of_life_count_as_such_for_it(stage: Stage) -> None:
    """It gives a reply up of which nothing came for so long, comments not counted, and makes the call again."""

    def lose_patience_soon(home: Path) -> None:
        config = home / ".codex" / "config.toml"
        patience = f'wire_api = "responses"\nstream_idle_timeout_ms = {IDLE_SECONDS * 1000:.0f}'
        text = config.read_text(encoding="utf-8").replace('wire_api = "responses"', patience)
        config.write_text(text, encoding="utf-8")

    steps = list(CLI.steps(stage.workdir(CLI, "patience")))
    gate = threading.Event()
    change = replace(steps[CLI.change_at], how={"gate": gate, "gate_after": 5})

    def change_after_a_pause(prompt: str) -> Step:
        """The engine falls silent when it has begun."""
        threading.Timer(3 * IDLE_SECONDS, gate.set).start()
        return change

    acts: list[Act] = [*steps[: CLI.change_at], change_after_a_pause, *steps[CLI.change_at + 1 :]]
    played = stage.play(CLI, acts, "patience", at_home=lose_patience_soon)
    check_done(played)
    check_truths(played)
    assert len(played.generations) == len(played.main_calls) == len(acts), "no call was made twice"


@pytest.fixture
def limited_stage(redis_server: RedisServer, tmp_path: Path) -> Iterator[tuple[Stage, RunningService]]:
    """A session may begin a call every two seconds."""
    with (
        ScriptedEngine("qwen3", max_model_len=131_072) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", call_limits={"per_second": 0.5}) as service,
    ):
        yield Stage(engine, service, tmp_path), service


def test_a_call_too_many_is_made_again_when_it_may_begin(limited_stage: tuple[Stage, RunningService]) -> None:
    """A 429 that does not say when would end it."""
    stage, service = limited_stage
    steps = CLI.steps(stage.workdir(CLI, "limited"))
    played = stage.play(CLI, steps, "limited")
    check_done(played)
    check_truths(played)
    assert len(played.main_calls) == len(steps) and len(played.main_rows) == 1
    refused = [line for line in service.request("GET", "/metrics").text.splitlines() if "too_many_calls" in line]
    assert refused, "it was never told to wait"
