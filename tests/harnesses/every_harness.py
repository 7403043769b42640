"""The tests that every command-line agent has to pass; a test module of one agent imports them all and names its `CLI`.

The agent is real and runs by its shipped definition, and so are the service, Redis, tokenizer and chat template. What the model
says is scripted: calls of the agent's own tools, turn after turn. Each kind of run is made once and looked at by several tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_failure import *  # noqa: F403
from tests.harnesses.every_run import *  # noqa: F403
from tests.harnesses.player import Step
from tests.harnesses.scratch import FILES
from tests.harnesses.stage import Stage
from tests.harnesses.truths import check_done, check_truths


def test_two_tool_calls_in_one_reply_are_both_made(cli: Cli, tools: Tools, stage: Stage) -> None:
    workdir = stage.workdir(cli, "parallel")
    steps: Sequence[Step] = [
        Step("", "Both at once.", [tools.read(workdir / "number.py"), tools.read(workdir / "notes.txt")]),
        Step("", "", [tools.edit(workdir / "number.py", "41", "42"), tools.shell("git rev-parse --git-dir > git.txt")]),
        cli.steps(workdir)[-1],
    ]
    played = stage.play(cli, steps, "parallel")
    check_done(played)
    check_truths(played)
    assert played.text_of("git.txt") == ".git\n"
    assert [len(call["reply"].get("tool_calls") or ()) for call in played.main_calls][:2] == [2, 2]
    assert len(played.main_rows) == 1
    assert FILES["notes.txt"].strip() in played.generations[1].prompt


@pytest.mark.case(23)
def test_malformed_arguments_stay_as_they_were_sampled(cli: Cli, tools: Tools, raw_stage: Stage) -> None:
    """The JSON of a tool call is cut. Agents repair it, refuse it, or ask again; none of this touches what was sampled."""
    workdir = raw_stage.workdir(cli, "malformed")
    name, arguments = tools.read(workdir / "number.py")
    text = raw_stage.family.speak(calls=[(name, arguments)])
    steps = [
        Step("", "I look at the notes first.", [tools.read(workdir / "notes.txt")]),
        Step(raw=text.replace('.py"}', "")),
        Step("", "", [tools.read(workdir / "number.py")]),
        Step("", "", [tools.edit(workdir / "number.py", "41", "42")]),
        cli.steps(workdir)[-1],
    ]
    played = raw_stage.play(cli, steps, "malformed")
    check_done(played)
    check_truths(played)
    (cut, *_) = [call for call in played.main_calls if _is_cut(call["reply"])]
    assert "<|message|>" + cut["reply"]["tool_calls"][0]["function"]["arguments"] in steps[1].raw
    assert [call["branch_reason"] for call in played.main_calls] == list(cli.malformed)


def _is_cut(reply: dict[str, Any]) -> bool:
    return any(not call["function"]["arguments"].endswith("}") for call in reply.get("tool_calls") or ())
