"""Five hundred harnesses at once on one process, each with a stream of its own: none hears another, all is recorded, and the memory
stays where it was. Run with `-s` to see the figures.

The engine begins to speak when the last of a wave has asked, so that all replies are under way together. Every piece of a reply
carries the marker of its session.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.engine.scripted_engine import Generation, Reply, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.verbatim_process import ADMIN, Serving

SESSIONS = 500
DELETED = range(0, SESSIONS, 25)
PHRASES = 2
SECONDS_PER_TOKEN = 0.05
DESCRIPTORS = 4096
USUAL_DESCRIPTORS = 1024
"""What a shell gives to the processes it starts; two for every stream is not in it."""
STREAM_BYTES = 300_000
"""The most that one stream in flight may add to the service's memory."""
CALL_BYTES = 50_000
"""The most that one more call may leave there: its session's tree is kept for the next one."""
MARKER = re.compile(r"marker-\d+")


@dataclass
class Harness:
    """One session; `said` is its conversation, `heard` one entry per stream."""

    number: int
    session_id: str
    url: str
    key: str
    said: list[dict[str, Any]] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)

    @property
    def marker(self) -> str:
        return f"marker-{self.number}"


@dataclass
class Heard:
    text: str = ""
    call_id: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False


class Choir:
    """What the engine says: nothing until `size` requests have come, then everybody's words, a token at a time. Sessions that are
    to be deleted are held back in the middle of their second reply until `deleted` is set."""

    def __init__(self, engine: ScriptedEngine, size: int) -> None:
        self.deleted = threading.Event()
        self._engine = engine
        self._size = size
        self._asked = 0
        engine.script = self._speak

    def _speak(self, generation: Generation, index: int) -> Reply:
        # Runs in the engine's own loop, before the request waits to be admitted.
        self._asked += 1
        admitting = self._engine.sampler.admitting
        admitting.clear() if self._asked % self._size else admitting.set()
        marker = MARKER.findall(generation.prompt)[-1]
        said = Say(text_of(marker), seconds_per_token=SECONDS_PER_TOKEN)
        if self._asked <= self._size or int(marker.partition("-")[2]) not in DELETED:
            return said
        return replace(said, gate=self.deleted, gate_after=len(self._engine.family.encode(said.text)) * 2 // 3)


def text_of(marker: str) -> str:
    return " ".join(f"{marker} says {number}" for number in range(PHRASES))


@contextmanager
def descriptors(soft: int) -> Iterator[None]:
    """The limit on open files for processes started inside; afterwards it is what this test itself needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= DESCRIPTORS, f"{DESCRIPTORS} open files are needed here, {hard} are allowed"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3", updatable=False) as engine:
        yield engine


@pytest.fixture
def choir(engine: ScriptedEngine) -> Choir:
    return Choir(engine, SESSIONS)


@pytest.fixture
def service(engine: ScriptedEngine, redis_server: RedisServer, tmp_path: Path) -> Iterator[Serving]:
    flags = ("--engine", engine.url, "--engine-api", "token", "--redis", redis_server.url, "--log-level", "warning")
    with descriptors(USUAL_DESCRIPTORS):
        serving = Serving(*flags, data_dir=tmp_path)
    with serving:
        yield serving


@pytest.mark.case(52)
async def test_five_hundred_streams_at_once_are_kept_apart_and_recorded_in_bounded_memory(
    engine: ScriptedEngine, choir: Choir, service: Serving, redis_server: RedisServer
) -> None:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        harnesses = [await opened(http, service.url, number) for number in range(SESSIONS)]
        idle = memory(service.pid)
        began = time.monotonic()
        first = await peak_during(service.pid, wave(http, harnesses))
        second, deletions = await asyncio.gather(
            peak_during(service.pid, wave(http, harnesses)), delete_in_mid_stream(http, service.url, harnesses, choir)
        )
        seconds, after = time.monotonic() - began, memory(service.pid)
        report(idle, first, second, after, seconds)
        assert deletions == [204] * len(DELETED)
        kept = [harness for harness in harnesses if harness.number not in DELETED]
        for harness in kept:
            assert_heard_itself(harness)
            await assert_recorded(http, service.url, harness, engine)
    for number in DELETED:
        assert_gone(harnesses[number], engine, redis_server)
    assert "Traceback" not in service.stderr, service.stderr[-4000:]
    assert max(first, second) - idle < SESSIONS * STREAM_BYTES
    assert second - first < SESSIONS * CALL_BYTES


async def opened(http: aiohttp.ClientSession, url: str, number: int) -> Harness:
    async with http.post(f"{url}/sessions", json={}, headers={"Authorization": f"Bearer {ADMIN}"}) as answer:
        created = await answer.json()
    harness = Harness(number, created["session_id"], created["base_urls"]["openai"], created["api_key"])
    harness.said.append({"role": "user", "content": f"You are {harness.marker}. Speak."})
    return harness


async def wave(http: aiohttp.ClientSession, harnesses: list[Harness]) -> None:
    """Every harness asks once and listens to the end."""
    await asyncio.gather(*(listen(http, harness) for harness in harnesses))


async def listen(http: aiohttp.ClientSession, harness: Harness) -> None:
    heard = Heard()
    harness.heard.append(heard)
    body = {"model": "policy", "stream": True, "messages": harness.said}
    headers = {"Authorization": f"Bearer {harness.key}"}
    async with http.post(f"{harness.url}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: "):
                take(heard, line[6:].strip())
    harness.said.append({"role": "assistant", "content": heard.text})
    harness.said.append({"role": "user", "content": f"You are {harness.marker}. Go on."})


def take(heard: Heard, data: bytes) -> None:
    if data == b"[DONE]":
        heard.done = True
        return
    event = json.loads(data)
    heard.error = event.get("error", heard.error)
    for choice in event.get("choices", ()):
        heard.call_id = event["id"].removeprefix("chatcmpl-")
        heard.text += choice["delta"].get("content") or ""
        heard.finish_reason = choice["finish_reason"] or heard.finish_reason


async def delete_in_mid_stream(http: aiohttp.ClientSession, url: str, harnesses: list[Harness], choir: Choir) -> list[int]:
    """The statuses of the deletions of some sessions, once all have been heard to speak in the second wave."""
    while not all(len(harness.heard) == 2 and harness.heard[1].text for harness in harnesses):
        await asyncio.sleep(0.05)

    async def delete(harness: Harness) -> int:
        assert harness.heard[1].finish_reason is None
        path, headers = f"{url}/sessions/{harness.session_id}", {"Authorization": f"Bearer {ADMIN}"}
        async with http.delete(path, headers=headers) as answer:
            return answer.status

    try:
        return list(await asyncio.gather(*(delete(harnesses[number]) for number in DELETED)))
    finally:
        choir.deleted.set()


def assert_heard_itself(harness: Harness) -> None:
    for heard in harness.heard:
        assert heard.error is None
        assert set(MARKER.findall(heard.text)) == {harness.marker}
        assert heard.text == text_of(harness.marker)
        assert heard.finish_reason == "stop" and heard.done


async def assert_recorded(http: aiohttp.ClientSession, url: str, harness: Harness, engine: ScriptedEngine) -> None:
    path, headers = f"{url}/sessions/{harness.session_id}/calls", {"Authorization": f"Bearer {ADMIN}"}
    async with http.get(path, headers=headers) as answer:
        calls = (await answer.json())["calls"]
    assert [call["call_id"] for call in calls] == [heard.call_id for heard in harness.heard]
    assert [call["parent_id"] for call in calls] == [None, calls[0]["call_id"]]
    for call in calls:
        assert call["status"] == "finished"
        assert call["reply"]["content"] == text_of(harness.marker)
        assert engine.family.decode(call["completion_ids"], skip_special=True) == text_of(harness.marker)
        assert set(MARKER.findall(engine.family.decode(call["prompt_ids"]))) == {harness.marker}
    assert calls[1]["branch_reason"] is None


def assert_gone(harness: Harness, engine: ScriptedEngine, redis_server: RedisServer) -> None:
    """A deleted session: its stream came to an end that is none of the model's, its engine stopped, and no key is left."""
    first, second = harness.heard
    assert first.text == text_of(harness.marker)
    assert second.text == text_of(harness.marker)[: len(second.text)]
    assert second.error is not None or second.finish_reason == "length"
    assert not [key for key in redis_server.all_keys() if harness.session_id.encode() in key]
    mine = [made for made in engine.generations if MARKER.findall(made.prompt)[-1] == harness.marker]
    assert len(mine) == 2 and (mine[1].aborted or mine[1].disconnected)


async def peak_during(pid: int, work: Any) -> int:
    """The highest memory of the process, in bytes, while `work` was done."""
    task = asyncio.create_task(work)
    highest = memory(pid)
    while not task.done():
        await asyncio.sleep(0.2)
        highest = max(highest, memory(pid))
    await task
    return highest


def memory(pid: int) -> int:
    """Resident bytes."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def report(idle: int, first: int, second: int, after: int, seconds: float) -> None:
    mib = [round(size / 2**20, 1) for size in (idle, first, second, after)]
    per_stream = (max(first, second) - idle) / SESSIONS / 1024
    print(  # noqa: T201
        f"\n{SESSIONS} streams twice in {seconds:.1f} s; memory of the service in MiB: {mib[0]} idle, {mib[1]} and {mib[2]} at most, "
        f"{mib[3]} afterwards; {per_stream:.0f} KiB per stream"
    )
