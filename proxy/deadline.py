"""Deadline: `async with Deadline(seconds):` as `asyncio.timeout`, in a third of its instructions: every call runs under several.

After so many seconds the task is cancelled where it waits, and the block raises TimeoutError. A cancellation by somebody else
stays one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadline:
    """`seconds` 0 or None: never."""

    __slots__ = ("_cancelling", "_over", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if self._seconds:
            task = asyncio.current_task()
            assert task is not None, "a deadline is a task's"
            self._task, self._cancelling = task, task.cancelling()
            self._timer = task.get_loop().call_later(self._seconds, self._end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            if self._over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _end(self) -> None:
        self._over = True
        self._task.cancel()
