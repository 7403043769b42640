"""Qwen Code does its work through the service: chat completions, streamed."""

from __future__ import annotations

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_harness import *  # noqa: F403

TOOLS = Tools(
    read=lambda path: ("read_file", {"file_path": str(path)}),
    edit=lambda path, old, new: ("edit", {"file_path": str(path), "old_string": old, "new_string": new}),
    shell=lambda command: ("run_shell_command", {"command": command, "is_background": False}),
)
CLI = Cli.using(
    *("qwen-code", "chat", TOOLS),
    # A command's result names its process group.
    fork_policy="minted",
    # It asks once more with a higher limit, then repairs the arguments and makes the call.
    malformed=(None, None, "edited", None, None),
    # What breaks within a reply ends it, though the same request would be made again after a 500.
    survives_broken_reply=False,
    survives_hang_up=False,
    # It would ask a proxy for addresses of this machine too.
    variables=dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), ""),
)
