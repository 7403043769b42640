"""Aider does its work through the service: chat completions, streamed, without tools; edits are text.

It ends a turn with the user's tests and shows the model their failure. Before each turn it writes the files' present contents
into the middle of its history: what follows an edit is another conversation, and so another row.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harnesses.agent_run import RARE, Cli
from tests.harnesses.every_failure import *  # noqa: F403
from tests.harnesses.every_run import *  # noqa: F403
from tests.harnesses.player import Step
from tests.harnesses.stage import Stage
from tests.harnesses.truths import check_done, check_truths


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
