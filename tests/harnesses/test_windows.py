"""Conversations that outgrow the model's window: an agent that is told it sums up its history in time, goes on, and ends well.

Each agent reads long files, one after the other, more than the window holds; then it does its task as in a plain run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.harnesses import test_claude_code, test_codex, test_opencode, test_pi, test_qwen_code
from tests.harnesses.agent_run import Cli
from tests.harnesses.conftest import KEEPALIVE_SECONDS
from tests.harnesses.player import Step
from tests.harnesses.scratch import TASK
from tests.harnesses.stage import Played, Stage
from tests.harnesses.test_more_agents import AGENTS
from tests.harnesses.truths import check_done, check_truths
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.template_families import Family
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

SUMMARY = f"<summary>I was asked: {TASK} So far I have read a lot.</summary>"
WITHOUT_TOOLS = r"\A(?!.*<tools>)"
"""The prompt of a call that offers none."""
LINES = 1200
WORDS = ("sunny", "world", "value", "number", "says", "weather", "today", "user", "call", "tool", "read")
"""A token each. The lines of a file have one of them."""
SMALL = 52_000
"""The first prompts of most have 3,000 to 25,000 tokens."""


@dataclass(frozen=True)
class Outgrown:
    """`reads` files fill the window; `compaction` is a pattern of the prompt that asks for a summary."""

    cli: Cli
    window: int
    reads: int
    compaction: str = WITHOUT_TOOLS
    after: Sequence[Step] = ()
    """What it asks for when it has done its task."""


MORE = {cli.harness: cli for cli in reversed(AGENTS)}
OUTGROWN = [
    # It shows its model no more than 3,000 tokens of what a command prints.
    Outgrown(test_codex.CLI, SMALL, 11, "CONTEXT CHECKPOINT COMPACTION"),
    Outgrown(test_opencode.CLI, SMALL, 4),
    Outgrown(test_pi.CLI, SMALL, 5),
    Outgrown(MORE["droid"], SMALL, 4),
    # Once it has summed up, it takes the end of the work for a pause.
    Outgrown(MORE["continue"], SMALL, 4, "Please provide a concise summary of our conversation so far", [Step("It is done.")]),
    # It shows its model 3,000 tokens of a file.
    Outgrown(MORE["cline"], 24_000, 7),
    Outgrown(MORE["gptme"], SMALL, 3, "Context budget has been reached"),
    # In a smaller window it sums up between reading a file and editing it, and then refuses the edit.
    Outgrown(test_qwen_code.CLI, 84_000, 6, "<state_snapshot>"),
    # With more reads it would sum up once too often in so few turns, and end.
    Outgrown(test_claude_code.CLI, 90_000, 5, "Your task is to create a detailed summary of the conversation"),
]


@pytest.fixture(scope="module")
def small_stage(
    request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    with (
        ScriptedEngine("qwen3", max_model_len=request.param) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", keepalive_seconds=KEEPALIVE_SECONDS) as service,
    ):
        yield Stage(engine, service, tmp_path_factory.mktemp(f"window-{request.param}"))


@pytest.mark.parametrize(
    ("small_stage", "outgrown"),
    [(each.window, each) for each in OUTGROWN],
    ids=[each.cli.harness for each in OUTGROWN],
    indirect=["small_stage"],
)
def test_a_conversation_that_outgrows_the_window_is_summed_up_and_completed(small_stage: Stage, outgrown: Outgrown) -> None:
    cli = replace(outgrown.cli, side={outgrown.compaction: SUMMARY})
    workdir, words = small_stage.workdir(cli, "outgrown"), WORDS[: outgrown.reads]
    assert cli.tools is not None
    reads = [Step("", f"I read of {word}.", [cli.tools.read(workdir / f"{word}.txt")]) for word in words]

    def write_long_files(workdir: Path) -> None:
        for word in words:
            (workdir / f"{word}.txt").write_text(f"{line(word)}\n" * LINES, encoding="utf-8")

    played = small_stage.play(cli, [*reads, *cli.steps(workdir), *outgrown.after], "outgrown", prepare=write_long_files)
    check_done(played)
    check_truths(played)
    assert count_read(played, small_stage.family) > outgrown.window > max(len(call["prompt_ids"]) for call in played.calls)
    summaries = [call for call in played.calls if call["role"] == "compaction"]
    assert summaries and {call["role_source"] for call in summaries} == {"declared"}
    assert {item["reason"] for item in played.accounting["quarantined"]} == {"role_compaction"}
    # What follows a summary is a new row, and everything that was sampled for the work is trained.
    assert len(played.main_rows) == 1 + len(played.branches) >= 1 + len(summaries)
    sampled = sum(len(call["completion_ids"]) for call in played.main_calls)
    assert sum(sum(row["loss_mask"]) for row in played.main_rows) == sampled


def line(word: str) -> str:
    return f"the weather in Paris is {word} today"


def count_read(played: Played, family: Family) -> int:
    """At least so many tokens would the last prompt have if nothing had been summed up: the first one, and the lines of each file that
    the agent showed its model."""
    shown = [(max(each.prompt.count(line(word)) for each in played.generations), word) for word in WORDS]
    return len(played.main_calls[0]["prompt_ids"]) + sum(count * len(family.encode(f"{line(word)}\n")) for count, word in shown)
