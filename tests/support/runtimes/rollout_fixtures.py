"""The fixture of tests of rollouts: a service before the test's engine, and what they do with tasks there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.runtimes.rollout_nodes import World, serving_world


@pytest.fixture
async def world(
    engine: ScriptedEngine, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    """Its nodes try again what failed ten times as often as they would. Its service has had its store for long: it takes a silent node for
    lost at once, and leaves what it had to the other nodes."""
    monkeypatch.setattr("rollout.node.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("proxy.tasks.takes.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("proxy.tasks.takes.Takes.may_recover", lambda self, seconds: True)
    monkeypatch.setattr("proxy.tasks.sweeper.LOST_NODE_SECONDS", 1e6)
    monkeypatch.setattr("rollout.steps.RETRY_SECONDS", 0.1)
    async with serving_world(redis_url, engine.url, tmp_path) as world:
        yield world
