"""A taskset and a harness of verifiers', and a program that runs some of it. verifiers imports it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.bash import BashHarnessConfig

from trainer_client import AsyncSessions
from trainer_client.integrations.verifiers import run

__all__ = ["TwoTurns", "Words"]

AGENT = """
import json, os, sys, urllib.request

assert not [name for name, value in os.environ.items() if value.startswith("vb-")], "another rollout's key"
base, key, model, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
headers = {"content-type": "application/json", "authorization": "Bearer " + key}
for _ in range(2):
    body = json.dumps({"model": model, "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)) as answer:
        messages += [json.load(answer)["choices"][0]["message"], {"role": "user", "content": "Again."}]
"""


class TwoTurnsConfig(HarnessConfig):
    id: str = "verifiers_tasks"


class TwoTurns(Harness[TwoTurnsConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, *_: Any, **__: Any
    ) -> Any:
        _, prompt = self.resolve_prompt(data)
        return await runtime.run([sys.executable, "-c", AGENT, endpoint, secret, ctx.model, str(prompt)], {})


class Unscored(vf.Task[vf.TaskData, vf.State]):
    """Nothing says what it is worth."""


class Word(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float("hello" in str(trace.nodes[-1].message.content))


class Bash(Word):
    """Of verifiers' own agent."""


class NotANumber(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float("nan")


class BreaksDownOnce(Word):
    """Its first attempt, after the agent's work."""

    broken = False

    async def finalize(self, trace: vf.Trace) -> None:
        if not BreaksDownOnce.broken:
            BreaksDownOnce.broken = True
            raise RuntimeError("the task broke down")


class RunsOutOfTime(Word):
    """What an agent's timer makes of its trace."""

    async def finalize(self, trace: vf.Trace) -> None:
        trace.record_timeout("agent")


class Words(vf.Taskset[Word, vf.TasksetConfig]):
    def load(self) -> Iterator[Word]:
        for word in ("hello", "goodbye"):
            yield Word(vf.TaskData(prompt=f"Say {word} twice."))


async def main() -> None:
    """Two rollouts of each kind of task, a group each. Prints what their traces say."""
    config = vf.AgentConfig(
        model="policy",
        harness=TwoTurnsConfig(),
        runtime=vf.SubprocessConfig(),
        retries=vf.RetryConfig(max_retries=1),
    )
    said = []
    async with AsyncSessions(os.environ["VERBATIM_URL"], os.environ["VERBATIM_ADMIN_TOKEN"]) as sessions:
        for kind in (Word, Bash, Unscored, NotANumber, BreaksDownOnce, RunsOutOfTime):
            task = kind(vf.TaskData(prompt="Say hello twice."))
            own = config.model_copy(update={"harness": BashHarnessConfig()}) if kind is Bash else config
            rollouts = (run(own, task, sessions, task_id=kind.__name__, group_id=kind.__name__, group_size=2) for _ in range(2))
            for trace in await asyncio.gather(*rollouts):
                said.append({"task": kind.__name__, "ok": trace.ok, "reward": repr(trace.reward), "turns": trace.num_turns})
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main())
