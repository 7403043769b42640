"""mini-swe-agent does its work through the service: chat completions, whole answers, one tool."""

from __future__ import annotations

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_harness import *  # noqa: F403
from tests.harnesses.player import Step

TOOLS = Tools(
    read=lambda path: ("bash", {"command": f"cat {path.name}"}),
    edit=lambda path, old, new: ("bash", {"command": f"sed -i 's/{old}/{new}/' {path.name}"}),
    shell=lambda command: ("bash", {"command": command}),
)
LAST = Step("Done.", "All of it is done.", [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})])
CLI = Cli.using(
    *("mini-swe-agent", "chat", TOOLS),
    last=LAST,
    streams=False,
    # It drops the reply that it cannot read and says what was wrong with it.
    malformed=(None, None, "edited", None, None),
)
