"""What one caller may take of the service: bytes and seconds of a request body, levels of its JSON, calls at one time and per second.

The head of a request is limited where the connection is (`cli.connection`); nothing of it comes here before it is whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from proxy.deadline import Deadline
from proxy.errors import RequestError, RequestTimeout, TooLarge, TooManyCalls

MAX_DEPTH = 100
"""Levels of nesting that a JSON value may have. Templates, engines and this process recurse into it."""

_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def check_depth(raw: bytes) -> None:
    """Raise RequestError when the JSON text is nested more than `MAX_DEPTH` levels deep.

    Brackets inside strings are looked at only when there is a suspicion: stripping the strings costs more than decoding. Who
    hides depth behind them meets the recursion limit, which is answered in the same way.
    """
    brackets = raw.translate(None, _NOT_BRACKETS)
    if len(brackets) <= MAX_DEPTH or _deepest(brackets) <= MAX_DEPTH:
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_STRUCTURE)
    if _deepest(b"".join(bare.split(b'"')[::2])) > MAX_DEPTH:
        raise RequestError(f"the body is nested too deeply: more than {MAX_DEPTH} levels")


def _deepest(brackets: bytes) -> int:
    steps = _STEPS[np.frombuffer(brackets, np.uint8)]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


async def read_body(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], most_bytes: int, seconds: float) -> bytes:
    """The request body. Raises TooLarge, RequestTimeout when it is not whole after `seconds` (0: any time), and RequestError when
    the caller breaks off."""
    try:
        async with Deadline(seconds):
            return await _read(receive, most_bytes)
    except TimeoutError as error:
        raise RequestTimeout(f"the body was not whole after {seconds:g} seconds") from error


async def _read(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], most_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the request broke off before its body was whole")
        part = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            raise TooLarge(f"the body is larger than {most_bytes} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


class CallSlots:
    """How many calls run at once in this process, in all and per session; 0 of either is any number."""

    def __init__(self, per_process: int, per_session: int) -> None:
        self._per_process = per_process
        self._per_session = per_session
        self._taken: Counter[str] = Counter()
        self._all = 0

    @contextmanager
    def take(self, session_id: str) -> Iterator[None]:
        """A slot for as long as the block runs. Raises TooManyCalls."""
        if self._per_process and self._all >= self._per_process:
            raise TooManyCalls(f"this process has {self._all} calls under way, as many as it takes at once: try again shortly")
        if self._per_session and self._taken[session_id] >= self._per_session:
            raise TooManyCalls(f"session {session_id} has {self._per_session} calls under way, as many as it may have at once")
        self._taken[session_id] += 1
        self._all += 1
        try:
            yield
        finally:
            self._all -= 1
            self._taken[session_id] -= 1
            if not self._taken[session_id]:
                del self._taken[session_id]


class CallRate:
    """How many calls a session may begin per second in this process; 0 is any number.

    A bucket of tokens per session: it fills with `per_second` and holds those of one second, at least one, so that a harness's
    short bursts pass.
    """

    _MOST_BUCKETS = 10_000

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def admit(self, session_id: str) -> None:
        """Count a call. Raises TooManyCalls, which says when the next one may come."""
        if not self._per_second:
            return
        now = self._clock()
        tokens = self._tokens(session_id, now)
        if tokens < 1:
            error = TooManyCalls(f"session {session_id} begins more than {self._per_second:g} calls per second")
            error.retry_after_seconds = (1 - tokens) / self._per_second
            raise error
        self._buckets[session_id] = (tokens - 1, now)
        if len(self._buckets) > self._MOST_BUCKETS:
            self._forget_full(now)

    def _tokens(self, session_id: str, now: float) -> float:
        tokens, at = self._buckets.get(session_id, (self._most, now))
        return min(self._most, tokens + (now - at) * self._per_second)

    def _forget_full(self, now: float) -> None:
        """A full bucket is as good as none."""
        self._buckets = {each: bucket for each, bucket in self._buckets.items() if self._tokens(each, now) < self._most}
