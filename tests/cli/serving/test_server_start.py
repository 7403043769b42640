"""What a serving process does when it is ready."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from cli.serving.server import COLLECTED_AFTER, Server


@pytest.fixture
def collector() -> Iterator[None]:
    """As it was, afterwards."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


async def application(scope: Any, receive: Any, send: Any) -> None: ...


async def nothing() -> None: ...


async def test_what_is_there_when_calls_are_served_is_out_of_later_searches_for_cycles(collector: None) -> None:
    told: list[int] = []
    config = uvicorn.Config(application, lifespan="off", log_config=None)
    server = Server(config, nothing, lambda: told.append(gc.get_freeze_count()), lambda: None, None)
    config.load()
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup([listener])
        await server.shutdown([listener])
    assert told and told[0] > 1000
    assert gc.get_threshold()[0] == COLLECTED_AFTER
