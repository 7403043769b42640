"""What a task passes on reaches the model: the tool of an MCP server is offered and works, and a skill is told of."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from contract.tasks import McpServer
from rollout.harnesses.catalogue import load
from tests.harnesses.agent_run import Cli
from tests.harnesses.player import Step
from tests.harnesses.stage import Stage

SERVER = McpServer(
    "weather", (sys.executable, str(Path(__file__).with_name("tool_server.py"))), {"WEATHER": 'sunny \\ "dry" 100%'}
)
SKILL = "---\nname: kite-flying\ndescription: How to fly a kite on the beach.\n---\n\nHold the line.\n"


@dataclass(frozen=True)
class Taker:
    """`tool` is what the agent calls the server's tool."""

    harness: str
    tool: str
    before: Sequence[Step] = ()
    """What the model has to do before the tool is offered to it."""
    variables: Mapping[str, str] = field(default_factory=dict)


TAKERS = [
    Taker("codex", "mcp__weather__weather_report"),
    Taker("claude-code", "mcp__weather__weather_report"),
    Taker("gemini-cli", "mcp_weather_weather_report"),
    # It tells of such tools by name, and offers them once they were asked for. It would ask a proxy for addresses of this machine too.
    Taker(
        "qwen-code",
        "mcp__weather__weather_report",
        [Step("I look for it.", "", [("tool_search", {"query": "select:mcp__weather__weather_report"})])],
        dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), ""),
    ),
    Taker("opencode", "weather_weather_report"),
]


@pytest.mark.parametrize("taker", TAKERS, ids=lambda taker: taker.harness)
def test_the_tool_of_a_server_is_offered_to_the_model_and_called_and_a_skill_is_told_of(stage: Stage, taker: Taker) -> None:
    harness = load(taker.harness)
    side = {r"(?i)generate a (short )?title": "Weather"}
    cli = Cli(taker.harness, harness.dialect, lambda workdir: [], change_at=0, side=side, variables=taker.variables)

    def pass_on(home: Path) -> None:
        assert harness.mcp is not None
        config = home / harness.mcp.file
        config.parent.mkdir(parents=True, exist_ok=True)
        text = config.read_text(encoding="utf-8") if config.exists() else ""
        config.write_text(harness.mcp.write(text, [SERVER]), encoding="utf-8")
        skill = home / harness.skills / "kite-flying" / "SKILL.md"
        skill.parent.mkdir(parents=True)
        skill.write_text(SKILL, encoding="utf-8")

    acts = [*taker.before, Step("I ask for it.", "", [(taker.tool, {"place": "Paris"})]), Step("It is sunny.", "Done.")]
    played = stage.play(cli, acts, "passed-on", prompt="What is the weather in Paris?", at_home=pass_on, timeout_seconds=240.0)
    prompts = [each.prompt for each in played.generations if "What is the weather in Paris?" in each.prompt]
    assert len(prompts) == len(acts), str(played.ended)
    first, asked, last = prompts[0], prompts[len(taker.before)], prompts[-1]
    offered = sorted(set(re.findall(r'"name": "([^"]*weather[^"]*)", "description"', asked)))
    assert offered == [taker.tool], str(played.ended)
    assert "kite-flying" in first and "How to fly a kite on the beach." in first
    assert "in Paris" in last and "sunny" in last and "dry" in last, last[-3000:]
    assert played.ended.exit_code == 0, str(played.ended)
    assert played.player.missing == []
