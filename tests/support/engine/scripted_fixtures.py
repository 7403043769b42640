"""A scripted engine with a service on each engine path, for one module of tests.

Every module sees the fixtures here through conftest.py. One whose services need settings names them in SETTINGS; one that needs
another engine or other services has a fixture `running` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

Running = tuple[ScriptedEngine, dict[str, RunningService]]


@contextmanager
def both_paths(redis_server: RedisServer, *, max_model_len: int = 8192, **settings: Any) -> Iterator[Running]:
    """The engine, and services by the path they take to it (token or chat) with these settings, on an empty Redis."""
    redis_server.flushall()
    with (
        ScriptedEngine("qwen3", max_model_len=max_model_len) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", **settings) as token,
        RunningService(engine.url, redis_server.url, engine_api="chat", **settings) as chat,
    ):
        yield engine, {"token": token, "chat": chat}


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Running]:
    with both_paths(redis_server, **getattr(request.module, "SETTINGS", {})) as made:
        yield made


@pytest.fixture
def engine(running: Running) -> ScriptedEngine:
    return running[0].reset()


@pytest.fixture(params=["token", "chat"])
def service(request: pytest.FixtureRequest, running: Running) -> RunningService:
    """Every test that takes it runs once per path."""
    return running[1][request.param]


@pytest.fixture
def token_service(running: Running) -> RunningService:
    return running[1]["token"]


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    """Two, without a service."""
    with ScriptedEngine() as first, ScriptedEngine() as second:
        yield [first, second]


# For tests that need a service of their own: a module imports these, and they take the place of the shared ones.


@pytest.fixture(name="engine")
def fresh_engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as engine:
        yield engine


@pytest.fixture(name="service")
def fresh_service(redis_server: RedisServer, engine: ScriptedEngine) -> Iterator[RunningService]:
    redis_server.flushall()
    with RunningService(engine.url, redis_server.url, engine_api="token") as service:
        yield service
