"""What is long is done beside the event loop: rows and calls of a session, pages and their first compilation, parts of archives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jinja2
import msgpack
import pytest

from contract.sessions import Fork
from proxy.api import archive, calls, closing
from proxy.store.states import SessionInfo
from proxy.ui import pages, rendering, router
from tests import ROOT
from tests.support.service.redis_server import Store
from tests.support.service.running_service import RunningService
from tests.support.service.ui_sessions import imported
from tests.support.sessions.calls import Talk
from tests.support.sessions.recorded_calls import record

FIRST_PAGE = """
import sys
from tests.support.service.running_service import RunningService

with RunningService("http://127.0.0.1:9", sys.argv[1], engine_connect_seconds=0.01) as service:
    before = set(sys.modules)
    assert service.request("GET", "/ui").status_code == 200
    print(*sorted(set(sys.modules) - before))
"""

NO_ENGINE = "http://127.0.0.1:9"
WORK = {
    "/sessions/s/trajectories": ["encode_row", "encode_response"],
    "/sessions/s/calls": ["encode_response"],
    "/ui": ["compile", "render"],
    "/ui/sessions/s": ["compile", "render", "cut_part", "draw_tree", "summarize"],
    "/ui/sessions/s/turns": ["render", "cut_part"],
    "/ui/sessions/s/calls/c1/details": ["render", "describe_call"],
    "/ui/sessions/s/calls/c1/messages/0": ["find_message"],
    "/ui/sessions/s/calls/c1/tokens": ["build_call_tokens"],
    "/ui/login": ["render"],
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """By function, the names of the threads that ran it."""
    found: dict[str, set[str]] = defaultdict(set)

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            found[name].add(threading.current_thread().name)
            return function(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    watch(jinja2.Environment, "compile")
    watch(jinja2.Template, "render")
    for owner, names in (
        (calls, ("encode_row", "encode_response")),
        (archive, ("_check", "decode")),
        (closing, ("presume_delivered",)),
        (pages, ("cut_part", "draw_tree", "summarize", "describe_call")),
        (router, ("find_message", "build_call_tokens")),
    ):
        for name in names:
            watch(owner, name)
    return found


@pytest.fixture
def service(redis_url: str) -> Iterator[RunningService]:
    with RunningService(NO_ENGINE, redis_url, engine_connect_seconds=0.01) as service:
        talk = Talk("s")
        talk.say("c1", [5, 6, 7], [8, 9])
        imported(service, talk, reward=0.25)
        yield service


@pytest.mark.parametrize("path", WORK)
def test_what_is_long_is_done_beside_the_loop(service: RunningService, threads: dict[str, set[str]], path: str) -> None:
    """The old bug: the first page compiled its templates, for 80 ms, and long texts were rendered while every call waited."""
    rendering.templates.cache_clear()
    service.request("GET", path)
    for name in WORK[path]:
        assert threads[name], f"{name} was not needed"
    on_the_loop = {name for name, ran_in in threads.items() if "service" in ran_in}
    assert not on_the_loop


def test_records_of_an_import_are_checked_beside_the_loop(service: RunningService, threads: dict[str, set[str]]) -> None:
    part = msgpack.unpackb(service.request("GET", "/sessions/s/records").content)
    body = {"session": part["session"], "start": 0, "records": part["records"], "last": False}
    answer = service.request("POST", "/sessions/s/records", content=msgpack.packb(body))
    assert answer.status_code == 200, answer.text
    assert threads["_check"] and "service" not in threads["_check"]


def test_what_a_dead_process_answered_is_presumed_beside_the_loop(
    service: RunningService, redis_url: str, threads: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records of the session are read for it."""
    monkeypatch.setattr("proxy.call.peers.DEAD_SECONDS", 0.0)

    async def die_with_an_answer() -> None:
        store = Store.at(redis_url)
        await store.sessions.commit("dead", "c1", {"c1": record("c1", "dead", prompt=[1], sampled=[7])})
        await store.connection.close()

    assert service.request("POST", "/sessions", json={"session_id": "dead"}).status_code == 201
    asyncio.run(die_with_an_answer())
    closed = service.request("POST", "/sessions/dead/close", json={"status": "completed", "reward": 1.0})
    assert closed.status_code == 200, closed.text
    assert threads["presume_delivered"] and "service" not in threads["presume_delivered"]


async def test_the_records_of_a_fork_are_read_for_images_beside_the_loop(threads: dict[str, set[str]]) -> None:
    async def sizes(session_id: str, created_at: float) -> dict[str, int]:
        return {}

    info = SessionInfo("fork", b"", 1.0, replay=Fork("origin", 0.0, 1))
    services: Any = SimpleNamespace(media=SimpleNamespace(sizes=sizes))
    assert await archive.list_images(services, info, [record("c1", "origin", prompt=[1], sampled=[7])]) == set()
    assert threads["decode"] and threading.current_thread().name not in threads["decode"]


def test_the_first_page_imports_nothing(redis_url: str) -> None:
    """The old bug: it imported the backend of Starlette's tasks, which took as long as compiling the page."""
    done = subprocess.run([sys.executable, "-c", FIRST_PAGE, redis_url], cwd=ROOT, check=True, capture_output=True, text=True)
    assert [name for name in done.stdout.split() if not name.startswith("encodings")] == []
