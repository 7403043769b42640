"""Claude Code does its work through the service: messages, streamed."""

from __future__ import annotations

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_harness import *  # noqa: F403
from tests.harnesses.player import Step
from tests.harnesses.stage import Stage
from tests.harnesses.truths import check_done, check_truths

TOOLS = Tools(
    read=lambda path: ("Read", {"file_path": str(path)}),
    edit=lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
    shell=lambda command: ("Bash", {"command": command, "description": "Run a command"}),
)
CLI = Cli.using(
    *("claude-code", "messages", TOOLS),
    # The cut text comes back in a wrapper of the agent's own.
    malformed=(None, None, None, None, None),
    # The date is in the user's first message.
    fork_policy="minted",
)

ERRAND = "Read the file with the notes and report the number that it asks for."


def test_a_sub_agent_is_a_row_of_its_own(stage: Stage) -> None:
    """It is told apart by its header; its turns are one conversation, and the main one goes on undisturbed around it."""
    workdir = stage.workdir(CLI, "errand")
    brief = {"description": "Read the notes", "prompt": ERRAND, "subagent_type": "general-purpose", "run_in_background": False}
    before, read, change, *rest = CLI.steps(workdir)
    acts = [read, Step("I have it looked up.", "", [("Agent", brief)]), change, *rest]
    played = stage.play(CLI, acts, "errand", helper=[before, Step("It asks for 42.", "There it is.")])
    check_done(played)
    check_truths(played)
    reasons = [(call["role"], call["branch_reason"]) for call in played.calls if call["role"] != "main"]
    # After its first turn it is told of other agents in a system message. Rendered as a user's, that begins a new user turn,
    # for which this template leaves out the thinking before it.
    assert reasons == [("subagent", "new_root"), ("subagent", "thinking_dropped")]
    assert sorted((row["role"], len(row["call_ids"])) for row in played.rows) == [("main", 5), ("subagent", 1), ("subagent", 1)]
    assert len({row["agent"] for row in played.rows}) == 2
    assert played.branches == {}
    assert played.accounting["quarantined"] == []
