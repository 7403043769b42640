"""What a serving process does when it is ready."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from cli.serving.server import COLLECTED_AFTER, COMPUTING_THREADS, SWITCH_SECONDS, Server


@pytest.fixture
def as_before() -> Iterator[None]:
    """The collector and the threads' turns are as they were, afterwards."""
    thresholds, callbacks, seconds = gc.get_threshold(), list(gc.callbacks), sys.getswitchinterval()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.callbacks[:] = callbacks
    sys.setswitchinterval(seconds)


async def application(scope: Any, receive: Any, send: Any) -> None: ...


async def nothing() -> None: ...


@asynccontextmanager
async def started() -> AsyncIterator[list[int]]:
    """A server that serves; how many objects were out of searches when it was ready."""
    told: list[int] = []
    config = uvicorn.Config(application, lifespan="off", log_config=None)
    server = Server(config, nothing, lambda: told.append(gc.get_freeze_count()), lambda: None, None)
    config.load()
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup([listener])
        yield told
        await server.shutdown([listener])


async def test_what_is_there_when_calls_are_served_is_out_of_later_searches_for_cycles(as_before: None) -> None:
    async with started() as told:
        assert told and told[0] > 1000
        assert gc.get_threshold()[0] == COLLECTED_AFTER


async def test_no_search_for_cycles_grows_with_what_is_kept(as_before: None) -> None:
    """The old bug: with a full cache of sessions a search took 280 ms, and every call waited."""
    searched: list[int] = []

    def note(phase: str, search: dict[str, int]) -> None:
        if phase == "start":
            searched.append(sum(len(gc.get_objects(generation)) for generation in range(search["generation"] + 1)))

    async with started():
        gc.callbacks.append(note)
        kept = [[number] for number in range(12 * COLLECTED_AFTER)]
        assert len(kept) == 12 * COLLECTED_AFTER
    assert len(searched) >= 10
    assert max(searched) < 3 * COLLECTED_AFTER, searched


async def test_a_cycle_that_is_left_soon_is_found(as_before: None) -> None:
    class Thing:
        own: Any

    async with started():
        thing = Thing()
        thing.own, left = thing, weakref.ref(thing)
        del thing
        kept = [[number] for number in range(2 * COLLECTED_AFTER)]
        assert kept and left() is None


async def test_a_cycle_of_what_has_lived_long_is_found_in_the_end(as_before: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        own: Any

    monkeypatch.setattr("cli.serving.server.ALL_SEARCHED_SECONDS", 0.05)
    async with started():
        thing = Thing()
        thing.own, left = thing, weakref.ref(thing)
        gc.freeze()
        del thing
        async with asyncio.timeout(60):
            while left() is not None:
                await asyncio.sleep(0.01)


async def test_few_threads_compute_beside_the_loop_and_in_short_turns(as_before: None) -> None:
    """The old bug: six threads kept the loop from Python's lock for 400 ms."""
    names: set[str] = set()

    async with started():
        all_at_work = threading.Barrier(COMPUTING_THREADS)

        def work() -> None:
            all_at_work.wait()
            names.add(threading.current_thread().name)

        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4 * COMPUTING_THREADS)))
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert len(names) == COMPUTING_THREADS
