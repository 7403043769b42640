"""What the commands talk to: a service with tasks and one engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from cli.rollout_service import KNOWN, add_rollouts
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with (
        ScriptedEngine() as engine,
        RunningService(engine.url, redis_server.url, adding=[partial(add_rollouts, KNOWN)], engine_api="token") as running,
    ):
        yield running
