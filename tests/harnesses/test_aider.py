"""Aider does its work through the service: chat completions, streamed, without tools; edits are text.

It ends a turn with the user's tests and shows the model their failure. Before each turn it writes the files' present contents
into the middle of its history: what follows an edit is another conversation, and so another row.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harnesses.agent_run import RARE, Cli
from tests.harnesses.every_harness import (
    check_done,
    check_truths,
    cli,
    plain,
    test_a_connection_that_breaks_within_a_reply_loses_nothing,
    test_a_fork_replays_the_run_as_far_as_its_last_call,
    test_a_reply_whose_engine_breaks_off_in_the_middle_is_kept_as_far_as_it_came,
    test_a_slow_first_token_is_waited_for,
    test_calls_that_fail_are_made_again_and_go_on_from_the_same_turn,
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
from tests.harnesses.stage import Stage

__all__ = [
    "cli",
    "plain",
    "test_a_fork_replays_the_run_as_far_as_its_last_call",
    "test_a_connection_that_breaks_within_a_reply_loses_nothing",
    "test_a_reply_whose_engine_breaks_off_in_the_middle_is_kept_as_far_as_it_came",
    "test_a_slow_first_token_is_waited_for",
    "test_calls_that_fail_are_made_again_and_go_on_from_the_same_turn",
    "test_each_turn_is_sampled_after_the_very_ids_of_the_turn_before",
    "test_every_call_of_the_engine_is_recorded_once",
    "test_every_endpoint_that_it_asks_for_is_there",
    "test_one_conversation_is_one_main_row",
    "test_replies_are_streamed_where_the_agent_asks_for_it",
    "test_sampled_tokens_are_exported_once_or_quarantined",
    "test_side_calls_have_roles_of_their_own",
    "test_the_file_is_edited_as_the_model_said",
]


def listing(value: int, remark: str) -> str:
    """number.py in aider's format for whole files."""
    return f"number.py\n```\nvalue = {value}\n```\n{remark} The test will say whether the value in the file is right now."


def steps(workdir: Path) -> list[Step]:
    first = Step(listing(43, "It is one more."), "One more, I think.")
    return [first, Step(listing(42, f"That was no {RARE}."), "It must be 42.")]


CLI = Cli(
    harness="aider",
    dialect="chat",
    steps=steps,
    change_at=1,
    branches={1: "new_root"},
    # A message with files is not the same in every run.
    fork_policy=None,
    # What came of a reply before its connection broke it takes for the whole of it.
    survives_hang_up=False,
    side={r"generate.*commit message": "feat: count to the number"},
    variables={"AIDER_AUTO_TEST": "true", "AIDER_TEST_CMD": "grep -q 42 number.py"},
)


def test_a_commit_message_is_a_side_call(stage: Stage) -> None:
    """Told to commit what is not committed, aider asks for the message in a call of its own."""

    def leave_uncommitted(workdir: Path) -> None:
        (workdir / "number.py").write_text("value = 42\n", encoding="utf-8")

    played = stage.play(CLI, [], "commit", prompt="/commit", prepare=leave_uncommitted)
    check_done(played)
    check_truths(played)
    assert [call["role"] for call in played.calls] == ["side"]
    assert [item["reason"] for item in played.accounting["quarantined"]] == ["role_side"]
    log = subprocess.run(["git", "-C", played.workdir, "log", "-1", "--format=%s"], capture_output=True, text=True, check=True)
    assert log.stdout.strip() == "feat: count to the number"
