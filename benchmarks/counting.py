"""What a piece of work costs in counts that do not depend on how fast the machine is.

Bytecode instructions are counted by tracing, one by one: the same program takes the same number of them on every machine with the
same minor version of Python. Work in C is not seen by that; what it holds in memory at once is, and so is what goes to Redis.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import redis

from benchmarks.processes import ROOT

OWN = tuple(f"{ROOT / room}/" for room in ("proxy", "reconstruct"))


class Instructions:
    """Bytecode instructions of this thread while it counts: those of the project's own code, and of everything else.

    `functions`: the project's own that were entered, by file and qualified name. `calls`: how often one was entered or, a coroutine,
    resumed; `file_changes`: how often in another file than the one before."""

    def __init__(self) -> None:
        self.own = 0
        self.library = 0
        self.calls = 0
        self.file_changes = 0
        self.functions: set[tuple[str, str]] = set()
        self._last_file = ""
        self._is_own: dict[str, bool] = {}
        # Bound once: a method is made anew whenever it is asked for.
        self._tracers = (self._count_library, self._count_own)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        name = frame.f_code.co_filename
        own = self._is_own.get(name)
        if own is None:
            own = self._is_own[name] = name.startswith(OWN)
        if own:
            self.functions.add((name, frame.f_code.co_qualname))
            self.calls += 1
            if name != self._last_file:
                self.file_changes += 1
                self._last_file = name
        return self._tracers[own]

    @property
    def files(self) -> set[str]:
        """The project's own files that were entered."""
        return {file for file, _ in self.functions}

    def _count_own(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.own += 1
        return self._tracers[True]

    def _count_library(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.library += 1
        return self._tracers[False]

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)


class Peak:
    """`bytes`: how much more memory was held at the worst moment than before, by all that Python allocates for."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            yield
        finally:
            self.bytes = tracemalloc.get_traced_memory()[1] - before
            tracemalloc.stop()
            gc.enable()


@dataclass(frozen=True, slots=True)
class RedisTraffic:
    """`reads`: how often the server read from a connection, which is once per round trip of small commands."""

    reads: int
    bytes_in: int
    bytes_out: int

    def __sub__(self, other: RedisTraffic) -> RedisTraffic:
        return RedisTraffic(self.reads - other.reads, self.bytes_in - other.bytes_in, self.bytes_out - other.bytes_out)


class RedisMeter:
    """What a redis-server was asked and answered, this meter's own questions left out."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port, single_connection_client=True, protocol=2)
        self._before = self._own = RedisTraffic(0, 0, 0)

    def start(self) -> None:
        first = self._told()
        self._before = self._told()
        self._own = self._before - first

    def taken(self) -> RedisTraffic:
        """Since `start`."""
        return self._told() - self._before - self._own

    def close(self) -> None:
        self._client.close()

    def _told(self) -> RedisTraffic:
        stats = self._client.info("stats")
        return RedisTraffic(stats["total_reads_processed"], stats["total_net_input_bytes"], stats["total_net_output_bytes"])
