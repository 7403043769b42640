"""`verbatim` with a watch on its event loop: `python -m benchmarks.watched_service FILE serve ...`.

A callback asks every few milliseconds when it last ran. If a turn of the loop took longer than `SLOW_SECONDS`, by the clock or in CPU
time of the loop's thread, a line of JSON goes to FILE: what the turn took, and the stacks of the threads that were at work meanwhile. The
kernel says how long the thread waited for a core; what is left beside that and the CPU time is mostly waiting for Python's lock.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

EVERY_SECONDS = 0.005
SLOW_SECONDS = 0.03
FRAMES = 6
"""Of each stack, the innermost."""
IDLE = ("wait (threading.py", "_worker (thread.py", "select (selectors.py")


@dataclass(slots=True)
class SlowTurn:
    """`at` is when it ended, by time.monotonic, which all processes share. `without_core`: seconds in which the thread could have run and
    no core was free. `collecting`: seconds in the garbage collector."""

    at: float
    seconds: float
    cpu_seconds: float
    without_core: float
    collecting: float
    stacks: list[str] = field(default_factory=list)


class Watch:
    """From its creation, in the loop's thread, until `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, file: TextIO) -> None:
        self._loop = loop
        self._file = file
        self._thread = threading.get_ident()
        self._stacks: list[str] = []
        self._closed = threading.Event()
        self._collecting = 0.0
        self._began_collecting = 0.0
        self._schedule = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._last, self._cpu, self._starved = time.monotonic(), time.thread_time(), self._measure_starved()
        gc.callbacks.append(self._note_collection)
        threading.Thread(target=self._sample, daemon=True).start()
        self._turn()

    def close(self) -> None:
        self._closed.set()
        gc.callbacks.remove(self._note_collection)
        os.close(self._schedule)

    def _turn(self) -> None:
        if self._closed.is_set():
            return
        now, cpu = time.monotonic(), time.thread_time()
        seconds, spent, starved = now - self._last - EVERY_SECONDS, cpu - self._cpu, self._measure_starved()
        if max(seconds, spent) > SLOW_SECONDS:
            slow = SlowTurn(now, seconds, spent, starved - self._starved, self._collecting, self._stacks)
            print(json.dumps(asdict(slow)), file=self._file, flush=True)
        self._stacks, self._collecting = [], 0.0
        self._last, self._cpu, self._starved = time.monotonic(), time.thread_time(), starved
        self._loop.call_later(EVERY_SECONDS, self._turn)

    def _measure_starved(self) -> float:
        return int(os.pread(self._schedule, 100, 0).split()[1]) / 1e9

    def _sample(self) -> None:
        while not self._closed.wait(EVERY_SECONDS):
            if time.monotonic() - self._last > SLOW_SECONDS:
                stacks = self._stacks
                for thread, frame in sys._current_frames().items():
                    stack = " < ".join(_frames(frame))
                    if thread != threading.get_ident() and not stack.startswith(IDLE):
                        stacks.append(f"{'loop' if thread == self._thread else 'beside'}: {stack}")

    def _note_collection(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began_collecting = time.monotonic()
        else:
            self._collecting += time.monotonic() - self._began_collecting


def _frames(frame: FrameType | None) -> Iterator[str]:
    """The innermost, first."""
    left = FRAMES
    while frame is not None and left:
        code = frame.f_code
        yield f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
        frame, left = frame.f_back, left - 1


def main() -> None:
    from cli import main as command
    from cli.serving import server

    file = Path(sys.argv.pop(1)).open("a")  # noqa: SIM115  it is written to until the process ends

    class Server(server.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            Watch(asyncio.get_running_loop(), file)

    server.Server = Server  # type: ignore[misc]
    command.main()


if __name__ == "__main__":
    main()
