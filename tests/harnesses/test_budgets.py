"""Every agent whose session has spent its budget ends by itself: it gives up after a few refusals and does not hang.

The agents are real, and so is the refusal, in the dialect that each of them speaks.
"""

from __future__ import annotations

import pytest

from tests.harnesses import (
    test_claude_code,
    test_codex,
    test_gemini_cli,
    test_mini_swe_agent,
    test_more_agents,
    test_opencode,
    test_pi,
    test_qwen_code,
)
from tests.harnesses.agent_run import Cli
from tests.harnesses.stage import Heard, Stage

MODULES = (test_claude_code, test_codex, test_gemini_cli, test_mini_swe_agent, test_opencode, test_pi, test_qwen_code)
COPILOT = [cli for cli in test_more_agents.AGENTS if cli.harness == "copilot-cli"]
AGENTS = [*(module.CLI for module in MODULES), *COPILOT]
"""One of each client library: what the others do follows from theirs."""


MOST_REFUSALS = 6
"""Codex's: it connects again five times, within seconds."""


@pytest.mark.case(42)
@pytest.mark.parametrize("cli", AGENTS, ids=lambda cli: f"{cli.harness}-{cli.dialect}")
def test_an_agent_whose_budget_is_spent_ends_by_itself(cli: Cli, stage: Stage) -> None:
    """mini-swe-agent was repeating its call after four minutes, while a refusal had the status 403 in OpenAI's shape."""
    with Heard("has spent its budget") as refused:
        played = stage.play(cli, cli.steps(stage.workdir(cli, "budget")), "budget", budget={"max_calls": 1})
    assert played.ended.exit_code is not None, str(played.ended)
    assert len(played.calls) == len(played.generations) == 1
    assert 1 <= len(refused.said) <= MOST_REFUSALS
    assert [(row["finish_reason"], row["truncated"]) for row in played.rows] == [("budget", True)]
