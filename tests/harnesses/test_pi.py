"""Pi does its work through the service: chat completions, streamed."""

from __future__ import annotations

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_harness import *  # noqa: F403

TOOLS = Tools(
    read=lambda path: ("read", {"path": path.name}),
    edit=lambda path, old, new: ("edit", {"path": path.name, "edits": [{"oldText": old, "newText": new}]}),
    shell=lambda command: ("bash", {"command": command}),
)
CLI = Cli.using(
    *("pi", "chat", TOOLS),
    # It repairs the arguments and makes the call; its history has the repaired ones.
    malformed=(None, None, "edited", None, None),
    # It looks for words such as 'server error' in an error event's message, and gives up where it finds none.
    survives_broken_reply=False,
)
