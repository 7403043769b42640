"""opencode does its work through the service: chat completions, streamed."""

from __future__ import annotations

from dataclasses import replace

from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.every_harness import *  # noqa: F403
from tests.harnesses.stage import Stage
from tests.harnesses.truths import check_done, check_truths

TOOLS = Tools(
    read=lambda path: ("read", {"filePath": str(path)}),
    edit=lambda path, old, new: ("edit", {"filePath": str(path), "oldString": old, "newString": new}),
    shell=lambda command: ("bash", {"command": command}),
)
CLI = Cli.using(
    *("opencode", "chat", TOOLS),
    # It puts a call of a tool `invalid` in the place of the one it cannot read.
    malformed=(None, None, "edited", None, None),
)


def test_a_title_is_a_side_call(stage: Stage) -> None:
    """Its definition turns titles off; where a user turns them on, the call for one is told apart and not trained."""
    titled = replace(
        CLI,
        side={"title generator": "One number"},
        variables={"OPENCODE_CONFIG_CONTENT": '{"agent": {"title": {"disable": false}}}'},
    )
    played = stage.play(titled, CLI.steps(stage.workdir(CLI, "titled")), "titled")
    check_done(played)
    check_truths(played)
    assert played.side_roles == ["side"]
    assert len(played.main_rows) == 1
    assert [item["reason"] for item in played.accounting["quarantined"]] == ["role_side"]
