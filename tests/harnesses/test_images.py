"""Agents that look at an image file with their own tools: it is on the token path, and the run is one row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harnesses import test_claude_code, test_codex, test_gemini_cli
from tests.harnesses.agent_run import Cli
from tests.harnesses.player import Step, ToolCall
from tests.harnesses.stage import Stage
from tests.harnesses.truths import check_done, check_truths
from tests.support.engine.scripted_images import picture

SCREEN = picture("red", (96, 64))
PLACEHOLDERS = 24
LOOKS: dict[str, tuple[Cli, Callable[[Path], ToolCall]]] = {
    "claude-code": (test_claude_code.CLI, test_claude_code.TOOLS.read),
    "codex": (test_codex.CLI, lambda path: ("view_image", {"path": str(path)})),
    "gemini-cli": (test_gemini_cli.CLI, test_gemini_cli.TOOLS.read),
}


def put_screen(workdir: Path) -> None:
    (workdir / "screen.png").write_bytes(SCREEN)


@pytest.mark.case(75)
@pytest.mark.parametrize("name", LOOKS)
def test_a_run_that_looks_at_an_image_file_is_one_row_with_the_image(seeing_stage: Stage, name: str) -> None:
    cli, look = LOOKS[name]
    steps = cli.steps(seeing_stage.workdir(cli, "image"))
    first = Step("I look at the screen.", "", [look(seeing_stage.workdir(cli, "image") / "screen.png")])
    played = seeing_stage.play(cli, [first, *steps], "image", prepare=put_screen)
    check_done(played)
    check_truths(played)
    assert played.branches == {}
    (row,) = played.main_rows
    assert len(row["call_ids"]) == len(played.main_calls) == len(steps) + 1
    (seen,) = row["media"]
    assert (seen["digest"], seen["length"]) == (hashlib.sha256(SCREEN).hexdigest(), PLACEHOLDERS)
    start, end = seen["start"], seen["start"] + seen["length"]
    assert len(set(row["token_ids"][start:end])) == 1 and not any(row["loss_mask"][start:end])
    assert [len(call["media"]) for call in played.main_calls] == [0, *[1] * len(steps)]
    assert played.accounting["quarantined"] == []
