"""Gemini CLI does its work through the service: generateContent, streamed."""

from __future__ import annotations

import re

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_harness import *  # noqa: F403
from tests.harnesses.stage import Played

TOOLS = Tools(
    read=lambda path: ("read_file", {"file_path": str(path)}),
    edit=lambda path, old, new: (
        "replace",
        {"file_path": str(path), "instruction": "Set the value.", "old_string": old, "new_string": new},
    ),
    shell=lambda command: ("run_shell_command", {"command": command}),
)
CLI = Cli.using(
    *("gemini-cli", "gemini", TOOLS),
    # The cut text comes back in the wrapper that it was sent in.
    malformed=(None, None, None, None, None),
    # A command's result names its process group.
    fork_policy="minted",
)


def test_its_prompt_shows_one_skill_since_the_order_of_two_differs_between_runs(plain: Played) -> None:
    assert re.findall("<skill>\\s*<name>(.*)</name>", plain.generations[0].prompt) == ["skill-creator"]
