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
async def world(
    engine: ScriptedEngine, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    """Its nodes look for work, and try again what failed, ten times as often as they would."""
    monkeypatch.setattr("rollout.node.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("rollout.steps.RETRY_SECONDS", 0.1)
    with RunningService(engine.url, redis_url, engine_api="token") as service:
        connection = StoreConnection(redis_url)
        try:
            yield World(service, redis_url, connection, tmp_path)
        finally:
            await connection.close()
