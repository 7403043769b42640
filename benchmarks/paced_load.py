"""Many streams asked for at the same instant, by one process: when each began and ended, and the contender's CPU while all of them flowed.

`python -m benchmarks.paced_load` reads a `Plan` as JSON and prints `Seen`. CPU per token is that of the time from the first text of the
last stream to a few tokens before the first one is over. A contender that is still starting streams by then has no such time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.cores import pinned
from benchmarks.load import Body, CallsFailed, Target
from benchmarks.paced_engine import counted
from benchmarks.processes import ROOT, family_cpu_seconds
from benchmarks.replies import WORD

LEAST_FLOW_SECONDS = 0.5
_SILENT_SECONDS = 300.0
"""After so long the streams that have not ended count as failed: a slow contender is not wrong."""
_LAST_TOKENS = 4
_TAIL_BYTES = 300
"""Kept of what has come, for what two reads share and for the message of a failure."""
_TEXT, _DONE, _END = WORD.strip().encode(), b"[DONE]", b"0\r\n\r\n"


class Plan(msgspec.Struct):
    """`stream_seconds`: from the first token of a reply to its last, at the engine's pace. `pid`: whose CPU counts."""

    url: str
    engine_url: str
    targets: list[tuple[str, str]]
    before: str
    after: str
    first_number: int
    streams: int
    stream_seconds: float
    pace_seconds: float
    pid: int | None


class Seen(msgspec.Struct):
    """Milliseconds from the request, one entry per stream. `flow_*`: of the time in which all streams flowed; 0 if there was none."""

    first_byte_ms: list[float]
    first_text_ms: list[float]
    last_byte_ms: list[float]
    flow_seconds: float
    flow_tokens: int
    flow_cpu_seconds: float
    failed: str = ""


def open_streams(plan: Plan) -> Seen:
    """One wave of streams, asked for by a process on the load's cores. Raises CallsFailed if one of them was not answered to its end."""
    argv = pinned([sys.executable, "-m", "benchmarks.paced_load"], "load")
    ran = subprocess.run(argv, cwd=ROOT, input=msgspec.json.encode(plan), capture_output=True, check=False)
    if ran.returncode:
        raise SystemExit(f"the load generator failed: {ran.stderr.decode()}")
    seen = msgspec.json.decode(ran.stdout, type=Seen)
    if seen.failed:
        raise CallsFailed(seen.failed)
    return seen


@dataclass(frozen=True, slots=True)
class _Snapshot:
    at: float
    tokens: int
    cpu_seconds: float


class _Wave:
    """What all streams share."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._flowing = self._ended = 0
        self._from: _Snapshot | None = None
        self._to: _Snapshot | None = None
        self.first_text_at = 0.0
        self.over = asyncio.Event()

    def flow(self, at: float) -> None:
        """Another stream has its first text."""
        if not self._flowing:
            self.first_text_at = at
            loop = asyncio.get_running_loop()
            loop.call_later(self._plan.stream_seconds - _LAST_TOKENS * self._plan.pace_seconds, self._end_flow)
        self._flowing += 1
        if self._flowing == self._plan.streams:
            self._from = self._look()

    def end(self) -> None:
        """Another stream is over."""
        self._ended += 1
        if self._ended == self._plan.streams:
            self.over.set()

    def flow_figures(self) -> tuple[float, int, float]:
        """Seconds, tokens that the engine sent, and CPU seconds, while all streams flowed."""
        if self._from is None or self._to is None or self._to.at - self._from.at < LEAST_FLOW_SECONDS:
            return 0.0, 0, 0.0
        began, ended = self._from, self._to
        return ended.at - began.at, ended.tokens - began.tokens, ended.cpu_seconds - began.cpu_seconds

    def _end_flow(self) -> None:
        if self._from is not None and self._ended == 0:
            self._to = self._look()

    def _look(self) -> _Snapshot:
        spent = family_cpu_seconds(self._plan.pid) if self._plan.pid is not None else 0.0
        return _Snapshot(time.perf_counter(), counted(self._plan.engine_url).tokens, spent)


class _Stream(asyncio.Protocol):
    def __init__(self, wave: _Wave, content: bytes) -> None:
        self._wave, self._content = wave, content
        self._head, self._tail = b"", b""
        self._began = 0.0
        self.first_byte = self.first_text = self.last_byte = 0.0
        """Seconds from the request."""
        self.whole = False
        self.status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of a class of their own

    def ask(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._content)

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self.status = head.split(b" ", 2)[1]
            if self.status != b"200":
                self._transport.close()  # a refusal leaves the connection open
        if not data:
            return
        now = time.perf_counter()
        self.first_byte = self.first_byte or now - self._began
        # Two reads may share what is looked for.
        joined = self._tail + data
        if not self.first_text and _TEXT in joined:
            self.first_text = now - self._began
            self._wave.flow(now)
        self.whole = self.whole or _DONE in joined
        self._tail = joined[-_TAIL_BYTES:]
        if joined.endswith(_END):
            self.last_byte = now - self._began
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wave.end()

    @property
    def failure(self) -> str:
        if self.status != b"200":
            return f"answered {self.status.decode() or 'nothing'}: {self._head[-300:]!r}"
        return "" if self.whole and self.first_text else f"a stream ended before its end: {self._tail!r}"


async def run(plan: Plan) -> Seen:
    wave, parts, loop = _Wave(plan), urlsplit(plan.url), asyncio.get_running_loop()
    assert parts.hostname is not None and parts.port is not None
    body, streams = Body(plan.before, plan.after), []
    for number in range(plan.streams):
        target = Target(*plan.targets[number % len(plan.targets)])
        content = _request(target, parts.netloc, body.numbered(plan.first_number + number))
        _, stream = await loop.create_connection(partial(_Stream, wave, content), parts.hostname, parts.port)
        streams.append(stream)
    for stream in streams:
        stream.ask()
    try:
        async with asyncio.timeout(_SILENT_SECONDS):
            await wave.over.wait()
    except TimeoutError:
        pass
    failures = [stream.failure for stream in streams if stream.failure]
    return Seen(
        [1000 * stream.first_byte for stream in streams],
        [1000 * stream.first_text for stream in streams],
        [1000 * stream.last_byte for stream in streams],
        *wave.flow_figures(),
        failed=f"{len(failures)} of {len(streams)} streams failed: {failures[0]}" if failures else "",
    )


def _request(target: Target, host: str, content: bytes) -> bytes:
    head = (
        f"POST {target.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {target.key}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(plan))))


if __name__ == "__main__":
    main()
