"""Gemini CLI does its work through the service: generateContent, streamed."""

from __future__ import annotations

from tests.harnesses.agent_run import Cli, Tools, with_tools
from tests.harnesses.every_harness import *  # noqa: F403

TOOLS = Tools(
    read=lambda path: ("read_file", {"file_path": str(path)}),
    edit=lambda path, old, new: (
        "replace",
        {"file_path": str(path), "instruction": "Set the value.", "old_string": old, "new_string": new},
    ),
    shell=lambda command: ("run_shell_command", {"command": command}),
)
CLI = Cli(
    harness="gemini-cli",
    dialect="gemini",
    steps=with_tools(TOOLS),
    change_at=2,
    tools=TOOLS,
    # The cut text comes back in the wrapper that it was sent in.
    malformed=(None, None, None, None, None),
    # A command's result names its process group.
    fork_policy="minted",
)
