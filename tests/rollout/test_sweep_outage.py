"""What the sweep of tasks does where the store is away, and where the service takes nothing of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from rollout.metrics import RolloutNumbers
from rollout.sessions import Sessions
from rollout.store.base import StoreUnavailable
from rollout.store.keys import Argument, Connection, Script
from rollout.store.tasks import TaskStore
from rollout.store.work import WorkStore
from rollout.sweeper import Callbacks, RolloutSettings, Sweeper
from tests.support.runtimes.rollout_stores import WELL, Stores

SECONDS = 60.0
PARTS, ROUNDS = 7, 9
"""Parts of the sweep, each of which sends its first command itself."""


@dataclass
class Outages:
    """The connection of a store that is away while `away`."""

    real: Connection
    away: bool = False
    timeout_seconds: float = 10.0
    tried: list[asyncio.Task[Any] | None] = field(default_factory=list)
    """What sent each command since the last change."""

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, durable: bool) -> Any:
        return await self._tried() or await self.real.run(script, keys, args, durable=durable)

    async def execute(self, *command: Argument, key: str | None = None) -> Any:
        return await self._tried() or await self.real.execute(*command, key=key)

    async def _tried(self) -> None:
        self.tried.append(asyncio.current_task())
        await asyncio.sleep(0)
        if self.away:
            raise StoreUnavailable("Redis is away")

    async def become(self, away: bool) -> None:
        """Returns when every part has tried a few times since."""
        self.away = away
        self.tried.clear()
        async with asyncio.timeout(SECONDS):
            while not self._often():
                await asyncio.sleep(0.01)

    def _often(self) -> bool:
        return sum(times >= ROUNDS for times in Counter(self.tried).values()) >= PARTS


async def never_post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    raise AssertionError(f"no task here has a callback, and {url} got one")


async def test_an_outage_is_said_once_and_the_next_one_again(stores: Stores, caplog: pytest.LogCaptureFixture) -> None:
    connection = Outages(stores.connection)
    store, sessions = TaskStore(connection), Sessions("http://127.0.0.1:9", "token")
    callbacks, settings = Callbacks(store, never_post), RolloutSettings(task_sweep_seconds=0.01)
    sweeper = Sweeper("s", store, WorkStore(connection), sessions, callbacks, RolloutNumbers(store), settings)
    sweeping = asyncio.create_task(sweeper.run())
    try:
        with caplog.at_level(logging.WARNING, "rollout.sweeper"):
            for outages in (1, 2):
                await connection.become(away=True)
                assert [record.message for record in caplog.records] == ["the sweep of tasks waits: Redis is away"] * outages
                await connection.become(away=False)
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])
        await sessions.close()


async def test_a_session_that_the_service_will_never_close_keeps_no_rollout_from_its_end(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    """A node left it at that; a server in its place asked again and again."""
    await stores.submit()
    node = stores.node("a")
    taken = await node.must_take()
    await node.work.conclude(taken.attempt, WELL, time.time())
    refusing = httpx.MockTransport(lambda request: httpx.Response(422, json={"error": {"message": "never"}}))
    callbacks, settings = Callbacks(stores.tasks, never_post), RolloutSettings(lost_node_seconds=0.001)
    async with Sessions("http://service", "token", transport=refusing) as sessions:
        sweeper = Sweeper("s", stores.tasks, stores.node("s").work, sessions, callbacks, RolloutNumbers(stores.tasks), settings)
        await asyncio.sleep(0.01)
        assert await sweeper.finish_lost() == 1
    assert (await stores.rollout()).status == "completed"
    assert (
        "session t.0.1 cannot be closed and is left as it is: POST http://service/sessions/t.0.1/close: 422: never"
        in caplog.text
    )


async def test_a_server_that_may_open_no_session_now_leaves_the_rollout_for_later(stores: Stores) -> None:
    """It waited half a minute for every such rollout, and sessions that it could have closed waited behind them."""
    await stores.submit(num_samples=3)
    node = stores.node("a")
    attempt = (await node.must_take()).attempt
    await node.work.advance(attempt, "running", time.time(), {"session_id": attempt.session_id})
    await stores.tasks.cancel("t", time.time())
    asked = Counter[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked[request.url.path] += 1
        if request.url.path == "/sessions":
            return httpx.Response(429, headers={"retry-after": "0.1"}, json={"error": {"message": "trainers are behind"}})
        return httpx.Response(200 if "t.0.1" in request.url.path else 404, json={"error": {"message": "no session"}})

    callbacks = Callbacks(stores.tasks, never_post)
    async with Sessions("http://service", "token", transport=httpx.MockTransport(answer)) as sessions:
        numbers = RolloutNumbers(stores.tasks)
        sweeper = Sweeper("s", stores.tasks, stores.node("s").work, sessions, callbacks, numbers, RolloutSettings())
        assert await sweeper.close_ended() == 3
    assert (asked["/sessions/t.0.1/close"], asked["/sessions"]) == (1, 2)
