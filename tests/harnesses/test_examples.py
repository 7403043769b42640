"""The example tasks are solved by the agents that test_rollouts.py does not run: each by its own means, in a sandbox of a node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.learn.agents import with_agents
from tests.harnesses import test_aider, test_gemini_cli, test_opencode, test_qwen_code
from tests.harnesses.agent_run import Cli, Tools
from tests.harnesses.rollout_plays import AGENT_SECONDS, Exercise
from tests.harnesses.rollout_trial import RolloutTrial
from tests.support.machine import require

SHELL = Tools(
    read=lambda path: ("shell", {"command": f"cat {path.name}"}),
    edit=lambda path, old, new: ("shell", {"command": f"sed -i 's/{old}/{new}/' {path.name}"}),
    shell=lambda command: ("shell", {"command": command}),
)
AGENTS_SDK = Cli.using("openai-agents", "responses", SHELL)
GIVEN = {
    "fix-roman": test_gemini_cli.CLI,
    "rotate-logs": test_qwen_code.CLI,
    "sql-report": test_opencode.CLI,
    "csv-summary": test_aider.CLI,
    "split-invoice": AGENTS_SDK,
}


@pytest.mark.timeout(3000)
def test_an_example_is_solved_by_every_other_agent_in_a_sandbox(tmp_path: Path) -> None:
    """One rollout each, with nothing killed; every token of them is the trainer's, as the engine sampled it."""
    require("bwrap")
    given = [
        Exercise(f"t-{cli.harness}", example, cli, samples=1, hurried=False, agent_seconds=AGENT_SECONDS, solved=True)
        for example, cli in GIVEN.items()
    ]
    # The agents SDK is a library: it is where the tests' own interpreter is.
    variables = with_agents(Path(sys.prefix))
    trial = RolloutTrial(tmp_path, given, seed=1, nodes=1, most_seconds=2400, variables=variables)
    done = trial.run(pause_seconds=0, most_kills=0).accounted
    assert {harness: dict(plays) for harness, plays in done.outcomes.items()} == {
        cli.harness: {"solve": 1} for cli in GIVEN.values()
    }
    assert (done.statuses, done.attempts) == ({"completed": 5}, 5)
    assert done.groups == 5
