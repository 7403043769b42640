"""Claude Code does its work through the service: messages, streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.harnesses.agent_run import Cli, Tools, with_tools
from tests.harnesses.every_harness import *  # noqa: F403
from tests.harnesses.every_harness import check_done, check_truths
from tests.harnesses.player import Step
from tests.harnesses.scratch import TASK
from tests.harnesses.stage import Stage

TOOLS = Tools(
    read=lambda path: ("Read", {"file_path": str(path)}),
    edit=lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
    shell=lambda command: ("Bash", {"command": command, "description": "Run a command"}),
)
CLI = Cli(
    harness="claude-code",
    dialect="messages",
    steps=with_tools(TOOLS),
    change_at=2,
    tools=TOOLS,
    # The cut text comes back in a wrapper of the agent's own.
    malformed=(None, None, None, None, None),
    # The date is in the user's first message.
    fork_policy="minted",
)

LONG = ("long-1.txt", "long-2.txt")
SUMMARY = f"<summary>I was asked: {TASK} So far I have read a lot.</summary>"
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


def write_long_files(workdir: Path) -> None:
    for name in LONG:
        (workdir / name).write_text("the weather in Paris is sunny today\n" * 1500, encoding="utf-8")


def test_a_compaction_is_a_call_of_its_own_kind_and_what_follows_a_new_row(stage: Stage) -> None:
    """The window is declared small and a file is large: the agent has its history summed up, and goes on from the summary."""
    steps = CLI.steps(stage.workdir(CLI, "compaction"))
    long = [Step("", "", [TOOLS.read(stage.workdir(CLI, "compaction") / name)]) for name in LONG]
    cli = replace(
        CLI,
        side={"Your task is to create a detailed summary of the conversation": SUMMARY},
        variables={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"},
    )
    played = stage.play(cli, [*long, *steps], "compaction", prepare=write_long_files)
    check_done(played)
    check_truths(played)
    assert [call["role"] for call in played.calls] == ["main", "main", "compaction", *["main"] * 5]
    # It has everything but its last turn summed up, beside that turn, and the next one begins anew.
    assert played.branches == {2: "new_root"}
    assert [(row["role"], len(row["call_ids"])) for row in played.rows] == [("main", 2), ("compaction", 2), ("main", 5)]
    # Its definition says how it is known.
    assert played.calls[2]["role_source"] == "declared"
    assert [item["reason"] for item in played.accounting["quarantined"]] == ["role_compaction"]
