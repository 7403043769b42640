"""Nodes as tests need them: in this process, over a real service, a real Redis and local runtimes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contract.attempts import ENDED, AttemptId, FailureRecord, RolloutState
from contract.client import AsyncServiceClient
from contract.tasks import Budgets, EvaluatorSpec, HarnessSpec, RuntimeSpec, Task
from proxy.store.connection import StoreConnection
from proxy.store.tasks import keys
from proxy.store.tasks.tasks import TaskStore
from rollout.attempts import node_prefix
from rollout.attempts_client import AttemptsClient
from rollout.harnesses.catalogue import find_definition
from rollout.judge import Judge
from rollout.logs import AttemptLogs
from rollout.node import NodeSettings, RolloutNode
from rollout.runtimes.base import ProxyAddress, Runtime, RuntimeKind
from rollout.runtimes.local.runtime import LocalKind
from rollout.runtimes.settings import SYSTEM_PATH, RuntimeSettings
from rollout.stages import Capacity, Slots, Stages
from rollout.steps import HarnessRun, NodeContext
from tests.support.service.rollout_service import serving_tasks
from tests.support.service.running_service import NODE, RunningService

SECONDS = 120.0
"""What anything here may take that is to happen."""
ASK = f"""{sys.executable} -S - <<'PYTHON'
import http.client, json, os, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
body = json.dumps({{"model": "policy", "messages": [{{"role": "user", "content": "hello"}}]}}).encode()
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
connection = http.client.HTTPConnection(url.netloc)
connection.request("POST", url.path + "/chat/completions", body, headers)
answer = connection.getresponse()
assert answer.status == 200, answer.status
reply = json.load(answer)["choices"][0]["message"]["content"]
open("said.txt", "w").write(reply)
PYTHON
"""
"""A harness: one question to the model, whose answer is left in said.txt."""


def unsandboxed() -> RuntimeSpec:
    return RuntimeSpec(network="full", options={"sandbox": "none"}, memory_mb=256, cpus=0.1)


def a_task(task_id: str = "t", instruction: str = ASK, **fields: Any) -> Task:
    """Asks the model once and is scored by what it said: 1 where that is `hello world`."""
    scored = EvaluatorSpec("command", {"command": "grep -q 'hello world' said.txt"}, fresh_runtime=False)
    given = {"evaluator": scored, "runtime": unsandboxed(), "budgets": Budgets(agent=60, total=120), **fields}
    return Task(task_id=task_id, instruction=instruction, harness=HarnessSpec("shell"), **given)


def failure_of(state: RolloutState) -> FailureRecord:
    assert state.verdict.failure is not None, state
    return state.verdict.failure


def reward_of(state: RolloutState) -> float | None:
    assert state.verdict is not None, state
    return state.verdict.reward


async def install_what_lacks(runtime: Runtime, folder: Path) -> None:
    """Install a harness `lacking` that the runtime does not have and that would have to be downloaded; its logs go to the folder."""
    definition = {"description": "lacks", "dialect": "chat", "argv": ["no-such-agent"], "install": ["fetch no-such-agent"]}
    task = replace(a_task(), harness=HarnessSpec("lacking", definition))
    await HarnessRun(find_definition(task.harness), task, runtime, AttemptLogs("n", folder, AttemptId("t", 0, 1))).install()


_SILENT = """
for _, queue in ipairs(redis.call('SMEMBERS', ARGV[1] .. ':queues')) do
  local stream = ARGV[1] .. ':q:' .. queue
  for _, taken in ipairs(redis.call('XPENDING', stream, 'nodes', '-', '+', 100)) do
    redis.call('XCLAIM', stream, 'nodes', taken[2], 0, taken[1], 'IDLE', 3600000, 'JUSTID')
  end
end
"""


class WatchedNode(RolloutNode):
    @property
    def busy(self) -> Mapping[str, int]:
        """Rollouts by stage, of those there are."""
        return {stage: count for stage, count in self._parts.stages.busy.items() if self._courses}

    async def vanish(self) -> None:
        """Gives no more sign of life and takes nothing more, as a process that hangs; what it has begun goes on. On return nothing that
        it had asked the store for is under way."""
        self._beating.cancel()
        self._taking.cancel()
        await asyncio.wait([self._beating, self._taking])


def key_of(node: str) -> str:
    """The secret to which the name of a test's node belongs."""
    return f"the-key-of-node-{node}"


@dataclass
class World:
    """A service, its Redis, and what tests do with tasks there."""

    service: RunningService
    redis_url: str
    connection: StoreConnection
    folder: Path
    tasks: TaskStore = field(init=False)

    def __post_init__(self) -> None:
        self.tasks = TaskStore(self.connection)

    async def submit(self, task: Task) -> Task:
        await self.tasks.submit(task, task.task_id.encode(), 1.0)
        return task

    async def let_leases_run_out(self) -> None:
        """Makes every rollout on a node look as if the node had been silent for an hour."""
        await self.connection.execute("EVAL", _SILENT, 0, keys.BASE, key=keys.BASE)

    async def until(self, happened: Callable[[], Any], what: str) -> None:
        """`happened` may be a coroutine function."""
        async with asyncio.timeout(SECONDS):
            while True:
                found = happened()
                if await found if asyncio.iscoroutine(found) else found:
                    return
                await asyncio.sleep(0.05)
        raise AssertionError(what)

    async def ended(self, task: Task) -> list[RolloutState]:
        """The task's rollouts, once all have ended."""

        async def all_ended() -> bool:
            return all(state.status in ENDED for state in await self.tasks.load_rollouts(task.task_id))

        await self.until(all_ended, "every rollout has ended")
        return await self.tasks.load_rollouts(task.task_id)

    async def run(self, task: Task, **of_node: Any) -> list[RolloutState]:
        """Submit the task to a node of its own; its rollouts, once all have ended."""
        await self.submit(task)
        async with self.node(**of_node):
            return await self.ended(task)

    @asynccontextmanager
    async def node(
        self,
        name: str = "n",
        *,
        slots: Slots | None = None,
        labels: Mapping[str, str] | None = None,
        kinds: Mapping[str, RuntimeKind] | None = None,
        **settings: Any,
    ) -> AsyncIterator[WatchedNode]:
        """A node that takes rollouts as long as the block lasts; then it is drained, at once. `kinds` of runtimes beside the local one."""
        given = NodeSettings(**{"labels": labels or {}, "cpus": 64.0, "memory_mb": 1 << 20, "lease_seconds": 30.0, **settings})
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(AsyncServiceClient(self.service.url, NODE))
            attempts = AttemptsClient(http, name, key_of(name))
            kind = LocalKind(RuntimeSettings(local_dir=self.folder / "runtimes", local_path=SYSTEM_PATH))
            parts = NodeContext(
                name=name,
                prefix=node_prefix(name, self.service.url),
                url=self.service.url,
                proxy=ProxyAddress("127.0.0.1", urlsplit(self.service.url).port or 0),
                attempts=attempts,
                judge=Judge(attempts, self.service.url),
                stages=Stages(slots or Slots(), Capacity(given.cpus, given.memory_mb)),
                kinds={"local": kind, **(kinds or {})},
                logs=self.folder / "logs",
            )
            node = WatchedNode(parts, given)
            running = asyncio.create_task(node.run())
            try:
                yield node
            finally:
                node.drain()
                node.drain()
                await asyncio.wait_for(running, SECONDS)


@asynccontextmanager
async def serving_world(redis_url: str, engines: str | list[str], folder: Path, **settings: Any) -> AsyncIterator[World]:
    """A service of its own, asked by token."""
    with serving_tasks(redis_url, engines, engine_api="token", **settings) as service:
        connection = StoreConnection(redis_url)
        try:
            yield World(service, redis_url, connection, folder)
        finally:
            await connection.close()
