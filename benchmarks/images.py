"""What screenshots cost: bytes kept of each, CPU that one adds to a call, and memory of the service over sessions full of them.

    python -m benchmarks.images [--quick] [--out DIR]

The real service (one process, a real redis-server with its append-only file) over loopback, before a scripted engine that expands images as
vLLM does, over the three routes. CPU is that of the service's process. In the sessions each turn brings one screenshot, and sends the last
ones before it again; of older ones only a note is left, as harnesses that look at screens do it.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import redis

from benchmarks.processes import connection_to, cpu_seconds, redis_server, request, resident_mib, serving
from benchmarks.results import Grid, main, number, progress, rounded, spread
from benchmarks.sessions import recorded
from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine
from tests.support.engine.scripted_images import SEEING

LARGE_SIZE, LARGE_BYTES = (1920, 1080), 1_000_000
SMALL_SIZE, SMALL_BYTES = (480, 320), 50_000
"""Of the sessions; 600 tokens each."""
SHOWN = 3
"""So many screenshots a turn sends, its own included."""


def make_screenshot(number: int, size: tuple[int, int], file_bytes: int) -> bytes:
    """A PNG of about so many bytes: as much noise as they hold, on one colour."""
    from PIL import Image

    rows = file_bytes // (3 * size[0])
    noise = np.random.default_rng(number).integers(0, 256, (rows, size[0], 3), dtype=np.uint8)
    screen = Image.new("RGB", size, "navy")
    screen.paste(Image.fromarray(noise), (0, 0))
    file = io.BytesIO()
    screen.save(file, "PNG", compress_level=1)
    return file.getvalue()


class Harness:
    """A session; `history` are the messages of its one conversation as JSON, a screenshot in every other one."""

    def __init__(self, url: str) -> None:
        created = request(url, "POST", "/sessions", {})
        self.session_id = created["session_id"]
        base_url = created["base_urls"]["openai"]
        self._connection = connection_to(base_url)
        self._path = f"{urlsplit(base_url).path}/chat/completions"
        self._headers = {"authorization": f"Bearer {created['api_key']}", "content-type": "application/json"}
        self.history: list[str] = []
        self.sent_bytes = 0

    def call(self, messages: Sequence[str]) -> str:
        """The reply, as JSON."""
        body = f'{{"model": "policy", "max_tokens": 64, "messages": [{", ".join(messages)}]}}'.encode()
        self.sent_bytes += len(body)
        self._connection.request("POST", self._path, body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return json.dumps(json.loads(content)["choices"][0]["message"])

    def turn(self, message: str) -> None:
        self.history.append(message)
        if len(self.history) > 2 * SHOWN:
            self.history[-1 - 2 * SHOWN] = write_message("An older screenshot was removed.")
        self.history.append(self.call(self.history))

    def close(self) -> None:
        self._connection.close()


def write_message(text: str, screenshot: bytes | None = None) -> str:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if screenshot is not None:
        url = f"data:image/png;base64,{base64.b64encode(screenshot).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return json.dumps({"role": "user", "content": parts})


def run(quick: bool) -> dict[str, Any]:
    calls, sessions, turns = (3, 3, 4) if quick else (20, 50, 40)
    with ExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine(SEEING, max_model_len=1_000_000, most_images=64, default=_reply))
        port = stack.enter_context(redis_server())
        service, url = stack.enter_context(serving(engine.url, port, "--engine-api", "token"))
        bar = stack.enter_context(progress())
        task = bar.add_task("images", total=calls + turns)

        def advance() -> None:
            # The engine remembers what it was sent.
            engine.received.clear()
            engine.generations.clear()
            bar.advance(task)

        added = _measure_calls(url, service.pid, calls, advance)
        return {"added": added, **_measure_sessions(url, service.pid, port, sessions, turns, advance)}


def _reply(generation: Generation, index: int) -> Say:
    return Say(SEEING.speak("I click the button in the middle of the screen."))


def _measure_calls(url: str, pid: int, calls: int, advance: Callable[[], None]) -> dict[str, Any]:
    """CPU milliseconds of calls of one message: without an image, with a new one, with one that the session has had."""
    harness = Harness(url)
    spent: dict[str, list[float]] = {"without": [], "new": [], "again": []}
    size = 0
    for each in range(-1, calls):
        screenshot = make_screenshot(each + 1, LARGE_SIZE, LARGE_BYTES)
        size = len(screenshot)
        for kind, image in (("without", None), ("new", screenshot), ("again", screenshot)):
            message = write_message(f"{kind} {each}", image)
            before = cpu_seconds(pid)
            harness.call([message])
            # In the first calls everything happens for the first time.
            if each >= 0:
                spent[kind].append((cpu_seconds(pid) - before) * 1000)
        if each >= 0:
            advance()
    harness.close()
    request(url, "POST", f"/sessions/{harness.session_id}/close", {"status": "completed"})
    request(url, "DELETE", f"/sessions/{harness.session_id}")
    return {"bytes": size, "pixels": list(LARGE_SIZE), "cpu_ms": {kind: spread(found) for kind, found in spent.items()}}


def _measure_sessions(url: str, pid: int, port: int, sessions: int, turns: int, advance: Callable[[], None]) -> dict[str, Any]:
    """All sessions are open at once and take their turns one after the other."""
    harnesses = [Harness(url) for _ in range(sessions)]
    points = [[0, rounded(resident_mib(pid))]]
    for turn in range(turns):
        for place, harness in enumerate(harnesses):
            screenshot = make_screenshot(turn * sessions + place, SMALL_SIZE, SMALL_BYTES)
            harness.turn(write_message(f"Turn {turn}.", screenshot))
        advance()
        points.append([(turn + 1) * sessions, rounded(resident_mib(pid))])
    for harness in harnesses:
        harness.close()
    kept = [recorded(port, harness.session_id) for harness in harnesses]
    assert all(len(calls) == turns for calls, _ in kept)
    images, image_bytes = _count_images(port)
    assert images == sessions * turns
    count = sessions * turns
    return {
        "sessions": sessions,
        "turns": turns,
        "screenshot_bytes": rounded(statistics.fmean(len(make_screenshot(each, SMALL_SIZE, SMALL_BYTES)) for each in range(5))),
        "sent_bytes_per_turn": rounded(sum(harness.sent_bytes for harness in harnesses) / count),
        "record_bytes_per_turn": rounded(sum(size for _, size in kept) / count),
        "image_bytes_per_turn": rounded(image_bytes / count),
        "resident": points,
    }


def _count_images(port: int) -> tuple[int, int]:
    """How many images the store has, and the bytes of all their keys, by MEMORY USAGE."""
    with redis.Redis(port=port, single_connection_client=True, protocol=2) as client:
        names = list(client.scan_iter(match="vb:{m:*", count=1000))
        size = sum(client.memory_usage(name, samples=0) or 0 for name in names)
        return sum(name.endswith(b":bytes") for name in names), size


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    added = result["added"]
    spent = {kind: found["median"] for kind, found in added["cpu_ms"].items()}
    width, height = added["pixels"]
    kinds = {"without": "no image", "new": "a new screenshot", "again": "one that the session has sent before"}
    calls = tuple((kinds[kind], number(ms), number(ms - spent["without"])) for kind, ms in spent.items())
    title = f"CPU of a call with a screenshot of {added['bytes'] / 1e6:.2g} MB ({width} x {height})"
    columns = ("screenshot", "sent per turn", "kept: the image", "the rest of the call", "beside the image's bytes")
    sizes = [
        result[name] for name in ("screenshot_bytes", "sent_bytes_per_turn", "image_bytes_per_turn", "record_bytes_per_turn")
    ]
    beside = (result["image_bytes_per_turn"] + result["record_bytes_per_turn"]) / result["screenshot_bytes"]
    kept = tuple(number(size) for size in sizes)
    at = f"{result['sessions']} sessions of {result['turns']} screenshots each"
    points = result["resident"]
    chosen = [points[len(points) * quarter // 4] for quarter in range(4)] + [points[-1]]
    memory = tuple((f"{count:,}", number(mib)) for count, mib in chosen)
    return [
        Grid(title, ("call with", "CPU ms", "added ms"), calls),
        Grid(f"Bytes of a screenshot turn, {at}", columns, ((*kept, f"{beside:.2f}x"),)),
        Grid(f"Resident memory of the service, {at}, all open", ("screenshots so far", "MiB"), memory),
    ]


if __name__ == "__main__":
    main("images", __doc__, run, tables, alone=False)
