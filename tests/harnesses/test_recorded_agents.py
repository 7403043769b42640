"""Agents that are not installed for the tests: what they sent in a plain run is sent again, and recorded as if they were there."""

from __future__ import annotations

import pytest

from rollout.harnesses.catalogue import load
from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_record import *  # noqa: F403
from tests.harnesses.player import Step
from tests.harnesses.recorded_run import RecordedRun
from tests.harnesses.stage import Played, Stage

KILO = Tools(
    read=lambda path: ("read", {"filePath": str(path)}),
    edit=lambda path, old, new: ("edit", {"filePath": str(path), "oldString": old, "newString": new}),
    shell=lambda command: ("bash", {"command": command}),
)
KIMI = Tools(
    read=lambda path: ("ReadFile", {"path": str(path)}),
    edit=lambda path, old, new: ("StrReplaceFile", {"path": str(path), "edit": {"old": old, "new": new}}),
    shell=lambda command: ("Shell", {"command": command}),
)
OPENHANDS = Tools(
    read=lambda path: ("file_editor", {"command": "view", "path": str(path), "security_risk": "LOW"}),
    edit=lambda path, old, new: (
        "file_editor",
        {"command": "str_replace", "path": str(path), "old_str": old, "new_str": new, "security_risk": "LOW"},
    ),
    shell=lambda command: ("terminal", {"command": command, "security_risk": "LOW"}),
)
FINISH = Step("", "All of it is done.", [("finish", {"message": "Done: the value is 42."})])
VIBE = Tools(
    read=lambda path: ("read_file", {"path": str(path)}),
    edit=lambda path, old, new: ("edit", {"file_path": str(path), "old_string": old, "new_string": new}),
    shell=lambda command: ("bash", {"command": command}),
)
AGENTS = [
    Cli.using("kilo", "chat", KILO, fork_policy="minted"),
    Cli.using("kimi-cli", "chat", KIMI),
    Cli.using("mistral-vibe", "chat", VIBE),
    Cli.using("openhands", "chat", OPENHANDS, last=FINISH, streams=False),
]


@pytest.fixture(scope="module", params=AGENTS, ids=lambda agent: agent.harness)
def plain(request: pytest.FixtureRequest, stage: Stage) -> Played:
    agent: Cli = request.param
    return stage.replay(agent, RecordedRun.of(agent.harness))


def test_the_run_was_recorded_from_the_tested_version(plain: Played) -> None:
    harness = load(plain.cli.harness)
    assert RecordedRun.of(harness.name).agent == f"{harness.name} {harness.version}"


def test_every_reply_was_answered_as_it_was_recorded(plain: Played) -> None:
    assert plain.player.surplus == plain.player.missing == []
    assert plain.player.left == 0


@pytest.mark.case(91)
def test_a_fork_replays_the_run_on_another_day(plain: Played, stage: Stage) -> None:
    forked = stage.replay(plain.cli, RecordedRun.of(plain.cli.harness).on_another_day(), plain)
    assert forked.generations == []
    assert [call["call_id"] for call in forked.calls] == [call["call_id"] for call in plain.calls]
