"""The fixture of tests of rollouts: a service before the test's engine, and what they do with tasks there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.store.connection import StoreConnection
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.runtimes.rollout_nodes import World
from tests.support.service.running_service import RunningService


@pytest.fixture
async def world(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    with RunningService(engine.url, redis_url, engine_api="token") as service:
        connection = StoreConnection(redis_url)
        try:
            yield World(service, redis_url, connection, tmp_path)
        finally:
            await connection.close()
