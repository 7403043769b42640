"""Agents whose runs are looked at less often: each does its work through the service, streamed.

One plain run each. What every agent does when something breaks is shown by those that have a module of their own.
"""

from __future__ import annotations

import pytest

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_run import *  # noqa: F403
from tests.harnesses.player import Step
from tests.harnesses.stage import Played

COPILOT = Tools(
    read=lambda path: ("view", {"path": str(path)}),
    edit=lambda path, old, new: ("edit", {"path": str(path), "old_str": old, "new_str": new}),
    shell=lambda command: ("bash", {"command": command, "description": "Run it"}),
)
CONTINUE = Tools(
    read=lambda path: ("Read", {"filepath": str(path)}),
    edit=lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
    shell=lambda command: ("Bash", {"command": command}),
)
CLINE = Tools(
    read=lambda path: ("read_files", {"files": [{"path": str(path)}]}),
    edit=lambda path, old, new: ("editor", {"path": str(path), "old_text": old, "new_text": new}),
    shell=lambda command: ("run_commands", {"commands": [command]}),
)
DROID = Tools(
    read=lambda path: ("Read", {"file_path": str(path)}),
    edit=lambda path, old, new: ("Edit", {"file_path": str(path), "old_str": old, "new_str": new}),
    shell=lambda command: ("Execute", {"summary": "Run it", "command": command}),
)
PATCH = "<<<<<<< ORIGINAL\nvalue = {old}\n=======\nvalue = {new}\n>>>>>>> UPDATED"
GPTME = Tools(
    read=lambda path: ("shell", {"command": f"cat {path}"}),
    edit=lambda path, old, new: ("patch", {"path": str(path), "patch": PATCH.format(old=old, new=new)}),
    shell=lambda command: ("shell", {"command": command}),
)
SHELL = Tools(
    read=lambda path: ("shell", {"command": f"cat {path.name}"}),
    edit=lambda path, old, new: ("shell", {"command": f"sed -i 's/{old}/{new}/' {path.name}"}),
    shell=lambda command: ("shell", {"command": command}),
)
COMPLETE = Step("Done: the value is 42.", "All of it is done.", [("complete", {})])
AGENTS = [
    Cli.using("cline", "chat", CLINE),
    Cli.using("continue", "chat", CONTINUE),
    # Each message of the user has the time.
    Cli.using("copilot-cli", "chat", COPILOT, fork_policy="minted"),
    Cli.using(
        *("copilot-cli", "responses", COPILOT),
        fork_policy="minted",
        variables={"COPILOT_PROVIDER_WIRE_API": "responses"},
    ),
    Cli.using(
        *("copilot-cli", "messages", COPILOT),
        fork_policy="minted",
        variables={"COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_BASE_URL": "{anthropic}"},
    ),
    # The date is in the user's first message.
    Cli.using("droid", "chat", DROID, fork_policy="minted"),
    Cli.using(
        *("gptme", "chat", GPTME),
        last=COMPLETE,
        # It writes the reasoning before a tool call into the text of its history.
        branches={1: "edited", 3: "edited"},
        # After a minute, five and so on it adds a message with the time.
        fork_policy=None,
    ),
    Cli.using("llm", "chat", SHELL),
]


@pytest.fixture(scope="module", params=AGENTS, ids=lambda agent: f"{agent.harness}-{agent.dialect}")
def cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.param
    return found


def test_commands_run_in_the_directory_that_the_agent_was_started_in(plain: Played) -> None:
    assert plain.text_of("shown.txt") == "value = 42\n"
