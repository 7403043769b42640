"""A take, and a heartbeat, while this process parses what is large: they never wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cli import rollout_service
from contract.client import AsyncServiceClient
from proxy.call.door import Parsing
from proxy.store.connection import StoreConnection
from proxy.store.tasks.tasks import TaskStore
from rollout.attempts_client import AttemptsClient
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.runtimes.rollout_nodes import key_of
from tests.support.runtimes.rollout_stores import ROOM, Stores
from tests.support.service.rollout_service import BODY, serving_tasks
from tests.support.service.running_service import NODE, RunningService

SECONDS = 60.0
LARGE = "x" * 2**20


def submit_large(service: RunningService) -> None:
    answer = service.request("POST", "/tasks", json={**BODY, "metadata": {"notes": LARGE}})
    assert answer.status_code == 201, answer.text


def ask_large(service: RunningService) -> None:
    service.session().ask(LARGE)


@pytest.mark.parametrize(
    ("owner", "name", "ask"),
    [(rollout_service, "read_task", submit_large), (Parsing, "_measure", ask_large)],
    ids=["a task", "a call"],
)
async def test_a_take_is_answered_while_a_body_of_a_megabyte_is_parsed(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, ask: Callable[[RunningService], None]
) -> None:
    """Each parse stops in the middle until both are answered. On the event loop it would stop everything."""
    parse, parsing, answered = getattr(owner, name), threading.Event(), threading.Event()

    def stop(*given: Any, **more: Any) -> Any:
        parsing.set()
        answered.wait(SECONDS)
        return parse(*given, **more)

    connection = StoreConnection(redis_url)
    stores = Stores(connection, TaskStore(connection))
    await stores.submit()
    with (
        ScriptedEngine("qwen3", max_model_len=1 << 22) as engine,
        serving_tasks(redis_url, engine.url, engine_api="token") as service,
    ):
        async with AsyncServiceClient(service.url, NODE) as http:
            node = AttemptsClient(http, "a", key_of("a"))
            monkeypatch.setattr(owner, name, stop)
            asking = asyncio.create_task(asyncio.to_thread(ask, service))
            try:
                assert await asyncio.to_thread(parsing.wait, SECONDS)
                async with asyncio.timeout(SECONDS / 2):
                    taken = await node.take(ROOM, 30.0, "a-token-of-it", 0.0)
                    assert taken is not None
                    assert (await node.extend(stores.node("a").state(), [taken.attempt]))[0] == []
                assert not asking.done()
            finally:
                answered.set()
                await asking
    await connection.close()
