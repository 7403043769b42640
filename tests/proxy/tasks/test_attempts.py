"""The contract of a node's work, over the store and over HTTP; and what only the way over HTTP can get wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol
from uuid import uuid4

import pytest

from contract.attempts import AttemptId, Failure, FailureRecord, Superseded, TakenRollout, Verdict
from contract.client import AsyncServiceClient
from contract.errors import RequestRefused
from contract.tasks import HarnessSpec, Task, Upload
from proxy.api import closing
from proxy.errors import EngineUnavailable
from proxy.store.connection import StoreConnection
from proxy.store.tasks.tasks import TaskStore
from proxy.tasks import attempts as module
from proxy.tasks import members
from proxy.tasks.takes import Takes
from rollout.attempts_client import AttemptsClient
from tests.support.runtimes.rollout_nodes import key_of
from tests.support.runtimes.rollout_stores import ROOM, WELL, Node, Stores
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import serving_tasks
from tests.support.service.running_service import NODE, RunningService

SECONDS = 60.0
BROKEN = FailureRecord(Failure.NODE_FAILED, "its disk is full")


class Work(Protocol):
    async def take(self, token: str = "", lease_seconds: float = 30.0) -> TakenRollout | None: ...
    async def extend(self, *held: AttemptId) -> list[AttemptId]: ...
    async def report(self, attempt: AttemptId, status: Any) -> None: ...
    async def finish(self, attempt: AttemptId, verdict: Verdict) -> None: ...
    async def put_back(self, attempt: AttemptId) -> None: ...
    async def give_way(self, attempt: AttemptId) -> bool: ...
    async def give_up(self, attempt: AttemptId, failure: FailureRecord, *, spared: bool = False) -> bool: ...


class StoredWork:
    def __init__(self, node: Node) -> None:
        self._node, self._work = node, node.work

    async def take(self, token: str = "", lease_seconds: float = 30.0) -> TakenRollout | None:
        return await self._work.take(self._node.name, ROOM, lease_seconds, time.time(), token)

    async def extend(self, *held: AttemptId) -> list[AttemptId]:
        return await self._node.beat(*held)

    async def report(self, attempt: AttemptId, status: Any) -> None:
        await self._work.advance(attempt, status, time.time(), {})

    async def finish(self, attempt: AttemptId, verdict: Verdict) -> None:
        await self._node.end(attempt, verdict)

    async def put_back(self, attempt: AttemptId) -> None:
        await self._work.put_back(attempt, time.time())

    async def give_way(self, attempt: AttemptId) -> bool:
        return await self._work.give_way(attempt, time.time())

    async def give_up(self, attempt: AttemptId, failure: FailureRecord, *, spared: bool = False) -> bool:
        return await self._work.give_up(attempt, failure, time.time(), retry=True, spared=spared)


class AskedWork(AttemptsClient):
    state: Any = None

    async def take(self, token: str = "", lease_seconds: float = 30.0, wait: float = 0) -> TakenRollout | None:  # type: ignore[override]
        return await super().take(ROOM, lease_seconds, token or uuid4().hex, wait)

    async def extend(self, *held: AttemptId) -> list[AttemptId]:  # type: ignore[override]
        return (await super().extend(self.state, held))[0]


Nodes = Callable[[str], Any]


@pytest.fixture
async def stores(redis_server: RedisServer) -> AsyncIterator[Stores]:
    """Of the service's Redis."""
    redis_server.flushall()
    connection = StoreConnection(redis_server.url)
    yield Stores(connection, TaskStore(connection))
    await connection.close()


@pytest.fixture
def service(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """It has had its store for long, and its sweep waits."""
    monkeypatch.setattr(Takes, "may_recover", lambda self, seconds: True)
    monkeypatch.setattr("proxy.tasks.sweeper.SWEEP_SECONDS", 3600)
    monkeypatch.setattr("proxy.tasks.takes.LOOK_SECONDS", 0.05)
    with serving_tasks(redis_server.url) as running:
        yield running


@pytest.fixture(params=["store", "http"])
async def nodes(request: pytest.FixtureRequest, stores: Stores, service: RunningService) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(AsyncServiceClient(service.url, NODE))

        def asked(name: str) -> AskedWork:
            made = AskedWork(http, name, key_of(name))
            made.state = stores.node(name).state()
            return made

        yield asked if request.param == "http" else lambda name: StoredWork(stores.node(name))


async def must_take(node: Any, **how: Any) -> TakenRollout:
    taken: TakenRollout | None = await node.take(**how)
    assert taken is not None
    return taken


async def test_each_rollout_has_one_node_and_no_other_changes_it(stores: Stores, nodes: Nodes) -> None:
    await stores.submit(num_samples=2)
    a, b = nodes("a"), nodes("b")
    first, second = (await must_take(a)).attempt, (await must_take(b)).attempt
    assert {first.index, second.index} == {0, 1} and await nodes("c").take() is None
    for act in (
        b.report(first, "ready"),
        b.finish(first, WELL),
        b.put_back(first),
        b.give_way(first),
        b.give_up(first, BROKEN),
    ):
        with pytest.raises(Superseded):
            await act
    assert await b.extend(first, second) == [first]
    await a.report(first, "ready")
    await a.finish(first, WELL)
    assert (await stores.rollout(index=first.index)).status == "completed"
    assert (await stores.rollout(index=second.index)).status == "preparing"


async def test_a_repeated_request_gets_the_same_rollout_and_the_next_one_another(stores: Stores, nodes: Nodes) -> None:
    await stores.submit(num_samples=2)
    a = nodes("a")
    first, again, other = [await must_take(a, token=token) for token in ("token-one", "token-one", "token-two")]
    assert first.attempt == again.attempt != other.attempt


async def test_what_is_put_back_uses_up_no_attempt(stores: Stores, nodes: Nodes) -> None:
    await stores.submit(max_attempts=1)
    a, b = nodes("a"), nodes("b")
    first = (await must_take(a)).attempt
    await a.put_back(first)
    second = await must_take(b)
    assert second.attempt.index == first.index and second.state.failures == ()
    with pytest.raises(Superseded):
        await a.report(first, "ready")
    assert await b.extend(second.attempt) == []


async def test_a_failure_uses_up_an_attempt_unless_it_is_spared(stores: Stores, nodes: Nodes) -> None:
    await stores.submit(max_attempts=2)
    a = nodes("a")
    for spared, again in ((True, True), (False, True), (False, False)):
        attempt = (await must_take(a)).attempt
        assert await a.give_up(attempt, BROKEN, spared=spared) is again
    await a.finish(attempt, Verdict("failed", failure=BROKEN))
    assert (await stores.rollout()).status == "failed"


async def test_a_cancelled_rollout_is_taken_from_its_node(stores: Stores, nodes: Nodes) -> None:
    await stores.submit()
    a = nodes("a")
    attempt = (await must_take(a)).attempt
    assert await a.extend(attempt) == []
    await stores.tasks.cancel("t", time.time())
    assert await a.extend(attempt) == [attempt]
    with pytest.raises(Superseded):
        await a.finish(attempt, WELL)


async def test_a_node_that_wakes_late_changes_nothing(stores: Stores, nodes: Nodes) -> None:
    await stores.submit()
    a, b = nodes("a"), nodes("b")
    first = (await must_take(a)).attempt
    await asyncio.sleep(0.01)
    second = (await must_take(b, lease_seconds=0.001)).attempt
    assert (second.attempt, await a.extend(first)) == (2, [first])
    with pytest.raises(Superseded):
        await a.finish(first, WELL)
    await b.finish(second, WELL)
    assert (await stores.rollout()).node == "b"


async def test_a_verdict_that_stands_is_finished_by_another_node(stores: Stores, nodes: Nodes) -> None:
    await stores.submit()
    dead = stores.node("dead")
    attempt = (await dead.must_take()).attempt
    await dead.work.conclude(attempt, WELL, time.time())
    await asyncio.sleep(0.01)
    b = nodes("b")
    taken = await must_take(b, lease_seconds=0.001)
    assert (taken.attempt, taken.resumed, taken.state.verdict) == (attempt, True, WELL)
    await b.finish(attempt, WELL)
    assert (await stores.rollout()).status == "completed"


async def test_a_task_comes_whole_however_large_it_is(stores: Stores, nodes: Nodes) -> None:
    content = bytes(5 << 20)
    await stores.submit(prepare=(Upload("big", content),))
    taken = await must_take(nodes("a"))
    assert taken.task == Task("do it", HarnessSpec("shell"), task_id="t", prepare=(Upload("big", content),))


# Over HTTP alone.


@pytest.fixture
async def http(service: RunningService) -> AsyncIterator[AsyncServiceClient]:
    async with AsyncServiceClient(service.url, NODE) as made:
        yield made


async def test_a_verdict_is_fixed_before_its_session_is_closed(
    stores: Stores, http: AsyncServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service fails between the two; the node asks again, and may have changed its mind."""
    await stores.submit()
    a = AskedWork(http, "a", key_of("a"))
    attempt = (await must_take(a)).attempt
    close, failures = members.close_member, iter([EngineUnavailable("away")])

    async def failing(*args: Any, **how: Any) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        await close(*args, **how)

    monkeypatch.setattr(module, "close_member", failing)
    await a.finish(attempt, WELL)
    await a.finish(attempt, Verdict("completed", reward=0.0))
    state = await stores.rollout()
    assert (state.status, state.verdict) == ("completed", WELL)


async def test_a_session_whose_key_was_lost_with_the_answer_is_replaced(
    stores: Stores, service: RunningService, http: AsyncServiceClient
) -> None:
    await stores.submit()
    a = AskedWork(http, "a", key_of("a"))
    attempt = (await must_take(a)).attempt
    keys = {(await a.open(attempt, (), "")).api_key for _ in range(2)}
    assert len(keys) == 2 and (await stores.rollout()).status == "running"
    (session,) = service.request("GET", "/sessions").json()["sessions"]
    assert (session["session_id"], session["group_size"]) == ("t.0.1", 1)


async def test_a_reward_that_is_refused_leaves_nothing_behind(stores: Stores, http: AsyncServiceClient) -> None:
    await stores.submit()
    a = AskedWork(http, "a", key_of("a"))
    attempt = (await must_take(a)).attempt
    await a.open(attempt, (), "")
    with pytest.raises(RequestRefused):
        await a.finish(attempt, Verdict("completed", reward=1.0, metadata={"more than 64 bits": 2**70}))
    assert (await stores.rollout()).status == "running"
    await a.finish(attempt, WELL)


async def test_a_reward_is_posted_once(
    stores: Stores, service: RunningService, http: AsyncServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old bug: when its verdict was fixed, and again when its session was closed."""
    await stores.submit()
    a = AskedWork(http, "a", key_of("a"))
    attempt = (await must_take(a)).attempt
    await a.open(attempt, (), "")
    post, posted = closing.reward_session, []

    async def noted(services: Any, session_id: str, *reward: Any) -> Any:
        posted.append(session_id)
        return await post(services, session_id, *reward)

    monkeypatch.setattr(closing, "reward_session", noted)
    await a.finish(attempt, Verdict("completed", reward=1.0, feedback="well done"))
    session = service.request("GET", f"/sessions/{attempt.session_id}").json()
    assert (session["reward"], session["reward_metadata"]) == (1.0, {"feedback": "well done"})
    assert posted == [attempt.session_id]


async def test_what_is_handed_to_a_caller_that_hung_up_is_put_back(
    stores: Stores, http: AsyncServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stores.submit(max_attempts=1)
    look, gone = Takes._look, asyncio.Event()

    async def slow(self: Takes, node: str, *args: Any) -> TakenRollout | None:
        taken = await look(self, node, *args)
        while node == "a" and not gone.is_set():
            await asyncio.sleep(0.01)
        # Until the service has read that the connection is closed.
        await asyncio.sleep(0.2 if node == "a" else 0)
        return taken

    monkeypatch.setattr(Takes, "_look", slow)
    asking = asyncio.create_task(AskedWork(http, "a", key_of("a")).take(wait=30))
    async with asyncio.timeout(SECONDS):
        while (await stores.rollout()).node != "a":
            await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])
    gone.set()
    taken = await AskedWork(http, "b", key_of("b")).take(wait=30)
    assert taken is not None and taken.state.failures == ()
