"""What the sweep of tasks does where the store is away, and where the service takes nothing of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.api import closing
from proxy.errors import Backpressure, NotFound, RequestError, StoreUnavailable
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.tasks.tasks import TaskStore
from proxy.store.tasks.work import WorkStore
from proxy.tasks import members
from proxy.tasks.metrics import RolloutNumbers
from proxy.tasks.sweeper import Callbacks, RolloutSettings, Sweeper
from tests.support.runtimes.rollout_stores import WELL, Stores

SECONDS = 60.0
NOTHING: Any = None
"""The services of a process that the sweep does not get as far as."""
PARTS, ROUNDS = 7, 9
"""Parts of the sweep, each of which sends its first command itself."""


@dataclass
class Outages:
    """The connection of a store that is away while `away`."""

    real: StoreConnection
    away: bool = False
    timeout_seconds: float = 10.0
    tried: list[asyncio.Task[Any] | None] = field(default_factory=list)
    """What sent each command since the last change."""

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], **how: bool) -> Any:
        await self._tried()
        return await self.real.run(script, keys, args, **how)

    async def execute(self, *command: Argument, key: str | None = None) -> Any:
        await self._tried()
        return await self.real.execute(*command, key=key)

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


async def test_an_outage_is_said_once_and_the_next_one_again(
    stores: Stores, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.tasks.sweeper.SWEEP_SECONDS", 0.01)
    connection: Any = Outages(stores.connection)
    store = TaskStore(connection)
    callbacks, settings = Callbacks(store, never_post), RolloutSettings()
    sweeper = Sweeper("s", store, WorkStore(connection), NOTHING, callbacks, RolloutNumbers(store), settings)
    sweeping = asyncio.create_task(sweeper.run())
    try:
        with caplog.at_level(logging.WARNING, "proxy.tasks.sweeper"):
            for outages in (1, 2):
                await connection.become(away=True)
                assert [record.message for record in caplog.records] == ["the sweep of tasks waits: Redis is away"] * outages
                await connection.become(away=False)
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])


async def test_a_session_that_the_service_will_never_close_keeps_no_rollout_from_its_end(
    stores: Stores, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node left it at that; a server in its place asked again and again."""

    async def refuse(services: Any, session_id: str, *how: Any) -> None:
        raise RequestError("never")

    monkeypatch.setattr(closing, "close_session", refuse)
    monkeypatch.setattr("proxy.tasks.sweeper.LOST_NODE_SECONDS", 0.001)
    await stores.submit()
    node = stores.node("a")
    taken = await node.must_take()
    await node.work.conclude(taken.attempt, WELL, time.time())
    callbacks, settings = Callbacks(stores.tasks, never_post), RolloutSettings()
    sweeper = Sweeper("s", stores.tasks, stores.node("s").work, NOTHING, callbacks, RolloutNumbers(stores.tasks), settings)
    await asyncio.sleep(0.01)
    assert await sweeper.finish_lost() == 1
    assert (await stores.rollout()).status == "completed"
    assert "session t.0.1 cannot be closed and is left as it is: never" in caplog.text


async def test_a_server_that_may_open_no_session_now_leaves_the_rollout_for_later(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited half a minute for every such rollout, and sessions that it could have closed waited behind them."""
    await stores.submit(num_samples=3)
    node = stores.node("a")
    attempt = (await node.must_take()).attempt
    await node.work.advance(attempt, "running", time.time(), {"session_id": attempt.session_id})
    await stores.tasks.cancel("t", time.time())
    asked = Counter[str]()

    async def close(services: Any, session_id: str, *how: Any) -> None:
        asked[f"close {session_id}"] += 1
        if session_id != "t.0.1":
            raise NotFound("no session")

    async def hold_back(services: Any, body: Any, hung_up: Any) -> tuple[str, str]:
        asked["open"] += 1
        raise Backpressure("trainers are behind")

    monkeypatch.setattr(closing, "close_session", close)
    monkeypatch.setattr(members, "open_new", hold_back)
    callbacks, numbers = Callbacks(stores.tasks, never_post), RolloutNumbers(stores.tasks)
    sweeper = Sweeper("s", stores.tasks, stores.node("s").work, NOTHING, callbacks, numbers, RolloutSettings())
    assert await sweeper.close_ended() == 3
    assert (asked["close t.0.1"], asked["open"]) == (1, 2)
