"""Agents whose runs are looked at less often: each does its work through the service, streamed.

One plain run each. What every agent does when something breaks is shown by those that have a module of their own.
"""

from __future__ import annotations

import pytest

from tests.harnesses.agent_run import Cli, Tools, with_tools
from tests.harnesses.every_harness import (
    plain,
    test_a_fork_replays_the_run_as_far_as_its_last_call,
    test_a_slow_first_token_is_waited_for,
    test_each_turn_is_sampled_after_the_very_ids_of_the_turn_before,
    test_every_call_of_the_engine_is_recorded_once,
    test_every_endpoint_that_it_asks_for_is_there,
    test_one_conversation_is_one_main_row,
    test_replies_are_streamed_where_the_agent_asks_for_it,
    test_sampled_tokens_are_exported_once_or_quarantined,
    test_side_calls_have_roles_of_their_own,
    test_the_file_is_edited_as_the_model_said,
)
from tests.harnesses.player import Step
from tests.harnesses.stage import Played

__all__ = [
    "plain",
    "test_a_fork_replays_the_run_as_far_as_its_last_call",
    "test_a_slow_first_token_is_waited_for",
    "test_each_turn_is_sampled_after_the_very_ids_of_the_turn_before",
    "test_every_call_of_the_engine_is_recorded_once",
    "test_every_endpoint_that_it_asks_for_is_there",
    "test_one_conversation_is_one_main_row",
    "test_replies_are_streamed_where_the_agent_asks_for_it",
    "test_sampled_tokens_are_exported_once_or_quarantined",
    "test_side_calls_have_roles_of_their_own",
    "test_the_file_is_edited_as_the_model_said",
]

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
    Cli("cline", "chat", with_tools(CLINE), change_at=2, tools=CLINE),
    Cli("continue", "chat", with_tools(CONTINUE), change_at=2, tools=CONTINUE),
    # Each message of the user has the time.
    Cli("copilot-cli", "chat", with_tools(COPILOT), change_at=2, tools=COPILOT, fork_policy="minted"),
    Cli(
        *("copilot-cli", "responses", with_tools(COPILOT)),
        change_at=2,
        tools=COPILOT,
        fork_policy="minted",
        variables={"COPILOT_PROVIDER_WIRE_API": "responses"},
    ),
    Cli(
        *("copilot-cli", "messages", with_tools(COPILOT)),
        change_at=2,
        tools=COPILOT,
        fork_policy="minted",
        variables={"COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_BASE_URL": "{anthropic}"},
    ),
    # The date is in the user's first message.
    Cli("droid", "chat", with_tools(DROID), change_at=2, tools=DROID, fork_policy="minted"),
    Cli(
        *("gptme", "chat", with_tools(GPTME, last=COMPLETE)),
        change_at=2,
        tools=GPTME,
        # It writes the reasoning before a tool call into the text of its history.
        branches={1: "edited", 3: "edited"},
        # After a minute, five and so on it adds a message with the time.
        fork_policy=None,
    ),
    Cli("llm", "chat", with_tools(SHELL), change_at=2, tools=SHELL),
]


@pytest.fixture(scope="module", params=AGENTS, ids=lambda agent: f"{agent.harness}-{agent.dialect}")
def cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.param
    return found


def test_commands_run_in_the_directory_that_the_agent_was_started_in(plain: Played) -> None:
    assert plain.text_of("shown.txt") == "value = 42\n"
